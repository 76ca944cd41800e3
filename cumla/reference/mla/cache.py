# SPDX-License-Identifier: Apache-2.0
"""Writing new rows into a paged cache, as a definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.checks import checked_flag
from cumla.reference.indexer.cache import e4m3_bits, in_float32, quantize_fp8

Array = NDArray[Any]

_ROPE_DIM = HEAD_DIM - VALUE_DIM
SCALED_COLUMNS = 128  # by one scale
SCALES = VALUE_DIM // SCALED_COLUMNS
PACKED_BYTES = VALUE_DIM + 4 * SCALES + 2 * _ROPE_DIM


def append_mla_cache(
    rows: Array | tuple[Array, ...],
    kv_cache: Array | tuple[Array, ...],
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
    scale: Array | float = 1.0,
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

    Columns x that are e4m3 in the cache become ``e4m3(x * (1 / scale))``, in float32, with
    subnormal numbers taken for 0; the conversion rounds to nearest even and saturates at 448. Where
    the cache has scales of its own, each 128 latent columns of a row are quantised as rows are by
    :func:`quantize_fp8`, in the packed format with power_of_two_scales.

    Parameters
    ----------
    rows : ndarray or pair of ndarray
        ``(tokens, num_kv_heads, 576)``, or without the head axis for one KV head; or the same as
        latent and RoPE columns, 512 and 64 wide. Of any floating dtype.
    kv_cache : ndarray, or pair or triple of ndarray
        ``(num_pages, page_size, num_kv_heads, 576)``, the rest as for rows. Written to. Of
        float8_e4m3fn, or uint8 with its bits, both parts of a pair or the first one. A third part
        is float32 scales, ``(num_pages, page_size, num_kv_heads, 4)``. One array of uint8 with 656
        columns is the packed format: 512 e4m3, 4 float32 scales, 64 bfloat16.
    slot_mapping : ndarray of integers, shape (tokens,), optional
        Where each row goes.
    batch_indices, positions : ndarray of integers, shape (tokens,), optional
        Request of each row, and its position there.
    block_table : ndarray of integers, shape (batch, max_pages), optional
        Page numbers of each request.
    kv_indices, kv_indptr : ndarray of integers, shapes (entries,) and (batch + 1,), optional
        The same as a list of page numbers, and where each request begins and ends in it.
    cos_sin : ndarray, shape (max_position, 64), optional
        32 cosines and 32 sines of each position.
    interleaved : bool, default True
        Pair j is columns 2 j and 2 j + 1; otherwise j and j + 32.
    q_pe : ndarray, shape (tokens, num_heads, 64), optional
        Queries to rotate in the same way, whether or not their token's row is skipped.
    q_pe_out : ndarray, shape (tokens, num_heads, 64), optional
        Where to write them; q_pe itself by default. What has no row in cos_sin is left as it is.
    scale : ndarray of one float32, or float
        Of e4m3 columns without scales of their own.

    Raises
    ------
    ValueError
        If shapes disagree, or if it is not clear where the rows go.
    TypeError
        If interleaved is neither True nor False.
    """
    interleaved = checked_flag("interleaved", interleaved)
    latent_rows, rope_rows = (_with_heads(part, 3) for part in _halves("rows", rows))
    power_of_two = isinstance(kv_cache, np.ndarray) and kv_cache.shape[-1] == PACKED_BYTES
    *caches, scales = _parts_of_cache(kv_cache)
    latent_cache, rope_cache = (_with_heads(part, 4) for part in caches)
    per_token = {
        "slot_mapping": slot_mapping,
        "batch_indices": batch_indices,
        "positions": positions,
        "q_pe": q_pe,
    }
    for name, array in per_token.items():
        if array is not None and len(array) != len(latent_rows):
            raise ValueError(
                f"{name}: needs an entry for each of {len(latent_rows)} tokens, got {len(array)}"
            )

    num_pages, page_size = latent_cache.shape[:2]
    if slot_mapping is not None:
        place = slot_mapping.astype(np.int64)
        page = place // page_size
    elif batch_indices is not None and positions is not None:
        place = positions.astype(np.int64)
        page = _pages(batch_indices, place // page_size, block_table, kv_indices, kv_indptr)
    else:
        raise ValueError("slot_mapping: needs slots, or batch_indices and positions; pass them")
    exists = (place >= 0) & (page >= 0) & (page < num_pages)

    if cos_sin is not None:
        if positions is None:
            raise ValueError("positions: needed to rotate with cos_sin; pass them")
        known = (positions >= 0) & (positions < len(cos_sin))
        exists &= known
        rope_rows = rope_rows.astype(np.float64)
        rope_rows[known] = _rotated(rope_rows[known], cos_sin[positions[known]], interleaved)
        if q_pe is not None:
            out = q_pe if q_pe_out is None else q_pe_out
            rotated = _rotated(q_pe[known], cos_sin[positions[known]], interleaved)
            out[known] = rotated.astype(out.dtype)
    where = page[exists], place[exists] % page_size
    inverse = np.float32(1) / np.float32(scale)
    _write(rope_cache, where, rope_rows[exists], inverse)
    if scales is None:
        _write(latent_cache, where, latent_rows[exists], inverse)
        return
    groups = latent_rows[exists].reshape(-1, latent_rows.shape[1], SCALES, SCALED_COLUMNS)
    quantized = quantize_fp8(groups, power_of_two_scales=power_of_two)
    latent_cache.view(np.uint8)[where] = quantized.values.view(np.uint8).reshape(
        *groups.shape[:2], VALUE_DIM
    )
    _with_heads(scales, 4)[where] = quantized.scale


def _write(cache: Array, where: tuple[Array, Array], rows: Array, inverse: np.float32) -> None:
    """Write rows in the cache's type."""
    if cache.dtype.itemsize == 1:
        cache.view(np.uint8)[where] = e4m3_bits(in_float32(rows), inverse)
    else:
        cache[where] = rows.astype(cache.dtype)


def _parts_of_cache(cache: Array | tuple[Array, ...]) -> tuple[Array, Array, Array | None]:
    """Give the latent columns, the RoPE columns and the scales, if there are any."""
    if not isinstance(cache, np.ndarray):
        latent, rope, *scales = cache
        return *_halves("kv_cache", (latent, rope)), scales[0] if scales else None
    if cache.shape[-1] != PACKED_BYTES:
        return *_halves("kv_cache", cache), None
    return unpacked(cache)


def unpacked(cache: Array) -> tuple[Array, Array, Array]:
    """Take rows of 656 bytes apart: views of latent columns as bytes, RoPE columns and scales."""
    latent, scale_bytes, rope = np.split(cache, [VALUE_DIM, VALUE_DIM + 4 * SCALES], axis=-1)
    return latent, rope.view(ml_dtypes.bfloat16), scale_bytes.view(np.float32)


def _halves(name: str, array: Array | tuple[Array, ...]) -> tuple[Array, Array]:
    """Give the latent and the RoPE columns."""
    if isinstance(array, np.ndarray):
        latent, rope = array[..., :VALUE_DIM], array[..., VALUE_DIM:]
    else:
        latent, rope = array
    if (latent.shape[-1], rope.shape[-1]) != (VALUE_DIM, _ROPE_DIM):
        raise ValueError(
            f"{name}: needs {VALUE_DIM} latent and {_ROPE_DIM} RoPE columns, got "
            f"{latent.shape[-1]} and {rope.shape[-1]}"
        )
    return latent, rope


def _with_heads(array: Array, ndim: int) -> Array:
    """Put in the head axis of one KV head where it is left out."""
    return array[..., None, :] if array.ndim < ndim else array


def _pages(
    requests: Array,
    index: Array,
    block_table: Array | None,
    kv_indices: Array | None,
    kv_indptr: Array | None,
) -> Array:
    """Look up page number `index` of each token's request; -1 if there is none."""
    if block_table is not None:
        batch, count = block_table.shape
        numbers = block_table.ravel()
        begin = np.arange(batch, dtype=np.int64) * count
        end = begin + count
    elif kv_indices is not None and kv_indptr is not None:
        batch, numbers = len(kv_indptr) - 1, kv_indices
        begin, end = kv_indptr[:-1].astype(np.int64), np.minimum(kv_indptr[1:], len(kv_indices))
    else:
        raise ValueError("block_table: needs a table, or kv_indices and kv_indptr; pass them")
    pages = np.full(len(requests), -1, np.int64)
    known = np.flatnonzero((requests >= 0) & (requests < batch) & (index >= 0))
    first, last = begin[requests[known]], end[requests[known]]
    inside = (first >= 0) & (index[known] < last - first)
    pages[known[inside]] = numbers[(first + index[known])[inside]]
    return pages


def _rotated(x: Array, cos_sin: Array, interleaved: bool) -> Array:
    """Rotate x (tokens, heads, 64) by the angles of cos_sin (tokens, 64), in float64."""
    pairs = x.astype(np.float64)
    in_two = (*x.shape[:-1], _ROPE_DIM // 2, 2)
    pairs = pairs.reshape(in_two) if interleaved else _split_in_half(pairs)
    cos, sin = np.split(cos_sin.astype(np.float64)[:, None, :], 2, axis=-1)
    x0, x1 = pairs[..., 0], pairs[..., 1]
    rotated = np.stack([cos * x0 - sin * x1, sin * x0 + cos * x1], axis=-1)
    if interleaved:
        return rotated.reshape(x.shape)
    return np.concatenate([rotated[..., 0], rotated[..., 1]], axis=-1)


def _split_in_half(x: Array) -> Array:
    return np.stack(np.split(x, 2, axis=-1), axis=-1)
