# SPDX-License-Identifier: Apache-2.0
"""What follows from the shape of a call alone: tiles, parts, and the layout of a plan's buffer.

Everything here is a pure function of the key; cumla/cuda/split/plan.cuh holds the device's side of
the terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import gcd

__all__ = [
    "BLOCK_TOKENS",
    "CACHES",
    "HEAD_DIM",
    "MOST_PARTS",
    "MOST_TOKENS",
    "NARROW_ROWS",
    "PAGE_FORMS",
    "ROW_TILE",
    "SWAPPED_ROWS",
    "VALUE_DIM",
    "VARIANTS",
    "MLADecodeKey",
    "PlanKey",
    "PlanLayout",
    "page_form",
    "piece_blocks",
]

HEAD_DIM = 576  # 512 latent + 64 RoPE columns
VALUE_DIM = 512  # the latent columns are the value
BLOCK_TOKENS = 64  # tokens that a schedule deals out at once
ROW_TILE = 64  # query rows of one thread block, and of a place of a ragged schedule
ROW_GROUP = 16  # of them in one warp: partial results hold whole groups

VARIANTS = ("swapped", "one_tile", "shared_blocks")
"""Kernels of cuda/mla/mla_decode_swapped.cu and cuda/mla/mla_decode.cu that attend."""
PAGE_FORMS = ("pages", "boxes", "rows")
"""Each of these kernels in three forms, by how a KV block comes from its pages."""
SWAPPED_ROWS = 16  # most query rows of a kv head that the first of them takes
CACHES = ("same", "e4m3")
"""What a cache holds: numbers of the query's dtype, or e4m3 ones, in any of their formats."""
NARROW_ROWS = (16, 32)  # query rows of a thread block of cuda/mla/mla_decode_fp8.cu

PLACE_BYTES = 8  # struct Place
TILE_PLACE_BYTES = 32  # struct TilePlace
PART_BYTES = 48  # struct Part
TICKET_BYTES = 16  # struct Ticket

MOST_TOKENS = 0x7FFFFFC0  # kMaxTokens: of a request; the number of blocks still fits an int

MOST_PARTS = 65535  # thread blocks along y of a grid

_MAX_WAVES = 3  # of thread blocks, where the row tiles do not divide the multiprocessors
# Share of the multiprocessors that are busy, from which on more parts are not worth it.
_GOOD_FILL = 0.9
_ALIGNMENT = 256
_LEAST_BOX = 8  # rows: the period of the swizzle


def page_form(page_size: int) -> str:
    """Tell which of PAGE_FORMS serves a page size: the only place where that is chosen.

    Parameters
    ----------
    page_size : int
        Tokens of a cache page.

    Returns
    -------
    str
        ``"pages"`` for multiples of 64: a block is 64 rows of one page. ``"boxes"`` for what has 8,
        16 or 32 as its greatest common divisor with 64: several boxes of so many rows. ``"rows"``
        for the others, such as 1: each row is copied for itself.
    """
    rows = gcd(page_size, BLOCK_TOKENS)
    if rows == BLOCK_TOKENS:
        return "pages"
    return "boxes" if rows >= _LEAST_BOX else "rows"


def piece_blocks(row_groups: int) -> int:
    """Tell where batch-invariant requests are cut: at multiples of so many KV blocks.

    It grows with the rows, so that storing and joining a piece stays a like share of computing it.

    Parameters
    ----------
    row_groups : int
        Groups of 16 query rows, whose partial results are stored and joined.

    Returns
    -------
    int
        KV blocks.
    """
    return 8 * row_groups


class PlanKey(ABC):
    """What follows in the same way from every shape for which a plan is made.

    A shape is a frozen dataclass, most of whose fields these are.
    """

    num_heads: int
    num_kv_heads: int
    page_size: int
    sm_count: int
    batch_invariant: bool = False

    @property
    @abstractmethod
    def tiles(self) -> int:
        """Thread blocks that work on the same part."""

    @property
    @abstractmethod
    def row_tiles(self) -> int:
        """Thread blocks that read the same KV blocks at the same time: those of a kv head."""

    @property
    @abstractmethod
    def fetches_ahead(self) -> bool:
        """Whether the kernel has L2 fetch blocks before it loads them."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Shares into which the KV blocks are dealt."""

    @property
    @abstractmethod
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile: what is stored of its partial results."""

    @property
    @abstractmethod
    def places_bytes(self) -> int:
        """Size of what the schedule lists: an order of requests, or row tiles."""

    @cached_property
    def form(self) -> str:
        """Which of PAGE_FORMS serves these pages."""
        return page_form(self.page_size)

    @cached_property
    def box_rows(self) -> int:
        """Rows of a KV block that lie in one page wherever it begins: those of one load."""
        return gcd(self.page_size, BLOCK_TOKENS)

    @cached_property
    def wide_rows(self) -> int:
        """Rows of a KV block that L2 fetches at once, ahead: of a whole page two tiles share it."""
        return min(self.box_rows, BLOCK_TOKENS // 2)

    @cached_property
    def heads_per_group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def may_wait(self) -> bool:
        """Whether all thread blocks fit on the GPU at once, so that one may wait for another."""
        return self.parts * self.tiles <= self.sm_count

    @cached_property
    def num_tickets(self) -> int:
        """Places where thread blocks meet that share work: one for each part and tile."""
        return self.tiles * self.parts if self.parts > 1 else 0

    @cached_property
    def layout(self) -> PlanLayout:
        """Where things lie in the plan's buffer."""
        return PlanLayout.of(self)


