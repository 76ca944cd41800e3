# SPDX-License-Identifier: Apache-2.0
"""The reference of append_kv_cache against plain loops: where rows go, and what becomes of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumla.reference import append_kv_cache, apply_rope

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PAGES, PAGE_SIZE, HEADS, COLUMNS, VALUE_COLUMNS = 9, 4, 3, 16, 8
TABLE = np.array([[7, 2, -1], [0, 8, 9], [4, 3, 2**31 - 1]], np.int32)


def rows_of(tokens: int, dtype: Any = BF16) -> tuple[Any, Any]:
    rng = np.random.default_rng(tokens)
    return tuple(
        rng.standard_normal((tokens, HEADS, columns)).astype(dtype)
        for columns in (COLUMNS, VALUE_COLUMNS)
    )


def caches_of(dtype: Any = BF16) -> tuple[Any, Any]:
    """Caches of one number that no row has."""
    return tuple(
        np.full((PAGES, PAGE_SIZE, HEADS, columns), 99, dtype)
        for columns in (COLUMNS, VALUE_COLUMNS)
    )


# Five tokens: the request, or None, and the position there, which leads to (page, offset) or None.
REQUESTS = [0, 0, 1, 1, 2]
POSITIONS = [3, 4, 6, 7, 2]
PLACES = [(7, 3), (2, 0), (8, 2), (8, 3), (4, 2)]
WAYS: dict[str, tuple[dict[str, Any], list[tuple[int, int] | None]]] = {
    "slots": (
        {"slot_mapping": np.array([p * PAGE_SIZE + o for p, o in PLACES])},
        [*PLACES],
    ),
    "some slots": (
        {"slot_mapping": np.array([-1, PAGES * PAGE_SIZE, 5, -(2**62), 2**62])},
        [None, None, (1, 1), None, None],
    ),
    "requests": (
        {
            "batch_indices": np.array(REQUESTS),
            "positions": np.array(POSITIONS),
            "block_table": TABLE,
        },
        [*PLACES],
    ),
    "some requests": (
        {
            "batch_indices": np.array([-1, 3, 0, 1, 2]),
            "positions": np.array([0, 0, -1, 8, 12]),  # a page of -1, one of 9, none at all
            "block_table": TABLE,
        },
        [None] * 5,
    ),
    "lengths": (
        {
            "kv_lens": np.array([5, 8, 3], np.int32),
            "qo_indptr": np.array([0, 2, 4, 5], np.int32),
            "block_table": TABLE,
        },
        [*PLACES],
    ),
    "some lengths": (  # the first token has the position -1, the last one no request
        {
            "kv_lens": np.array([1, 8, 0], np.int32),
            "qo_indptr": np.array([0, 2, 4, 4], np.int32),
            "block_table": TABLE,
        },
        [None, (7, 0), (8, 2), (8, 3), None],
    ),
    "a list of pages": (
        {
            "kv_lens": np.array([5, 8, 3], np.int32),
            "qo_indptr": np.array([0, 2, 4, 5], np.int32),
            "kv_indices": np.array([1, 7, 2, 0, 8, 4], np.int32),
            "kv_indptr": np.array([1, 3, 5, 6], np.int32),
        },
        [*PLACES],
    ),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("way", WAYS)
def test_where_rows_go(way: str, layout: str) -> None:
    arguments, places = WAYS[way]
    (k, v), caches = rows_of(5), caches_of()
    expected = [cache.copy() for cache in caches]
    for cache, rows in zip(expected, (k, v), strict=True):
        for row, place in zip(rows, places, strict=True):
            if place is not None:
                cache[place] = row
    given = [np.swapaxes(c, 1, 2) if layout == "HND" else c for c in caches]
    append_kv_cache(k, v, *given, **arguments, kv_layout=layout)
    for cache, other in zip(caches, expected, strict=True):
        assert cache.tobytes() == other.tobytes()


def test_equal_numbers_of_tokens() -> None:
    """Four axes: the last q_len tokens of each request; one block_table column is a contiguous
    cache."""
    k, v = (rows.reshape(3, 2, HEADS, -1) for rows in rows_of(6))
    k_cache, v_cache = caches_of()
    slots = np.array([[5], [0], [2]], np.int32)
    lens = np.array([2, 4, 1], np.int32)
    append_kv_cache(k, v, k_cache, v_cache, kv_lens=lens, block_table=slots)
    for request in range(3):
        for i in range(2):
            position = lens[request] - 2 + i
            if position >= 0:
                assert (k_cache[slots[request, 0], position] == k[request, i]).all()
                assert (v_cache[slots[request, 0], position] == v[request, i]).all()
    assert (k_cache != BF16.type(99)).any(axis=(2, 3)).sum() == 5


def test_no_way_at_all() -> None:
    with pytest.raises(ValueError, match="slot_mapping: needs slots, kv_lens, or batch_indices"):
        append_kv_cache(*rows_of(5), *caches_of())


# --- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_positions", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_on_the_way(interleaved: bool, by_positions: bool) -> None:
    """Keys and queries as apply_rope, values not; rows without angles are skipped, queries kept."""
    (k, v), (k_cache, v_cache) = rows_of(5), caches_of()
    q = np.random.default_rng(9).standard_normal((5, 6, COLUMNS)).astype(BF16)
    angles = np.random.default_rng(8).uniform(0, 6, (7, 8))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    turned_by = np.array([6, 0, 7, -1, 1]) if by_positions else np.array(POSITIONS)  # 7: no angles
    arguments = WAYS["lengths"][0] | ({"positions": turned_by} if by_positions else {})
    turned_q, turned_k = apply_rope(q, k, turned_by, table, interleaved=interleaved)
    out = np.zeros_like(q)
    append_kv_cache(
        k, v, k_cache, v_cache, **arguments, cos_sin=table, interleaved=interleaved, q=q, q_out=out
    )
    np.testing.assert_array_equal(out, turned_q)
    assert turned_k is not None
    for i, place in enumerate(PLACES):
        if 0 <= turned_by[i] < 7:
            np.testing.assert_array_equal(k_cache[place], turned_k[i])
            np.testing.assert_array_equal(v_cache[place], v[i])
        else:
            assert (k_cache[place] == BF16.type(99)).all()
            assert (v_cache[place] == BF16.type(99)).all()


# --- e4m3 -----------------------------------------------------------------------------------------

FINITE = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
    for code in range(0x7F)
]  # values of the codes without a sign, from the format's definition


def nearest(x: float) -> int:
    """The code of a number: the nearest one, of two the even one, and 448 for all that is more."""
    code = min(range(0x7F), key=lambda c: (abs(FINITE[c] - abs(x)), c % 2))
    return code | (0x80 if np.signbit(x) else 0)


@pytest.mark.parametrize("dtype", [E4M3, np.dtype(np.uint8)], ids=str)
def test_all_codes(dtype: Any) -> None:
    """What e4m3 can hold is held; NaN is NaN."""
    codes = np.arange(256, dtype=np.uint8)
    rows = codes.view(E4M3).astype(BF16).reshape(1, 1, 256)
    k_cache, v_cache = np.zeros((2, 1, 1, 1, 256), dtype)
    append_kv_cache(rows, rows, k_cache, v_cache, np.array([0]))
    expected = np.where(codes % 128 == 0x7F, 0x7F, codes)
    assert (k_cache.view(np.uint8).ravel() == expected).all()
    assert (v_cache.view(np.uint8).ravel() == expected).all()


def test_rounding_and_saturation() -> None:
    middles = [(a + b) / 2 for a, b in pairwise(FINITE)]
    values = [*middles, *(m * (1 + s) for m in middles for s in (-1e-3, 1e-3)), 448, 463, 464, 465]
    values += [480, 1000, 65504, np.inf]
    rows = np.array([s * x for x in values for s in (1, -1)], np.float16).reshape(1, 1, -1)
    k_cache, v_cache = np.zeros((2, 1, 1, *rows.shape[1:]), E4M3)
    append_kv_cache(rows, rows, k_cache, v_cache, np.array([0]))
    expected = [nearest(min(float(abs(x)), 448) * np.sign(x)) for x in rows.ravel()]
    assert k_cache.view(np.uint8).ravel().tolist() == expected


@pytest.mark.parametrize("shape", [None, (), (1,), (HEADS,), (3, HEADS)], ids=str)
def test_scales(shape: tuple[int, ...] | None) -> None:
    """One number, one of each head, one of each request and head; keys and values apart."""
    rng = np.random.default_rng(4)
    (k, v), (k_cache, v_cache) = rows_of(5), caches_of(E4M3)
    scales = [2.0 ** rng.integers(-3, 3, shape or ()).astype(float) for _ in range(2)]
    given = [float(s) if shape is None else np.asarray(s, np.float32) for s in scales]
    append_kv_cache(
        k, v, k_cache, v_cache, **WAYS["lengths"][0], k_scale=given[0], v_scale=given[1]
    )
    for rows, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
        factors = np.broadcast_to(scale, (3, HEADS))
        for row, request, place in zip(rows, REQUESTS, PLACES, strict=True):
            for head in range(HEADS):
                expected = [nearest(float(x) / factors[request, head]) for x in row[head]]
                assert cache[(*place, head)].view(np.uint8).tolist() == expected
