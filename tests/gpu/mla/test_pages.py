# SPDX-License-Identifier: Apache-2.0
"""Pages of every size, query and cache in one array or two: each bit as from pages of 64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import pages
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import (
    HEAD_DIM,
    NAN_BITS,
    PAGE_SIZE,
    Guarded,
    Problem,
    make_problem,
    typed,
)

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]


def run(
    problem: Problem,
    q: Any,
    kv_cache: Any,
    table: Any,
    outputs: list[Guarded] | None = None,
    plan: cumla.MLADecodePlan | None = None,
    **options: Any,
) -> list[Guarded]:
    """Decode into poisoned outputs, by a call or a plan."""
    outputs = outputs or list(problem.outputs())
    for output in outputs:
        output.repoison()
    options |= {"out": outputs[0].array, "lse": outputs[1].array}
    if plan is None:
        options["causal"] = problem.case.causal
        cumla.mla_decode(q, kv_cache, table, problem.kv_lens, **options)
    else:
        plan.run(q, kv_cache, block_table=table, **options)
    for output in outputs:
        output.check_guards()
    return outputs


def run_in(
    problem: Problem,
    page_size: int,
    cache: str = "one",
    query: str = "one",
    *,
    shared: int = 0,
    **options: Any,
) -> list[Guarded]:
    """Decode the problem's tokens from other pages."""
    kv_cache, table = pages.cache_in(problem, page_size, cache, shared)
    return run(problem, pages.query_in(problem, query), kv_cache, cp.asarray(table), **options)


def assert_same_bits(got: list[Guarded], expected: list[Guarded]) -> None:
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        wrong = int((a.bits != b.bits).sum())
        assert wrong == 0, f"{name}: {wrong} of {a.bits.size} elements differ from pages of 64"


def check(problem: Problem, got: list[Guarded], **options: Any) -> dict[str, float]:
    """Against pages of 64 bit by bit, and against float64."""
    assert_same_bits(got, run(problem, problem.q, problem.kv_cache, problem.block_table, **options))
    return problem.check(got[0].array, got[1].array)


@pytest.mark.parametrize("paged", pages.sample(), ids=lambda paged: paged.name)
def test_grid(paged: pages.PagedCase, record_figures: Report) -> None:
    problem = make_problem(cp, paged.case)
    got = run_in(problem, paged.page_size, paged.cache_form, paged.query_form)
    record_figures(check(problem, got))


@pytest.mark.parametrize("page_size", pages.PAGE_SIZES)
def test_shared_pages(page_size: int, record_figures: Report) -> None:
    """A prefix of 768 tokens, whole pages of every size, lies in the same pages for all."""
    heads = 16 << pages.PAGE_SIZES.index(page_size) % 4
    lengths = np.array([2000, 769, 768, 1300, 900])
    problem = make_problem(cp, Case(batch=5, heads=heads, kv_len=2000), lengths)
    problem.table[:, :12] = problem.table[0, :12]
    problem.block_table = cp.asarray(problem.table)
    record_figures(check(problem, run_in(problem, page_size, "pair", shared=768)))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
def test_split_requests(page_size: int, heads: int, record_figures: Report) -> None:
    case = Case(batch=2, heads=heads, q_len=1)
    problem = make_problem(cp, case, np.array([20_000, 3001]))
    record_figures(check(problem, run_in(problem, page_size, "slices", "slices")))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_several_requests_to_a_part(page_size: int, heads: int, record_figures: Report) -> None:
    """A query and KV stages that are used again, also behind requests that have no tokens."""
    case = Case(batch=300, heads=heads)
    problem = make_problem(cp, case, np.array([70, 0, 1, 200, 65] * 60))
    record_figures(check(problem, run_in(problem, page_size, "pair")))


@pytest.mark.parametrize("heads", [16, 48, 128])
@pytest.mark.parametrize("page_size", [1, 4, 24, 40])
def test_every_tail_of_a_few_blocks(page_size: int, heads: int, record_figures: Report) -> None:
    """Also of sizes that are odd for the grid: boxes of 8 rows, pages that cross two blocks."""
    lengths = np.array([1, 2, 7, 8, 9, 15, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257])
    case = Case(batch=len(lengths), heads=heads, q_len=2)
    problem = make_problem(cp, case, lengths)
    record_figures(check(problem, run_in(problem, page_size, "padded", "pair")))


@pytest.mark.parametrize(("page_size", "heads"), [(1, 16), (1, 128), (16, 64), (128, 16)])
def test_float16(page_size: int, heads: int, record_figures: Report) -> None:
    case = Case(batch=3, heads=heads, kv_len=700, dtype="float16", inputs="1")
    problem = make_problem(cp, case)
    record_figures(check(problem, run_in(problem, page_size, "pair", "pair")))


