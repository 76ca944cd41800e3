# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests rest on, tried on the CPU: cases, poisoned inputs, the oracle, the checks."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from cumla import reference
from cumla.launch import module
from cumla.launch.mla.shape import VARIANTS
from cumla.launch.source import OPTIONS, KernelSpec
from tests.gpu.tools import emulation, oracle, variants
from tests.gpu.tools.cases import (
    FACTORS,
    MAX_TOKENS,
    SPLIT_CASES,
    Case,
    allowed,
    covered_by,
    covering_sample,
    requirements,
    sample_of_every_kernel,
)
from tests.gpu.tools.parts import parts_table
from tests.gpu.tools.problem import (
    GARBAGE,
    GUARD,
    HEAD_DIM,
    IN_QUERIES,
    NUMPY_DTYPES,
    OUTLIER,
    PAGE_SIZE,
    POOL,
    Guarded,
    Problem,
    make_problem,
    normal_bits,
)
from tests.mla import tolerance
from tests.selection import some

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
    assert sample == covering_sample.__wrapped__()
    assert 150 <= len(sample) <= 250
    assert len({case.name for case in sample}) == len(sample)
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


@pytest.mark.parametrize("case", some(SMALL, 5), ids=lambda case: case.name)
def test_the_oracle_agrees_with_the_reference(case: Case) -> None:
    problem = make_problem(np, case)
    expected = problem.expected()
    out, lse = by_reference(problem)
    np.testing.assert_allclose(expected.out, out, rtol=1e-6, atol=1e-6 * max(expected.v_rms, 1e-3))
    np.testing.assert_allclose(expected.lse, lse, rtol=1e-6, atol=1e-6)
    dense = problem.kv_bits.view(NUMPY_DTYPES[case.dtype]).astype(np.float32)
    rms = tolerance.rms_of_visible_values(dense, problem.table, problem.lengths)
    assert expected.v_rms == pytest.approx(rms, rel=1e-5)


def test_small_cases_are_of_every_kind() -> None:
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
LSE = RNG.normal(5, 1, (3, 2, 4))


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
        ((1, 1, 2), 1.0001, True),
        ((1, 1, 2), 1.001, False),
        ((1, 1, 2), np.inf, False),
        ((1, 1, 2), np.nan, False),
    ],
)
def test_the_check_of_lse(index: tuple[int, ...], value: float | None, passes: bool) -> None:
    expected = _changed(LSE, (2, 0, 0), -np.inf)
    got = expected if value is None else _changed(expected, index, expected[index] * value)
    if passes:
        ours = oracle.check_lse(np, got, expected)
        assert ours == pytest.approx(tolerance.assert_close_lse(got, expected))
    else:
        with pytest.raises(AssertionError, match=r"lse: .*\(1, 1, 2\)"):
            oracle.check_lse(np, got, expected)
    with pytest.raises(AssertionError, match=r"lse: .*\(2, 0, 0\)"):
        oracle.check_lse(np, _changed(expected, (2, 0, 0), np.inf), expected)


def test_an_output_that_should_be_zero() -> None:
    zeros = np.zeros((1, 2, 1, 512))
    oracle.check_out(np, zeros, zeros, v_rms=0.1, outliers=False)
    with pytest.raises(AssertionError, match=r"rows off, worst at \(0, 1, 0\)"):
        oracle.check_out(np, _changed(zeros, (0, 1, 0, 3), 1e-6), zeros, v_rms=0.1, outliers=False)


@pytest.mark.parametrize("inputs", FACTORS["inputs"])
@pytest.mark.parametrize("fault", ["dropped token", "another page", "no mask", "other kv head"])
def test_a_fault_is_noticed(fault: str, inputs: str) -> None:
    """Each through the whole harness, on results of the reference for wrong inputs."""
    case = Case(batch=2, q_len=2, heads=4, kv_heads=2, kv_len=500, ragged=False, inputs=inputs)
    problem = make_problem(np, case)
    wrong = dataclasses.replace(problem)
    if fault == "dropped token":
        wrong.kv_lens = problem.kv_lens - np.array([0, 1], dtype=np.int32)
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


# --- the kernels' arithmetic ---------------------------------------------------------------------

MARGIN = 0.8  # share of a bound that an honest result may take


def takes_long(case: Case) -> bool:
    return case.batch * case.q_len * case.heads * case.kv_len > 1_000_000


@pytest.mark.parametrize(
    "case",
    [
        *some([*SMALL, *(case for case in sample_of_every_kernel() if not takes_long(case))], 5),
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in sample_of_every_kernel()
            if takes_long(case)
        ),
    ],
    ids=lambda case: case.name,
)
def test_honest_rounding_passes_on_the_grid(case: Case) -> None:
    """The inputs of the GPU tests themselves: bounds are met, and not by luck."""
    problem = make_problem(np, case)
    figures = problem.check(*emulation.decode(problem, emulation.key_of(case).parts))
    assert figures["row"] <= 0.9 * tolerance.OUT_ROW
    assert figures["lse_element"] <= MARGIN


