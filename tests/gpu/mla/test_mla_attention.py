# SPDX-License-Identifier: Apache-2.0
"""mla_attention over its grid and ragged mixes, against float64, with poisoned memory around."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.split.plan import TICKET_BYTES
from tests.gpu.tools import kernels, variants
from tests.gpu.tools.arrays import bits_of, to_torch
from tests.gpu.tools.parts import PART, TILE_PLACE, tile_parts_table, tile_places_table
from tests.gpu.tools.placements import (
    around,
    check_one_set_of_bits,
    check_random_batches,
    rows_of,
)
from tests.gpu.tools.problem import Guarded, typed
from tests.gpu.tools.ragged_problem import (
    GridCase,
    Ragged,
    RaggedProblem,
    covering_sample,
    make_ragged,
)
from tests.launch.split.ragged_schedule_mirror import schedule

KERNELS = ("ragged_schedule", "invariant_parts", "mla_decode")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]


def attend_and_check(problem: RaggedProblem, outputs: str = "given") -> dict[str, float]:
    """Every element of a request's rows must be written, and nothing else."""
    if outputs == "allocated":
        blocks = [cp.full(1 << 22, 0xFF, dtype=cp.uint8) for _ in range(2)]
        del blocks  # NaN for the allocator to hand out again
        result = cumla.mla_attention(**problem.arguments)
        assert str(result.out.dtype) == problem.case.dtype
        return problem.check(*result)
    out, lse = problem.outputs("float32" if outputs == "float32" else None)
    result = cumla.mla_attention(**problem.arguments, out=out.array, lse=lse.array)
    assert result.out is out.array
    assert result.lse is lse.array
    figures = problem.check(*result)
    problem.check_untouched(out, lse)
    return figures


def plan_of(problem: RaggedProblem, **options: Any) -> cumla.MLAAttentionPlan:
    return cumla.MLAAttentionPlan.from_arrays(
        problem.q,
        problem.kv_cache,
        qo_indptr=problem.qo_indptr,
        causal=problem.case.causal,
        **options,
    )


def run(plan: cumla.MLAAttentionPlan, problem: RaggedProblem) -> list[Guarded]:
    """Run once into poisoned outputs."""
    out, lse = problem.outputs()
    plan.run(**problem.inputs, out=out.array, lse=lse.array)
    problem.check_untouched(out, lse)
    return [out, lse]


def assert_same_bits(one: Any, other: Any, name: str = "") -> None:
    for a, b in zip(one, other, strict=True):
        assert bool((bits_of(a) == bits_of(b)).all()), name


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", covering_sample(), ids=lambda grid: grid.case.name)
def test_grid(grid: GridCase, record_figures: Report) -> None:
    record_figures(attend_and_check(make_ragged(cp, grid.case), grid.outputs))


