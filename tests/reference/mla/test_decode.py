# SPDX-License-Identifier: Apache-2.0
"""The reference against plain loops, and the corners of its contract."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from cumla.reference import AttentionState, mla_decode
from tests.reference.mla.problem import BF16, FP16, Case, float32_out, make_case

Array = NDArray[Any]


def by_plain_loops(case: Case, softmax_scale: float, causal: bool) -> tuple[Array, Array]:
    """The formula once more, in Python floats, one token at a time."""
    batch, q_len, heads, _ = case.q.shape
    _, page_size, kv_heads, _ = case.kv_cache.shape
    out = np.zeros((batch, q_len, heads, 512))
    lse = np.full((batch, q_len, heads), -math.inf)
    for b, i, h in np.ndindex(batch, q_len, heads):
        query = [float(x) for x in case.q[b, i, h]]
        numerator, denominator = [0.0] * 512, 0.0
        for t in range(int(case.kv_lens[b])):
            if causal and t > int(case.kv_lens[b]) - q_len + i:
                break
            page = int(case.block_table[b, t // page_size])
            row = [float(x) for x in case.kv_cache[page, t % page_size, h * kv_heads // heads]]
            weight = math.exp(softmax_scale * sum(x * y for x, y in zip(query, row, strict=True)))
            numerator = [n + weight * v for n, v in zip(numerator, row, strict=False)]
            denominator += weight
        if denominator:
            out[b, i, h] = [n / denominator for n in numerator]
            lse[b, i, h] = math.log(denominator)
    return out, lse


def decode(case: Case, **options: Any) -> AttentionState:
    """Run the reference with a float32 output."""
    return mla_decode(*case, out=float32_out(case), **options)


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "q_len", "heads", "kv_heads", "page_size", "dtype"),
    [
        ([5, 0, 9], 1, 3, 1, 4, BF16),
        ([1, 7, 2], 3, 4, 2, 3, BF16),
        ([6, 3], 2, 3, 3, 1, FP16),
        ([10], 4, 6, 2, 64, BF16),
    ],
)
def test_agrees_with_plain_loops(
    lengths: list[int],
    q_len: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    dtype: DTypeLike,
    causal: bool,
) -> None:
    case = make_case(
        lengths,
        q_len=q_len,
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        dtype=dtype,
        scale=1.0,
    )
    expected_out, expected_lse = by_plain_loops(case, 0.11, causal)
    result = decode(case, softmax_scale=0.11, causal=causal)
    np.testing.assert_allclose(result.out, expected_out, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.lse, expected_lse, rtol=1e-6, atol=1e-7)


def test_default_scale_and_output_types() -> None:
    case = make_case([9, 4], q_len=2)
    result = mla_decode(*case)
    assert isinstance(result, AttentionState)
    assert (result.out.shape, result.out.dtype) == ((2, 2, 4, 512), BF16)
    assert (result.lse.shape, result.lse.dtype) == ((2, 2, 4), np.dtype(np.float32))
    expected = decode(case, softmax_scale=576**-0.5)
    np.testing.assert_array_equal(result.out, expected.out.astype(BF16))
    np.testing.assert_array_equal(result.lse, expected.lse)


def test_float32_accumulation_differs_by_rounding_only() -> None:
    case = make_case([200, 33], q_len=2, scale=1.0)
    double, single = decode(case), decode(case, accumulate="float32")
    assert not np.array_equal(single.out, double.out)
    np.testing.assert_allclose(single.out, double.out, atol=2e-6)
    np.testing.assert_allclose(single.lse, double.lse, atol=2e-6)


# ------------------------------------------------------------------ corners of the contract


def test_queries_that_see_nothing() -> None:
    case = make_case([0, 1, 2], q_len=3)
    result = mla_decode(*case)
    for b, hidden in enumerate([3, 2, 1]):  # q_len - length queries stand before the first token
        assert not np.any(result.out[b, :hidden])
        assert np.all(np.isneginf(result.lse[b, :hidden]))
        assert np.all(np.isfinite(result.lse[b, hidden:]))
        assert np.all(np.any(result.out[b, hidden:], axis=-1))


def test_causal_is_aligned_with_the_end() -> None:
    case = make_case([40], q_len=3)
    result = decode(case)
    for i in range(3):
        alone = case._replace(q=case.q[:, i : i + 1], kv_lens=case.kv_lens - (2 - i))
        np.testing.assert_allclose(result.out[:, i], decode(alone).out[:, 0], rtol=1e-6)


def test_a_token_hidden_by_the_mask_cannot_spoil_a_query() -> None:
    case = make_case([5], q_len=2, page_size=8)
    case.kv_cache[case.block_table[0, 0], 4] = np.nan
    out = mla_decode(*case).out
    assert np.all(np.isfinite(out[0, 0])) and np.all(np.isnan(out[0, 1]))


def test_lengths_are_clamped_to_the_table() -> None:
    case = make_case([32, 16], page_size=16)
    table = case.block_table[:, :2].copy()
    table[1, 1] = table[0, 1]
    exact = decode(case._replace(block_table=table, kv_lens=np.array([32, 0], np.int32)))
    for wild in ([2**31 - 1, -7], [33, -(2**31)]):
        lengths = np.array(wild, np.int32)
        clamped = decode(case._replace(block_table=table, kv_lens=lengths))
        np.testing.assert_array_equal(clamped.out, exact.out)
        np.testing.assert_array_equal(clamped.lse, exact.lse)


@pytest.mark.parametrize("page", [-1, 2147480000, 5])
def test_a_page_that_does_not_exist_reads_as_zeros(page: int) -> None:
    case = make_case([40], page_size=16)
    assert len(case.kv_cache) == 5
    zeros = case.kv_cache.copy()
    zeros[case.block_table[0, 1]] = 0
    table = case.block_table.copy()
    table[0, 1] = page
    result = decode(case._replace(block_table=table))
    expected = decode(case._replace(kv_cache=zeros))
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)


def test_strides_and_a_missing_head_axis_change_nothing() -> None:
    case = make_case([40, 17], q_len=2, page_size=16)
    expected = decode(case)
    pages, page_size, _, _ = case.kv_cache.shape
    padded = np.full((pages, page_size + 3, 640), np.nan, BF16)[:, :page_size, :576]
    padded[:] = case.kv_cache[:, :, 0]
    q = np.repeat(case.q, 2, axis=1)[:, ::2]
    table = np.repeat(case.block_table, 2, axis=1)[:, ::2]
    lengths = np.repeat(case.kv_lens, 2)[::2]
    assert not any(array.flags.c_contiguous for array in (padded, q, table, lengths))
    result = decode(Case(q, padded, table, lengths))
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)


def test_page_size_and_page_order_change_nothing() -> None:
    lengths = [70, 33, 1]
    case = make_case(lengths, page_size=64)
    expected = decode(case)
    for page_size in (1, 7, 16):
        other = make_case(lengths, page_size=page_size, seed=page_size)._replace(q=case.q)
        for b, n in enumerate(lengths):
            for t in range(n):
                row = case.kv_cache[case.block_table[b, t // 64], t % 64]
                other.kv_cache[other.block_table[b, t // page_size], t % page_size] = row
        np.testing.assert_allclose(decode(other).out, expected.out, rtol=1e-6)


def test_scores_far_beyond_the_range_of_exp() -> None:
    case = make_case([64], scale=20.0)
    result = decode(case, softmax_scale=10.0)
    assert np.all(np.isfinite(result.out)) and np.all(result.lse > 1000)


def test_writes_into_the_arrays_given() -> None:
    case = make_case([20, 5], q_len=2)
    fresh = mla_decode(*case)
    for dtype in (BF16, np.dtype(np.float32)):
        out = np.full((2, 2, 4, 1024), np.nan, dtype)[..., ::2]
        lse = np.full((2, 2, 4), np.nan, np.float32)
        result = mla_decode(*case, out=out, lse=lse)
        assert result.out is out and result.lse is lse
        np.testing.assert_array_equal(out.astype(BF16), fresh.out)
        np.testing.assert_array_equal(lse, fresh.lse)


def test_a_call_without_requests_and_a_cache_without_pages() -> None:
    case = make_case([20, 5])
    nobody = Case(case.q[:0], case.kv_cache, case.block_table[:0], case.kv_lens[:0])
    assert [array.shape for array in mla_decode(*nobody)] == [(0, 1, 4, 512), (0, 1, 4)]
    out, lse = mla_decode(*case._replace(kv_cache=case.kv_cache[:0]))
    assert not out.any()  # pages of zeros
    np.testing.assert_allclose(lse[:, 0], np.log([[20] * 4, [5] * 4]), rtol=1e-6)


def test_arrays_of_different_batches() -> None:
    case = make_case([20, 5])
    for other in ({"q": case.q[:1]}, {"kv_lens": case.kv_lens[:1]}):
        with pytest.raises(ValueError, match="zip"):
            mla_decode(*case._replace(**other))
