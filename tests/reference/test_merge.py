# SPDX-License-Identifier: Apache-2.0
"""Merging against attention over all keys at once, and the corners of its contract."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from cumla.reference import AttentionState, merge_attention_states, mla_decode
from tests.merge_tolerance import assert_merged

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)


def attend(q: Array, k: Array, v: Array, base: float) -> tuple[Array, Array]:
    """Plain attention of q (tokens, heads, d) over k (keys, d) and v (keys, head_dim)."""
    tokens, heads, _ = q.shape
    out, lse = np.zeros((tokens, heads, v.shape[1])), np.full((tokens, heads), -np.inf)
    for t, h in np.ndindex(tokens, heads):
        weights = [math.exp(float(q[t, h] @ key)) for key in k]
        if weights:
            out[t, h] = sum(w * row for w, row in zip(weights, v, strict=True)) / sum(weights)
            lse[t, h] = math.log(sum(weights), base)
    return out, lse


@pytest.mark.parametrize("base", [math.e, 2])
@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 17], [0, 0, 4, 20, 20], list(range(21))])
def test_parts_merge_into_the_whole(cuts: list[int], base: float) -> None:
    rng = np.random.default_rng(len(cuts))
    q, k, v = (rng.standard_normal(shape) for shape in ((3, 5, 16), (20, 16), (20, 24)))
    bounds = [0, *cuts, len(k)]
    parts = [
        attend(q, k[begin:end], v[begin:end], base) for begin, end in itertools.pairwise(bounds)
    ]
    merged = merge_attention_states(*zip(*parts, strict=True), lse_base=base)
    expected = attend(q, k, v, base)
    np.testing.assert_allclose(merged.out, expected[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(merged.lse, expected[1], rtol=1e-6)
    assert (merged.out.dtype, merged.lse.dtype) == (np.dtype("f8"), np.dtype("f4"))


def test_merges_what_mla_decode_returns() -> None:
    """The last pages of a cache apart from the others, with a batch and without."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 4, 576)).astype(np.float32)
    cache = rng.standard_normal((6, 8, 576)).astype(np.float32)
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    options = {"causal": False, "softmax_scale": 0.05}
    whole = mla_decode(q, cache, table, np.array([24, 13], np.int32), **options)
    first = mla_decode(q, cache, table[:, :1], np.array([8, 8], np.int32), **options)
    rest = mla_decode(q, cache, table[:, 1:], np.array([16, 5], np.int32), **options)
    merged = merge_attention_states((first.out, rest.out), (first.lse, rest.lse))
    np.testing.assert_allclose(merged.out, whole.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-6)
    flat = merge_attention_states(
        [x.out.reshape(6, 4, 512) for x in (first, rest)],
        [x.lse.reshape(6, 4) for x in (first, rest)],
    )
    np.testing.assert_array_equal(flat.out, merged.out.reshape(6, 4, 512))
    np.testing.assert_array_equal(flat.lse, merged.lse.reshape(6, 4))


# ------------------------------------------------------------------ corners of the contract


def states(count: int = 3, dtype: DTypeLike = np.float32) -> tuple[Array, Array]:
    """Stacked partial results of 4 tokens and 2 heads."""
    rng = np.random.default_rng(count)
    outs = rng.standard_normal((count, 4, 2, 8)).astype(dtype)
    return outs, rng.standard_normal((count, 4, 2)).astype(np.float32)


@pytest.mark.parametrize("nothing", [np.inf, -np.inf])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_infinite_lse_of_either_sign_has_no_weight(nothing: float, poison: float) -> None:
    outs, lses = states()
    lses[1, 0], lses[0, 1, 1], lses[:2, 2] = nothing, nothing, nothing
    outs[np.isinf(lses)] = poison
    merged = merge_attention_states(outs, lses)
    for t, h in np.ndindex(4, 2):
        used = [i for i in range(3) if np.isfinite(lses[i, t, h])]
        alone = merge_attention_states(
            outs[used, t : t + 1, h : h + 1], lses[used, t, h][:, None, None]
        )
        np.testing.assert_array_equal(merged.out[t, h], alone.out[0, 0])
        np.testing.assert_array_equal(merged.lse[t, h], alone.lse[0, 0])


def test_nothing_anywhere() -> None:
    outs, lses = states()
    outs[:, 1], lses[:, 1], lses[0, 1] = np.nan, np.inf, -np.inf
    merged = merge_attention_states(outs, lses)
    assert np.all(merged.out[1] == 0) and np.all(np.isneginf(merged.lse[1]))
    assert np.all(np.isfinite(merged.lse[[0, 2, 3]]))