MIXED_Q = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 17, 23, 64, 65, 114, 514, 2048, 1, 0)
MIXED_KV = (
    50,
    8736,
    1,
    3,
    700,
    0,
    64,
    7,
    8,
    4000,
    65,
    11,
    16,
    8736,
    64,
    200,
    114,
    3000,
    8736,
    0,
    0,
)
"""Decoding, verification and chunks of a prefill; some requests have fewer tokens than queries."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "paging"),
    [
        (16, 1, 64, "table"),
        (16, 2, 1, "list"),
        (48, 1, 16, "list"),
        (64, 1, 48, "table"),
        (96, 2, 64, "list"),
        (128, 1, 64, "list"),
    ],
)
def test_a_mix(
    heads: int, kv_heads: int, page_size: int, paging: str, causal: bool, record_figures: Report
) -> None:
    order = np.random.default_rng(heads).permutation(len(MIXED_Q))
    case = Ragged(
        q_lens=tuple(MIXED_Q[i] for i in order),
        kv_lens=tuple(MIXED_KV[i] for i in order),
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        paging=paging,
        causal=causal,
        dtype="float16" if heads == 48 else "bfloat16",
        before=7,
        behind=100,
    )
    record_figures(attend_and_check(make_ragged(cp, case)))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_prefill_of_16384_tokens(heads: int, record_figures: Report) -> None:
    """With many heads its last chunk only, of 4096 queries."""
    count = 16384 if heads == 16 else 4096
    case = Ragged(q_lens=(count, 1), kv_lens=(16384, 16384), heads=heads)
    record_figures(attend_and_check(make_ragged(cp, case)))


@pytest.mark.parametrize("heads", [16, 48, 128])
def test_rows_that_see_nothing(heads: int) -> None:
    """Whole tiles of them, beside rows of the same request that do; and without a mask."""
    for causal in (True, False):
        q_lens, kv_lens = (200, 9, 40, 1, 17), (3, 0, 39, 0, 16)
        case = Ragged(q_lens=q_lens, kv_lens=kv_lens, heads=heads, causal=causal)
        problem = make_ragged(cp, case)
        out, lse = problem.outputs()
        cumla.mla_attention(**problem.arguments, out=out.array, lse=lse.array)
        problem.check(out.array, lse.array)
        blind = lse.array[:197] if causal else lse.array[200:209]
        assert bool((blind == -np.inf).all())
        problem.check_untouched(out, lse)


@pytest.mark.parametrize("paging", ["table", "list"])
@pytest.mark.parametrize("heads", [3, 9, 63, 126])
def test_odd_heads_and_every_tail(heads: int, paging: str, record_figures: Report) -> None:
    lengths = (1, 2, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
    q_lens = tuple(1 + 5 * i % 23 for i in range(len(lengths)))
    case = Ragged(q_lens=q_lens, kv_lens=lengths, heads=heads, paging=paging, page_size=16)
    record_figures(attend_and_check(make_ragged(cp, case)))


def test_nothing_but_requests_without_queries() -> None:
    case = Ragged(q_lens=(0, 0, 0), kv_lens=(5, 0, 700), behind=9)
    attend_and_check(make_ragged(cp, case))


@pytest.mark.parametrize("batch", [1024, 1500, 3000])
def test_more_requests_than_threads_of_the_schedule(batch: int, record_figures: Report) -> None:
    rng = np.random.default_rng(batch)
    q_lens = tuple(int(n) for n in rng.integers(0, 3, batch))
    lengths = np.where(np.arange(batch) % 97 == 5, 5000, rng.integers(0, 70, batch))
    kv_lens = tuple(int(n) for n in lengths)
    case = Ragged(q_lens=q_lens, kv_lens=kv_lens, page_size=16)
    record_figures(attend_and_check(make_ragged(cp, case)))


@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 64, 128, 256])
def test_shared_pages(page_size: int, record_figures: Report) -> None:
    """A prefix of 768 tokens, whole pages of every size, lies in the same pages for all."""
    paging = "list" if page_size in (1, 48, 128) else "table"
    case = Ragged(
        q_lens=(1, 40, 3, 0, 7),
        kv_lens=(2000, 808, 771, 1300, 900),
        heads=64,
        page_size=page_size,
        paging=paging,
        cache_form="pair",
        shared=768,
    )
    record_figures(attend_and_check(make_ragged(cp, case)))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_list_gives_the_bits_of_a_table(page_size: int) -> None:
    case = Ragged(q_lens=(1, 70, 3, 17), kv_lens=(3000, 700, 64, 9), heads=48, page_size=page_size)
    results = []
    for paging in ("table", "list"):
        problem = make_ragged(cp, dataclasses.replace(case, paging=paging))
        results.append(cumla.mla_attention(**problem.arguments))
    assert_same_bits(*results)


# --- values out of range --------------------------------------------------------------------------


@pytest.mark.parametrize("paging", ["table", "list"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_lengths_are_clamped(page_size: int, paging: str) -> None:
    """To what the pages hold, and to 0; no memory but the cache is read."""
    case = Ragged(
        q_lens=(1, 20, 3, 1, 5), kv_lens=(256, 256, 0, 256, 0), page_size=page_size, paging=paging
    )
    problem = make_ragged(cp, case)
    if paging == "table":
        table = problem.paging["block_table"][:, : 256 // page_size]
        problem.paging["block_table"] = cp.ascontiguousarray(table)
    wrong = [2**31 - 1, 257, -5, 1 << 30, -(2**31)]
    problem.kv_lens = cp.asarray(np.array(wrong, dtype=np.int32))
    attend_and_check(problem)


@pytest.mark.parametrize(
    "indptr",
    [
        [-5, 3, 3, 2**31 - 1],
        [10, 4, 2, 30],
        [20, 20, 10, 5],
        [0, 2**31 - 1, 2**31 - 1, 2**31 - 1],
        [-(2**31), -1, 40, 44],
        [44, 44, 60, 70],
        [0, 5, -1, -1],
        [0, 5, -(2**31) + 44, -(2**31)],
        [2**31 - 1, -(2**31), 2**31 - 1, -(2**31)],
        [3, 9, 2**31 - 1, -(2**31)],
        [7, -(2**31) + 7, -(2**31) + 6, 44],
    ],
)
@pytest.mark.parametrize("heads", [16, 128])
def test_offsets_are_clamped(heads: int, indptr: list[int]) -> None:
    """Where they fall a request has no queries, by however much; rows of nobody stay poisoned."""
    case = Ragged(q_lens=(14, 10, 20), kv_lens=(300, 64, 129), heads=heads)
    problem = make_ragged(cp, case)
    problem.qo_indptr = cp.asarray(np.array(indptr, np.int32))
    out, lse = problem.outputs()
    cumla.mla_attention(**problem.arguments, out=out.array, lse=lse.array)
    expected = problem.expected(np.clip(np.array(indptr), 0, 44))
    problem.check(out.array, lse.array, expected)
    problem.check_untouched(out, lse, expected[2])


@pytest.mark.parametrize("paging", ["table", "list"])
def test_page_numbers_out_of_range_read_as_zeros(paging: str) -> None:
    case = Ragged(q_lens=(2, 30, 1), kv_lens=(700, 300, 64), paging=paging)
    problem = make_ragged(cp, case)
    num_pages = len(problem.kv_bits)
    zeros = cp.zeros((1, *problem.kv_bits.shape[1:]), dtype=cp.uint16)
    problem.kv_bits = cp.concatenate([problem.kv_bits, zeros])  # the reference's page of zeros
    for r, i, bad in ((0, 3, -1), (0, 10, num_pages), (1, 0, 2147480000), (2, 0, -(2**31))):
        problem.pages[r] = problem.pages[r].copy()
        problem.pages[r][i] = num_pages
        if paging == "table":
            problem.paging["block_table"][r, i] = bad
        else:
            begin = int(problem.paging["kv_indptr"][r])
            problem.paging["kv_indices"][begin + i] = bad
    attend_and_check(problem)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_offsets_of_pages_outside_of_the_list_lead_nowhere(page_size: int) -> None:
    """What they give is undefined; nothing but the outputs is written, and nothing else read."""
    case = Ragged(q_lens=(3, 40), kv_lens=(300, 700), paging="list", page_size=page_size)
    problem = make_ragged(cp, case)
    listed = problem.paging["kv_indptr"].copy()
    problem.kv_lens[...] = 700
    for wrong in ([-(2**31), 0, 2**31 - 1], [2**31 - 999, 2**31 - 1, 2**31 - 1], [0, 10**6, 10**7]):
        problem.paging["kv_indptr"] = cp.asarray(np.array(wrong, np.int32))
        out, lse = problem.outputs()
        cumla.mla_attention(**problem.arguments, out=out.array, lse=lse.array)
        problem.check_untouched(out, lse)
    problem.paging["kv_indptr"] = listed
    problem.kv_lens = cp.asarray(np.array(case.kv_lens, np.int32))
    attend_and_check(problem)


# --- layout ---------------------------------------------------------------------------------------


def test_strided_outputs_and_lengths() -> None:
    """Padding between the rows of out stays as it was; lse may have its axes swapped."""
    problem = make_ragged(cp, Ragged(heads=24, before=2))
    tokens, heads = problem.case.total_tokens, problem.case.heads
    base = cp.full((tokens, heads + 2, 520), 0xFFFF, dtype=cp.uint16)
    out = base[:, :heads, :512].view(problem.q.dtype)
    lse = cp.full((heads, tokens), np.nan, dtype=cp.float32).T
    for name in ("qo_indptr", "kv_lens"):
        array = getattr(problem, name)
        spread = cp.full(3 * array.size, -7, dtype=cp.int32)
        spread[::3] = array
        setattr(problem, name, spread[::3])
    cumla.mla_attention(**problem.arguments, out=out, lse=lse)
    problem.check(cp.ascontiguousarray(out), cp.ascontiguousarray(lse))
    base[2:, :heads, :512] = 0xFFFF
    assert bool((base == 0xFFFF).all())


def test_inputs_are_left_alone() -> None:
    problem = make_ragged(cp, Ragged(paging="list"))
    arrays = [problem.q.view(cp.uint16), problem.kv_cache.view(cp.uint16)]
    arrays += [problem.qo_indptr, problem.kv_lens, *problem.paging.values()]
    before = [array.copy() for array in arrays]
    cumla.mla_attention(**problem.arguments)
    for array, copy in zip(arrays, before, strict=True):
        assert bool((array == copy).all())


# --- plans ----------------------------------------------------------------------------------------

SCHEDULES = {
    "a mix": Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, heads=128, behind=50),
    "no mask": Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, heads=48, causal=False),
    "kv heads": Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, heads=96, kv_heads=2),
    "a list": Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, paging="list", page_size=16),
    "one long one": Ragged(q_lens=(1,), kv_lens=(60_000,), page_size=256),
    "one tile a request": Ragged(q_lens=(4,) * 200, kv_lens=(2000,) * 200),
    "many": Ragged(q_lens=(1, 0) * 1500, kv_lens=(3, 900) * 1500),
}


def check_schedule(plan: cumla.MLAAttentionPlan, buffer: Any, lengths: dict[str, Any]) -> None:
    """Compare what lies in the buffer with what follows from the NumPy mirror."""
    key, layout = plan.key, plan.key.layout
    host = {name: array.get() for name, array in lengths.items()}
    made = schedule(host["qo_indptr"], host["kv_lens"], host.get("kv_indptr"), key)
    memory = buffer[: layout.partial_rows].get()
    places = memory[layout.places : layout.places + len(made.places) * TILE_PLACE.itemsize]
    parts = memory[layout.parts : layout.parts + key.parts * PART.itemsize]
    tickets = memory[layout.tickets : layout.tickets + key.num_tickets * TICKET_BYTES]
    for found, wanted in (
        (places.view(TILE_PLACE), tile_places_table(made)),
        (parts.view(PART), tile_parts_table(made)),
    ):
        for field in wanted.dtype.names or ():
            np.testing.assert_array_equal(found[field], wanted[field], err_msg=field)
    assert not tickets.any()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_equals_its_mirror(name: str) -> None:
    case = SCHEDULES[name]
    problem = make_ragged(cp, case)
    size = cumla.MLAAttentionPlan.workspace_bytes(
        len(case.q_lens), case.total_tokens, case.heads, num_kv_heads=case.kv_heads
    )
    buffer = cp.empty(size, cp.uint8)
    plan = plan_of(problem, workspace=buffer)
    rng = np.random.default_rng(3)
    batch, total = len(case.q_lens), case.total_tokens
    ends = np.sort(rng.integers(-3, total + 9, (4, batch + 1)), axis=1)
    offsets = [case.qo_indptr, *ends, rng.integers(-(2**31), 2**31 - 1, batch + 1)]
    for number, indptr in enumerate(offsets):
        kv_lens = np.array(case.kv_lens) if number == 0 else rng.integers(-9, 9000, batch)
        if number == len(offsets) - 1:
            kv_lens = rng.integers(-(2**31), 2**31 - 1, batch)
        lengths = problem.lengths | {
            "qo_indptr": cp.asarray(indptr.astype(np.int32)),
            "kv_lens": cp.asarray(kv_lens.astype(np.int32)),
        }
        buffer[: plan.key.layout.partial_rows] = 0x77
        plan.update(**lengths)
        check_schedule(plan, buffer, lengths)


@pytest.mark.parametrize("paging", ["table", "list"])
@pytest.mark.parametrize("heads", [16, 48, 128])
def test_a_plan_gives_the_bits_of_a_call(heads: int, paging: str) -> None:
    """Again and again, with garbage in its buffer before each update."""
    case = Ragged(
        q_lens=(1, 70, 3, 0, 300),
        kv_lens=(9000, 700, 64, 9, 5000),
        heads=heads,
        page_size=16,
        paging=paging,
    )
    problem = make_ragged(cp, case)
    expected = cumla.mla_attention(**problem.arguments)
    problem.check(*expected)
    size = cumla.MLAAttentionPlan.workspace_bytes(5, case.total_tokens, heads)
    guard = 4096
    buffer = cp.empty(size + guard, cp.uint8)
    plan = plan_of(problem, workspace=buffer[:size])
    for byte in (0xFF, 0x00, 0x7F):
        buffer[...] = byte
        plan.update(**problem.lengths)
        for _ in range(4):
            out, lse = run(plan, problem)
            assert_same_bits((out.array, lse.array), expected)
        assert bool((buffer[size:] == byte).all()), "memory behind the workspace was written"


def one_of(problem: RaggedProblem, requests: list[int]) -> dict[str, Any]:
    """Arguments of a call with these requests alone, in this order; pages as a table."""
    bounds, q_lens = problem.case.qo_indptr, problem.case.q_lens
    rows = np.concatenate([np.arange(bounds[r], bounds[r + 1]) for r in requests])
    ends = np.cumsum([0, *(q_lens[r] for r in requests)]).astype(np.int32)
    index = cp.asarray(np.array(requests))
    return problem.arguments | {
        "q": typed(problem.q_bits[cp.asarray(rows)], problem.case.dtype),
        "kv_lens": problem.kv_lens[index],
        "qo_indptr": cp.asarray(ends),
        "block_table": problem.paging["block_table"][index],
    }


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_a_batch_invariant_request_has_the_same_bits_in_any_batch(
    heads: int, record_figures: Report
) -> None:
    """Alone, and in other orders among few and many; of up to 8 tokens it is cut, else whole."""
    q_lens = (1, 8, 9, 2, 1, 0, 300, 4)
    kv_lens = (9000, 4097, 5000, 2048, 2049, 700, 6000, 0)
    problem = make_ragged(cp, Ragged(q_lens=q_lens, kv_lens=kv_lens, heads=heads))
    out, lse = problem.outputs()
    whole = cumla.mla_attention(
        **problem.arguments, batch_invariant=True, out=out.array, lse=lse.array
    )
    record_figures(problem.check(*whole))
    problem.check_untouched(out, lse)
    plan = plan_of(problem, batch_invariant=True, max_kv_len=max(kv_lens))
    plan.update(**problem.lengths)
    assert_same_bits([output.array for output in run(plan, problem)], whole, "a plan")
    bounds = problem.case.qo_indptr
    rng = np.random.default_rng(heads)
    batches = [[r] for r in range(8)] + [rng.permutation(8).tolist() for _ in range(3)]
    batches.append(rng.integers(0, 8, 150).tolist())  # more parts than multiprocessors
    for batch in batches:
        got = cumla.mla_attention(**one_of(problem, batch), batch_invariant=True)
        begin = 0
        for request in batch:
            rows, tokens = slice(bounds[request], bounds[request + 1]), q_lens[request]
            for found, wanted in zip(got, whole, strict=True):
                here = bits_of(found[begin : begin + tokens])
                assert (here == bits_of(wanted[rows])).all(), (batch, request)
            begin += tokens


def test_repeats_give_the_same_bits() -> None:
    problem = make_ragged(cp, Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, heads=64))
    plan = plan_of(problem)
    plan.update(**problem.lengths)
    first = run(plan, problem)
    out, lse = problem.outputs()
    for _ in range(200):
        plan.run(**problem.inputs, out=out.array, lse=lse.array)
        assert_same_bits((out.array, lse.array), [output.array for output in first])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_delays_at_every_barrier(page_size: int) -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernel without them."""
    case = Ragged(q_lens=MIXED_Q, kv_lens=MIXED_KV, heads=64, page_size=page_size)
    problem = make_ragged(cp, case)
    plan = plan_of(problem)
    plan.update(**problem.lengths)
    first = [output.array.copy() for output in run(plan, problem)]
    with variants.installed(*variants.DELAYS, page_size=page_size):
        for _ in range(50):
            assert_same_bits([output.array for output in run(plan, problem)], first)


