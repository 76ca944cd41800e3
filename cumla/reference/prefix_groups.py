# SPDX-License-Identifier: Apache-2.0
"""Groups of neighbouring requests that share leading pages, as a definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

__all__ = ["find_prefix_groups"]

_WINDOW = 1024  # requests; no group extends over two windows


def find_prefix_groups(
    block_table: Array,
    kv_lens: Array,
    qo_indptr: Array | None = None,
    *,
    page_size: int,
    q_len: int = 1,
    min_tokens: int = 1024,
) -> tuple[Array, Array]:
    """Find the groups; arguments as in :func:`cumla.find_prefix_groups`.

    Returns
    -------
    tuple of ndarray
        ``group`` and ``prefix_len``, ``(batch,)`` int32.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> table, lens = np.int32([[3, 7, 1], [3, 7, 2], [5, 0, 0]]), np.int32([190, 150, 64])
    >>> groups = cumla.reference.find_prefix_groups(table, lens, page_size=64, min_tokens=64)
    >>> [array.tolist() for array in groups]
    [[0, 0, 2], [128, 128, 0]]
    """
    batch, max_pages = block_table.shape
    lengths = np.minimum(kv_lens.astype(np.int64), max_pages * page_size)
    queries = np.full(batch, q_len) if qo_indptr is None else np.diff(qo_indptr.astype(np.int64))
    usable = np.maximum(lengths - np.maximum(queries, 0), 0) // page_size
    least = max(-(-min_tokens // page_size), 1)
    shared = np.zeros(batch, np.int64)  # pages that a request has in common with the one before
    for i in range(1, batch):
        most = min(usable[i - 1], usable[i])
        if i % _WINDOW and most >= least:
            differs = np.flatnonzero(block_table[i, :most] != block_table[i - 1, :most])
            shared[i] = differs[0] if differs.size else most
    shared[shared < least] = 0
    group, prefix_len = np.arange(batch, dtype=np.int32), np.zeros(batch, np.int32)
    for first, end in _runs(shared, shared > 0):
        found = shared[first + 1 : end]
        saved = [(int(pages * (found >= pages).sum()), int(pages)) for pages in found]
        _, chosen = max(saved, default=(0, 0))
        for begin, stop in _runs(shared[first:end], shared[first:end] >= chosen):
            members = slice(first + begin, first + stop)
            if stop - begin > 1:
                group[members] = first + begin
                prefix_len[members] = shared[members][1:].min() * page_size
    return group, prefix_len


def _runs(shared: Array, goes_on: Array) -> list[tuple[int, int]]:
    """List runs of requests, each of which but the first goes on with the one before."""
    begins = [i for i in range(len(shared)) if i == 0 or not goes_on[i]]
    return list(pairwise([*begins, len(shared)]))
