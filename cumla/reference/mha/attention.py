# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values (MHA, GQA and MQA), as a definition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from cumla.core.state import AttentionState
from cumla.reference.mha.bias import Bias, bias_of
from cumla.reference.mha.mask import Mask, visible
from cumla.reference.rows import E4M3, Array, as_e4m3, cached_rows, clamped, page_tables
from cumla.reference.threads import one_blas_thread

_TOGETHER = 128  # query rows of a product


@one_blas_thread()
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    kv_lens: Array | None = None,
    qo_indptr: Array | None = None,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str = "NHD",
    out: Array | None = None,
    lse: Array | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
) -> AttentionState:
    """Attend from the query tokens of each request to its keys and values.

    Query head ``h`` uses KV head ``h // (num_heads // num_kv_heads)``. With the sums over the keys
    that a query sees, and c being `softcap`::

        score = softmax_scale * q.k + bias      or, with softcap, c * tanh(softmax_scale * q.k / c)
        lse   = log(sum(exp(score)))            or, with sinks, log(exp(sink) + sum(exp(score)))
        out   = sum(exp(score - lse) * v)

    Query i of the n of a request with kv_len keys has position ``p = kv_len - n + i``, so that the
    last query stands at the last key. It sees key j if ``p - left <= j <= p + right``, or those
    that `mask` shows.

    Token t of request r is in slot ``t % page_size`` of page ``block_table[r, t // page_size]``
    or, with a list, ``kv_indices[kv_indptr[r] + t // page_size]``. Ragged rows need no pages: it is
    row ``kv_indptr[r] + t``. Lengths are clamped to what the pages or rows of the request hold, and
    to 0; offsets to the arrays, before anything is computed with them. A request whose end is not
    after its begin has no tokens, pages or rows. A page number outside of ``[0, num_pages)`` in a
    used entry stands for a page of zeros. Nothing else is read: unused entries, pages and rows may
    hold anything, NaN included.

    Parameters
    ----------
    q, k, v : ndarray
        As in :func:`cumla.attention`, of any strides, and of float32 and float64, too.
    kv_lens, qo_indptr, block_table, kv_indptr, kv_indices, causal, window, softcap : optional
        As in :func:`cumla.attention`.
    sinks, softmax_scale, k_scale, v_scale, kv_layout, out, lse : optional
        As there, `sinks` in any dtype of floats. Rows of no request are not written.
    mask : optional
        As :class:`cumla.AttentionMask`, of NumPy; beside no window.
    bias : optional
        As :class:`cumla.AttentionBias`, of NumPy.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``, computed in float64 and rounded once. A query that sees no key has out
        0 and lse -inf or, with sinks, the sink.

    Raises
    ------
    ValueError
        For keys in several forms or in none, and for the scale of a cache that is not e4m3.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.normal(size=(7, 8, 64)), rng.normal(size=(9, 2, 64))
    >>> v = rng.normal(size=(9, 2, 32))
    >>> qo_indptr, kv_indptr = np.array([0, 3, 7], np.int32), np.array([0, 5, 9], np.int32)
    >>> cumla.reference.attention(q, k, v, qo_indptr=qo_indptr, kv_indptr=kv_indptr).out.shape
    (7, 8, 32)
    """
    *tokens, num_heads, head_dim = q.shape
    if out is None:
        out = np.empty((*tokens, num_heads, v.shape[-1]), q.dtype)
    if lse is None:
        lse = np.empty((*tokens, num_heads), np.float32)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = _sides(window, causal)
    sink = np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64)

    tables: Iterable[Array]
    if k.ndim == 3:
        bounds = _bounds_of_rows(block_table, kv_indptr, kv_indices, kv_layout, len(k))
        # Ragged rows are pages of one row; a request has those from its begin to its end.
        k, v, tables = k[:, None], v[:, None], (np.arange(begin, end) for begin, end in bounds)
    else:
        tables = page_tables(block_table, kv_indptr, kv_indices)
        if kv_lens is None:
            raise ValueError("kv_lens: needed for pages; only ragged rows tell their number")
        if kv_layout == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    k, v = as_e4m3(k), as_e4m3(v)

    requests = _requests(q, out, lse, qo_indptr)
    bounds = _bounds_of_queries(q, qo_indptr)
    k_factors = _factors("k_scale", k_scale, k, len(requests))
    v_factors = _factors("v_scale", v_scale, v, len(requests))
    for r, (request, table) in enumerate(zip(requests, tables, strict=True)):
        most = len(table) * k.shape[1]
        kv_len = most if kv_lens is None else min(max(int(kv_lens[r]), 0), most)
        q_len = len(request[0])
        if q_len == 0:
            continue
        keys = cached_rows(k, table, kv_len).astype(np.float64) * k_factors[r]
        values = cached_rows(v, table, kv_len).astype(np.float64) * v_factors[r]
        # Queries together, but where numbers that one does not see would make it NaN.
        is_finite = np.isfinite(keys).all() and np.isfinite(values).all()
        together = max(1, _TOGETHER // num_heads) if is_finite else 1
        rows = range(*bounds[r])
        for i in range(0, q_len, together):
            some = slice(i, i + together)
            places = np.arange(q_len)[some]
            if mask is None:
                seen = _visible(kv_len - q_len + places, kv_len, left, right)
            else:
                seen = visible(mask, r, rows, places, q_len, kv_len, causal)
            added = None
            if bias is not None:
                positions = kv_len - q_len + places
                added = bias_of(bias, r, np.asarray(rows)[places], positions, kv_len)
            for result, found in zip(
                request[1:],
                _attend(request[0][some], keys, values, seen, scale, softcap, sink, added),
                strict=True,
            ):
                result[some] = found
    return AttentionState(out, lse)


def _attend(
    q: Array,
    keys: Array,
    values: Array,
    seen: Array,
    scale: float,
    softcap: float | None,
    sink: Array,
    bias: Array | None,
) -> tuple[Array, Array]:
    """Attend from q (n, num_heads, head_dim) to keys (tokens, num_kv_heads, head_dim).

    Each of the n sees those that are true in its row of `seen` (n, tokens). `bias` is (n or 1,
    num_heads, tokens).
    """
    n, num_heads, _ = q.shape
    among = np.flatnonzero(seen.any(axis=0))
    if not len(among):
        return np.zeros((n, num_heads, values.shape[-1])), np.broadcast_to(sink, (n, num_heads))
    is_whole = among[-1] - among[0] + 1 == len(among)  # then nothing is copied
    some = slice(among[0], among[-1] + 1) if is_whole else among
    keys, values, hidden = keys[some], values[some], ~seen[:, some]
    num_kv_heads = keys.shape[1]
    by_heads = q.astype(np.float64).reshape(n, num_kv_heads, -1, q.shape[-1]).swapaxes(0, 1)
    shape = by_heads.shape[:-1]  # (num_kv_heads, n, group)
    sinks = sink.reshape(num_kv_heads, 1, -1, 1)

    rows = by_heads.reshape(num_kv_heads, -1, q.shape[-1])
    scores = scale * (rows @ keys.transpose(1, 2, 0)).reshape(*shape, -1)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        of_heads = np.broadcast_to(bias[..., some], (n, num_heads, len(among)))
        scores = scores + of_heads.reshape(n, num_kv_heads, -1, len(among)).swapaxes(0, 1)
    scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
    # It keeps exp() in range and cancels in both results; finite, or a sink of inf would give NaN.
    top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    top = np.clip(top, np.finfo(np.float64).min, np.finfo(np.float64).max)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    out = (weights.reshape(num_kv_heads, -1, len(among)) @ values.swapaxes(0, 1)).reshape(
        *shape, -1
    )
    out = out / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return out.swapaxes(0, 1).reshape(n, num_heads, -1), lse.swapaxes(0, 1).reshape(n, num_heads)


def _visible(positions: Array, kv_len: int, left: int | None, right: int | None) -> Array:
    """Tell which keys are from position - left to position + right, (positions, kv_len)."""
    keys, at = np.arange(kv_len), positions[:, None]
    seen = np.ones((len(positions), kv_len), bool)
    if left is not None:
        seen &= keys >= at - left
    if right is not None:
        seen &= keys <= at + right
    return seen


def _sides(
    window: int | Sequence[int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """Give left and right, None for unbounded."""
    sides = (window, None) if window is None or isinstance(window, int) else window
    left, right = (None if side is None or side < 0 else side for side in sides)
    return left, 0 if causal else right


def _bounds_of_rows(
    block_table: Array | None,
    kv_indptr: Array | None,
    kv_indices: Array | None,
    kv_layout: str,
    total_kv: int,
) -> Iterable[tuple[int, int]]:
    """Give begin and end of each request's ragged rows."""
    if kv_indptr is None or block_table is not None or kv_indices is not None:
        raise ValueError("kv_indptr: ragged rows (k with 3 axes) need it, and no page numbers")
    if kv_layout != "NHD":
        raise ValueError(f"kv_layout: {kv_layout!r} is a layout of pages; ragged rows have 'NHD'")
    return pairwise(clamped(kv_indptr, total_kv))


def _requests(
    q: Array, out: Array, lse: Array, qo_indptr: Array | None
) -> list[tuple[Array, Array, Array]]:
    """Split q, out and lse into those of each request, with the tokens on the first axis."""
    if (qo_indptr is None) != (q.ndim == 4):
        raise ValueError(f"qo_indptr: needed for q with 3 axes, and only for it; q has {q.ndim}")
    if qo_indptr is None:
        return [*zip(q, out, lse, strict=True)]
    tokens = [slice(*bounds) for bounds in _bounds_of_queries(q, qo_indptr)]
    return [(q[some], out[some], lse[some]) for some in tokens]


def _bounds_of_queries(q: Array, qo_indptr: Array | None) -> list[tuple[int, int]]:
    """Give begin and end of each request's queries, counted over all of them."""
    if qo_indptr is None:
        return [(r * q.shape[1], (r + 1) * q.shape[1]) for r in range(len(q))]
    return [*pairwise(clamped(qo_indptr, len(q)))]


def _factors(name: str, scale: Array | float | None, cache: Array, batch: int) -> Array:
    """Give what the rows of each request are multiplied by, (batch, num_kv_heads, 1)."""
    if scale is not None and cache.dtype != E4M3:
        raise ValueError(f"{name}: the cache is {cache.dtype} and has no factor; leave it out")
    factors = np.asarray(1 if scale is None else scale, np.float32).astype(np.float64)
    return np.broadcast_to(factors, (batch, cache.shape[2]))[..., None]
