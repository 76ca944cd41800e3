# SPDX-License-Identifier: Apache-2.0
"""A kernel has one name in every layer: CUDA file, launcher, reference, test, page of the docs."""

from __future__ import annotations

import ast
from pathlib import Path

from cumla.launch import all_specs

ROOT = Path(__file__).resolve().parents[2]

# What kernels do without today: the list may only shrink.
KNOWN = {
    ("test", "append_cache"),
    ("test", "append_fp8_cache"),
    ("test", "append_indexer_cache"),
    ("test", "ragged_schedule"),
    ("test", "mla_decode_swapped"),
    ("test", "mqa_logits"),
    ("test", "paged_mqa_logits"),
    ("test", "quantize_fp8"),
}


def mirrors_in_numpy(launcher: Path) -> bool:
    """Tell whether a launcher's module has a function of NumPy arrays, as those of schedules do."""
    functions = ast.parse(launcher.read_text(encoding="utf-8")).body
    return any(
        "np.ndarray" in ast.unparse(f.args) for f in functions if isinstance(f, ast.FunctionDef)
    )


def lacks(package: str, stem: str) -> set[str]:
    """What a kernel does without; its reference is a file named by some of the kernel's words."""
    family = package.removeprefix("cumla.cuda").replace(".", "/").strip("/")
    launcher = ROOT / "cumla/launch" / family / f"{stem}.py"
    words = set(stem.split("_"))
    references = (ROOT / "cumla/reference" / family).glob("*.py")
    pages = (ROOT / "docs/kernels").glob("*.md")
    there = {
        "launcher": launcher.is_file(),
        "reference": any(words.issuperset(path.stem.split("_")) for path in references)
        or (launcher.is_file() and mirrors_in_numpy(launcher)),
        "test": (ROOT / "tests/launch" / family / f"test_{stem}.py").is_file(),
        "page": any(stem in path.read_text(encoding="utf-8") for path in pages),
    }
    return {what for what, is_there in there.items() if not is_there}


def test_every_kernel_has_its_name_in_every_layer() -> None:
    kernels = {(spec.package, spec.stem) for spec in all_specs()}
    missing = {(what, stem) for package, stem in kernels for what in lacks(package, stem)}
    assert missing == KNOWN
