# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention_decode.cu, which attention.py launches: few query rows."""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.mha.attention import CAPPED, PARAMS, named, tiles_of
from cumla.launch.source import HALVES, KernelSpec, in_cuda

_TILES = ((1, 1), (2, 2), (3, 2), (4, 4))  # of 64 columns, of keys and of values
_FILE = "mha/attention_decode"
_VARIANTS = ("", CAPPED, "linear")
_WARPS = constant(_FILE, "kDecodeWarps")
CHUNK_TOKENS = constant(_FILE, "kChunk")  # of a warp at once


def tile_bytes(row_bytes: int) -> int:
    """Return the bytes of a row that are contiguous, with a swizzle as wide."""
    return 128 if row_bytes % 128 == 0 else 64


def _fits(tiles: tuple[int, int], rows: int, e4m3: bool) -> bool:
    """Tell whether two chunks of each warp fit into shared memory, and what it has into registers.

    The kernel checks the former, and compiling an entry point both.
    """
    if e4m3:
        return (tiles, rows) != ((4, 4), 16)
    return tiles == (1, 1) or (tiles, rows) == ((2, 2), 8)


def _spec(dtype: str, tiles: tuple[int, int], rows: int, e4m3: bool, variant: str) -> KernelSpec:
    columns = [str(64 * count) for count in tiles]
    form = ["e4m3"] if e4m3 else []
    layout = f"DecodeLayout<{', '.join(columns)}, {rows}, {in_cuda(e4m3)}>"
    end = f"{layout}{{}}.undone({layout}::kQuerySlots, 0)"
    return KernelSpec.of(
        *("mha", "attention_decode", PARAMS[variant]),
        *(dtype, *columns, rows, e4m3, *([] if variant else [False])),  # no caps
        name=named("attention_decode", variant),
        tags=[dtype, *columns, *form, str(rows)],
        threads=32 * _WARPS,
        smem_bytes=constant(_FILE, end),
    )


_SPECS = {
    key: _spec(*key)
    for key in product(HALVES, _TILES, (8, 16), (False, True), _VARIANTS)
    if _fits(*key[1:4]) and key[1] in tiles_of(key[4].replace(CAPPED, ""))
}
SPECS = tuple(_SPECS.values())
WITH_CAPS = {spec: _SPECS[*key[:4], CAPPED] for key, spec in _SPECS.items() if not key[4]}


def decode_spec(
    dtype: str, tiles: tuple[int, int], rows: int, e4m3: bool, variant: str = ""
) -> tuple[int, KernelSpec] | None:
    """Find the kernel for the query rows of a kv head, and its own rows; None if too many."""
    for most in (8, 16):
        spec = _SPECS.get((dtype, tiles, most, e4m3, variant))
        if spec and rows <= most:
            return most, spec
    return None
