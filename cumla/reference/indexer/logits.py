# SPDX-License-Identifier: Apache-2.0
"""Logits of the sparse attention's indexer, as a definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla.mla.checks import checked_flag

Array = NDArray[Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_BYTES = 4  # of a token in a fused cache
_LOGITS = {"float32": np.dtype("f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def mqa_logits(
    q: Array,
    kv: tuple[Array, Array],
    weights: Array,
    ks: Array,
    ke: Array,
    *,
    max_seqlen_k: int = 0,
    logits_dtype: str | None = None,
    clean: bool = True,
    out: Array | None = None,
) -> Array:
    """Score the tokens of a sequence for each query: the indexer's logits of a prefill.

    With ``k, scale = kv`` and the sum over the heads h::

        logit[i, j] = scale[j] * sum(weights[i, h] * max(q[i, h] @ k[j], 0))

    for the tokens ``ks[i] <= j < ke[i]``, both clamped to ``[0, seq_len_kv]``, and -inf for all
    others. Nothing else of k and scale is looked at.

    Parameters
    ----------
    q : ndarray of float8_e4m3fn, or uint8 with its bits, shape (seq_len, num_heads, head_dim)
        Queries.
    kv : pair of ndarray
        Keys ``(seq_len_kv, head_dim)``, as q, and their float32 scales ``(seq_len_kv,)``.
    weights : ndarray of float32, shape (seq_len, num_heads)
        Weights of the heads, with the scale of q folded in.
    ks, ke : ndarray of integers, shape (seq_len,)
        First token of each query, and the one behind the last.
    max_seqlen_k : int, default 0
        If not 0, the columns of a compressed result: column c is token ``ks[i] + c``.
    logits_dtype : {"float32", "bfloat16"}, optional
        Of the result; that of out, or else float32, by default.
    clean : bool, default True
        Write the -inf; otherwise what is not visible is left as it is.
    out : ndarray, shape (seq_len, seq_len_kv) or (seq_len, max_seqlen_k), optional
        Where to write the logits.

    Returns
    -------
    ndarray
        The logits, computed in float64 and rounded once.

    Raises
    ------
    ValueError
        If shapes disagree.
    TypeError
        If something is of another dtype than the above, or clean is neither True nor False.
    """
    k, scale = kv
    queries, keys = _e4m3("q", q), _e4m3("kv[0]", k)
    seq_len, num_heads, head_dim = _axes("q", queries, 3)
    seq_len_kv = len(keys)
    _check_shape("kv[0]", keys, (seq_len_kv, head_dim))
    _check_shape("kv[1]", scale, (seq_len_kv,))
    _check_shape("weights", weights, (seq_len, num_heads))
    for name, bounds in (("ks", ks), ("ke", ke)):
        _check_shape(name, bounds, (seq_len,))

    out = _output(out, (seq_len, max_seqlen_k or seq_len_kv), logits_dtype, clean)
    for i in range(seq_len):
        begin, end = (min(max(int(bound[i]), 0), seq_len_kv) for bound in (ks, ke))
        first = begin if max_seqlen_k else 0
        end = min(end, first + out.shape[1])
        if begin < end:
            row = _row(queries[i], weights[i], keys[begin:end], scale[begin:end])
            out[i, begin - first : end - first] = row.astype(out.dtype)
    return out


def paged_mqa_logits(
    q: Array,
    kv_cache: Array | tuple[Array, Array],
    weights: Array,
    context_lens: Array,
    block_table: Array,
    *,
    max_context_len: int,
    logits_dtype: str | None = None,
    clean: bool = True,
    out: Array | None = None,
) -> Array:
    """Score the cached tokens of each request: the indexer's logits of a decoding step.

    The formula is that of :func:`mqa_logits`. Token ``t`` of request ``b`` lies in slot
    ``t % page_size`` of page ``block_table[b, t // page_size]``, a number clamped to
    ``[0, num_pages)``. Lengths are clamped to ``[0, max_pages * page_size]`` and to the columns of
    the result. Nothing else of the table or of the cache is looked at.

    Parameters
    ----------
    q : ndarray of float8_e4m3fn or uint8, shape (batch, next_n, num_heads, head_dim)
        Queries of the newest tokens of each request.
    kv_cache : ndarray of uint8, shape (num_pages, page_size, head_dim + 4), or pair of ndarray
        Pages that hold, whatever the axes say, first the e4m3 keys of their tokens, one behind the
        other, then their float32 scales. With or without an axis of size 1 before the last. Or
        both apart: keys ``(num_pages, page_size, head_dim)`` and scales
        ``(num_pages, page_size)``.
    weights : ndarray of float32, shape (batch * next_n, num_heads)
        As in :func:`mqa_logits`.
    context_lens : ndarray of integers, shape (batch,) or (batch, next_n)
        Cached tokens of each request, those of the queries included: query ``i`` sees the first
        ``context_lens[b] - (next_n - 1 - i)``. Or how many each query sees.
    block_table : ndarray of integers, shape (batch, max_pages)
        Page numbers of each request, in the order of its tokens.
    max_context_len : int
        Columns of the result.
    logits_dtype, clean
        As in :func:`mqa_logits`.
    out : ndarray, shape (batch * next_n, max_context_len), optional
        Where to write the logits.

    Returns
    -------
    ndarray
        The logits, computed in float64 and rounded once.

    Raises
    ------
    ValueError
        If shapes disagree.
    TypeError
        If something is of another dtype than the above, or clean is neither True nor False.
    """
    queries = _e4m3("q", q)
    batch, next_n, num_heads, head_dim = _axes("q", queries, 4)
    keys, scales = split_cache(kv_cache, head_dim)
    num_pages, page_size = keys.shape[:2]
    _check_shape("weights", weights, (batch * next_n, num_heads))
    per_row = context_lens.ndim == 2
    _check_shape("context_lens", context_lens, (batch, next_n) if per_row else (batch,))
    max_pages = _axes("block_table", block_table, 2)[1]
    _check_shape("block_table", block_table, (batch, max_pages))

    longest = min(max_pages * page_size, max_context_len)
    out = _output(out, (batch * next_n, max_context_len), logits_dtype, clean)
    for b, i in np.ndindex(batch, next_n):
        length = int(context_lens[b, i]) if per_row else int(context_lens[b]) - (next_n - 1 - i)
        length = min(max(length, 0), longest)
        pages = np.clip(block_table[b, : -(-length // page_size)], 0, num_pages - 1)
        k = keys[pages].reshape(-1, head_dim)[:length]
        row = b * next_n + i
        logits = _row(queries[b, i], weights[row], k, scales[pages].reshape(-1)[:length])
        out[row, :length] = logits.astype(out.dtype)
    return out


def split_cache(kv_cache: Array | tuple[Array, Array], head_dim: int) -> tuple[Array, Array]:
    """Give the keys and the scales of a paged cache, without copying them.

    Parameters
    ----------
    kv_cache : ndarray or pair of ndarray
        As in :func:`paged_mqa_logits`; the rows of a page contiguous where both are fused.
    head_dim : int
        Values of a key.

    Returns
    -------
    keys : ndarray of float8_e4m3fn, shape (num_pages, page_size, head_dim)
    scales : ndarray of float32, shape (num_pages, page_size)
    """
    if not isinstance(kv_cache, np.ndarray):
        keys, scales = kv_cache
        keys = _e4m3("kv_cache[0]", keys[:, :, 0] if keys.ndim == 4 else keys)
        num_pages, page_size = keys.shape[:2]
        _check_shape("kv_cache[0]", keys, (num_pages, page_size, head_dim))
        _check_shape("kv_cache[1]", scales, (num_pages, page_size))
        return keys, scales
    if kv_cache.dtype != np.uint8:
        raise TypeError(f"kv_cache: needs uint8, got {kv_cache.dtype}; view it so")
    num_pages, page_size = kv_cache.shape[:2]
    width = head_dim + _SCALE_BYTES
    if kv_cache.shape[2:] not in ((width,), (1, width)):
        raise ValueError(
            f"kv_cache: needs shape (num_pages, page_size, 1, {width}) for a head_dim of "
            f"{head_dim}, got {kv_cache.shape}; allocate it so"
        )
    page_stride = kv_cache.strides[0]
    pages = np.lib.stride_tricks.as_strided(
        kv_cache, (num_pages, page_size * width), (page_stride, 1)
    )
    keys = pages[:, : page_size * head_dim].view(_E4M3).reshape(num_pages, page_size, head_dim)
    return keys, pages[:, page_size * head_dim :].view(np.float32)


def _row(q: Array, weights: Array, keys: Array, scale: Array) -> Array:
    """Compute the logits of a query (num_heads, head_dim) for keys (tokens, head_dim).

    A product that is NaN counts as 0, as it does on the GPU.
    """
    products = q.astype(np.float64) @ keys.astype(np.float64).T
    return scale.astype(np.float64) * (weights.astype(np.float64) @ np.fmax(products, 0.0))


def _e4m3(name: str, array: Array) -> Array:
    """Take bytes for what they stand for."""
    if array.dtype == np.uint8:
        return array.view(_E4M3)
    if array.dtype != _E4M3:
        raise TypeError(
            f"{name}: needs float8_e4m3fn, or uint8 with its bits, got {array.dtype}; quantise it"
        )
    return array


def _axes(name: str, array: Array, count: int) -> tuple[int, ...]:
    if array.ndim != count:
        raise ValueError(f"{name}: needs {count} axes, got shape {array.shape}; reshape it")
    return array.shape


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: needs shape {shape}, got {array.shape}; reshape it")


def _output(
    out: Array | None, shape: tuple[int, ...], logits_dtype: str | None, clean: bool
) -> Array:
    """Give the caller's array after a check, or a new one; full of -inf, if it is to be clean."""
    if out is None:
        out = np.empty(shape, _LOGITS[logits_dtype or "float32"])
    _check_shape("out", out, shape)
    if out.dtype.name not in ((logits_dtype,) if logits_dtype else _LOGITS):
        raise TypeError(
            f"out: needs {logits_dtype or ' or '.join(_LOGITS)}, got {out.dtype}; allocate it so "
            f"or leave it out"
        )
    if checked_flag("clean", clean):
        out[...] = -np.inf
    return out
