# SPDX-License-Identifier: Apache-2.0
"""What cuda/sparse/select_rows.cu computes, an entry after the other: the oracle of its tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from cumla.launch.sparse.select_rows import RowSteps

__all__ = ["bound_rows", "select_rows"]

Array = np.ndarray[Any, Any]


def bound_rows(lengths: Array | None, lead: tuple[int, int], topk: int) -> list[int]:
    """Return how long each list is."""
    if lengths is None:
        return [topk] * (lead[0] * lead[1])
    return [min(max(int(length), 0), topk) for length in lengths.reshape(-1)]


def select_rows(
    indices: Array,
    ends: list[int],
    pages: tuple[int, int],
    steps: RowSteps,
    table: Array | None = None,
    requests: Array | None = None,
) -> list[list[int]]:
    """The rows that each list names: of a cache of so many pages, and rows of each."""
    found = []
    num_pages, page_size = pages
    batch, q_len, _ = indices.shape
    for end, (b, token) in zip(ends, np.ndindex(batch, q_len), strict=True):
        request = b if requests is None else int(requests[b, token])
        rows: list[int] = []
        for index in indices[b, token, :end].tolist():
            if index < 0:
                continue
            page, row = divmod(index, page_size)
            if table is not None:
                if not (0 <= request < len(table) and page < table.shape[1]):
                    continue
                page = int(table[request, page])
            if 0 <= page < num_pages:
                rows.append(page * steps.page + row * steps.row)
        found.append(rows)
    return found
