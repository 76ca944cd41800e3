# SPDX-License-Identifier: Apache-2.0
"""The reference over FP8 caches, against itself over what the caches stand for."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import append_mla_cache, mla_attention, mla_decode

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LEAD = (5, 3)  # pages and tokens of a page
TABLE = np.array([[3, 0, -7], [4, 2, 1]], np.int32)
LENGTHS = np.array([5, 8], np.int32)
FORMS = ("one", "pair", "16-bit rope", "scales", "scales, e4m3 rope", "packed")


def value_of(byte: int) -> float:
    """A number of sign, four bits of exponent and three of mantissa: OCP's e4m3."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def make_cache(form: str, heads: int = 1, seed: int = 0) -> tuple[Any, Array, float | None]:
    """A cache as uint8, bfloat16 and float32; what it stands for; and its kv_scale."""
    rng = np.random.default_rng(seed)
    lead = (*LEAD, heads)
    bits = rng.integers(0, 256, (*lead, 576), np.uint8)
    bits[bits % 128 == 127] = 0x31
    rope = rng.standard_normal((*lead, 64)).astype(BF16)
    scales = (10.0 ** rng.uniform(-5, 1, (*lead, 4))).astype(np.float32)
    known = np.vectorize(value_of)(bits)
    factor = 0.0173
    stored = float(np.float32(factor))
    latent, e4m3_rope = bits[..., :512].copy(), bits[..., 512:].copy()
    grouped = known[..., :512] * np.repeat(scales.astype(np.float64), 128, axis=-1)
    if form in ("one", "pair"):
        return (bits if form == "one" else (latent, e4m3_rope)), known * stored, factor
    if form == "16-bit rope":
        parts = (known[..., :512] * stored, rope.astype(np.float64))
        return (latent, rope), np.concatenate(parts, axis=-1), factor
    if form == "scales, e4m3 rope":
        parts = (grouped, known[..., 512:] * stored)
        return (latent, e4m3_rope, scales), np.concatenate(parts, axis=-1), factor
    exact = np.concatenate([grouped, rope.astype(np.float64)], axis=-1)
    if form == "scales":
        return (latent, rope, scales), exact, None
    rows = [
        row.tobytes() + struct.pack("<4f", *scale) + last.tobytes()
        for row, scale, last in zip(
            latent.reshape(-1, 512), scales.reshape(-1, 4), rope.reshape(-1, 64), strict=True
        )
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(*lead, 656), exact, None


def as_e4m3(cache: Any) -> Any:
    """Bytes that are numbers as such."""
    if isinstance(cache, tuple):
        return tuple(as_e4m3(part) for part in cache)
    return cache.view(FP8) if cache.dtype == np.uint8 and cache.shape[-1] != 656 else cache


def queries(q_len: int = 2, heads: int = 4) -> Array:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((2, q_len, heads, 576)) / 64).astype(BF16)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_cache_stands_for(form: str, heads: int, labelled: bool) -> None:
    cache, exact, kv_scale = make_cache(form, heads)
    cache = as_e4m3(cache) if labelled else cache
    q = queries()
    want = mla_decode(q, exact, TABLE, LENGTHS)
    got = mla_decode(q, cache, TABLE, LENGTHS, kv_scale=kv_scale)
    np.testing.assert_array_equal(got.out.view(np.uint16), want.out.view(np.uint16))
    np.testing.assert_array_equal(got.lse, want.lse)
    indptr = np.array([0, 2, 4], np.int32)
    ragged: dict[str, Any] = {"qo_indptr": indptr, "kv_lens": LENGTHS, "block_table": TABLE}
    out, lse = mla_attention(q.reshape(4, 4, 576), cache, **ragged, kv_scale=kv_scale)
    np.testing.assert_array_equal(out.reshape(want.out.shape), want.out)
    np.testing.assert_array_equal(lse.reshape(2, 2, 4), want.lse)
    options: dict[str, Any] = {"kv_scale": kv_scale, "fp8_products": True}  # makes no difference
    got = mla_decode(q, cache, TABLE, LENGTHS, **options)
    np.testing.assert_array_equal(got.lse, want.lse)
    got = mla_attention(q.reshape(4, 4, 576), cache, **ragged, **options)
    np.testing.assert_array_equal(got.lse, lse)


@pytest.mark.parametrize("form", ["one", "pair", "scales", "packed"])
def test_one_head_without_its_axis(form: str) -> None:
    cache, _, kv_scale = make_cache(form)
    parts = cache if isinstance(cache, tuple) else (cache,)
    flat = tuple(part[:, :, 0] for part in parts)
    want = mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=kv_scale)
    got = mla_decode(
        queries(), flat if len(flat) > 1 else flat[0], TABLE, LENGTHS, kv_scale=kv_scale
    )
    np.testing.assert_array_equal(got.out, want.out)


