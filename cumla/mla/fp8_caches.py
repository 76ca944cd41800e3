# SPDX-License-Identifier: Apache-2.0
"""What FP8 caches look like, to those who read them and those who write them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from cumla.core.arguments import check_dtype
from cumla.core.names import arg
from cumla.mla.shape import (
    PACKED_BYTES,
    ROPE_DIM,
    SCALES,
    V4_BYTES,
    V4_FP8_DIM,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
    VALUE_DIM,
)

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

FP8 = "float8_e4m3fn"
E4M3 = (FP8, "uint8")  # its bits will do


def is_packed(cache: ArrayView) -> bool:
    """Tell a cache in the packed format from one whose columns are numbers."""
    return cache.dtype == "uint8" and cache.shape[-1:] == (PACKED_BYTES,)


def unpacked(rows: ArrayView) -> tuple[ArrayView, ArrayView, ArrayView]:
    """Take rows of 656 bytes apart: latent columns as bytes, RoPE columns, scales."""
    lead, steps = rows.shape[:3], rows.strides[:3]

    def part(begin: int, columns: int, dtype: str, itemsize: int) -> ArrayView:
        return rows._replace(
            ptr=rows.ptr + begin, shape=(*lead, columns), strides=(*steps, itemsize), dtype=dtype
        )

    return (
        part(0, VALUE_DIM, "uint8", 1),
        part(VALUE_DIM + 4 * SCALES, ROPE_DIM, "bfloat16", 2),
        part(VALUE_DIM, SCALES, "float32", 4),
    )


def is_v4(cache: ArrayView) -> bool:
    """Tell a cache of DeepSeek-V4's slots from one whose columns are numbers."""
    return cache.dtype in E4M3 and cache.shape[-1:] == (V4_BYTES,)


def v4_apart(pages: ArrayView) -> tuple[ArrayView, ArrayView, ArrayView]:
    """Take pages of V4's slots apart: e4m3 columns as bytes, RoPE columns, exponents of scales."""
    (count, size), step = pages.shape[:2], pages.strides[0]

    def part(begin: int, row: int, columns: int, dtype: str, itemsize: int) -> ArrayView:
        shape, strides = (count, size, 1, columns), (step, row, row, itemsize)
        return pages._replace(ptr=pages.ptr + begin, shape=shape, strides=strides, dtype=dtype)

    return (
        part(0, V4_ROW_BYTES, V4_FP8_DIM, "uint8", 1),
        part(V4_FP8_DIM, V4_ROW_BYTES, ROPE_DIM, "bfloat16", 2),
        part(size * V4_ROW_BYTES, V4_SCALE_BYTES, V4_SCALE_BYTES, "uint8", 1),
    )


def relabelled(view: ArrayView) -> ArrayView:
    """Call bytes what they hold: e4m3 numbers."""
    return view._replace(dtype=FP8) if view.dtype == "uint8" else view


def check_factor(name: str, view: ArrayView) -> None:
    """Check a factor that is an array, which only a kernel looks into."""
    check_dtype(name, view.dtype, ("float32",))
    if prod(view.shape) != 1:
        raise ValueError(f"{arg(name)}: needs one element, got shape {view.shape}; pass one number")
    if view.ptr % 4:
        raise ValueError(
            f"{arg(name)}: needs an address that is a multiple of 4 bytes, got {view.ptr:#x}; "
            f"copy it"
        )