def test_several_layers() -> None:
    """One update, and arrays that change from run to run."""
    layers = [make_ragged(cp, Ragged(heads=32, kv_lens=(3000, 64, 17, 65), seed=i)) for i in (0, 1)]
    plan = plan_of(layers[0])
    plan.update(**layers[0].lengths)
    for problem in (*layers, *layers):
        out, lse = run(plan, problem)
        problem.check(out.array, lse.array)


LATER = (
    ((1, 1, 1, 1), (3000, 5, 64, 2999)),
    ((0, 200, 0, 24), (0, 3000, 7, 20)),
    ((0, 0, 0, 0), (3000, 3000, 3000, 3000)),
    ((64, 64, 64, 64), (64, 65, 3000, 1)),
    ((256, 0, 0, 0), (3000, 0, 0, 0)),
)


@pytest.mark.parametrize("paging", ["table", "list"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_serves_whatever_lengths_the_arrays_hold(heads: int, paging: str) -> None:
    """At the same most requests and query tokens; rows of nobody stay as they are."""
    case = Ragged(q_lens=(64,) * 4, kv_lens=(3000,) * 4, heads=heads, paging=paging)
    problem = make_ragged(cp, case)
    plan = plan_of(problem)
    plan.prepare()
    out, lse = problem.outputs()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(**problem.lengths)
        plan.run(**problem.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
    for q_lens, kv_lens in LATER:
        indptr = np.cumsum([0, *q_lens]).astype(np.int32)
        problem.qo_indptr.set(indptr)
        problem.kv_lens.set(np.array(kv_lens, np.int32))
        out.repoison()
        lse.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        expected = problem.expected(indptr, np.array(kv_lens))
        problem.check(out.array, lse.array, expected)
        problem.check_untouched(out, lse, expected[2])


def test_a_side_stream() -> None:
    """What that stream does before, and late, is seen; another stream would come too early."""
    problem = make_ragged(cp, Ragged(heads=64))
    expected = cumla.mla_attention(**problem.arguments)
    plan = plan_of(problem)
    plan.update(**problem.lengths)
    stream = cp.cuda.Stream(non_blocking=True)
    late = [cp.zeros_like(array) for array in (problem.qo_indptr, problem.kv_lens)]
    out, lse = problem.outputs()
    elsewhere = plan.run(**problem.inputs, stream=stream)  # behind the update, on the device
    cp.cuda.Device().synchronize()
    assert_same_bits(elsewhere, expected)
    with stream:
        kernels.spin(100_000_000)
        for array, now in zip(late, (problem.qo_indptr, problem.kv_lens), strict=True):
            array[...] = now
    problem.qo_indptr, problem.kv_lens = late
    result = cumla.mla_attention(**problem.arguments, stream=stream)
    plan.update(**problem.lengths, stream=stream)
    plan.run(**problem.inputs, out=out.array, lse=lse.array, stream=stream)
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    assert_same_bits(result, expected)
    assert_same_bits((out.array, lse.array), expected)


GARBAGE_WORDS = (
    lambda rng, size: rng.integers(0, 200, size),
    lambda rng, size: rng.integers(-3, 50, size) & 0xFFFFFFFF,
    lambda rng, size: rng.integers(0, 1 << 32, size),
    lambda rng, size: rng.choice(np.array([0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]), size),
)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_garbage_in_the_buffer_leads_nowhere(heads: int, page_size: int) -> None:
    """As if another plan had written there since the update: nothing but the outputs suffers."""
    case = Ragged(
        q_lens=(1, 70, 3), kv_lens=(3000, 700, 64), heads=heads, page_size=page_size, before=3
    )
    problem = make_ragged(cp, case)
    nbytes = cumla.MLAAttentionPlan.workspace_bytes(3, case.total_tokens, heads)
    buffer = cp.full(nbytes + (4 << 20), 0xFF, cp.uint8)
    plan = plan_of(problem, workspace=buffer[:nbytes])
    layout = plan.key.layout
    out, lse = problem.outputs()
    rng = np.random.default_rng(1)
    for garbage in GARBAGE_WORDS * 2:
        for begin, end in (
            (0, layout.partial_rows),
            (layout.places, layout.parts),
            (layout.parts, layout.tickets),
            (layout.tickets, layout.partial_rows),
        ):
            plan.update(**problem.lengths)
            words = buffer[begin:end].view(np.uint32)
            words.set(garbage(rng, words.size).astype(np.uint32))
            buffer[layout.partial_rows : nbytes].view(np.uint32)[...] = 0x7FC00001
            plan.run(**problem.inputs, out=out.array, lse=lse.array)
            plan.run(**problem.inputs, out=out.array, lse=lse.array)
            cp.cuda.Device().synchronize()
            out.check_guards()
            lse.check_guards()
            assert bool((buffer[nbytes:] == 0xFF).all()), "memory behind the workspace was written"
    plan.update(**problem.lengths)
    problem.check(*(output.array for output in run(plan, problem)))


# --- other ways in --------------------------------------------------------------------------------


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    problem = make_ragged(cp, Ragged(paging="list", page_size=16, heads=32))
    arguments = {
        name: to_torch(torch, value) if isinstance(value, cp.ndarray) else value
        for name, value in problem.arguments.items()
    }
    expected = cumla.mla_attention(**problem.arguments)
    cp.cuda.Device().synchronize()
    out, lse = cumla.mla_attention(**arguments)
    torch.cuda.synchronize()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.view(torch.int16), to_torch(torch, expected.out).view(torch.int16))
    assert torch.equal(lse, to_torch(torch, expected.lse))


def test_check_mode_finds_what_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    problem = make_ragged(cp, Ragged(paging="list"))
    out, lse = problem.outputs()
    cumla.mla_attention(**problem.arguments, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array)
    plan = plan_of(problem)
    plan.update(**problem.lengths)
    run(plan, problem)
    out.repoison()
    problem.paging["kv_indices"][int(problem.paging["kv_indptr"][1])] = -1
    with pytest.raises(ValueError, match=r"^kv_indices\[7\]: needs a page number from 0"):
        cumla.mla_attention(**problem.arguments, out=out.array)
    with pytest.raises(ValueError, match=r"^kv_indices\[7\]: needs a page number from 0"):
        plan.run(**problem.inputs, out=out.array)
    problem.kv_lens[1] = 65
    with pytest.raises(ValueError, match=r"^kv_lens\[1\]: needs a length from 0 to 64"):
        plan.update(**problem.lengths)
    assert bool((out.bits == out.ones).all())


# --- numbers of queries ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 0, 63, 100, 300, 1000], ids=str)
@pytest.mark.parametrize(
    ("heads", "page_size", "plan"),
    [
        pytest.param(16, 64, {}, id="16"),
        pytest.param(128, 16, {}, id="128"),
        pytest.param(16, 64, {"max_kv_len": 1}, id="16-uncut"),
        pytest.param(40, 1, {"max_kv_len": 1}, id="40-uncut"),
    ],
)
def test_a_token_has_its_bits_among_any_number_of_queries(
    heads: int, page_size: int, plan: dict[str, Any], window: int | None
) -> None:
    """Among 1, 2, 3 and 8, between two cuts; without cuts in chunks of a prompt, too."""
    rng, pages = cp.random.default_rng(heads), -(-6000 // page_size)
    cache, q = (
        rng.standard_normal((*shape, 576), np.float32).astype(np.float16)
        for shape in ((pages, page_size, 1), (6000, heads))
    )
    table = cp.asarray(np.random.default_rng(heads).permutation(pages).astype(np.int32))
    for begin in (100, 700, 1500, 5000):
        placements = around(begin) + around(begin + 64)
        if plan:
            placements += [(begin + 4, 70), (begin + 40, 100)]
        rows, ends, lens = rows_of(placements)
        there = q[cp.asarray(rows)]
        lengths = {"kv_lens": cp.asarray(lens), "qo_indptr": cp.asarray(ends)}
        tables = cp.ascontiguousarray(cp.broadcast_to(table, (len(lens), pages)))
        modes: dict[str, Any] = {"window": window, "batch_invariant": True}
        if plan:
            bounds = lengths["qo_indptr"]
            made = cumla.MLAAttentionPlan.from_arrays(
                there, cache, qo_indptr=bounds, **modes, **plan
            )
            made.update(**lengths)
            found = made.run(there, cache, block_table=tables)
        else:
            found = cumla.mla_attention(there, cache, **lengths, block_table=tables, **modes)
        check_one_set_of_bits(rows, map(bits_of, found))


@pytest.mark.parametrize("name", ["16 heads", "window", "one split"])
def test_random_batches(name: str) -> None:
    """Each request has one set of bits, in calls and by plans."""
    check_random_batches(f"mla_attention, {name}")
