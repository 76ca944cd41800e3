# SPDX-License-Identifier: Apache-2.0
"""The tolerances of tests.mla.tolerance admit the kernels' arithmetic, and nothing less."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import mla_decode
from tests.mla.tolerance import assert_close_lse, assert_close_out, rms_of_visible_values
from tests.reference.mla.problem import FP16, Case, float32_out, make_case

Array = NDArray[Any]


def emulate_kernel(case: Case, *, skip: tuple[int, int] | None = None) -> tuple[Array, Array]:
    """The kernel's arithmetic for one query and one KV head: pages of 64 tokens, a running maximum,
    float32 scores and sums, probabilities and output rounded to q's dtype.

    ``skip`` names a head of every request, and a token that it leaves out.
    """
    batch, _, heads, _ = case.q.shape
    dtype, page_size = case.q.dtype, case.kv_cache.shape[1]
    out = np.zeros((batch, 1, heads, 512), np.float32)
    lse = np.full((batch, 1, heads), -np.inf, np.float32)
    log2_scale = np.float32(576**-0.5 * math.log2(math.e))
    for b, kv_len in enumerate(case.kv_lens):
        top = np.full((heads, 1), -np.inf, np.float32)
        total, accumulator = np.zeros((heads, 1), np.float32), np.zeros((heads, 512), np.float32)
        for start in range(0, int(kv_len), page_size):
            page = case.kv_cache[case.block_table[b, start // page_size], :, 0]
            rows = page[: int(kv_len) - start].astype(np.float32)
            scores = log2_scale * (case.q[b, 0].astype(np.float32) @ rows.T)
            if skip and start <= skip[1] < start + len(rows):
                scores[skip[0], skip[1] - start] = -np.inf
            new_top = np.maximum(top, scores.max(axis=1, keepdims=True))
            base = np.where(np.isneginf(new_top), np.float32(0), new_top)
            shrink, weights = np.exp2(top - base), np.exp2(scores - base)
            total = shrink * total + weights.sum(axis=1, keepdims=True)
            rounded = weights.astype(dtype).astype(np.float32)
            accumulator = shrink * accumulator + rounded @ rows[:, :512]
            top = new_top
        seen = total[:, 0] > 0
        out[b, 0, seen] = accumulator[seen] / total[seen]
        lse[b, 0, seen] = (top[seen, 0] + np.log2(total[seen, 0])) * np.float32(math.log(2))
    return out.astype(dtype), lse


INPUTS = [
    pytest.param({"scale": 0.1}, "normal", id="normal-0.1"),
    pytest.param({"scale": 1.0}, "normal", id="normal-1"),
    pytest.param({"scale": 0.1, "dtype": FP16}, "normal", id="fp16"),
    pytest.param({"scale": 1.0, "outliers": True}, "outlier", id="outliers"),
]


def check(got: tuple[Array, Array], case: Case, kind: Literal["normal", "outlier"]) -> None:
    """Hold a result against the reference by the tolerances."""
    reference = mla_decode(*case, out=float32_out(case))
    rms = rms_of_visible_values(case.kv_cache, case.block_table, case.kv_lens)
    assert_close_out(got[0], reference.out, visible_v_rms=rms, kind=kind)
    assert_close_lse(got[1], reference.lse)


@pytest.mark.parametrize(("inputs", "kind"), INPUTS)
@pytest.mark.parametrize("kv_len", [0, 1, 2, 20, 63, 64, 65, 140, 1024])
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
    for kv_len in (1, 2, 20, 64, 140, 1024, 16384)
    if kv_len <= 1024 or inputs.id == "normal-0.1"
]


@pytest.mark.parametrize(("kv_len", "inputs", "kind"), DROPS)
def test_tolerances_notice_one_dropped_token(
    kv_len: int, inputs: dict[str, Any], kind: Literal["normal", "outlier"]
) -> None:
    """One head of 16 leaves it out."""
    case = make_case([kv_len], heads=16, page_size=64, seed=kv_len, **inputs)
    token = token_to_drop(case, 7, kind)
    with pytest.raises(AssertionError, match=r"^out: |^lse: "):
        check(emulate_kernel(case, skip=(7, token)), case, kind)


def token_to_drop(case: Case, head: int, kind: Literal["normal", "outlier"]) -> int:
    """A token of average weight for the head; the heaviest one where the others weigh nothing."""
    kv_len = int(case.kv_lens[0])
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
