# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_attention_rest.cu: lists of row tiles that were not united."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.blocks.block_attention import block_attention_values, block_maps
from cumla.launch.blocks.choice import list_ctas
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import BlockKey
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.launch import MHAArguments

_FILE = "blocks/block_attention_rest"
_WARPS = constant(_FILE, "kRestWarps")
_SPECS = {
    dtype: KernelSpec.of(
        *("blocks", "block_attention_rest", "BlockAttentionRestParams", dtype),
        tags=[dtype],
        threads=32 * _WARPS,
        min_blocks=list_ctas(_WARPS),
        smem_bytes=constant(_FILE, "DecodeLayout<true, kRestWarps>::kBytes"),
    )
    for dtype in HALVES
}
SPECS = tuple(_SPECS.values())


def rest_spec(key: BlockKey) -> KernelSpec:
    """Find the kernel of a shape."""
    return _SPECS[key.dtype]


def block_attention_rest_launch(
    key: BlockKey,
    buffer: int,
    arguments: MHAArguments,
    lists: Mapping[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe attention to lists that are left, as `block_attention_launch` does.

    `buffer` is where the schedule begins.
    """
    tile = key.tile
    assert tile is not None
    places, *_ = tile.layout.schedule_at(buffer)
    values = {
        **block_attention_values(key, arguments, lists, out, lse),
        **block_maps(key, arguments),
        "cluster_log2": 0,
        "places": places,
        "counts": tile.counts_at(buffer),
        "left": tile.left_at(buffer),
        "total_tokens": tile.total_tokens,
        "tile_tokens": tile.tile_tokens,
        "by_tile_tokens": divisor_of(tile.tile_tokens),
    }
    return launch_of(rest_spec(key), (list_ctas(_WARPS) * key.sm_count, 1, 1), values)
