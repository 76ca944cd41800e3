# SPDX-License-Identifier: Apache-2.0
"""Quantising rows to e4m3, as a definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cumla.reference.rows import E4M3, Array, quantized


class QuantizedRows(NamedTuple):
    """Rows of 8-bit numbers, each with a factor: row i is about ``values[i] * scale[i]``.

    Attributes
    ----------
    values : array of e4m3, shape (..., columns)
        Numbers up to 448.
    scale : array of float32, shape (...)
        Positive, finite and normal.
    """

    values: Any
    scale: Any


def quantize_fp8(
    x: Array,
    *,
    power_of_two_scales: bool = False,
    out: Array | None = None,
    scale_out: Array | None = None,
) -> QuantizedRows:
    """Quantise each row, along the last axis, to e4m3 and one float32 scale.

    In float32, each operation rounded to nearest even, and subnormal numbers taken for 0::

        amax = min(max(abs(x)), 3.4028235e38)
        scale = max(amax / 448, 2 ** -126)
        values = e4m3(x * (1 / scale))

    With power_of_two_scales, ``scale`` is ``2 ** ceil(log2(max(amax / 448, 1e-4)))``. The
    conversion to e4m3 rounds to nearest even and saturates at 448.

    Infinities count as the largest float32, and keep their sign. NaN becomes the NaN 0x7f, and the
    rest of its row what it would be without it. A row of zeros has values 0 and the least scale.

    Parameters
    ----------
    x : ndarray of bfloat16, float16 or float32, shape (..., columns)
        At least one column.
    power_of_two_scales : bool
        Round scales up to powers of two.
    out, scale_out : ndarray, optional
        Where to write the values, float8_e4m3fn or uint8 of the shape of x, and the scales.

    Returns
    -------
    QuantizedRows
        ``values``, float8_e4m3fn (ml_dtypes) unless out is given, and ``scale``, float32.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> values, scale = cumla.reference.quantize_fp8(np.array([[448, -1], [224, 3]], np.float32))
    >>> scale
    array([1. , 0.5], dtype=float32)
    >>> values.astype(int)
    array([[448,  -1],
           [448,   6]])
    """
    bits, scale = quantized(x, power_of_two_scales)
    if out is None:
        out = np.empty(x.shape, E4M3)
    if scale_out is None:
        scale_out = np.empty(scale.shape, np.float32)
    out.view(np.uint8)[...] = bits
    scale_out[...] = scale
    return QuantizedRows(out, scale_out)
