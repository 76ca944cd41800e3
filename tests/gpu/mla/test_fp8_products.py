# SPDX-License-Identifier: Apache-2.0
"""Products in e4m3 over FP8 caches, against float64 over a query that is rounded likewise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.mla.test_fp8_decode import CapturedRun, arrays_of, attend_and_check, same_bits
from tests.gpu.tools import variants
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.fp8_problem import (
    Fp8Case,
    check_batch_invariance,
    covering_sample,
    growing_scores,
    make_fp8,
    run,
)
from tests.gpu.tools.problem import typed

KERNELS = ("mla_decode_fp8_products",)
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
every_operation = pytest.mark.parametrize("operation", ["decode", "table", "list"])
both_forms = pytest.mark.parametrize("form", ["one", "16-bit rope"])


def products(**values: Any) -> Fp8Case:
    return Fp8Case(**values, fp8_products=True)


def grid() -> list[Fp8Case]:
    """The covering sample of FP8 caches, of forms under one factor, with whole tiles of heads."""
    forms = ("one", "bytes", "pair", "pair of bytes", "16-bit rope")
    cases = []
    for number, case in enumerate(covering_sample()):
        heads = (64, 128, 192)[number % 3] * case.kv_heads
        form = forms[number % len(forms)]
        batch = min(case.batch, 16)  # the host rounds queries for the reference
        shape = {"batch": batch, "heads": heads, "form": form}
        cases.append(dataclasses.replace(case, **shape, fp8_products=True))
    return cases


@pytest.mark.parametrize("case", grid(), ids=lambda case: case.name)
def test_grid(case: Fp8Case, record_figures: Report) -> None:
    record_figures(attend_and_check(make_fp8(cp, case), case.outputs))


@both_forms
@every_operation
def test_split_requests_and_every_tail(operation: str, form: str, record_figures: Report) -> None:
    for lengths in (
        [20_000, 3001, 5],
        [100_003],
        [1, 63, 64, 65, 127, 129, 191, 193, 255, 257] * 3,
    ):
        for page_size in (1, 48, 64):
            case = products(
                batch=len(lengths), heads=128, form=form, operation=operation, page_size=page_size
            )
            record_figures(attend_and_check(make_fp8(cp, case, np.array(lengths))))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "heads", "kv_heads"), [(5, 128, 1), (9, 128, 2), (70, 64, 1)])
@every_operation
def test_several_hundred_query_rows(
    operation: str, q_len: int, heads: int, kv_heads: int, causal: bool, record_figures: Report
) -> None:
    """Lengths below q_len too, so that causal rows see nothing."""
    shape = {"batch": 5, "q_len": q_len, "heads": heads, "kv_heads": kv_heads, "causal": causal}
    case = products(**shape, form="pair", operation=operation)
    lengths = np.array([2000, 3, 64, 0, q_len + 63])
    record_figures(attend_and_check(make_fp8(cp, case, lengths)))


@both_forms
@every_operation
def test_20_repeats_give_the_same_bits(operation: str, form: str) -> None:
    for shape, lengths in (
        ({"batch": 1, "heads": 64}, [20_000]),
        ({"batch": 6, "heads": 128, "q_len": 2}, [4096, 65, 3000, 0, 700, 1]),
    ):
        problem = make_fp8(cp, products(**shape, form=form, operation=operation), np.array(lengths))
        results = [arrays_of(run(problem)) for _ in range(20)]
        problem.check(*results[0])
        assert all(same_bits(result, results[0]) for result in results[1:])


@both_forms
@pytest.mark.parametrize("lengths", [[100_003, 65, 3000], [128, 64, 0, 65, 192, 1, 130] * 30])
def test_random_delays_at_every_barrier(form: str, lengths: list[int]) -> None:
    """Long segments, and many short ones of which a consumer may have no block."""
    problem = make_fp8(cp, products(batch=len(lengths), heads=128, form=form), np.array(lengths))
    expected = arrays_of(run(problem))
    with variants.installed(*variants.FP8_PRODUCTS_DELAYS):
        for _ in range(40):
            assert same_bits(arrays_of(run(problem)), expected)


@both_forms
def test_batch_invariant(form: str, record_figures: Report) -> None:
    record_figures(check_batch_invariance(cp, products(heads=128, form=form)))


@every_operation
def test_a_captured_plan(operation: str) -> None:
    """A graph of update and run, with lengths that change, has the bits of eager calls."""
    problem = make_fp8(cp, products(batch=4, heads=128, form="one", operation=operation))
    plan = problem.plan()
    run(problem, plan)
    captured = CapturedRun(problem, plan)
    for lengths in ([300, 200, 64, 1], [0, 300, 299, 5]):
        problem.kv_lens[...] = cp.asarray(np.array(lengths, np.int32))
        got = arrays_of(captured.replay())
        assert same_bits(got, arrays_of(run(problem)))


@pytest.mark.parametrize("form", ["packed", "scales", "one"])
def test_what_has_no_such_kernel_keeps_its_bits(form: str) -> None:
    """Caches with scales of each token, and heads that fill no tiles."""
    case = Fp8Case(batch=3, heads=48 if form == "one" else 128, form=form)
    problem = make_fp8(cp, case)
    expected = arrays_of(run(problem))
    assert same_bits(arrays_of(run(problem, fp8_products=True)), expected)


def test_references_are_raised_with_every_block() -> None:
    host = growing_scores()
    given = host | {
        name: cp.asarray(value.view(f"u{value.itemsize}")).view(value.dtype)
        for name, value in host.items()
        if isinstance(value, np.ndarray)
    }
    want = cumla.reference.mla_decode(**host)
    out, lse = cumla.mla_decode(**given, fp8_products=True)
    got = np.asarray(out.view(np.uint16).get()).view(host["q"].dtype).astype(np.float64)
    error = np.linalg.norm(got - want.out, axis=-1) / np.linalg.norm(want.out, axis=-1)
    assert error.max() < 2**-4
    assert np.abs(lse.get() - want.lse).max() < 2**-4


def test_an_infinite_number_makes_its_row_nan() -> None:
    problem = make_fp8(cp, products(batch=2, heads=128, form="one"))
    q = cp.asarray(problem.q_bits).copy()
    q[1, 0, 77, 5] = 0x7F80
    q[0, 0, 3, 570] = 0x7FC0  # NaN
    expected = arrays_of(run(problem))
    got = arrays_of(run(dataclasses.replace(problem, q=typed(q, "bfloat16"))))
    for a, b in zip(got, expected, strict=True):
        a, b = (bits_of(x).reshape(2, 128, -1) for x in (a, b))
        same = (a == b).all(axis=-1)
        assert int((~same).sum()) == 2
        assert not bool(same[1, 77])
        assert not bool(same[0, 3])
    assert bool(cp.isnan(got[1][1, :, 77]).all())
    assert bool(cp.isnan(got[1][0, :, 3]).all())
