# SPDX-License-Identifier: Apache-2.0
"""Dense attention over queries of different lengths, as a definition: one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from cumla.core.state import AttentionState
from cumla.reference.mla.cache import columns_of
from cumla.reference.mla.decode import mla_decode, numbers_of
from cumla.reference.rows import Array, clamped, page_tables
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def mla_attention(
    q: Array | Sequence[Array],
    kv_cache: Array | Sequence[Array],
    *,
    kv_lens: Array,
    qo_indptr: Array | None = None,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
    q_scale: Array | float | None = None,
    fp8_products: bool = False,
    window: int | Sequence[int | None] | None = None,
    sinks: Array | None = None,
    tree: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> AttentionState:
    """Attend from any number of query tokens per request to its cached latent rows.

    Each request is :func:`mla_decode` of a batch of one: of the query tokens from ``qo_indptr[r]``
    to ``qo_indptr[r + 1]``, and of the pages in row r of the table, or in the list from
    ``kv_indptr[r]`` to ``kv_indptr[r + 1]``. Offsets are clamped to the arrays before anything is
    computed with them; a request whose end is not after its begin has no tokens, or no pages.

    Parameters
    ----------
    q : ndarray or pair of ndarray, shape (total_tokens, num_heads, 576)
        Absorbed queries. Without qo_indptr ``(batch, q_len, num_heads, 576)``, as for
        :func:`mla_decode`.
    block_table : ndarray of int32, shape (batch, max_pages), optional
        The pages of each request.
    qo_indptr : ndarray of int32, shape (batch + 1,), optional
        Where the query tokens of each request begin, and where the last ones end.
    kv_indptr, kv_indices : ndarray of int32, shapes (batch + 1,) and (pages,), optional
        In place of a table: where the pages of each request begin in a list of page numbers.
    kv_cache, kv_lens, causal, softmax_scale, kv_scale, q_scale, fp8_products, window, sinks, \
tree, accumulate
        As in :func:`mla_decode`, of each request for itself.
    out, lse : ndarray, optional
        ``(total_tokens, num_heads, 512)`` and ``(total_tokens, num_heads)``, where to write the
        results, as in :func:`mla_decode`. Rows of no request are not written.

    Returns
    -------
    AttentionState
        As of :func:`mla_decode`.

    Raises
    ------
    ValueError
        For pages in both forms or in none, and as :func:`mla_decode`.
    """
    parts = (q,) if isinstance(q, np.ndarray) else q
    if qo_indptr is None:
        assert block_table is not None
        return mla_decode(
            *(parts, kv_cache, block_table, kv_lens),
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            q_scale=q_scale,
            causal=causal,
            window=window,
            sinks=sinks,
            tree=tree,
            out=out,
            lse=lse,
            accumulate=accumulate,
        )
    tokens, num_heads = parts[0].shape[:2]
    if out is None:
        latent = columns_of(kv_cache)[0].shape[-1]
        out = np.empty((tokens, num_heads, latent), numbers_of(parts)[1])
    if lse is None:
        lse = np.empty((tokens, num_heads), np.float32)
    tables = page_tables(block_table, kv_indptr, kv_indices)
    queries = pairwise(clamped(qo_indptr, tokens))
    for (begin, end), table, kv_len in zip(queries, tables, kv_lens, strict=True):
        if begin < end:
            mla_decode(
                [part[None, begin:end] for part in parts],
                kv_cache,
                table[None],
                kv_len[None],
                softmax_scale=softmax_scale,
                kv_scale=kv_scale,
                q_scale=q_scale,
                causal=causal,
                window=window,
                sinks=sinks,
                tree=None if tree is None else tree[begin:end],
                out=out[None, begin:end],
                lse=lse[None, begin:end],
                accumulate=accumulate,
            )
    return AttentionState(out, lse)
