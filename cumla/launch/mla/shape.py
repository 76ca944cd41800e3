# SPDX-License-Identifier: Apache-2.0
"""Widths of rows, variants of kernels, and keys of plans of MLA."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode_wide import RULES as WIDE_RULES
from cumla.launch.split.plan import (
    MOST_PARTS,
    ROW_GROUP,
    ROW_TILE,
    RULES,
    PlanKey,
    PlanLayout,
    RaggedKey,
    filling_parts,
)
from cumla.launch.split.prefix_requests import PrefixLayout, PrefixShape
from cumla.mla.shape import HEAD_DIM, VALUE_DIM, WIDE, WIDTH, Width

__all__ = [
    "CACHES",
    "HEAD_DIM",
    "NARROW_ROWS",
    "SWAPPED_ROWS",
    "TREE",
    "VALUE_DIM",
    "VARIANTS",
    "LatentKey",
    "MLAAttentionKey",
    "MLADecodeKey",
]

VARIANTS = ("swapped", "one_tile", "shared_blocks")
"""Kernels of cuda/mla/mla_decode_swapped.cu and cuda/mla/mla_decode.cu that attend."""
# Most query rows of a kv head that the first of them takes.
SWAPPED_ROWS = constant("mla/mla_decode_swapped", "kSwappedRows")
CACHES = ("same", "e4m3")
"""Contents of a cache: numbers of the query's dtype, or e4m3 numbers in any format."""
Window = tuple[int, int] | None
"""Visible tokens before and behind a query's own, -1 for all; None: as `causal` says."""
TREE = (-1, -1)
"""The window of queries that are trees: bits say which of the last tokens each sees."""
NARROW_ROWS = (16, 32)  # query rows of a thread block of cuda/mla/mla_decode_fp8.cu
FEW_ROWS = constant("mla/mla_decode_wide_few", "kFewRows")  # of cuda/mla/mla_decode_wide_few.cu
FEW_KEYS = 1024  # most keys of a window that it takes
# Query rows of its tiles, thread blocks of a cluster, the reciprocal of the part of all
# multiprocessors that such clusters may take (those of four and more do not fill the GPU), and the
# most keys of requests of several tiles.
FEW_FORMS = (
    *((8, 8, 2, FEW_KEYS), (16, 8, 2, FEW_KEYS), (16, 4, 2, FEW_KEYS)),
    *((16, 2, 1, 640), (16, 1, 1, 640)),
)
WIDE_ROWS = constant("mla/mla_decode_wide", "kWideRows")  # of cuda/mla/mla_decode_wide.cu


