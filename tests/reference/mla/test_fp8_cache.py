# SPDX-License-Identifier: Apache-2.0
"""The reference of the cache writer into FP8 caches, against plain loops over rows."""

from __future__ import annotations

import math
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


# --- DeepSeek-V4's slots --------------------------------------------------------------------------

# e4m3 numbers that are positive, by their codes: three bits of mantissa, subnormal below 8.
CODES = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)])


def e4m3_code(x: float) -> int:
    """The nearest number up to 448, of two the one whose last bit is 0."""
    if math.isnan(x):
        return 0x7F
    distances = np.abs(CODES - min(abs(x), 448.0))
    best = int(distances.argmin())
    best += best % 2 and best < 126 and distances[best + 1] == distances[best]
    return best | (0x80 if math.copysign(1, x) < 0 else 0)


def v4_slot(row: Array) -> tuple[bytes, bytes]:
    """A row of 512 float32 numbers as columns and exponents; one number at a time."""
    codes, exponents = [], []
    for begin in range(0, 448, 64):
        group = [0.0 if abs(x) < 2.0**-126 else float(x) for x in row[begin : begin + 64]]
        signed = [
            math.copysign(x, of) for x, of in zip(group, row[begin : begin + 64], strict=True)
        ]
        most = float(np.finfo(np.float32).max)
        amax = max((min(abs(x), most) for x in group if not math.isnan(x)), default=0.0)
        exponent = -22  # 2^-22 is the first power of two from 1e-4 / 448 on
        while 448 * 2.0**exponent < amax:
            exponent += 1
        codes += [e4m3_code(x * 2.0**-exponent) for x in signed]
        exponents.append(127 + exponent)
    return bytes(codes) + row[448:].astype(BF16).tobytes(), bytes([*exponents, 0])


def check_v4(memory: Array, page_size: int, rows: dict[tuple[int, int], Array]) -> None:
    """Slots hold these rows, and all other bytes none."""
    for (page, slot), row in rows.items():
        columns, exponents = v4_slot(row.astype(np.float32))
        for begin, wanted in (
            (576 * slot, columns),
            (576 * page_size + 8 * slot, exponents),
        ):
            found = memory[page, begin : begin + len(wanted)]
            assert found.tobytes() == wanted
            found[...] = POISON
    assert (memory == POISON).all()


def v4_cache(pages: int, page_size: int, gap: int = 0) -> tuple[Array, Array]:
    """Memory of pages, and the cache in it."""
    memory = poisoned((pages, page_size * 584 + gap))
    return memory, memory[:, : page_size * 584].reshape(pages, page_size, 1, 584)


@pytest.mark.parametrize("rows_dtype", [BF16, np.float32])
@pytest.mark.parametrize("gap", [0, 48])
@pytest.mark.parametrize("form", ["one", "pair", "heads", "three axes", "e4m3"])
def test_slots_of_v4(form: str, gap: int, rows_dtype: Any) -> None:
    """All rows of a page first, then all exponents; gaps stay as they are."""
    rows = random((7, 512), rows_dtype) * np.repeat(
        np.array([1, 100, 0, 1e-3, 1, 3e4, 1e-6, 7], rows_dtype), 64
    )
    memory, cache = v4_cache(3, 16, gap)
    if form == "three axes":
        cache = cache[:, :, 0]
    if form == "e4m3":
        cache = cache.view(FP8)
    given = {"pair": (rows[:, :448], rows[:, 448:]), "heads": rows[:, None]}.get(form, rows)
    append_mla_cache(given, cache, SLOTS)
    check_v4(memory, 16, {place: rows[i] for i, place in PLACES.items()})


def test_special_numbers_in_slots_of_v4() -> None:
    """Each in the first group of a row of its own; another group holds nothing else."""
    most, tiny = float(np.finfo(np.float32).max), 2.0**-126
    specials = [
        *((448 * 2.0**k, 448 * 2.0**k * (1 + 2.0**-23)) for k in (-23, -22, -21, 0, 118, 119)),
        (math.nan, 3.0),
        (-math.nan, 0.0),
        (math.inf, 1.0),
        (-math.inf, 1e30),
        (most, -most),
        (0.0, -0.0),
        (tiny / 2, -tiny / 2),
        (1e-4, 1e-30),
        (17.0, 19.0, 18.0, -17.0),  # halfway between two numbers
        (448.0, 2.0**-10, 3 * 2.0**-10, 1.5 * 2.0**-9),  # subnormal ones
    ]
    rows = np.zeros((len(specials), 512), np.float32)
    for row, numbers in zip(rows, specials, strict=True):
        row[: len(numbers)] = numbers
        row[64 + 5], row[447], row[448:] = numbers[0], numbers[-1], 1 / 3
        row[128] = 2 * min(abs(numbers[0]), most / 4)
    memory, cache = v4_cache(1, len(rows))
    append_mla_cache(rows, cache, np.arange(len(rows)))
    exponents = memory[0, 576 * len(rows) :].reshape(-1, 8)
    assert exponents[:, :7].min() == 127 - 22 and exponents[:, :7].max() == 127 + 120
    check_v4(memory, len(rows), {(0, i): row for i, row in enumerate(rows)})


def test_rotated_columns_in_slots_of_v4() -> None:
    rows = random((7, 512), np.float32)
    quarter = np.concatenate([np.zeros((7, 32)), np.ones((7, 32))], axis=1).astype(np.float32)
    memory, cache = v4_cache(3, 16)
    append_mla_cache(rows, cache, SLOTS, positions=np.arange(7), cos_sin=quarter)
    pairs = rows[:, 448:].reshape(7, 32, 2)
    turned = np.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(7, 64)
    wanted = np.concatenate([rows[:, :448], turned], axis=1)
    check_v4(memory, 16, {place: wanted[i] for i, place in PLACES.items()})


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
