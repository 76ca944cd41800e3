# SPDX-License-Identifier: Apache-2.0
"""What tells where in a paged cache new rows go, as the structs of cuda/rows/slots.cuh hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView


def indices(view: ArrayView | None) -> tuple[int, int, bool]:
    """Pack struct Indices."""
    return (0, 0, False) if view is None else (view.ptr, view.strides[0], view.dtype == "int64")


def page_numbers(table: ArrayView | None, page_list: ArrayView | None) -> tuple[int, int, int]:
    """Pack address, stride of a request and stride of an entry."""
    if table is not None:
        return (table.ptr, table.strides[0], table.strides[1])
    return (0, 0, 0) if page_list is None else (page_list.ptr, 0, page_list.strides[0])


def num_requests(table: ArrayView | None, bounds: ArrayView | None) -> int:
    """Count the requests of a table, or of the offsets of a list."""
    if table is not None:
        return table.shape[0]
    return 0 if bounds is None else bounds.shape[0] - 1


def num_entries(table: ArrayView | None, page_list: ArrayView | None) -> int:
    """Count the page numbers of a request, or of the list."""
    if table is not None:
        return table.shape[1]
    return 0 if page_list is None else page_list.shape[0]
