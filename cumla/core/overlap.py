# SPDX-License-Identifier: Apache-2.0
"""Refuse outputs that share memory with other arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TypeAlias

from cumla.core._dlpack import ArrayView, numpy_dtype
from cumla.core.names import arg

_LARGEST = 16  # bytes of the largest element, a complex128
_BEYOND = 1 << 64
# Bytes of an array: an address, ((number, stride), ...) of the axes, and the bytes of an element.
_Block: TypeAlias = "tuple[int, tuple[tuple[int, int], ...], int]"


def refuse_overlap(
    outputs: Mapping[str, ArrayView | None],
    inputs: Mapping[str, ArrayView | None],
    in_place: Mapping[str, str] | None = None,
) -> None:
    """Refuse outputs that share memory with an input or with each other, or may do so.

    All arrays are on one device; None is left out. Outputs named in `in_place` may be the very
    input that it names: the same elements at the same addresses. `ValueError` as `share_memory` has
    it.
    """
    lowest, highest = _BEYOND, 0  # of all that is written to
    placed: list[tuple[str, ArrayView]] = []
    for name, view in outputs.items():
        if view is None:
            continue
        first, last = _offsets(view.shape, view.strides)
        low, high = view.ptr + first, view.ptr + last
        if low < highest and high > lowest:
            for other, before in placed:
                if share_memory(view, before):
                    raise _overlap(name, other)
        lowest, highest = min(low, lowest), max(high, highest)
        placed.append((name, view))
    if not placed:
        return
    for name, view in inputs.items():
        if view is None:
            continue
        first, last = _offsets(view.shape, view.strides)
        if view.ptr + first < highest and view.ptr + last > lowest:
            for other, written in placed:
                same = written[:3] == view[:3] and (in_place or {}).get(other) == name
                if not same and share_memory(view, written):
                    raise _overlap(other, name)


def share_memory(one: ArrayView, two: ArrayView) -> bool:
    """Return whether two arrays of one device may share a byte.

    False is certain. True may be wrong where two arrays interleave and their strides are no
    multiples of each other's; columns, heads or pages of one larger array are told apart.
    """
    return _meet(_block(one), _block(two))


def _overlap(output: str, other: str) -> ValueError:
    return ValueError(
        f"{arg(output)}: needs memory of its own, got memory that {arg(other)} uses too; pass "
        f"another array, or a copy of one of the two"
    )


@functools.lru_cache(maxsize=4096)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Bytes from an array's address to its lowest one, and to behind its highest one."""
    if 0 in shape:
        return (0, 0)
    reaches = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(min(reach, 0) for reach in reaches), _LARGEST + sum(max(r, 0) for r in reaches)


def _block(view: ArrayView) -> _Block | None:
    """Bytes of an array, axes of one element left out and strides turned positive; None if none."""
    if 0 in view.shape:
        return None
    low = view.ptr
    axes = []
    for length, stride in zip(view.shape, view.strides, strict=True):
        if length > 1 and stride:
            axes.append((length, abs(stride)))
            low += min(stride, 0) * (length - 1)
    return (low, tuple(axes), numpy_dtype(view.dtype).itemsize)


def _width(block: _Block) -> int:
    _, axes, itemsize = block
    return itemsize + sum((length - 1) * stride for length, stride in axes)


def _meet(one: _Block | None, two: _Block | None) -> bool:
    """Return whether two blocks may share a byte.

    Rows of R bytes, from the lower address on: if in each block some axes step by whole rows and
    the others stay within one, two bytes are the same only if they are so within a row.
    """
    if one is None or two is None:
        return False
    if one[0] > two[0]:
        one, two = two, one
    if one[0] + _width(one) <= two[0]:
        return False
    steps = {stride for _, stride in (*one[1], *two[1])}
    for row in sorted({*steps, math.gcd(*steps)} - {0}, reverse=True):
        for first, second in ((one, two), (two, one)):
            inner, other = _within_row(first, row, first[0]), _within_row(second, row, first[0])
            if inner is not None and other is not None:
                smaller = len(inner[1]) + len(other[1]) < len(one[1]) + len(two[1])
                if smaller and not _meet(inner, other):
                    return False
    return True


def _within_row(block: _Block, row: int, origin: int) -> _Block | None:
    """Take what steps by whole rows from `origin` out of a block; None if the rest leaves a row."""
    ptr, axes, itemsize = block
    inner = ((ptr - origin) % row, tuple([axis for axis in axes if axis[1] % row]), itemsize)
    return inner if inner[0] + _width(inner) <= row else None
