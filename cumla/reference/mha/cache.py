# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values into a cache, as a definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.reference.mha.rope import table_of, turned_rows
from cumla.reference.rows import E4M3, as_e4m3, e4m3_bits, in_float32, page_numbers

Array = NDArray[Any]


def append_kv_cache(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array | None = None,
    *,
    batch_indices: Array | None = None,
    positions: Array | None = None,
    qo_indptr: Array | None = None,
    kv_lens: Array | None = None,
    block_table: Array | None = None,
    kv_indices: Array | None = None,
    kv_indptr: Array | None = None,
    cos_sin: Array | Sequence[Array] | None = None,
    interleaved: bool = False,
    rotary_offset: int = 0,
    q: Array | None = None,
    q_out: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into the pages of a cache, keys rotated on the way.

    Token i belongs to request r and has the position p there: ``batch_indices[i]`` and
    ``positions[i]``; or, with `kv_lens`, it is one of the last tokens of a request, whose new
    tokens are ``qo_indptr[r]`` up to ``qo_indptr[r + 1]``, or q_len each if k has four axes. So
    ``p = kv_lens[r] - (qo_indptr[r + 1] - i)``; `positions` then count for the rotation alone. Its
    rows go to row ``p % page_size`` of page ``block_table[r, p // page_size]``, or
    ``kv_indices[kv_indptr[r] + p // page_size]``; with `slot_mapping` to row ``slot % page_size``
    of page ``slot // page_size``. Rows whose place, or whose row of cos_sin, does not exist are
    skipped. Queries are rotated as :func:`apply_rope` does, whether or not their token is skipped.

    Numbers x that are e4m3 in the cache become ``e4m3(x * (1 / scale))``, in float32, with
    subnormal numbers taken for 0; the conversion rounds to nearest even and saturates at 448.

    Parameters
    ----------
    k, v : ndarray, shape (tokens, num_kv_heads, columns) or (batch, q_len, num_kv_heads, columns)
        Of any floating dtype; k and v may differ in columns.
    k_cache, v_cache : ndarray, shape (num_pages, page_size, num_kv_heads, columns)
        Written to. Of any floating dtype, or uint8 with the bits of float8_e4m3fn.
    slot_mapping, batch_indices, positions, qo_indptr, kv_lens, block_table : optional
        As in :func:`cumla.append_kv_cache`, of any integers.
    kv_indices, kv_indptr, cos_sin, interleaved, rotary_offset, q, q_out, k_scale, v_scale, \
kv_layout : optional
        As there.

    Raises
    ------
    ValueError
        If it is not clear where the rows go.
    """
    if kv_layout == "HND":
        k_cache, v_cache = np.swapaxes(k_cache, 1, 2), np.swapaxes(v_cache, 1, 2)
    q_len = k.shape[1] if k.ndim == 4 else 0
    k, v = _flat(k), _flat(v)
    tokens = np.arange(len(k))
    requests, place = np.full(len(k), -1), np.full(len(k), -1)
    if kv_lens is not None:
        requests, place = last_tokens(tokens, q_len, qo_indptr, kv_lens)
    elif batch_indices is not None and positions is not None:
        requests, place = batch_indices.astype(np.int64), positions.astype(np.int64)
    turned_by = place if positions is None else positions.astype(np.int64)
    num_pages, page_size = k_cache.shape[:2]
    if slot_mapping is not None:
        place = slot_mapping.astype(np.int64)
        page = place // page_size
    elif kv_lens is None and batch_indices is None:
        raise ValueError(
            "slot_mapping: needs slots, kv_lens, or batch_indices and positions; pass one form"
        )
    else:
        page = page_numbers(requests, place // page_size, block_table, kv_indices, kv_indptr)
    exists = (place >= 0) & (page >= 0) & (page < num_pages)
    if cos_sin is not None:
        exists &= (turned_by >= 0) & (turned_by < len(table_of(cos_sin)))
        k = turned_rows(k, turned_by, cos_sin, interleaved, rotary_offset)
        if q is not None:
            turned = turned_rows(_flat(q), turned_by, cos_sin, interleaved, rotary_offset)
            (q if q_out is None else q_out)[...] = turned.reshape(q.shape).astype(q.dtype)

    where = page[exists], place[exists] % page_size
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        numbers = as_e4m3(cache)
        if numbers.dtype != E4M3:
            cache[where] = rows[exists].astype(cache.dtype)
            continue
        factor = np.float32(1) / _scales_of(scale, requests[exists], cache.shape[2])
        cache.view(np.uint8)[where] = e4m3_bits(in_float32(rows[exists]), factor)


def _flat(rows: Array) -> Array:
    """Put the tokens of all requests on one axis."""
    return rows.reshape(-1, *rows.shape[-2:])


def last_tokens(
    tokens: Array, q_len: int, qo_indptr: Array | None, kv_lens: Array
) -> tuple[Array, Array]:
    """Tell the request of each token and its position there; -1 if it has none."""
    if qo_indptr is None:
        requests = tokens // max(q_len, 1)
        end = (requests + 1) * q_len
    else:
        requests, end = np.full(len(tokens), -1), np.zeros(len(tokens), np.int64)
        bounds = qo_indptr.astype(np.int64)
        for request, (first, last) in enumerate(pairwise(bounds)):
            of = (first <= tokens) & (tokens < last)
            requests[of], end[of] = request, last
    known = requests >= 0
    place = np.full(len(tokens), -1)
    place[known] = kv_lens[requests[known]].astype(np.int64) - (end - tokens)[known]
    return requests, place


def _scales_of(scale: Array | float | None, requests: Array, heads: int) -> Array:
    """Give the factor of each row, shape (tokens, heads, 1)."""
    factors = np.asarray(1 if scale is None else scale, np.float32)
    of_rows = factors[requests] if factors.ndim == 2 else factors
    return np.broadcast_to(of_rows, (len(requests), heads))[..., None]
