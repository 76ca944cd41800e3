# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits against a formula in plain Python, and the corners of their contract."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import mqa_logits, paged_mqa_logits
from cumla.reference.indexer.logits import split_cache

Array = NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN_BYTE = 0x7F


def value_of(byte: int) -> float:
    """An e4m3 number from its bits: a sign, 4 bits of exponent with bias 7, 3 of fraction."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == NAN_BYTE:
        return math.nan
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def logit(q: Array, k: Array, scale: float, weights: Array) -> float:
    """One logit of bytes q (num_heads, head_dim) and k (head_dim,), in Python's own numbers."""
    key = [value_of(byte) for byte in k.tolist()]
    total = 0.0
    for head, weight in zip(q.tolist(), weights.tolist(), strict=True):
        product = math.fsum(value_of(a) * b for a, b in zip(head, key, strict=True))
        total += weight * max(product, 0.0)
    return scale * total


def some_bytes(rng: np.random.Generator, *shape: int) -> Array:
    """Bits of normal numbers; every other one is small, some subnormal."""
    values = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.5, 1.0, 0.01)
    return values.astype(E4M3).view(np.uint8)


def test_bytes_are_decoded_as_ml_dtypes_does() -> None:
    every = np.arange(256, dtype=np.uint8)
    ours = [value_of(byte) for byte in every.tolist()]
    np.testing.assert_array_equal(ours, every.view(E4M3).astype(np.float64))


# --- prefill --------------------------------------------------------------------------------------


