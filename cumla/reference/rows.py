# SPDX-License-Identifier: Apache-2.0
"""Rows of paged caches: how they are found, rotated and quantised. Shared by all families.

The kernels quantise with the same float32 operations: what they write is equal to the bit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

_MOST_E4M3 = np.float32(448)
_E4M3_NAN = 0x7F
_LEAST_NORMAL = np.float32(2.0**-126)
_LEAST_POWER_SCALE = np.float32(1e-4)


def cached_rows(cache: Array, table: Array, tokens: int) -> Array:
    """Copy the rows of a request's first tokens, and read nothing else of the cache.

    `cache` is ``(num_pages, page_size, ...)``, `table` ``(max_pages,)``, and `tokens` at most
    ``max_pages * page_size``. Page numbers outside of ``[0, num_pages)`` give zeros.
    """
    num_pages, page_size = cache.shape[:2]
    index, slot = np.divmod(np.arange(tokens), page_size)
    page = table[index]
    exists = (page >= 0) & (page < num_pages)
    if exists.all():
        found: Array = cache[page, slot]
        return found
    rows = np.zeros((tokens, *cache.shape[2:]), cache.dtype)
    rows[exists] = cache[page[exists], slot[exists]]
    return rows


def page_numbers(
    requests: Array,
    index: Array,
    block_table: Array | None,
    kv_indices: Array | None,
    kv_indptr: Array | None,
) -> Array:
    """Look up page number `index` of each token's request; -1 if there is none."""
    pages = np.full(len(requests), -1, np.int64)
    if block_table is not None:
        batch, max_pages = block_table.shape
        known = (requests >= 0) & (requests < batch) & (index >= 0) & (index < max_pages)
        pages[known] = block_table[requests[known], index[known]]
        return pages
    if kv_indices is None or kv_indptr is None:
        raise ValueError("block_table: needs a table, or kv_indices and kv_indptr; pass one form")
    known = (requests >= 0) & (requests < len(kv_indptr) - 1) & (index >= 0)
    begin = kv_indptr[requests[known]].astype(np.int64)
    end = np.minimum(kv_indptr[requests[known] + 1], len(kv_indices))
    inside = (begin >= 0) & (index[known] < end - begin)
    known[known] = inside
    pages[known] = kv_indices[begin[inside] + index[known]]
    return pages


def rotated(x: Array, cos_sin: Array, interleaved: bool) -> Array:
    """Rotate pairs of columns, in float64.

    In `x`, ``(tokens, heads, columns)``, pair j is columns 2 j and 2 j + 1 if interleaved, and
    otherwise j and j + columns / 2. A row of `cos_sin`, ``(tokens, columns)``, is the cosines of
    all pairs, then their sines.
    """
    cos, sin = np.split(cos_sin.astype(np.float64)[:, None, :], 2, axis=-1)
    half = x.shape[-1] // 2
    pairs = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    )
    x0, x1 = (x[..., columns].astype(np.float64) for columns in pairs)
    result = np.empty(x.shape)
    result[..., pairs[0]] = cos * x0 - sin * x1
    result[..., pairs[1]] = sin * x0 + cos * x1
    return result


def as_e4m3(array: Array) -> Array:
    """Take bytes for the e4m3 numbers that they are."""
    return array.view(E4M3) if array.dtype == np.uint8 else array


def in_float32(x: Array) -> Array:
    """Convert to float32: subnormal numbers to zeros of their sign, NaN of float16 to one without.

    So does the device.
    """
    numbers = x.astype(np.float32)
    if x.dtype == np.float16:
        numbers[np.isnan(numbers)] = np.nan
    numbers[np.abs(numbers) < _LEAST_NORMAL] *= np.float32(0)
    return numbers


def e4m3_bits(numbers: Array, factor: Array | np.float32) -> Array:
    """Give the bits of float32 numbers times a float32 factor in e4m3, saturated."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = numbers * factor
        bits: Array = np.clip(scaled, -_MOST_E4M3, _MOST_E4M3).astype(E4M3).view(np.uint8)
    bits[np.isnan(scaled)] = _E4M3_NAN
    return bits


def quantized(x: Array, power_of_two_scales: bool) -> tuple[Array, Array]:
    """Quantise rows, along the last axis: the bits of their e4m3 numbers, and float32 scales."""
    numbers = in_float32(x)
    amax = np.fmax.reduce(np.abs(numbers), axis=-1, initial=np.float32(0))
    scale = np.asarray(np.minimum(amax, np.finfo(np.float32).max) / _MOST_E4M3)
    if power_of_two_scales:
        scale = rounded_up(np.maximum(scale, _LEAST_POWER_SCALE))
    else:
        scale = np.maximum(scale, _LEAST_NORMAL)
    inverse = np.asarray(np.float32(1) / scale)
    return e4m3_bits(numbers, inverse[..., None]), scale


def rounded_up(scale: Array) -> Array:
    """Round float32 numbers up to powers of two: a mantissa that is not 0 carries."""
    bits = np.asarray(scale, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def page_tables(
    block_table: Array | None, kv_indptr: Array | None, kv_indices: Array | None
) -> list[Array]:
    """Take the page numbers of each request."""
    if block_table is not None and kv_indptr is None and kv_indices is None:
        return [*block_table]
    if block_table is not None or kv_indptr is None or kv_indices is None:
        raise ValueError("block_table: needs a table, or kv_indptr and kv_indices; pass one form")
    bounds = pairwise(clamped(kv_indptr, len(kv_indices)))
    return [kv_indices[begin:end] for begin, end in bounds]


def clamped(offsets: Array, most: int) -> list[int]:
    """Clamp offsets to ``[0, most]``, as Python integers, which do not overflow."""
    return [min(max(offset, 0), most) for offset in offsets.tolist()]


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def e2m1_numbers(codes: Array) -> Array:
    """Give the float32 numbers of e2m1 codes, two a byte, along the last axis."""
    *lead, nbytes = codes.shape
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*lead, 2 * nbytes)
    numbers: Array = np.where(halves & 8, np.float32(-1), np.float32(1)) * _E2M1[halves & 7]
    return numbers


def e2m1_codes(numbers: Array, scales: Array | np.float32) -> Array:
    """Give the codes of float32 numbers divided by float32 scales, two a byte.

    They are rounded to nearest even, and saturate at 6; NaN is 6. Products of ties and scales are
    compared, so that no quotient is rounded.
    """
    magnitudes, codes = np.abs(numbers), np.zeros(numbers.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        for i, tie in enumerate(_E2M1_TIES):
            ties = tie * scales
            codes += ~(magnitudes < ties) if i % 2 else ~(magnitudes <= ties)
    codes |= np.signbit(numbers).astype(np.uint8) << 3
    packed: Array = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def unpacked(words: Array) -> Array:
    """Give the bits of words of 8, 16 or 32 bits, the lowest of the first word first."""
    little = words.astype(words.dtype.newbyteorder("<")).reshape(len(words), -1)
    rows = np.ascontiguousarray(little).view(np.uint8).reshape(len(words), -1)
    return np.unpackbits(rows, axis=1, bitorder="little").astype(bool)
