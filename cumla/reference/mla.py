# SPDX-License-Identifier: Apache-2.0
"""Dense multi-head latent attention over a paged cache, as a definition."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla.launch.mla_plan import HEAD_DIM, VALUE_DIM

Array = NDArray[Any]


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
    q: Array | tuple[Array, Array],
    kv_cache: Array | tuple[Array, Array],
    block_table: Array,
    cache_seqlens: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    batch_invariant: bool = False,
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
    q : ndarray of bfloat16, float16, float32 or float64, shape (batch, q_len, num_heads, 576)
        Absorbed queries. A tuple holds the first 512 columns and the last 64 apart.
    kv_cache : ndarray, shape (num_pages, page_size, num_kv_heads, 576)
        Pages of latent rows; without the head axis for one KV head. Any strides, any page size. A
        tuple as for q.
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
    batch_invariant : bool, default False
        Makes no difference here: each request is computed on its own.
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
        If something is no NumPy array, or of another dtype than the above.
    """
    if accumulate not in ("float64", "float32"):
        raise ValueError(
            f"accumulate: needs 'float64' or 'float32', got {accumulate!r}; pass one of them"
        )
    queries, caches = _parts("q", q), _parts("kv_cache", kv_cache)
    for name, array in (*queries.items(), *caches.items()):
        _check_dtype(name, array, _FLOATS)
    _check_dtype("block_table", block_table, _INTEGERS)
    _check_dtype("cache_seqlens", cache_seqlens, _INTEGERS)
    caches = {
        name: array[:, :, None, :] if array.ndim == 3 else array for name, array in caches.items()
    }
    _check_inputs(queries, caches, block_table, cache_seqlens)
    q = np.concatenate([*queries.values()], axis=-1)
    batch, q_len, num_heads, _ = q.shape
    scale = HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale
    out = _output("out", out, (batch, q_len, num_heads, VALUE_DIM), (q.dtype, np.dtype("f4")))
    lse = _output("lse", lse, (batch, num_heads, q_len), (np.dtype("f4"),))

    capacity = block_table.shape[1] * next(iter(caches.values())).shape[1]
    for b in range(batch):
        kv_len = min(max(int(cache_seqlens[b]), 0), capacity)
        parts = (
            _cached_rows(cache, block_table[b], kv_len, np.dtype(accumulate))
            for cache in caches.values()
        )
        rows = np.concatenate([*parts], axis=-1)
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
    """Gather the first kv_len rows of a request: (kv_len, num_kv_heads, columns)."""
    num_pages, page_size, num_kv_heads, columns = kv_cache.shape
    used = table[: -(-kv_len // page_size)]
    exists = (used >= 0) & (used < num_pages)
    pages = np.zeros((len(used), page_size, num_kv_heads, columns), dtype)
    pages[exists] = kv_cache[used[exists]]
    return pages.reshape(-1, num_kv_heads, columns)[:kv_len]


_FLOATS = ("bfloat16", "float16", "float32", "float64")
_INTEGERS = ("int32", "int64")


def _check_dtype(name: str, array: Any, dtypes: tuple[str, ...]) -> None:
    """Refuse what is no NumPy array, or one of another dtype."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name}: needs a NumPy array, got {type(array).__module__}."
            f"{type(array).__qualname__}; cumla.mla_decode takes those of other frameworks"
        )
    if array.dtype.name not in dtypes:
        raise TypeError(
            f"{name}: needs one of {', '.join(dtypes)}, got {array.dtype}; convert it first"
        )


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Name an array, or the two that hold latent and RoPE columns."""
    if not isinstance(value, tuple):
        return {name: value}
    if len(value) != 2:
        raise ValueError(
            f"{name}: needs one array, or a tuple of latent and RoPE columns, got {len(value)} "
            f"arrays; join them"
        )
    return {f"{name}[{i}]": part for i, part in enumerate(value)}


def _check_inputs(
    queries: dict[str, Array], caches: dict[str, Array], block_table: Array, cache_seqlens: Array
) -> None:
    """Refuse shapes that do not fit together."""
    q, kv_cache = next(iter(queries.values())), next(iter(caches.values()))
    for (name, array), columns in zip(queries.items(), _columns(queries), strict=True):
        if array.ndim != 4 or array.shape != (*q.shape[:3], columns):
            raise ValueError(
                f"{name}: needs shape (batch, q_len, num_heads, {columns}), got {array.shape}; "
                f"reshape it"
            )
    batch, _, num_heads, _ = q.shape
    for (name, array), columns in zip(caches.items(), _columns(caches), strict=True):
        if array.ndim != 4 or array.shape != (*kv_cache.shape[:3], columns) or 0 in array.shape[1:]:
            raise ValueError(
                f"{name}: needs shape (num_pages, page_size, num_kv_heads, {columns}) or "
                f"(num_pages, page_size, {columns}), got {array.shape}; reshape it"
            )
    if num_heads % kv_cache.shape[2]:
        raise ValueError(
            f"kv_cache: num_kv_heads must divide q's {num_heads} heads, got {kv_cache.shape[2]}; "
            f"pad q's heads, or pass the kv heads that they use"
        )
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table: needs shape ({batch}, max_pages), got {block_table.shape}; give each "
            f"request a row"
        )
    if cache_seqlens.shape != (batch,):
        raise ValueError(
            f"cache_seqlens: needs shape ({batch},), got {cache_seqlens.shape}; give each request "
            f"a length"
        )


def _columns(parts: dict[str, Array]) -> tuple[int, ...]:
    """Widths of one array, or of two."""
    return (HEAD_DIM,) if len(parts) == 1 else (VALUE_DIM, HEAD_DIM - VALUE_DIM)


def _output(
    name: str, array: Array | None, shape: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]
) -> Array:
    """Give the caller's array after a check, or a new one of the first dtype."""
    if array is None:
        return np.empty(shape, dtypes[0])
    if array.shape != shape:
        raise ValueError(
            f"{name}: needs shape {shape}, got {array.shape}; allocate it so or leave it out"
        )
    if array.dtype not in dtypes:
        needed = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(
            f"{name}: needs dtype {needed}, got {array.dtype}; allocate it so or leave it out"
        )
    return array
