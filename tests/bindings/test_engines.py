# SPDX-License-Identifier: Apache-2.0
"""The plugins fit the vLLM and the SGLang of each version, as `engines.json` has them."""

from __future__ import annotations

import ast
import json

import pytest

from tests.bindings.engines import (
    CALLS,
    DATA,
    ENGINES,
    FIELDS,
    OPTIONS,
    ROOT,
    Class,
    classes,
    imported,
)
from tests.compat.test_signatures import split

TABLE: dict[str, dict[str, dict[str, list[str]]]] = json.loads(DATA.read_text("utf-8"))
VERSIONS = {
    engine: {v for forms in rows.values() for each in forms.values() for v in each}
    for engine, rows in TABLE.items()
}
CASES = [(engine, version) for engine in ENGINES for version in sorted(VERSIONS[engine])]
# Sparse MLA begins with 0.26, where the classes are that it is derived from.
SINCE = {"vllm/sparse.py": "0.26.0"}
# What a class reads where the engine's class has it alone, or sets for others to read.
OWN = {
    "vllm/mha.py:Impl": {"kv_sharing_target_layer_name", "num_kv_heads"},
    "sglang/backend.py:Backend": {"max_context_len", "req_to_token_pool", "token_to_kv_pool"},
}
# Methods of the plugins' own. All others are those of an engine's class, which must have them.
PRIVATE = {
    "vllm/mha.py:Builder": {"_add_mask", "_begin", "_begun", "_other", "_refuse_alibi"}
    | {"_with_reference"},
    "vllm/mha.py:Impl": {"do_kv_cache_update", "settle"},  # vLLM's layer calls the first one
    "vllm/sparse.py:Impl": {"_options", "_told"},
    "vllm/sparse.py:Metadata": {"__init__", "begin", "listed", "step"},
    "sglang/backend.py:Backend": {"__init__", "_attend_mla", "_attend_mla_tree", "_begin", "_pages"}
    | {"_constant", "_fill", "_filled", "_list_step", "_lists_of", "_made", "_mask", "_mask_of"}
    | {"_mask_of_rows"}
    | {"_step", "_table", "_tree", "_uniform"},
    "sglang/indexer.py:Metadata": {"score"},
    "sglang/sparse.py:Backend": {"_attend", "_begin", "_choose", "_made"},
}
# The first and the last version with a method or an option that others lack.
PARTLY = {
    "get_kv_cache_shape": ("0.25.0", "0.28.0"),
    "supports_sliding_window": ("0.26.0", "0.33.0"),
    "get_varlen_cudagraph_max_query_len": ("0.31.0", "0.33.0"),
    "supports_device_cpu_query_lens_mismatch": ("0.28.0", "0.33.0"),
    "supports_rswa": ("0.30.0", "0.33.0"),
    "_forward_mqa_kernel": ("0.33.0", "0.33.0"),
    "backend_per_kind": ("0.26.0", "0.33.0"),
    "sparse_mla_force_mqa": ("0.26.0", "0.33.0"),
    "enable_adaptive_verification": ("0.28.0", "0.33.0"),
    "hisparse_config": ("0.30.0", "0.33.0"),
}
# Fields that a plugin reads of the engine's dataclasses, and arguments of calls.
READ = {
    "CommonAttentionMetadata": {"causal", "num_actual_tokens", "seq_lens", "query_start_loc"}
    | {"block_table_tensor", "mm_req_doc_ranges", "max_query_len", "query_start_loc_cpu"}
    | {"seq_lens_cpu_upper_bound", "rswa_prefix_lens"},
    "MLACommonMetadata": {"decode", "prefill"},
    "MLACommonDecodeMetadata": {"block_table", "seq_lens", "dcp_tot_seq_lens"},
    "MLACommonPrefillMetadata": {"chunked_context"},
    "MLACommonPrefillMetadata.ChunkedContextMetadata": set(),
    "metadata_cls()": {"block_table", "num_actual_tokens", "num_decodes", "num_reqs", "prefill"}
    | {"query_start_loc", "req_id_per_token", "seq_lens", "topk_tokens"},
    "DeepseekV32IndexerMetadata": {"decode", "num_decode_tokens", "num_prefills", "prefill"}
    | {"slot_mapping"},
    "DeepSeekV32IndexerDecodeMetadata": {"block_table", "decode_lens", "requires_padding"}
    | {"schedule_metadata", "seq_lens"},
    "DeepseekV32IndexerPrefillMetadata": {"chunks"},
    "DeepseekV32IndexerPrefillChunkMetadata": {"block_table", "cu_seq_lens", "cu_seqlen_ke"}
    | {"cu_seqlen_ks", "skip_kv_gather", "token_end", "token_start", "total_seq_lens"},
    "ForwardBatch": {"forward_mode", "batch_size", "req_pool_indices", "seq_lens", "positions"}
    | {"seq_lens_cpu", "out_cache_loc", "extend_seq_lens", "spec_info", "mm_inputs"}
    | {"extend_prefix_lens_cpu"},
    "MultimodalInputs": {"mm_items"},
    "MultimodalDataItem": {"offsets"},
    "EagleVerifyInput": {"custom_mask", "positions"},
    "VerifyMask": {"buffer", "mode", "max_bs"},
    "DSAMetadata": {"page_size"},
}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def of(engine: str, version: str) -> dict[str, str]:
    """Names that a version has -> their forms; of dataclasses their fields."""
    return {
        name: form
        for name, forms in TABLE[engine].items()
        for form, versions in forms.items()
        if version in versions and not (form == "class" and len(forms) > 1)
    }


