# SPDX-License-Identifier: Apache-2.0
"""The reference of FP8 rows against exact fractions and a table of e4m3."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import quantize_fp8

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = [BF16, np.dtype(np.float16), np.dtype(np.float32)]
LEAST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)


def number_of(code: int) -> Fraction:
    """The e4m3 number below 0x7f: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) / 2**6
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


NUMBERS = [number_of(code) for code in range(0x7F)]


def code_of(x: float) -> int:
    """The nearest e4m3 number, of two the one with an even code, with the sign in front."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    exact = min(abs(Fraction(x)), NUMBERS[-1])
    upper = min(bisect(NUMBERS, exact), 0x7E)
    lower = upper - 1
    below, above = exact - NUMBERS[lower], NUMBERS[upper] - exact
    nearest = lower if below < above or (below == above and lower % 2 == 0) else upper
    return sign | nearest


def codes(values: Array) -> Array:
    return values.view(np.uint8)


def normal(shape: tuple[int, ...], dtype: Any = np.float32, scale: float = 1.0) -> Array:
    return (np.random.default_rng(3).standard_normal(shape) * scale).astype(dtype)


# ------------------------------------------------------------------ conversion and scales


def test_the_table_of_e4m3() -> None:
    assert (NUMBERS[0], NUMBERS[1], NUMBERS[-1]) == (0, Fraction(1, 512), 448)
    of_ml_dtypes = np.arange(0x7F, dtype=np.uint8).view(FP8).astype(np.float64)
    assert of_ml_dtypes.tolist() == NUMBERS


def test_rounding_to_nearest_even() -> None:
    """Every number, every middle between two, their neighbours, both signs."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(NUMBERS)]
    near = np.array([float(x) for x in NUMBERS + middles], np.float32)
    around = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([near, *around, [447.99]]).astype(np.float32)
    x = x[(x >= 0) & (x <= 448)]
    rows = np.concatenate([x, -x])[:, None].repeat(2, axis=1)
    rows[:, 1] = 448  # scale 1
    values, scale = quantize_fp8(rows)
    assert (scale == 1).all()
    flushed = np.where(np.abs(rows) < LEAST, np.copysign(0, rows), rows)
    expected = [code_of(float(number)) for number in flushed[:, 0]]
    assert codes(values)[:, 0].tolist() == expected
    assert (codes(values)[:, 1] == 0x7E).all()


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [(dtype, magnitude) for dtype in DTYPES for magnitude in (1e-2, 1.0, 1e4)]
    + [(dtype, magnitude) for dtype in (BF16, np.float32) for magnitude in (1e-30, 1e30)],
)
def test_scales_are_correctly_rounded(dtype: Any, magnitude: float) -> None:
    rows = normal((50, 48), dtype, magnitude)
    values, scale = quantize_fp8(rows)
    assert values.dtype == FP8
    assert scale.dtype == np.float32
    for row, s, row_codes in zip(rows.astype(np.float64), scale, codes(values), strict=True):
        exact = max(abs(Fraction(x)) for x in row) / 448
        error = abs(Fraction(float(s)) - exact)
        for side in (np.float32(0), np.float32(np.inf)):
            assert error <= abs(Fraction(float(np.nextafter(s, side))) - exact)
        inverse = np.float32(1) / s
        expected = [code_of(float(np.float32(x) * inverse)) for x in row]
        assert row_codes.tolist() == expected


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-2, 0.0448, 0.5, 1.0, 448.0, 449.0, 1e30])
def test_powers_of_two(magnitude: float) -> None:
    rows = np.zeros((1, 16), np.float32)
    rows[0, 5] = -magnitude
    values, scale = quantize_fp8(rows, power_of_two_scales=True)
    least = max(Fraction(float(rows[0, 5] / np.float32(-448))), Fraction(float(np.float32(1e-4))))
    power = Fraction(float(scale[0]))
    assert math.frexp(float(scale[0]))[0] == 0.5
    assert power >= least > power / 2
    assert codes(values)[0, 5] == code_of(float(-np.float64(magnitude) / float(scale[0])))


