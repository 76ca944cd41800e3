# SPDX-License-Identifier: Apache-2.0
"""The GPU tests of FP8 caches on the CPU: their problems, and which results they tell apart."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from tests.gpu.tools import fp8_emulation as emulation
from tests.gpu.tools.emulation import Drop
from tests.gpu.tools.fp8_problem import (
    FACTORS,
    SPREADS,
    TRIPLES,
    Fp8Case,
    Fp8Problem,
    check_out,
    covering_sample,
    make_fp8,
)
from tests.gpu.tools.problem import VALUE_DIM
from tests.mla.fp8_arrays import FORMS
from tests.selection import some

CASE = Fp8Case(batch=3, q_len=3, heads=4, kv_heads=2, kv_len=97, ragged=True)
OPERATIONS = ("decode", "table", "list")
GROUPED = ("scales", "scales, e4m3 rope", "packed")


@pytest.mark.parametrize(("form", "operation"), some(itertools.product(FORMS, OPERATIONS), 2))
def test_problems_mean_what_their_reference_says(form: str, operation: str) -> None:
    """Laid out in every way, poison around them; through the public functions."""
    lengths = np.array([97, 0, 64])
    for number, (page_size, query_form) in enumerate(
        itertools.product((1, 16, 64), ("one", "slices"))
    ):
        case = Fp8Case(
            batch=3,
            q_len=3,
            heads=4,
            kv_heads=1 + number % 2,
            page_size=page_size,
            form=form,
            padded=number % 3 == 0,
            query_form=query_form,
            operation=operation,
            causal=number % 2 == 0,
            kv_scale=("number", "array")[number // 3],
            spread="steep",
            seed=number,
        )
        problem = make_fp8(np, case, lengths)
        out, lse = problem.outputs()
        problem.call(out=out.array, lse=lse.array)
        figures = problem.check(out.array, lse.array)
        assert figures["group"] < 2.5e-3
        assert figures["lse_element"] < 1e-2
        plan = problem.plan()
        result = plan.run(**problem.inputs)
        assert result.out.tobytes() == out.array.tobytes()


@pytest.mark.parametrize("form", GROUPED)
def test_scales_are_far_apart_and_no_powers_of_two(form: str) -> None:
    problem = make_fp8(np, Fp8Case(form=form, kv_len=1024, kv_heads=2))
    scales = problem.scales
    assert scales is not None
    mantissas = np.frexp(scales)[0]
    assert np.abs(mantissas - 0.5).min() > 0
    assert (scales != scales.astype(ml_dtypes.bfloat16).astype(np.float32)).mean() > 0.99
    by_group = np.median(scales, axis=0)
    assert (by_group.max(axis=-1) / by_group.min(axis=-1) > 1e5).all()
    by_token = scales.max(axis=(1, 2))
    assert by_token.max() / by_token.min() > 5e3
    assert np.isfinite(problem.expected().out).all()


def test_every_group_has_a_say_in_the_scores() -> None:
    """One that is left out of them shows in the log-sum-exp."""
    problem = make_fp8(np, Fp8Case(kv_len=514, spread="peaked"))
    expected = problem.expected()
    assert problem.scales is not None
    for group in range(4):
        other = make_fp8(np, problem.case)
        columns = slice(group * 128, (group + 1) * 128)
        other.q_bits = other.q_bits.copy()
        other.q_bits[..., columns] = 0
        with pytest.raises(AssertionError, match=r"^(out|lse): "):
            problem.check(*_rounded(other), expected)


def _rounded(problem: Fp8Problem) -> tuple[np.ndarray, np.ndarray]:
    expected = problem.expected()
    return expected.out.astype(ml_dtypes.bfloat16), expected.lse.astype(np.float32)


# --- honest arithmetic passes, and little else ----------------------------------------------------

HONEST = (
    Fp8Case(batch=5, q_len=17, kv_len=17, heads=48),  # rows that see from one token on
    Fp8Case(batch=5, q_len=7, kv_len=33, heads=64, kv_heads=2),
    Fp8Case(batch=3, q_len=16, kv_len=97, heads=48, spread="peaked"),
    Fp8Case(batch=3, q_len=3, kv_len=514, heads=16, spread="peaked", causal=False),
    Fp8Case(batch=3, q_len=1, kv_len=1024, heads=16, kv_heads=2),
    Fp8Case(batch=2, q_len=1, kv_len=5000, heads=4, spread="peaked"),
)


@pytest.mark.parametrize(  # each case and each form, of all pairs with --exhaustive
    ("number", "form"),
    some(
        itertools.product(
            range(len(HONEST)), ["one", "16-bit rope", "scales, e4m3 rope", "packed"]
        ),
        3,
    ),
)
def test_honest_arithmetic_passes(number: int, form: str) -> None:
    case = HONEST[number]
    problem = make_fp8(np, Fp8Case(**{**vars(case), "form": form, "seed": number}))
    figures = emulation.checked(problem)
    assert figures["row"] > 1e-4


def test_steep_scores_pass_under_one_scale() -> None:
    problem = make_fp8(np, Fp8Case(form="one", kv_len=514, spread="steep", heads=64))
    emulation.checked(problem)


@pytest.mark.parametrize("kv_len", [1, 17, 96, 514, 1024])
@pytest.mark.parametrize("form", ["one", "packed"])
def test_a_dropped_token_fails(form: str, kv_len: int) -> None:
    """The last or another one that weighs something, of one row among many."""
    case = Fp8Case(batch=2, q_len=2, kv_len=kv_len, heads=16, form=form, causal=False)
    problem = make_fp8(np, case)
    emulation.checked(problem)
    tokens = {0, kv_len // 2, kv_len - 1}
    if problem.scales is not None:
        heavy = problem.scales[problem.begins[1] :].max(axis=(1, 2))[:kv_len] > 1e-3
        tokens = {int(np.flatnonzero(heavy)[i]) for i in (0, heavy.sum() // 2, -1)}
    for token in tokens:
        with pytest.raises(AssertionError, match=r"^(out|lse): "):
            emulation.checked(problem, drop=Drop(request=1, query=1, head=7, token=token))


@pytest.mark.parametrize(
    "mistake", ["scales of 16 bits", "powers of two", "8-bit weights", "groups", "one for all"]
)
def test_what_loses_scales_fails(mistake: str) -> None:
    """Scales that are rounded, in another order or left out; weights of fewer bits."""

    def weigh(weights: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        assert scales is not None
        if mistake == "scales of 16 bits":
            coarse = scales.view(np.uint32) & np.uint32(0xFFF80000)  # four bits of the mantissa
            scales = coarse.view(np.float32)
        elif mistake == "powers of two":
            scales = np.exp2(np.round(np.log2(scales)))
        elif mistake == "8-bit weights":
            weights = weights.astype(ml_dtypes.float8_e5m2).astype(np.float32)
        elif mistake == "groups":
            scales = scales[:, [1, 0, 2, 3]]
        else:
            scales = np.repeat(scales.max(axis=1, keepdims=True), 4, axis=1)
        return emulation.rounded(weights, scales)

    problem = make_fp8(np, Fp8Case(kv_len=514))
    emulation.checked(problem)
    with pytest.raises(AssertionError, match=r"^out: "):
        emulation.checked(problem, weigh=weigh)


def test_a_group_that_underflows_fails() -> None:
    """The smallest ones are held against their own size: float16 would lose them."""

    def weigh(weights: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        assert scales is not None
        scaled = (weights / 128) * scales.T[:, None]
        values: np.ndarray = scaled.astype(np.float16).astype(np.float32)
        return values * np.float32(128)

    problem = make_fp8(np, Fp8Case(kv_len=514))
    with pytest.raises(AssertionError, match=r"^out: group above"):
        emulation.checked(problem, weigh=weigh)


# --- the sample -----------------------------------------------------------------------------------


def test_the_sample_covers_its_factors() -> None:
    cases = covering_sample()
    assert 60 < len(cases) < 200
    assert len({case.name for case in cases}) == len(cases)
    names = [name for name in FACTORS if name != "spread"]
    for a, b in itertools.combinations(names, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)
    for triple in TRIPLES:
        met = {tuple(getattr(case, name) for name in triple) for case in cases}
        assert len(met) == np.prod([len(FACTORS[name]) for name in triple]), triple
    assert {case.spread for case in cases} == set(SPREADS)
    assert all(case.heads % case.kv_heads == 0 for case in cases)
    assert sum(case.is_grouped and case.spread == "peaked" for case in cases) > 5


def test_figures_of_rows_and_groups() -> None:
    """Groups that are small beside others count; rows of zeros must be met exactly."""
    expected = np.ones((3, VALUE_DIM))
    expected[:, 128:256] = 1e-6
    expected[2] = 0
    got = expected.copy()
    got[1, 128:256] *= 1.004
    figures = check_out(np, got, expected)
    assert figures["group"] == pytest.approx(4e-3)
    assert figures["row"] < 1e-7
    got[1, 128:256] *= 1.004
    with pytest.raises(AssertionError, match=r"^out: group above"):
        check_out(np, got, expected)
    got = expected.copy()
    got[2, 5] = 1e-30
    with pytest.raises(AssertionError, match=r"^out: row above"):
        check_out(np, got, expected)
    got[2, 5] = np.nan
    with pytest.raises(AssertionError, match=r"^out: NaN"):
        check_out(np, got, expected)
