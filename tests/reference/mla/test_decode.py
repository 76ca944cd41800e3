# SPDX-License-Identifier: Apache-2.0
"""The reference against plain loops, the corners of its contract, and the tolerances' two sides."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from cumla.reference import MLADecodeResult, mla_decode
from tests.mla.tolerance import assert_close_lse, assert_close_out, rms_of_visible_values

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)


class Case(NamedTuple):
    """The arguments of one call."""

    q: Array
    kv_cache: Array
    block_table: Array
    cache_seqlens: Array


def make_case(
    lengths: list[int],
    *,
    q_len: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    page_size: int = 16,
    dtype: DTypeLike = BF16,
    scale: float = 0.1,
    outliers: bool = False,
    seed: int = 0,
) -> Case:
    """Random queries and a cache of shuffled pages in which everything unused is poison."""
    rng = np.random.default_rng(seed)

    def row() -> Array:
        values = scale * rng.standard_normal((kv_heads, 576))
        if outliers:
            values = np.where(rng.random(values.shape) < 1e-3, 1e4 * np.sign(values), values)
        return values.astype(dtype)

    pages = [-(-n // page_size) for n in lengths]
    cache = np.full((sum(pages) + 2, page_size, kv_heads, 576), np.nan, dtype)
    table = np.full((len(lengths), max(pages) + 1), 2147480000, np.int32)
    free = rng.permutation(len(cache))
    for b, (used, n) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :used], free = free[:used], free[used:]
        for t in range(n):
            cache[table[b, t // page_size], t % page_size] = row()
    q = scale * rng.standard_normal((len(lengths), q_len, heads, 576))
    if outliers:  # a token with an outlier takes all of the weight or none, see tests.mla.tolerance
        q += 0.5 * np.sign(q)
    q = q.astype(dtype)
    return Case(q, cache, table, np.array(lengths, np.int32))


def by_plain_loops(case: Case, softmax_scale: float, causal: bool) -> tuple[Array, Array]:
    """The formula once more, in Python floats, one token at a time."""
    batch, q_len, heads, _ = case.q.shape
    _, page_size, kv_heads, _ = case.kv_cache.shape
    out = np.zeros((batch, q_len, heads, 512))
    lse = np.full((batch, heads, q_len), math.inf)
    for b, i, h in np.ndindex(batch, q_len, heads):
        query = [float(x) for x in case.q[b, i, h]]
        numerator, denominator = [0.0] * 512, 0.0
        for t in range(int(case.cache_seqlens[b])):
            if causal and t > int(case.cache_seqlens[b]) - q_len + i:
                break
            page = int(case.block_table[b, t // page_size])
            row = [float(x) for x in case.kv_cache[page, t % page_size, h * kv_heads // heads]]
            weight = math.exp(softmax_scale * sum(x * y for x, y in zip(query, row, strict=True)))
            numerator = [n + weight * v for n, v in zip(numerator, row, strict=False)]
            denominator += weight
        if denominator:
            out[b, i, h] = [n / denominator for n in numerator]
            lse[b, h, i] = math.log(denominator)
    return out, lse


def float32_out(case: Case) -> Array:
    """An output array that does not round to 16 bits."""
    return np.empty((*case.q.shape[:3], 512), np.float32)


def decode(case: Case, **options: Any) -> MLADecodeResult:
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
    assert isinstance(result, MLADecodeResult)
    assert (result.out.shape, result.out.dtype) == ((2, 2, 4, 512), BF16)
    assert (result.lse.shape, result.lse.dtype) == ((2, 4, 2), np.dtype(np.float32))
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
        assert np.all(np.isposinf(result.lse[b, :, :hidden]))
        assert np.all(np.isfinite(result.lse[b, :, hidden:]))
        assert np.all(np.any(result.out[b, hidden:], axis=-1))


def test_causal_is_aligned_with_the_end() -> None:
    case = make_case([40], q_len=3)
    result = decode(case)
    for i in range(3):
        alone = case._replace(q=case.q[:, i : i + 1], cache_seqlens=case.cache_seqlens - (2 - i))
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
    exact = decode(case._replace(block_table=table, cache_seqlens=np.array([32, 0], np.int32)))
    wild = np.array([2**31 - 1, -7], np.int32)
    clamped = decode(case._replace(block_table=table, cache_seqlens=wild))
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
    lengths = np.repeat(case.cache_seqlens, 2)[::2]
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
        lse = np.full((2, 4, 2), np.nan, np.float32)
        result = mla_decode(*case, out=out, lse=lse)
        assert result.out is out and result.lse is lse
        np.testing.assert_array_equal(out.astype(BF16), fresh.out)
        np.testing.assert_array_equal(lse, fresh.lse)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"q: needs shape .*576\), got \(2, 2, 4, 512\)", {"q": (2, 2, 4, 512)}),
        (ValueError, r"kv_cache: needs shape .* got \(3, 16, 1, 512\)", {"kv": (3, 16, 1, 512)}),
        (ValueError, r"num_kv_heads must divide q's 4 heads, got 3", {"kv": (3, 16, 3, 576)}),
        (ValueError, r"block_table: needs shape \(2, max_pages\), got \(3, 1\)", {"table": (3, 1)}),
        (ValueError, r"cache_seqlens: needs shape \(2,\), got \(2, 1\)", {"lengths": (2, 1)}),
        (ValueError, r"out: needs shape \(2, 2, 4, 512\), got \(2, 8\)", {"out": (2, 8)}),
        (ValueError, r"lse: needs shape \(2, 4, 2\), got \(2, 2, 4\)", {"lse": (2, 2, 4)}),
        (TypeError, r"out: needs dtype bfloat16 or float32, got float64", {"out_dtype": "f8"}),
        (TypeError, r"lse: needs dtype float32, got float64", {"lse_dtype": "f8"}),
        (ValueError, r"accumulate: needs 'float64' or 'float32', got 'f2'", {"accumulate": "f2"}),
    ],
)
def test_refuses(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=message + r".*; \w+"):  # and the way out
        mla_decode(
            np.zeros(change.get("q", (2, 2, 4, 576)), BF16),
            np.zeros(change.get("kv", (3, 16, 1, 576)), BF16),
            np.zeros(change.get("table", (2, 1)), np.int32),
            np.zeros(change.get("lengths", (2,)), np.int32),
            out=np.zeros(change.get("out", (2, 2, 4, 512)), change.get("out_dtype", BF16)),
            lse=np.zeros(change.get("lse", (2, 4, 2)), change.get("lse_dtype", np.float32)),
            accumulate=change.get("accumulate", "float64"),
        )


@pytest.mark.parametrize(
    ("place", "name", "dtype", "needed"),
    [
        (0, "q", "int16", "bfloat16, float16, float32, float64"),
        (0, "q", "complex64", "bfloat16, float16, float32, float64"),
        (1, "kv_cache", "bool", "bfloat16, float16, float32, float64, float8_e4m3fn, uint8"),
        (2, "block_table", "float32", "int32, int64"),
        (2, "block_table", "uint8", "int32, int64"),
        (3, "cache_seqlens", "float64", "int32, int64"),
    ],
)
def test_refuses_dtypes(place: int, name: str, dtype: str, needed: str) -> None:
    arguments = list(make_case([20, 5]))
    arguments[place] = arguments[place].astype(dtype)
    message = f"^{name}: needs one of {needed}, got {dtype}; convert it first$"
    with pytest.raises(TypeError, match=message):
        mla_decode(*arguments)


@pytest.mark.parametrize("place", range(4))
def test_refuses_what_is_no_array_of_numpy(place: int) -> None:
    arguments: list[Any] = list(make_case([20, 5]))
    name = ("q", "kv_cache", "block_table", "cache_seqlens")[place]
    arguments[place] = arguments[place].tolist()
    with pytest.raises(TypeError, match=rf"^{name}: needs a NumPy array, got builtins\.list; "):
        mla_decode(*arguments)


# ------------------------------------------------------------------ the tolerances


def emulate_kernel(case: Case, *, skip: tuple[int, int] | None = None) -> tuple[Array, Array]:
    """The kernel's arithmetic for one query and one KV head: pages of 64 tokens, a running maximum,
    float32 scores and sums, probabilities and output rounded to q's dtype.

    ``skip`` names a token that one head (-1: every head) of every request leaves out.
    """
    batch, _, heads, _ = case.q.shape
    dtype, page_size = case.q.dtype, case.kv_cache.shape[1]
    out = np.zeros((batch, 1, heads, 512), np.float32)
    lse = np.full((batch, heads, 1), np.inf, np.float32)
    log2_scale = np.float32(576**-0.5 * math.log2(math.e))
    for b, kv_len in enumerate(case.cache_seqlens):
        top = np.full((heads, 1), -np.inf, np.float32)
        total, accumulator = np.zeros((heads, 1), np.float32), np.zeros((heads, 512), np.float32)
        for start in range(0, int(kv_len), page_size):
            page = case.kv_cache[case.block_table[b, start // page_size], :, 0]
            rows = page[: int(kv_len) - start].astype(np.float32)
            scores = log2_scale * (case.q[b, 0].astype(np.float32) @ rows.T)
            if skip and start <= skip[1] < start + len(rows):
                scores[skip[0] if skip[0] >= 0 else slice(None), skip[1] - start] = -np.inf
            new_top = np.maximum(top, scores.max(axis=1, keepdims=True))
            base = np.where(np.isneginf(new_top), np.float32(0), new_top)
            shrink, weights = np.exp2(top - base), np.exp2(scores - base)
            total = shrink * total + weights.sum(axis=1, keepdims=True)
            rounded = weights.astype(dtype).astype(np.float32)
            accumulator = shrink * accumulator + rounded @ rows[:, :512]
            top = new_top
        seen = total[:, 0] > 0
        out[b, 0, seen] = accumulator[seen] / total[seen]
        lse[b, seen, 0] = (top[seen, 0] + np.log2(total[seen, 0])) * np.float32(math.log(2))
    return out.astype(dtype), lse


INPUTS = [
    pytest.param({"scale": 0.1}, "normal", id="normal-0.1"),
    pytest.param({"scale": 1.0}, "normal", id="normal-1"),
    pytest.param({"scale": 0.1, "dtype": FP16}, "normal", id="fp16"),
    pytest.param({"scale": 1.0, "outliers": True}, "outlier", id="outliers"),
]


def check(got: tuple[Array, Array], case: Case, kind: Literal["normal", "outlier"]) -> None:
    """Hold a result against the reference by the tolerances."""
    reference = decode(case)
    rms = rms_of_visible_values(case.kv_cache, case.block_table, case.cache_seqlens)
    assert_close_out(got[0], reference.out, visible_v_rms=rms, kind=kind)
    assert_close_lse(got[1], reference.lse)


@pytest.mark.parametrize(("inputs", "kind"), INPUTS)
@pytest.mark.parametrize("kv_len", [0, 1, 2, 20, 63, 64, 65, 140, 1024, 4096])
def test_tolerances_admit_the_kernels_arithmetic(
    kv_len: int, inputs: dict[str, Any], kind: Literal["normal", "outlier"]
) -> None:
    case = make_case([kv_len, kv_len // 2], heads=16, page_size=64, seed=kv_len, **inputs)
    check(emulate_kernel(case), case, kind)


# Between normal(0, 1) rows the output leans towards q, for K and V are one row, and is no longer
# the small remainder of a random walk: among 16384 tokens an average one moves it by 1.4e-3 only.
DROPS = [
    pytest.param(kv_len, *inputs.values, id=f"{inputs.id}-{kv_len}")
    for inputs in INPUTS
    for kv_len in (1, 2, 20, 64, 140, 1024, 4096, 16384)
    if not (inputs.id == "normal-1" and kv_len > 4096)
]


@pytest.mark.parametrize("head", [-1, 7])
@pytest.mark.parametrize(("kv_len", "inputs", "kind"), DROPS)
def test_tolerances_notice_one_dropped_token(
    kv_len: int, head: int, inputs: dict[str, Any], kind: Literal["normal", "outlier"]
) -> None:
    case = make_case([kv_len], heads=16, page_size=64, seed=kv_len, **inputs)
    token = token_to_drop(case, head, kind)
    with pytest.raises(AssertionError, match=r"^out: |^lse: "):
        check(emulate_kernel(case, skip=(head, token)), case, kind)


def token_to_drop(case: Case, head: int, kind: Literal["normal", "outlier"]) -> int:
    """A token of average weight for the head; the heaviest one where the others weigh nothing."""
    kv_len = int(case.cache_seqlens[0])
    pages = case.block_table[0, : -(-kv_len // case.kv_cache.shape[1])]
    keys = case.kv_cache[pages].reshape(-1, 576)[:kv_len].astype(np.float64)
    scores = 576**-0.5 * (keys @ case.q[0, 0, head].astype(np.float64))
    if kind == "outlier":
        return int(scores.argmax())
    weights = np.exp(scores - scores.max())
    return int(np.abs(weights - weights.mean()).argmin())


def test_out_checker_bounds() -> None:
    rng = np.random.default_rng(0)
    ref = 0.1 * rng.standard_normal((3, 2, 512))
    figures = assert_close_out(ref, ref)
    assert figures == {"max_abs": 0.0, "element": 0.0, "cos": 0.0, "row": 0.0}

    one_element = ref.copy()
    one_element[1, 0, 5] += 8.1e-4 if abs(ref[1, 0, 5]) < 0.05 else 0.0163 * ref[1, 0, 5]
    with pytest.raises(AssertionError, match=r"1 of 3072 elements off, worst at \(1, 0, 5\)"):
        assert_close_out(one_element, ref)
    assert assert_close_out(one_element, ref, visible_v_rms=1.0)["element"] < 0.5
    assert_close_out(one_element, ref, kind="outlier")

    with pytest.raises(AssertionError, match=r"1 of 6 rows off, worst at \(2, 1\)"):
        one_row = ref.copy()
        one_row[2, 1] *= 1.005
        assert_close_out(one_row, ref)
    with pytest.raises(AssertionError, match="cosine difference above"):
        assert_close_out(ref * 1.0035, ref)
    with pytest.raises(AssertionError, match="6 of 6 rows off"):
        assert_close_out(np.full_like(ref, 1e-9), np.zeros_like(ref))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_checkers_want_special_values_in_the_same_places(value: float) -> None:
    ref = np.ones((2, 512))
    spoilt = ref.copy()
    spoilt[1, 3] = value
    for check_close in (assert_close_out, assert_close_lse):
        check_close(spoilt, spoilt)
        for got, expected in ((spoilt, ref), (ref, spoilt), (-spoilt, spoilt)):
            with pytest.raises(AssertionError):
                check_close(got, expected)
        with pytest.raises(AssertionError, match="shape"):
            check_close(ref, ref[:1])


def test_lse_checker_bounds() -> None:
    ref = np.array([[0.0, 1.0, 5.0]])
    assert assert_close_lse(ref * (1 + 1.2e-4), ref)["element"] < 1.0
    with pytest.raises(AssertionError, match=r"2 of 3 elements off, worst at \(0, 1\)|at \(0, 2\)"):
        assert_close_lse(ref * (1 + 1.3e-4), ref)
    with pytest.raises(AssertionError, match=r"1 of 3 elements off, worst at \(0, 0\)"):
        assert_close_lse(ref + np.array([[2e-6, 0.0, 0.0]]), ref)
