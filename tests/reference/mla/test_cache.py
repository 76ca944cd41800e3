# SPDX-License-Identifier: Apache-2.0
"""The reference of the cache writer against plain loops, and rotations against complex numbers."""

from __future__ import annotations

import cmath
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import append_mla_cache, mla_decode

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)
THETA = 10000.0


def poisoned(shape: tuple[int, ...], dtype: Any = BF16) -> Array:
    """An array in which every element is the same NaN, so that what is written shows."""
    return np.full(shape, 0x7FC1 if dtype == BF16 else 0x7E01, np.uint16).view(dtype)


def random(shape: tuple[int, ...], dtype: Any = BF16, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint16)


def table_of(max_position: int, dtype: Any = np.float32) -> Array:
    """Cosines and sines of 32 frequencies."""
    angles = np.arange(max_position)[:, None] * THETA ** (-np.arange(32) / 32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(dtype)


def rotated_by_complex_numbers(x: Array, position: int, interleaved: bool) -> list[float]:
    """Turn 64 numbers, as 32 points of the plane, by the angles of a position."""
    result = [0.0] * 64
    for j in range(32):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + 32)
        angle = position * THETA ** (-j / 32)
        point = complex(float(x[first]), float(x[second])) * cmath.exp(1j * angle)
        result[first], result[second] = point.real, point.imag
    return result


def by_plain_loops(cache: Array, rows: Array, places: list[tuple[int, int] | None]) -> Array:
    """The cache with one row after the other put into its place: (page, offset), or nowhere."""
    result = cache.copy()
    for row, place in zip(rows, places, strict=True):
        if place is not None:
            for column in range(576):
                result[place][..., column] = row[..., column]
    return result


# ------------------------------------------------------------------ places


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_slots(page_size: int, index: Any, dtype: Any) -> None:
    """Rows in any order; slots below 0 and behind the cache write nothing."""
    pages, tokens = 130 // page_size, 40
    end = pages * page_size
    slots = np.random.default_rng(1).permutation(end)[:tokens]
    slots[[3, 7, 11, 39]] = [-1, end, np.iinfo(np.int32).max, np.iinfo(np.int32).min]
    cache = poisoned((pages, page_size, 576), dtype)
    rows = random((tokens, 576), dtype)
    places = [divmod(s, page_size) if 0 <= s < end else None for s in slots.tolist()]
    expected = by_plain_loops(cache, rows, places)
    assert append_mla_cache(rows, cache, slots.astype(index)) is None
    np.testing.assert_array_equal(bits(cache), bits(expected))


def test_slots_beyond_32_bits() -> None:
    cache, rows = poisoned((4, 16, 576)), random((2, 576))
    append_mla_cache(rows, cache, np.array([2**32 + 5, 5 - 2**32]))
    np.testing.assert_array_equal(bits(cache), bits(poisoned((4, 16, 576))))


