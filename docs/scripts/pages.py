# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: makes the pages of the API, of examples and of the supported models.

These pages, and their navigation, are in no commit. Each public name has a page of its own, which
mkdocstrings fills from the docstring, and each script of ``examples`` has one with its text.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Group(NamedTuple):
    """Names that a reader looks for together."""

    title: str
    guide: str  # the page that shows them in use
    names: tuple[str, ...]
    module: str = "cumla"


GROUPS = (
    Group(
        "MLA",
        "guide/mla.md",
        ("mla_decode", "MLADecodePlan", "mla_attention", "MLAAttentionPlan"),
    ),
    Group("MHA, GQA and MQA", "guide/attention.md", ("attention", "AttentionPlan")),
    Group("Masks of attention", "guide/masks.md", ("AttentionMask",)),
    Group("Biases of attention", "guide/biases.md", ("AttentionBias",)),
    Group("Shared prefixes", "guide/shared-prefixes.md", ("find_prefix_groups", "PrefixGroups")),
    Group(
        "Sparse MLA",
        "guide/sparse-mla.md",
        ("mla_sparse_decode", "mla_sparse_attention", "MLASparsePlan", "DSAPlan"),
    ),
    Group(
        "Sparse GQA by blocks",
        "guide/block-sparse.md",
        (
            *("block_sparse_attention", "BlockSparsePlan", "block_scores", "select_blocks"),
            "BlockSparseStep",
        ),
    ),
    Group(
        "Indexer and top-k",
        "guide/indexer-topk.md",
        (
            *("mqa_logits", "paged_mqa_logits", "PagedMQALogitsPlan"),
            *("append_indexer_cache", "top_k", "TopKResult"),
        ),
    ),
    Group(
        "Writing an MLA cache",
        "guide/append-mla.md",
        ("append_mla_cache", "quantize_fp8", "QuantizedRows"),
    ),
    Group("Writing K/V caches", "guide/append-kv.md", ("append_kv_cache", "apply_rope")),
    Group("Merging", "guide/merging.md", ("merge_attention_states", "AttentionState")),
    Group("Preparation", "guide/cuda-graphs-streams.md", ("prepare",)),
    Group(
        "Errors",
        "guide/errors-checking.md",
        (
            *("CumlaError", "UnsupportedDeviceError", "MissingDependencyError"),
            *("CompilationError", "NotPreparedError"),
        ),
    ),
    Group(
        "Context parallelism",
        "guide/context-parallel.md",
        ("ContextParallel", "Shard", "LocalPages"),
        "cumla.distributed",
    ),
    Group(
        "JAX",
        "guide/jax.md",
        (
            *("append_mla_cache", "append_kv_cache", "append_indexer_cache"),
            *("MLADecodePlan", "MLAAttentionPlan", "MLASparsePlan", "AttentionPlan"),
            "BlockSparsePlan",
            "PagedMQALogitsPlan",
        ),
        "cumla.jax",
    ),
    Group(
        "NumPy reference",
        "start/first-call.md",
        (
            *("mla_decode", "mla_attention", "mla_sparse_decode", "mla_sparse_attention"),
            *("attention", "append_mla_cache", "append_kv_cache", "apply_rope"),
            *("append_indexer_cache", "quantize_fp8", "mqa_logits", "paged_mqa_logits"),
            *("block_sparse_attention", "block_scores", "select_blocks"),
            *("top_k", "merge_attention_states"),
        ),
        "cumla.reference",
    ),
    Group(
        "Compatibility modules",
        "integrations/index.md",
        (
            *("flash_attn", "vllm_flash_attn", "vllm_minimax_m3", "flash_mla", "flashinfer"),
            *("deep_gemm", "auto_deploy"),
        ),
        "cumla.compat",
    ),
)
_HEADER = re.compile(r"^\{\{ header (\S+) \}\}$", re.MULTILINE)
_RECORD = re.compile(r"^\{\{ record (\w+) \}\}$", re.MULTILINE)
_WITH_SUBMODULES = ("flashinfer", "auto_deploy")
_OWN_PAGE = ("cumla", "cumla.compat")  # modules of which each name has a page; others have one


def full_names(group: Group) -> list[str]:
    """Names as Python has them."""
    return [f"{group.module}.{name}" for name in group.names]


