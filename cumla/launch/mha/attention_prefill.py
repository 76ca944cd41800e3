# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention_prefill.cu, which attention.py launches: whole row tiles."""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.mha.attention import (
    LISTED,
    LISTED_TILES,
    PARAMS,
    WIDENED,
    WIDENED_TILES,
    tiles_of,
)
from cumla.launch.source import HALVES, KernelSpec

_TILES = ((1, 1), (2, 2), (3, 2), (4, 4))  # of keys and of values
_VARIANTS = ("", "masked", "linear", "table")
_TABLE_TILES = ((2, 2),)  # of others registers do not suffice
SPLIT_ROWS = 128  # query rows of a thread block where keys are split: of two consumers


def block_tokens(tiles: tuple[int, int]) -> int:
    """Return how many keys a block has: with 256 columns as many as registers and memory hold."""
    return 64 if tiles == (4, 4) else 128


def _consumers(tiles: tuple[int, int], rows: bool) -> int:
    """Count the warpgroups that compute, 64 query rows each: as many as registers allow."""
    return 3 if tiles == (1, 1) and not rows else 2


def tile_rows(tiles: tuple[int, int], form: str) -> int:
    """Return how many query rows a thread block has at once."""
    return 64 * _consumers(tiles, form == "rows")


def _spec(
    dtype: str,
    tiles: tuple[int, int],
    rows: bool,
    variant: str,
    split: bool = False,
    capped: bool = False,
) -> KernelSpec:
    """Describe a kernel; `capped`: with the softcap and float32 results that a lean one lacks."""
    names = (str(64 * tiles[0]), str(64 * tiles[1]))
    block = block_tokens(tiles)
    consumers = SPLIT_ROWS // 64 if split else _consumers(tiles, rows)
    is_lean = variant in _VARIANTS and not (rows or capped)
    more = [split, False] if is_lean else [True] if split else []
    sizes = map(str, (*tiles, block, consumers, *(["true"] if split else [])))
    layout = f"PrefillLayout<{', '.join(sizes)}>"
    size = "kTableBytes" if variant == "table" else "kBytes"
    return KernelSpec.of(
        *("mha", "attention_prefill", PARAMS[variant]),
        *(dtype, *tiles, block, consumers, rows, *more),
        name="_".join(filter(None, ("attention_prefill", variant, "capped" if capped else ""))),
        tags=[dtype, *names, *(["rows"] if rows else []), *(["split"] if split else [])],
        threads=128 * (1 + consumers),
        smem_bytes=constant("mha/attention_prefill", f"{layout}::{size}"),
    )


_SPECS = {
    (dtype, tiles, rows, variant): _spec(dtype, tiles, rows, variant)
    for dtype, tiles, rows, variant in product(HALVES, _TILES, (False, True), _VARIANTS)
    if not (rows and (variant or tiles == (4, 4)))  # has too few registers
    and tiles in (_TABLE_TILES if variant == "table" else tiles_of(variant))
} | {
    (dtype, tiles, False, variant): _spec(dtype, tiles, False, variant)
    for variant, some in ((LISTED, LISTED_TILES), (WIDENED, WIDENED_TILES))
    for dtype, tiles in product(HALVES, some)
}
_SPLIT_SPECS = {
    (dtype, tiles, variant): _spec(dtype, tiles, False, variant, split=True)
    for dtype, tiles, variant in product(HALVES, _TILES, ("", "masked"))
}
_WITH_CAPS = {
    spec: _spec(dtype, tiles, False, variant, capped=True)
    for (dtype, tiles, rows, variant), spec in _SPECS.items()
    if variant in _VARIANTS and not rows
} | {
    spec: _spec(dtype, tiles, False, variant, split=True, capped=True)
    for (dtype, tiles, variant), spec in _SPLIT_SPECS.items()
}
SPECS = (*_SPECS.values(), *_SPLIT_SPECS.values(), *_WITH_CAPS.values())


def with_caps(spec: KernelSpec) -> KernelSpec:
    """Look up the kernel that takes a softcap and writes float32, if `spec` does not."""
    return _WITH_CAPS.get(spec, spec)


def prefill_spec(
    dtype: str, tiles: tuple[int, int], rows: bool, variant: str = ""
) -> KernelSpec | None:
    """Look up the kernel of these tiles of 64 columns; `rows`: of pages that are copied by rows."""
    return _SPECS.get((dtype, tiles, rows, variant))


def split_spec(dtype: str, tiles: tuple[int, int], variant: str) -> KernelSpec | None:
    """Look up the kernel that splits the keys of whole row tiles among thread blocks."""
    return _SPLIT_SPECS.get((dtype, tiles, variant))
