# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_scores.cu: the largest product of a query row with each block."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.blocks.choice import RULES, scores_ctas, warp_blocks
from cumla.launch.device import sm_count_of
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = [
    "COLUMNS",
    "FORMS",
    "KEYS_AT_ONCE",
    "MOST_HEADS",
    "SPECS",
    "BlockScoresArguments",
    "block_scores_launch",
    "known_dtype",
    "scores_spec",
]

_FILE = "blocks/block_scores"
_THREADS, _WARPS = (constant(_FILE, name) for name in ("kScoreThreads", "kScoreWarps"))
MOST_HEADS = constant(_FILE, "kScoreRows")
KEYS_AT_ONCE = constant(_FILE, "kKeysAtOnce")
COLUMNS = (64, 128, 256)
FORMS = {  # of a dtype: what is multiplied, and whether it is e4m3 in memory
    "bfloat16": ("bfloat16", False),
    "float16": ("float16", False),
    "float8_e4m3fn": ("float16", True),
}


def _spec(dtype: str, columns: int) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    form, ctas = "e4m3" if is_e4m3 else kind, scores_ctas(is_e4m3, columns)
    return KernelSpec.of(
        *("blocks", "block_scores", "BlockScoresParams"),
        *(kind, is_e4m3, columns),
        tags=[form, str(columns)],
        threads=_THREADS,
        min_blocks=ctas if ctas > RULES.scores_ctas else 1,
    )


_SPECS = {key: _spec(*key) for key in product(FORMS, COLUMNS)}
SPECS = tuple(_SPECS.values())


def scores_spec(dtype: str, columns: int) -> KernelSpec:
    """Find the kernel of a dtype of keys, and their columns."""
    return _SPECS[known_dtype(dtype), columns]


def known_dtype(dtype: str) -> str:
    """Name the dtype of keys by that of their numbers."""
    return "float8_e4m3fn" if dtype == "uint8" else dtype


class BlockScoresArguments(NamedTuple):
    """Checked views of one call."""

    q: ArrayView  # (tokens, heads, columns), or with an axis of requests before
    keys: ArrayView  # (num_pages, page_size, columns)
    block_table: ArrayView  # (requests, max_pages) int32
    block_size: int
    causal: bool

    @property
    def width(self) -> int:
        """Blocks that the pages of a request hold."""
        return self.block_table.shape[1] * (self.keys.shape[1] // self.block_size)


def block_scores_launch(rows: int, arguments: BlockScoresArguments, out: ArrayView) -> Launch:
    """Describe how to score all blocks; `rows` is the address of what each query token sees."""
    a = arguments
    *lead, heads, columns = a.q.shape
    tokens, q_len = prod(lead), lead[1] if len(lead) == 2 else 0
    width, batch = a.width, max(a.block_table.shape[0], 1)
    tile = max(1, min(MOST_HEADS // heads, tokens // batch))
    at_once = sm_count_of(out.device) * scores_ctas(FORMS[known_dtype(a.q.dtype)][1], columns)
    each = warp_blocks(width, a.block_size, -(-tokens // tile), _WARPS, at_once)
    in_page = a.keys.shape[1] // a.block_size
    values = {
        "rows": rows,
        "q": a.q.ptr,
        "q_stride_batch": a.q.strides[0] if q_len else 0,
        "q_stride_token": a.q.strides[-3],
        "q_stride_head": a.q.strides[-2],
        "keys": a.keys.ptr,
        "keys_stride_page": a.keys.strides[0],
        "keys_stride_row": a.keys.strides[1],
        "block_table": a.block_table.ptr,
        "block_table_stride": a.block_table.strides[0] // 4,
        "out": out.ptr,
        "out_stride_token": out.strides[0] // 4,
        "out_stride_head": out.strides[1] // 4,
        "total_tokens": tokens,
        "tile_tokens": tile,
        "heads": heads,
        "width": width,
        "warp_blocks": each,
        "batch": a.block_table.shape[0],
        "max_pages": a.block_table.shape[1],
        "num_pages": a.keys.shape[0],
        "page_size": a.keys.shape[1],
        "block_size": a.block_size,
        "blocks_per_page": in_page,
        "q_len": q_len,
        "by_heads": divisor_of(heads),
        "by_blocks_per_page": divisor_of(in_page),
        "by_q_len": divisor_of(q_len or 1 << 31),
    }
    grid = (-(-tokens // tile), -(-width // (_WARPS * each)), 1)
    return launch_of(scores_spec(a.q.dtype, columns), grid, values)
