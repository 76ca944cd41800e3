# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/top_k.cu: the k largest scores of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import launch_of
from cumla.launch.source import FLOATS, KernelSpec
from cumla.launch.sparse.choice import QUAD, TOP_K_SHAPES
from cumla.launch.sparse.choice import choose_top_k as choose

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = ["MOST_COLUMNS", "MOST_SORTED", "SPECS", "TopKViews", "choose", "top_k_launch"]

MOST_COLUMNS = 1 << 30  # of a row: positions, and what a cluster adds, are 32-bit numbers
MOST_SORTED = 8192  # entries that the largest list holds

_SHAPES = TOP_K_SHAPES


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


def _keys(views: TopKViews) -> int:
    """Count the keys of a row, with those before it where it begins between four scores."""
    scores = views.scores
    nbytes = QUAD * (4 if scores.dtype == "float32" else 2)
    is_aligned = scores.ptr % nbytes == 0 and scores.strides[0] % nbytes == 0
    return scores.shape[1] + (0 if is_aligned and views.row_starts is None else QUAD - 1)


def _entries(name: str, stride: str, view: ArrayView | None) -> dict[str, int]:
    """Name where numbers of 32 bits lie, and how many entries apart those of a row do."""
    if view is None:
        return {name: 0, stride: 0}
    return {name: view.ptr, stride: view.strides[0] // 4}
