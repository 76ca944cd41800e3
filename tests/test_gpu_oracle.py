# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests rest on, tried on the CPU: cases, poisoned inputs, the oracle, the checks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from cumla import reference
from tests import tolerance
from tests.gpu import oracle, variants
from tests.gpu.cases import (
    FACTORS,
    MAX_TOKENS,
    TRIPLES,
    Case,
    allowed,
    covered_by,
    covering_sample,
    requirements,
)
from tests.gpu.problem import (
    GARBAGE,
    GUARD,
    NUMPY_DTYPES,
    PAGE_SIZE,
    POOL,
    Guarded,
    Problem,
    make_problem,
    normal_bits,
)

# --- the sample ----------------------------------------------------------------------------------


def test_the_sample_covers_every_pair_and_the_named_triples() -> None:
    covered = set()
    for case in covering_sample():
        covered.update(covered_by(vars(case)))
    required = requirements()
    assert required <= covered
    left_out = {pair for pair in _all_pairs() if pair not in required}
    reasons = {tuple(name for name, _ in pair) for pair in left_out}
    # heads that kv heads do not divide; one kv head has nothing to lay first
    assert reasons <= {("heads", "kv_heads"), ("heads", "cache"), ("kv_heads", "cache")}, reasons


def _all_pairs() -> set[tuple[tuple[str, object], ...]]:
    return {
        ((name, value), (other, another))
        for name, other in itertools.combinations(FACTORS, 2)
        for value in FACTORS[name]
        for another in FACTORS[other]
    }


def test_the_sample_is_always_the_same_and_of_a_size_to_run() -> None:
    sample = covering_sample()
    assert sample == covering_sample()
    assert 150 <= len(sample) <= 250
    assert len({case.name for case in sample}) == len(sample)
    assert len(TRIPLES) == 4
    for case in sample:
        assert allowed(vars(case)), case
        assert case.batch * case.kv_len * case.kv_heads <= MAX_TOKENS
    assert sum(case.batch * case.kv_len * case.kv_heads for case in sample) < 20 * MAX_TOKENS


# --- the oracle ----------------------------------------------------------------------------------

SMALL = [
    case
    for case in covering_sample()
    if case.kv_len * case.kv_heads * case.batch <= 2500
    and case.batch * case.q_len * case.heads * case.kv_len <= 20_000
]


