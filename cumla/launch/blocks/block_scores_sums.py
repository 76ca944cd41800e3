# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_scores_sums.cu: sums over heads, pooled keys, listed blocks."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.blocks.block_scores import COLUMNS, FORMS, known_dtype
from cumla.launch.blocks.choice import RULES, scores_ctas, warp_blocks
from cumla.launch.device import sm_count_of
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "blocks/block_scores_sums"
_THREADS, _WARPS, _ROWS, _AT_ONCE, _PROMPT_HEADS, _PROMPT_UNITS = (
    constant(_FILE, name)
    for name in (
        *("kScoreThreads", "kScoreWarps", "kScoreRows", "kKeysAtOnce"),
        *("kPromptHeads", "kPromptUnits"),
    )
)
MOST_GROUP_HEADS = _ROWS
_MOST_SHARED = 128  # columns, beyond which a multiprocessor has a thread block, or two of e4m3


def _spec(dtype: str, columns: int, prompts: bool) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    form = "e4m3" if is_e4m3 else kind
    ctas = RULES.scores_ctas if prompts else scores_ctas(is_e4m3, columns)
    return KernelSpec.of(
        *("blocks", "block_scores_sums", "BlockScoresSumsParams"),
        *(kind, is_e4m3, columns, prompts),
        tags=[*(["prompts"] if prompts else []), form, str(columns)],
        threads=_THREADS,
        min_blocks=1 if columns > _MOST_SHARED and (prompts or not is_e4m3) else ctas,
    )


_SPECS = {key: _spec(*key) for key in product(FORMS, COLUMNS, (False, True))}
SPECS = tuple(_SPECS.values())


def scores_sums_specs(dtype: str, columns: int, block_rows: int) -> tuple[KernelSpec, ...]:
    """Find the kernels of a dtype of keys, their columns, and rows of keys of a block."""
    forms = (False, True) if block_rows == 1 else (False,)
    return tuple(_SPECS[known_dtype(dtype), columns, prompts] for prompts in forms)


class BlockScoresSumsArguments(NamedTuple):
    """Checked views of one call."""

    q: ArrayView  # (tokens, groups * group_heads, columns), or with an axis of requests before
    keys: ArrayView  # (num_pages, rows of a page, columns)
    block_table: ArrayView  # (requests, max_pages) int32
    block_rows: int  # rows of keys of a block
    stride: int  # tokens of a row of keys
    groups: int
    weights: ArrayView | None  # (tokens, groups * group_heads) float32
    is_relu: bool
    entries: ArrayView | None  # (tokens, groups or 1, width) int32 or int64
    causal: bool

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return prod(self.q.shape[:-2])

    @property
    def each_request(self) -> int:
        """Query tokens of a request, on average."""
        return self.tokens // max(self.block_table.shape[0], 1)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.block_rows * self.stride

    @property
    def width(self) -> int:
        """Blocks that the pages of a request hold, or entries of a list."""
        if self.entries is not None:
            return self.entries.shape[2]
        return self.block_table.shape[1] * (self.keys.shape[1] // self.block_rows)


def group_shift(group_heads: int) -> int:
    """Return the power of two that holds the heads of a group, at least two."""
    return max(1, (group_heads - 1).bit_length())


class Tiles(NamedTuple):
    """How thread blocks divide query tokens and groups."""

    tokens: int  # of a tile
    groups: int
    of_tokens: int  # tiles
    of_groups: int


def sums_tiles(arguments: BlockScoresSumsArguments, units: int) -> Tiles:
    """Divide query tokens and groups among thread blocks with so many groups of a token each."""
    a, entries = arguments, arguments.entries
    has_own_lists = entries is not None and entries.shape[1] > 1
    groups = 1 if has_own_lists else min(a.groups, units)
    most = 1 if entries is not None else units // groups
    tokens = max(1, min(most, a.each_request))
    return Tiles(tokens, groups, -(-a.tokens // tokens), -(-a.groups // groups))


def sums_values(
    rows: int,
    arguments: BlockScoresSumsArguments,
    out: ArrayView,
    tiles: Tiles,
    item_blocks: int,
    warp_items: int,
) -> dict[str, object]:
    """Fill in BlockScoresSumsParams."""
    a, entries, weights = arguments, arguments.entries, arguments.weights
    q_len = a.q.shape[1] if len(a.q.shape) == 4 else 0
    group_heads = a.q.shape[-2] // a.groups
    has_own_lists = entries is not None and entries.shape[1] > 1
    return {
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
        "weights": weights.ptr if weights is not None else 0,
        "weights_stride_token": weights.strides[0] // 4 if weights is not None else 0,
        "weights_stride_head": weights.strides[1] // 4 if weights is not None else 0,
        "entries": entries.ptr if entries is not None else 0,
        "entries_stride_token": entries.strides[0] if entries is not None else 0,
        "entries_stride_group": entries.strides[1] if entries is not None and has_own_lists else 0,
        "entries_stride_entry": entries.strides[2] if entries is not None else 0,
        "out": out.ptr,
        "out_stride_token": out.strides[0] // 4,
        "out_stride_group": out.strides[1] // 4,
        "total_tokens": a.tokens,
        "tile_tokens": tiles.tokens,
        "tile_groups": tiles.groups,
        "groups": a.groups,
        "group_heads": group_heads,
        "group_shift": group_shift(group_heads),
        "width": a.width,
        "items": -(-a.width // item_blocks),
        "item_blocks": item_blocks,
        "warp_items": warp_items,
        "batch": a.block_table.shape[0],
        "max_pages": a.block_table.shape[1],
        "num_pages": a.keys.shape[0],
        "page_rows": a.keys.shape[1],
        "block_rows": a.block_rows,
        "page_size": a.keys.shape[1] * a.stride,
        "q_len": q_len,
        "is_relu": a.is_relu,
        "entries_are_wide": entries is not None and entries.dtype == "int64",
        "by_tile_groups": divisor_of(tiles.groups),
        "by_page_rows": divisor_of(a.keys.shape[1]),
        "by_block_rows": divisor_of(a.block_rows),
        "by_row_tokens": divisor_of(a.stride),
        "by_q_len": divisor_of(q_len or 1 << 31),
    }


def block_scores_sums_launch(
    rows: int, arguments: BlockScoresSumsArguments, out: ArrayView
) -> Launch:
    """Describe how to score blocks; `rows` is the address of what each query token sees."""
    a = arguments
    group_heads, columns = a.q.shape[-2] // a.groups, a.q.shape[-1]
    item_blocks = 1 if a.block_rows > 1 else _AT_ONCE
    items = -(-a.width // item_blocks)
    prompts = (
        *(a.block_rows == 1, a.entries is None, group_heads <= _PROMPT_HEADS),
        a.each_request * a.groups >= _PROMPT_UNITS,
    )
    tiles = sums_tiles(a, _PROMPT_UNITS if all(prompts) else _ROWS >> group_shift(group_heads))
    at_once = sm_count_of(out.device) * scores_ctas(FORMS[known_dtype(a.q.dtype)][1], columns)
    many = tiles.of_tokens * tiles.of_groups
    each = warp_blocks(items, a.block_rows * item_blocks, many, _WARPS, at_once)
    values = sums_values(rows, a, out, tiles, item_blocks, each)
    grid = (tiles.of_tokens, -(-items // (_WARPS * each)), tiles.of_groups)
    return launch_of(_SPECS[known_dtype(a.q.dtype), columns, all(prompts)], grid, values)
