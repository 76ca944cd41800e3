# SPDX-License-Identifier: Apache-2.0
"""Sparse multi-head latent attention, as a definition: one query token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from cumla.core.state import AttentionState
from cumla.mla.shape import (
    FP4_SCALED_COLUMNS,
    NO_ROPE,
    SCALED_COLUMNS,
    V4_BYTES,
    V4_SCALED_COLUMNS,
    V4_SCALES,
    V41,
    V41_FP4,
    V41_SCALED_COLUMNS,
    VALUE_DIM,
)
from cumla.reference.mla.cache import columns_of
from cumla.reference.mla.decode import Cache, attend
from cumla.reference.rows import E4M3, Array, e2m1_numbers
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def mla_sparse_decode(
    q: Array | Sequence[Array],
    kv_cache: Array | Sequence[Array],
    indices: Array,
    *,
    topk_lens: Array | None = None,
    block_table: Array | None = None,
    row_to_request: Array | None = None,
    extra_kv_cache: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_lens: Array | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> AttentionState:
    """Attend from a few query tokens per request, each to the latent rows that its list names.

    Each query token is one of :func:`mla_sparse_attention`.

    Parameters
    ----------
    q : ndarray or pair of ndarray, shape (batch, q_len, num_heads, 576) or (..., 512)
        Absorbed queries.
    indices : ndarray of int32, shape (batch, q_len, topk)
        The list of each query token.
    topk_lens, row_to_request, extra_topk_lens : ndarray of int32, optional
        As in :func:`mla_sparse_attention`, of each request or of each query token: ``(batch,)`` or
        ``(batch, q_len)``. By default request b of the table is that of ``q[b]``.
    kv_cache, block_table, extra_kv_cache, extra_indices, sinks, softmax_scale, kv_scale, \
