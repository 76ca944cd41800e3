# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks, as a definition."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

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
    weights: Array | None = None,
    activation: str = "none",
    num_groups: int | None = None,
    stride: int = 1,
    block_indices: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Score blocks by the largest sum over heads of products with visible keys, in float64.

    Parameters
    ----------
    q, keys, block_size, kv_lens, block_table, qo_indptr, causal, weights, activation, num_groups, \
stride, block_indices, out
        As in :func:`cumla.block_scores`, of any columns, heads, block sizes and strides.

    Returns
    -------
    ndarray
        ``(total_tokens, groups, width)`` float32.
    """
    tokens, most = prod(q.shape[:-2]), block_table.shape[1] * keys.shape[1] * stride
    seen_by = tokens_seen(tokens, kv_lens, qo_indptr, most, causal)
    sums = Sums(weights, activation == "relu", num_groups)
    return scores_of(q, keys, block_size, block_table, seen_by, out, sums, stride, block_indices)


class Sums(NamedTuple):
    """Options that make scores of groups from the products of heads."""

    weights: Array | None = None
    is_relu: bool = False
    num_groups: int | None = None

    def of(self, token: int, products: Array) -> Array:
        """Add products ``(heads, ...)`` of a token up: ``(groups, ...)``."""
        if self.is_relu:
            products = np.maximum(products, 0)
        if self.weights is not None:
            products = self.weights[token].astype(np.float64)[:, None] * products
        if self.num_groups is None:
            return products
        sums: Array = products.reshape(self.num_groups, -1, *products.shape[1:]).sum(axis=1)
        return sums


MAXIMUM = Sums()


def scores_of(
    q: Array,
    keys: Array,
    block_size: int,
    block_table: Array,
    seen_by: list[tuple[int, int]],
    out: Array | None = None,
    sums: Sums = MAXIMUM,
    stride: int = 1,
    block_indices: Array | None = None,
) -> Array:
    """Score blocks for query tokens of which request and visible tokens are known."""
    q, keys = as_e4m3(q), as_e4m3(keys)
    q = q.reshape(-1, *q.shape[-2:])
    block_rows = block_size // stride
    groups = q.shape[1] if sums.num_groups is None else sums.num_groups
    if block_indices is None:
        width = block_table.shape[1] * keys.shape[1] // block_rows
    else:
        width = block_indices.shape[2]
    if out is None:
        out = np.empty((len(q), groups, width), np.float32)
    out[...] = -np.inf
    for token, (request, seen) in enumerate(seen_by):
        rows = seen // stride  # whole ones
        if not rows:
            continue
        if block_indices is None:
            blocks = np.arange(-(-rows // block_rows))
        else:
            listed = block_indices[token]
            blocks = np.unique(listed[(listed >= 0) & (listed * block_rows < rows)])
        found = _largest(
            q[token], keys, blocks, block_rows, rows, block_table[request], token, sums
        )
        if block_indices is None:
            out[token, :, : len(blocks)] = found
            continue
        for group in range(groups):
            list_of = listed[min(group, len(listed) - 1)]
            at = np.searchsorted(blocks, list_of)
            there = at < len(blocks)
            there[there] = blocks[at[there]] == list_of[there]
            out[token, group, there] = found[group, at[there]]
    return out


def _largest(
    q: Array,
    keys: Array,
    blocks: Array,
    block_rows: int,
    rows: int,
    table: Array,
    token: int,
    sums: Sums,
) -> Array:
    """Find the largest sums of ascending blocks, of which `rows` keys exist; -inf: no page."""
    num_pages, page_rows = keys.shape[:2]
    at = (blocks.astype(np.int64)[:, None] * block_rows + np.arange(block_rows)).ravel()
    of_block = np.repeat(np.arange(len(blocks)), block_rows)
    of_block, at = of_block[at < rows], at[at < rows]
    page = table[at // page_rows]
    exists = (page >= 0) & (page < num_pages)
    of_block, at, page = of_block[exists], at[exists], page[exists]
    groups = len(q) if sums.num_groups is None else sums.num_groups
    found = np.full((groups, len(blocks)), -np.inf)
    if not len(at):
        return found
    products = q.astype(np.float64) @ keys[page, at % page_rows].astype(np.float64).T
    there, begins = np.unique(of_block, return_index=True)
    with np.errstate(over="ignore", invalid="ignore"):
        of_keys = sums.of(token, products)
        found[:, there] = np.maximum.reduceat(of_keys, begins, axis=1)
    return found
