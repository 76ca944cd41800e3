# SPDX-License-Identifier: Apache-2.0
"""The pages of the indexer's cache, for who writes and who reads them: keys and scales apart.

One array has both: the bytes of a page are first the e4m3 keys of its tokens, then their float32
scales. A pair of arrays has each by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.mla.checks import check_elements, check_layout

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

__all__ = [
    "E4M3",
    "HEAD_DIMS",
    "PAGE_SIZES",
    "check_page_size",
    "check_page_stride",
    "check_shape",
    "fused_pages",
    "one_of",
    "pair_of_pages",
]

HEAD_DIMS = (32, 64, 128)
PAGE_SIZES = (16, 32, 64, 128)
E4M3 = ("float8_e4m3fn", "uint8")  # the latter with the bits of the former
_SCALE_BYTES = 4  # of a token


def fused_pages(cache: ArrayView, head_dim: int) -> tuple[ArrayView, ArrayView]:
    """Check a cache whose pages hold keys and scales, and take them apart.

    Parameters
    ----------
    cache : ArrayView
        ``kv_cache``, with or without its axis of one kv head.
    head_dim : int
        Of queries or new keys.

    Returns
    -------
    tuple of ArrayView
        ``(num_pages, page_size, head_dim)`` float8_e4m3fn and ``(num_pages, page_size)`` float32,
        in the memory of `cache`; the pages contiguous and at multiples of 16 bytes.
    """
    name, row_bytes = "kv_cache", head_dim + _SCALE_BYTES
    if cache.dtype != "uint8":
        raise TypeError(
            f"{name}: needs uint8, got {cache.dtype}; view its bytes, or pass keys and scales as a "
            f"pair"
        )
    pages = _without_head_axis(name, cache, row_bytes, f"{head_dim} values and the scale")
    num_pages, page_size, _ = pages.shape
    page_stride, *inner = pages.strides
    if inner != [row_bytes, 1]:
        raise ValueError(
            f"{name}: needs pages whose bytes are contiguous, got strides {cache.strides}; only "
            f"the pages may lie apart"
        )
    check_page_stride(name, pages)
    keys = pages._replace(
        shape=(num_pages, page_size, head_dim),
        strides=(page_stride, head_dim, 1),
        dtype=E4M3[0],
    )
    scales = pages._replace(
        ptr=pages.ptr + page_size * head_dim,
        shape=(num_pages, page_size),
        strides=(page_stride, _SCALE_BYTES),
        dtype="float32",
    )
    return keys, scales


def pair_of_pages(keys: ArrayView, scales: ArrayView, head_dim: int) -> tuple[ArrayView, ArrayView]:
    """Check dtypes and shapes of a cache whose keys and scales are arrays of their own.

    Parameters
    ----------
    keys, scales : ArrayView
        ``kv_cache[0]`` and ``kv_cache[1]``.
    head_dim : int
        Of queries or new keys.

    Returns
    -------
    tuple of ArrayView
        The same as of `fused_pages`, but for the keys' dtype and what lies where.
    """
    first, second = "kv_cache[0]", "kv_cache[1]"
    if keys.dtype not in E4M3:
        raise TypeError(
            f"{first}: needs {E4M3[0]}, or {E4M3[1]} with its bits, got {keys.dtype}; quantise it, "
            f"e.g. with cumla.quantize_fp8"
        )
    keys = _without_head_axis(first, keys, head_dim, f"{head_dim} values")
    if scales.dtype != "float32":
        raise TypeError(f"{second}: needs float32, got {scales.dtype}; convert it first")
    check_shape(second, scales, "(num_pages, page_size)", keys.shape[:2])
    check_elements(second, scales)
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
            f"{name}: needs shape (num_pages, page_size, {columns}), or (num_pages, page_size, 1, "
            f"{columns}), for the {holds} of a token, got {cache.shape}; allocate it so"
        )
    if view.shape[0] == 0:
        raise ValueError(
            f"{name}: needs at least one page, got shape {cache.shape}; skip the call where there "
            f"is no cache"
        )
    check_page_size(name, view.shape[1])
    return view


def check_page_size(name: str, page_size: int) -> None:
    """Check the tokens of a page."""
    if page_size not in PAGE_SIZES:
        raise ValueError(
            f"{name}: needs a page size of {one_of(PAGE_SIZES)} tokens, got {page_size}; allocate "
            f"the cache so"
        )


def check_page_stride(name: str, pages: ArrayView) -> None:
    """Check alignment as `check_layout` does, where the rows may be of any width."""
    whole = pages._replace(shape=(pages.shape[0], 1), strides=(pages.strides[0], 1), dtype="uint8")
    check_layout(name, whole)


def check_shape(name: str, view: ArrayView, axes: str, shape: tuple[int, ...]) -> None:
    """Check a shape that follows from another argument's."""
    if view.shape != shape:
        raise ValueError(f"{name}: needs shape {axes} = {shape}, got {view.shape}; reshape it")


def one_of(numbers: tuple[int, ...]) -> str:
    """List numbers in prose."""
    *most, last = numbers
    return f"{', '.join(map(str, most))} or {last}"
