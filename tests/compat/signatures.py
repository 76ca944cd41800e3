# SPDX-License-Identifier: Apache-2.0
"""The parameters of the functions in cumla.compat, as their libraries declare them.

``python tests/compat/signatures.py WHEEL...`` reads wheels and source archives, of any number of
versions, and writes signatures.json: library -> function -> parameters -> versions. Nothing is
imported. `test_signatures.py` holds the faces against it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_suffix(".json")
_MLA = "flash_mla_interface.py"
# A face's file under cumla/compat, the library, and where its archive has the same names.
FACES = [
    ("flash_attn.py", "flash_attn", "hopper/flash_attn_interface.py"),
    ("vllm_flash_attn.py", "vllm", "vllm/vllm_flash_attn/flash_attn_interface.py"),
    *(
        (face, library, f"{folder}/{_MLA}")
        for face in ("flash_mla.py", "_flash_mla_sparse.py")
        for library, folder in (
            ("sgl_flash_mla", "flash_mla"),
            ("vllm", "vllm/third_party/flashmla"),
        )
    ),
    *(
        (f"flashinfer/{name}.py", "flashinfer_python", f"flashinfer/{name}.py")
        for name in ("cascade", "concat_ops", "decode", "page", "prefill", "rope", "topk")
    ),
    *(
        ("flashinfer/mla.py", "flashinfer_python", f"flashinfer/mla/{name}.py")
        for name in ("_batch_mla/_wrapper", "_swa")
    ),
    *(
        ("flashinfer/msa_ops.py", "flashinfer_python", f"flashinfer/msa_ops/{name}.py")
        for name in ("proxy_score", "sparse_topk_select", "sparse_prefill", "sparse_decode")
    ),
    *(
        ("vllm_minimax_m3.py", "vllm", f"vllm/models/minimax_m3/common/ops/{name}.py")
        for name in ("sparse_attn", "index_topk")
    ),
    # DeepGEMM itself has no archive; vLLM and SGLang ship it with functions in Python.
    ("deep_gemm.py", "vllm", "vllm/third_party/deep_gemm/_C.py"),
    ("deep_gemm.py", "sgl_deep_gemm", "deep_gemm/__init__.py"),
]
# Functions of a face that its library has elsewhere.
ELSEWHERE = {
    "vllm_flash_attn.py": ("vllm/_custom_ops.py", ("reshape_and_cache_flash",)),
    "flashinfer/mla.py": ("flashinfer/mla/_batch_mla/_contracts.py", ("MLAPlanMetadata",)),
}


def declared(source: str) -> dict[str, list[str]]:
    """Public functions, and methods of public classes, by name -> their parameters."""
    found: dict[str, ast.arguments] = {}
    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node.args  # of overloads the last
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                found[f"{node.name}.{method.name}"] = method.args
    for name in [name for name in found if f"{_impl(name)}" in found]:  # what **kwargs stand for
        found[name] = found[_impl(name)]
    private = re.compile(r"(^|\.)_(?!_init__$)")
    return {name: parameters(args) for name, args in found.items() if not private.search(name)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also of a try and of a function that registers functions."""
    for node in body:
        yield node
        is_registry = isinstance(node, ast.FunctionDef) and node.name.startswith("_register")
        if is_registry or isinstance(node, ast.Try):
            yield from _statements(node.body)  # type: ignore[attr-defined]


def _impl(name: str) -> str:
    *owner, method = name.split(".")
    return ".".join([*owner, f"_{method}_impl"])


def parameters(args: ast.arguments) -> list[str]:
    """Names, with defaults, without annotations; those after "*" are by keyword only."""
    for argument in (*args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if argument is not None:
            argument.annotation = None
    given = ast.unparse(args)
    call = ast.parse(f"lambda {given}: 0", mode="eval").body
    assert isinstance(call, ast.Lambda)
    names = [a.arg for a in call.args.args]
    defaults = [None] * (len(names) - len(call.args.defaults)) + [*call.args.defaults]
    listed = [_one(n, d) for n, d in zip(names, defaults, strict=True)]
    if call.args.vararg or call.args.kwonlyargs:
        listed.append(f"*{call.args.vararg.arg if call.args.vararg else ''}")
    listed += [
        _one(a.arg, d) for a, d in zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True)
    ]
    return [name for name in listed if name != "self"] + (
        [f"**{call.args.kwarg.arg}"] if call.args.kwarg else []
    )


def _one(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def files_of(archive: Path) -> Iterator[tuple[str, str]]:
    """The Python files of an archive that a face is held against: path -> text."""
    wanted = {path for *_, path in FACES}
    wanted |= {path for path, _ in ELSEWHERE.values()}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wanted & set(wheel.namelist()):
                yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            _, _, name = member.name.partition("/")
            if name in wanted:
                file = sources.extractfile(member)
                assert file is not None
                yield name, file.read().decode()


def read(archives: list[Path]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Collect what the faces have too: library -> face's function -> parameters -> versions."""
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    for archive in archives:
        library, version = re.match(r"(.+?)-([^-]+?)(-|\.tar)", archive.name).groups()[:2]  # type: ignore[union-attr]
        texts = {path: declared(text) for path, text in files_of(archive)}
        for face, whose, path in FACES:
            if whose != library:
                continue
            theirs = dict(texts.get(path, {}))
            other, names = ELSEWHERE.get(face, ("", ()))
            theirs |= {n: p for n, p in texts.get(other, {}).items() if n.split(".")[0] in names}
            ours = declared((ROOT / "cumla/compat" / face).read_text("utf-8"))
            for name in sorted(ours.keys() & theirs.keys()):
                rows = table.setdefault(library, {}).setdefault(f"{face}:{name}", {})
                rows.setdefault(", ".join(theirs[name]), []).append(version)
    return table


if __name__ == "__main__":
    by_version = sorted(
        map(Path, sys.argv[1:]), key=lambda p: [*map(int, re.findall(r"\d+", p.name))]
    )
    DATA.write_text(json.dumps(read(by_version), indent=1) + "\n", "utf-8")