cache_format, extra_cache_format, batch_invariant, accumulate
        As in :func:`mla_sparse_attention`.
    out, lse : ndarray, optional
        As in :func:`cumla.mla_sparse_decode`.

    Returns
    -------
    AttentionState
        As of :func:`mla_sparse_attention`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> rng = np.random.default_rng(0)
    >>> q, kv_cache = rng.normal(size=(1, 1, 16, 576)), rng.normal(size=(4, 64, 576))
    >>> indices = np.array([[[200, 3, -1, 70]]], np.int32)
    >>> cumla.reference.mla_sparse_decode(q, kv_cache, indices).out.shape
    (1, 1, 16, 512)
    """
    parts = (q,) if isinstance(q, np.ndarray) else q
    batch, q_len, num_heads, _ = parts[0].shape
    if out is None:
        out = np.empty((batch, q_len, num_heads, VALUE_DIM), parts[0].dtype)
    if lse is None:
        lse = np.empty((batch, q_len, num_heads), np.float32)
    if block_table is not None and row_to_request is None:
        row_to_request = np.arange(batch)
    for b in range(batch):
        mla_sparse_attention(
            [part[b] for part in parts],
            kv_cache,
            indices[b],
            topk_lens=None if topk_lens is None else _of_request(topk_lens, b, q_len),
            block_table=block_table,
            row_to_request=None
            if row_to_request is None
            else _of_request(row_to_request, b, q_len),
            extra_kv_cache=extra_kv_cache,
            extra_indices=None if extra_indices is None else extra_indices[b],
            extra_topk_lens=None
            if extra_topk_lens is None
            else _of_request(extra_topk_lens, b, q_len),
            sinks=sinks,
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            cache_format=cache_format,
            extra_cache_format=extra_cache_format,
            out=out[b],
            lse=lse[b],
            accumulate=accumulate,
        )
    return AttentionState(out, lse)


@one_blas_thread()
def mla_sparse_attention(
    q: Array | Sequence[Array],
    kv_cache: Array | Sequence[Array],
    indices: Array,
    *,
    topk_lens: Array | None = None,
    block_table: Array | None = None,
    row_to_request: Array | None = None,
    extra_kv_cache: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_lens: Array | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> AttentionState:
    """Attend from query tokens, each to the cached latent rows that its list names.

    With ``k`` the 576 or 512 numbers of a row, ``v`` its first 512 and the sums over the entries of
    the query's list, or of both of its lists, that name a row::

        lse = log(sum(exp(softmax_scale * q.k)))
        out = sum(exp(softmax_scale * q.k - lse) * v)

    or, with sinks, ``lse' = log(exp(lse) + exp(sink))`` in the place of lse, in both lines.

    An index i names slot ``i % page_size`` of page ``i // page_size``; with a table, of page
    ``block_table[r, i // page_size]``, r being the request of the query token. It names no row, and
    counts as absent wherever it stands, if it is negative, beyond the table's columns, or of a page
    outside of the cache; so does every index of a token whose request is outside of the table. A
    row that is named twice counts twice. Entries at and beyond topk_lens, which is clamped to
    ``[0, topk]``, are not looked at. Nothing else of the cache is read: what no entry names may
    hold anything, NaN included.

    Parameters
    ----------
    q : ndarray of bfloat16, float16, float32 or float64, shape (total_tokens, num_heads, 576)
        Absorbed queries. A pair ``(q_nope, q_pe)`` holds the first 512 columns and the last 64.
        Or 512 columns, beside a cache of as many.
    kv_cache : ndarray, or pair or triple of ndarray, shape (num_pages, page_size, 1, 576)
        As in :func:`mla_decode`, of one KV head; or rows ``(n, 576)``, which are pages of one slot.
        Beside queries of 512 columns the last axis is 512, or 584 bytes: V4's format, in which a
        page holds page_size rows of 448 e4m3 and 64 bfloat16 columns, then 8 bytes per row. Of
        these byte i is the exponent, biased by 127, of the factor of columns 64 i to 64 i + 63, NaN
        if it is 255, and the last is none. A byte of 0 is 2^-127, as E8M0 defines it; the kernels
        take 0 for it, which is at most 448 * 2^-127 away. Or it is the bytes of cache_format.
    indices : ndarray of int32, shape (total_tokens, topk) or (total_tokens, 1, topk)
        The list of each query token.
    topk_lens, block_table, row_to_request, extra_kv_cache, extra_indices : optional
        As in :func:`cumla.mla_sparse_attention`.
    cache_format, extra_cache_format : str, optional
        Rows of 512 columns, key and value. ``"v32_no_rope"``: 512 e4m3 columns, then 4 float32
        scales, one per 128 columns. ``"v41"``: 512 e4m3 columns, then 16 exponents as those of V4,
        one per 32 columns. ``"v41_fp4"``: 512 e2m1 columns, two a byte, the first one in the low
        half, then 32 e4m3 scales, one per 16 columns. By default widths tell; the second cache has
        the format of the first.
    extra_topk_lens, sinks, softmax_scale, kv_scale, batch_invariant, out, lse : optional
        As there. batch_invariant makes no difference: each query token is computed on its own.
    accumulate : {"float64", "float32"}
        Precision of all arithmetic; inputs are converted first, results rounded last.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``. Where a list names no row out is 0 and lse -inf or, with sinks, the
        sink.

    Raises
    ------
    ValueError
        For a table without row_to_request, a kv_scale without anything that it scales, or shapes
        that disagree.
    """
    parts = (q,) if isinstance(q, np.ndarray) else q
    tokens, num_heads = parts[0].shape[:2]
    out = np.empty((tokens, num_heads, VALUE_DIM), parts[0].dtype) if out is None else out
    lse = np.empty((tokens, num_heads), np.float32) if lse is None else lse
    columns = sum(part.shape[-1] for part in parts)
    scale = columns**-0.5 if softmax_scale is None else softmax_scale
    cache = _cache_of(kv_cache, kv_scale, cache_format)
    caches = [(cache, _selections(cache, indices, topk_lens, block_table, row_to_request))]
    if extra_kv_cache is not None:
        if extra_indices is None:
            raise ValueError("extra_indices: needed with extra_kv_cache; pass them")
        extra = _cache_of(extra_kv_cache, None, extra_cache_format or cache_format)
        caches.append((extra, _selections(extra, extra_indices, extra_topk_lens, None, None)))
    dtype = np.dtype(accumulate)
    for i in range(tokens):
        query = np.concatenate([part[i] for part in parts], axis=-1)
        rows = [of.rows_at(*next(lists), dtype) for of, lists in caches]
        out[i], lse[i] = _attend(query.astype(dtype), np.concatenate(rows), scale, sinks)
    return AttentionState(out, lse)


def largest_scores(
    q: Array,
    kv_cache: Array,
    indices: Array,
    *,
    topk_lens: Array | None = None,
    softmax_scale: float,
) -> Array:
    """Return the largest score of each query token and head, ``(total_tokens, num_heads)`` float32.

    It is -inf where a list names no row. Arguments are as in :func:`mla_sparse_attention`.
    """
    scores = np.full(q.shape[:2], -np.inf, np.float32)
    cache = _cache_of(kv_cache, None)
    for i, where in enumerate(_selections(cache, indices, topk_lens, None, None)):
        rows = cache.rows_at(*where, np.dtype(np.float64))[:, 0]
        if len(rows):
            scores[i] = softmax_scale * (q[i].astype(np.float64) @ rows.T).max(axis=-1)
    return scores


class V4Cache(NamedTuple):
    """The columns of a cache in DeepSeek-V4's format, and 8 bytes of each row."""

    ckv: Array
    k_pe: Array
    exponents: Array

    def rows_at(self, pages: Array, slots: Array, dtype: np.dtype[Any]) -> Array:
        """Gather the rows of some slots of some pages: (rows, 1, 512)."""
        factors = _powers(self.exponents[pages, slots][..., :V4_SCALES], dtype)
        columns = self.ckv[pages, slots].astype(dtype)
        columns *= np.repeat(factors, V4_SCALED_COLUMNS, axis=-1)
        return np.concatenate([columns, self.k_pe[pages, slots].astype(dtype)], axis=-1)


class ScaledCache(NamedTuple):
    """Rows of 512 columns of few bits, followed by their scales: (num_pages, page_size, 1, n)."""

    ckv: Array
    form: str

    def rows_at(self, pages: Array, slots: Array, dtype: np.dtype[Any]) -> Array:
        """Gather the rows of some slots of some pages: (rows, 1, 512)."""
        rows = np.ascontiguousarray(self.ckv[pages, slots])
        if self.form == V41_FP4:
            codes, scales = np.split(rows, [VALUE_DIM // 2], axis=-1)
            scales = np.ascontiguousarray(scales)
            columns = e2m1_numbers(codes).astype(dtype)
            factors, each = scales.view(E4M3).astype(dtype), FP4_SCALED_COLUMNS
        else:
            numbers, scales = np.split(rows, [VALUE_DIM], axis=-1)
            columns = np.ascontiguousarray(numbers).view(E4M3).astype(dtype)
            scales = np.ascontiguousarray(scales)
            if self.form == V41:
                factors, each = _powers(scales, dtype), V41_SCALED_COLUMNS
            else:
                factors, each = scales.view(np.float32).astype(dtype), SCALED_COLUMNS
        columns *= np.repeat(factors, each, axis=-1)
        return columns


def _powers(exponents: Array, dtype: np.dtype[Any]) -> Array:
    """Return the powers of two of E8M0 bytes."""
    factors: Array = np.ldexp(dtype.type(1), np.minimum(exponents, 254).astype(np.int32) - 127)
    factors[exponents == 255] = np.nan
    return factors


def _cache_of(
    kv_cache: Array | Sequence[Array],
    kv_scale: Array | float | None,
    form: str | None = None,
) -> Cache | V4Cache | ScaledCache:
    """Take a cache apart; its rows without pages are pages of one slot."""
    parts = (kv_cache,) if isinstance(kv_cache, np.ndarray) else kv_cache
    if form in (NO_ROPE, V41, V41_FP4):
        rows = parts[0][:, None] if parts[0].ndim == 2 else parts[0]
        rows = rows[:, :, None] if rows.ndim == 3 else rows
        return ScaledCache(rows.view(np.uint8), form)
    if parts[0].shape[-1] == V4_BYTES:
        ckv, k_pe, exponents = columns_of(parts[0][:, None] if parts[0].ndim == 2 else parts[0])
        assert exponents is not None
        return V4Cache(ckv, k_pe, exponents)
    paged = [part[:, None] if part.ndim == 2 else part for part in parts]
    return Cache.of(paged if len(paged) > 1 else paged[0], kv_scale)


def _selections(
    cache: Cache | V4Cache | ScaledCache,
    indices: Array,
    topk_lens: Array | None,
    block_table: Array | None,
    row_to_request: Array | None,
) -> Iterator[tuple[Array, Array]]:
    """Return the pages and the slots in them that the list of each query token names."""
    num_pages, page_size = cache.ckv.shape[:2]
    topk = indices.shape[-1]
    for i, entries in enumerate(indices.reshape(prod(indices.shape[:-1]), topk)):
        length = topk if topk_lens is None else min(max(int(topk_lens[i]), 0), topk)
        index = entries[:length].astype(np.int64)
        page, slot = np.divmod(index[index >= 0], page_size)
        if block_table is not None:
            if row_to_request is None:
                raise ValueError("row_to_request: needed with block_table; pass it")
            table = _row_of(block_table, int(row_to_request[i]))
            known = page < len(table)
            page, slot = table[page[known]], slot[known]
        exists = (page >= 0) & (page < num_pages)
        yield page[exists], slot[exists]


def _row_of(block_table: Array, request: int) -> Array:
    """Take the page numbers of a request; none for what is no row of the table."""
    is_there = 0 <= request < len(block_table)
    return block_table[request] if is_there else np.empty(0, block_table.dtype)


def _attend(q: Array, rows: Array, scale: float, sinks: Array | None) -> tuple[Array, Array]:
    """Attend from q (num_heads, columns) to all of rows (tokens, 1, columns)."""
    (out,), (lse,) = attend(q[None], rows, VALUE_DIM, scale, np.array([len(rows)]))
    sink = np.full(len(q), -np.inf, lse.dtype) if sinks is None else sinks.astype(lse.dtype)
    if len(rows) == 0:
        return out, sink
    with np.errstate(invalid="ignore"):  # of a selected NaN
        with_sink = np.logaddexp(lse, sink)
    return out * np.exp(lse - with_sink)[:, None], with_sink


def _of_request(numbers: Array, request: int, q_len: int) -> Array:
    """Return the numbers of a request's query tokens, which may have one together."""
    return np.broadcast_to(numbers[request], (q_len,))
