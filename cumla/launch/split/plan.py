# SPDX-License-Identifier: Apache-2.0
"""Keys of plans, the number of their parts, and the layout of their buffers.

Everything here is a pure function of the key and knows no family: each has keys of its own, which
name the width of its values. cumla/cuda/split/plan.cuh holds the device's side of the terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Self

from cumla.launch.layouts import constant

_FILE = "split/schedule"
BLOCK_TOKENS = constant(_FILE, "kBlockTokens")  # that a schedule deals out at once
# Query rows of one thread block, and of a place of a ragged schedule.
ROW_TILE = constant(_FILE, "kRowTile")
ROW_GROUP = constant(_FILE, "kRowGroup")  # of them in one warp: partial results hold whole groups

PAGE_FORMS = ("pages", "boxes", "rows")
"""Ways to load a KV block from pages: each attention kernel over a paged cache has these forms."""

PLACE_BYTES, TILE_PLACE_BYTES, PART_BYTES, TICKET_BYTES = (
    constant(_FILE, f"sizeof({name})") for name in ("Place", "TilePlace", "Part", "Ticket")
)

MOST_TOKENS = constant(_FILE, "kMaxTokens")  # of a request; the number of blocks still fits an int

MOST_PARTS = 65535  # thread blocks along y of a grid

_ALIGNMENT = 256
_LEAST_BOX = 8  # rows: the period of the swizzle


@dataclass(frozen=True)
class Rules:
    """The numbers by which all schedules divide KV blocks, as measured on an H200."""

    # KV blocks that a request, or a piece of one, costs beside its own: loads before, stores after.
    fixed_cost: int = 2
    # KV blocks that cutting costs: uneven parts may cost as much instead.
    cut_cost: int = 16
    # Cost of a share, or blocks of a piece, at least.
    min_share: int = 2
    # KV blocks between a cut of packed parts or of shares and an end of its request, at least.
    min_blocks: int = 4
    # KV blocks that a piece costs, beside so many for each 16 query rows: to be stored, counted and
    # combined, with log-normal lengths.
    piece_cost: int = 2
    piece_cost_of_group: int = 2
    # KV blocks at multiples of which batch-invariant requests are cut, for 1 to 4 times 16 query
    # rows. With half as many a request of 131,072 tokens has two waves of pieces, all of which one
    # thread block combines alone; with twice as many 16 requests of 8,192 leave the GPU idle.
    piece_blocks: tuple[int, ...] = (16, 32, 32, 32)
    # Pieces of a batch-invariant request that one thread block adds up, at most: as many as
    # split/join.cuh adds one after the other.
    most_pieces: int = 8
    # Query tokens of a batch-invariant request of MLA that is cut, at most: as many as drafts have.
    cut_tokens: int = 8
    # KV blocks that cutting must save, beside two for each 16 query rows: partial results are
    # stored and combined. A single thread block for each part has L2 to itself: no more than most.
    saving: int = 1
    saving_of_group: int = 2
    most_saving_of_one_tile: int = 5
    # Waves of thread blocks, where the row tiles do not divide the multiprocessors.
    max_waves: int = 3
    # Share of busy multiprocessors from which on more parts are not worth it.
    good_fill: float = 0.9


RULES = Rules()


def page_form(page_size: int) -> str:
    """Return which of PAGE_FORMS serves a page size: the only place where that is chosen.

    ``"pages"`` is for multiples of 64: a block is 64 rows of one page. ``"boxes"`` is for what has
    8, 16 or 32 as its greatest common divisor with 64: several boxes of so many rows. ``"rows"`` is
    for the others, such as 1: each row is copied for itself.
    """
    rows = gcd(page_size, BLOCK_TOKENS)
    if rows == BLOCK_TOKENS:
        return "pages"
    return "boxes" if rows >= _LEAST_BOX else "rows"


def piece_blocks(row_groups: int) -> int:
    """Return the KV blocks at whose multiples batch-invariant requests are split."""
    return RULES.piece_blocks[row_groups - 1]


def piece_cost(row_groups: int) -> int:
    """Return how many KV blocks a piece of a request costs; `row_groups` are of 16 query rows."""
    return RULES.piece_cost_of_group * row_groups + RULES.piece_cost


def min_saving(row_groups: int, tiles: int = 1) -> int:
    """Return how many KV blocks cutting a request must save, with `tiles` thread blocks a part."""
    saving = RULES.saving + RULES.saving_of_group * row_groups
    return min(saving, RULES.most_saving_of_one_tile) if tiles == 1 else saving


def filling_parts(tiles: int, sm_count: int) -> int:
    """Tell into how many parts KV blocks are dealt so that the multiprocessors are busy.

    `tiles` thread blocks work on the same part, and a multiprocessor runs one thread block at a
    time. There are as many parts as fill the multiprocessors once; where that leaves more than a
    tenth of them idle, up to three waves.
    """
    once = max(1, sm_count // tiles)
    best, best_fill = once, 0.0
    for parts in range(once, max(once, RULES.max_waves * sm_count // tiles) + 1):
        blocks = parts * tiles
        fill = blocks / (-(-blocks // sm_count) * sm_count)
        if fill > best_fill + 1e-9:
            best, best_fill = parts, fill
        if fill >= RULES.good_fill:
            break
    return best


class PlanKey(ABC):
    """Base of the keys of plans: properties that all shapes have.

    A shape is a frozen dataclass with most of these fields.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    causal: bool
    sm_count: int
    batch_invariant: bool = False
    max_blocks: int = 0

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Columns of a value, and of an output row."""

    @property
    def piece_row_bytes(self) -> int:
        """Size of a row of a piece."""
        return 4 * self.value_dim

    @property
    @abstractmethod
    def row_tiles(self) -> int:
        """Thread blocks that read the same KV blocks at the same time: those of a kv head."""

    @cached_property
    def tiles(self) -> int:
        """Thread blocks that work on the same part: those of all kv heads."""
        return self.row_tiles * self.num_kv_heads

    @property
    @abstractmethod
    def fetches_ahead(self) -> bool:
        """Return whether the kernel has L2 fetch blocks before it loads them."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Shares into which the KV blocks are dealt."""

    @property
    def cut_parts(self) -> int:
        """Parts that may have a piece of a request: room is left for those."""
        is_cut = self.parts > 1 and (self.fixed_pieces > 1 or not self.batch_invariant)
        return self.parts if is_cut else 0

    @property
    @abstractmethod
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile: what is stored of its partial results."""

    @property
    def min_saving(self) -> int:
        """KV blocks that cutting a request must save."""
        return min_saving(self.row_groups, self.tiles)

    @property
    def min_share(self) -> int:
        """Cost of a part's share, or KV blocks of a piece, at least."""
        return RULES.min_share

    @property
    @abstractmethod
    def num_places(self) -> int:
        """Places that the schedule lists: requests, row tiles or lists."""

    @property
    def places_bytes(self) -> int:
        """Size of what the schedule lists: an order of requests or lists, or row tiles."""
        return self.num_places * PLACE_BYTES

    @cached_property
    def form(self) -> str:
        """The one of PAGE_FORMS that serves these pages."""
        return page_form(self.page_size)

    @cached_property
    def box_rows(self) -> int:
        """Rows of a KV block that are in one page wherever it begins: those of one load."""
        return gcd(self.page_size, BLOCK_TOKENS)

    @cached_property
    def wide_rows(self) -> int:
        """Rows of a KV block that L2 fetches at once, ahead: of a whole page two tiles share it."""
        return min(self.box_rows, BLOCK_TOKENS // 2)

    @cached_property
    def heads_per_group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def piece_blocks(self) -> int:
        """KV blocks at multiples of which batch-invariant requests are cut."""
        return piece_blocks(self.row_groups)

    @property
    def most_pieces(self) -> int:
        """Pieces of a batch-invariant request that one thread block may have; 0: just one."""
        return 0

    @cached_property
    def fixed_pieces(self) -> int:
        """Pieces of the longest batch-invariant request: split/schedule.cu cuts all like that."""
        return 1 + max(self.max_blocks - self.min_saving, 0) // self.piece_blocks

    @cached_property
    def may_wait(self) -> bool:
        """Return whether all thread blocks fit on the GPU at once, so one may wait for another."""
        return self.parts * self.tiles <= self.sm_count

    @cached_property
    def num_tickets(self) -> int:
        """Places where thread blocks meet that share work: one for each such part and tile."""
        return self.tiles * self.cut_parts

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer."""
        return PlanLayout.of(self)


class RaggedKey(PlanKey):
    """Base of the keys whose requests have different numbers of query tokens."""

    total_tokens: int
    max_pieces: int = 1  # of a batch-invariant request
    # "batch": all row tiles. "unsplit": all in one part, as a batch-invariant schedule begins.
    role: str = "batch"

    @cached_property
    def cut_parts(self) -> int:
        """Parts that may have a piece of a request: none if the longest one is not cut."""
        is_cut = self.parts > 1 and (self.max_pieces > 1 or not self.batch_invariant)
        return self.parts if is_cut else 0

    @property
    def is_uncut(self) -> bool:
        """Return whether no row tile is split among several parts."""
        return self.role == "unsplit"

    @cached_property
    def without_cuts(self) -> Self:
        """The key of a schedule that lists the row tiles in the same places, in one part."""
        return replace(self, role="unsplit")  # type: ignore[type-var]

    @property
    def most_cut_rows(self) -> int:
        """Query rows of a kv head of a batch-invariant request that is cut, at most."""
        return ROW_TILE

    @property
    def schedule_page_size(self) -> int:
        """Tokens for each entry that kv_indptr counts."""
        return self.page_size

    @property
    def row_tile(self) -> int:
        """Query rows at a place of the schedule."""
        return ROW_TILE

    @property
    def schedule_window(self) -> int:
        """Visible keys before a query's own, as far as the schedule knows it; -1: all."""
        return -1

    @property
    def numbers_requests(self) -> bool:
        """Return whether the schedule has the requests' numbers, for arrays of one number each."""
        return False

    @cached_property
    def has_small_batch(self) -> bool:
        """Return whether each warp of the schedule can hold all requests, and a part for each."""
        cuts = self.parts > 1 and not self.batch_invariant and self.beside is None
        return cuts and 0 < self.batch <= min(self.parts, 32)

    @cached_property
    def beside(self) -> RaggedKey | None:
        """The key of a second schedule, of the whole tiles of a mixed batch."""
        return None

    @property
    def shares(self) -> int:
        """Divisor of all blocks that bounds those of a short request in a mixed batch."""
        return 1

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer, which ends with that of `beside`."""
        own = PlanLayout.of(self)
        return replace(own, nbytes=own.nbytes + self.beside.layout.nbytes) if self.beside else own

    def schedule_values(self, buffer: int) -> dict[str, int]:
        """Name what kernels that write a schedule get of a plan's buffer."""
        places, parts, tickets = self.layout.schedule_at(buffer)
        return {
            "places": places,
            "parts_out": parts,
            "tickets": tickets,
            "max_places": self.num_places,
            "parts": self.parts,
            "num_tickets": self.num_tickets,
        }

    def beside_at(self, buffer: int) -> int:
        """Return the address of the buffer of `beside`."""
        return buffer + (self.layout.nbytes - (self.beside.layout.nbytes if self.beside else 0))

    @property
    def fixed_cost(self) -> int:
        """KV blocks that a row tile costs beside its own."""
        return RULES.fixed_cost

    @property
    def piece_cost(self) -> int:
        """KV blocks that a piece of a row tile costs: to be stored, counted and joined."""
        return piece_cost(self.row_groups)

    @property
    def min_blocks(self) -> int:
        """KV blocks between a cut and the ends of its row tile, at least."""
        return RULES.min_blocks

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head that all requests may have together, however long each is."""
        return self.total_tokens * self.heads_per_group // ROW_TILE + self.batch

    @property
    def places_bytes(self) -> int:
        """Size of the schedule's list of row tiles."""
        return self.num_places * TILE_PLACE_BYTES


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Byte offsets into a plan's buffer (256-byte aligned), and its size."""

    places: int
    parts: int
    tickets: int
    partial_rows: int
    partial_out: int
    nbytes: int

    @classmethod
    def of(cls, key: PlanKey) -> PlanLayout:
        """Lay out the buffer for a key."""
        pieces = key.tiles * key.cut_parts * 2
        rows = pieces * key.row_groups * ROW_GROUP
        offsets = [0]
        for size in (
            key.places_bytes,
            key.parts * PART_BYTES,
            key.num_tickets * TICKET_BYTES,
            rows * 8,
            rows * key.piece_row_bytes,
        ):
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        return cls(*offsets)

    def schedule_at(self, buffer: int) -> tuple[int, int, int]:
        """Return the addresses of places, parts and tickets in a buffer."""
        return buffer + self.places, buffer + self.parts, buffer + self.tickets

    def partials_at(self, buffer: int) -> tuple[int, int]:
        """Return the addresses of partial outputs and of what belongs to their rows."""
        return buffer + self.partial_out, buffer + self.partial_rows
