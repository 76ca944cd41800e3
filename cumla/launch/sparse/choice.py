# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernels for lists of rows, and of the shape of top_k for a row."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import HEAD_DIM, NARROW_ROWS, SWAPPED_ROWS
from cumla.launch.split.plan import ROW_GROUP, ROW_TILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cumla.launch.sparse.shape import MLASparseShape

__all__ = [
    "QUAD",
    "RULES",
    "TOP_K_SHAPES",
    "Rules",
    "choose_top_k",
    "form_of",
    "reads_lists",
    "tile_heads",
]


@dataclass(frozen=True)
class Rules:
    """The numbers of all choices for lists, each with its reason and its file in records/.

    Those that name no file were set in development, and no figures were kept.
    """

    # Thread blocks for each list and tile of fewer heads, at least: with fewer, heads that share a
    # list read its rows several times and gain nothing
    # (docs/history/mla_sparse.md, Tiles of heads).
    fewest_pieces: int = 4
    # Row tiles of lists for each multiprocessor from which on the kernel whose thread blocks share
    # loads is faster: by the columns of a row, of up to 16 heads, then of more
    # (sparse-16-bit-forms.json; lists of one cache share rows in L2, and then arithmetic binds).
    # With more heads over 512 columns it always is: its ring has room for half a block more.
    many_narrow_tiles: tuple[float, float] = 5.0, 7.5
    many_tiles: tuple[float, float] = 0.68, 0.0
    # Thread blocks for each list in 16 bits and 16 of its heads, from which on few lists are split
    # by heads (sparse-16-bit-forms.json).
    fewest_swapped_pieces: int = 32
    # Lists of 512 columns in 16 bits for each multiprocessor up to which the kernel reads them
    # itself (sparse-16-bit-forms.json). It gains with more lists, too, but blocks of absent rows
    # take their full time.
    most_read_lists: float = 0.5
    # KV blocks that cutting a list of V4's rows must save: they take long.
    v4_saving: int = 3
    # Cost of a block of V4's rows in the choice of tiles of heads, in groups of 16 heads
    # (sparse-order-ladder.json).
    v4_block_cost: int = 2
    # KV blocks of a piece, at least, of packed rows, of V4's, and of 16-bit rows for at most 16
    # heads: few lists end earlier (h200-few-lists.json, sparse-order-ladder.json).
    least_share: int = 1
    # KV blocks for each 16 query rows, at multiples of which batch-invariant lists are cut: so
    # storing and combining a piece stays a constant share of computing it.
    piece_blocks_of_group: int = 8


RULES = Rules()


