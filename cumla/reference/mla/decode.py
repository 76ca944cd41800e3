# SPDX-License-Identifier: Apache-2.0
"""Dense multi-head latent attention over a paged cache, as a definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from cumla.core.arguments import checked_window, window_sides
from cumla.core.state import AttentionState
from cumla.mla.shape import SCALED_COLUMNS
from cumla.reference.mla.cache import columns_of
from cumla.reference.rows import E4M3, Array, cached_rows, unpacked
from cumla.reference.threads import one_blas_thread

TOGETHER = 128  # query rows of a product


@one_blas_thread()
def mla_decode(
    q: Array | Sequence[Array],
    kv_cache: Array | Sequence[Array],
    block_table: Array,
    kv_lens: Array,
    *,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
    q_scale: Array | float | None = None,
    fp8_products: bool = False,
    window: int | Sequence[int | None] | None = None,
    sinks: Array | None = None,
    tree: Array | None = None,
    causal: bool = True,
    batch_invariant: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> AttentionState:
    """Attend from a few query tokens per request to its cached latent rows.

    After weight absorption all query heads of a group read one latent row per token. Query head
    ``h`` uses KV head ``h // (num_heads // num_kv_heads)``. With ``k`` the numbers of a row, 576 in
    most models, ``v`` its latent ones, the first 512, and the sums over the tokens that the query
    sees::

        lse = log(sum(exp(softmax_scale * q.k)))
        out = sum(exp(softmax_scale * q.k - lse) * v)

    With sinks ``exp(sink)`` of the query head is one more term of the first sum. Query i of q_len
    has position ``p = kv_len - q_len + i`` and sees tokens up to p, or all if not `causal`, and of
    them those from ``p - left`` to ``p + right`` where there is a window. With a tree it sees all
    tokens before the queries, and of the last q_len token j if bit j of its words is set.

    An FP8 cache stands for the numbers that its factors make of it: an e4m3 column times its scale,
    where there are scales, and times `kv_scale` where there are none. e4m3 queries are multiplied
    by `q_scale`.

    Token ``t`` of request ``b`` is in slot ``t % page_size`` of page
    ``block_table[b, t // page_size]``. Lengths are clamped to ``[0, max_pages * page_size]``.
    Nothing else of the table or of the cache is read: unused entries and slots may hold anything,
    NaN included. A page number outside of ``[0, num_pages)`` in a used entry stands for a page of
    zeros, as on the GPU, whose tensor-map loads fill with zeros what is out of bounds.

    Parameters
    ----------
    q, kv_cache, block_table, kv_lens, softmax_scale, kv_scale, q_scale, fp8_products, causal, \
window, sinks, tree, batch_invariant, out, lse
        As in :func:`cumla.mla_decode`, of any strides, and of float32 and float64, too.
        batch_invariant makes no difference: each request is computed on its own. Nor does
        fp8_products: this is the exact definition.
    accumulate : {"float64", "float32"}
        Precision of all arithmetic; inputs are converted first, results rounded last.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``. A query that sees no token has out 0 and lse -inf or, with sinks, the
        sink.

    Raises
    ------
    ValueError
        If there is a kv_scale and nothing that it scales, or shapes disagree.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> rng = np.random.default_rng(0)
    >>> q, kv_cache = rng.normal(size=(1, 1, 16, 576)), rng.normal(size=(4, 64, 576))
    >>> block_table, kv_lens = np.array([[2, 0]], np.int32), np.array([100], np.int32)
    >>> cumla.reference.mla_decode(q, kv_cache, block_table, kv_lens).out.shape
    (1, 1, 16, 512)
    """
    q, dtype = numbers_of(q)
    cache = Cache.of(kv_cache, kv_scale)
    batch, q_len, num_heads, _ = q.shape
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if q_scale is not None:
        scale *= float(np.asarray(q_scale, np.float32).reshape(()))
    latent = cache.ckv.shape[-1]
    out = np.empty((batch, q_len, num_heads, latent), dtype) if out is None else out
    lse = np.empty((batch, q_len, num_heads), np.float32) if lse is None else lse
    left, right = window_sides(checked_window("window", window), causal and tree is None)
    for b, (queries, table, kv_len) in enumerate(zip(q, block_table, kv_lens, strict=True)):
        rows = cache.rows(table, int(kv_len), np.dtype(accumulate))
        position = len(rows) - q_len + np.arange(q_len)
        visible = np.full(q_len, len(rows))
        if right >= 0:
            visible = np.clip(position + right + 1, 0, len(rows))
        first = np.maximum(position - left, 0) if left >= 0 else np.zeros_like(position)
        hidden = None
        if tree is not None:
            bits = unpacked(tree[b * q_len : (b + 1) * q_len])
            number = np.arange(len(rows)) - (len(rows) - q_len)
            known = (number >= 0) & (number < bits.shape[1])
            hidden = np.broadcast_to(number >= 0, (q_len, len(rows))).copy()
            hidden[:, known] = ~bits[:, number[known]]
        # Queries together, but where numbers that one does not see would make it NaN.
        finite = np.isfinite(rows[first.min(initial=len(rows)) : visible.max(initial=0)]).all()
        together = max(1, TOGETHER // num_heads) if finite else 1
        for i in range(0, q_len, together):
            some = slice(i, i + together)
            seen = visible[some], first[some]
            more = sinks, None if hidden is None else hidden[some]
            out[b, some], lse[b, some] = attend(queries[some], rows, latent, scale, *seen, *more)
    return AttentionState(out, lse)


def numbers_of(q: Array | Sequence[Array]) -> tuple[Array, np.dtype[Any]]:
    """Return the queries in one array, e4m3 ones not as bytes, and the dtype of out."""
    whole = q if isinstance(q, np.ndarray) else np.concatenate([*q], axis=-1)
    if whole.dtype == np.uint8:
        whole = whole.view(E4M3)
    return whole, np.dtype(ml_dtypes.bfloat16) if whole.dtype == E4M3 else whole.dtype


def attend(
    q: Array,
    rows: Array,
    latent: int,
    scale: float,
    visible: Array,
    first: Array | None = None,
    sinks: Array | None = None,
    unseen: Array | None = None,
) -> tuple[Array, Array]:
    """Attend from q (n, num_heads, columns) to the first rows (tokens, num_kv_heads, columns).

    The first `latent` columns are the value. `visible` (n,) is how many each of the n sees, but for
    those before its `first`, and those that are `unseen` (n, tokens). `sinks` are ``(num_heads,)``.
    """
    n, num_heads, columns = q.shape
    begin = 0 if first is None else int(first.min())
    end = visible.max()
    if unseen is not None:  # 0 x NaN is NaN
        nobody: Array = np.all(unseen, axis=0)
        rows = np.where(nobody[:, None, None], 0, rows)
    rows, visible = rows[begin:end], visible - begin
    (tokens, num_kv_heads, _), dtype = rows.shape, rows.dtype
    sink = np.full(num_heads, -np.inf, dtype) if sinks is None else sinks.astype(dtype)
    if tokens == 0:
        lse = np.broadcast_to(sink, (n, num_heads))
        return np.zeros((n, num_heads, latent), dtype), lse
    keys = rows.transpose(1, 2, 0)  # (num_kv_heads, columns, tokens)
    values = rows.transpose(1, 0, 2)[..., :latent]  # (num_kv_heads, tokens, latent)
    by_heads = q.astype(dtype).reshape(n, num_kv_heads, -1, columns).swapaxes(0, 1)
    shape = by_heads.shape[:-1]  # (num_kv_heads, n, group)

    scores = dtype.type(scale) * (by_heads.reshape(num_kv_heads, -1, columns) @ keys)
    scores = scores.reshape(*shape, tokens)
    hidden = np.arange(tokens) >= visible[:, None]
    if unseen is not None:
        hidden |= unseen[:, begin:end]
    if first is not None:
        hidden |= np.arange(tokens) < (first - begin)[:, None]
    if hidden.any():
        scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
    sink = sink.reshape(num_kv_heads, 1, -1, 1)
    # It keeps exp() in range and cancels in both results; finite, or a sink of inf would give NaN.
    top = np.clip(sink, np.finfo(dtype).min, np.finfo(dtype).max)
    top = np.maximum(scores.max(axis=-1, keepdims=True), top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    out = (weights.reshape(num_kv_heads, -1, tokens) @ values).reshape(*shape, latent)
    out = out / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return (
        out.swapaxes(0, 1).reshape(n, num_heads, latent),
        lse.swapaxes(0, 1).reshape(n, num_heads),
    )


class Cache(NamedTuple):
    """A cache's columns, and what their numbers are multiplied by."""

    ckv: Array
    k_pe: Array
    scales: Array | None
    factor: float

    @classmethod
    def of(cls, kv_cache: Array | Sequence[Array], kv_scale: Array | float | None) -> Cache:
        """Take a cache apart, and check that a kv_scale has something to scale."""
        ckv, k_pe, scales = columns_of(kv_cache)
        if kv_scale is None:
            return cls(ckv, k_pe, scales, 1.0)
        if k_pe.dtype != E4M3 and (ckv.dtype != E4M3 or scales is not None):
            raise ValueError("kv_scale: no e4m3 columns without scales of their own; leave it out")
        return cls(ckv, k_pe, scales, float(np.asarray(kv_scale, np.float32).reshape(())))

    def rows(self, table: Array, kv_len: int, dtype: np.dtype[Any]) -> Array:
        """Gather the rows of a request, its length clamped: (tokens, num_kv_heads, 576)."""
        tokens = min(max(kv_len, 0), len(table) * self.ckv.shape[1])
        return self._numbers(lambda part: cached_rows(part, table, tokens), dtype)

    def rows_at(self, pages: Array, slots: Array, dtype: np.dtype[Any]) -> Array:
        """Gather the rows of some slots of some pages: (rows, num_kv_heads, 576)."""
        return self._numbers(lambda part: part[pages, slots], dtype)

    def _numbers(self, gathered: Callable[[Array], Array], dtype: np.dtype[Any]) -> Array:
        """Gather rows of each part, and multiply them by their factors."""
        latent = self.ckv.shape[-1]
        parts = [gathered(x) for x in (self.ckv, self.k_pe)]
        columns = latent + self.k_pe.shape[-1]
        rows = np.empty((*parts[0].shape[:-1], columns), dtype)
        ckv, k_pe = rows[..., :latent], rows[..., latent:]
        ckv[...], k_pe[...] = parts
        if self.scales is not None:
            ckv *= np.repeat(gathered(self.scales).astype(dtype), SCALED_COLUMNS, axis=-1)
        elif self.ckv.dtype == E4M3:
            ckv *= dtype.type(self.factor)
        if self.k_pe.dtype == E4M3:
            k_pe *= dtype.type(self.factor)
        return rows
