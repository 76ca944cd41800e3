# SPDX-License-Identifier: Apache-2.0
"""The key of a plan for attention to lists of cache rows, and the layout of its buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from cumla.launch.mla.shape import NARROW_ROWS, VALUE_DIM, LatentKey
from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    ROW_GROUP,
    ROW_TILE,
    PlanLayout,
    filling_parts,
)
from cumla.mla.shape import E4M3_512, FORMATS, NO_ROPE, PACKED, V4, V41, V41_FP4

__all__ = ["PACKED", "RULES", "V4", "WHOLE_ROWS", "WIDENED", "MLASparseKey"]

WHOLE_ROWS = (PACKED, NO_ROPE, E4M3_512)
"""Caches of whole rows: e4m3 latent columns, perhaps four scales, perhaps RoPE columns."""
WIDENED = (V4, V41, V41_FP4)
"""Caches whose rows of 512 columns become bfloat16 in shared memory."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class Rules:
    """The numbers by which kernels and schedules for lists are chosen, as measured on an H200."""

    # Thread blocks for each list and tile of fewer heads, at least: with fewer, heads that share a
    # list read its rows several times and gain nothing.
    fewest_pieces: int = 4
    # Row tiles of lists for each multiprocessor from which on many lists share rows in L2: then
    # arithmetic binds, and the kernel whose thread blocks share loads is faster.
    many_tiles: int = 4
    # The same of at most 16 heads, over rows with RoPE columns.
    many_narrow_tiles: float = 0.9
    # KV blocks that cutting a list of V4's rows must save: they take long.
    v4_saving: int = 3
    # What a block of V4's rows costs where tiles of heads are chosen, in groups of 16 heads.
    v4_block_cost: int = 2
    # KV blocks of a piece, at least, of packed rows for many heads, of V4's, and of
    # 16-bit rows for at most 16 heads.
    least_share: int = 1
    # KV blocks for each 16 query rows, at multiples of which batch-invariant lists are cut: so
    # storing and combining a piece stays a constant share of computing it.
    piece_blocks_of_group: int = 8


RULES = Rules()