@dataclass(frozen=True)
class MLADecodeKey(PlanKey):
    """The shape for which a plan is made.

    Attributes
    ----------
    batch, q_len, num_heads, num_kv_heads : int
        As in ``q`` (batch, q_len, num_heads, 576); num_kv_heads divides num_heads.
    page_size : int
        Tokens of a cache page.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    causal : bool
        Bottom-right causal mask.
    device : int or None
        CUDA ordinal; None for arrays on the CPU, which need no plan.
    sm_count : int
        Multiprocessors of that device, 0 for the CPU.
    batch_invariant : bool
        Requests are cut at fixed positions, whatever else is in the batch.
    max_blocks : int
        Most KV blocks of a request; 0 unless batch_invariant.
    pinned : str or None
        One of VARIANTS that somebody asked for.
    cache : str
        One of CACHES.
    """

    batch: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: str
    causal: bool
    device: int | None
    sm_count: int
    batch_invariant: bool = False
    max_blocks: int = 0
    pinned: str | None = None
    cache: str = "same"

    @cached_property
    def variant(self) -> str:
        """Which of VARIANTS serves this shape: the only place where that is chosen.

        Up to 16 query rows of a kv head: operands swapped, for a matrix product has 64 rows on its
        M side at least. Up to 64: one row tile, bound by memory, which gives room back as early as
        possible. More: several row tiles read the same KV blocks, bound by arithmetic, and
        products run beside each softmax.
        """
        if self.pinned is not None:
            return self.pinned
        if self.group_rows <= SWAPPED_ROWS:
            return "swapped"
        return "one_tile" if self.row_tiles == 1 else "shared_blocks"

    @property
    def fetches_ahead(self) -> bool:
        """Whether the kernel has L2 fetch blocks before it loads them."""
        return self.cache == "same" and self.variant == "shared_blocks"

    @cached_property
    def group_rows(self) -> int:
        """Query rows of a kv head."""
        return self.q_len * self.heads_per_group

    @cached_property
    def row_tile(self) -> int:
        """Query rows of one thread block: fewer where it computes from e4m3 numbers."""
        if self.cache == "same":
            return ROW_TILE
        narrow, wide = NARROW_ROWS
        return narrow if self.group_rows <= narrow else wide

    @cached_property
    def row_tiles(self) -> int:
        """Row tiles of a kv head."""
        return -(-self.group_rows // self.row_tile)

    @cached_property
    def tiles(self) -> int:
        """Row tiles of all kv heads: thread blocks that work on the same part."""
        return self.row_tiles * self.num_kv_heads

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile: what is stored of its partial results."""
        return -(-min(self.row_tile, self.group_rows) // ROW_GROUP)

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks of all requests are dealt.

        As many as fill the multiprocessors once; where that leaves more than a tenth of them idle,
        up to three waves. Batch-invariant ones: for all pieces of the longest requests.
        """
        if self.batch_invariant:
            return self.batch * max(1, -(-self.max_blocks // piece_blocks(self.row_groups)))
        once = max(1, self.sm_count // self.tiles)
        best, best_fill = once, 0.0
        for parts in range(once, max(once, _MAX_WAVES * self.sm_count // self.tiles) + 1):
            blocks = parts * self.tiles
            fill = blocks / (-(-blocks // self.sm_count) * self.sm_count)
            if fill > best_fill + 1e-9:
                best, best_fill = parts, fill
            if fill >= _GOOD_FILL:
                break
        return best

    @property
    def num_places(self) -> int:
        """Places of the schedule's order: one for each request."""
        return self.batch

    @property
    def places_bytes(self) -> int:
        """Size of the schedule's order."""
        return self.num_places * PLACE_BYTES


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Byte offsets into a plan's buffer (256-byte aligned), and its size."""

    places: int
    parts: int
    tickets: int
    partial_lse: int
    partial_out: int
    nbytes: int

    @classmethod
    def of(cls, key: PlanKey) -> PlanLayout:
        """Lay out the buffer for a key."""
        pieces = key.tiles * key.parts * 2 if key.parts > 1 else 0
        rows = pieces * key.row_groups * ROW_GROUP
        offsets = [0]
        for size in (
            key.places_bytes,
            key.parts * PART_BYTES,
            key.num_tickets * TICKET_BYTES,
            rows * 4,
            rows * VALUE_DIM * 4,
        ):
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        return cls(*offsets)
