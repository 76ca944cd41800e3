# SPDX-License-Identifier: Apache-2.0
"""Forms of FP8 caches, for functions that read and that write them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from cumla.core.arguments import check_dtype
from cumla.core.names import arg
from cumla.mla.shape import (
    FORMATS,
    FP8,
    NO_ROPE,
    PACKED,
    PACKED_BYTES,
    ROPE_DIM,
    SCALES,
    UNNAMED,
    V4,
    V4_BYTES,
    V4_FP8_DIM,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
    V41_FP4,
    VALUE_DIM,
    WRITTEN_FORMATS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

E4M3 = (FP8, "uint8")  # its bits will do


def checked_format(name: str, value: object, formats: Mapping[str, int] = FORMATS) -> str | None:
    """Check the name of a format of bytes, or None."""
    if value is not None and value not in formats:
        names = ", ".join(map(repr, formats))
        raise ValueError(
            f"{arg(name)}: needs one of {names}, got {value!r}; leave it out for bf16, fp16 and "
            f"plain e4m3 caches"
        )
    return None if value is None else str(value)


def format_of(name: str, cache: ArrayView, of: str, stated: str | None) -> str | None:
    """Tell the format of a cache's bytes; None if it holds numbers.

    `stated` is the argument `of`, as `checked_format` returns it. Widths that several formats have,
    or caches of numbers, need it.
    """
    width = cache.shape[-1:]
    if stated is not None:
        if cache.dtype not in E4M3 or width != (WRITTEN_FORMATS[stated],):
            raise ValueError(
                f"{arg(name)}: needs rows of {WRITTEN_FORMATS[stated]} bytes, "
                f"{' or '.join(E4M3)}, with {arg(of)} {stated!r}, got shape {cache.shape} of "
                f"{cache.dtype}; pass the format that wrote them"
            )
        return stated
    return PACKED if is_packed(cache) else V4 if is_v4(cache) else None


def unnamed_format(
    name: str, cache: ArrayView, of: str, formats: Mapping[str, int] = FORMATS
) -> ValueError | None:
    """Make the error for rows as wide as those of formats that no width tells, if they are."""
    names = [n for n, nbytes in formats.items() if cache.shape[-1:] == (nbytes,)]
    if cache.dtype not in E4M3 or not names or set(names) <= set(UNNAMED):
        return None
    return ValueError(
        f"{arg(of)}: needed to tell the format of {arg(name)}, whose rows have "
        f"{cache.shape[-1]} bytes, got None; pass {' or '.join(map(repr, names))}"
    )


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


def scales_apart(rows: ArrayView, form: str) -> tuple[ArrayView, ArrayView, ArrayView]:
    """Take rows whose scales follow their columns apart: columns, RoPE columns, scales, as bytes.

    NO_ROPE has no RoPE columns, and float32 scales; V41 and V41_FP4 have 64 like those before.
    """
    lead, steps = rows.shape[:3], rows.strides[:3]
    columns = VALUE_DIM // 2 if form == V41_FP4 else VALUE_DIM  # in bytes
    rope = 0 if form == NO_ROPE else ROPE_DIM * columns // VALUE_DIM

    def part(begin: int, nbytes: int, itemsize: int = 1, dtype: str = "uint8") -> ArrayView:
        shape, strides = (*lead, nbytes // itemsize), (*steps, itemsize)
        return rows._replace(ptr=rows.ptr + begin, shape=shape, strides=strides, dtype=dtype)

    scales = columns, FORMATS[form] - columns
    return (
        part(0, columns - rope),
        part(columns - rope, rope),
        part(*scales, 4, "float32") if form == NO_ROPE else part(*scales),
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
