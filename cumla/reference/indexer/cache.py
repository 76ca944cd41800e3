# SPDX-License-Identifier: Apache-2.0
"""Quantising rows to e4m3, and writing the indexer's keys into a paged cache, as a definition.

The kernels compute the same float32 operations: what they write is equal to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla.mla.checks import checked_flag

Array = NDArray[Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_MOST_E4M3 = np.float32(448)
_E4M3_NAN = 0x7F
_LEAST_NORMAL = np.float32(2.0**-126)
_LEAST_POWER_SCALE = np.float32(1e-4)
_SCALE_BYTES = 4


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
    out : ndarray of float8_e4m3fn or uint8, shape of x, optional
        Where to write the values.
    scale_out : ndarray of float32, shape (...), optional
        Where to write the scales.

    Returns
    -------
    QuantizedRows
        ``values``, float8_e4m3fn (ml_dtypes) unless out is given, and ``scale``, float32.

    Raises
    ------
    TypeError
        If power_of_two_scales is neither True nor False.
    """
    numbers = in_float32(x)
    amax = np.fmax.reduce(np.abs(numbers), axis=-1, initial=np.float32(0))
    scale = np.asarray(np.minimum(amax, np.finfo(np.float32).max) / _MOST_E4M3)
    if checked_flag("power_of_two_scales", power_of_two_scales):
        scale = _rounded_up(np.maximum(scale, _LEAST_POWER_SCALE))
    else:
        scale = np.maximum(scale, _LEAST_NORMAL)
    inverse = np.float32(1) / scale
    if out is None:
        out = np.empty(x.shape, _E4M3)
    out.view(np.uint8)[...] = e4m3_bits(numbers, inverse[..., None])
    if scale_out is None:
        scale_out = np.empty(scale.shape, np.float32)
    scale_out[...] = scale
    return QuantizedRows(out, scale_out)


def in_float32(x: Array) -> Array:
    """Convert to float32, subnormal numbers to zeros of their sign."""
    numbers = x.astype(np.float32)
    numbers[np.abs(numbers) < _LEAST_NORMAL] *= np.float32(0)
    return numbers


def e4m3_bits(numbers: Array, factor: Array | np.float32) -> Array:
    """Give the bits of float32 numbers times a float32 factor in e4m3, saturated."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = numbers * factor
        bits: Array = np.clip(scaled, -_MOST_E4M3, _MOST_E4M3).astype(_E4M3).view(np.uint8)
    bits[np.isnan(scaled)] = _E4M3_NAN
    return bits


def _rounded_up(scale: Array) -> Array:
    """Round float32 numbers up to powers of two: a mantissa that is not 0 carries."""
    bits = np.asarray(scale, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def append_indexer_cache(
    k: Array,
    kv_cache: Array | tuple[Array, Array],
    slot_mapping: Array,
    *,
    power_of_two_scales: bool = False,
) -> None:
    """Quantise the indexer keys of new tokens, and write them into the pages of a cache.

    Row ``i`` goes to row ``slot % page_size`` of page ``slot // page_size``, ``slot`` being
    ``slot_mapping[i]``, as :func:`quantize_fp8` quantises it. Rows whose slot is negative or behind
    the last page are skipped.

    Parameters
    ----------
    k : ndarray of bfloat16, float16 or float32, shape (tokens, head_dim)
        The keys.
    kv_cache : ndarray of uint8, shape (num_pages, page_size, head_dim + 4)
        Written to; or the same with an axis of 1 before the last one. The bytes of a page, which
        are contiguous, are ``page_size * head_dim`` e4m3 values, then ``page_size`` float32 scales.
        Or a pair of ``(num_pages, page_size, head_dim)`` e4m3 or uint8, or the same with an axis of
        1 before the last one, and ``(num_pages, page_size)`` float32.
    slot_mapping : ndarray of integers, shape (tokens,)
        Where each row goes.
    power_of_two_scales : bool
        Round scales up to powers of two.

    Raises
    ------
    TypeError
        As :func:`quantize_fp8`.
    """
    values, scales = _parts(kv_cache, k.shape[1])
    num_pages, page_size = values.shape[:2]
    slots = slot_mapping.astype(np.int64)
    exists = (slots >= 0) & (slots < num_pages * page_size)
    page, offset = np.divmod(slots[exists], page_size)
    rows = quantize_fp8(k[exists], power_of_two_scales=power_of_two_scales)
    values[page, offset] = rows.values.view(np.uint8)
    scales[page, offset] = rows.scale


def _parts(kv_cache: Array | tuple[Array, Array], head_dim: int) -> tuple[Array, Array]:
    """Give the values, as bytes, and the scales; both begin with the axes of pages and rows."""
    if not isinstance(kv_cache, np.ndarray):
        values, scales = kv_cache
        values = values.view(np.uint8)
        return values[:, :, 0] if values.ndim == 4 else values, scales
    num_pages, page_size = kv_cache.shape[:2]
    split = page_size * head_dim
    pages = np.lib.stride_tricks.as_strided(
        kv_cache, (num_pages, split + page_size * _SCALE_BYTES), (kv_cache.strides[0], 1)
    )
    values = pages[:, :split].reshape(num_pages, page_size, head_dim)
    return values, pages[:, split:].view(np.float32)
