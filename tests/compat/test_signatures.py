# SPDX-License-Identifier: Apache-2.0
"""The parameters in cumla.compat are those of the libraries: names, order, defaults."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.compat.signatures import DATA, FACES, ROOT, declared

TABLE: dict[str, dict[str, dict[str, list[str]]]] = json.loads(DATA.read_text("utf-8"))
ROWS = [
    pytest.param(name, parameters, versions, id=f"{name} {versions[0]} to {versions[-1]}")
    for functions in TABLE.values()
    for name, forms in functions.items()
    for parameters, versions in forms.items()
]
# What is meant to differ: function -> lines of `differences`.
FORWARD = {"+return_lse"}  # what forward_return_lse passes
VLLM = {"fa_version: DEFAULT_FA_VERSION -> 2"}  # one set of kernels serves all
OF_0_33 = {"+gather_kv_indices", "+gather_kv_valid_length"}
OF_0_27 = {"+block_sparse_tensors", "+aux_tensor_leading_dims", "order: aux_tensors"}
OF_SGLANG = {"+use_legacy", "+kv_format", "+descale_q", "+descale_k", "order: out"}
LOGITS = {"logits_dtype: torch.float32 -> None"}  # the module imports no torch for a default
KNOWN: dict[str, set[str]] = {
    "flashinfer/decode.py:BatchDecodeWithPagedKVCacheWrapper.forward": FORWARD,
    "flashinfer/prefill.py:BatchPrefillWithPagedKVCacheWrapper.forward": FORWARD,
    "flashinfer/prefill.py:BatchPrefillWithRaggedKVCacheWrapper.forward": FORWARD,
    # Arguments of earlier versions.
    "flashinfer/rope.py:apply_rope_with_cos_sin_cache": {"+backend"},
    "flashinfer/rope.py:apply_rope_with_cos_sin_cache_inplace": {"+backend"},
    "flashinfer/mla.py:BatchMLAPagedAttentionWrapper.plan": {
        *("+qk_nope_head_dim", "+is_var_seq", "+cute_dsl_impl")
    },
    "vllm_flash_attn.py:flash_attn_varlen_func 0.26.0": VLLM | OF_0_33 | OF_0_27,
    "vllm_flash_attn.py:flash_attn_varlen_func 0.32.0": VLLM | OF_0_33,
    "vllm_flash_attn.py:flash_attn_varlen_func 0.33.0": VLLM,
    # The face imports no torch for a default that it ignores.
    "vllm_flash_attn.py:get_scheduler_metadata": {"qkv_dtype: torch.bfloat16 -> None"},
    "flash_attn.py:get_scheduler_metadata": {"qkv_dtype: torch.bfloat16 -> None"},
    # Of later sources of FlashAttention-3, and FlashAttention-2's name of page_table.
    "flash_attn.py:flash_attn_func": {"+return_attn_probs"},
    "flash_attn.py:flash_attn_varlen_func": {"+return_attn_probs"},
    "flash_attn.py:flash_attn_with_kvcache": {"+block_table"},
    # vLLM and SGLang add to FlashMLA in different places: here their additions are by keyword.
    "flash_mla.py:flash_mla_with_kvcache 1.0.0": {*("+out", "order: enable_batch_invariant")},
    "flash_mla.py:flash_mla_with_kvcache 0.32.0": OF_SGLANG
    | {"+enable_batch_invariant", "is_fp8_kvcache: False -> None"},
    "flash_mla.py:flash_mla_with_kvcache 0.33.0": OF_SGLANG | {"is_fp8_kvcache: False -> None"},
    "_flash_mla_sparse.py:flash_mla_sparse_fwd 1.0.0": {"+out", "order: use_legacy"},
    # Copies of DeepGEMM from before, and from after, it lost clean_logits and logits_dtype.
    "deep_gemm.py:fp8_fp4_mqa_logits 0.32.0": LOGITS,
    "deep_gemm.py:fp8_fp4_paged_mqa_logits 0.32.0": LOGITS,
    "deep_gemm.py:fp8_fp4_mqa_logits": {
        *("+clean_logits", "+logits_dtype", "max_seqlen_k: needed -> 0", "order: max_seqlen_k")
    },
    "deep_gemm.py:fp8_fp4_paged_mqa_logits": {
        *("+clean_logits", "+logits_dtype", "order: indices")
    },
    "_flash_mla_sparse.py:flash_mla_sparse_fwd 0.33.0": {
        *("+use_legacy", "+return_log2_lse", "order: out")
    },
}


def split(parameters: str) -> list[str]:
    """Cut at commas outside of brackets."""
    found, depth = [""], 0
    for letter in parameters:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def differences(theirs: list[str], ours: list[str]) -> set[str]:
    """Return what a caller of theirs would notice: names, defaults, and the order of positions."""
    found = set()
    default = {}
    for whose, parameters in (("theirs", theirs), ("ours", ours)):
        default[whose] = dict(p.partition("=")[::2] for p in parameters if p[0] != "*")
    for name, value in default["theirs"].items():
        if name not in default["ours"]:
            found.add(f"-{name}")
        elif value != default["ours"][name]:
            found.add(f"{name}: {value or 'needed'} -> {default['ours'][name] or 'needed'}")
    found |= {f"+{name}" for name in default["ours"].keys() - default["theirs"].keys()}
    places = [_places(parameters) for parameters in (theirs, ours)]
    known = [[n for n in place if n in default["ours"]] for place in places]
    if known[1][: len(known[0])] != known[0]:
        first = next(i for i, name in enumerate(known[0]) if known[1][i : i + 1] != [name])
        found.add(f"order: {known[0][first]}")
    return found


def _places(parameters: list[str]) -> list[str]:
    names = [p.partition("=")[0] for p in parameters]
    return names[: next((i for i, name in enumerate(names) if name[0] == "*"), len(names))]


@pytest.mark.parametrize(("name", "parameters", "versions"), ROWS)
def test_parameters(name: str, parameters: str, versions: list[str]) -> None:
    face, _, function = name.partition(":")
    ours = declared((ROOT / "cumla/compat" / face).read_text("utf-8"))[function]
    known = KNOWN.get(f"{name} {versions[-1]}", KNOWN.get(name, set()))
    assert differences(split(parameters), ours) == known


def test_all_versions_are_there() -> None:
    versions = {
        library: {v for forms in functions.values() for names in forms.values() for v in names}
        for library, functions in TABLE.items()
    }
    assert {f"0.{minor}.0" for minor in range(25, 34)} <= versions["vllm"]
    assert versions["flashinfer_python"] == {"0.7.4"}
    assert versions.keys() == {library for _, library, _ in FACES}


def test_differences_are_found() -> None:
    theirs = ["q", "k=None", "causal=False", "*", "scale=1.0"]
    assert not differences(theirs, theirs)
    assert not differences(theirs, ["q", "k=None", "causal=False", "scale=1.0"])
    wrong: Any
    for wrong, line in (
        (["q", "causal=False", "k=None", "*", "scale=1.0"], "order: k"),
        (["q", "k=None", "causal=True", "*", "scale=1.0"], "causal: False -> True"),
        (["q", "k", "causal=False", "*", "scale=1.0"], "k: None -> needed"),
        (["q", "k=None", "causal=False", "*"], "-scale"),
        ([*theirs, "more=0"], "+more"),
    ):
        assert differences(theirs, wrong) == {line}


def test_names_are_where_flashinfer_has_them() -> None:
    pytest.importorskip("torch")
    package = importlib.import_module("cumla.compat.flashinfer")
    alone = {"concat_mla_k", "topk"}  # in their module only
    alone |= {"batch_decode_with_kv_cache_mla_swa", "get_mla_swa_workspace_size_bytes"}
    for module in ("cascade", "concat_ops", "decode", "mla", "page", "prefill", "rope", "topk"):
        found = importlib.import_module(f"cumla.compat.flashinfer.{module}")
        for name in {*found.__all__} - alone:
            assert name in package.__all__
            assert getattr(package, name) is getattr(found, name)
