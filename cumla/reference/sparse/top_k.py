# SPDX-License-Identifier: Apache-2.0
"""Selecting the largest scores of rows, as a definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cumla.reference.rows import Array


class TopKResult(NamedTuple):
    """The largest scores of each row.

    Attributes
    ----------
    indices : array of int32, shape (rows, topk)
        Selected positions, or the slots of these positions; -1 after the last one.
    positions : array of int32, shape (rows, topk), or None
        Positions in their row, in the same places.
    values : array, shape (rows, topk), or None
        The scores there; -inf after the last one.
    counts : array of int32, shape (rows,)
        Used places of each row: the smaller of its length and topk.
    """

    indices: Any
    positions: Any
    values: Any
    counts: Any


def top_k(
    scores: Array,
    topk: int,
    *,
    row_lens: Array | None = None,
    row_starts: Array | None = None,
    block_table: Array | None = None,
    page_size: int = 1,
    row_to_request: Array | None = None,
    offsets: Array | None = None,
    out: Array | None = None,
    out_positions: Array | None = None,
    counts: Array | None = None,
    values: bool = False,
    sorted: bool = False,
) -> TopKResult:
    """Select the topk largest scores of each row, of equal ones those at the lowest positions.

    NaN is larger than any number, and -0 equals 0. Positions count from a row's start, and are
    ascending; with sorted scores are descending, and positions of equal scores ascending.

    Parameters
    ----------
    scores : ndarray of float32, bfloat16 or float16, shape (rows, width)
    row_lens, row_starts : ndarray of int32, shape (rows,), optional
        The scores of row i are ``scores[i, row_starts[i]:row_starts[i] + row_lens[i]]``. Starts are
        clamped to [0, width], lengths to [0, width - start].
    block_table : ndarray of int32, shape (requests, max_pages), optional
        The index of place p is ``block_table[request, p // page_size] * page_size + p %
        page_size``, where the place is position + offset. It is -1 where there is no such entry, or
        the entry is below 0.
    offsets : ndarray of int32, shape (rows,), optional
        Added to positions. Indices that are no int32 from 0 on are -1.
    topk, page_size, row_to_request, out, out_positions, counts, values, sorted : optional
        As in :func:`cumla.top_k`.

    Returns
    -------
    TopKResult
        ``positions`` only where out_positions is given, ``values`` where they are asked for.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> cumla.reference.top_k(np.array([[3, 1, 4, 1, 5]], np.float32), 2).indices
    array([[2, 4]], dtype=int32)
    """
    rows, width = scores.shape
    out = np.empty((rows, topk), np.int32) if out is None else out
    counts = np.empty(rows, np.int32) if counts is None else counts
    selected = np.empty((rows, topk), scores.dtype) if values else None
    for row in range(rows):
        start = 0 if row_starts is None else int(np.clip(row_starts[row], 0, width))
        most = width - start
        length = most if row_lens is None else int(np.clip(row_lens[row], 0, most))
        of_row = scores[row, start : start + length]
        chosen = _chosen(_keys(of_row), topk, sorted)
        count = len(chosen)
        counts[row] = count
        places = chosen + (0 if offsets is None else int(offsets[row]))
        if block_table is not None:
            request = row if row_to_request is None else int(row_to_request[row])
            places = _translated(places, block_table, request, page_size)
        wrong = (places < 0) | (places > np.iinfo(np.int32).max)
        out[row, :count] = np.where(wrong, -1, places)
        out[row, count:] = -1
        if out_positions is not None:
            out_positions[row, :count], out_positions[row, count:] = chosen, -1
        if selected is not None:
            selected[row, :count], selected[row, count:] = of_row[chosen], -np.inf
    return TopKResult(out, out_positions, selected, counts)


def _keys(scores: Array) -> Array:
    """Turn scores into numbers in their order, the largest score first; NaN becomes 0."""
    with np.errstate(invalid="ignore"):  # NaN of any kind
        numbers = scores.astype(np.float32) + np.float32(0)
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    keys = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    return np.where(np.isnan(numbers), np.uint32(0), keys)


def _chosen(keys: Array, k: int, sort: bool) -> Array:
    """Return the positions of the k first keys."""
    if len(keys) <= k:
        chosen = np.arange(len(keys))
    else:
        last = np.partition(keys, k - 1)[k - 1]
        before = np.flatnonzero(keys < last)
        ties = np.flatnonzero(keys == last)[: k - len(before)]
        chosen = np.sort(np.concatenate([before, ties]))
    return chosen[np.argsort(keys[chosen], kind="stable")] if sort else chosen


def _translated(places: Array, table: Array, request: int, page_size: int) -> Array:
    """Look places up in a request's pages."""
    requests, max_pages = table.shape
    pages = places // page_size
    exists = (pages >= 0) & (pages < max_pages) & (0 <= request < requests)
    found = np.full(len(places), -1, np.int64)
    found[exists] = table[request, pages[exists]] if exists.any() else -1
    return np.where(found < 0, -1, found * page_size + places % page_size)
