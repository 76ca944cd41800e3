# SPDX-License-Identifier: Apache-2.0
"""Rows of formats that have to be named: bytes, rounding, and what is refused, on the CPU.

The bytes are made here as the engines make them: FlashMLA's quantisation for its tests, restated.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import refused

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NBYTES = {"v32_no_rope": 528, "v41": 528, "v41_fp4": 288}
SLOTS = {"v41": 528, "v41_fp4": 288}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
named = pytest.mark.parametrize("form", NBYTES)


def packed(rows: np.ndarray, form: str) -> np.ndarray:
    """Rows (n, 512) of float32 as bytes."""
    with np.errstate(divide="ignore"):
        if form == "v41_fp4":
            groups = rows.reshape(len(rows), 32, 16)
            amax = np.maximum(np.abs(groups).max(axis=-1), np.float32(6 * 2.0**-9))
            scales = np.minimum(amax / np.float32(6), 448).astype(E4M3)
            quotients = np.abs(groups) / scales.astype(np.float32)[..., None]
            distance = np.abs(quotients[..., None] - E2M1)  # of two as near, the even code
            nearest = distance + 1e-9 * (np.arange(8) % 2)
            codes = nearest.argmin(axis=-1) | np.signbit(groups).astype(int) << 3
            flat = codes.reshape(len(rows), 512).astype(np.uint8)
            return np.concatenate([flat[:, ::2] | flat[:, 1::2] << 4, scales.view(np.uint8)], 1)
        size = 32 if form == "v41" else 128
        groups = rows.reshape(len(rows), -1, size)
        amax = np.abs(groups).max(axis=-1)
        if form == "v41":
            exponents = np.ceil(np.log2(np.maximum(amax, 1e-4).astype(np.float64) / 448))
        else:
            exponents = np.ceil(np.log2(np.maximum(amax.astype(np.float64) / 448, 1e-4)))
    scales = np.exp2(exponents).astype(np.float32)
    codes = (groups / scales[..., None]).astype(E4M3).reshape(len(rows), 512).view(np.uint8)
    tail = (exponents + 127).astype(np.uint8) if form == "v41" else scales.view(np.uint8)
    return np.concatenate([codes, tail], axis=1)


def unpacked(rows: np.ndarray, form: str) -> np.ndarray:
    """The numbers that rows (n, bytes) stand for, float64."""
    if form == "v41_fp4":
        codes = np.stack([rows[:, :256] & 15, rows[:, :256] >> 4], axis=-1).reshape(len(rows), -1)
        scales = rows[:, 256:].view(E4M3).astype(np.float64)
        return np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.repeat(scales, 16, axis=1)
    numbers = np.ascontiguousarray(rows[:, :512]).view(E4M3).astype(np.float64)
    tail = np.ascontiguousarray(rows[:, 512:])
    scales = np.exp2(tail.astype(np.float64) - 127) if form == "v41" else tail.view(np.float32)
    return numbers * np.repeat(scales, 512 // scales.shape[1], axis=1)


def some_rows(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 512), dtype=np.float32)
    x *= np.exp2(rng.integers(-22, 9, (count, 32))).repeat(16, axis=1)
    x[::5, 16:48] = 0
    x[1::5, ::7] = -0.0
    return x.astype(BF16)


def query(heads: int = 3, tokens: int = 2, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, tokens, heads, 512)).astype(BF16)


def cache_of(rows: np.ndarray, form: str) -> np.ndarray:
    return packed(rows.astype(np.float32), form).reshape(-1, 4, 1, NBYTES[form])


# --- bytes ----------------------------------------------------------------------------------------


@named
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_what_is_written_is_what_engines_write(form: str, dtype: Any) -> None:
    rows = some_rows(64).astype(dtype)
    kv_cache = np.full((16, 4, NBYTES[form]), 0xAA, np.uint8)
    slots = np.random.default_rng(0).permutation(64)
    cumla.append_mla_cache(rows, kv_cache, slots, cache_format=form)
    got = kv_cache.reshape(64, -1)[slots]
    np.testing.assert_array_equal(got, packed(rows.astype(np.float32), form))


@pytest.mark.parametrize("form", SLOTS)
def test_rope_columns_are_rotated_before_they_are_scaled(form: str) -> None:
    rows = some_rows(8)
    turns = np.zeros((8, 64), np.float32)
    turns[:, 32:] = 1  # by a quarter: a pair (x, y) becomes (-y, x)
    kv_cache = np.zeros((2, 4, NBYTES[form]), np.uint8)
    places = {"positions": np.arange(8), "cos_sin": turns, "cache_format": form}
    cumla.append_mla_cache((rows[:, :448], rows[:, 448:]), kv_cache, np.arange(8), **places)
    turned = rows.astype(np.float32)
    pairs = turned[:, 448:].reshape(8, 32, 2)
    turned[:, 448:] = np.stack([0 - pairs[..., 1], pairs[..., 0] + 0], axis=-1).reshape(8, 64)
    wanted = unpacked(packed(turned, form), form)
    np.testing.assert_array_equal(unpacked(kv_cache.reshape(8, -1), form), wanted)


@named
def test_lists_that_name_no_row(form: str) -> None:
    kv_cache, indices = cache_of(some_rows(4), form), np.full((1, 2, 3), -1, np.int32)
    state = cumla.mla_sparse_decode(query(), kv_cache, indices, cache_format=form)
    assert not state.out.any()
    assert np.isneginf(state.lse).all()


@named
def test_numbers_that_are_not_finite(form: str) -> None:
    rows = np.zeros((3, 512), np.float32)
    rows[0, 3], rows[1, 5], rows[2, 7] = np.nan, np.inf, -np.inf
    rows[:, 9] = 2
    kv_cache = np.zeros((3, 1, NBYTES[form]), np.uint8)
    cumla.append_mla_cache(rows, kv_cache, np.arange(3), cache_format=form)
    got = unpacked(kv_cache.reshape(3, -1), form)
    assert np.isfinite(np.delete(got, 3, axis=1)).all()
    assert np.isnan(got[0, 3]) == (form != "v41_fp4")  # e2m1 has no NaN
    assert got[1, 5] > 0 > got[2, 7]


def test_every_code_and_every_scale() -> None:
    """Of one row each; query rows are unit vectors."""
    q = np.eye(512, dtype=np.float32)[None, None].astype(BF16)
    codes = np.resize(np.arange(256), 512).astype(np.uint8)
    codes[codes % 128 == 127] = 0
    for exponent in (0, 1, 60, 127, 200):
        row = np.concatenate([codes, np.full(16, exponent, np.uint8)])
        check_row(q, row, "v41")
    nibbles = np.resize(np.arange(256), 256).astype(np.uint8)
    for first in range(0, 256, 32):
        scales = np.arange(first, first + 32).astype(np.uint8)
        scales[scales % 128 == 127] = 1
        check_row(q, np.concatenate([nibbles, scales]), "v41_fp4")
    for byte, form in ((512, "v41"), (256 + 31, "v41_fp4")):
        row = np.zeros(NBYTES[form], np.uint8)
        row[byte] = 0xFF if form == "v41" else 0x7F
        indices = np.zeros((1, 1, 1), np.int32)
        state = cumla.mla_sparse_decode(
            q, row.reshape(1, 1, 1, -1), indices, softmax_scale=1e-9, cache_format=form
        )
        assert np.isnan(state.out.astype(np.float32)).any()


def check_row(q: np.ndarray, row: np.ndarray, form: str) -> None:
    out = np.empty((1, 1, 512, 512), np.float32)
    state = cumla.mla_sparse_decode(
        q, row.reshape(1, 1, 1, -1), np.zeros((1, 1, 1), np.int32), cache_format=form, out=out
    )
    wanted = unpacked(row[None], form)[0]
    np.testing.assert_array_equal(state.out[0, 0, 5], wanted.astype(np.float32))
    np.testing.assert_allclose(state.lse[0, 0], wanted * 512**-0.5, rtol=1e-6, atol=1e-38)


# --- attention ------------------------------------------------------------------------------------


@named
@pytest.mark.parametrize("paged", [True, False])
def test_attention_to_what_rows_stand_for(form: str, paged: bool) -> None:
    rows, q = some_rows(32), query()
    kv_cache = cache_of(rows, form)
    given = kv_cache if paged else kv_cache.reshape(32, -1)
    numbers = unpacked(kv_cache.reshape(32, -1), form)
    indices = np.random.default_rng(2).integers(-3, 34, (1, 2, 20)).astype(np.int32)
    options: dict[str, Any] = {"topk_lens": np.array([[20, 7]], np.int32), "softmax_scale": 1e-3}
    options["sinks"] = np.array([0.5, -1, -np.inf], np.float32)
    got = cumla.mla_sparse_decode(q, given, indices, cache_format=form, **options)
    want = cumla.reference.mla_sparse_decode(q, numbers.reshape(-1, 4, 1, 512), indices, **options)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


@pytest.mark.parametrize("second", [None, *SLOTS])
@pytest.mark.parametrize("first", SLOTS)
def test_two_caches_in_one_softmax(first: str, second: str | None) -> None:
    own, extra = cache_of(some_rows(32), first), cache_of(some_rows(16, 3), second or first)
    q, rng = query(), np.random.default_rng(2)
    lists = {
        "indices": rng.integers(-1, 32, (1, 2, 9)).astype(np.int32),
        "extra_indices": rng.integers(-1, 16, (1, 2, 5)).astype(np.int32),
    }
    formats = {"cache_format": first, "extra_cache_format": second}
    given = {"q": q, "kv_cache": own, "extra_kv_cache": extra, **lists}
    got = cumla.mla_sparse_decode(**given, **formats)
    numbers = [
        unpacked(cache.reshape(-1, cache.shape[-1]), form)
        for cache, form in ((own, first), (extra, second or first))
    ]
    joined = lists["extra_indices"] + np.where(lists["extra_indices"] >= 0, 32, 0)
    both = np.concatenate([lists["indices"], joined], axis=-1).astype(np.int32)
    want = cumla.reference.mla_sparse_decode(q, np.concatenate(numbers), both)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    plan = cumla.MLASparsePlan.from_arrays(**given, **formats)
    plan.update()
    planned = plan.run(**given)
    np.testing.assert_array_equal(planned.out, got.out)


def test_e4m3_rows_of_512_columns_under_a_factor() -> None:
    rows = np.clip(some_rows(8).astype(np.float32), -448, 448).astype(E4M3)
    q, indices = query(), np.array([[[0, 7, -1], [3, 3, 1]]], np.int32)
    want = cumla.reference.mla_sparse_decode(
        q, (rows.astype(np.float64) * 0.25).reshape(2, 4, 1, 512), indices
    )
    for given in (rows, rows.view(np.uint8)):
        for factor in (0.25, np.array([0.25], np.float32)):
            got = cumla.mla_sparse_decode(q, given.reshape(2, 4, 1, 512), indices, kv_scale=factor)
            np.testing.assert_array_equal(got.out, want.out)


@named
def test_a_whole_step(form: str) -> None:
    rng = np.random.default_rng(4)
    kv_cache = cache_of(some_rows(64), form)
    index_q = cumla.quantize_fp8(rng.standard_normal((2, 1, 8, 128), dtype=np.float32)).values
    index_cache = np.zeros((4, 16, 132), np.uint8)
    keys = rng.standard_normal((64, 128), dtype=np.float32)
    cumla.append_indexer_cache(keys, index_cache, np.arange(64))
    kv_cache = kv_cache.reshape(4, 16, 1, -1)
    table = {"block_table": np.array([[0, 2], [3, 1]], np.int32)}
    q, weights = query(4)[0][:, None], np.ones((2, 8), np.float32)
    plan = cumla.DSAPlan.from_arrays(
        q, kv_cache, index_q, index_cache, topk=8, cache_format=form, **table
    )
    plan.update(np.array([32, 5], np.int32))
    indices = plan.select(index_q, index_cache, weights, **table)
    got = plan.run(q, kv_cache, **table)
    want = cumla.mla_sparse_decode(q, kv_cache, indices, cache_format=form, **table)
    np.testing.assert_array_equal(got.out, want.out)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [528, 288])
def test_no_width_is_taken_for_one_of_two_formats(nbytes: int) -> None:
    kv_cache, indices = np.zeros((2, 4, 1, nbytes), np.uint8), np.zeros((1, 2, 1), np.int32)
    names = "'v32_no_rope' or 'v41'" if nbytes == 528 else "'v41_fp4'"
    message = f"cache_format: needed to tell the format of kv_cache, whose rows have {nbytes} bytes"
    with refused(ValueError, f"{message}, got None; pass {names}"):
        cumla.mla_sparse_decode(query(), kv_cache, indices)
    with refused(ValueError, f"{message}, got None; pass {names}"):
        cumla.append_mla_cache(some_rows(1), kv_cache, np.zeros(1, int))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_format": "v42"}, ValueError, "cache_format: needs one of 'v32', ... got 'v42'"),
        (
            {"cache_format": "v41_fp4"},
            ValueError,
            "kv_cache: needs rows of 288 bytes, ... 'v41_fp4",
        ),
        ({"cache_format": "v4"}, ValueError, "kv_cache: needs rows of 584 bytes"),
        ({"q": query()[..., :64]}, ValueError, "q: needs one array of 512 columns"),
        ({"q": query().astype(np.float16)}, TypeError, "q: needs bfloat16 with kv_cache of 528"),
        ({"kv_scale": 2.0}, ValueError, "kv_scale: needs a cache with e4m3 columns"),
        (
            {"extra_cache_format": "v41"},
            ValueError,
            "extra_cache_format: needs an extra_kv_cache, got None",
        ),
        (
            {"kv_cache": np.zeros((2, 4, 1, 544), np.uint8)[..., 8:536]},
            ValueError,
            "kv_cache: needs an address that is a multiple of 16",
        ),
        ({"kv_cache": np.zeros((2, 4, 2, 528), np.uint8)}, ValueError, "kv_cache: needs one kv"),
        (
            {"cache_format": "v32_no_rope", "extra_kv_cache": True},
            ValueError,
            "extra_kv_cache: needs a kv_cache in one of the formats 'v4', 'v41', 'v41_fp4'",
        ),
        (
            {"extra_kv_cache": True, "extra_cache_format": "v4"},
            ValueError,
            "extra_cache_format: needs 'v41' or 'v41_fp4' beside cache_format 'v41', got 'v4'",
        ),
        (
            {"extra_kv_cache": True, "extra_cache_format": "v41_fp4"},
            ValueError,
            "extra_kv_cache: needs slots of 288 bytes, those of 'v41_fp4'",
        ),
    ],
)
def test_what_attention_refuses(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    kv_cache, indices = np.zeros((2, 4, 1, 528), np.uint8), np.zeros((1, 2, 1), np.int32)
    given: dict[str, Any] = {"q": query(), "kv_cache": kv_cache, "indices": indices}
    given |= {"cache_format": "v41", **change}
    if "extra_kv_cache" in given:
        given |= {"extra_kv_cache": kv_cache, "extra_indices": indices}
    with refused(error, message):
        cumla.mla_sparse_decode(**given)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"rows": (some_rows(1)[:, :448], some_rows(1)[:, 448:])},
            ValueError,
            "rows: needs one array of 512 columns with cache_format 'v32_no_rope', got a pair",
        ),
        ({"rows": some_rows(1)[:, :448]}, ValueError, "rows: needs a last axis of 512"),
        (
            {"positions": np.zeros(1, int), "cos_sin": np.zeros((1, 64), np.float32)},
            ValueError,
            "cos_sin: needs a cache with RoPE columns",
        ),
        ({"rows": some_rows(1).astype(np.float16)}, TypeError, "rows: needs kv_cache's dtype bf"),
        ({"kv_scale": 2.0}, ValueError, "kv_scale: needs an e4m3 cache with one scale"),
        ({"cache_format": "v41_fp4"}, ValueError, "kv_cache: needs rows of 288 bytes"),
    ],
)
def test_what_a_writer_refuses(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    kv_cache = np.zeros((2, 4, 1, 528), np.uint8)
    given: dict[str, Any] = {"rows": some_rows(1), "slot_mapping": np.zeros(1, int)}
    given |= {"kv_cache": kv_cache, "cache_format": "v32_no_rope", **change}
    with refused(error, message):
        cumla.append_mla_cache(**given)
    assert not kv_cache.any()


def test_plans_are_made_for_formats() -> None:
    kv_cache, indices = np.zeros((2, 4, 1, 528), np.uint8), np.zeros((1, 2, 1), np.int32)
    q = query()
    plan = cumla.MLASparsePlan(1, 2, 3, 1, cache_format="v41", like=q)
    plan.update()
    assert plan.run(q, kv_cache, indices).out.shape == (1, 2, 3, 512)
    with refused(ValueError, "kv_cache: needs rows of 528 bytes, ... with cache_format 'v41'"):
        plan.run(q, np.zeros((2, 4, 1, 288), np.uint8), indices)
    made = cumla.MLASparsePlan(1, 2, 3, 1, like=q)
    made.update()
    with refused(ValueError, "cache_format: needed to tell the format of kv_cache"):
        made.run(q, kv_cache, indices)
    with refused(ValueError, "extra_topk: needs cache_format 'v4' or 'v41' or 'v41_fp4'"):
        cumla.MLASparsePlan(1, 2, 3, 1, cache_format="v32_no_rope", extra_topk=4, like=q)
    with refused(ValueError, "extra_cache_format: needs 'v4' beside cache_format 'v4'"):
        options = {"extra_topk": 4, "extra_cache_format": "v41"}
        cumla.MLASparsePlan(1, 2, 3, 1, cache_format="v4", **options, like=q)
    with refused(TypeError, "cache_format: needs to be given when the plan is made"):
        plan.run(q, kv_cache, indices, cache_format="v41")