def form_of(shape: MLASparseShape, columns: int) -> str:
    """Choose a kernel for rows in 16 bits, as one of VARIANTS of cumla.launch.mla.shape.

    The kernel of few heads has other bits than the others, which batch-invariant lists keep to.
    """
    row_tiles = -(-shape.num_heads // ROW_TILE)
    is_narrow = shape.num_heads <= SWAPPED_ROWS
    most = (RULES.many_narrow_tiles if is_narrow else RULES.many_tiles)[columns != HEAD_DIM]
    many = shape.num_places * row_tiles >= most * shape.sm_count
    if is_narrow and not (many or shape.batch_invariant or shape.has_max_logits):
        return "swapped"
    if tile_heads(shape) == SWAPPED_ROWS:
        return "swapped"
    has_ring = columns != HEAD_DIM
    return "shared_blocks" if row_tiles > 1 or many or has_ring else "one_tile"


def reads_lists(shape: MLASparseShape) -> bool:
    """Tell whether a kernel of rows of 512 columns in 16 bits reads lists itself.

    Few lists take less time so, unless most entries are absent. Absent rows are part of blocks, so
    that batch-invariant lists would have other bits.
    """
    is_plain = not (shape.batch_invariant or shape.has_max_logits)
    few = shape.num_places <= RULES.most_read_lists * shape.sm_count
    return is_plain and few and shape.num_heads <= ROW_TILE


def tile_heads(shape: MLASparseShape) -> int:
    """Choose the heads of one thread block: fewer where it computes from e4m3 numbers.

    Few lists are cut by heads, too. Kernels of widened rows compute for 64 heads, however few a
    tile has, so a tile may have any number of groups of 16.
    """
    if shape.cache == "same":
        tiles = -(-shape.num_heads // SWAPPED_ROWS)
        few = tiles * shape.num_places * RULES.fewest_swapped_pieces <= shape.sm_count
        is_plain = not (shape.batch_invariant or shape.has_max_logits)
        return SWAPPED_ROWS if tiles > 1 and few and is_plain else ROW_TILE
    narrow, wide = NARROW_ROWS
    if not shape.reads_lists:
        return narrow if shape.num_heads <= narrow else wide
    if shape.is_widened:
        widths = list(range(ROW_GROUP, ROW_TILE + 1, ROW_GROUP))
    else:  # no wider than all heads need
        all_widths = narrow, wide, ROW_TILE
        widths = [rows for rows in all_widths if rows < 2 * max(shape.num_heads, narrow)]
    if shape.batch_invariant:
        return widths[-1]
    return min(widths, key=lambda rows: _order_of(shape, rows))


def _order_of(shape: MLASparseShape, rows: int) -> tuple[float, int]:
    """KV blocks of a thread block with so many heads of a list, and what its piece costs.

    All thread blocks store and join their pieces at the same time, through L2: for each 16
    heads that takes as long as a KV block, as measured, and half as long as one of V4's rows.
    Lists so short that the schedule does not cut them (min_saving) count as if it did. Of tiles
    of equal costs the narrowest is taken, but for V4's rows the widest of which a list has two:
    they have L2 fetch rows for each other.
    """
    tiles = -(-shape.num_heads // rows)
    pieces = shape.sm_count // max(tiles * shape.num_places, 1)
    if tiles > 1 and rows < ROW_TILE and pieces < RULES.fewest_pieces:
        return inf, rows
    blocks = -(-shape.max_blocks // max(min(pieces, shape.max_blocks), 1))
    cost = RULES.v4_block_cost if shape.is_widened else 1
    order = -rows if shape.is_widened and tiles > 1 else rows
    return blocks * cost + -(-min(rows, shape.num_heads) // ROW_GROUP), order


_HEAD_BYTES = constant("sparse/top_k", "sizeof(TopKShared)")
_ENTRY_BYTES = constant("sparse/top_k", "sizeof(u64)")
QUAD = 4  # scores that a thread loads at once
_CLUSTERS = (1, 2, 4, 8)


class TopKShape(NamedTuple):
    """A kernel's size, and what a row costs in it.

    Times are microseconds; they were fitted to an H200 and choose between shapes, no more
    (top-k-ladder.json, top-k-long-rows.json, top-k-short-rows.json in records/).
    """

    threads: int
    held: int  # groups of four keys of a thread in registers
    stored: int  # and in shared memory
    entries: int  # of the list
    blocks: int  # on a multiprocessor
    clusters: tuple[int, ...]  # blocks that may share a row
    fixed: float  # time of a block
    by_key: float  # time of 1,024 keys of a block

    @property
    def smem_bytes(self) -> int:
        stored = self.stored * self.threads * QUAD * 4
        return _HEAD_BYTES + self.entries * _ENTRY_BYTES + stored

    def holds(self, keys: int, cluster: int) -> bool:
        """Tell whether that many blocks keep a row's keys, or marks; one without takes any."""
        groups = self.held + self.stored * (32 if self.is_sampled else 1)
        return not groups or keys <= groups * QUAD * self.threads * cluster

    @property
    def is_sampled(self) -> bool:
        """Whether shared memory has a mark for each key."""
        return not self.held and self.stored > 0

    @property
    def most(self) -> int:
        """Entries that may be wanted: a sample selects some more."""
        return self.entries // 2 if self.is_sampled else self.entries

    @property
    def takes_turns(self) -> bool:
        """Whether more than a list may be wanted."""
        return not self.held and not self.stored


TOP_K_SHAPES = {
    "short": TopKShape(512, 4, 0, 4096, 2, (1,), 2.2, 0.2),
    "row": TopKShape(1024, 8, 0, 8192, 1, (1,), 2.6, 0.2),
    "rows": TopKShape(512, 8, 8, 3072, 2, (1,), 4.0, 0.36),
    "cluster": TopKShape(1024, 6, 2, 8192, 1, _CLUSTERS[1:], 2.6, 0.2),
    "wide": TopKShape(1024, 6, 10, 5120, 1, _CLUSTERS, 3.5, 0.24),
    "scanned": TopKShape(1024, 0, 2, 8192, 1, (1,), 6.5, 0.1),
    "sampled": TopKShape(1024, 0, 2, 8192, 1, _CLUSTERS[1:], 6.5, 0.12),
    "streamed": TopKShape(512, 0, 0, 8192, 1, _CLUSTERS, 4.0, 1.0),
}
# Time of a cluster's waits, and the number of clusters that 132 multiprocessors run at once.
_CLUSTER_TIME = {1: 0.0, 2: 1.5, 4: 2.0, 8: 3.0}
_CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}


def choose_top_k(
    rows: int, keys: int, wanted: int, is_sorted: bool, sm_count: int
) -> tuple[str, int]:
    """Choose a kernel's shape, and how many blocks share a row, by the times of both."""
    _, name, cluster = min(_times(rows, keys, wanted, is_sorted, sm_count))
    return name, cluster


def _times(
    rows: int, keys: int, wanted: int, is_sorted: bool, sm_count: int
) -> Iterator[tuple[float, str, int]]:
    """List the time of each shape that serves: only one that streams the rows takes turns."""
    for name, shape in TOP_K_SHAPES.items():
        if wanted > shape.most and (is_sorted or not shape.takes_turns):
            continue
        for cluster in shape.clusters:
            if shape.holds(keys, cluster):
                at_once = max(_CLUSTERS_AT_ONCE[cluster] * sm_count * shape.blocks // 132, 1)
                time = shape.fixed + _CLUSTER_TIME[cluster] + shape.by_key * keys / cluster / 1024
                yield -(-rows // at_once) * time, name, cluster
