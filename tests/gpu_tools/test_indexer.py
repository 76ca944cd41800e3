# SPDX-License-Identifier: Apache-2.0
"""The references of tests/gpu/indexer/test_indexer.py against `cumla.reference`, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools.indexer_cases import BATCHES, MEANS, Q_LENS, samples, steps
from tests.gpu.tools.indexer_problem import (
    RANGES,
    Paged,
    Prefill,
    Rows,
    check_logits,
    check_unquantised,
    ragged,
    unquantised,
)


def missing_pairs(points: Sequence[tuple[Any, ...]]) -> set[tuple[int, Any, int, Any]]:
    """Values of two axes that occur, but nowhere together."""
    axes = range(len(points[0]))
    values = [{point[axis] for point in points} for axis in axes]
    return {
        (one, a, other, b)
        for one, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(values[one], values[other])
        if all((point[one], point[other]) != (a, b) for point in points)
    }


def test_the_grids_cover_every_pair_and_every_step() -> None:
    prefills, decoding = samples(), [step for step in steps() if step.q_len in Q_LENS]
    assert missing_pairs(prefills) == set()
    assert missing_pairs(decoding) == set()
    assert missing_pairs([("a", 1, 2), ("b", 1, 3)]) == {(0, "a", 2, 3), (0, "b", 2, 2)}
    wanted = set(itertools.product(BATCHES, Q_LENS, MEANS))
    assert {(step.batch, step.q_len, step.mean) for step in decoding} == wanted
    assert len(decoding) == len(wanted)
    for points in (prefills, steps()):
        assert len({point.name for point in points}) == len(points)


@pytest.mark.parametrize("batch", BATCHES)
def test_lengths_are_ragged_and_some_are_zero(batch: int) -> None:
    lengths = ragged(np.random.default_rng(0), batch, 700)
    some = lengths[lengths > 0]
    assert len(some) < batch or batch == 1
    assert 0.7 * 700 <= some.min() <= some.max() <= 1.3 * 700
    assert len(some) >= 0.8 * batch - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [0, 1, 40, 300])
@pytest.mark.parametrize("ranges", RANGES)
def test_prefill(ranges: str, width: int, dtype: str) -> None:
    problem = Prefill(np, 33, 150, 8, 32, ranges, padded=True)
    out = Rows(np, 33, width or 150, dtype)
    logits = cumla.mqa_logits(*problem.arrays, max_kv_len=width or None, out=out.array)
    figures = check_logits(np, logits, problem.expected(width))
    assert figures["element"] <= (1e-4 if dtype == "float32" else 1.0)
    out.check_guards()
    unclean = Rows(np, 33, width or 150, dtype)
    cumla.mqa_logits(*problem.arrays, max_kv_len=width or None, out=unclean.array, clean=False)
    assert (unclean.written == problem.expected(width).visible).all()
    some = check_logits(np, logits[5:9], problem.expected(width, slice(5, 9)))
    assert some["cos"] <= 3e-5


@pytest.mark.parametrize("form", ["fused", "3d", "padded", "pair"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_paged(form: str, per_row: bool, page_size: int) -> None:
    problem = Paged(np, 9, 3, 90, 8, 32, page_size, per_row, form)
    columns = int(problem.lengths.max()) + 5
    logits = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=columns)
    assert problem.check(logits)["element"] <= 1e-4
    narrow = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=20)
    assert problem.check(narrow, most=4)["element"] <= 1e-4


def test_moved_pages() -> None:
    problem = Paged(np, 9, 2, 300, 8, 32)
    memory = np.full((500, 64 * 36), 0xFF, np.uint8)
    run = problem.num_pages // 4
    table = problem.move(memory, (0, 200, 300, 500 - run))
    q, _, weights, _, lengths = problem.arrays
    arrays = (q, memory.reshape(500, 64, 1, 36), weights, table, lengths)
    problem.check(cumla.paged_mqa_logits(*arrays, max_kv_len=400))
    untouched = (memory == 0xFF).all(axis=1)
    assert not untouched[[0, 200, 300, 499]].any()
    assert untouched.sum() == 500 - problem.num_pages


def test_logits_beside_what_was_quantised() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape, np.float32) for shape in ((40, 16, 64), (300, 64)))
    weights, seen = rng.standard_normal((40, 16), np.float32), np.arange(40) * 7
    values, scale = cumla.quantize_fp8(q)
    bounds = (np.zeros(40, np.int32), seen.astype(np.int32))
    logits = cumla.mqa_logits(values, cumla.quantize_fp8(k), weights * scale, *bounds)
    wanted = unquantised(q, k, weights)
    assert check_unquantised(logits, wanted, seen)["cos_unquantised"] > 1e-4
    for wrong in (logits * np.float32(1.05), np.where(logits > 0, logits, -np.inf)):
        with pytest.raises(AssertionError):
            check_unquantised(wrong, wanted, seen)


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