@pytest.mark.parametrize("form", ["table", "list"])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_requests_and_positions(page_size: int, form: str) -> None:
    pages_of = [[5, 2, 9], [], [0], [7, 7480000, -3]]  # two page numbers that do not exist
    tokens = [
        (request, position)
        for request in (-1, 0, 1, 2, 3, 4)
        for position in (-1, 0, page_size - 1, page_size, 3 * page_size - 1, 3 * page_size)
    ]
    tokens = list(dict.fromkeys(tokens))
    places: list[tuple[int, int] | None] = []
    for request, position in tokens:
        known = 0 <= request < 4 and 0 <= position < len(pages_of[request]) * page_size
        page = pages_of[request][position // page_size] if known else -1
        places.append((page, position % page_size) if 0 <= page < 10 else None)
    assert len({place for place in places if place}) > 4
    cache, rows = poisoned((10, page_size, 576)), random((len(tokens), 576))
    expected = by_plain_loops(cache, rows, places)
    if form == "table":
        table = np.full((4, 3), -1, np.int32)
        for row, numbers in zip(table, pages_of, strict=True):
            row[: len(numbers)] = numbers
        pages = {"block_table": table}
    else:
        pages = {
            "kv_indices": np.array(list(itertools.chain(*pages_of)), np.int32),
            "kv_indptr": np.array([0, 3, 3, 4, 7], np.int32),
        }
    requests, positions = np.array(tokens, np.int32).T
    append_mla_cache(rows, cache, batch_indices=requests, positions=positions, **pages)
    np.testing.assert_array_equal(bits(cache), bits(expected))


@pytest.mark.parametrize("bounds", [[0, 9], [-2, 2], [2, 1], [2**31 - 1, 2**31 - 1]])
def test_lists_that_are_garbage(bounds: list[int]) -> None:
    """Nothing outside of kv_indices is read, and nothing before it."""
    cache, rows = poisoned((4, 1, 576)), random((4, 576))
    append_mla_cache(
        rows,
        cache,
        batch_indices=np.zeros(4, np.int32),
        positions=np.arange(4),
        kv_indices=np.array([3, 1], np.int32),
        kv_indptr=np.array(bounds, np.int32),
    )
    places = [(3, 0), (1, 0), None, None] if bounds == [0, 9] else [None] * 4
    expected = by_plain_loops(poisoned((4, 1, 576)), rows, places)  # type: ignore[arg-type]
    np.testing.assert_array_equal(bits(cache), bits(expected))


# ------------------------------------------------------------------ forms of rows and cache


@pytest.mark.parametrize("rows_form", ["one", "pair", "float32"])
@pytest.mark.parametrize("cache_form", ["one", "pair", "strided"])
def test_one_array_or_two(cache_form: str, rows_form: str) -> None:
    """Two kv heads; what lies beside the cache in a wider array stays as it was."""
    base = poisoned((5, 4, 3, 600) if cache_form == "strided" else (5, 4, 2, 576))
    cache: Any = base[:, :, :2, :576] if cache_form == "strided" else base
    rows = random((3, 2, 576), np.float32 if rows_form == "float32" else BF16)
    expected = base.copy()
    for row, (page, offset) in zip(rows, [(0, 2), (4, 3), (2, 0)], strict=True):
        expected[page, offset, :2, :576] = row.astype(BF16)
    if cache_form == "pair":
        cache = (base[..., :512].copy(), base[..., 512:].copy())
    given = (rows[..., :512], rows[..., 512:]) if rows_form == "pair" else rows
    append_mla_cache(given, cache, np.array([2, 19, 8]))
    if cache_form == "pair":
        base = np.concatenate(cache, axis=-1)
    np.testing.assert_array_equal(bits(base), bits(expected))


def test_float32_is_rounded() -> None:
    rows = np.full((1, 576), 1 + 3 / 512, np.float32)  # halfway between two, the upper one even
    cache = poisoned((1, 1, 576))
    append_mla_cache(rows, cache, np.zeros(1, np.int32))
    assert (cache.astype(np.float32) == 1 + 1 / 128).all()


# ------------------------------------------------------------------ rotation


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation(interleaved: bool) -> None:
    """RoPE columns are turned, latent ones are not; float64 tables, so that no rounding hides."""
    rows, q_pe = random((6, 2, 576), np.float64), random((6, 3, 64), np.float64, seed=1)
    cache = np.full((6, 1, 2, 576), np.nan)
    before = q_pe.copy()
    positions = np.array([0, 1, 7, 99, 4000, 63])
    append_mla_cache(
        rows,
        cache,
        np.arange(6),
        positions=positions,
        cos_sin=table_of(4001, np.float64),
        interleaved=interleaved,
        q_pe=q_pe,
    )
    np.testing.assert_array_equal(cache[:, 0, :, :512], rows[..., :512])
    np.testing.assert_array_equal(cache[0, 0], rows[0])  # position 0 turns nothing
    for i, position in enumerate(positions.tolist()):
        for head in range(2):
            turned = rotated_by_complex_numbers(rows[i, head, 512:], position, interleaved)
            np.testing.assert_allclose(cache[i, 0, head, 512:], turned, rtol=0, atol=1e-12)
        for head in range(3):
            turned = rotated_by_complex_numbers(before[i, head], position, interleaved)
            np.testing.assert_allclose(q_pe[i, head], turned, rtol=0, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    """What rotations are for, with all three: rows, queries and one table for both."""
    key, query = random((64,), np.float64), random((64,), np.float64, seed=1)
    rows = np.concatenate([np.zeros((3, 512)), np.tile(key, (3, 1))], axis=1)
    cache = np.zeros((3, 1, 576))
    q_pe, out = np.tile(query, (3, 1, 1)), np.zeros((3, 1, 64))
    common: dict[str, Any] = {"cos_sin": table_of(200, np.float64), "interleaved": interleaved}
    append_mla_cache(rows, cache, np.arange(3), positions=np.array([0, 31, 150]), **common)
    append_mla_cache(
        rows,
        np.zeros((3, 1, 576)),
        np.arange(3),
        positions=np.array([9, 40, 159]),
        q_pe=q_pe,
        q_pe_out=out,
        **common,
    )
    scores = (cache[:, 0, 512:] * out[:, 0]).sum(axis=1)
    np.testing.assert_allclose(scores, scores[0], rtol=1e-12)
    assert abs(scores[0] - key @ query) > 0.1
    np.testing.assert_array_equal(q_pe, np.tile(query, (3, 1, 1)))


def test_positions_without_a_row_in_the_table() -> None:
    """Their rows are skipped, their queries left alone; queries of skipped slots are turned."""
    rows, q_pe = random((4, 576)), random((4, 2, 64), seed=1)
    cache, before = poisoned((4, 1, 576)), q_pe.copy()
    append_mla_cache(
        rows,
        cache,
        np.array([0, 1, 2, -1]),
        positions=np.array([10, -1, 9, 9]),
        cos_sin=table_of(10),
        q_pe=q_pe,
    )
    written = ~(bits(cache) == bits(poisoned((4, 1, 576)))).all(axis=(1, 2))
    assert written.tolist() == [False, False, True, False]
    turned = (bits(q_pe) != bits(before)).any(axis=(1, 2))
    assert turned.tolist() == [False, False, True, True]


def test_an_empty_table_and_no_tokens() -> None:
    rows, cache = random((2, 576)), poisoned((2, 1, 576))
    append_mla_cache(rows, cache, np.arange(2), positions=np.arange(2), cos_sin=table_of(0))
    append_mla_cache(rows[:0], cache, np.arange(0))
    np.testing.assert_array_equal(bits(cache), bits(poisoned((2, 1, 576))))


# ------------------------------------------------------------------ with attention


def test_attention_sees_the_rows() -> None:
    """Rows that are written page by page give the attention of a cache that was always full."""
    page_size, length = 16, 40
    table = np.array([[3, 1, 4]], np.int32)
    rows = random((length, 576))
    cache = poisoned((6, page_size, 576))
    for begin, end in ((0, 33), (33, 34), (34, 40)):
        positions = np.arange(begin, end)
        append_mla_cache(
            rows[begin:end],
            cache,
            batch_indices=np.zeros(end - begin, np.int32),
            positions=positions,
            block_table=table,
        )
    full = np.zeros((3, page_size, 576), BF16)
    full.reshape(-1, 576)[:length] = rows
    q = random((1, 1, 4, 576), seed=1)
    lengths = np.array([length], np.int32)
    got = mla_decode(q, cache, table, lengths)
    expected = mla_decode(q, full, np.arange(3, dtype=np.int32)[None], lengths)
    np.testing.assert_array_equal(bits(got.out), bits(expected.out))
