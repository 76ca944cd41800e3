# SPDX-License-Identifier: Apache-2.0
"""Dense multi-head latent attention over a paged cache, as a definition."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HEAD_DIM = 576  # a cached row: 512 compressed values, then 64 rotary ones
VALUE_DIM = 512  # the values are the first 512 numbers of the same row


class MLADecodeResult(NamedTuple):
    """Result of MLA decode attention, in the framework of the query.

    Attributes
    ----------
    out : array, shape (batch, q_len, num_heads, 512)
        Attention output.
    lse : array of float32, shape (batch, num_heads, q_len)
        Natural logarithm of the sum of ``exp(softmax_scale * q.k)`` over the visible tokens.
    """

    out: Any
    lse: Any


def mla_decode(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    cache_seqlens: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> MLADecodeResult:
    """Attend from a few query tokens a request to its cached latent rows.

    After weight absorption all query heads of a group read one latent row a token. Query head ``h``
    uses KV head ``h // (num_heads // num_kv_heads)``. With ``k`` the 576 numbers of a row, ``v``
    its first 512 and the sums over the tokens that the query sees::

        lse = log(sum(exp(softmax_scale * q.k)))
        out = sum(exp(softmax_scale * q.k - lse) * v)

    Token ``t`` of request ``b`` lies in slot ``t % page_size`` of page
    ``block_table[b, t // page_size]``. Lengths are clamped to ``[0, max_pages * page_size]``.
    Nothing else of the table or of the cache is read: unused entries and slots may hold anything,
    NaN included. A page number outside of ``[0, num_pages)`` in a used entry stands for a page of
    zeros, as on the GPU, whose tensor-map loads fill with zeros whatever lies out of bounds.

    Parameters
    ----------
    q : ndarray of bfloat16 or float16, shape (batch, q_len, num_heads, 576)
        Absorbed queries.
    kv_cache : ndarray, shape (num_pages, page_size, num_kv_heads, 576)
        Pages of latent rows; without the head axis for one KV head. Any strides.
    block_table : ndarray of int32, shape (batch, max_pages)
        Page numbers of each request, in the order of its tokens.
    cache_seqlens : ndarray of int32, shape (batch,)
        Number of cached tokens of each request, those of the queries included.
    softmax_scale : float, optional
        Factor of the scores; 576 ** -0.5 by default. A model passes its own, which stems from the
        head dimension before absorption.
    causal : bool, default True
        Align the queries with the end of the cache: query ``i`` sees the first
        ``cache_seqlens[b] - (q_len - 1 - i)`` tokens. Otherwise every query sees all.
    out : ndarray of q's dtype or float32, shape (batch, q_len, num_heads, 512), optional
        Where to write the output.
    lse : ndarray of float32, shape (batch, num_heads, q_len), optional
        Where to write the logarithms.
    accumulate : {"float64", "float32"}
        Precision of all arithmetic; inputs are converted first, results rounded last.

    Returns
    -------
    MLADecodeResult
        ``out`` and ``lse``. A query that sees no token has out 0 and lse +inf.

    Raises
    ------
    ValueError
        If shapes disagree, if num_kv_heads does not divide num_heads, or for an unknown precision.
    TypeError
        If ``out`` or ``lse`` has another dtype than the above.
    """
    if accumulate not in ("float64", "float32"):
        raise ValueError(f"accumulate: needs 'float64' or 'float32', got {accumulate!r}")
    if kv_cache.ndim == 3:
        kv_cache = kv_cache[:, :, None, :]
    _check_inputs(q, kv_cache, block_table, cache_seqlens)
    batch, q_len, num_heads, _ = q.shape
    scale = HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale
    out = _output("out", out, (batch, q_len, num_heads, VALUE_DIM), (q.dtype, np.dtype("f4")))
    lse = _output("lse", lse, (batch, num_heads, q_len), (np.dtype("f4"),))

    capacity = block_table.shape[1] * kv_cache.shape[1]
    for b in range(batch):
        kv_len = min(max(int(cache_seqlens[b]), 0), capacity)
        rows = _cached_rows(kv_cache, block_table[b], kv_len, np.dtype(accumulate))
        for i in range(q_len):
            visible = max(kv_len - (q_len - 1 - i), 0) if causal else kv_len
            out[b, i], lse[b, :, i] = _attend(q[b, i], rows[:visible], scale)
    return MLADecodeResult(out, lse)


def _attend(q: Array, rows: Array, scale: float) -> tuple[Array, Array]:
    """Attend from q (num_heads, 576) to all of rows (tokens, num_kv_heads, 576)."""
    num_heads, (tokens, num_kv_heads, _), dtype = q.shape[0], rows.shape, rows.dtype
    if tokens == 0:
        return np.zeros((num_heads, VALUE_DIM), dtype), np.full(num_heads, np.inf, dtype)
    keys = rows.transpose(1, 2, 0)  # (num_kv_heads, 576, tokens)
    values = rows.transpose(1, 0, 2)[..., :VALUE_DIM]  # (num_kv_heads, tokens, 512)
    grouped_q = q.astype(dtype).reshape(num_kv_heads, -1, HEAD_DIM)

    scores = dtype.type(scale) * (grouped_q @ keys)
    top = scores.max(axis=-1, keepdims=True)  # keeps exp() in range and cancels in both results
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = (weights @ values) / total
    return out.reshape(num_heads, VALUE_DIM), (top + np.log(total)).reshape(num_heads)


def _cached_rows(kv_cache: Array, table: Array, kv_len: int, dtype: np.dtype[Any]) -> Array:
    """Gather the first kv_len rows of a request: (kv_len, num_kv_heads, 576)."""
    num_pages, page_size, num_kv_heads, _ = kv_cache.shape
    used = table[: -(-kv_len // page_size)]
    exists = (used >= 0) & (used < num_pages)
    pages = np.zeros((len(used), page_size, num_kv_heads, HEAD_DIM), dtype)
    pages[exists] = kv_cache[used[exists]]
    return pages.reshape(-1, num_kv_heads, HEAD_DIM)[:kv_len]


def _check_inputs(q: Array, kv_cache: Array, block_table: Array, cache_seqlens: Array) -> None:
    """Refuse shapes that do not fit together."""
    if q.ndim != 4 or q.shape[3] != HEAD_DIM:
        raise ValueError(f"q: needs shape (batch, q_len, num_heads, 576), got {q.shape}")
    batch, _, num_heads, _ = q.shape
    if kv_cache.ndim != 4 or kv_cache.shape[3] != HEAD_DIM or 0 in kv_cache.shape[1:]:
        raise ValueError(
            "kv_cache: needs shape (num_pages, page_size, num_kv_heads, 576) or "
            f"(num_pages, page_size, 576), got {kv_cache.shape}"
        )
    if num_heads % kv_cache.shape[2]:
        raise ValueError(
            f"kv_cache: num_kv_heads must divide q's {num_heads} heads, got {kv_cache.shape[2]}"
        )
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table: needs shape ({batch}, max_pages), got {block_table.shape}")
    if cache_seqlens.shape != (batch,):
        raise ValueError(f"cache_seqlens: needs shape ({batch},), got {cache_seqlens.shape}")


def _output(
    name: str, array: Array | None, shape: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]
) -> Array:
    """Give the caller's array after a check, or a new one of the first dtype."""
    if array is None:
        return np.empty(shape, dtypes[0])
    if array.shape != shape:
        raise ValueError(f"{name}: needs shape {shape}, got {array.shape}")
    if array.dtype not in dtypes:
        needed = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(f"{name}: needs dtype {needed}, got {array.dtype}")
    return array