@pytest.mark.parametrize("kv_scale", [None, 1, 1.0, np.float32(1), np.ones((), np.float32)])
def test_factors(kv_scale: Any) -> None:
    """1 by default; a number is one of float32, as in an array."""
    cache, exact, factor = make_cache("one")
    want = mla_decode(queries(), exact / float(np.float32(factor)), TABLE, LENGTHS)
    got = mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=kv_scale)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-7)
    for same in (factor, np.float32(factor), np.array([factor], np.float32)):
        got = mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=same)
        np.testing.assert_array_equal(got.lse, mla_decode(queries(), exact, TABLE, LENGTHS).lse)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_unseen_is_read(form: str) -> None:
    """NaN of every kind in slots behind a length and in the page of nobody."""
    cache, _, kv_scale = make_cache(form)
    parts = cache if isinstance(cache, tuple) else (cache.copy(),)
    want = mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=kv_scale)
    poisoned = tuple(part.copy() for part in parts)
    for part in poisoned:
        for where in ((0, 2), (1, 2)):
            part.view(np.uint8)[where] = 0xFF
    page_of_nobody = tuple(np.concatenate([part, part[:1]]) for part in poisoned)
    for part in page_of_nobody:
        part.view(np.uint8)[-1] = 0x7F
    cache = page_of_nobody if len(parts) > 1 else page_of_nobody[0]
    got = mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=kv_scale)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [-1, 5, 2147480000])
def test_page_numbers_out_of_range_read_as_zeros(form: str, number: int) -> None:
    cache, exact, kv_scale = make_cache(form)
    table = TABLE.copy()
    table[0, 0] = number
    got = mla_decode(queries(), cache, table, LENGTHS, kv_scale=kv_scale)
    want = mla_decode(queries(), exact, table, LENGTHS)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert np.isfinite(got.lse).all()


def test_in_float32() -> None:
    cache, exact, kv_scale = make_cache("scales, e4m3 rope")
    want = mla_decode(queries(), exact, TABLE, LENGTHS)
    options: dict[str, Any] = {"kv_scale": kv_scale, "accumulate": "float32"}
    got = mla_decode(queries(), cache, TABLE, LENGTHS, **options)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5)
    close = {"rtol": 0.01, "atol": 1e-6}
    np.testing.assert_allclose(got.out.astype(float), want.out.astype(float), **close)


@pytest.mark.parametrize("form", ["one", "16-bit rope", "scales", "packed"])
def test_what_was_appended_is_attended_to(form: str) -> None:
    """Rows that e4m3 holds exactly give what they give in bfloat16; others, what is near."""
    rng = np.random.default_rng(3)
    shapes: dict[str, Any] = {
        "one": [((*LEAD, 576), FP8)],
        "16-bit rope": [((*LEAD, 512), FP8), ((*LEAD, 64), BF16)],
        "scales": [((*LEAD, 512), FP8), ((*LEAD, 64), BF16), ((*LEAD, 4), np.float32)],
        "packed": [((*LEAD, 656), np.uint8)],
    }
    slots = (TABLE[:, :, None] * 3 + np.arange(3)).reshape(2, 9)
    slots = np.concatenate([slots[0, :5], slots[1, :8]])
    whole = np.zeros((*LEAD, 576), BF16)
    for exact in (True, False):
        rows = rng.standard_normal((13, 576))
        if exact:  # 448 is the largest of each 128 columns: a scale of 1
            rows = rng.integers(-7, 8, (13, 576)) * 1.0
            rows[:, ::64] = 448
        parts = tuple(np.zeros(shape, dtype) for shape, dtype in shapes[form])
        cache = parts if len(parts) > 1 else parts[0]
        scale: dict[str, Any] = {}
        if form in ("one", "16-bit rope"):
            scale = {"kv_scale": 1.0 if exact else 0.01}
        append_mla_cache(rows.astype(BF16), cache, slots, **scale)
        append_mla_cache(rows.astype(BF16), whole, slots)
        want = mla_decode(queries() / BF16.type(8), whole, TABLE, LENGTHS)
        got = mla_decode(queries() / BF16.type(8), cache, TABLE, LENGTHS, **scale)
        if exact:
            np.testing.assert_array_equal(got.out, want.out)
            np.testing.assert_array_equal(got.lse, want.lse)
        else:
            assert not np.array_equal(got.out, want.out)
            error = np.linalg.norm(got.out.astype(float) - want.out.astype(float))
            assert error < 0.06 * np.linalg.norm(want.out.astype(float))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["scales", "packed"])
def test_a_factor_of_nothing(form: str) -> None:
    with pytest.raises(ValueError, match=r"^kv_scale: no e4m3 columns without scales"):
        mla_decode(queries(), make_cache(form)[0], TABLE, LENGTHS, kv_scale=1.0)


def test_a_factor_of_16_bit_columns() -> None:
    cache = np.zeros((*LEAD, 576), BF16)
    with pytest.raises(ValueError, match=r"^kv_scale: no e4m3 columns"):
        mla_decode(queries(), cache, TABLE, LENGTHS, kv_scale=1.0)
