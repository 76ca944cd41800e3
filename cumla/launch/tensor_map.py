# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors ("tensor maps"): 128 bytes that tell the copy engine how an array lies."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from cumla.errors import CumlaError
from cumla.launch.device import import_driver

__all__ = ["paged_kv_map"]

# Of a box: type, columns, and the bytes of the swizzle, as wide as the box is if there is one; of
# words those of a packed row, of 64 bits all of them.
_BOXES = {
    "bfloat16": ("BFLOAT16", 64, 128),
    "float16": ("FLOAT16", 64, 128),
    "float8_e4m3fn": ("UINT8", 128, 128),
    "float32": ("FLOAT32", 4, 0),
    "uint32": ("UINT32", 164, 0),
    "uint64": ("UINT64", None, 0),
}


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
    swizzle as wide as they are, or x 4 of float32, x 164 words or x all columns of uint64 without;
    coordinates outside the array bring zeros, columns too. Descriptors are cached by all
    arguments: a cache that stays where it is costs one dictionary look-up a call.

    Parameters
    ----------
    ptr : int
        Address of the cache, a multiple of 16.
    dtype : str
        ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"``, ``"float32"``, ``"uint32"`` or
        ``"uint64"``.
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
    driver = import_driver()
    kind, box_columns, width = _BOXES[dtype]
    box_columns = box_columns or head_dim
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{width}B" if width else "CU_TENSOR_MAP_SWIZZLE_NONE"
    sizes = (head_dim, page_size, num_kv_heads, num_pages)
    strides = (row_stride, head_stride, page_stride)
    # The stride of an axis of length 1 means nothing and frameworks report anything there.
    usable = [s if n > 1 else 16 * head_dim for n, s in zip(sizes[1:], strides, strict=True)]
    status, descriptor = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        4,
        ptr,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(s) for s in usable],
        [driver.cuuint32_t(n) for n in (box_columns, box_rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, swizzle),
        # 256-byte promotion costs 8 % of the bandwidth on an H200; none and 128 bytes are equal.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise CumlaError(
            f"kv_cache: the driver refused a tensor map with {status.name} (sizes {sizes}, byte "
            f"strides {usable}); make a contiguous copy"
        )
    return ctypes.string_at(descriptor.getPtr(), 128)
