# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors ("tensor maps"): 128 bytes that tell the copy engine how an array lies."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from cumla.errors import CumlaError
from cumla.launch.device import import_driver

__all__ = ["paged_kv_map"]

_COLUMNS = 64  # of a box: 128 bytes of 16-bit values, the width of the swizzle


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

    One load brings ``box_rows`` rows x 64 columns of one head of one page into shared memory with
    the 128-byte swizzle; coordinates outside the array bring zeros. Descriptors are cached by all
    arguments: a cache that stays where it is costs one dictionary look-up a call.

    Parameters
    ----------
    ptr : int
        Address of the cache, a multiple of 16.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
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
    types = driver.CUtensorMapDataType
    kind = {
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    sizes = (head_dim, page_size, num_kv_heads, num_pages)
    strides = (row_stride, head_stride, page_stride)
    # The stride of an axis of length 1 means nothing and frameworks report anything there.
    usable = [s if n > 1 else 16 * head_dim for n, s in zip(sizes[1:], strides, strict=True)]
    status, descriptor = driver.cuTensorMapEncodeTiled(
        kind,
        4,
        ptr,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(s) for s in usable],
        [driver.cuuint32_t(n) for n in (_COLUMNS, box_rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
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
