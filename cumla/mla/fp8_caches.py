# SPDX-License-Identifier: Apache-2.0
"""What FP8 caches look like, to those who read them and those who write them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from cumla.core.arguments import check_dtype
from cumla.mla.shape import PACKED_BYTES, ROPE_DIM, SCALES, VALUE_DIM

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


def relabelled(view: ArrayView) -> ArrayView:
    """Call bytes what they hold: e4m3 numbers."""
    return view._replace(dtype=FP8) if view.dtype == "uint8" else view


def check_factor(name: str, view: ArrayView) -> None:
    """Check a factor that is an array, which only a kernel looks into."""
    check_dtype(name, view.dtype, ("float32",))
    if prod(view.shape) != 1:
        raise ValueError(f"{name}: needs one element, got shape {view.shape}; pass one number")
    if view.ptr % 4:
        raise ValueError(
            f"{name}: needs an address that is a multiple of 4 bytes, got {view.ptr:#x}; copy it"
        )
