# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' problems in other pages are the same problems: shown with the CPU's arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cumla
from cumla.launch.mla.shape import VARIANTS, MLADecodeKey
from tests.gpu.tools import pages
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import make_problem

CASE = Case(batch=3, heads=4, kv_heads=2, q_len=2, kv_len=200)


@pytest.mark.parametrize("form", pages.FORMS)
@pytest.mark.parametrize("page_size", pages.PAGE_SIZES)
def test_the_same_result(page_size: int, form: str) -> None:
    problem = make_problem(np, CASE)
    expected = cumla.mla_decode(*problem.arrays)
    moved = pages.moved(problem, page_size, form)
    got = cumla.mla_decode(*moved.arrays)
    moved.check(got.out, got.lse)
    assert got.out.tobytes() == expected.out.tobytes()
    assert got.lse.tobytes() == expected.lse.tobytes()


def test_the_sample_covers_all_pairs() -> None:
    factors = [
        (c.page_size, c.case.kv_len, c.case.heads, c.case.q_len, c.case.causal, c.case.kv_heads)
        + (c.cache_form, c.query_form)
        for c in pages.sample()
    ]
    assert len(set(factors)) == len(factors)
    for a, b in itertools.combinations(range(len(factors[0])), 2):
        pairs = {(row[a], row[b]) for row in factors}
        wanted = len({row[a] for row in factors}) * len({row[b] for row in factors})
        assert len(pairs) == wanted, (a, b, len(pairs), wanted)


def test_every_kernel_meets_every_form_of_pages() -> None:
    met = set()
    for case, page_size, _, _ in pages.sample():
        shape = (case.batch, case.q_len, case.heads, case.kv_heads, page_size, case.dtype)
        key = MLADecodeKey(*shape, causal=case.causal, device=0, sm_count=132)
        met.add((key.form, key.variant))
    assert met >= set(itertools.product(("boxes", "rows"), VARIANTS))
