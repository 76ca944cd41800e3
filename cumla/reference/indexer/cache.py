# SPDX-License-Identifier: Apache-2.0
"""Writing the indexer's keys into a paged cache, as a definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cumla.reference.rows import (
    Array,
    as_e4m3,
    e2m1_codes,
    e2m1_numbers,
    in_float32,
    quantized,
    rounded_up,
)

_SCALE_BYTES = 4  # per token of a fused cache


def append_indexer_cache(
    k: Array,
    kv_cache: Array | Sequence[Array],
    slot_mapping: Array,
    *,
    power_of_two_scales: bool = False,
    cache_format: str | None = None,
) -> None:
    """Quantise the indexer keys of new tokens, and write them into the pages of a cache.

    Row ``i`` goes to row ``slot % page_size`` of page ``slot // page_size``, ``slot`` being
    ``slot_mapping[i]``, as :func:`quantize_fp8` quantises it. Rows whose slot is negative or after
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
    cache_format : {"mxfp4"}, optional
        Write pages of ``page_size * head_dim / 2`` bytes, numbers ``k / s`` in e2m1, then exponents
        of ``s = 2 ** ceil(log2(max(m, 6 * 2**-126) / 6))``, biased by 127, m being the largest
        magnitude of 32 columns.
    """
    head_dim = k.shape[1] if cache_format is None else k.shape[1] // 2
    values, scales = split_cache(kv_cache, head_dim)
    num_pages, page_size = scales.shape
    slots = slot_mapping.astype(np.int64)
    exists = (slots >= 0) & (slots < num_pages * page_size)
    where = np.divmod(slots[exists], page_size)
    if cache_format is not None:
        values.view(np.uint8)[where], scales[where] = _mxfp4(k[exists])
        return
    bits, scale = quantized(k[exists], power_of_two_scales)
    values.view(np.uint8)[where] = bits
    scales[where] = scale


def _mxfp4(k: Array) -> tuple[Array, Array]:
    """Quantise rows: codes, two a byte, and four exponents as one float32."""
    groups = in_float32(k).reshape(len(k), -1, 32)
    largest = np.fmax.reduce(np.abs(groups), axis=-1, initial=np.float32(0))
    largest = np.clip(largest, np.float32(6 * 2.0**-126), np.finfo(np.float32).max)
    scales = rounded_up(largest / np.float32(6))
    codes = e2m1_codes(groups * (np.float32(1) / scales)[..., None], np.float32(1))
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
    return codes.reshape(len(k), -1), exponents.view(np.float32)[:, 0]


def widened(keys: Array, scales: Array) -> tuple[Array, Array]:
    """Return what such codes and exponents stand for, float64, and NaN for rows with one of 255."""
    exponents = np.ascontiguousarray(scales).view(np.uint8).reshape(*scales.shape, 4)
    factors = np.ldexp(1.0, exponents.astype(np.int32) - 127)
    numbers = e2m1_numbers(keys.view(np.uint8)).astype(np.float64)
    unknown = np.where((exponents == 255).any(axis=-1), np.nan, 1.0)
    return numbers * np.repeat(factors, 32, axis=-1), unknown


def split_cache(kv_cache: Array | Sequence[Array], head_dim: int) -> tuple[Array, Array]:
    """Return the keys and the scales of a paged cache, without copying them.

    They are ``(num_pages, page_size, head_dim)`` float8_e4m3fn and ``(num_pages, page_size)``
    float32.
    """
    if not isinstance(kv_cache, np.ndarray):
        keys, scales = kv_cache
        return as_e4m3(keys[:, :, 0] if keys.ndim == 4 else keys), scales
    num_pages, page_size = kv_cache.shape[:2]
    page_bytes = page_size * (head_dim + _SCALE_BYTES)
    pages = np.lib.stride_tricks.as_strided(
        kv_cache, (num_pages, page_bytes), (kv_cache.strides[0], 1)
    )
    keys, scale_bytes = np.split(pages, [page_size * head_dim], axis=1)
    shape = (num_pages, page_size, head_dim)
    return as_e4m3(keys).reshape(shape), scale_bytes.view(np.float32)
