# SPDX-License-Identifier: Apache-2.0
"""A kernel has one name in every layer: CUDA file, launcher, reference, test, page of the docs."""

from __future__ import annotations

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
    ("launcher", "mla_sparse_v41"),  # those of mla_sparse_v4
    ("test", "mla_sparse_v41"),
    ("test", "quantize_fp8"),
}


def lacks(package: str, stem: str) -> set[str]:
    """Return what a kernel does without.

    Its reference is a file named by some of the kernel's words or, of a schedule, the mirror in
    NumPy beside its tests.
    """
    family = package.removeprefix("cumla.cuda").replace(".", "/").strip("/")
    tests = ROOT / "tests/launch" / family
    words = set(stem.split("_"))
    references = (ROOT / "cumla/reference" / family).glob("*.py")
    pages = (ROOT / "docs/kernels").glob("*.md")
    there = {
        "launcher": (ROOT / "cumla/launch" / family / f"{stem}.py").is_file(),
        "reference": any(words.issuperset(path.stem.split("_")) for path in references)
        or (tests / f"{stem}_mirror.py").is_file(),
        "test": (tests / f"test_{stem}.py").is_file(),
        "page": any(stem in path.read_text(encoding="utf-8") for path in pages),
    }
    return {what for what, is_there in there.items() if not is_there}


def test_every_kernel_has_its_name_in_every_layer() -> None:
    kernels = {(spec.package, spec.stem) for spec in all_specs()}
    missing = {(what, stem) for package, stem in kernels for what in lacks(package, stem)}
    assert missing == KNOWN
