# SPDX-License-Identifier: Apache-2.0
"""Logits of the sparse attention's indexer over a paged cache, as a definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cumla.reference.indexer.cache import split_cache, widened
from cumla.reference.indexer.logits import logits_of, output
from cumla.reference.rows import Array, as_e4m3, cached_rows
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def paged_mqa_logits(
    q: Array,
    kv_cache: Array | Sequence[Array],
    weights: Array,
    block_table: Array,
    kv_lens: Array,
    *,
    max_kv_len: int,
    logits_dtype: str | None = None,
    clean: bool = True,
    cache_format: str | None = None,
    out: Array | None = None,
) -> Array:
    """Score the cached tokens of each request: the indexer's logits of a decoding step.

    The formula is that of :func:`mqa_logits`. Token ``t`` of request ``b`` is in slot
    ``t % page_size`` of page ``block_table[b, t // page_size]``, a number clamped to
    ``[0, num_pages)``. Lengths are clamped to ``[0, max_pages * page_size]`` and to the columns of
    the result. Nothing else of the table or of the cache is read.

    Parameters
    ----------
    q : ndarray of float8_e4m3fn or uint8, shape (batch, q_len, num_heads, head_dim)
        Queries of the newest tokens of each request.
    kv_cache : ndarray of uint8, shape (num_pages, page_size, head_dim + 4), or pair of ndarray
        As in :func:`append_indexer_cache`.
    weights : ndarray of float32, shape (batch * q_len, num_heads)
        As in :func:`mqa_logits`.
    block_table : ndarray of integers, shape (batch, max_pages)
        Page numbers of each request, in the order of its tokens.
    kv_lens : ndarray of integers, shape (batch,) or (batch, q_len)
        Cached tokens of each request, those of the queries included: query ``i`` sees the first
        ``kv_lens[b] - (q_len - 1 - i)``. Or how many each query sees.
    max_kv_len : int
        Columns of the result.
    cache_format : {"mxfp4"}, optional
        Pages as :func:`append_indexer_cache` writes them with it; logits are NaN where one of a
        token's exponents is 255.
    logits_dtype, clean, out
        As in :func:`mqa_logits`; out is ``(batch * q_len, max_kv_len)``.

    Returns
    -------
    ndarray
        As of :func:`mqa_logits`.
    """
    batch, q_len, _, head_dim = q.shape
    keys, scales = split_cache(kv_cache, head_dim if cache_format is None else head_dim // 2)
    num_pages, page_size = scales.shape
    seen = kv_lens.astype(np.int64)
    if seen.ndim == 1:
        seen = seen[:, None] - np.arange(q_len)[::-1]
    seen = np.clip(seen, 0, min(block_table.shape[1] * page_size, max_kv_len))

    out = output((batch * q_len, max_kv_len), logits_dtype, clean, out)
    tables = np.clip(block_table, 0, num_pages - 1)
    for b, (queries, table, lengths) in enumerate(zip(as_e4m3(q), tables, seen, strict=True)):
        longest = int(lengths.max(initial=0))
        k, scale = cached_rows(keys, table, longest), cached_rows(scales, table, longest)
        if cache_format is not None:
            k, scale = widened(k, scale)
        for i, length in enumerate(lengths.tolist()):
            row = b * q_len + i
            out[row, :length] = logits_of(queries[i], weights[row], k[:length], scale[:length])
    return out
