# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention with masks on the CPU, against the rule of each mask."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import AttentionMask
from tests.emulator import emulated_gpu
from tests.mha.mask_cases import LEAST, MOST, shown
from tests.mha.test_attention_mask import (
    FACTORS,
    PAIRS,
    Problem,
    Sample,
    check,
    make,
    of_pairs,
    reads_pairs,
    samples,
)


def run(problem: Problem, cupy: Any, **more: Any) -> Any:
    given = {name: cupy.like(value) for name, value in problem.given.items()}
    mask = cumla.AttentionMask(
        **{name: cupy.like(array) for name, array in problem.mask.given.items()}
    )
    return cumla.attention(**given, mask=mask, **more)


@pytest.mark.parametrize("sample", samples(84)[::2], ids=lambda s: f"{s.mask}-{s.seed}")
def test_grid(sample: Sample) -> None:
    problem = make(sample)
    with emulated_gpu(3) as cupy:
        check(problem, run(problem, cupy), sample.dtype)


FULL = [
    (mask, columns, dtype, q_lens)
    for i, (mask, q_lens) in enumerate(product(FACTORS["mask"], ((70,), (40, 0, 90))))
    for columns, dtype in [
        (
            ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96))[i % 5],
            ("bfloat16", "float16")[i % 2],
        )
    ]
]


@pytest.mark.parametrize(("mask", "columns", "dtype", "q_lens"), FULL, ids=str)
def test_full_tiles(mask: str, columns: Any, dtype: str, q_lens: Any) -> None:
    """Many query rows, alone and beside requests of few."""
    sample = Sample(
        *(mask, columns, dtype, "same", 64, q_lens, (8, 1), False, None, "table"), seed=sum(q_lens)
    )
    problem = make(sample)
    with emulated_gpu(1) as cupy:
        check(problem, run(problem, cupy), dtype)


@pytest.mark.parametrize("mask", FACTORS["mask"])
def test_split_keys(mask: str) -> None:
    """Drafts of one request, in row tiles whose keys are split."""
    for columns, count in (((64, 64), 7), ((128, 128), 6)):
        fixed: tuple[Any, ...] = (columns, "bfloat16", "same", 64, (40,), (16, 1), False, None)
        problem = make(Sample(mask, *fixed, "table", seed=count))
        with emulated_gpu(count) as cupy:
            check(problem, run(problem, cupy), "bfloat16")


@pytest.mark.parametrize("which", range(len(PAIRS)))
@pytest.mark.parametrize("mask", FACTORS["mask"])
def test_two_kv_heads_of_a_thread_block(mask: str, which: int) -> None:
    problem = of_pairs(mask, which)
    with emulated_gpu(PAIRS[which][-1]) as cupy:
        assert reads_pairs(problem, cupy.like)
        check(problem, run(problem, cupy), "bfloat16")


def test_any_integers() -> None:
    """Masks whose numbers mean nothing, of every kernel; what a query sees follows from them."""
    rng = np.random.default_rng(1)
    extremes = np.array([LEAST, LEAST + 1, -1, 0, 1, 63, 64, 65, MOST - 1, MOST])

    def some(*shape: int) -> Any:
        near = rng.integers(-9, 150, shape)
        chosen = np.where(rng.random(shape) < 0.2, rng.choice(extremes, shape), near)
        return chosen.astype(np.int32)

    for i, sample in enumerate(samples(84)[1::8]):
        problem = make(sample)
        batch = problem.case.batch
        total, requests = batch.total, len(batch.q_lens)
        arrays = {"start": some(total), "end": some(total), "prefix_len": some(requests)}
        arrays["tree"] = rng.integers(0, 1 << 32, (total, 1 + i % 8), np.uint32)
        arrays["tree_start"] = some(requests)
        for j, name in enumerate([*arrays]):  # other ones are left out each time
            if (i + j) % 3 == 0:
                del arrays[name]
        if "tree" not in arrays:
            arrays.pop("tree_start", None)
        mask = AttentionMask(**arrays)
        seen = problem.case._replace(sees=lambda q, j, mask=mask: shown(mask.given, q, j))
        problem = problem._replace(case=seen, mask=mask)
        with emulated_gpu(3) as cupy:
            check(problem, run(problem, cupy), sample.dtype)


ONE_OF_EACH = [  # boxes, rows, e4m3, float32 and full tiles
    Sample(*("windows", (64, 64), dtype, cache, size, q_lens, (4, 1), False, None, "table"), seed=1)
    for dtype, cache, size, q_lens in (
        *(("bfloat16", "same", 16, (4, 1)), ("float16", "same", 1, (4, 1))),
        *(("bfloat16", "e4m3", 16, (4, 1)), ("float32", "same", 16, (4, 1))),
        ("bfloat16", "same", 64, (70,)),
    )
]


