# SPDX-License-Identifier: Apache-2.0
"""Logits of the sparse attention's indexer over the tokens of a sequence, as a definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cumla.reference.rows import Array, as_e4m3
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def mqa_logits(
    q: Array,
    kv: Sequence[Array],
    weights: Array,
    ks: Array,
    ke: Array,
    *,
    max_kv_len: int | None = None,
    logits_dtype: str | None = None,
    clean: bool = True,
    out: Array | None = None,
) -> Array:
    """Score the tokens of a sequence for each query: the indexer's logits of a prefill.

    With ``k, scale = kv`` and the sum over the heads h::

        logit[i, j] = scale[j] * sum(weights[i, h] * max(q[i, h] @ k[j], 0))

    for the tokens ``ks[i] <= j < ke[i]``, both clamped to ``[0, seq_len_kv]``, and -inf for all
    others. Nothing else of k and scale is read.

    Parameters
    ----------
    q : ndarray of float8_e4m3fn, or uint8 with its bits, shape (seq_len, num_heads, head_dim)
        Queries.
    kv : pair of ndarray
        Keys ``(seq_len_kv, head_dim)``, as q, and their float32 scales ``(seq_len_kv,)``.
    weights : ndarray of float32, shape (seq_len, num_heads)
        Weights of the heads, with the scale of q folded in.
    ks, ke : ndarray of integers, shape (seq_len,)
        First token of each query, and the one after the last.
    max_kv_len : int, optional
        Number of columns of a compressed result: column c is token ``ks[i] + c``.
    logits_dtype : {"float32", "bfloat16"}, optional
        Of the result; that of out, or else float32, by default.
    clean : bool, default True
        Write the -inf; otherwise what is not visible is left as it is.
    out : ndarray, shape (seq_len, seq_len_kv) or (seq_len, max_kv_len), optional
        Where to write the logits.

    Returns
    -------
    ndarray
        The logits, computed in float64 and rounded once.
    """
    keys, scale = as_e4m3(kv[0]), kv[1]
    seq_len, seq_len_kv = len(q), len(keys)
    width = seq_len_kv if max_kv_len is None else max_kv_len
    out = output((seq_len, width), logits_dtype, clean, out)
    bounds = (np.clip(bound.astype(np.int64), 0, seq_len_kv).tolist() for bound in (ks, ke))
    for i, (query, begin, end) in enumerate(zip(as_e4m3(q), *bounds, strict=True)):
        first = 0 if max_kv_len is None else begin
        seen = slice(begin, min(end, first + width))
        if begin < seen.stop:
            row = logits_of(query, weights[i], keys[seen], scale[seen])
            out[i, begin - first : seen.stop - first] = row
    return out


def output(
    shape: tuple[int, int], logits_dtype: str | None, clean: bool, out: Array | None
) -> Array:
    """Return the caller's array, or a new one; full of -inf, if it is to be clean."""
    if out is None:
        out = np.empty(shape, logits_dtype or "float32")
    if clean:
        out[...] = -np.inf
    return out


def logits_of(q: Array, weights: Array, keys: Array, scale: Array) -> Array:
    """Compute the logits of a query (num_heads, head_dim) for keys (tokens, head_dim).

    A product that is NaN counts as 0, as it does on the GPU.
    """
    products = q.astype(np.float64) @ keys.astype(np.float64).T
    return scale.astype(np.float64) * (weights.astype(np.float64) @ np.fmax(products, 0.0))
