# SPDX-License-Identifier: Apache-2.0
"""Writing new rows into a paged cache, as a definition."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from cumla.mla.shape import (
    FP4_SCALED_COLUMNS,
    NO_ROPE,
    PACKED_BYTES,
    ROPE_DIM,
    SCALED_COLUMNS,
    SCALES,
    V4_BYTES,
    V4_FP8_DIM,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
    V4_SCALED_COLUMNS,
    V4_SCALES,
    V41,
    V41_FP4,
    V41_SCALED_COLUMNS,
    VALUE_DIM,
    WIDTH,
    WIDTHS,
    WRITTEN,
    width_of,
)
from cumla.reference.rows import (
    E4M3,
    Array,
    as_e4m3,
    e2m1_codes,
    e4m3_bits,
    in_float32,
    page_numbers,
    quantized,
    rotated,
    rounded_up,
)


def append_mla_cache(
    rows: Array | Sequence[Array],
    kv_cache: Array | Sequence[Array],
    slot_mapping: Array | None = None,
    *,
    batch_indices: Array | None = None,
    positions: Array | None = None,
    block_table: Array | None = None,
    kv_indices: Array | None = None,
    kv_indptr: Array | None = None,
    cos_sin: Array | None = None,
    interleaved: bool = True,
    q_pe: Array | None = None,
    q_pe_out: Array | None = None,
    kv_scale: Array | float | None = None,
    cache_format: str | None = None,
) -> None:
    """Write the rows of new tokens into the pages of a cache, and rotate their RoPE columns.

    Row ``i`` goes to row ``slot % page_size`` of page ``slot // page_size``, ``slot`` being
    ``slot_mapping[i]``; or, without slots, ``p`` being ``positions[i]`` and ``r`` the request
    ``batch_indices[i]``, to row ``p % page_size`` of page ``block_table[r, p // page_size]``, or
    ``kv_indices[kv_indptr[r] + p // page_size]``. With ``cos_sin`` the columns x of a pair (see
    `interleaved`) become, c and s being column j and 32 + j of ``cos_sin[positions[i]]`` for pair
    j::

        x0, x1 = c * x0 - s * x1, s * x0 + c * x1

    Rows whose place, or whose row of cos_sin, does not exist are skipped.

    Columns x that are e4m3 in the cache become ``e4m3(x * (1 / kv_scale))``, in float32, with
    subnormal numbers taken for 0; the conversion rounds to nearest even and saturates at 448. Where
    the cache has scales of its own, each 128 latent columns of a row are quantised as rows are by
    :func:`quantize_fp8`, in the packed format with power_of_two_scales. V4.1's formats have all
    columns x of a row quantised, in groups with the largest magnitude m: e4m3 numbers ``x / s`` and
    the exponent of ``s = 2 ** ceil(log2(max(m, 1e-4) / 448))``, biased by 127, per 32 columns; or
    e2m1 numbers ``x / s`` and ``s = e4m3(max(m, 6 / 512) / 6)`` per 16. The first 448 columns of
    V4's slots have such exponents per 64 columns, and a byte of 0 after the seven.

    Parameters
    ----------
    rows, kv_cache, slot_mapping, batch_indices, positions, block_table, kv_indices, kv_indptr, \
cos_sin, interleaved, q_pe, q_pe_out, kv_scale, cache_format
        As in :func:`cumla.append_mla_cache`, of any floating dtype and any strides. q_pe_out is
        q_pe itself by default.

    Raises
    ------
    ValueError
        If it is not clear where the rows go, or shapes disagree.
    """
    follow = None
    if cache_format in (NO_ROPE, V41, V41_FP4):
        assert isinstance(kv_cache, np.ndarray)
        follow = _with_heads(kv_cache.view(np.uint8), 4)
        ckv = k_pe = follow
        scales = None
        latent = VALUE_DIM - (0 if cache_format == NO_ROPE else ROPE_DIM)
    else:
        ckv, k_pe, scales = columns_of(kv_cache)
        latent = ckv.shape[-1]
    ckv_rows, k_pe_rows = (_with_heads(part, 3) for part in _halves(rows, latent))
    num_pages, page_size = ckv.shape[:2]
    if slot_mapping is not None:
        place = slot_mapping.astype(np.int64)
        page = place // page_size
    elif batch_indices is not None and positions is not None:
        place = positions.astype(np.int64)
        page = page_numbers(batch_indices, place // page_size, block_table, kv_indices, kv_indptr)
    else:
        raise ValueError("slot_mapping: needs slots, or batch_indices and positions; pass them")
    exists = (place >= 0) & (page >= 0) & (page < num_pages)

    if cos_sin is not None:
        if positions is None:
            raise ValueError("positions: needed to rotate with cos_sin; pass them")
        known = (positions >= 0) & (positions < len(cos_sin))
        exists &= known
        angles = cos_sin[positions[known]]
        k_pe_rows = k_pe_rows.astype(np.float64)
        k_pe_rows[known] = rotated(k_pe_rows[known], angles, interleaved)
        if q_pe is not None:
            q_pe_out = q_pe if q_pe_out is None else q_pe_out
            q_pe_out[known] = rotated(q_pe[known], angles, interleaved)

    where = page[exists], place[exists] % page_size
    if follow is not None and cache_format is not None:
        whole = [in_float32(part[exists]) for part in (ckv_rows, k_pe_rows)]
        follow[where] = _row_bytes(np.concatenate(whole, axis=-1), cache_format)
        return
    factor = np.float32(1) / np.asarray(1 if kv_scale is None else kv_scale, np.float32).reshape(())
    _write(k_pe, where, k_pe_rows[exists], factor)
    if scales is None:
        _write(ckv, where, ckv_rows[exists], factor)
        return
    new = ckv_rows[exists]
    is_v4 = scales.dtype == np.uint8
    columns = V4_SCALED_COLUMNS if is_v4 else SCALED_COLUMNS
    groups = new.reshape(*new.shape[:2], new.shape[-1] // columns, columns)
    quantize = _power_scaled if is_v4 else quantized
    options = {} if is_v4 else {"power_of_two_scales": isinstance(kv_cache, np.ndarray)}
    bits, found = quantize(groups, **options)
    ckv.view(np.uint8)[where] = bits.reshape(new.shape)
    scales[where] = _exponents(found) if is_v4 else found


def _row_bytes(rows: Array, form: str) -> Array:
    """Quantise rows of 512 float32 columns: columns, then their scales, as bytes."""
    columns = {NO_ROPE: SCALED_COLUMNS, V41: V41_SCALED_COLUMNS, V41_FP4: FP4_SCALED_COLUMNS}[form]
    lead = rows.shape[:-1]
    groups = rows.reshape(*lead, VALUE_DIM // columns, columns)
    if form == NO_ROPE:
        bits, scales = quantized(groups, power_of_two_scales=True)
        return _joined(bits, scales, lead)
    if form == V41:
        bits, scales = _power_scaled(groups)
        return _joined(bits, (scales.view(np.uint32) >> 23).astype(np.uint8), lead)
    largest = _largest(groups)
    scales = np.maximum(largest, np.float32(6 / 512)) / np.float32(6)
    codes = e4m3_bits(scales, np.float32(1))
    factors = codes.view(E4M3).astype(np.float32)
    return _joined(e2m1_codes(groups, factors[..., None]), codes, lead)


def _power_scaled(groups: Array) -> tuple[Array, Array]:
    """Quantise groups as V4 and V4.1 do: bits, and powers of two."""
    scales = rounded_up(np.maximum(_largest(groups), np.float32(1e-4)) / np.float32(448))
    return e4m3_bits(groups, (np.float32(1) / scales)[..., None]), scales


def _largest(groups: Array) -> Array:
    """Tell the largest finite magnitudes of groups."""
    largest: Array = np.fmax.reduce(np.abs(groups), axis=-1, initial=np.float32(0))
    finite: Array = np.minimum(largest, np.finfo(np.float32).max)
    return finite


def _joined(columns: Array, scales: Array, lead: tuple[int, ...]) -> Array:
    parts = [np.ascontiguousarray(x).reshape(*lead, -1).view(np.uint8) for x in (columns, scales)]
    return np.concatenate(parts, axis=-1)


def columns_of(kv_cache: Array | Sequence[Array]) -> tuple[Array, Array, Array | None]:
    """Take a cache apart, without copying: latent columns, RoPE columns, scales if it has any.

    All have a head axis, and bytes of e4m3 numbers are such numbers. The scales of V4's slots are 8
    bytes: seven exponents, biased by 127, and one that is not read.
    """
    if isinstance(kv_cache, np.ndarray):
        is_packed = kv_cache.dtype == np.uint8 and kv_cache.shape[-1] == PACKED_BYTES
        if kv_cache.shape[-1] == V4_BYTES:
            kv_cache = _v4_apart(kv_cache)
        else:
            kv_cache = _unpacked(kv_cache) if is_packed else _halves(kv_cache, _latent_of(kv_cache))
    ckv, k_pe, *scales = (_with_heads(part, 4) for part in kv_cache)
    return as_e4m3(ckv), as_e4m3(k_pe), scales[0] if scales else None


def _latent_of(rows: Array) -> int:
    """Tell the latent columns of rows, by their number of columns."""
    latent, _ = width_of(rows.shape[-1], (*WIDTHS, *WRITTEN)) or WIDTH
    return latent


def _unpacked(cache: Array) -> tuple[Array, Array, Array]:
    """Take rows of 656 bytes apart: views of latent columns as bytes, RoPE columns and scales."""
    ckv, scale_bytes, k_pe = np.split(cache, [VALUE_DIM, VALUE_DIM + 4 * SCALES], axis=-1)
    return ckv, k_pe.view(ml_dtypes.bfloat16), scale_bytes.view(np.float32)


def _v4_apart(cache: Array) -> tuple[Array, Array, Array]:
    """Take pages of V4's slots apart: views of columns as bytes, RoPE columns and exponents."""
    pages, size = cache.shape[:2]
    whole = cache.view(np.uint8).reshape(pages, size * V4_BYTES)
    rows, exponents = np.split(whole, [size * V4_ROW_BYTES], axis=1)
    ckv, k_pe = np.split(rows.reshape(pages, size, -1), [V4_FP8_DIM], axis=-1)
    return ckv, k_pe.view(ml_dtypes.bfloat16), exponents.reshape(pages, size, -1)


def _exponents(scales: Array) -> Array:
    """Give the bytes that V4's slots have for powers of two, ``(rows, 1, 7)``, and a zero."""
    exponents = np.zeros((*scales.shape[:2], V4_SCALE_BYTES), np.uint8)
    exponents[..., :V4_SCALES] = scales.view(np.uint32) >> 23
    return exponents


def _halves(array: Array | Sequence[Array], latent: int) -> Sequence[Array]:
    return array if not isinstance(array, np.ndarray) else np.split(array, [latent], axis=-1)


def _with_heads(array: Array, ndim: int) -> Array:
    """Put in the head axis of one KV head where it is left out."""
    return array[..., None, :] if array.ndim < ndim else array


def _write(
    cache: Array, where: tuple[Array, Array], rows: Array, factor: Array | np.float32
) -> None:
    """Write rows in the cache's dtype; times a factor, if that is e4m3."""
    if cache.dtype == E4M3:
        cache.view(np.uint8)[where] = e4m3_bits(in_float32(rows), factor)
    else:
        cache[where] = rows
