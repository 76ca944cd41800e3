# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/quantize_fp8.cu: rows to e4m3, each with a float32 scale."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

# MOST_AXES: of rows, once those that can be are merged; _HELD: octets of a row that a thread holds.
_THREADS, _HELD, _OCTET, MOST_AXES = (
    constant("indexer/quantize_fp8", name)
    for name in ("kQuantizeThreads", "kMostHeld", "kOctet", "kMostAxes")
)
MOST_COLUMNS = _THREADS * _HELD * _OCTET

_NAMES = "indexer", "quantize_fp8", "QuantizeFp8Params"
_SPECS = {
    dtype: KernelSpec.of(*_NAMES, dtype, tags=[dtype], threads=_THREADS, min_blocks=4)
    for dtype in FLOATS
}
SPECS = tuple(_SPECS.values())


def merge_axes(
    sizes: tuple[int, ...], *strides: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merge the axes of rows that all arrays run through in equal steps.

    `sizes` are those of every axis but the last one, none of them 0; `strides` are those of each
    array along these axes. Return sizes, and the strides of each array, from the outermost axis on.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if merged:
            outer, outer_steps = merged[-1]
            if outer_steps == tuple(step * size for step in steps):
                merged[-1] = (outer * size, tuple(steps))
                continue
        merged.append((size, tuple(steps)))
    return merged


def quantize_launch(
    x: ArrayView, values: ArrayView, scale: ArrayView, power_of_two_scales: bool
) -> Launch:
    """Describe how to quantise the rows of `x`, at least one.

    `x` and `values` are ``(..., columns)``, columns a multiple of 16 up to `MOST_COLUMNS`, with at
    most `MOST_AXES` axes of rows that do not merge; `scale` is ``(...)`` float32. Where
    `power_of_two_scales`, scales are rounded up to powers of two.
    """
    *lead, columns = x.shape
    axes = merge_axes(tuple(lead), x.strides[:-1], values.strides[:-1], scale.strides)
    axes = [(1, (0, 0, 0))] * (MOST_AXES - len(axes)) + axes
    rows, octets = prod(lead), columns // _OCTET
    team_log2 = (-(-octets // _HELD) - 1).bit_length()
    x_strides, value_strides, scale_strides = zip(*(steps for _, steps in axes), strict=True)
    params = {
        "x": x.ptr,
        "values": values.ptr,
        "scales": scale.ptr,
        "sizes": [size for size, _ in axes],
        "x_strides": x_strides,
        "value_strides": value_strides,
        "scale_strides": scale_strides,
        "rows": rows,
        "octets": octets,
        "team_log2": team_log2,
        "power_of_two": power_of_two_scales,
    }
    blocks = -(-rows // (_THREADS >> team_log2))
    return launch_of(_SPECS[x.dtype], (blocks, 1, 1), params)
