# SPDX-License-Identifier: Apache-2.0
"""``batch_invariant=True``: a request keeps its bits, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.split.plan import BLOCK_TOKENS, min_saving, piece_blocks
from tests.gpu.tools import kernels
from tests.gpu.tools.cases import Case
from tests.gpu.tools.placements import check_random_batches
from tests.gpu.tools.problem import Problem, make_problem, typed
from tests.gpu.tools.repeats import plan_of

KERNELS = ("schedule", "mla_decode", "mla_decode_invariant", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

Array = Any

SHAPES = [
    *(Case(q_len=q_len, heads=heads) for heads in (16, 64, 128) for q_len in (1, 2)),
    Case(heads=64, kv_heads=4, dtype="float16"),
    Case(heads=40, q_len=3, causal=False, inputs="1", softmax="192"),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda case: case.name)


def row_groups_of(case: Case) -> int:
    return min(4, -(-case.q_len * case.heads // case.kv_heads // 16))


def tiles_of(case: Case) -> int:
    return case.kv_heads * -(-case.q_len * case.heads // case.kv_heads // 64)


def tokens_between_cuts(case: Case) -> int:
    return piece_blocks(row_groups_of(case)) * BLOCK_TOKENS


def lengths_at_cuts(case: Case) -> list[int]:
    """Around multiples of what lies between cuts, and where a last piece gets long enough."""
    each = tokens_between_cuts(case)
    first_cut = each + (min_saving(row_groups_of(case), tiles_of(case)) - 1) * BLOCK_TOKENS
    return [
        *(1, 63, 64, 65),
        *(pieces * each + more for pieces in (1, 2, 3) for more in (-1, 0, 1)),
        *(pieces * each + first_cut + more for pieces in (0, 1) for more in (0, 1)),
    ]


def pool_of(shape: Case, batch: int = 64) -> Problem:
    """A batch of requests with the lengths above, some without tokens, and others at random."""
    rng = np.random.default_rng(shape.heads + shape.q_len)
    lengths = [*lengths_at_cuts(shape), 0, 0, 0]
    rest = rng.integers(0, 3 * tokens_between_cuts(shape), batch - len(lengths))
    case = dataclasses.replace(shape, batch=batch, seed=shape.heads)
    return make_problem(cp, case, rng.permutation(np.concatenate([lengths, rest])))


def chosen(problem: Problem, requests: Sequence[int], *, narrow: bool = False) -> Problem:
    """The same call for these requests alone, in this order; `narrow`: in as few table columns."""
    index = np.array(requests)
    lengths, table = problem.lengths[index], problem.table[index]
    if narrow:
        table = np.ascontiguousarray(table[:, : max(1, -(-int(lengths.max()) // BLOCK_TOKENS))])
    q_bits = problem.q_bits[cp.asarray(index)]
    return dataclasses.replace(
        problem,
        case=dataclasses.replace(problem.case, batch=len(index)),
        lengths=lengths,
        table=table,
        q_bits=q_bits,
        q=typed(q_bits, problem.case.dtype),
        block_table=cp.asarray(table),
        kv_lens=cp.asarray(lengths),
    )


def bits_of_call(problem: Problem, plan: cumla.MLADecodePlan | None = None) -> Array:
    """Bits of out and lse of a call or a run, (batch, bytes): those of a request in one row."""
    out, lse = problem.outputs()
    options = {"softmax_scale": problem.softmax_scale, "out": out.array, "lse": lse.array}
    if plan is None:
        modes = {"causal": problem.case.causal, "batch_invariant": True}
        cumla.mla_decode(*problem.arrays, **modes, **options)
    else:
        plan.run(**problem.inputs, **options)
    out.check_guards()
    lse.check_guards()
    return rows_of(out.bits, lse.bits)


def rows_of(*results: Array) -> Array:
    rows = (bits.reshape(len(bits), -1).view(cp.uint8) for bits in results)
    return cp.concatenate(list(rows), axis=1)


def invariant_plan(problem: Problem, max_kv_len: int, **options: Any) -> cumla.MLADecodePlan:
    return plan_of(problem, batch_invariant=True, max_kv_len=max_kv_len, **options)


def same(one: Array, other: Array) -> bool:
    return bool((one == other).all())


# --- other batches -------------------------------------------------------------------------------


@every_shape
def test_the_results_are_right(shape: Case, record_figures: Any) -> None:
    problem = pool_of(shape)
    out, lse = problem.outputs()
    arguments = {"softmax_scale": problem.softmax_scale, "causal": shape.causal}
    cumla.mla_decode(
        *problem.arrays, **arguments, batch_invariant=True, out=out.array, lse=lse.array
    )
    record_figures(problem.check(out.array, lse.array))
    out.check_guards()
    lse.check_guards()


@every_shape
def test_a_request_has_the_same_bits_alone_and_among_others(shape: Case) -> None:
    """With two others, first, second and last; with a table as narrow as it can be."""
    problem = pool_of(shape)
    pool = bits_of_call(problem)
    longest = int(problem.lengths.max())
    alone = [invariant_plan(chosen(problem, [i]), longest).key for i in range(2)]
    # Alone its thread blocks wait for each other and share the joining; in the pool the last joins.
    assert all(key.may_wait for key in alone)
    assert not invariant_plan(problem, longest).key.may_wait
    rng = np.random.default_rng(0)
    for length in {0, *lengths_at_cuts(shape)}:
        request = int(np.flatnonzero(problem.lengths == length)[0])
        for narrow in (False, True):
            alone_bits = bits_of_call(chosen(problem, [request], narrow=narrow))
            assert same(alone_bits[0], pool[request]), (length, narrow)
        for place in range(3):
            batch = [int(i) for i in rng.choice(64, 3)]
            batch[place] = request
            got = bits_of_call(chosen(problem, batch))
            assert same(got, pool[cp.asarray(batch)]), (length, batch)


@every_shape
def test_a_request_has_the_same_bits_at_another_place_of_a_large_batch(shape: Case) -> None:
    """Turned round, mixed, and several times in a batch that is larger than the GPU."""
    problem = pool_of(shape)
    pool = bits_of_call(problem)
    rng = np.random.default_rng(1)
    for order in (np.arange(64)[::-1], rng.permutation(64), rng.choice(64, 300)):
        assert same(bits_of_call(chosen(problem, order)), pool[cp.asarray(order)])


@every_shape
def test_a_plan_gives_the_bits_of_a_call(shape: Case) -> None:
    """Whatever the longest request that it has room for."""
    problem = pool_of(shape)
    wanted = bits_of_call(problem)
    longest = int(problem.lengths.max())
    for max_kv_len in (longest, longest + 1, 2 * longest):
        plan = invariant_plan(problem, max_kv_len)
        plan.update(problem.kv_lens)
        for _ in range(2):
            assert same(bits_of_call(problem, plan), wanted), max_kv_len


def test_more_requests_than_threads_of_the_schedule() -> None:
    problem = pool_of(Case(heads=16))
    pool = bits_of_call(problem)
    order = np.random.default_rng(2).choice(64, 2500)
    assert same(bits_of_call(chosen(problem, order)), pool[cp.asarray(order)])


@pytest.mark.parametrize("heads", [16, 128])
def test_more_pieces_than_the_gpu_holds(heads: int, record_figures: Any) -> None:
    """The last thread blocks of a request join, the last one to come, or all: the same bits."""
    shape = Case(heads=heads)
    longest = 150 * tokens_between_cuts(shape) // tiles_of(shape)
    lengths = np.array([longest, 5000, longest - 700, 70])
    problem = make_problem(cp, dataclasses.replace(shape, batch=4), lengths)
    pool = bits_of_call(problem)
    out, lse = problem.outputs()
    arguments = {"softmax_scale": problem.softmax_scale, "batch_invariant": True}
    cumla.mla_decode(*problem.arrays, **arguments, out=out.array, lse=lse.array)
    record_figures(problem.check(out.array, lse.array))
    for batch in ([0], [2], [3, 2], [2, 0], [0, 3, 1]):
        assert same(bits_of_call(chosen(problem, batch)), pool[cp.asarray(batch)]), batch
    for batch in ([1], [3, 1]):
        assert same(bits_of_call(chosen(problem, batch, narrow=True)), pool[cp.asarray(batch)])


@pytest.mark.parametrize(
    "name", ["mla_decode, 16 heads", "mla_decode, 128 heads", "mla_decode, 128 heads, 2 tokens"]
)
def test_random_batches(name: str) -> None:
    """Each request has one set of bits, in calls and by plans."""
    check_random_batches(name)


# --- other times ---------------------------------------------------------------------------------


@every_shape
def test_a_graph_whose_lengths_change(shape: Case) -> None:
    """Each replay gives every request the bits that it has alone."""
    each = tokens_between_cuts(shape)
    longest = 3 * each + 100
    case = dataclasses.replace(shape, batch=3)
    problem = make_problem(cp, case, np.full(3, longest))
    plan = invariant_plan(problem, longest)
    out, lse = problem.outputs()
    stream = cp.cuda.Stream(non_blocking=True)
    plan.prepare()
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(problem.kv_lens)
        plan.run(
            **problem.inputs,
            softmax_scale=problem.softmax_scale,
            out=out.array,
            lse=lse.array,
        )
        graph = stream.end_capture()
    for lengths in (
        [each, 2 * each, longest],
        [longest, each + 1, 0],
        [0, 0, 0],
        [64, longest, 2 * each - 1],
        [3 * each, 1, 3 * each + 1],
    ):
        problem.lengths = np.array(lengths, np.int32)
        problem.kv_lens.set(problem.lengths)
        out.repoison()
        lse.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        problem.check(out.array, lse.array)
        out.check_guards()
        lse.check_guards()
        replayed = rows_of(out.bits, lse.bits)
        for request in range(3):
            assert same(bits_of_call(chosen(problem, [request]))[0], replayed[request]), lengths


@every_shape
def test_20_repeats_agree_bit_for_bit(shape: Case) -> None:
    """With pieces of the last run made NaN, and other work that shifts when thread blocks start."""
    problem = pool_of(shape)
    wanted = bits_of_call(problem)
    longest = int(problem.lengths.max())
    case = problem.case
    nbytes = cumla.MLADecodePlan.workspace_bytes(
        case.batch,
        case.q_len,
        case.heads,
        num_kv_heads=case.kv_heads,
        batch_invariant=True,
        max_kv_len=longest,
    )
    workspace = cp.empty(nbytes, dtype=cp.uint8)
    plan = invariant_plan(problem, longest, workspace=workspace)
    other = cp.cuda.Stream(non_blocking=True)
    kernels.noise(0)
    cp.cuda.Device().synchronize()
    for seed in range(20):
        with other:
            kernels.noise(seed)
        plan.update(problem.kv_lens)
        workspace[plan.key.layout.partial_rows :] = 0xFF
        assert same(bits_of_call(problem, plan), wanted), seed
    other.synchronize()


# --- lengths out of range ------------------------------------------------------------------------


def test_requests_beyond_max_seqlen_are_cut_off() -> None:
    """At the next multiple of 64 tokens; garbage lengths stay inside of the cache, too."""
    problem = make_problem(cp, Case(batch=6, heads=16, q_len=2), np.full(6, 2048))
    lengths = np.array([1000, 1001, 2048, 2**31 - 1, -5, 7], np.int32)
    problem.kv_lens.set(lengths)
    plan = invariant_plan(problem, 1001)
    plan.update(problem.kv_lens)
    out, lse = problem.outputs()
    plan.run(**problem.inputs, out=out.array, lse=lse.array)
    cut = np.clip(lengths, 0, 1024)
    problem.check(out.array, lse.array, problem.expected(cut))
    out.check_guards()
    lse.check_guards()
