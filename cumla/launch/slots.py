# SPDX-License-Identifier: Apache-2.0
"""Places of new rows in a paged cache, as the structs of cuda/rows/slots.cuh hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import strided

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView


def indices(view: ArrayView | None) -> dict[str, Any] | None:
    """Name the values of struct Indices."""
    if view is None:
        return None
    return {"data": view.ptr, "stride": view.strides[0], "is_wide": view.dtype == "int64"}


def pages(view: ArrayView | None) -> dict[str, int] | None:
    """Name the values of struct Pages."""
    names = "data", "stride_page", "stride_row", "stride_head"
    return None if view is None else strided(view, *names)


def page_numbers(table: ArrayView | None, page_list: ArrayView | None) -> dict[str, int]:
    """Name the addresses of page numbers as the parameters of all kernels that append do."""
    pointer = of_request = of_entry = 0
    if table is not None:
        pointer, (of_request, of_entry) = table.ptr, table.strides
    elif page_list is not None:
        pointer, (of_entry,) = page_list.ptr, page_list.strides
    return {
        "page_numbers": pointer,
        "page_numbers_stride_request": of_request,
        "page_numbers_stride": of_entry,
    }


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
