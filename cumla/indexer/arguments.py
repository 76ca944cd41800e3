# SPDX-License-Identifier: Apache-2.0
"""Checks of the indexer's arguments; its pages as keys and scales.

One array of pages has both: the bytes of a page are first the e4m3 keys of its tokens, then their
float32 scales. A pair of arrays has each by itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.core.arguments import check_dtype, check_layout, check_lies, check_shape
from cumla.core.names import arg
from cumla.core.operation import Output
from cumla.core.spec import Option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

_HEADS = (8, 16, 32, 64)
HEAD_DIMS = (32, 64, 128)
_PAGE_SIZES = (16, 32, 64, 128)
E4M3 = ("float8_e4m3fn", "uint8")  # the latter with the bits of the former
FLOATS = ("bfloat16", "float16", "float32")
FLOAT32 = ("float32",)
_LOGITS_DTYPES = ("float32", "bfloat16")
_MOST_QUERIES = 8
_SCALE_BYTES = 4  # of a token


MXFP4 = "mxfp4"
"""Keys of e2m1 numbers, two a byte, and four exponents of powers of two, one per 32 columns."""
_MXFP4_DIM = 128


def _checked_format(name: str, value: object) -> str | None:
    if value not in (None, MXFP4):
        raise ValueError(
            f"{arg(name)}: needs {MXFP4!r}, got {value!r}; leave it out for keys of e4m3 numbers"
        )
    return None if value is None else MXFP4


CACHE_FORMAT = Option("cache_format", None, _checked_format, "str?")


def _check_mxfp4(given: Mapping[str, ArrayView], head_dim: int) -> None:
    """Check that keys are of the one width, and in pages with their scales."""
    if head_dim != _MXFP4_DIM:
        raise ValueError(
            f"{arg('cache_format')}: needs a head_dim of {_MXFP4_DIM} for {MXFP4!r}, got "
            f"{head_dim}; pad queries and keys with zeros"
        )
    if "kv_cache" not in given:
        raise ValueError(
            f"{arg('kv_cache')}: needs one array of pages with {arg('cache_format')} {MXFP4!r}, "
            f"got a pair; join the bytes of each page"
        )


def _fused_pages(cache: ArrayView, head_dim: int) -> tuple[ArrayView, ArrayView]:
    """Check a cache whose pages hold keys and scales, and take them apart.

    The keys, ``(num_pages, page_size, head_dim)`` float8_e4m3fn, and the scales, ``(num_pages,
    page_size)`` float32, are views of its memory: pages are contiguous and lie at multiples of 16
    bytes.
    """
    name, row_bytes = "kv_cache", head_dim + _SCALE_BYTES
    if cache.dtype != "uint8":
        raise TypeError(
            f"{arg(name)}: needs uint8, got {cache.dtype}; view its bytes, or pass keys and "
            f"scales as a pair"
        )
    pages = _without_head_axis(name, cache, row_bytes, f"{head_dim} values and the scale")
    num_pages, page_size, _ = pages.shape
    page_stride, *inner = pages.strides
    if inner != [row_bytes, 1]:
        raise ValueError(
            f"{arg(name)}: needs pages whose bytes are contiguous, got strides {cache.strides}; "
            f"only pages may have gaps between them"
        )
    check_page_stride(name, pages)
    keys = pages._replace(
        shape=(num_pages, page_size, head_dim), strides=(page_stride, head_dim, 1), dtype=E4M3[0]
    )
    scales = pages._replace(
        ptr=pages.ptr + page_size * head_dim,
        shape=(num_pages, page_size),
        strides=(page_stride, _SCALE_BYTES),
        dtype="float32",
    )
    return keys, scales


def pages_of(
    given: Mapping[str, ArrayView], head_dim: int, form: str | None = None
) -> tuple[ArrayView, ArrayView]:
    """Take keys and scales out of a cache in either form, by name, and check dtypes and shapes.

    Those of a pair come back as from `_fused_pages`, but for the keys' dtype and what lies where;
    those of MXFP4 as bytes, half as many columns, whose four exponents are one float32.
    """
    if form == MXFP4:
        _check_mxfp4(given, head_dim)
        return _fused_pages(given["kv_cache"], head_dim // 2)
    if "kv_cache" in given:
        return _fused_pages(given["kv_cache"], head_dim)
    first, second = "kv_cache[0]", "kv_cache[1]"
    keys, scales = given[first], given[second]
    _check_e4m3_dtype(first, keys)
    keys = _without_head_axis(first, keys, head_dim, f"{head_dim} values")
    check_dtype(second, scales.dtype, FLOAT32)
    check_shape(second, scales, "(num_pages, page_size)", keys.shape[:2], "reshape it")
    check_lies(second, scales, "elements")
    return keys, scales


def _without_head_axis(name: str, cache: ArrayView, columns: int, holds: str) -> ArrayView:
    """Check the shape of pages; (num_pages, page_size, columns) of it."""
    view = cache
    if len(cache.shape) == 4 and cache.shape[2] == 1:
        view = cache._replace(
            shape=(*cache.shape[:2], cache.shape[3]), strides=(*cache.strides[:2], cache.strides[3])
        )
    if len(view.shape) != 3 or view.shape[2] != columns:
        raise ValueError(
            f"{arg(name)}: needs shape (num_pages, page_size, {columns}), or (num_pages, "
            f"page_size, 1, {columns}), for the {holds} of a token, got {cache.shape}; allocate "
            f"it so"
        )
    if view.shape[0] == 0:
        raise ValueError(
            f"{arg(name)}: needs at least one page, got shape {cache.shape}; skip the call where "
            f"there is no cache"
        )
    check_page_size(name, view.shape[1])
    return view


def check_page_size(name: str, page_size: int) -> None:
    """Check the tokens of a page."""
    if page_size not in _PAGE_SIZES:
        raise ValueError(
            f"{arg(name)}: needs a page size of {one_of(_PAGE_SIZES)} tokens, got {page_size}; "
            f"allocate the cache so"
        )


def check_page_stride(name: str, pages: ArrayView) -> None:
    """Check alignment as `check_layout` does, where the rows may be of any width."""
    whole = pages._replace(shape=(pages.shape[0], 1), strides=(pages.strides[0], 1), dtype="uint8")
    check_layout(name, whole)


def one_of(numbers: tuple[int, ...]) -> str:
    """List numbers in prose."""
    *most, last = numbers
    return f"{', '.join(map(str, most))} or {last}"


# --- queries, weights and logits ---------------------------------------------------------------


def checked_logits_dtype(logits_dtype: Any) -> str | None:
    """Return the name of a dtype of any framework, or None."""
    if logits_dtype is None:
        return None
    try:
        hash(logits_dtype)
    except TypeError:
        raise TypeError(
            f"{arg('logits_dtype')}: needs {' or '.join(_LOGITS_DTYPES)}, got "
            f"{type(logits_dtype).__qualname__}; pass its name"
        ) from None
    return _logits_dtype(logits_dtype)


LOGITS_DTYPE = Option("logits_dtype", None, lambda _, value: checked_logits_dtype(value), "str?")


@lru_cache(maxsize=64)
def _logits_dtype(logits_dtype: Any) -> str:
    got = str(logits_dtype)
    if not got.startswith("torch."):
        # It refuses names of types that NumPy does not know until ml_dtypes is loaded, too.
        with suppress(TypeError):
            got = np.dtype(logits_dtype).name
    name = got.removeprefix("torch.")
    if name not in _LOGITS_DTYPES:
        raise TypeError(
            f"{arg('logits_dtype')}: needs {' or '.join(_LOGITS_DTYPES)}, got {got}; convert the "
            f"result"
        )
    return name


def check_sizes(heads_name: str, num_heads: int, dim_name: str, head_dim: int) -> None:
    """Check that there are kernels for these heads."""
    if num_heads not in _HEADS:
        raise ValueError(
            f"{arg(heads_name)}: needs {one_of(_HEADS)} heads, got {num_heads}; pad them with "
            f"heads of weight 0"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"{arg(dim_name)}: needs a head_dim of {one_of(HEAD_DIMS)}, got {head_dim}; pad "
            f"queries and keys with zeros"
        )


def check_q_len(name: str, q_len: int) -> None:
    """Check the queries of a request."""
    if q_len > _MOST_QUERIES:
        raise ValueError(
            f"{arg(name)}: needs at most {_MOST_QUERIES} queries of a request, got {arg('q_len')} "
            f"{q_len}; pass them in several calls, or as requests of their own"
        )


def check_e4m3(name: str, view: ArrayView, axes: str, count: int) -> None:
    """Check dtype and rank of queries or keys."""
    _check_e4m3_dtype(name, view)
    if len(view.shape) != count:
        raise ValueError(f"{arg(name)}: needs axes {axes}, got shape {view.shape}; reshape it")


def _check_e4m3_dtype(name: str, view: ArrayView) -> None:
    if view.dtype not in E4M3:
        raise TypeError(
            f"{arg(name)}: needs {E4M3[0]}, or {E4M3[1]} with its bits, got {view.dtype}; "
            f"quantise it, e.g. with cumla.quantize_fp8"
        )


def checked_pair(name: str, value: Any) -> dict[str, Any]:
    """Name the two of a pair of keys and scales."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{arg(name)}: needs a pair of arrays, keys and their scales, got "
            f"{type(value).__module__}.{type(value).__qualname__}; pass (k, scale)"
        )
    if len(value) != 2:
        raise ValueError(
            f"{arg(name)}: needs a pair of arrays, keys and their scales, got {len(value)}; pass "
            f"(k, scale)"
        )
    return {f"{name}[{i}]": part for i, part in enumerate(value)}


def logits_output(shape: tuple[int, int], dtype: str | None) -> Output:
    """Return where the logits go; without a dtype a given array decides."""
    return Output("out", shape, _LOGITS_DTYPES if dtype is None else (dtype,), "row")