@pytest.mark.parametrize(("page_size", "heads"), [(1, 16), (1, 48), (16, 128), (128, 64)])
def test_batch_invariant(page_size: int, heads: int, record_figures: Report) -> None:
    problem = make_problem(cp, Case(batch=3, heads=heads), np.array([5000, 130, 2500]))
    figures = check(problem, run_in(problem, page_size, batch_invariant=True), batch_invariant=True)
    record_figures(figures)


@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 128])
@pytest.mark.parametrize("heads", [16, 32, 80])
def test_page_numbers_out_of_range_read_as_zeros(page_size: int, heads: int) -> None:
    problem = make_problem(cp, Case(batch=3, heads=heads), np.array([700, 300, 1000]))
    kv_cache, table = pages.cache_in(problem, page_size, "pair")
    num_pages = kv_cache[0].shape[0]
    wrong = {(0, 1): -1, (1, 0): 2147480000, (2, 2): num_pages, (2, 5): -(2**31)}
    for (request, entry), number in wrong.items():
        if entry * page_size < problem.lengths[request]:
            table[request, entry] = number
            for token in range(entry * page_size, (entry + 1) * page_size):
                if token < problem.lengths[request]:
                    page = problem.table[request, token // PAGE_SIZE]
                    problem.kv_bits[int(page), token % PAGE_SIZE] = 0
    got = run(problem, problem.q, kv_cache, cp.asarray(table))
    check(problem, got)


@pytest.mark.parametrize(("page_size", "heads"), [(1, 16), (16, 40), (48, 16), (128, 80), (2, 80)])
def test_lengths_are_clamped(page_size: int, heads: int) -> None:
    """To what the columns of the table hold, which need not be whole blocks."""
    columns = -(-300 // page_size)
    longest = columns * page_size
    lengths = np.array([longest, 0, 200, longest])
    problem = make_problem(cp, Case(batch=4, heads=heads, q_len=2), lengths)
    kv_cache, table = pages.cache_in(problem, page_size, "one")
    wrong = [2**31 - 1, -5, 200, longest + 1]
    problem.kv_lens = cp.asarray(np.array(wrong, dtype=np.int32))
    narrow = cp.asarray(table)[:, :columns]
    got = run(problem, problem.q, kv_cache, narrow)
    problem.check(got[0].array, got[1].array)


@pytest.mark.parametrize(("page_size", "heads"), [(1, 16), (1, 80), (16, 32)])
def test_cache_beyond_32_bit_offsets(page_size: int, heads: int) -> None:
    """More than 2^32 elements; the pages in use lie at both ends, and around 2^31."""
    problem = make_problem(cp, Case(batch=2, heads=heads), np.array([333, 1000]))
    small, table = pages.cache_in(problem, page_size, "one")
    num_pages = 7_600_000 // page_size
    assert num_pages * page_size * HEAD_DIM > 1 << 32
    count = small.shape[0]
    middle = (1 << 31) // (HEAD_DIM * page_size)
    each = count // 3
    places = np.r_[:each, middle : middle + each, num_pages - (count - 2 * each) : num_pages]
    kv_bits = cp.full((num_pages, page_size, 1, HEAD_DIM), NAN_BITS["bfloat16"], dtype=cp.uint16)
    kv_bits[cp.asarray(places)] = small.view(cp.uint16)
    used = (table >= 0) & (table < count)
    table[used] = places[table[used]]
    got = run(problem, problem.q, typed(kv_bits, "bfloat16"), cp.asarray(table))
    check(problem, got)


def test_a_plan_serves_both_forms_of_arrays() -> None:
    """What is in one array or two is no matter of the plan; the page size is."""
    problem = make_problem(cp, Case(batch=3, heads=16, kv_len=900))
    kv_cache, table = pages.cache_in(problem, 16, "pair")
    whole, other_table = pages.cache_in(problem, 16, "one")
    plan = cumla.MLADecodePlan.from_arrays(pages.query_in(problem, "slices"), kv_cache)
    plan.update(problem.kv_lens)
    expected = run(problem, problem.q, problem.kv_cache, problem.block_table)
    for q, cache, numbers in (
        (pages.query_in(problem, "slices"), kv_cache, table),
        (problem.q, whole, other_table),
        (problem.q, kv_cache, table),
    ):
        outputs, there = list(problem.outputs()), cp.asarray(numbers)
        for _ in range(2):  # the second time as a launch that is ready
            assert_same_bits(run(problem, q, cache, there, outputs, plan=plan), expected)
    with pytest.raises(ValueError, match=r"^plan: made for .* 16, .* 64"):
        plan.run(**problem.inputs)