def by_reference(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Results in float32 of the reference, which reads the strided, poisoned arrays."""
    out = np.empty(problem.out_shape, np.float32)
    result = reference.mla_decode(
        *problem.arrays,
        softmax_scale=problem.softmax_scale,
        causal=problem.case.causal,
        out=out,
    )
    return result.out, result.lse


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_oracle_agrees_with_the_reference(case: Case) -> None:
    problem = make_problem(np, case)
    expected = problem.expected()
    out, lse = by_reference(problem)
    np.testing.assert_allclose(expected.out, out, rtol=1e-6, atol=1e-6 * max(expected.v_rms, 1e-3))
    np.testing.assert_allclose(expected.lse, lse, rtol=1e-6, atol=1e-6)
    dense = problem.kv_bits.view(NUMPY_DTYPES[case.dtype]).astype(np.float32)
    rms = tolerance.rms_of_visible_values(dense, problem.table, problem.lengths)
    assert expected.v_rms == pytest.approx(rms, rel=1e-5)


def test_there_are_enough_small_cases() -> None:
    assert len(SMALL) >= 50
    for name in ("q_len", "kv_heads", "dtype", "inputs", "cache", "query", "table", "causal"):
        assert {getattr(case, name) for case in SMALL} == set(FACTORS[name]), name


def test_groups_that_do_not_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(np, Case(batch=5, kv_len=70, ragged=False, heads=3, q_len=2))
    whole = problem.expected()
    monkeypatch.setattr(oracle, "CHUNK_BYTES", 1)
    pieces = problem.expected()
    np.testing.assert_allclose(pieces.out, whole.out, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(pieces.lse, whole.lse, rtol=1e-12)


# --- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_normal_numbers(dtype: str) -> None:
    bits = normal_bits(np, (POOL + 1000,), dtype, 0.1, 123)
    values = oracle.widen(np, bits, dtype)
    assert abs(values.mean()) < 1e-3
    assert values.std() == pytest.approx(0.1, rel=1e-2)
    assert (bits[:1000] == bits[POOL:]).all()
    np.testing.assert_array_equal(values, bits.view(NUMPY_DTYPES[dtype]).astype(np.float64))


@pytest.mark.parametrize("cache", FACTORS["cache"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_everything_out_of_use_is_poison(cache: str, dtype: str) -> None:
    kv_heads = 2 if cache == "heads first" else 1
    case = Case(batch=3, heads=4, kv_heads=kv_heads, cache=cache, dtype=dtype, query="padded")
    lengths = np.array([70, 0, 128])
    problem = make_problem(np, case, lengths)
    values = oracle.widen(np, problem.kv_bits, dtype)
    used = np.zeros(values.shape[:2], dtype=bool)
    for b, length in enumerate(lengths):
        for token in range(length):
            used[problem.table[b, token // PAGE_SIZE], token % PAGE_SIZE] = True
    assert used.sum() == lengths.sum()
    assert np.isfinite(values[used]).all()
    slots = np.broadcast_to(np.arange(PAGE_SIZE), used.shape)
    assert np.isnan(values[~used & (slots % 2 == 0)]).all()
    assert np.isposinf(values[~used & (slots % 2 == 1)]).all()
    unused_entries = [problem.table[0, 2:], problem.table[1], problem.table[2, 2:]]
    assert set(np.concatenate(unused_entries).tolist()) == set(GARBAGE)
    assert np.isfinite(oracle.widen(np, problem.q_bits, dtype)).all()
    for array in problem.arrays[:2]:
        assert all(stride % 16 == 0 for stride in array.strides[:-1])
        assert array.ctypes.data % 16 == 0


def test_guards_notice_a_write_on_either_side() -> None:
    for index in (GUARD - 1, -GUARD):
        guarded = Guarded(np, (2, 3), "float32")
        assert np.isnan(guarded.array).all()
        guarded.check_guards()
        guarded.base[index] = 0
        with pytest.raises(AssertionError, match="guard band"):
            guarded.check_guards()


# --- the checks ----------------------------------------------------------------------------------

RNG = np.random.default_rng(5)
OUT = RNG.normal(0, 0.1, (3, 2, 4, 512))
LSE = RNG.normal(5, 1, (3, 4, 2))


def _changed(array: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize("rms", [0.1, 1.0])
@pytest.mark.parametrize("kind", ["normal", "outlier"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out,
        lambda out: out.astype(ml_dtypes.bfloat16).astype(np.float64),
        lambda out: _changed(out, (1, 1, 2, 77), out[1, 1, 2, 77] + 0.002),
        lambda out: out * 1.003,
        lambda out: out * 1.005,
        lambda out: _changed(out, (0, 0, 0), 0.0),
        lambda out: _changed(out, (2, 1, 3, 511), np.nan),
        lambda out: _changed(out, (2, 1, 3, 511), np.inf),
    ],
)
def test_the_check_of_out_judges_as_that_of_the_cpu_tests(
    spoil: Callable[[np.ndarray], np.ndarray], kind: str, rms: float
) -> None:
    got = spoil(OUT)

    def judge(check: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        try:
            return check()
        except AssertionError:
            return None

    ours = judge(lambda: oracle.check_out(np, got, OUT, v_rms=rms, outliers=kind == "outlier"))
    theirs = judge(
        lambda: tolerance.assert_close_out(got, OUT, visible_v_rms=rms, kind=kind)  # type: ignore[arg-type]
    )
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("index", "value", "passes"),
    [
        ((0, 0, 0), None, True),
        ((1, 2, 1), 1.0001, True),
        ((1, 2, 1), 1.001, False),
        ((1, 2, 1), np.inf, False),
        ((1, 2, 1), np.nan, False),
    ],
)
def test_the_check_of_lse(index: tuple[int, ...], value: float | None, passes: bool) -> None:
    expected = _changed(LSE, (2, 0, 0), np.inf)
    got = expected if value is None else _changed(expected, index, expected[index] * value)
    if passes:
        ours = oracle.check_lse(np, got, expected)
        assert ours == pytest.approx(tolerance.assert_close_lse(got, expected))
    else:
        with pytest.raises(AssertionError, match=r"lse: .*\(1, 2, 1\)"):
            oracle.check_lse(np, got, expected)
    with pytest.raises(AssertionError, match=r"lse: .*\(2, 0, 0\)"):
        oracle.check_lse(np, _changed(expected, (2, 0, 0), -np.inf), expected)


def test_an_output_that_should_be_zero() -> None:
    zeros = np.zeros((1, 2, 1, 512))
    oracle.check_out(np, zeros, zeros, v_rms=0.1, outliers=False)
    with pytest.raises(AssertionError, match=r"rows off, worst at \(0, 1, 0\)"):
        oracle.check_out(np, _changed(zeros, (0, 1, 0, 3), 1e-6), zeros, v_rms=0.1, outliers=False)


@pytest.mark.parametrize("fault", ["dropped token", "another page", "no mask", "other kv head"])
def test_a_fault_is_noticed(fault: str) -> None:
    """Each through the whole harness, on results of the reference for wrong inputs."""
    case = Case(batch=2, q_len=2, heads=4, kv_heads=2, kv_len=500, ragged=False)
    problem = make_problem(np, case)
    wrong = dataclasses.replace(problem)
    if fault == "dropped token":
        wrong.cache_seqlens = problem.cache_seqlens - np.array([0, 1], dtype=np.int32)
    elif fault == "another page":
        wrong.block_table = problem.table.copy()
        wrong.block_table[1, [2, 3]] = problem.table[0, [2, 3]]
    elif fault == "no mask":
        wrong.case = dataclasses.replace(case, causal=False)
    else:
        wrong.kv_cache = problem.kv_cache[:, :, ::-1]
    problem.check(*by_reference(problem))
    with pytest.raises(AssertionError):
        problem.check(*by_reference(wrong))


# --- kernels with a line changed -----------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [
        variants.DELAYS,
        (variants.MISSING_WAIT,),
        (variants.MISSING_TILE_WAIT,),
        (variants.UNWRITTEN_PARTIAL,),
    ],
    ids=["delays", "missing wait", "missing tile wait", "unwritten partial"],
)
def test_the_edits_of_the_kernels_still_apply(edits: tuple[variants.Edit, ...]) -> None:
    text = variants.edited_text(*edits)
    assert all(edit.new in text for edit in edits)


def test_an_edit_that_does_not_apply_says_so() -> None:
    edit = variants.Edit("mla_decode", "no such text", "")
    with pytest.raises(ValueError, match="mla_decode: 'no such text' occurs 0 times, not 1"):
        variants.edited_text(edit)
