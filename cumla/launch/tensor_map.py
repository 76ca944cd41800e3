# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors ("tensor maps"): 128 bytes that tell the copy engine the layout of an array."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from cumla.errors import CumlaError
from cumla.launch.device import import_driver


class TensorMap(NamedTuple):
    """Arguments of ``cuTensorMapEncodeTiled``; axes are listed innermost first."""

    name: str  # argument that an error message names
    ptr: int  # a multiple of 16
    kind: str  # the driver's name of the element type, such as "BFLOAT16"
    sizes: tuple[int, ...]  # in elements; coordinates outside of them bring zeros
    # In bytes, of each axis but the innermost: multiples of 16 below 2**40
    strides: tuple[int, ...]
    box: tuple[int, ...]  # elements of one load on each axis
    swizzle: int  # width in bytes, or 0 for none

    def encode(self) -> bytes:
        """Return the 128-byte descriptor; the driver's library is needed, and no GPU.

        Where the driver's descriptors of a layout hold the address as it is, and nothing else that
        depends on it, other addresses are put there without the driver.
        """
        around = _around_address(self._replace(ptr=0))
        if around is None or not is_plain(self.ptr):
            return _encoded(self)
        before, after = around
        return before + self.ptr.to_bytes(8, "little") + after

    def address_at(self) -> int | None:
        """Return where a descriptor of this layout holds a plain address, in bytes, if it does."""
        around = _around_address(self._replace(ptr=0))
        return None if around is None else len(around[0])


_PROBES = 0x2AAAAAAAAAA0, 0x555555555550  # addresses that have no bit in common


def is_plain(address: int) -> bool:
    """Return whether descriptors are known to hold all bits of an address."""
    return not address & ~(_PROBES[0] | _PROBES[1])


@lru_cache(maxsize=1024)
def _around_address(layout: TensorMap) -> tuple[bytes, bytes] | None:
    """Split a descriptor at its address; None if two descriptors differ elsewhere as well."""
    first, second = (_encoded(layout._replace(ptr=probe)) for probe in _PROBES)
    here, there = (probe.to_bytes(8, "little") for probe in _PROBES)
    before, found, after = first.partition(here)
    return (before, after) if found and before + there + after == second else None


@lru_cache(maxsize=4096)
def _encoded(wanted: TensorMap) -> bytes:
    driver = import_driver()
    name, ptr, kind, sizes, strides, box, swizzle = wanted
    # The stride of an axis of length 1 means nothing and frameworks report anything there.
    usable = [s if n > 1 else 16 * sizes[0] for n, s in zip(sizes[1:], strides, strict=True)]
    mode = f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B" if swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"
    status, descriptor = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(sizes),
        int(ptr),
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(s) for s in usable],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, mode),
        # 256-byte promotion costs 8 % of the bandwidth on an H200; none and 128 bytes are equal.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise CumlaError(
            f"{name}: the driver refused a tensor map with {status.name} (sizes {sizes}, byte "
            f"strides {usable}); make a contiguous copy"
        )
    return ctypes.string_at(descriptor.getPtr(), 128)


# dtype -> (element type, columns of one box, swizzle in bytes; 0: none). None: all columns.
_BOXES = {
    "bfloat16": ("BFLOAT16", 64, 128),
    "float16": ("FLOAT16", 64, 128),
    "float8_e4m3fn": ("UINT8", 128, 128),
    "float32": ("FLOAT32", 4, 0),
    "uint32": ("UINT32", 164, 0),
    "uint64": ("UINT64", None, 0),
}


def paged_kv_map(
    ptr: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> TensorMap:
    """Describe a paged KV cache; one load brings rows of one head of one page.

    A load is ``box_rows`` rows (at most 256) x 128 bytes, with a swizzle as wide; or, without a
    swizzle, x 4 of float32, x 164 words of uint32 (a packed row) or x all columns of uint64.

    `ptr` is a multiple of 16; `shape` is ``(num_pages, page_size, num_kv_heads, columns)``;
    `strides` are in bytes. `dtype` is one of ``_BOXES``.
    """
    kind, box_columns, swizzle = _BOXES[dtype]
    num_pages, page_size, num_kv_heads, columns = shape
    page_stride, row_stride, head_stride = strides[:3]
    return TensorMap(
        "kv_cache",
        ptr,
        kind,
        (columns, page_size, num_kv_heads, num_pages),
        (row_stride, head_stride, page_stride),
        (box_columns or columns, box_rows, 1, 1),
        swizzle,
    )
