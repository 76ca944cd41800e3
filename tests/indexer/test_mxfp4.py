# SPDX-License-Identifier: Apache-2.0
"""Index keys of 68 bytes on the CPU: bytes, logits, and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import refused
from tests.emulator import emulated_gpu
from tests.gpu.tools import sanitize

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MXFP4: dict[str, Any] = {"cache_format": "mxfp4"}


def packed(k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 128) of float32 as DeepSeek-V4.1's engines quantise them: codes, exponents."""
    groups = k.reshape(len(k), 4, 32).astype(np.float64)
    amax = np.maximum(np.abs(groups).max(axis=-1), 6 * 2.0**-126)
    exponents = np.ceil(np.log2(amax / 6))
    quotients = np.abs(groups) / np.exp2(exponents)[..., None]
    distance = np.abs(quotients[..., None] - E2M1) + 1e-9 * (np.arange(8) % 2)  # even at ties
    codes = distance.argmin(axis=-1) | np.signbit(groups).astype(int) << 3
    flat = codes.reshape(len(k), 128).astype(np.uint8)
    return flat[:, ::2] | flat[:, 1::2] << 4, (exponents + 127).astype(np.uint8)


def unpacked(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    numbers = np.where(halves & 8, -1, 1) * E2M1[halves & 7]
    return numbers * np.exp2(exponents.astype(np.float64) - 127).repeat(32, axis=-1)


def some_keys(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((count, 128), dtype=np.float32)
    k *= np.exp2(rng.integers(-20, 20, (count, 4))).repeat(32, axis=1)
    k[::5, 32:64], k[1::5, ::7] = 0, -0.0
    return k


def pages_of(k: np.ndarray, pages: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A cache with these keys in all its slots, and what they stand for."""
    codes, exponents = packed(k)
    whole = [x.reshape(pages, -1) for x in (codes, exponents)]
    return np.concatenate(whole, axis=1).reshape(pages, page_size, 68), unpacked(codes, exponents)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_what_is_written(dtype: Any) -> None:
    k = some_keys(64).astype(dtype)
    kv_cache = np.full((4, 16, 1, 68), 0xAA, np.uint8)
    slots = np.random.default_rng(1).permutation(64)
    cumla.append_indexer_cache(k, kv_cache, slots, **MXFP4)
    order = np.argsort(slots)
    wanted, _ = pages_of(k.astype(np.float32)[order], 4, 16)
    np.testing.assert_array_equal(kv_cache[:, :, 0], wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_the_kernel_that_writes(dtype: Any) -> None:
    """NaN of either sign included: that of float16 loses it."""
    with np.errstate(over="ignore"):
        k = some_keys(64).astype(dtype)
    k[::3, 7], k[1::3, 7], k[2::9, 40], k[5::9, 40] = np.nan, -np.nan, np.inf, -np.inf
    wanted = np.full((4, 16, 68), 0xAA, np.uint8)
    slots = np.random.default_rng(1).permutation(64)
    cumla.append_indexer_cache(k, wanted, slots, **MXFP4)
    with emulated_gpu(2) as cupy:
        got = cupy.asarray(np.full_like(wanted, 0xAA))
        cumla.append_indexer_cache(cupy.asarray(k), got, cupy.asarray(slots), **MXFP4)
        np.testing.assert_array_equal(got.get(), wanted)
    signs = wanted.reshape(4, -1)[:, :1024].reshape(64, 64)[slots[1::3], 3] >> 7
    assert (signs == (dtype != np.float16)).all()


def test_logits_of_what_keys_stand_for() -> None:
    rng = np.random.default_rng(2)
    kv_cache, numbers = pages_of(some_keys(64), 4, 16)
    q = cumla.quantize_fp8(rng.standard_normal((2, 2, 8, 128), dtype=np.float32)).values
    weights = rng.standard_normal((4, 8), dtype=np.float32)
    table, lengths = np.array([[3, 0], [2, 9]], np.int32), np.array([29, 17], np.int32)
    arrays = q, kv_cache, weights, table, lengths
    got = cumla.paged_mqa_logits(*arrays, max_kv_len=32, **MXFP4)
    paged = numbers.reshape(4, 16, 128)
    for row in range(4):
        keys = paged[np.clip(table[row // 2], 0, 3)].reshape(32, 128)
        products = np.maximum(q[row // 2, row % 2].astype(np.float64) @ keys.T, 0)
        wanted = weights[row].astype(np.float64) @ products
        seen = lengths[row // 2] - 1 + row % 2
        np.testing.assert_allclose(got[row, :seen], wanted[:seen], rtol=1e-6)
        assert np.isneginf(got[row, seen:]).all()
    plan = cumla.PagedMQALogitsPlan.from_arrays(q, kv_cache, table, lengths, **MXFP4)
    plan.update(lengths)
    planned = plan.run(*arrays[:3], block_table=table, max_kv_len=32)
    np.testing.assert_array_equal(planned, got)


def test_an_exponent_that_is_nan() -> None:
    kv_cache, _ = pages_of(some_keys(16), 1, 16)
    kv_cache.reshape(-1)[16 * 64 + 4 * 5 + 3] = 255
    q = cumla.quantize_fp8(np.ones((1, 1, 8, 128), np.float32)).values
    arrays = q, kv_cache, np.ones((1, 8), np.float32), np.zeros((1, 1), np.int32)
    got = cumla.paged_mqa_logits(*arrays, np.array([16], np.int32), max_kv_len=16, **MXFP4)
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 5]]


def test_a_whole_step() -> None:
    rng = np.random.default_rng(4)
    index_cache, _ = pages_of(some_keys(64), 4, 16)
    q, kv_cache = np.ones((2, 1, 4, 512), ml_dtypes.bfloat16), np.zeros((4, 16, 1, 528), np.uint8)
    index_q = cumla.quantize_fp8(rng.standard_normal((2, 1, 8, 128), dtype=np.float32)).values
    table = {"block_table": np.array([[0, 2], [3, 1]], np.int32)}
    formats = {"cache_format": "v41", "index_cache_format": "mxfp4"}
    made_of = q, kv_cache, index_q, index_cache
    plan = cumla.DSAPlan.from_arrays(*made_of, **table, topk=8, **formats)
    lengths, weights = np.array([30, 5], np.int32), np.ones((2, 8), np.float32)
    plan.update(lengths)
    got = plan.select(index_q, index_cache, weights, **table)
    arrays = index_q, index_cache, weights, table["block_table"], lengths
    logits = cumla.paged_mqa_logits(*arrays, max_kv_len=32, **MXFP4)
    want = cumla.top_k(logits, 8, row_lens=lengths).indices
    np.testing.assert_array_equal(got[:, 0], want)
    sizes = {"index_heads": 8, "max_pages": 2, "page_size": 16, "like": q}
    made = cumla.DSAPlan(2, 1, 4, 8, **sizes, **formats)
    made.update(lengths)
    np.testing.assert_array_equal(made.select(index_q, index_cache, weights, **table), got)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_format": "mxfp8"}, ValueError, "cache_format: needs 'mxfp4', got 'mxfp8'"),
        (
            {"kv_cache": np.zeros((2, 16, 132), np.uint8)},
            ValueError,
            "kv_cache: needs shape (num_pages, page_size, 68)",
        ),
        (
            {"kv_cache": (np.zeros((2, 16, 64), np.uint8), np.zeros((2, 16), np.float32))},
            ValueError,
            "kv_cache: needs one array of pages with cache_format 'mxfp4', got a pair",
        ),
        ({"k": np.zeros((1, 64), np.float32)}, ValueError, "cache_format: needs a head_dim of 128"),
        ({"cache_format": None}, ValueError, "kv_cache: needs shape (num_pages, page_size, 132)"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """By the writer and by the reader."""
    given: dict[str, Any] = {"k": np.zeros((1, 128), np.float32), **MXFP4}
    given |= {"kv_cache": np.zeros((2, 16, 68), np.uint8), **change}
    k = given.pop("k")
    with refused(error, message):
        cumla.append_indexer_cache(k, slot_mapping=np.zeros(1, int), **given)
    given["q"] = np.zeros((1, 1, 8, k.shape[1]), ml_dtypes.float8_e4m3fn)
    given |= {"weights": np.ones((1, 8), np.float32), "max_kv_len": 16}
    given |= {"block_table": np.zeros((1, 1), np.int32), "kv_lens": np.ones(1, np.int32)}
    with refused(error, message):
        cumla.paged_mqa_logits(**given)


@pytest.mark.parametrize("q_len", [1, 8])
def test_the_kernel(q_len: int) -> None:
    """One tile of columns, in turns; and four, two of each consumer."""
    with emulated_gpu(2) as cupy:
        sanitize.score_pages(cupy, q_len, batch=2, mean=200, form="mxfp4")