def is_there(file: str, version: str) -> bool:
    """Return whether a version uses a file of the plugin."""
    return number(version) >= number(SINCE.get(file, "0.0.0"))


def takes(ours: list[str], theirs: list[str]) -> bool:
    """Whether a method takes what is passed to the one that it overrides, and needs no more."""
    named = [p.partition("=")[0] for p in theirs if p[0] != "*"]
    own = {p.partition("=")[0]: "=" in p for p in ours if p[0] != "*"}
    needed = {name for name, has_default in own.items() if not has_default}
    takes_all = set(named) <= own.keys() or any(p[:1] == "*" and len(p) > 1 for p in ours)
    first, second = positional(ours), positional(theirs)
    in_order = [n for n in first if n in second] == [n for n in second if n in first]
    return needed <= set(named) and takes_all and in_order


def positional(parameters: list[str]) -> list[str]:
    names = [p.partition("=")[0] for p in parameters]
    return names[: next((i for i, name in enumerate(names) if name[0] == "*"), len(names))]


def lacks(method: str, version: str) -> bool:
    """Return whether a version is one of those without a method that others have."""
    first, last = PARTLY.get(method, ("0", "9999"))
    return not number(first) <= number(version) <= number(last)


@pytest.mark.parametrize(("engine", "version"), CASES)
def test_a_version_has_what_the_plugin_imports(engine: str, version: str) -> None:
    has = of(engine, version)
    for file, names in imported(engine).items():
        if is_there(file, version):
            known = has.keys() | guarded(file)
            missing = {n for n in names if ":".join(n) not in known and is_of_module(n[0], has)}
            assert not missing, (file, missing)


def is_of_module(owner: str, has: dict[str, str]) -> bool:
    """Whether a name is one of a module, and not an attribute of something that one defines."""
    module, _, name = owner.rpartition(".")
    return has.get(f"{module}:{name}", "module") == "module"


def guarded(file: str) -> set[str]:
    """Imports that a plugin tries, and does without where they fail."""
    tree = ast.parse((ROOT / "cumla" / file).read_text("utf-8"))
    return {
        f"{node.module}:{alias.name}"
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try)
        for node in ast.walk(attempt)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize(("engine", "version"), CASES)
def test_classes_of_the_plugin_fit_those_of_a_version(engine: str, version: str) -> None:
    has, checked = of(engine, version), 0
    for each in classes(engine):
        if not is_there(each.name.partition(":")[0], version):
            continue
        members = members_of(each, has)
        for name, form in members.items():
            if form.startswith("abstract"):
                assert name in each.methods, (each.name, name)
            if name in each.methods and "(" in form and name != "__init__":
                theirs = split(form[form.index("(") + 1 : -1])
                assert takes(each.methods[name], theirs), (each.name, name, form)
                checked += 1
        own = each.methods.keys() - members.keys() - PRIVATE.get(each.name, set())
        assert not {name for name in own if not lacks(name, version)}, each.name
        missing = each.used - members.keys() - OWN.get(each.name, set())
        assert not missing, (each.name, missing)
    assert checked > 8


