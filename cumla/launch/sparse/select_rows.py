# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/select_rows.cu: how long lists of rows are, and which entries exist."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.mla.shape import VALUE_DIM
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.sparse.key import MLASparseKey

__all__ = [
    "SPECS",
    "RowSteps",
    "bound_rows_launch",
    "lists_values",
    "row_steps",
    "select_rows_launch",
    "visible_tokens_launch",
]

_THREADS = constant("sparse/select_rows", "kSelectThreads")


def _spec(function: str, params: str) -> KernelSpec:
    return KernelSpec(
        stem="select_rows",
        package="cumla.cuda.sparse",
        entry=function,
        function=function,
        params=params,
        threads=_THREADS,
    )


_BOUND, _SELECT = SPECS = (
    _spec("bound_rows", "BoundRowsParams"),
    _spec("select_rows", "SelectRowsParams"),
)

_MOST_ROWS = (1 << 31) - 1


class RowSteps(NamedTuple):
    """Numbering of the rows of a cache: equal steps in memory, the same for all parts."""

    page: int  # steps from a page to the next one
    row: int  # steps from a row to the next one
    total: int  # numbers that there are
    strides: tuple[int, ...]  # bytes of a step, of each part


def row_steps(parts: tuple[ArrayView, ...]) -> RowSteps:
    """Count the steps between rows of ``(num_pages, page_size, ...)`` views, gaps or not.

    Raise `ValueError` where the parts have other layouts, or strides of rows exceed 32 bits.
    """
    num_pages, page_size = parts[0].shape[:2]
    found: tuple[int, int] | None = None
    strides = []
    for part in parts:
        page, row = part.strides[:2]
        page = page if num_pages > 1 else row * page_size
        row = row if page_size > 1 else page
        step = gcd(page, row)
        if step == 0 or page < 0 or row < 0:
            raise ValueError(
                f"kv_cache: needs rows at addresses of their own, in the order of memory, got "
                f"strides {part.strides[:2]} of pages and rows; make a contiguous copy"
            )
        strides.append(step)
        steps = page // step, row // step
        if found not in (None, steps):
            raise ValueError(
                f"kv_cache: needs pages as many rows apart in each of its arrays, got {found} "
                f"and {steps} steps from page to page and from row to row; allocate them alike"
            )
        found = steps
    assert found is not None
    count = (num_pages - 1) * found[0] + (page_size - 1) * found[1] + 1 if num_pages else 0
    if count > _MOST_ROWS:
        raise ValueError(
            f"kv_cache: needs rows that 32 bits can number, got {count} steps of {strides[0]} "
            f"bytes; leave smaller gaps between pages"
        )
    return RowSteps(*found, count, tuple(strides))


def bound_rows_launch(
    key: MLASparseKey, buffer: int, lengths: ArrayView | None, which: int = 0
) -> Launch:
    """Describe how to write the lengths of all lists, and zeros, into a plan's buffer.

    `lengths` is ``(batch, q_len)`` int32; None for full lists. `which` is 1 for the lists of a
    second cache, after those of the first; then the sums are written as well.
    """
    values = {
        **_elements("topk_lens", lengths),
        "bounds": buffer + key.list_bounds[which],
        "other_bounds": buffer + key.list_bounds[0] if which else 0,
        "sums": buffer + key.bounds if which else 0,
        "zeros": buffer + key.zeros,
        "rows": key.num_places,
        "entries": key.topks[which],
        "num_zeros": VALUE_DIM // 4,
        "q_len": key.q_len,
        "by_q_len": divisor_of(key.q_len),
        "causal": False,
    }
    blocks = -(-max(key.num_places, VALUE_DIM // 4) // _THREADS)
    return launch_of(_BOUND, (blocks, 1, 1), values)


def visible_tokens_launch(kv_lens: ArrayView, out: ArrayView, most: int) -> Launch:
    """Describe how to count what each query token sees, under a causal mask and up to `most`.

    `kv_lens` is ``(batch,)`` and `out` ``(batch, q_len)``, contiguous, both int32.
    """
    batch, q_len = out.shape
    rows = batch * q_len
    values = {
        **_elements("topk_lens", kv_lens._replace(strides=(kv_lens.strides[0], 0))),
        "bounds": out.ptr,
        "other_bounds": 0,
        "sums": 0,
        "zeros": 0,
        "rows": rows,
        "entries": most,
        "num_zeros": 0,
        "q_len": q_len,
        "by_q_len": divisor_of(q_len),
        "causal": True,
    }
    return launch_of(_BOUND, (-(-rows // _THREADS), 1, 1), values)


def lists_values(
    indices: ArrayView,
    pages: tuple[int, int],
    steps: RowSteps,
    block_table: ArrayView | None,
    row_to_request: ArrayView | None,
) -> dict[str, Any]:
    """Name the values of struct Lists.

    `indices` is ``(batch, q_len, topk)``, `pages` tells how many the cache has, and of how many
    rows, `steps` is as :func:`row_steps` says. `block_table` is ``(requests, max_pages)``, and
    `row_to_request` ``(batch, q_len)``; without the latter a list is of the request of its batch
    index.
    """
    num_pages, page_size = pages
    requests, max_pages = (0, 0) if block_table is None else block_table.shape
    return {
        **_elements("indices", indices),
        "block_table": 0 if block_table is None else block_table.ptr,
        "block_table_stride": 0 if block_table is None else block_table.strides[0] // 4,
        **_elements("requests", row_to_request),
        "num_requests": requests,
        "max_pages": max_pages,
        "num_pages": num_pages,
        "page_step": steps.page,
        "row_step": steps.row,
        "page_size": page_size,
        "by_page_size": divisor_of(page_size),
    }


def select_rows_launch(key: MLASparseKey, buffer: int, lists: dict[str, Any]) -> Launch:
    """Describe how to write what lists name, as numbers of rows, into a plan's buffer.

    `lists` are the values of struct Lists.
    """
    values = {
        "lists": lists,
        "bounds": buffer + key.bounds,
        "selected": buffer + key.selected,
        "counts": buffer + key.counts,
        "entries": key.topk,
        "q_len": key.q_len,
        "by_q_len": divisor_of(key.q_len),
    }
    return launch_of(_SELECT, (key.num_places, 1, 1), values)


def _elements(name: str, view: ArrayView | None) -> dict[str, int]:
    """Name the address of numbers of 32 bits, with strides in elements."""
    pointer, batch, token = (0, 0, 0) if view is None else (view.ptr, *view.strides[:2])
    return {
        name: pointer,
        f"{name}_stride_batch": batch // 4,
        f"{name}_stride_token": token // 4,
    }
