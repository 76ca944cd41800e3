# SPDX-License-Identifier: Apache-2.0
"""The key of a plan for attention to lists of cache rows, and the layout of its buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cumla.launch.mla.shape import NARROW_ROWS, VALUE_DIM
from cumla.launch.sparse.choice import RULES, tile_heads
from cumla.launch.sparse.shape import MLASparseShape
from cumla.launch.split.plan import ROW_GROUP, PlanLayout, filling_parts

__all__ = ["MLASparseKey"]

_ALIGNMENT = 256


@dataclass(frozen=True)
class MLASparseKey(MLASparseShape):
    """The shape for which a plan of attention to lists of rows is made.

    Each list has a place in the schedule: the kernels see as many requests of one query token.
    """

    @cached_property
    def row_tile(self) -> int:
        """Heads of one thread block."""
        return tile_heads(self)

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
        is_narrow = self.cache == "same" and min(self.row_tile, self.num_heads) <= NARROW_ROWS[0]
        is_least = self.has_whole_rows or self.is_widened or is_narrow
        return RULES.least_share if is_least else super().min_share

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