@dataclass(frozen=True)
class MLASparseKey(LatentKey):
    """The shape for which a plan of attention to lists of rows is made.

    Each query token has a list, and each list a place in the schedule: the kernels see as many
    requests of one query token.
    """

    batch: int  # q is (batch, q_len, num_heads, 576)
    q_len: int
    num_heads: int
    topk: int  # entries of a list
    dtype: str  # "bfloat16" or "float16"
    cache: str  # one of CACHES of cumla.launch.mla.shape, or of FORMATS
    device: int | None  # CUDA ordinal; None for arrays on the CPU, which need no plan
    sm_count: int  # multiprocessors of that device, 0 for the CPU
    batch_invariant: bool = False
    extra_topk: int = 0  # entries of a list that name rows of a second cache
    has_max_logits: bool = False  # the largest score of each row is an output, too; cache "same"
    extra_cache: str = ""  # the format of that second cache, beside one of WIDENED

    num_kv_heads = 1
    page_size = 1  # what a list names is one row
    causal = False

    @property
    def has_whole_rows(self) -> bool:
        """Whether the kernel computes from whole packed rows."""
        return self.cache in WHOLE_ROWS

    @property
    def reads_lists(self) -> bool:
        """Whether the kernel reads the caller's lists, which then are not made compact."""
        return self.cache in FORMATS

    @property
    def is_widened(self) -> bool:
        """Whether a kernel for one or two caches of WIDENED computes."""
        return self.cache in WIDENED

    @cached_property
    def row_tile(self) -> int:
        """Heads of one thread block: fewer where it computes from e4m3 numbers.

        Few lists of whole or widened rows are cut by heads, too. Kernels of widened rows compute
        for 64 heads, however few a tile has, so a tile may have any number of groups of 16.
        """
        if self.cache == "same":
            return ROW_TILE
        narrow, wide = NARROW_ROWS
        if not self.reads_lists:
            return narrow if self.num_heads <= narrow else wide
        if self.is_widened:
            widths = list(range(ROW_GROUP, ROW_TILE + 1, ROW_GROUP))
        else:  # no wider than all heads need
            all_widths = narrow, wide, ROW_TILE
            widths = [rows for rows in all_widths if rows < 2 * max(self.num_heads, narrow)]
        return widths[-1] if self.batch_invariant else min(widths, key=self._order_of)

    def _order_of(self, rows: int) -> tuple[float, int]:
        """KV blocks of a thread block with so many heads of a list, and what its piece costs.

        All thread blocks store and join their pieces at the same time, through L2: for each 16
        heads that takes as long as a KV block, as measured, and half as long as one of V4's rows.
        Lists so short that the schedule does not cut them (min_saving) count as if it did. Of tiles
        of equal costs the narrowest is taken, but for V4's rows the widest of which a list has two:
        they have L2 fetch rows for each other.
        """
        tiles = -(-self.num_heads // rows)
        pieces = self.sm_count // max(tiles * self.num_places, 1)
        if tiles > 1 and rows < ROW_TILE and pieces < RULES.fewest_pieces:
            return inf, rows
        blocks = -(-self.max_blocks // max(min(pieces, self.max_blocks), 1))
        cost = RULES.v4_block_cost if self.is_widened else 1
        order = -rows if self.is_widened and tiles > 1 else rows
        return blocks * cost + -(-min(rows, self.num_heads) // ROW_GROUP), order

    @cached_property
    def row_tiles(self) -> int:
        """Thread blocks of a query token."""
        return -(-self.num_heads // self.row_tile)

    @property
    def fetches_ahead(self) -> bool:
        """Whether a tensor map tells what L2 fetches ahead: single rows need none."""
        return False

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 heads in a tile: what is stored of its partial results."""
        return -(-min(self.row_tile, self.num_heads) // ROW_GROUP)

    @property
    def min_saving(self) -> int:
        """KV blocks that cutting a list must save: few of widened rows, which take long."""
        return RULES.v4_saving if self.is_widened else super().min_saving

    @property
    def min_share(self) -> int:
        """KV blocks of a piece, at least."""
        is_narrow = self.cache == "same" and self.num_heads <= NARROW_ROWS[0]
        is_least = self.has_whole_rows or self.is_widened or is_narrow
        return RULES.least_share if is_least else super().min_share

    @property
    def num_places(self) -> int:
        """Lists: one for each query token."""
        return self.batch * self.q_len

    @property
    def topks(self) -> tuple[int, int]:
        """Entries of a list, by the cache whose rows they name."""
        return self.topk, self.extra_topk

    @property
    def entries(self) -> int:
        """Entries of a list."""
        return self.topk + self.extra_topk

    @property
    def max_blocks(self) -> int:  # type: ignore[override]
        """Most blocks of 64 entries of a list."""
        return -(-self.entries // BLOCK_TOKENS)

    @property
    def piece_blocks(self) -> int:
        """Blocks at multiples of which batch-invariant lists are cut."""
        return RULES.piece_blocks_of_group * self.row_groups

    @cached_property
    def parts(self) -> int:
        """Shares into which the blocks of all lists are dealt."""
        if self.batch_invariant:
            return self.num_places * self.fixed_pieces
        return filling_parts(self.tiles, self.sm_count)

    @cached_property
    def selected(self) -> int:
        """Offset of the selected rows in the buffer, and after them how many each list has.

        Most kernels for rows of formats look at the lists themselves.
        """
        return PlanLayout.of(self).nbytes

    @property
    def counts(self) -> int:
        """Offset in the buffer of the number of rows of each list."""
        entries = 0 if self.reads_lists else self.num_places * self.entries
        return self.selected + entries * 4

    @cached_property
    def bounds(self) -> int:
        """Offset in the buffer of the greatest length of each list."""
        return _aligned(self.counts + self.num_places * 4)

    @property
    def list_bounds(self) -> tuple[int, ...]:
        """The same, by the cache whose rows a list names; the schedule is made for the sums."""
        if not self.extra_topk:
            return (self.bounds,)
        return tuple(self.bounds + i * self.num_places * 4 for i in (1, 2))

    @cached_property
    def zeros(self) -> int:
        """Offset in the buffer of a row of zeros, for absent RoPE columns or packed rows."""
        return _aligned(self.list_bounds[-1] + self.num_places * 4)

    @cached_property
    def partial_max_logits(self) -> int:
        """Offset in the buffer of the largest scores of pieces, in the order of their rows."""
        return _aligned(self.zeros + VALUE_DIM * 4)

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer; its size covers the lists as well."""
        layout = PlanLayout.of(self)
        maxima = (layout.partial_out - layout.partial_rows) // 2 if self.has_max_logits else 0
        return replace(layout, nbytes=self.partial_max_logits + maxima)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