def members_of(each: Class, has: dict[str, str]) -> dict[str, str]:
    """Return what a class inherits from the engine: the first base counts."""
    found: dict[str, str] = {}
    for module, name in each.bases:
        start = f"{module}:{name}."
        here = {n.removeprefix(start): f for n, f in has.items() if n.startswith(start)}
        found = here | found
    return found


@pytest.mark.parametrize(("engine", "version"), CASES)
def test_a_version_has_the_fields_that_the_plugin_reads(engine: str, version: str) -> None:
    has, tables = of(engine, version), {}
    for module, names in (*FIELDS.items(), *((m, [f"{n}()" for n in c]) for m, c in CALLS.items())):
        if module.startswith(f"{engine}."):
            tables |= {name: has.get(f"{module}:{name}") for name in names}
    for name, fields in tables.items():
        if fields is not None or engine == "sglang" or is_there("vllm/sparse.py", version):
            assert READ[name] <= set((fields or "").split(", ")), name


def test_all_fields_that_are_read_are_looked_for() -> None:
    found = {name for names in FIELDS.values() for name in names}
    assert found | {f"{name}()" for names in CALLS.values() for name in names} == READ.keys()


@pytest.mark.parametrize("version", sorted(VERSIONS["vllm"]))
def test_a_version_has_the_options_that_the_plugin_reads(version: str) -> None:
    has = of("vllm", version)
    for name, options in OPTIONS.items():
        found = {option for option in options if f"{name}.{option}" in has}
        assert found == {option for option in options if not lacks(option, version)}, name


def test_all_options_that_are_read_are_looked_for() -> None:
    """Those of the parts of VllmConfig, and the parts."""
    known = {option for options in OPTIONS.values() for option in options}
    parts = {part for part in OPTIONS["vllm.config.vllm:VllmConfig"] if part.endswith("_config")}
    read = set()
    for path in sorted((ROOT / "cumla" / "vllm").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            pair = (node.value, node.attr) if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                pair = node.args[0], getattr(node.args[1], "value", "")
            if pair is not None and ast.unparse(pair[0]).split(".")[-1] in parts:
                read.add(pair[1])
    assert read <= known
    assert len(read) > 10


def test_vllm_counts_or_lists_the_prefills_without_a_context() -> None:
    """Another name there would let the plugin's correction fail in silence."""
    count, mask, tokens = "prefill_tokens_with_context", "has_empty_context", "empty_token_slices"
    name = "MLACommonPrefillMetadata.ChunkedContextMetadata"
    (module,) = [module for module, names in FIELDS.items() if name in names]
    for version in VERSIONS["vllm"]:
        minor, fields = number(version)[1], set(of("vllm", version)[f"{module}:{name}"].split(", "))
        found = fields & {count, mask, tokens}
        assert found == ({count} if minor < 26 else {count, mask} if minor < 28 else {tokens})


def test_all_versions_are_there() -> None:
    assert {f"0.{minor}.0" for minor in range(25, 34)} <= VERSIONS["vllm"]
    assert VERSIONS["sglang"] == {"0.5.22", "0.5.23"}


def test_every_class_of_the_plugins_is_looked_at() -> None:
    found = {each.name for engine in ENGINES for each in classes(engine)}
    for family in ("mla", "sparse", "mha"):
        assert {f"vllm/{family}.py:{n}" for n in ("Backend", "Builder", "Impl")} <= found
    assert {"sglang/backend.py:Backend", "sglang/sparse.py:Backend"} <= found


def test_methods_that_do_not_fit_are_found() -> None:
    assert takes(["q", "layer=None"], ["q", "layer"])
    assert takes(["q", "**_"], ["q", "layer"])
    assert not takes(["q"], ["q", "layer"])
    assert not takes(["q", "more"], ["q"])
    assert not takes(["q", "*", "more"], ["q"])
    assert not takes(["q", "layer"], ["layer", "q"])


@pytest.mark.parametrize(("engine", "version"), CASES)
def test_a_method_that_an_engine_loses_is_found(engine: str, version: str) -> None:
    """Each row of a method that a plugin overrides is needed."""
    has, found = of(engine, version), 0
    for each in classes(engine):
        if is_there(each.name.partition(":")[0], version):
            for name in members_of(each, has).keys() & each.methods.keys():
                private = name in PRIVATE.get(each.name, set()) or lacks(name, version)
                assert not private, (each.name, name)
                found += 1
    assert found > 8
