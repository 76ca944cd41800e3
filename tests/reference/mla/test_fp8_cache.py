# SPDX-License-Identifier: Apache-2.0
"""The reference of the cache writer into FP8 caches, against plain loops over rows."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import append_mla_cache, quantize_fp8

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
POISON = 0xFF
SLOTS = np.array([5, -1, 47, 48, 0, 16, 2**40])
PLACES = {0: (0, 5), 2: (2, 15), 4: (0, 0), 5: (1, 0)}


def random(shape: tuple[int, ...], dtype: Any = BF16, scale: float = 1.0) -> Array:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(dtype)


def poisoned(shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    wide = (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize)
    return np.full(wide, POISON, np.uint8).view(dtype)


def quantized_by(scale: float, row: Array) -> bytes:
    """A row over a scale: the largest that fits is 448."""
    inverse = np.float32(1) / np.float32(scale)
    scaled = np.clip(row.astype(np.float32) * inverse, np.float32(-448), np.float32(448))
    return scaled.astype(FP8).tobytes()


def check(cache: Array, rows: dict[int, bytes]) -> None:
    """Rows of PLACES hold these bytes, all others none."""
    flat = cache.view(np.uint8)
    for i, place in PLACES.items():
        assert flat[place].tobytes() == rows[i]
        flat[place] = POISON
    assert (flat == POISON).all()


@pytest.mark.parametrize("dtype", [FP8, np.uint8])
@pytest.mark.parametrize("scale", [1.0, 0.003, np.float32(0.25), np.array([2e-3], np.float32)])
@pytest.mark.parametrize("form", ["one", "pair"])
def test_one_scale(form: str, scale: Any, dtype: Any) -> None:
    rows = random((7, 576))
    rows[0, 0], rows[2, 575] = 1e6, -1e6
    if form == "one":
        cache = poisoned((3, 16, 576), dtype)
        append_mla_cache(rows, cache, SLOTS, kv_scale=scale)
    else:
        parts = poisoned((3, 16, 512), dtype), poisoned((3, 16, 64), dtype)
        append_mla_cache((rows[:, :512], rows[:, 512:]), parts, SLOTS, kv_scale=scale)
        cache = np.concatenate([part.view(np.uint8) for part in parts], axis=-1)
    check(cache, {i: quantized_by(float(np.max(scale)), rows[i]) for i in PLACES})


def test_the_default_scale_and_special_numbers() -> None:
    rows = np.zeros((1, 576), np.float32)
    rows[0, :7] = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 2.0**-127, -(2.0**-127)]
    cache = poisoned((1, 16, 576))
    append_mla_cache(rows, cache, np.array([3]))
    assert cache[0, 3, :8].tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x80, 0, 0x80, 0]


@pytest.mark.parametrize("rope", [BF16, np.float16])
def test_one_scale_beside_rope_columns_of_16_bits(rope: Any) -> None:
    rows = random((7, 576), np.float32)
    parts = poisoned((3, 16, 512), FP8), poisoned((3, 16, 64), rope)
    append_mla_cache(rows, parts, SLOTS, kv_scale=0.01)
    check(parts[0], {i: quantized_by(0.01, rows[i, :512]) for i in PLACES})
    check(parts[1], {i: rows[i, 512:].astype(rope).tobytes() for i in PLACES})


@pytest.mark.parametrize("heads", [0, 2])
def test_scales_of_128_columns(heads: int) -> None:
    axes = (heads,) if heads else ()
    rows = random((7, *axes, 576)) * np.repeat(np.array([1, 100, 0, 1e-3, 1], BF16), 128)[:576]
    parts = tuple(
        poisoned((3, 16, *axes, columns), dtype)
        for columns, dtype in ((512, FP8), (64, BF16), (4, np.float32))
    )
    append_mla_cache(rows, parts, SLOTS)
    values, scale = quantize_fp8(rows[..., :512].reshape(7, *axes, 4, 128))
    check(parts[0], {i: values[i].tobytes() for i in PLACES})
    check(parts[1], {i: np.ascontiguousarray(rows[i, ..., 512:]).tobytes() for i in PLACES})
    check(parts[2], {i: scale[i].tobytes() for i in PLACES})


@pytest.mark.parametrize("rows_dtype", [BF16, np.float32])
def test_the_packed_format(rows_dtype: Any) -> None:
    """512 e4m3, then 4 float32 powers of two, then 64 bfloat16; nothing between rows."""
    rows = random((7, 576), rows_dtype)
    cache = poisoned((3, 16, 656))
    append_mla_cache(rows, cache, SLOTS)
    expected = {}
    for i in PLACES:
        latent = rows[i, :512].astype(np.float32).reshape(4, 128)
        limits = np.maximum(np.abs(latent).max(axis=1) / np.float32(448), np.float32(1e-4))
        scales = [float(2.0 ** np.ceil(np.log2(limit))) for limit in limits.astype(np.float64)]
        values = b"".join(quantized_by(s, part) for s, part in zip(scales, latent, strict=True))
        expected[i] = values + struct.pack("<4f", *scales) + rows[i, 512:].astype(BF16).tobytes()
    check(cache, expected)


def test_rotated_columns_are_quantised_afterwards() -> None:
    rows = random((7, 576), np.float32)
    angles = np.linspace(0, 6, 7)[:, None] * np.ones(32)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    arguments: dict[str, Any] = {"positions": np.arange(7), "cos_sin": cos_sin}
    wide = np.zeros((3, 16, 576), np.float32)
    append_mla_cache(rows, wide, SLOTS, **arguments)
    cache = poisoned((3, 16, 576))
    append_mla_cache(rows, cache, SLOTS, kv_scale=0.02, **arguments)
    check(cache, {i: quantized_by(0.02, wide[place]) for i, place in PLACES.items()})
