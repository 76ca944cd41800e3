# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/widen_blocks.cu: e4m3 blocks of requests become blocks of 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import TileKey
    from cumla.launch.kernel import Launch

_THREADS = constant("blocks/widen_blocks", "kWidenThreads")
_SPECS = {
    dtype: KernelSpec.of(
        *("blocks", "widen_blocks", "WidenBlocksParams", dtype), tags=[dtype], threads=_THREADS
    )
    for dtype in HALVES
}
SPECS = tuple(_SPECS.values())


def widen_spec(key: TileKey) -> KernelSpec:
    """Find the kernel of a shape."""
    return _SPECS[key.dtype]


def widen_blocks_launch(
    key: TileKey, buffer: int, k: ArrayView, v: ArrayView, block_table: ArrayView
) -> Launch:
    """Describe how to widen the blocks that have slots; `buffer` is where the schedule begins."""
    num_pages, page_size = k.shape[:2]
    in_page = page_size // key.page_size
    columns = "base", "stride_page", "stride_row", "stride_head"
    values = {
        "slots": key.slots_at(buffer),
        "block_table": block_table.ptr,
        "block_table_stride": block_table.strides[0] // 4,
        "keys": strided(k, *columns),
        "values": strided(v, *columns),
        "keys_out": key.keys_at(buffer),
        "values_out": key.values_at(buffer),
        "counts": key.counts_at(buffer),
        "batch": block_table.shape[0],
        "max_pages": block_table.shape[1],
        "num_pages": num_pages,
        "block_size": key.page_size,
        "blocks_per_page": in_page,
        "kv_heads": key.num_kv_heads,
        "key_columns": key.head_dim,
        "value_columns": key.head_dim_v,
        "by_blocks_per_page": divisor_of(in_page),
    }
    return launch_of(widen_spec(key), (key.widened, key.num_kv_heads, 1), values)


def widened_pages(key: TileKey, buffer: int, k: ArrayView, v: ArrayView) -> list[ArrayView]:
    """View widened keys and values as pages, of which a slot is one."""
    found = []
    for view, ptr in ((k, key.keys_at(buffer)), (v, key.values_at(buffer))):
        heads, columns = view.shape[2:]
        row = 2 * columns
        found.append(
            view._replace(
                ptr=ptr,
                dtype=key.dtype,
                shape=(key.widened, key.page_size, heads, columns),
                strides=(heads * key.page_size * row, row, key.page_size * row, 2),
            )
        )
    return found
