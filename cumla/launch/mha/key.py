# SPDX-License-Identifier: Apache-2.0
"""The key of a plan for attention: a shape, and what is chosen for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cumla.launch.mha.choice import RULES, Choice, choose
from cumla.launch.mha.shape import COLUMNS, MHAShape
from cumla.launch.split.plan import ROW_GROUP, ROW_TILE, PlanLayout, filling_parts
from cumla.launch.split.prefix_requests import PrefixLayout, PrefixShape

__all__ = ["MHAKey"]


@dataclass(frozen=True)
class MHAKey(MHAShape):
    """The shape for which a plan of :func:`cumla.attention` is made."""

    @cached_property
    def choice(self) -> Choice:
        """The kernel, and its row tiles."""
        return choose(self)

    @property
    def schedule_window(self) -> int:
        """Visible keys before a query's own; whole row tiles are scheduled without a window."""
        unknown = self.choice.takes_full_tiles or self.batch_invariant
        return -1 if unknown else self.window_left

    @property
    def is_uncut(self) -> bool:
        """Return whether no row tile is split among several parts."""
        choice = self.choice
        return super().is_uncut or choice.takes_single_rows or choice.takes_full_tiles

    @property
    def is_of_chunks(self) -> bool:
        """Return whether it has the full tiles of a mixed batch, which may have none."""
        return self.role == "full tiles"

    @cached_property
    def beside(self) -> MHAKey | None:
        """The key of the full tiles of a batch that may have chunks of prompts."""
        return replace(self, role="full tiles") if self.choice.is_mixed else None

    @cached_property
    def both(self) -> MHAKey | None:
        """The key of prefixes and rests: tokens of q are numbered twice, first for prefixes."""
        if not self.max_pages:
            return None
        return replace(
            self,
            batch=self.prefix_shape.entries - 1,
            total_tokens=2 * self.total_tokens,
            q_len=self.total_tokens,
            causal=False,
            masked=self.prefix_shape.needs_ends,
            role="prefixes",
            max_pages=0,
        )

    @cached_property
    def prefix_shape(self) -> PrefixShape:
        """The shape as the kernels for shared prefixes have it."""
        sizes = self.batch, self.total_tokens, self.num_heads, self.head_dim_v, self.page_size
        return PrefixShape(*sizes, self.max_pages, self.causal and self.q_len != 1)

    @cached_property
    def prefix_layout(self) -> PrefixLayout:
        """Offsets of the arrays for shared prefixes in the plan's buffer, after its schedule."""
        assert self.both is not None
        return PrefixLayout.of(self.prefix_shape, self.both.layout.nbytes)

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer."""
        if self.both is None:
            return super().layout
        return replace(self.both.layout, nbytes=self.prefix_layout.nbytes)

    @property
    def shares(self) -> int:
        """A short tile beside full tiles is split from 1 / shares of all blocks on."""
        if self.has_window:
            return 2**31 - 1
        most, of = RULES.short_share
        return of * self.sm_count // (most * self.num_kv_heads) + 1

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head that all requests may have together, however long each is."""
        if self.beside:  # has those of many rows
            return self.batch
        rows = min(self.choice.row_tile, ROW_TILE)
        return self.total_tokens * self.heads_per_group // rows + self.batch

    @cached_property
    def box_rows(self) -> int:
        """Rows of a KV block that one load brings."""
        return self.choice.box_rows

    @property
    def row_tiles(self) -> int:
        """Thread blocks that share the row tile at each place of the schedule."""
        return 1

    @property
    def value_dim(self) -> int:
        """Columns of a partial result: those of the kernel's tiles."""
        return COLUMNS * self.kernel_tiles[1]

    @property
    def fetches_ahead(self) -> bool:
        """Return whether the kernel has L2 fetch blocks before it loads them."""
        return False

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile that a request may fill.

        All of them with `batch_invariant`: combining adds in an order that depends on their
        number, and that must not depend on other requests.
        """
        if self.batch_invariant:
            return ROW_TILE // ROW_GROUP
        if self.choice.takes_few_rows:
            return 1
        rows = (self.q_len or self.total_tokens) * self.heads_per_group
        most = ROW_TILE if self.is_uncut else self.choice.row_tile
        return -(-min(max(rows, 1), most) // ROW_GROUP)

    @cached_property
    def row_tile(self) -> int:
        """Query rows at a place of the schedule: those of a thread block."""
        return self.choice.row_tile

    @property
    def piece_cost(self) -> int:
        """KV blocks that a piece of a row tile costs."""
        return RULES.piece_cost + self.row_groups

    @property
    def piece_blocks(self) -> int:
        """KV blocks at multiples of which batch-invariant requests are cut."""
        return RULES.piece_blocks

    @property
    def fixed_cost(self) -> int:
        """KV blocks that a row tile costs beside its own."""
        return RULES.fixed_cost_of_prefixes if self.role == "prefixes" else super().fixed_cost

    @property
    def min_blocks(self) -> int:
        """KV blocks between a cut and the ends of its row tile, at least."""
        return RULES.min_blocks

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks are divided."""
        if self.is_uncut:
            return 1
        if self.batch_invariant:
            return self.num_places + self.more_pieces
        most = filling_parts(self.tiles // self.choice.box_heads, self.sm_count)
        if self.choice.box_heads == 1:
            return most
        least = RULES.least_whole_share[0] * most // RULES.least_whole_share[1]
        whole = (parts for parts in range(most, least, -1) if self.batch % parts == 0)
        return next(whole, most)

    @cached_property
    def may_wait(self) -> bool:
        """Return whether all thread blocks fit on the GPU at once, so one may wait for another."""
        return self.parts * self.tiles // self.choice.box_heads <= self.sm_count

    @cached_property
    def num_tickets(self) -> int:
        """Places where thread blocks meet; of full tiles the counter from which they are taken."""
        return 1 if self.choice.takes_full_tiles else super().num_tickets
