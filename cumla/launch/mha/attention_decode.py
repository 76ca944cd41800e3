# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention_decode.cu, which attention.py launches: few query rows."""

from __future__ import annotations

from itertools import product

from cumla.launch.source import HALVES, KernelSpec

_TILES = ((1, 1), (2, 2), (3, 2), (4, 4))  # of 64 columns, of keys and of values
_WARPS = 12
_TOO_WIDE = (((4, 4), 16, True), ((2, 2), 16, False))  # for the registers there are
CHUNK_TOKENS = 16  # of a warp at once
_SHARED_MOST = 232448


def tile_bytes(row_bytes: int) -> int:
    """Tell how many bytes of a row lie together, with a swizzle as wide."""
    return 128 if row_bytes % 128 == 0 else 64


def _smem(tiles: tuple[int, int], rows: int, e4m3: bool) -> int:
    """Count the bytes of DecodeLayout; 0 if fewer than two chunks of each warp fit."""
    chunk = CHUNK_TOKENS * 64 * sum(tiles) * (1 if e4m3 else 2)
    keys = 64 * tiles[0]
    holds_query = rows == 8 and keys <= 192
    query = rows * (keys * 2 + 4) * (3 if holds_query else 1)
    step, steps = _WARPS * (8 * 68 * 4 + 32), rows // 8 * tiles[1]
    others = step + _WARPS * (rows * 16 + 4 * 8) + 96 + query
    stages = min(3 if holds_query else 2, (_SHARED_MOST - others) // (_WARPS * chunk))
    if stages < 2:
        return 0
    least, more = _WARPS * stages * chunk + others, (steps - 1) * step
    fits = least + more <= _SHARED_MOST and (rows == 8 or tiles[0] == 1)
    return least + more if fits else least


def _spec(dtype: str, tiles: tuple[int, int], rows: int, e4m3: bool) -> KernelSpec:
    columns = [str(64 * count) for count in tiles]
    form = ["e4m3"] if e4m3 else []
    return KernelSpec.of(
        *("mha", "attention_decode", "AttentionParams"),
        *(dtype, *columns, rows, e4m3),
        tags=[dtype, *columns, *form, str(rows)],
        threads=32 * _WARPS,
        smem_bytes=_smem(tiles, rows, e4m3),
    )


_SPECS = {
    key: _spec(*key)
    for key in product(HALVES, _TILES, (8, 16), (False, True))
    if _smem(*key[1:]) and key[1:] not in _TOO_WIDE
}
SPECS = tuple(_SPECS.values())


def decode_spec(
    dtype: str, tiles: tuple[int, int], rows: int, e4m3: bool
) -> tuple[int, KernelSpec] | None:
    """Find the kernel of so many query rows of a kv head, and how many it has; None if too many."""
    for most in (8, 16):
        spec = _SPECS.get((dtype, tiles, most, e4m3))
        if spec and rows <= most:
            return most, spec
    return None
