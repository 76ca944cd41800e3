# SPDX-License-Identifier: Apache-2.0
"""The choice of blocks by their scores, as a definition."""

from __future__ import annotations

import numpy as np

from cumla.reference.rows import Array


def select_blocks(
    scores: Array,
    topk: int,
    *,
    visible: Array,
    init_blocks: int = 0,
    local_blocks: int = 0,
    out: Array | None = None,
) -> Array:
    """Select forced blocks and those with the largest scores, ascending, -1 behind them.

    Parameters
    ----------
    scores, topk, visible, init_blocks, local_blocks, out
        As in :func:`cumla.select_blocks`.

    Returns
    -------
    ndarray
        ``(tokens, groups, topk)`` int32.
    """
    tokens, groups, width = scores.shape
    if out is None:
        out = np.empty((tokens, groups, topk), np.int32)
    out[...] = -1
    for token, of_token in enumerate(visible.tolist()):
        there = min(max(of_token, 0), width)
        first = min(init_blocks, there)
        last = max(there - local_blocks, first)
        for group in range(groups):
            row = scores[token, group, first:last].astype(np.float64)
            # NaN first, then the largest; a stable order keeps the lowest of equal ones in front.
            order = np.lexsort((-np.where(np.isnan(row), 0, row), ~np.isnan(row)))
            some = first + np.sort(order[: topk - init_blocks - local_blocks])
            found = np.concatenate([np.arange(first), some, np.arange(last, there)])
            out[token, group, : len(found)] = found
    return out