def test_nan_lse_stays_in_its_row() -> None:
    outs, lses = states()
    expected = merge_attention_states(outs, lses)
    lses[1, 2, 0] = np.nan
    merged = merge_attention_states(outs, lses)
    spoilt = np.zeros((4, 2), bool)
    spoilt[2, 0] = True
    assert np.all(np.isnan(merged.lse) == spoilt) and np.all(np.isnan(merged.out[2, 0]))
    np.testing.assert_array_equal(merged.out[~spoilt], expected.out[~spoilt])


def test_logarithms_far_beyond_the_range_of_exp() -> None:
    outs, lses = states()
    for shift in (3e4, -3e4):
        merged = merge_attention_states(outs, lses + np.float32(shift))
        np.testing.assert_allclose(merged.lse, merge_attention_states(outs, lses).lse + shift)
        np.testing.assert_allclose(merged.out, merge_attention_states(outs, lses).out, atol=2e-2)


def test_one_partial_result_comes_back() -> None:
    outs, lses = states(1, BF16)
    merged = merge_attention_states(outs, lses)
    np.testing.assert_array_equal(merged.out, outs[0])
    np.testing.assert_array_equal(merged.lse, lses[0])


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_rounds_once_into_the_dtype_of_out(dtype: np.dtype[Any]) -> None:
    outs, lses = states(5, dtype)
    exact = merge_attention_states(outs, lses, out=np.empty((4, 2, 8)))
    assert merge_attention_states(outs, lses).out.dtype == dtype
    for kind in (BF16, np.float16, np.float32):
        out = np.full((4, 2, 8), np.nan, kind)
        merged = merge_attention_states(outs, lses, out=out)
        assert merged.out is out
        np.testing.assert_array_equal(out, exact.out.astype(kind))


def test_in_place() -> None:
    outs, lses = states()
    expected = merge_attention_states(outs, lses)
    merged = merge_attention_states(outs, lses, out=outs[1], lse=lses[1])
    np.testing.assert_array_equal(outs[1], expected.out)
    np.testing.assert_array_equal(lses[1], expected.lse)
    assert isinstance(merged, AttentionState) and np.shares_memory(merged.out, outs)


def test_sequences_stacks_and_strides_agree() -> None:
    outs, lses = states()
    expected = merge_attention_states(outs, lses)
    wide = np.full((4, 2, 3, 16), np.nan, np.float32)
    wide[..., :8] = np.moveaxis(outs, 0, 2)
    strided = np.moveaxis(wide[..., :8], 2, 0)
    backwards = np.ascontiguousarray(lses.transpose(2, 1, 0)).transpose(2, 1, 0)
    for some_outs in (list(outs), tuple(strided), strided):
        for some_lses in (list(lses), backwards, tuple(backwards)):
            merged = merge_attention_states(some_outs, some_lses)
            np.testing.assert_array_equal(merged.out, expected.out)
            np.testing.assert_array_equal(merged.lse, expected.lse)


# ------------------------------------------------------------------ the tolerance


def emulate_kernel(outs: Array, lses: Array, dtype: Any) -> tuple[Array, Array]:
    """The kernel's arithmetic: two partial results at a time, a running maximum, float32."""
    top = np.full(lses.shape[1:], -np.inf, np.float32)
    total, merged = np.zeros(top.shape, np.float32), np.zeros(outs.shape[1:], np.float32)
    log2_e = np.float32(math.log2(math.e))
    for first in range(0, len(outs), 2):
        some = lses[first : first + 2]
        following = np.maximum(top, some.max(axis=0))
        factor = np.exp2((top - following) * log2_e)
        total, merged, top = total * factor, merged * factor[..., None], following
        for out, lse in zip(outs[first : first + 2], some, strict=True):
            weight = np.exp2((lse - top) * log2_e)
            total += weight
            merged += weight[..., None] * out.astype(np.float32)
    lse = top + np.log2(total) * np.float32(math.log(2))
    return (merged / total[..., None]).astype(dtype), lse


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize("count", [1, 2, 9, 60])
def test_the_tolerance_passes_the_kernels_arithmetic(count: int, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(count)
    outs = rng.standard_normal((count, 20, 4, 64)).astype(dtype)
    lses = (3 * rng.standard_normal((count, 20, 4))).astype(np.float32)
    merged = emulate_kernel(outs, lses, dtype)
    figures = assert_merged(*merged, outs, lses, lse_base=math.e)
    assert figures["element"] > 0.05 or count == 1
    for dropped in {0, count // 2, count - 1} if count > 1 else ():
        rest = [i for i in range(count) if i != dropped]
        out, lse = emulate_kernel(outs[rest], lses[rest], dtype)
        with pytest.raises(AssertionError, match="shares of their tolerances"):
            assert_merged(out, merged[1], outs, lses, lse_base=math.e)
        with pytest.raises(AssertionError, match="shares of their tolerances"):
            assert_merged(merged[0], lse, outs, lses, lse_base=math.e)
