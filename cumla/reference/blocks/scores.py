# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks, as a definition."""

from __future__ import annotations

from math import prod

import numpy as np

from cumla.reference.blocks.rows import tokens_seen
from cumla.reference.rows import Array, as_e4m3
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def block_scores(
    q: Array,
    keys: Array,
    *,
    block_size: int,
    kv_lens: Array,
    block_table: Array,
    qo_indptr: Array | None = None,
    causal: bool = True,
    out: Array | None = None,
) -> Array:
    """Score blocks by the largest product of a query row with their visible keys, in float64.

    Parameters
    ----------
    q, keys, block_size, kv_lens, block_table, qo_indptr, causal, out
        As in :func:`cumla.block_scores`, of any columns, block sizes and strides.

    Returns
    -------
    ndarray
        ``(total_tokens, heads, width)`` float32.
    """
    tokens, most = prod(q.shape[:-2]), block_table.shape[1] * keys.shape[1]
    seen_by = tokens_seen(tokens, kv_lens, qo_indptr, most, causal)
    return scores_of(q, keys, block_size, block_table, seen_by, out)


def scores_of(
    q: Array,
    keys: Array,
    block_size: int,
    block_table: Array,
    seen_by: list[tuple[int, int]],
    out: Array | None = None,
) -> Array:
    """Score blocks for query tokens of which request and visible tokens are known."""
    q, keys = as_e4m3(q), as_e4m3(keys)
    q = q.reshape(-1, *q.shape[-2:])
    num_pages, page_size = keys.shape[:2]
    width = block_table.shape[1] * page_size // block_size
    if out is None:
        out = np.empty((*q.shape[:2], width), np.float32)
    out[...] = -np.inf
    for token, (request, seen) in enumerate(seen_by):
        at = np.arange(seen)
        page = block_table[request, at // page_size] if seen else at
        exists = (page >= 0) & (page < num_pages)
        at, page = at[exists], page[exists]
        if not len(at):
            continue
        rows = keys[page, at % page_size].astype(np.float64)
        products = q[token].astype(np.float64) @ rows.T
        blocks, begins = np.unique(at // block_size, return_index=True)
        with np.errstate(over="ignore"):
            out[token][:, blocks] = np.maximum.reduceat(products, begins, axis=1)
    return out
