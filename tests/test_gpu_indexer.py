# SPDX-License-Identifier: Apache-2.0
"""The references of tests/gpu/test_indexer.py against `cumla.reference`, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.indexer_problem import RANGES, Paged, Prefill, Rows, check_logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [0, 1, 40, 300])
@pytest.mark.parametrize("ranges", RANGES)
def test_prefill(ranges: str, width: int, dtype: str) -> None:
    problem = Prefill(np, 33, 150, 8, 32, ranges, padded=True)
    out = Rows(np, 33, width or 150, dtype)
    logits = cumla.mqa_logits(*problem.arrays, max_seqlen_k=width, out=out.array)
    figures = check_logits(np, logits, problem.expected(width))
    assert figures["element"] <= (1e-4 if dtype == "float32" else 1.0)
    out.check_guards()
    unclean = Rows(np, 33, width or 150, dtype)
    cumla.mqa_logits(*problem.arrays, max_seqlen_k=width, out=unclean.array, clean=False)
    assert (unclean.written == problem.expected(width).visible).all()
    some = check_logits(np, logits[5:9], problem.expected(width, slice(5, 9)))
    assert some["cos"] <= 3e-5


@pytest.mark.parametrize("form", ["fused", "3d", "padded", "pair"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_paged(form: str, per_row: bool, page_size: int) -> None:
    problem = Paged(np, 9, 3, 90, 8, 32, page_size, per_row, form)
    columns = int(problem.lengths.max()) + 5
    logits = cumla.paged_mqa_logits(*problem.arrays, max_context_len=columns)
    assert problem.check(logits)["element"] <= 1e-4
    narrow = cumla.paged_mqa_logits(*problem.arrays, max_context_len=20)
    assert problem.check(narrow, most=4)["element"] <= 1e-4


def test_what_the_checks_find() -> None:
    """A token that takes another's place, a lost head, a wrong -inf, a NaN."""
    problem = Prefill(np, 20, 100, 64, 128)
    expected = problem.expected()
    logits = cumla.mqa_logits(*problem.arrays)

    def refused(change: Any) -> None:
        wrong = logits.copy()
        change(wrong)
        with pytest.raises(AssertionError):
            check_logits(np, wrong, expected)

    def swap(wrong: Any) -> None:
        wrong[3, [10, 11]] = wrong[3, [11, 10]]

    weights = problem.weights.copy()
    weights[:, 17] = 0
    q, kv, _, ks, ke = problem.arrays
    without = cumla.mqa_logits(q, kv, weights, ks, ke)
    refused(swap)
    refused(lambda wrong: wrong.__setitem__(..., without))
    refused(lambda wrong: wrong.__setitem__((2, 5), -np.inf))
    refused(lambda wrong: wrong.__setitem__((2, 99), 0.0))
    refused(lambda wrong: wrong.__setitem__((2, 5), np.nan))
    rounded = logits.astype(ml_dtypes.bfloat16)
    check_logits(np, rounded, expected)
    swap(rounded)
    with pytest.raises(AssertionError):
        check_logits(np, rounded, expected)