class LatentKey(PlanKey):
    """Properties of a shape that the kernels need."""

    q_len: int
    dtype: str  # "bfloat16" or "float16"
    width: Width = WIDTH  # of a row

    @property
    def value_dim(self) -> int:
        """Columns of a value: the latent ones."""
        return self.width[0]

    @property
    def is_wide(self) -> bool:
        """Return whether kernels have room for two blocks in shared memory, and not for four."""
        return self.value_dim == VALUE_DIM

    @property
    def axis_q_len(self) -> int:
        """Query tokens of one step along the first axis of q."""
        return self.q_len

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster, each with its share of the columns of a row."""
        return 1

    @property
    def cluster_pieces(self) -> int:
        """Thread blocks of a cluster that share the keys of a row tile; 0: parts share them."""
        return 0

    @property
    def place_count(self) -> int:
        """Row tiles of a kv head, where all requests have as many queries."""
        return self.num_places

    @property
    def piece_row_bytes(self) -> int:
        """Size of a row of a piece: 24 bits a column."""
        return 3 * self.value_dim // self.cluster

    @property
    def has_whole_tiles(self) -> bool:
        """Return whether e4m3 rows meet 64 heads of one query token at a time."""
        return self.is_wide and self.heads_per_group % ROW_TILE == 0

    @property
    def has_fp8_products(self) -> bool:
        """Return whether e4m3 rows have a kernel with products in e4m3."""
        return self.has_whole_tiles and self.width == WIDTH


@dataclass(frozen=True)
class _DenseKey(LatentKey):
    """The first fields of the keys of both plans."""

    batch: int  # q is (batch, q_len, num_heads, 576)
    q_len: int  # query tokens that the kernel may look at
    num_heads: int
    num_kv_heads: int  # divides num_heads
    page_size: int  # tokens of a cache page
    dtype: str
    causal: bool  # bottom-right causal mask
    device: int | None  # CUDA ordinal; None for arrays on the CPU, which need no plan
    sm_count: int  # multiprocessors of that device, 0 for the CPU


@dataclass(frozen=True)
class MLADecodeKey(_DenseKey):
    """The shape for which a plan of :func:`cumla.mla_decode` is made."""

    # Requests are cut at fixed positions, whatever else is in the batch.
    batch_invariant: bool = False
    max_blocks: int = 0  # most KV blocks of a request; 0 unless batch_invariant
    pinned: str | None = None  # one of VARIANTS that somebody asked for
    cache: str = "same"  # one of CACHES
    window: Window = None
    width: Width = WIDTH

    @cached_property
    def by_tiles(self) -> MLAAttentionKey | None:
        """The key of a schedule of row tiles: of windows, without what is before them, or WIDE."""
        if self.window is None and self.width != WIDE:
            return None
        return MLAAttentionKey(
            **{field.name: getattr(self, field.name) for field in fields(_DenseKey)}
            | {"q_len": self.batch * self.q_len, "cache": self.cache},
            window=self.window,
            own_q_len=self.q_len,
            width=self.width,
        )

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer."""
        return self.by_tiles.layout if self.by_tiles else PlanLayout.of(self)

    @cached_property
    def variant(self) -> str:
        """The one of VARIANTS that serves this shape: the only place where that is chosen.

        By the query rows of a kv head (reasons: docs/kernels/mla.md).
        """
        if self.pinned is not None:
            return self.pinned
        if self.group_rows <= SWAPPED_ROWS:
            return "swapped"
        return "one_tile" if self.row_tiles == 1 and self.is_wide else "shared_blocks"

    @property
    def fetches_ahead(self) -> bool:
        """Return whether the kernel has L2 fetch blocks before it loads them."""
        return self.cache == "same" and self.variant == "shared_blocks" and self.is_wide

    @property
    def takes_pieces(self) -> bool:
        """Return whether a thread block may have all pieces of a batch-invariant request."""
        is_plain = self.cache == "same" and self.width == WIDTH and self.by_tiles is None
        return self.batch_invariant and is_plain and self.variant != "swapped"

    @property
    def most_pieces(self) -> int:
        """Pieces of a batch-invariant request that one thread block may have; 0: just one."""
        if not self.takes_pieces:
            return 0
        # split/join.cuh adds pieces one after the other where each thread block has more than four
        # units of 32 columns of 16 rows.
        return min(RULES.most_pieces, self.value_dim // 32 * self.row_groups // 5)

    @cached_property
    def group_rows(self) -> int:
        """Query rows of a kv head."""
        return self.q_len * self.heads_per_group

    @cached_property
    def row_tile(self) -> int:
        """Query rows of one thread block: fewer where it computes from e4m3 numbers."""
        if self.cache == "same" or self.has_whole_tiles:
            return ROW_TILE
        narrow, wide = NARROW_ROWS
        return narrow if self.group_rows <= narrow else wide

    @cached_property
    def row_tiles(self) -> int:
        """Row tiles of a kv head."""
        return max(1, -(-self.group_rows // self.row_tile))

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile: what is stored of its partial results."""
        return max(1, -(-min(self.row_tile, self.group_rows) // ROW_GROUP))

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks of all requests are dealt.

        As many as fill the multiprocessors; batch-invariant ones, for all pieces of the longest
        requests.
        """
        if self.batch_invariant:
            return self.batch * self.fixed_pieces
        return filling_parts(self.tiles, self.sm_count)

    @property
    def num_places(self) -> int:
        """Places of the schedule's order: one for each request."""
        return self.batch


@dataclass(frozen=True)
class MLAAttentionKey(_DenseKey, RaggedKey):
    """The shape for which a plan of :func:`cumla.mla_attention` is made: q has no axis of requests.

    ``q_len`` is that of all requests.
    """

    cache: str = "same"  # one of CACHES
    batch_invariant: bool = False  # requests are cut at fixed positions
    max_pieces: int = 1  # of a batch-invariant request
    more_pieces: int = 0  # of all batch-invariant requests, beyond one for each
    role: str = "batch"  # as RaggedKey says
    window: Window = None
    own_q_len: int = 0  # query tokens of each request if q has an axis of requests, else 0
    max_pages: int = 0  # columns of the block table of requests that share prefixes; 0: none do
    width: Width = WIDTH

    @property
    def axis_q_len(self) -> int:
        """Query tokens of one step along the first axis of q."""
        return self.own_q_len or self.q_len

    @property
    def schedule_window(self) -> int:
        """Visible tokens before a query's own; -1: all, as cuts at fixed positions take them."""
        return self.window[0] if self.window and not self.batch_invariant else -1

    @cached_property
    def prefix_keys(self) -> tuple[MLAAttentionKey, MLAAttentionKey]:
        """The keys of shared prefixes, all of whose keys all queries see, and of rests."""
        rests = replace(self, batch=self.prefix_shape.end_of_rests, max_pages=0)
        return replace(rests, causal=False), rests

    @cached_property
    def prefix_shape(self) -> PrefixShape:
        """Sizes for the kernels of shared prefixes."""
        sizes = self.batch, self.total_tokens, self.num_heads, self.value_dim, self.page_size
        return PrefixShape(*sizes, self.max_pages, needs_ends=False, is_together=False)

    @cached_property
    def prefix_layout(self) -> PrefixLayout:
        """Offsets of the arrays for shared prefixes in the plan's buffer, after both schedules."""
        nbytes = sum(key.layout.nbytes for key in self.prefix_keys)
        return PrefixLayout.of(self.prefix_shape, nbytes)

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets in the plan's buffer."""
        own = super().layout
        return replace(own, nbytes=self.prefix_layout.nbytes) if self.max_pages else own

    @property
    def total_tokens(self) -> int:  # type: ignore[override]
        """Rows of q, (total_tokens, num_heads, 576): most query tokens of all requests."""
        return self.q_len

    @property
    def row_tile(self) -> int:
        """Query rows at a place of the schedule."""
        if self.cluster_pieces:
            return self.few_form[0]
        if self.cluster > 1:
            return ROW_TILE
        return WIDE_ROWS if self.width == WIDE else ROW_TILE

    @cached_property
    def cluster(self) -> int:
        """Thread blocks of a cluster, each with its share of the columns of a row.

        Clusters are for what has more query rows than one thread block takes with all columns. A
        batch-invariant request has the same kernel in any batch.
        """
        if self.width != WIDE or self.cluster_pieces:
            return 1
        rows = max(self.own_q_len, 1) * self.heads_per_group
        return 2 if rows > WIDE_ROWS else 1

    @property
    def place_count(self) -> int:
        """Row tiles of a kv head, where all requests have as many queries."""
        return self.batch * -(-self.own_q_len * self.heads_per_group // self.row_tile)

    @cached_property
    def few_form(self) -> tuple[int, int]:
        """Query rows of a tile, and thread blocks of a cluster that share its keys; 0: none do.

        Short windows have them: requests of few query rows, and few requests (reasons:
        docs/kernels/mla.md).
        """
        sides = self.window or (-1, -1)
        keys = sum(sides) + self.own_q_len
        is_short = min(sides) >= 0 and keys <= FEW_KEYS
        if self.width != WIDE or not self.own_q_len or not is_short:
            return 0, 0
        rows = self.own_q_len * self.heads_per_group
        for tile, pieces, share, most_keys in FEW_FORMS:
            tiles = self.batch * self.num_kv_heads * -(-rows // tile)
            has_room = tiles * pieces <= self.sm_count // share
            if has_room and (rows <= FEW_ROWS or keys <= most_keys):
                return min(tile, -(-rows // 8) * 8), pieces
        fits = rows <= FEW_ROWS and self.batch <= MOST_PARTS
        return (-(-rows // 8) * 8, 1) if fits else (0, 0)

    @property
    def cluster_pieces(self) -> int:
        """Thread blocks of a cluster that share the keys of a row tile; 0: parts share them."""
        return self.few_form[1]

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head that all requests may have together, however long each is."""
        return self.total_tokens * self.heads_per_group // self.row_tile + self.batch

    @property
    def row_tiles(self) -> int:
        """Thread blocks that share the row tile at each place of the schedule."""
        if self.cache == "same" or self.has_whole_tiles:
            return self.cluster
        return ROW_TILE // NARROW_ROWS[-1]

    @property
    def fetches_ahead(self) -> bool:
        """Return whether the kernel has L2 fetch blocks before it loads them."""
        return self.cache == "same" and self.is_wide

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows of a thread block: what it stores of its partial results.

        Groups of 8 where a cluster shares keys.
        """
        if self.cluster_pieces:
            return self.row_tile // 8
        rows = self.row_tile * self.cluster // self.row_tiles
        if self.own_q_len:
            rows = min(rows, self.own_q_len * self.heads_per_group)
        return -(-rows // ROW_GROUP)

    @property
    def piece_cost(self) -> int:
        """KV blocks that a piece of a row tile costs; few where requests have few queries.

        Such a row tile has few blocks, whose chain takes longer than to combine its pieces, as
        long as multiprocessors are idle.
        """
        return RULES.piece_cost if self.own_q_len else super().piece_cost

    @property
    def min_blocks(self) -> int:
        """KV blocks between a cut and the ends of its row tile, at least."""
        if not self.own_q_len:
            return super().min_blocks
        tiles = self.batch * -(-self.own_q_len * self.heads_per_group // self.row_tile)
        is_alone = self.width == WIDE and self.parts // max(tiles, 1) > WIDE_RULES.few_parts
        return 1 if is_alone else RULES.min_share

    @property
    def most_cut_rows(self) -> int:
        """Query rows of a kv head of a batch-invariant request that is cut: those of drafts."""
        return max(RULES.cut_tokens * self.heads_per_group, ROW_TILE)

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks of all tiles are dealt: as many as fill the GPU once.

        Batch-invariant ones: one for each tile, and one for each further piece of a request.
        """
        if self.is_uncut or self.cluster_pieces:
            return 1
        if self.batch_invariant:
            tiles = -(-self.most_cut_rows // self.row_tile)  # of a request that is cut, at most
            more = min(tiles * self.more_pieces, self.num_places * (self.max_pieces - 1))
            return self.num_places + more
        return max(1, self.sm_count // self.tiles)
