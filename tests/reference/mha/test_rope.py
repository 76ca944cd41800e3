# SPDX-License-Identifier: Apache-2.0
"""The reference of apply_rope against rotations of complex numbers, and against `rotate_half`."""

from __future__ import annotations

import cmath
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumla.reference import apply_rope

BF16 = np.dtype(ml_dtypes.bfloat16)
THETA = 10_000.0
MAX_POSITION = 50


def angles_of(rotary_dim: int) -> Any:
    frequencies = THETA ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    return np.arange(MAX_POSITION)[:, None] * frequencies


def tables_of(rotary_dim: int) -> dict[str, Any]:
    """The three forms of one table, in float64."""
    angles = angles_of(rotary_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    freqs_cis = np.stack([cos, sin], axis=-1)
    return {
        "one array": np.concatenate([cos, sin], axis=1),
        "pair": (cos, sin),
        "freqs_cis": (freqs_cis[..., 0], freqs_cis[..., 1]),
    }


def by_complex_numbers(
    row: Any, position: int, rotary_dim: int, offset: int, interleaved: bool
) -> list[float]:
    """Turn the columns of one head, as points of the plane, by the angles of a position."""
    result = [float(x) for x in row]
    half = rotary_dim // 2
    for j in range(half):
        one, two = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        angle = position * THETA ** (-j / half)
        point = complex(row[offset + one], row[offset + two]) * cmath.exp(1j * angle)
        result[offset + one], result[offset + two] = point.real, point.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("columns", "rotary_dim", "offset"),
    [(32, 32, 0), (64, 16, 0), (64, 32, 32), (48, 16, 8)],
    ids=["whole", "first", "last", "middle"],
)
@pytest.mark.parametrize("form", ["one array", "pair", "freqs_cis"])
def test_against_complex_numbers(
    form: str, columns: int, rotary_dim: int, offset: int, interleaved: bool
) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((9, heads, columns)) for heads in (3, 2))
    positions = np.array([0, 1, 49, 7, 7, 50, -1, 2**62, 3])  # three have no row
    results = apply_rope(
        q, k, positions, tables_of(rotary_dim)[form], interleaved=interleaved, rotary_offset=offset
    )
    for rows, result in zip((q, k), results, strict=True):
        assert result is not None
        for token, position in enumerate(positions):
            if not 0 <= position < MAX_POSITION:
                assert (result[token] == rows[token]).all()
                continue
            for head in range(rows.shape[1]):
                expected = by_complex_numbers(
                    rows[token, head], int(position), rotary_dim, offset, interleaved
                )
                np.testing.assert_allclose(result[token, head], expected, rtol=0, atol=1e-14)


def rotate_half(x: Any) -> Any:
    """As models are written in PyTorch: pairs are columns j and j + half."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def test_half_split_is_what_models_call_rotate_half() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((MAX_POSITION, 4, 64))
    emb = np.concatenate([angles_of(64)] * 2, axis=-1)[:, None, :]
    expected = q * np.cos(emb) + rotate_half(q) * np.sin(emb)
    got, _ = apply_rope(q, None, np.arange(MAX_POSITION), tables_of(64)["one array"])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


def test_interleaved_is_the_same_with_columns_in_another_order() -> None:
    """As GPT-J's rotate_every_two; what DeepSeek's MLA caches have by default."""
    rng = np.random.default_rng(2)
    k = rng.standard_normal((MAX_POSITION, 2, 64))
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    table, positions = tables_of(64)["pair"], np.arange(MAX_POSITION)
    one, _ = apply_rope(k, None, positions, table, interleaved=True)
    other, _ = apply_rope(k[..., order], None, positions, table)
    np.testing.assert_array_equal(one[..., order], other)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_outputs_are_rounded_once(dtype: Any) -> None:
    """Also in place; the copy of all other columns is exact."""
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((MAX_POSITION, 2, 48)).astype(dtype) for _ in range(2))
    cos, sin = (part.astype(dtype) for part in tables_of(32)["pair"])
    positions = np.arange(MAX_POSITION)
    exact, _ = apply_rope(q.astype(float), None, positions, (cos, sin))
    kept = q.copy()
    results = apply_rope(q, k, positions, (cos, sin), q_out=q, k_out=k)
    assert results[0] is q
    assert results[1] is k
    np.testing.assert_array_equal(q, exact.astype(dtype))
    np.testing.assert_array_equal(q[..., 32:], kept[..., 32:])