@pytest.mark.parametrize("sample", ONE_OF_EACH, ids=lambda s: f"{s.dtype}-{s.cache}-{s.page_size}")
@pytest.mark.parametrize("value", [LEAST, -1, MOST])
def test_the_ends_of_int32(sample: Sample, value: int) -> None:
    """In each array alone, in all elements."""
    problem = make(sample)
    batch = problem.case.batch
    bits = np.full((batch.total, 3), 0x5A0F3C81, np.uint32)
    rows, requests = (np.full(n, value, np.int32) for n in (batch.total, len(batch.q_lens)))
    for arrays in (
        *({"start": rows}, {"end": rows}, {"prefix_len": requests}),
        *({"prefix_len": requests, "tree": bits}, {"tree": bits, "tree_start": requests}),
        {"start": np.full_like(rows, 3), "end": np.full_like(rows, 2), "prefix_len": requests},
    ):
        mask = AttentionMask(**arrays)
        seen = problem.case._replace(sees=lambda q, j, mask=mask: shown(mask.given, q, j))
        with emulated_gpu(1) as cupy:
            got = run(problem._replace(case=seen, mask=mask), cupy)
        check(problem._replace(case=seen, mask=mask), got, sample.dtype)


def test_invisible_rows_do_not_show() -> None:
    """NaN in all keys that no query of a request sees, in the middle of others as well."""
    for sample in samples(84)[2::9]:
        problem = make(sample)
        queries = [*problem.case.batch.queries()]
        for request, rows in enumerate(zip(problem.keys, problem.values, strict=True)):
            own = [q for q in queries if q.request == request]
            for j in range(len(rows[0])):
                if not any(problem.case.sees(q, j) for q in own):
                    for part in rows:
                        part[j] = np.nan
        poisoned = stored_again(problem)
        with emulated_gpu(3) as cupy:
            check(problem, run(poisoned, cupy), sample.dtype)


def stored_again(problem: Problem) -> Problem:
    """Put the keys and values of the requests into rows without pages."""
    given = {n: v for n, v in problem.given.items() if n not in ("block_table", "kv_indices")}
    given.pop("kv_lens", None)
    given |= {
        "k": np.concatenate(problem.keys),
        "v": np.concatenate(problem.values),
        "kv_indptr": np.cumsum([0, *map(len, problem.keys)]).astype(np.int32),
    }
    return problem._replace(given=given)


def test_equal_masks_have_equal_bits() -> None:
    """Whether arrays tell the end of a causal query, or the call; and a chain as a tree."""
    for sample in samples(84)[::17]:
        problem = make(sample)
        batch = problem.case.batch
        places = {n: batch.places[n] for n in ("qo_indptr", "kv_lens", "total_tokens")}
        chain = np.tril(np.ones((len(batch.q_lens), 64, 64), bool))
        masks = [
            AttentionMask.windows(None, 0, **places),
            AttentionMask(start=np.zeros(batch.total, np.int32)),
            AttentionMask.from_tree(chain, **places),
        ]
        found = []
        rows = [query.row for query in batch.queries()]
        for mask in masks:
            with emulated_gpu(3) as cupy:
                out, lse = run(problem._replace(mask=mask), cupy)
            if out.ndim == 3:
                out, lse = out[rows], lse[rows]
            found.append((out.tobytes(), lse.tobytes()))
        assert found[0] == found[1] == found[2]


def test_plans_and_batch_invariance() -> None:
    for sample in (samples(84)[3], samples(84)[4]):
        problem = make(sample._replace(q_lens=(4, 1, 3), page_size=16, pages="table"))
        given, mask = problem.given, problem.mask
        form = "rows" if mask.tree is None else "tree"
        with emulated_gpu(3) as cupy:
            there = {name: cupy.like(value) for name, value in given.items()}
            on_gpu = AttentionMask(**{n: cupy.like(a) for n, a in mask.given.items()})
            lengths = {n: there.pop(n) for n in ("kv_lens", "qo_indptr")}
            for options in ({}, {"batch_invariant": True, "max_kv_len": 4096}):
                plan = cumla.AttentionPlan.from_arrays(
                    *(there[name] for name in ("q", "k", "v")),
                    qo_indptr=lengths["qo_indptr"],
                    mask_form=form,
                    **options,
                )
                plan.update(**lengths)
                check(problem, plan.run(**there, mask=on_gpu), sample.dtype)