def test_a_power_of_two_is_not_rounded_up() -> None:
    rows = (448 * 2.0 ** np.arange(-13, 100))[:, None].astype(np.float32)
    values, scale = quantize_fp8(rows, power_of_two_scales=True)
    assert scale.tolist() == (2.0 ** np.arange(-13, 100)).tolist()
    above = np.nextafter(rows, np.float32(np.inf))
    assert (quantize_fp8(above, power_of_two_scales=True).scale == 2 * scale).all()
    assert (codes(values) == 0x7E).all()
    assert (quantize_fp8(np.zeros((1, 1), BF16), power_of_two_scales=True).scale == 2.0**-13).all()


@pytest.mark.parametrize("power", [False, True])
def test_the_error_of_rows(power: bool) -> None:
    rows = normal((100, 128))
    values, scale = quantize_fp8(rows, power_of_two_scales=power)
    error = np.abs(values.astype(np.float64) * scale[:, None].astype(np.float64) - rows)
    allowed = np.maximum(np.abs(rows) * 2.0**-4, scale[:, None] * 2.0**-10) * (1 + 1e-5)
    assert (error <= allowed).all()


# ------------------------------------------------------------------ what is special


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype: Any) -> None:
    rows = np.zeros((2, 16), dtype)
    rows[1] = -0.0
    values, scale = quantize_fp8(rows)
    assert (scale == LEAST).all()
    assert (codes(values)[0] == 0).all()
    assert (codes(values)[1] == 0x80).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan(dtype: Any) -> None:
    """Either sign; the rest of the row is what it is without."""
    rows = normal((3, 16), dtype)
    rows[:, 3] = 0
    expected = quantize_fp8(rows)
    rows[0, 3], rows[1, 3], rows[2] = np.nan, -np.nan, np.nan
    values, scale = quantize_fp8(rows)
    assert codes(values)[:2, 3].tolist() == [0x7F, 0x7F]
    others = np.arange(16) != 3
    assert (codes(values)[:2, others] == codes(expected.values)[:2, others]).all()
    assert (scale[:2] == expected.scale[:2]).all()
    assert (codes(values)[2] == 0x7F).all()
    assert scale[2] == LEAST


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities(dtype: Any) -> None:
    rows = normal((2, 16), dtype)
    rows[0, 3], rows[1, 4] = np.inf, -np.inf
    values, scale = quantize_fp8(rows)
    assert scale.tolist() == [float(np.float32(LARGEST) / np.float32(448))] * 2
    assert codes(values)[[0, 1], [3, 4]].tolist() == [0x7E, 0xFE]
    rest = np.ones((2, 16), bool)
    rest[[0, 1], [3, 4]] = False
    assert (codes(values)[rest] & 0x7F == 0).all()
    _, power = quantize_fp8(rows, power_of_two_scales=True)
    assert np.isfinite(power).all()


def test_subnormal_numbers_are_zeros() -> None:
    rows = np.array([[2.0**-127, -(2.0**-130)], [2.0**-126, 2.0**-127]], np.float32)
    values, scale = quantize_fp8(rows)
    assert (scale == LEAST).all()
    assert codes(values).tolist() == [[0, 0x80], [0x38, 0]]
    assert codes(quantize_fp8(rows.astype(BF16)).values).tolist() == [[0, 0x80], [0x38, 0]]


# ------------------------------------------------------------------ shapes, outputs


@pytest.mark.parametrize("shape", [(16,), (3, 16), (0, 16), (2, 0, 16), (2, 3, 4, 5, 16)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = normal(shape)
    values, scale = quantize_fp8(x)
    assert (values.shape, scale.shape) == (shape, shape[:-1])
    flat = quantize_fp8(x.reshape(-1, 16))
    assert (codes(values).reshape(-1, 16) == codes(flat.values)).all()
    assert (scale.reshape(-1) == flat.scale).all()


@pytest.mark.parametrize("dtype", [FP8, np.uint8])
def test_outputs(dtype: Any) -> None:
    x = normal((4, 6, 16))
    expected = quantize_fp8(x)
    out = np.zeros((4, 6, 32), dtype)[..., :16]
    scale_out = np.zeros((6, 4), np.float32).T
    result = quantize_fp8(x, out=out, scale_out=scale_out)
    assert result.values is out
    assert result.scale is scale_out
    assert (codes(out) == codes(expected.values)).all()
    assert (scale_out == expected.scale).all()


def test_inputs_stay_as_they_are() -> None:
    x = normal((4, 16))
    x[0] = 1e-40
    before = x.copy()
    quantize_fp8(x)
    assert (x == before).all()
    assert x[0, 0] != 0
