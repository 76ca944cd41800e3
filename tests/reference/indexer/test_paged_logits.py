# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits over pages against a formula in plain Python, and their contract."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import paged_mqa_logits
from cumla.reference.indexer.cache import split_cache
from tests.reference.indexer.plain_logits import NAN_BYTE, logit, some_bytes

Array = NDArray[Any]


def paged_inputs(page_size: int = 4, q_len: int = 2, heads: int = 3, dim: int = 8) -> Any:
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
        "q": some_bytes(rng, batch, q_len, heads, dim),
        "kv_cache": cache,
        "weights": rng.standard_normal((batch * q_len, heads)).astype(np.float32),
        "kv_lens": np.array([0, 1, 2 * page_size - 1, 3 * page_size], np.int32),
        "block_table": table.astype(np.int32),
        "max_kv_len": 3 * page_size + 2,
    }
    rows = values[table].reshape(batch, -1, dim), scales[table].reshape(batch, -1)
    return inputs, rows


def expected_paged(inputs: Any, rows: Any, seen: Array) -> Array:
    q, (keys, scales) = inputs["q"], rows
    batch, q_len = q.shape[:2]
    wanted = np.full((batch * q_len, inputs["max_kv_len"]), -np.inf)
    for b, i in np.ndindex(batch, q_len):
        row = b * q_len + i
        for j in range(seen[b, i]):
            wanted[row, j] = logit(q[b, i], keys[b, j], float(scales[b, j]), inputs["weights"][row])
    return wanted


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_paged(page_size: int, q_len: int) -> None:
    inputs, rows = paged_inputs(page_size, q_len)
    steps = np.arange(q_len) - q_len + 1
    seen = np.maximum(inputs["kv_lens"][:, None] + steps, 0)
    wanted = expected_paged(inputs, rows, seen)
    np.testing.assert_allclose(paged_mqa_logits(**inputs), wanted, rtol=2.0**-24 * 1.001)
    each = inputs | {"kv_lens": seen.astype(np.int32)}
    np.testing.assert_array_equal(paged_mqa_logits(**each), paged_mqa_logits(**inputs))


def test_paged_lengths_of_rows() -> None:
    inputs, rows = paged_inputs()
    seen = np.array([[5, 0], [1, 12], [3, 3], [0, 9]], np.int32)
    got = paged_mqa_logits(**inputs | {"kv_lens": seen})
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
    for b, length in enumerate(inputs["kv_lens"].tolist()):
        for j in range(length):
            used[table[b, j // 4], j % 4] = True
        table[b, -(-length // 4) :] = (2147480000, -1, -(2**31))[b % 3]
    keys.view(np.uint8)[~used], scales[~used] = NAN_BYTE, np.nan
    poisoned = inputs | {"kv_cache": cache, "block_table": table}
    np.testing.assert_array_equal(paged_mqa_logits(**poisoned), wanted)


def test_paged_clamps_lengths_and_page_numbers() -> None:
    inputs, _ = paged_inputs()
    wanted = paged_mqa_logits(**inputs | {"kv_lens": np.full(4, 14, np.int32)})
    assert np.isneginf(wanted[1::2, 12:]).all()
    wide = np.array([-5, 14, 13, 2**31 - 1], np.int32)
    got = paged_mqa_logits(**inputs | {"kv_lens": wide})
    np.testing.assert_array_equal(got[3], wanted[3])
    np.testing.assert_array_equal(got[7], wanted[7])
    assert np.isneginf(got[:2]).all()
    narrow = paged_mqa_logits(**inputs | {"kv_lens": wide, "max_kv_len": 7})
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
