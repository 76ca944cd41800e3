# SPDX-License-Identifier: Apache-2.0
"""Dense multi-head latent attention over a paged cache, as a definition."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.checks import checked_flag
from cumla.reference.mla.cache import PACKED_BYTES, SCALED_COLUMNS, SCALES, unpacked

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
    q: Array | tuple[Array, ...],
    kv_cache: Array | tuple[Array, ...],
    block_table: Array,
    cache_seqlens: Array,
    *,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
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

    An FP8 cache stands for the numbers that its factors make of it: an e4m3 column times its scale,
    where there are scales, and times `kv_scale` where there are none.

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
        tuple as for q. In a dtype of q's, or float8_e4m3fn, or uint8 with its bits: of a tuple also
        the first part alone. A third part is float32 scales, (num_pages, page_size, num_kv_heads,
        4), of 128 latent columns each. One array of uint8 with 656 columns is the packed format:
        512 e4m3, 4 float32 scales, 64 bfloat16.
    block_table : ndarray of int32, shape (batch, max_pages)
        Page numbers of each request, in the order of its tokens.
    cache_seqlens : ndarray of int32, shape (batch,)
        Number of cached tokens of each request, those of the queries included.
    softmax_scale : float, optional
        Factor of the scores; 576 ** -0.5 by default. A model passes its own, which stems from the
        head dimension before absorption.
    kv_scale : ndarray of one float32, or float, optional
        Factor of e4m3 columns without scales of their own; 1 by default.
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
        If shapes disagree, if there is a kv_scale and nothing that it scales, if num_kv_heads does
        not divide num_heads, or for an unknown precision.
    TypeError
        If something is no NumPy array, or of another dtype than the above, or a flag is neither
        True nor False.
    """
    if accumulate not in ("float64", "float32"):
        raise ValueError(
            f"accumulate: needs 'float64' or 'float32', got {accumulate!r}; pass one of them"
        )
    causal = checked_flag("causal", causal)
    checked_flag("batch_invariant", batch_invariant)
    queries, caches = _parts("q", q), _parts("kv_cache", kv_cache)
    for name, array in (*queries.items(), *caches.items()):
        _check_dtype(name, array, _DTYPES.get(name, _FLOATS))
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

    cache = _Cache.of(caches, kv_scale)
    capacity = block_table.shape[1] * cache.parts[0].shape[1]
    for b in range(batch):
        kv_len = min(max(int(cache_seqlens[b]), 0), capacity)
        rows = cache.rows(block_table[b], kv_len, np.dtype(accumulate))
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


class _Cache(NamedTuple):
    """A cache's columns in one array or two, and what their numbers are multiplied by."""

    parts: tuple[Array, ...]
    scales: Array | None
    factor: float

    @classmethod
    def of(cls, caches: dict[str, Array], kv_scale: Array | float | None) -> _Cache:
        """Take a cache apart, the bytes of e4m3 numbers as such."""
        first, *others = caches.values()
        scales = caches.get("kv_cache[2]")
        if first.dtype == np.uint8 and first.shape[-1] == PACKED_BYTES:
            latent, rope, scales = unpacked(first)
            parts = [latent, rope]
        else:
            parts = [first, *others[:1]]
        parts = [part.view(_FP8) if part.dtype == np.uint8 else part for part in parts]
        if kv_scale is None:
            return cls(tuple(parts), scales, 1.0)
        if not any(part.dtype == _FP8 for part in (parts if scales is None else parts[1:])):
            raise ValueError(
                "kv_scale: needs a cache with e4m3 columns that have no scales of their own; leave "
                "it out"
            )
        return cls(tuple(parts), scales, _factor(kv_scale))

    def rows(self, table: Array, kv_len: int, dtype: np.dtype[Any]) -> Array:
        """Gather the first kv_len rows of a request: (kv_len, num_kv_heads, 576)."""
        rows = [_cached_rows(part, table, kv_len, dtype) for part in self.parts]
        for i, part in enumerate(self.parts):
            if i == 0 and self.scales is not None:
                scales = _cached_rows(self.scales, table, kv_len, dtype)
                rows[0] *= np.repeat(scales, SCALED_COLUMNS, axis=-1)
            elif part.dtype == _FP8:
                rows[i] *= dtype.type(self.factor)
        return np.concatenate(rows, axis=-1)


def _factor(kv_scale: Any) -> float:
    """Return a factor as a number of float32."""
    if isinstance(kv_scale, np.ndarray):
        if kv_scale.dtype != np.float32:
            raise TypeError(f"kv_scale: needs float32, got {kv_scale.dtype}; convert it first")
        if kv_scale.size != 1:
            raise ValueError(
                f"kv_scale: needs one element, got shape {kv_scale.shape}; pass one number"
            )
    elif isinstance(kv_scale, bool) or not isinstance(kv_scale, Real):
        raise TypeError(
            f"kv_scale: needs a number, or an array of one float32, got "
            f"{type(kv_scale).__qualname__}; convert it"
        )
    return float(np.asarray(kv_scale, np.float32).reshape(()))


def _cached_rows(kv_cache: Array, table: Array, kv_len: int, dtype: np.dtype[Any]) -> Array:
    """Gather the first kv_len rows of a request: (kv_len, num_kv_heads, columns)."""
    num_pages, page_size, num_kv_heads, columns = kv_cache.shape
    used = table[: -(-kv_len // page_size)]
    exists = (used >= 0) & (used < num_pages)
    pages = np.zeros((len(used), page_size, num_kv_heads, columns), dtype)
    pages[exists] = kv_cache[used[exists]]
    return pages.reshape(-1, num_kv_heads, columns)[:kv_len]


_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_E4M3 = ("float8_e4m3fn", "uint8")
_DTYPES: dict[str, tuple[str, ...]] = {
    "kv_cache": _FLOATS + _E4M3,
    "kv_cache[0]": _FLOATS + _E4M3,
    "kv_cache[1]": _FLOATS + _E4M3,
    "kv_cache[2]": ("float32",),
}
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
    """Name an array, or the two that hold latent and RoPE columns, or these and scales."""
    if not isinstance(value, tuple):
        return {name: value}
    if len(value) != 2 and (len(value) != 3 or name == "q"):
        third = ", or these and the scales of an e4m3 cache" if name != "q" else ""
        raise ValueError(
            f"{name}: needs one array, or a tuple of latent and RoPE columns{third}, got "
            f"{len(value)} arrays; join them"
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
    if "kv_cache[2]" in caches and kv_cache.dtype.name not in _E4M3:
        raise TypeError(
            f"kv_cache[2]: needs kv_cache[0] of {' or '.join(_E4M3)}, got {kv_cache.dtype}; leave "
            f"it out"
        )
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
    """Widths of one array, or of two, and of scales."""
    if len(parts) > 1:
        return (VALUE_DIM, HEAD_DIM - VALUE_DIM, SCALES)[: len(parts)]
    (whole,) = parts.values()
    is_packed = whole.dtype == np.uint8 and whole.shape[-1:] == (PACKED_BYTES,)
    return (PACKED_BYTES if is_packed else HEAD_DIM,)


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
