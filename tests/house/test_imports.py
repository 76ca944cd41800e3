# SPDX-License-Identifier: Apache-2.0
"""Imports go down: core < launch < families < compat < bench < cli, and never in a circle.

Every import counts, also one in a function or for type checkers alone.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("merge", "mla", "indexer", "sparse", "mha", "blocks")
MAY_IMPORT = {"sparse": ("indexer", "merge", "mla"), "blocks": ("mha", "sparse")}
FOR_REFERENCE = ("cumla.core.arguments", "cumla.core.state", "cumla.errors")

LAUNCH = ("_layouts", "device", "kernel", "layouts", "module", "slots", "source", "tensor_map")
# Modules and folders, each line below those that may import it; the longest name that fits counts.
LAYERS = (
    ("cumla.errors",),
    ("cumla.core", *(f"cumla.{family}.shape" for family in FAMILIES)),
    tuple(f"cumla.launch.{name}" for name in LAUNCH),
    ("cumla.launch.split",),
    ("cumla.launch.merge_states", *(f"cumla.launch.{family}" for family in FAMILIES)),
    ("cumla.launch",),  # the list of all kernels
    ("cumla.reference",),
    ("cumla.prefix_groups",),
    tuple(f"cumla.{family}" for family in FAMILIES),
    ("cumla.preparation",),
    ("cumla.__init__",),
    ("cumla._choices", "cumla._serving"),
    (
        *("cumla.compat", "cumla.torch", "cumla.jax", "cumla.distributed"),
        *("cumla.vllm", "cumla.sglang", "cumla.transformers"),
    ),
    ("cumla.bench",),
    ("cumla.cli", "cumla.__main__"),
)


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name == "cumla.__init__" else name.removesuffix(".__init__")


MODULES = {name_of(path): path for path in (ROOT / "cumla").rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path} imports relatively"
            assert node.module.partition(".")[0] not in ("bench", "tests"), f"{path}: not installed"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys()
            found |= {node.module} if names - MODULES.keys() else set()
    return {"cumla.__init__" if name == "cumla" else name for name in found} & MODULES.keys()


@cache
def imports() -> dict[str, set[str]]:
    return {name: imports_of(path) for name, path in MODULES.items()}


def layer_of(name: str) -> int:
    fits = [
        (len(prefix), i)
        for i, layer in enumerate(LAYERS)
        for prefix in layer
        if f"{name}.".startswith(f"{prefix}.")
    ]
    assert fits, f"{name} has no layer"
    return max(fits)[1]


def family_of(name: str) -> str:
    found = re.match(rf"cumla\.(?:launch\.|reference\.)?({'|'.join(FAMILIES)})(?:_states)?\b", name)
    return found[1] if found else ""


def is_allowed(name: str, imported: str) -> bool:
    own, other = family_of(name), family_of(imported)
    if name.startswith("cumla.reference") and not imported.startswith("cumla.reference"):
        return imported in FOR_REFERENCE or imported.endswith(".shape")
    if own and other and own != other and other not in MAY_IMPORT.get(own, ()):
        return False
    return layer_of(imported) <= layer_of(name)


def test_imports_go_down() -> None:
    broken = {(a, b) for a, imported in imports().items() for b in imported if not is_allowed(a, b)}
    assert not broken


def test_there_is_no_circle() -> None:
    left = dict(imports())
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    while free := left.keys() - set().union(*left.values()):
        left = {name: imported for name, imported in left.items() if name not in free}
    assert not left


# Folders of cumla/cuda, each line below those that may include it. Families may include what their
# modules may import.
CUDA_LAYERS = (("ptx",), ("split", "rows", "attend"), FAMILIES)


def test_kernels_include_what_is_below_them_and_no_kernel_of_another_folder() -> None:
    cuda = ROOT / "cumla" / "cuda"
    layers = {folder: i for i, layer in enumerate(CUDA_LAYERS) for folder in layer}
    broken = set()
    for path in (*cuda.rglob("*.cu"), *cuda.rglob("*.cuh")):
        own = path.relative_to(cuda).parts[0].removesuffix("_states.cu")
        for included in re.findall(r'^#include "([^"]+)"', path.read_text("utf-8"), re.MULTILINE):
            other = included.partition("/")[0]
            below = layers[other] < layers[own] or other in MAY_IMPORT.get(own, ())
            if other != own and (not below or included.endswith(".cu")):
                broken.add((path.relative_to(cuda).as_posix(), included))
    assert not broken
