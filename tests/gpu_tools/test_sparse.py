# SPDX-License-Identifier: Apache-2.0
"""The GPU tests of lists of rows on the CPU: their problems, and which results they tell apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.gpu.tools.sparse_problem import (
    FACTORS,
    FORMS,
    MOST_ENTRIES,
    TRIPLES,
    SparseCase,
    covering_sample,
    make_sparse,
)
from tests.selection import some

SMALL = tuple(c for c in covering_sample() if c.tokens * c.topk * (c.heads + 100) < 300_000)


@pytest.mark.parametrize("case", some(SMALL, 4), ids=lambda case: case.name)
def test_problems_mean_what_their_reference_says(case: SparseCase) -> None:
    """Laid out in every way, poison around them; through the public functions."""
    problem = make_sparse(np, case)
    out, lse = problem.outputs()
    problem.call(out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(rounded=False))
    got = problem.plan().run(**problem.inputs)
    if case.outputs != "float32":
        assert got.out.tobytes() == out.array.tobytes()


def test_the_sample_covers_the_grid() -> None:
    cases = covering_sample()
    assert len(cases) < 200
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in cases} == set(values)
    for names in TRIPLES:
        sizes = [len(FACTORS[name]) for name in names]
        found = {tuple(getattr(case, name) for name in names) for case in cases}
        assert len(found) == np.prod(sizes)
    assert all(case.tokens * case.topk <= MOST_ENTRIES or case.q_len == 1 for case in cases)


@pytest.mark.parametrize("scales", ["powers", "any", "wild", "zero"])
def test_how_far_rounded_rows_are_from_the_cache(scales: str) -> None:
    """Nowhere with powers of two; two roundings to float16, or one to bfloat16, otherwise."""
    problem = make_sparse(np, SparseCase(heads=64, topk=1500, scales=scales))
    exact, seen = (problem.seen(rounded=rounded) for rounded in (False, True))
    assert problem.scales is not None
    highest = problem.scales.max(axis=1, keepdims=True)
    relative = problem.scales.repeat(128, axis=1) / np.where(highest > 0, highest, 1)
    numbers = np.abs(exact.values) / np.where(highest > 0, highest, 1)
    holds = (relative >= 2.0**-13) & (numbers >= 2.0**-13)  # float16 has fewer bits of smaller ones
    error = np.abs(seen.values - exact.values)
    assert holds.mean() > 0.2
    assert (error[holds] <= 2.0**-10 * np.abs(exact.values)[holds]).all()
    wide_error = np.abs(seen.wide_values - exact.values)
    assert (wide_error <= 2.0**-8 * np.abs(exact.values)).all()
    np.testing.assert_array_equal(seen.keys, exact.keys)
    assert error.any() == (scales != "powers")
    assert seen.is_wide.any() == (scales == "wild")


@pytest.mark.parametrize("form", some(FORMS, 3))
def test_an_entry_that_is_left_out_shows(form: str) -> None:
    """Also one of the last of a long list."""
    for topk in (65, 2048):
        case = SparseCase(batch=1, heads=4, topk=topk, form=form, scales="powers")
        problem = make_sparse(np, case)
        expected = problem.expected(rounded=False)
        indices = problem.lists["indices"].copy()
        indices[0, 0, topk - 2] = -1
        dropped = dataclasses.replace(problem, lists=problem.lists | {"indices": indices})
        dropped.arguments = problem.arguments | {"indices": indices}
        out, lse = dropped.outputs()
        dropped.call(out=out.array, lse=lse.array)
        with pytest.raises(AssertionError, match=r"^(out|lse): "):
            problem.check(out.array, lse.array, expected)
