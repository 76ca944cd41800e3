# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/top_k.cu: the k largest scores of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = ["MOST_COLUMNS", "MOST_SORTED", "SPECS", "TopKViews", "top_k_launch"]

MOST_COLUMNS = 1 << 30  # of a row: positions, and what a cluster adds, are 32-bit numbers
MOST_SORTED = 8192  # entries that the largest list holds

_HEAD_BYTES = constant("sparse/top_k", "sizeof(TopKShared)")
_ENTRY_BYTES = constant("sparse/top_k", "sizeof(u64)")
_QUAD = 4  # scores that a thread loads at once
_CLUSTERS = (1, 2, 4, 8)


class _Shape(NamedTuple):
    """A kernel's size, and what a row costs in it.

    Times are microseconds; they were fitted to an H200 and choose between shapes, no more.
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
        stored = self.stored * self.threads * _QUAD * 4
        return _HEAD_BYTES + self.entries * _ENTRY_BYTES + stored

    def holds(self, keys: int, cluster: int) -> bool:
        """Tell whether that many blocks keep a row's keys, or marks; one without takes any."""
        groups = self.held + self.stored * (32 if self.is_sampled else 1)
        return not groups or keys <= groups * _QUAD * self.threads * cluster

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


_SHAPES = {
    "short": _Shape(512, 4, 0, 4096, 2, (1,), 2.2, 0.2),
    "row": _Shape(1024, 8, 0, 8192, 1, (1,), 2.6, 0.2),
    "rows": _Shape(512, 8, 8, 3072, 2, (1,), 4.0, 0.36),
    "cluster": _Shape(1024, 6, 2, 8192, 1, _CLUSTERS[1:], 2.6, 0.2),
    "wide": _Shape(1024, 6, 10, 5120, 1, _CLUSTERS, 3.5, 0.24),
    "scanned": _Shape(1024, 0, 2, 8192, 1, (1,), 6.5, 0.1),
    "sampled": _Shape(1024, 0, 2, 8192, 1, _CLUSTERS[1:], 6.5, 0.12),
    "streamed": _Shape(512, 0, 0, 8192, 1, _CLUSTERS, 4.0, 1.0),
}
# What a cluster's waits take; and how many clusters 132 multiprocessors run at once.
_CLUSTER_TIME = {1: 0.0, 2: 1.5, 4: 2.0, 8: 3.0}
_CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}


def _spec(name: str, dtype: str) -> KernelSpec:
    shape = _SHAPES[name]
    return KernelSpec.of(
        *("sparse", "top_k", "TopKParams"),
        *(dtype, *shape[:4], len(shape.clusters) > 1),
        tags=[name, dtype],
        threads=shape.threads,
        min_blocks=shape.blocks,
        smem_bytes=shape.smem_bytes,
    )


_SPECS = {(name, dtype): _spec(name, dtype) for name in _SHAPES for dtype in FLOATS}
SPECS = tuple(_SPECS.values())


class TopKViews(NamedTuple):
    """Arrays of one call, on the GPU; all but the first, out and counts may be missing."""

    scores: ArrayView  # (rows, width), rows contiguous
    row_lens: ArrayView | None  # (rows,) int32, as all below but values
    row_starts: ArrayView | None
    block_table: ArrayView | None  # (requests, max_pages), rows contiguous
    row_to_request: ArrayView | None
    offsets: ArrayView | None
    out: ArrayView  # (rows, topk), rows contiguous
    positions: ArrayView | None  # (rows, topk), rows contiguous
    values: ArrayView | None  # (rows, topk) of the scores' dtype, contiguous
    counts: ArrayView  # (rows,)


def top_k_launch(
    views: TopKViews, topk: int, page_size: int, is_sorted: bool, sm_count: int
) -> Launch:
    """Describe how to select, from at least one row of up to `MOST_COLUMNS` scores.

    Where they are to be sorted, topk or the width is at most `MOST_SORTED`.
    """
    scores, table = views.scores, views.block_table
    rows, width = scores.shape
    name, cluster = choose(rows, _keys(views), min(topk, width), is_sorted, sm_count)
    requests, max_pages = (0, 0) if table is None else table.shape
    values = {
        "scores": scores.ptr,
        "scores_stride": scores.strides[0],
        **_entries("row_lens", "row_lens_stride", views.row_lens),
        **_entries("row_starts", "row_starts_stride", views.row_starts),
        **_entries("block_table", "table_stride", table),
        **_entries("row_to_request", "requests_stride", views.row_to_request),
        **_entries("offsets", "offsets_stride", views.offsets),
        **_entries("out", "out_stride", views.out),
        **_entries("positions", "positions_stride", views.positions),
        "values": 0 if views.values is None else views.values.ptr,
        **_entries("counts", "counts_stride", views.counts),
        "width": width,
        "topk": topk,
        "page_size": page_size,
        "max_pages": max_pages,
        "requests": requests,
        "cluster_log2": cluster.bit_length() - 1,
        "is_sorted": is_sorted,
    }
    grid = (rows * cluster, 1, 1)
    return launch_of(_SPECS[name, scores.dtype], grid, values, cluster)


def choose(rows: int, keys: int, wanted: int, is_sorted: bool, sm_count: int) -> tuple[str, int]:
    """Choose a kernel's shape, and how many blocks share a row, by the times of both."""
    _, name, cluster = min(_times(rows, keys, wanted, is_sorted, sm_count))
    return name, cluster


def _times(
    rows: int, keys: int, wanted: int, is_sorted: bool, sm_count: int
) -> Iterator[tuple[float, str, int]]:
    """List the time of each shape that serves: only one that streams the rows takes turns."""
    for name, shape in _SHAPES.items():
        if wanted > shape.most and (is_sorted or not shape.takes_turns):
            continue
        for cluster in shape.clusters:
            if shape.holds(keys, cluster):
                at_once = max(_CLUSTERS_AT_ONCE[cluster] * sm_count * shape.blocks // 132, 1)
                time = shape.fixed + _CLUSTER_TIME[cluster] + shape.by_key * keys / cluster / 1024
                yield -(-rows // at_once) * time, name, cluster


def _keys(views: TopKViews) -> int:
    """Count the keys of a row, with those before it where it begins between four scores."""
    scores = views.scores
    nbytes = _QUAD * (4 if scores.dtype == "float32" else 2)
    is_aligned = scores.ptr % nbytes == 0 and scores.strides[0] % nbytes == 0
    return scores.shape[1] + (0 if is_aligned and views.row_starts is None else _QUAD - 1)


def _entries(name: str, stride: str, view: ArrayView | None) -> dict[str, int]:
    """Name where numbers of 32 bits lie, and how many entries apart those of a row do."""
    if view is None:
        return {name: 0, stride: 0}
    return {name: view.ptr, stride: view.strides[0] // 4}
