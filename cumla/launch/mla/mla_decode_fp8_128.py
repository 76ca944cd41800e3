# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_128.cu: MLA attention of 128 heads to e4m3 caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import ROW_TILE, MLADecodeKey
from cumla.launch.source import KernelSpec
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey

CLUSTER = 2
"""Row tiles that share the rows they convert."""

SPECS = tuple(
    KernelSpec.of(
        *("mla", "mla_decode_fp8_128", "MlaDecodeFp8Params", f"ConvertedTile<Tile, {ctas}, {variant}>"),
        name=f"mla_decode_fp8_128_{ctas}_{variant}",
        threads=384,
        smem_bytes=constant("mla/mla_decode_fp8_128", "score_factor_in(SharedLayout(0), kRowTile) + 4"),
    )
    for ctas in (2, 1)
    for variant in (0, 1, 2, 3, 5)
)
FP8_128_SPEC = SPECS[0]


def serves(key: LatentKey) -> bool:
    """Tell whether the kernel serves a shape, under one factor for all columns."""
    tokens_share_rows = key.heads_per_group % (CLUSTER * ROW_TILE) == 0
    is_dense = isinstance(key, MLADecodeKey) and key.width == WIDTH
    return is_dense and tokens_share_rows and not key.batch_invariant