def prefill_inputs(heads: int = 3, dim: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    return {
        "q": some_bytes(rng, 6, heads, dim),
        "kv": (some_bytes(rng, 11, dim), rng.random(11, np.float32) + 0.1),
        "weights": rng.standard_normal((6, heads)).astype(np.float32),
        "ks": np.array([0, 3, 5, 11, -4, 9], np.int32),
        "ke": np.array([11, 7, 5, 11, 30, 2], np.int32),
    }


def expected_prefill(inputs: dict[str, Any], width: int = 0) -> Array:
    k, scale = inputs["kv"]
    wanted = np.full((len(inputs["q"]), width or len(k)), -np.inf)
    for i, j in np.ndindex(len(inputs["q"]), len(k)):
        if inputs["ks"][i] <= j < inputs["ke"][i]:
            column = j - max(inputs["ks"][i], 0) if width else j
            if column < wanted.shape[1]:
                wanted[i, column] = logit(
                    inputs["q"][i], k[j], float(scale[j]), inputs["weights"][i]
                )
    return wanted


@pytest.mark.parametrize("width", [0, 1, 4, 11, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill(width: int, dtype: str) -> None:
    inputs = prefill_inputs()
    got = mqa_logits(**inputs, max_seqlen_k=width, logits_dtype=dtype)
    wanted = expected_prefill(inputs, width)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
    # float64 rounded once
    np.testing.assert_allclose(
        got.astype(np.float64), wanted, rtol=2.0 ** (-8 if dtype == "bfloat16" else -24) * 1.001
    )


def test_prefill_takes_bytes_and_numbers_alike() -> None:
    inputs = prefill_inputs()
    k, scale = inputs["kv"]
    typed = inputs | {"q": inputs["q"].view(E4M3), "kv": (k.view(E4M3), scale)}
    np.testing.assert_array_equal(mqa_logits(**typed), mqa_logits(**inputs))


@pytest.mark.parametrize("width", [0, 4])
def test_prefill_without_cleaning_writes_what_is_visible_only(width: int) -> None:
    inputs = prefill_inputs()
    out = np.full((6, width or 11), 7, np.float32)
    assert mqa_logits(**inputs, max_seqlen_k=width, clean=False, out=out) is out
    wanted = expected_prefill(inputs, width).astype(np.float32)
    np.testing.assert_array_equal(out, np.where(np.isneginf(wanted), 7, wanted))


def test_a_product_that_is_nan_counts_as_0() -> None:
    inputs = prefill_inputs()
    k, scale = inputs["kv"]
    bits = k.view(np.uint8).copy()
    bits[0] = 0x7F  # NaN
    out = mqa_logits(**inputs | {"kv": (bits, scale), "ks": np.zeros(len(inputs["ks"]), np.int32)})
    seen = inputs["ke"] > 0
    assert seen.any()
    assert (out[seen, 0] == 0.0).all()


def test_prefill_looks_at_no_token_that_nobody_sees() -> None:
    inputs = prefill_inputs()
    inputs["ks"], inputs["ke"] = np.full(6, 2, np.int32), np.full(6, 8, np.int32)
    wanted = mqa_logits(**inputs)
    k, scale = (part.copy() for part in inputs["kv"])
    k[[0, 1, 8, 9, 10]], scale[[0, 1, 8, 9, 10]] = NAN_BYTE, np.nan
    np.testing.assert_array_equal(mqa_logits(**inputs | {"kv": (k, scale)}), wanted)
    scale[7] = np.nan
    assert np.isnan(mqa_logits(**inputs | {"kv": (k, scale)})[:, 7]).all()


# --- pages ----------------------------------------------------------------------------------------


def paged_inputs(page_size: int = 4, next_n: int = 2, heads: int = 3, dim: int = 8) -> Any:
    """Inputs, and keys and scales of each request in order."""
    rng = np.random.default_rng(page_size)
    batch, max_pages, num_pages = 4, 3, 16
    values = some_bytes(rng, num_pages, page_size, dim)
    scales = rng.random((num_pages, page_size), np.float32) + 0.1
    cache = np.concatenate(
        [values.reshape(num_pages, -1), scales.view(np.uint8).reshape(num_pages, -1)], axis=1
    ).reshape(num_pages, page_size, 1, dim + 4)
    table = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages)
    inputs = {
        "q": some_bytes(rng, batch, next_n, heads, dim),
        "kv_cache": cache,
        "weights": rng.standard_normal((batch * next_n, heads)).astype(np.float32),
        "context_lens": np.array([0, 1, 2 * page_size - 1, 3 * page_size], np.int32),
        "block_table": table.astype(np.int32),
        "max_context_len": 3 * page_size + 2,
    }
    rows = values[table].reshape(batch, -1, dim), scales[table].reshape(batch, -1)
    return inputs, rows


def expected_paged(inputs: Any, rows: Any, seen: Array) -> Array:
    q, (keys, scales) = inputs["q"], rows
    batch, next_n = q.shape[:2]
    wanted = np.full((batch * next_n, inputs["max_context_len"]), -np.inf)
    for b, i in np.ndindex(batch, next_n):
        row = b * next_n + i
        for j in range(seen[b, i]):
            wanted[row, j] = logit(q[b, i], keys[b, j], float(scales[b, j]), inputs["weights"][row])
    return wanted


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_paged(page_size: int, next_n: int) -> None:
    inputs, rows = paged_inputs(page_size, next_n)
    steps = np.arange(next_n) - next_n + 1
    seen = np.maximum(inputs["context_lens"][:, None] + steps, 0)
    wanted = expected_paged(inputs, rows, seen)
    np.testing.assert_allclose(paged_mqa_logits(**inputs), wanted, rtol=2.0**-24 * 1.001)
    each = inputs | {"context_lens": seen.astype(np.int32)}
    np.testing.assert_array_equal(paged_mqa_logits(**each), paged_mqa_logits(**inputs))


def test_paged_lengths_of_rows() -> None:
    inputs, rows = paged_inputs()
    seen = np.array([[5, 0], [1, 12], [3, 3], [0, 9]], np.int32)
    got = paged_mqa_logits(**inputs | {"context_lens": seen})
    np.testing.assert_allclose(got, expected_paged(inputs, rows, seen), rtol=2.0**-24 * 1.001)


def test_paged_forms_of_the_cache_agree() -> None:
    inputs, _ = paged_inputs()
    wanted = paged_mqa_logits(**inputs)
    cache = inputs["kv_cache"]
    keys, scales = split_cache(cache, 8)
    assert np.shares_memory(keys, cache)
    assert np.shares_memory(scales, cache)
    apart = np.full((16, cache[0].nbytes + 32), NAN_BYTE, np.uint8)
    apart[:, : cache[0].nbytes] = cache.reshape(16, -1)
    spread = np.lib.stride_tricks.as_strided(apart, (16, 4, 12), (apart.strides[0], 12, 1))
    for form in (
        cache[:, :, 0],
        spread,
        (keys, scales),
        (keys.copy().view(np.uint8)[:, :, None], scales.copy()),
    ):
        np.testing.assert_array_equal(paged_mqa_logits(**inputs | {"kv_cache": form}), wanted)


def test_paged_looks_at_nothing_that_nobody_sees() -> None:
    inputs, _ = paged_inputs()
    wanted = paged_mqa_logits(**inputs)
    cache, table = inputs["kv_cache"].copy(), inputs["block_table"].copy()
    keys, scales = split_cache(cache, 8)
    used = np.zeros(keys.shape[:2], bool)
    for b, length in enumerate(inputs["context_lens"].tolist()):
        for j in range(length):
            used[table[b, j // 4], j % 4] = True
        table[b, -(-length // 4) :] = (2147480000, -1, -(2**31))[b % 3]
    keys.view(np.uint8)[~used], scales[~used] = NAN_BYTE, np.nan
    poisoned = inputs | {"kv_cache": cache, "block_table": table}
    np.testing.assert_array_equal(paged_mqa_logits(**poisoned), wanted)


def test_paged_clamps_lengths_and_page_numbers() -> None:
    inputs, _ = paged_inputs()
    wanted = paged_mqa_logits(**inputs | {"context_lens": np.full(4, 14, np.int32)})
    assert np.isneginf(wanted[1::2, 12:]).all()
    wide = np.array([-5, 14, 13, 2**31 - 1], np.int32)
    got = paged_mqa_logits(**inputs | {"context_lens": wide})
    np.testing.assert_array_equal(got[3], wanted[3])
    np.testing.assert_array_equal(got[7], wanted[7])
    assert np.isneginf(got[:2]).all()
    narrow = paged_mqa_logits(**inputs | {"context_lens": wide, "max_context_len": 7})
    np.testing.assert_array_equal(narrow[2:], got[2:, :7])
    table = inputs["block_table"].copy()
    table[3, 0], table[3, 1] = -7, 2147480000
    clamped = table.copy()
    clamped[3, 0], clamped[3, 1] = 0, 15
    np.testing.assert_array_equal(
        paged_mqa_logits(**inputs | {"block_table": table}),
        paged_mqa_logits(**inputs | {"block_table": clamped}),
    )


def test_paged_without_cleaning_writes_what_is_visible_only() -> None:
    inputs, _ = paged_inputs()
    wanted = paged_mqa_logits(**inputs, logits_dtype="bfloat16").astype(np.float32)
    out = np.full(wanted.shape, 7, ml_dtypes.bfloat16)
    assert paged_mqa_logits(**inputs, clean=False, out=out) is out
    np.testing.assert_array_equal(out.astype(np.float32), np.where(np.isneginf(wanted), 7, wanted))


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((6, 3, 5), np.float16)}, TypeError, "q: needs float8_e4m3fn, or uint8"),
        ({"q": np.zeros((6, 15), np.uint8)}, ValueError, "q: needs 3 axes"),
        ({"kv": (np.zeros((11, 6), np.uint8), np.zeros(11))}, ValueError, r"kv\[0\]: needs shape"),
        ({"kv": (np.zeros((11, 5), np.uint8), np.zeros(10))}, ValueError, r"kv\[1\]: needs shape"),
        ({"weights": np.zeros((6, 4))}, ValueError, "weights: needs shape"),
        ({"ke": np.zeros(5, np.int32)}, ValueError, "ke: needs shape"),
        ({"out": np.zeros((6, 10), np.float32)}, ValueError, "out: needs shape"),
        ({"out": np.zeros((6, 11))}, TypeError, "out: needs float32 or bfloat16, got float64"),
        (
            {"out": np.zeros((6, 11), np.float32), "logits_dtype": "bfloat16"},
            TypeError,
            "out: needs bfloat16, got float32",
        ),
    ],
)
def test_prefill_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        mqa_logits(**prefill_inputs() | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_cache": np.zeros((16, 4, 12), np.int8)}, TypeError, "kv_cache: needs uint8"),
        ({"kv_cache": np.zeros((16, 4, 13), np.uint8)}, ValueError, "kv_cache: needs shape"),
        ({"context_lens": np.zeros((4, 3), np.int32)}, ValueError, "context_lens: needs shape"),
        ({"block_table": np.zeros((3, 3), np.int32)}, ValueError, "block_table: needs shape"),
        ({"weights": np.zeros((4, 3))}, ValueError, "weights: needs shape"),
    ],
)
def test_paged_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs, _ = paged_inputs()
    with pytest.raises(error, match=f"^{message}"):
        paged_mqa_logits(**inputs | change)