def short(name: str) -> str:
    """Shorten a full name to what names its page."""
    return name.removeprefix("cumla.")


def names_with_a_page() -> set[str]:
    """Full names of all that the API pages show."""
    return {name for group in GROUPS for name in full_names(group)}


def public_names() -> list[str]:
    """Names in ``cumla.__all__``, read from the text."""
    tree = ast.parse((ROOT / "cumla/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError("cumla/__init__.py: no __all__")


def api_pages() -> dict[str, str]:
    """Make the pages of the API, by their path in the site's sources."""
    missing = {f"cumla.{name}" for name in public_names()} - names_with_a_page()
    if missing:
        raise ValueError(f"docs/scripts/pages.py: GROUPS lacks {', '.join(sorted(missing))}")
    pages, index = {}, ["# API", "", "Each page is made from a docstring.", ""]
    for group in GROUPS:
        index += [f"## {group.title}", "", f"In use: [the guide](../{group.guide}).", ""]
        see = f"In use: [the guide](../{group.guide})."
        if group.module in _OWN_PAGE:
            for full in full_names(group):
                table = arguments(short(full))
                pages[f"api/{short(full)}.md"] = _page([full], table + see)
                index.append(f"* [`{full}`]({short(full)}.md)")
        else:
            path = f"{short(group.module)}.md"
            how = f"Import it as `{group.module}`: `import cumla` alone does not load it."
            full_title = f"# {group.title}\n\n"
            pages[f"api/{path}"] = _page(full_names(group), f"{see} {how}", full_title)
            index += [f"* [`{name}`]({path}#{name})" for name in full_names(group)]
        index.append("")
    pages["api/index.md"] = "\n".join(index)
    return pages


def _page(names: list[str], see: str, title: str = "") -> str:
    options = [] if title else ["heading_level: 1"]
    body = [_directive(name, options) for name in names]
    return (
        f"{title}{see if title else ''}\n\n" + "\n\n".join(body) + ("" if title else f"\n\n{see}")
    )


def _directive(name: str, options: list[str]) -> str:
    more = ["show_submodules: true"] if name.rpartition(".")[2] in _WITH_SUBMODULES else []
    lines = [f"      {option}" for option in (*options, *more)]
    return "\n".join([f"::: {name}", *(["    options:", *lines] if lines else [])])


def arguments(name: str) -> str:
    """Make the table of a function's arguments from its spec; nothing if it has none."""
    spec = specs().get(name)
    if spec is None:
        return ""
    rows = ["## Arguments at a glance", "", "| argument | is | default |", "|---|---|---|"]
    for number, argument in enumerate(spec.arguments):
        default = "required" if argument.default is _spec().REQUIRED else f"`{argument.default!r}`"
        what = _kind(argument) + ("; None is allowed" if _is_nullable(argument) else "")
        named = "" if number < spec.positional else ", by name"
        rows.append(f"| `{argument.name}` | {what}{named} | {default} |")
    if spec.planned:
        names = ", ".join(f"`{each}`" for each in spec.planned)
        rows += [
            "",
            f"The schedule follows from the values of {names}: a plan takes them in `update`.",
        ]
    return "\n".join(rows) + "\n\n"


def _is_nullable(argument: Any) -> bool:
    return bool(getattr(argument, "is_nullable", False))


def _kind(argument: Any) -> str:
    spec = _spec()
    parts = ", or a tuple of parts" if getattr(argument, "is_list", False) else ""
    match argument:
        case spec.Cache():
            return f"array{parts}, written in place"
        case spec.Input():
            return f"array{parts}"
        case spec.Out():
            return "output: an array to write to, else a new one"
        case spec.Instead():
            return f"output in place of `{argument.of}`, which is written otherwise"
        case spec.Factor():
            return "number or array"
    kinds = {"bool": "flag", "int": "integer", "str": "name", "float": "number"}
    return kinds.get(argument.kind.rstrip("?").removesuffix("[]"), argument.kind)


def _spec() -> ModuleType:
    return importlib.import_module("cumla.core.spec")


def specs() -> dict[str, Any]:
    """Return the specs of all public functions, by name."""
    sys.path.insert(0, str(ROOT))
    cumla = importlib.import_module("cumla")
    for name in cumla.__all__:
        getattr(cumla, name)  # loads the module
    return dict(_spec().SPECS)


def example_pages() -> dict[str, str]:
    """Make a page for each script of the folder examples, and their list."""
    pages = {}
    index = ["# Examples", "", "Each script runs with a GPU and without.", ""]
    index += ["| script | shows |", "|---|---|"]
    for path in examples():
        text = path.read_text(encoding="utf-8")
        told = ast.get_docstring(ast.parse(text)) or ""
        first = " ".join(told.partition("\n\n")[0].split())
        code = text[text.index('"""', text.index('"""') + 3) + 3 :].strip()
        name = f"examples/{path.name}"
        pages[f"examples/{path.stem}.md"] = (
            f"# {path.stem}\n\n```text\n{told}\n```\n\n`python {name}`\n\n```python\n{code}\n```\n"
        )
        index.append(f"| [`{path.name}`]({path.stem}.md) | {first} |")
    return {"examples/index.md": "\n".join(index) + "\n", **pages}


def examples() -> list[Path]:
    """List the scripts that have a page."""
    return sorted((ROOT / "examples").glob("*.py"))


def navigation() -> list[Any]:
    """List the pages of the API as the navigation of the site has them."""
    entries: list[Any] = ["api/index.md"]
    for group in GROUPS:
        if group.module in _OWN_PAGE:
            pages = [{short(name): f"api/{short(name)}.md"} for name in full_names(group)]
            entries.append({group.title: pages})
        else:
            entries.append({group.title: f"api/{short(group.module)}.md"})
    return entries


def generated() -> dict[str, str]:
    """Make all pages that are in no commit."""
    return api_pages() | example_pages() | {"support/index.md": load("support").page()}


def header(file: str) -> str:
    """Return the comment that a CUDA file opens with, after its licence."""
    lines = (ROOT / "cumla/cuda" / file).read_text(encoding="utf-8").splitlines()[1:]
    comment = [line[3:] for line in takewhile(lambda line: line.startswith("//"), lines)]
    if not comment:
        raise ValueError(f"cumla/cuda/{file} opens with no comment")
    return "\n".join(comment)


def with_headers(markdown: str) -> str:
    """Put the comments of CUDA files into a page, where it says `{{ header FILE }}`."""
    return _HEADER.sub(lambda match: f"```text\n{header(match[1])}\n```", markdown)


def table_of_record(name: str) -> str:
    """Make a table of a record's rows, with a column for each time that some row has, in us.

    Where a row has a target there is a column of targets: us, or times the call without a mask.
    """
    path = ROOT / "records" / f"{name}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row["us"]))
    targets = any("target" in row for row in rows)
    titles = [*columns, *(["target"] if targets else [])]
    lines = [f"| call | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    for row in rows:
        times = [f"{row['us'][c]:,.1f}" if c in row["us"] else "-" for c in columns]
        times += [row.get("target") or ""] if targets else []
        lines.append(f"| {_call_of(row)} | {' | '.join(times)} |")
    return "\n".join(lines)


def _call_of(row: dict[str, Any]) -> str:
    if "heads" not in row:
        return str(row["name"])
    heads, kv_heads = row["heads"]
    tokens = f"{row['batch']} x {row['q_len']:,} tokens, {row['kv_len']:,} keys"
    return f"{row['name']}: {tokens}, {heads}/{kv_heads} heads of {row['columns']}"


def with_records(markdown: str) -> str:
    """Put the table of a record into a page, where it says `{{ record NAME }}`."""
    return _RECORD.sub(lambda match: table_of_record(match[1]), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in one page."""
    return with_records(with_headers(markdown))


def load(name: str) -> ModuleType:
    """Import another script of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_config(config: Any, **_: Any) -> Any:
    """Put the pages of the API and of examples into the navigation, in place of folders."""
    scripts = [{path.stem: f"examples/{path.stem}.md"} for path in examples()]
    made = {"api/": navigation(), "examples/": ["examples/index.md", *scripts]}
    config.nav = [
        {title: made.get(pages, pages) if isinstance(pages, str) else pages}
        for entry in config.nav
        for title, pages in entry.items()
    ]
    return config


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        if (written := files.get_file_from_path(path)) is not None:  # for readers of the repository
            files.remove(written)
        files.append(File.generated(config, path, content=text))
    return files
