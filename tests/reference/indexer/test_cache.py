# SPDX-License-Identifier: Apache-2.0
"""The reference of the indexer's cache writer: the bytes of pages."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import append_indexer_cache, quantize_fp8

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def codes(values: Array) -> Array:
    return values.view(np.uint8)


def normal(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def page_bytes(rows: dict[int, tuple[bytes, float]], page_size: int, head_dim: int) -> bytes:
    """A page of 0xff in which some rows are written."""
    page = bytearray(b"\xff" * (page_size * (head_dim + 4)))
    for offset, (values, scale) in rows.items():
        page[offset * head_dim : (offset + 1) * head_dim] = values
        struct.pack_into("<f", page, page_size * head_dim + 4 * offset, scale)
    return bytes(page)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_fused_pages(head_dim: int, page_size: int, index: Any, power: bool) -> None:
    k = normal((9, head_dim), BF16)
    slots = [0, 3 * page_size - 1, -1, 3 * page_size, page_size + 5, 7, 2**31 - 1, -(2**31), 8]
    wide = np.full((3, page_size + 1, 1, head_dim + 4), 0xFF, np.uint8)
    cache = wide[:, :page_size]
    append_indexer_cache(k, cache, np.array(slots, index), power_of_two_scales=power)
    values, scale = quantize_fp8(k, power_of_two_scales=power)
    pages: list[dict[int, tuple[bytes, float]]] = [{}, {}, {}]
    for i, slot in enumerate(slots):
        if 0 <= slot < 3 * page_size:
            pages[slot // page_size][slot % page_size] = values[i].tobytes(), float(scale[i])
    for page, rows in enumerate(pages):
        assert cache[page].tobytes() == page_bytes(rows, page_size, head_dim)
    assert (wide[:, page_size:] == 0xFF).all()
    flat = np.full((3, page_size, head_dim + 4), 0xFF, np.uint8)
    append_indexer_cache(k, flat, np.array(slots, index), power_of_two_scales=power)
    assert (flat == cache[:, :, 0]).all()


@pytest.mark.parametrize("dtype", [FP8, np.uint8])
@pytest.mark.parametrize("axes", [3, 4])
def test_a_split_pair(axes: int, dtype: Any) -> None:
    k = normal((5, 64))
    slots = np.array([31, -1, 2, 32, 16])
    values = np.full((2, 16, 1, 64), 0xFF, np.uint8).view(dtype)
    scales = np.full((16, 2), -1, np.float32).T
    append_indexer_cache(k, (values if axes == 4 else values[:, :, 0], scales), slots)
    fused = np.full((2, 16, 68), 0xFF, np.uint8)
    append_indexer_cache(k, fused, slots)
    parts = fused.reshape(2, -1)
    assert (codes(values).reshape(2, -1) == parts[:, : 16 * 64]).all()
    written = np.zeros((2, 16), bool)
    written[[1, 0, 1], [15, 2, 0]] = True
    assert (scales[written] == parts[:, 16 * 64 :].copy().view(np.float32)[written]).all()
    assert (scales[~written] == -1).all()


def test_slots_beyond_32_bits() -> None:
    cache = np.full((2, 16, 68), 0xFF, np.uint8)
    append_indexer_cache(normal((2, 64)), cache, np.array([2**32 + 5, 5 - 2**32]))
    assert (cache == 0xFF).all()
