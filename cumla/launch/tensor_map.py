# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors ("tensor maps"): 128 bytes that tell the copy engine how an array lies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from cumla.errors import CumlaError
from cumla.launch.device import import_driver

__all__ = ["banded_kv_map", "page_heads", "paged_kv_map"]

# Of a box: type, columns, and the bytes of the swizzle, as wide as the box is if there is one; of
# words those of a packed row.
_BOXES = {
    "bfloat16": ("BFLOAT16", 64, 128),
    "float16": ("FLOAT16", 64, 128),
    "float8_e4m3fn": ("UINT8", 128, 128),
    "float32": ("FLOAT32", 4, 0),
    "uint32": ("UINT32", 164, 0),
}
_BAND = 8  # rows: the period of the swizzle
_MOST_EXTENT = 1 << 31  # of an axis, as coordinates are signed


@lru_cache(maxsize=4096)
def paged_kv_map(
    ptr: int,
    dtype: str,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    page_stride: int,
    row_stride: int,
    head_stride: int,
    box_rows: int,
) -> bytes:
    """Describe a paged KV cache as (head_dim, page_size, num_kv_heads, num_pages), innermost first.

    One load brings ``box_rows`` rows x 128 bytes of one head of one page into shared memory with a
    swizzle as wide as they are, or x 4 of float32 or x 164 words without; coordinates outside the
    array bring zeros, columns too. Descriptors are cached by all arguments: a cache that stays
    where it is costs one dictionary look-up a call.

    Parameters
    ----------
    ptr : int
        Address of the cache, a multiple of 16.
    dtype : str
        ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"``, ``"float32"`` or ``"uint32"``.
    num_pages, page_size, num_kv_heads, head_dim : int
        Extents in elements.
    page_stride, row_stride, head_stride : int
        Strides in bytes, multiples of 16 below 2**40.
    box_rows : int
        Rows of one load, at most 256.

    Returns
    -------
    bytes
        The 128-byte descriptor.
    """
    kind, box_columns, width = _BOXES[dtype]
    # The stride of an axis of length 1 means nothing and frameworks report anything there.
    sizes = (head_dim, page_size, num_kv_heads, num_pages)
    strides = [
        stride if size > 1 else 16 * head_dim
        for size, stride in zip(sizes[1:], (row_stride, head_stride, page_stride), strict=True)
    ]
    return _encode(ptr, kind, width, sizes, strides, (box_columns, box_rows, 1, 1))


@lru_cache(maxsize=4096)
def banded_kv_map(
    ptr: int,
    dtype: str,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    columns: int,
    page_stride: int,
    row_stride: int,
    head_stride: int,
    box_rows: int,
    box_tiles: int,
) -> bytes:
    """Describe columns of a paged cache in bands of eight rows and tiles of 64 columns.

    It is (64, 8, columns / 64, page_size / 8, pages and kv heads), innermost first. One load brings
    ``box_rows`` rows x ``box_tiles`` tiles, so that the rows of a tile lie eight by eight, 128 bytes
    each and swizzled, and behind eight rows of the last tile the next eight of the first. The last
    axis has kv head h of page p at ``page_heads(...) * p + h``.

    Parameters
    ----------
    ptr : int
        Address of the cache, a multiple of 16.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    num_pages, page_size, num_kv_heads, columns : int
        Extents in elements; multiples of 8 tokens and of 64 columns.
    page_stride, row_stride, head_stride : int
        Strides in bytes, multiples of 16 below 2**40, for which `page_heads` gives a number.
    box_rows, box_tiles : int
        What a load brings; box_rows is a multiple of 8.

    Returns
    -------
    bytes
        The 128-byte descriptor.
    """
    kind, tile, width = _BOXES[dtype]
    step = page_heads((num_pages, page_size, num_kv_heads), (page_stride, row_stride, head_stride))
    if step is None:
        raise AssertionError("such strides take another way")
    sizes = (tile, _BAND, columns // tile, page_size // _BAND, (num_pages - 1) * step + num_kv_heads)
    last = head_stride if num_kv_heads > 1 else page_stride if num_pages > 1 else 16
    strides = (row_stride, tile * 2, _BAND * row_stride, last)
    return _encode(ptr, kind, width, sizes, strides, (tile, _BAND, box_tiles, box_rows // _BAND, 1))


def page_heads(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Tell how many kv heads further the next page lies, where pages and kv heads are one axis.

    Parameters
    ----------
    shape : sequence of int
        Pages, tokens of a page, kv heads, and what follows.
    strides : sequence of int
        In bytes.

    Returns
    -------
    int or None
        None where no number of kv heads leads from a page to the next one.
    """
    num_pages, _, num_kv_heads = shape[:3]
    page_stride, _, head_stride = strides[:3]
    if num_kv_heads == 1:
        return 1
    if num_pages == 1:
        return num_kv_heads
    if head_stride <= 0 or page_stride % head_stride or page_stride // head_stride < num_kv_heads:
        return None
    step = page_stride // head_stride
    return step if step * num_pages < _MOST_EXTENT else None


def _encode(
    ptr: int,
    kind: str,
    swizzle: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> bytes:
    """Have the driver make a descriptor."""
    driver = import_driver()
    name = f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B" if swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"
    status, descriptor = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(sizes),
        ptr,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, name),
        # 256-byte promotion costs 8 % of the bandwidth on an H200; none and 128 bytes are equal.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise CumlaError(
            f"kv_cache: the driver refused a tensor map with {status.name} (sizes {tuple(sizes)}, byte "
            f"strides {tuple(strides)}); make a contiguous copy"
        )
    return ctypes.string_at(descriptor.getPtr(), 128)