@pytest.mark.parametrize("softmax", FACTORS["softmax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kv_len", "seeds"), some([(1, 12), (3, 12), (20, 12), (65, 12), (140, 4), (500, 4)], 2)
)
def test_honest_rounding_passes_whatever_the_seed_of_the_outliers(
    kv_len: int, seeds: int, dtype: str, softmax: str
) -> None:
    for seed in range(seeds):
        case = Case(
            batch=6,
            q_len=1 + seed % 3,
            heads=48,
            kv_heads=1 + seed % 2,
            kv_len=kv_len,
            ragged=seed % 4 == 3,
            dtype=dtype,
            inputs="outliers",
            softmax=softmax,
            seed=10_000 + seed,
        )
        problem = make_problem(np, case)
        figures = problem.check(*emulation.decode(problem, 1 + 4 * (seed % 2)))
        assert figures["row"] <= MARGIN * tolerance.OUT_ROW, case
        assert figures["lse_element"] <= MARGIN, case


@pytest.mark.parametrize("kv_len", [1, 2, 3, 64, 140])
def test_a_token_with_an_outlier_takes_all_of_the_weight_or_none(kv_len: int) -> None:
    wins = losses = rows = 0
    for seed in range(10):
        case = Case(
            batch=4, q_len=3, heads=16, kv_heads=2, kv_len=kv_len, inputs="outliers", seed=seed
        )
        problem = make_problem(np, case)
        q = oracle.widen(np, problem.q_bits, case.dtype)
        q_outliers = np.abs(q) > OUTLIER / 2
        assert (q_outliers.sum(axis=(1, 2, 3)) == (problem.lengths > 0)).all()
        for b, h in itertools.product(np.flatnonzero(problem.lengths), range(case.heads)):
            length = int(problem.lengths[b])
            keys = emulation.rows_of(problem, b, length, h // 8).astype(np.float64)
            touched = (np.abs(keys) > OUTLIER / 2).any(axis=1)
            for i in range(case.q_len):
                seen = max(length - (case.q_len - 1 - i), 0)
                scores = HEAD_DIM**-0.5 * (keys[:seen] @ q[b, i, h])
                weights = np.exp(scores - scores.max(initial=-np.inf))
                if q_outliers[b, i, h].any():
                    assert (weights > 1e-40).sum() == min(seen, 1)
                lone = weights[touched[:seen]]
                lone /= weights.sum() if seen else 1.0
                assert ((lone < 1e-40) | (lone > 1 - 1e-12)).all()
                wins, losses = wins + (lone > 0.5).sum(), losses + (lone < 0.5).sum()
                rows += 1
    assert wins > rows / 6
    assert losses > rows / 10 or kv_len == 1
    if kv_len > 3:  # and some rows in which none wins
        assert wins < rows


def test_what_outliers_meet_never_cancels() -> None:
    sums = [
        sum(signs * IN_QUERIES)
        for signs in itertools.product((-1, 0, 1), repeat=len(IN_QUERIES))
        if any(signs)
    ]
    assert min(np.abs(sums)) >= min(IN_QUERIES)


@pytest.mark.parametrize(
    ("kv_len", "parts", "inputs"),
    [
        *(
            (*long, inputs)
            for long in [(2, 1), (20, 1), (140, 2)]
            for inputs in ("0.1", "outliers")
        ),
        (4096, 5, "0.1"),
        pytest.param(4096, 5, "outliers", marks=pytest.mark.exhaustive),
    ],
)
def test_a_token_that_one_row_drops_is_noticed(kv_len: int, parts: int, inputs: str) -> None:
    """The heaviest of a row with an outlier; of the others one of average weight."""
    case = Case(batch=2, heads=16, kv_len=kv_len, ragged=False, inputs=inputs, seed=kv_len)
    problem = make_problem(np, case)
    expected = problem.expected()
    problem.check(*emulation.decode(problem, parts), expected)
    for head in range(0, case.heads, 3):
        keys = emulation.rows_of(problem, 1, kv_len, 0).astype(np.float64)
        scores = HEAD_DIM**-0.5 * (keys @ oracle.widen(np, problem.q_bits[1, 0, head], case.dtype))
        weights = np.exp(scores - scores.max())
        top = int(weights.argmax())
        alone = weights[top] > 0.99 * weights.sum()
        token = top if alone else int(np.abs(weights - weights.mean()).argmin())
        spoilt = emulation.decode(problem, parts, emulation.Drop(1, 0, head, token))
        with pytest.raises(AssertionError, match=rf"worst at \(1, 0, {head}[,)]"):
            problem.check(*spoilt, expected)


@pytest.mark.parametrize("kv_len", [200, 4096])
def test_the_arithmetic_of_few_rows_is_another(kv_len: int) -> None:
    """16 rows sum up even and odd blocks apart; among 17 the same rows do not, and both pass."""
    few, more = (
        make_problem(np, Case(batch=1, heads=heads, kv_len=kv_len, ragged=False))
        for heads in (16, 17)
    )
    more.kv_bits[...] = few.kv_bits
    more.q_bits[:, :, :16] = few.q_bits
    results = [emulation.decode(problem) for problem in (few, more)]
    for problem, result in zip((few, more), results, strict=True):
        problem.check(*result)
    (_, lse), (_, lse_of_more) = results
    np.testing.assert_allclose(lse, lse_of_more[..., :16], rtol=1e-5)
    assert (lse != lse_of_more[..., :16]).any()


# --- cases of every kernel -----------------------------------------------------------------------


def test_the_cases_of_every_kernel_are_of_every_kind() -> None:
    cases = sample_of_every_kernel()
    assert len({case.name for case in cases}) == len(cases)
    assert all(allowed(vars(case)) for case in cases)
    runs = [(variant, case) for case in cases for variant in case.variants]
    wanted: dict[str, set[object]] = {
        "heads": {1, 3, 9, 16, 17, 48, 64, 128},
        "kv_heads": {1, 2, 3},
        "q_len": {1, 2, 3, 4},
        "kv_len": {0, 1, 63, 64, 65, 140, 4096},
        "causal": {False, True},
        "ragged": {False, True},
        "dtype": {"bfloat16", "float16"},
        "inputs": {"0.1", "1", "outliers"},
        "outputs": {"given", "float32"},
        "softmax": {"default", "192"},
    }
    for variant in VARIANTS:
        own = [case for of, case in runs if of == variant]
        for name, values in wanted.items():
            few = variant == "swapped" and name == "heads"
            least = values - {17, 64, 128} if few else values
            assert least <= {getattr(case, name) for case in own}, (variant, name)
        pairs = {(c.kv_len, c.q_len, c.causal) for c in own}
        for place, name in ((1, "q_len"), (2, "causal")):
            found = {(pair[0], pair[place]) for pair in pairs}
            assert found == set(itertools.product(wanted["kv_len"], wanted[name])), variant


def test_the_kernel_that_a_plan_takes_is_one_of_its_case() -> None:
    for case in sample_of_every_kernel():
        assert emulation.key_of(case).variant in case.variants


# --- cases of joining ----------------------------------------------------------------------------


def test_the_cases_of_split_requests_are_of_every_kind() -> None:
    """On a GPU with 132 multiprocessors."""
    pieces, kinds = set(), set()
    for case, lengths in SPLIT_CASES.values():
        key = emulation.key_of(case)
        table = parts_table(np.array(lengths), key.parts, key.row_groups, key.tiles)
        held = table["last_part"] - table["first_part"] + 1
        index = np.arange(len(table))
        assert held.max() > 1
        pieces |= set(held.tolist())
        goes_on = (held > 1) & (table["tail_last_part"] > index)
        goes_on &= table["place"] != table["end_place"]
        kinds |= {("goes on", case.kv_heads > 1)} if goes_on.any() else set()
        kinds |= {("second slot", case.kv_heads > 1)} if table["first_slot"].any() else set()
    assert {2, 3} <= pieces
    assert max(pieces) > 64  # more notes than a warp reads at once
    assert kinds == set(itertools.product(("goes on", "second slot"), (False, True)))


# --- kernels with a line changed -----------------------------------------------------------------


each_edit = pytest.mark.parametrize(
    ("name", "page_size"),
    [(name, 64) for name in variants.ALL] + [("delays", 1), ("delays", 48)],
)


def edited(name: str, page_size: int) -> dict[KernelSpec, str]:
    """Texts of the kernels that some edits change."""
    edits = variants.ALL[name]
    stems = variants.stems_of(edits)
    specs = [spec for stem in stems for spec in variants.specs_of(stem, page_size)]
    return {spec: variants.edited_text(spec, *edits) for spec in specs}


@each_edit
def test_the_edits_of_the_kernels_still_apply(name: str, page_size: int) -> None:
    edits = variants.ALL[name]
    assert set(variants.stems_of(edits)) == {stem for edit in edits for stem in edit.stems}
    texts = edited(name, page_size)
    assert texts
    assert all(text != variants.text_of(spec) for spec, text in texts.items())


@pytest.mark.exhaustive
@each_edit
def test_edited_kernels_compile(name: str, page_size: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    texts = edited(name, page_size)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        made = pool.map(module._compile, texts, texts.values(), itertools.repeat(OPTIONS))
        assert all(cubin for cubin, _ in made)


def test_an_edit_that_does_not_apply_says_so() -> None:
    edit = variants.Edit(("mla_decode",), "no such mark", "")
    with pytest.raises(ValueError, match="mla_decode: 'no such mark' occurs 0 times, not once"):
        variants.edited_text(variants.specs_of("mla_decode")[0], edit)
