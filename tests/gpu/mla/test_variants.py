# SPDX-License-Identifier: Apache-2.0
"""Every kernel that can serve a shape, whichever would be chosen: plans that are pinned to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.cases import Case, by_every_kernel, sample_of_every_kernel
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.repeats import Repeats, decode_by, plan_of

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
Array = Any

SAMPLE = {case.name: case for case in sample_of_every_kernel()}


def pinned(problem: Problem, variant: str) -> tuple[cumla.MLADecodePlan, Array]:
    """A plan and its buffer, in which all words are NaN."""
    case = problem.case
    nbytes = cumla.MLADecodePlan.workspace_bytes(
        case.batch, case.q_len, case.heads, num_kv_heads=case.kv_heads
    )
    buffer = cp.full(nbytes, 0xFF, dtype=cp.uint8)
    return plan_of(problem, variant, workspace=buffer), buffer


@pytest.mark.parametrize(("name", "variant"), by_every_kernel(SAMPLE))
def test_every_kernel_agrees_with_float64(name: str, variant: str, record_figures: Report) -> None:
    """A second run finds the tickets as the first one has left them, and pieces of NaN."""
    problem = make_problem(cp, SAMPLE[name])
    plan, buffer = pinned(problem, variant)
    expected = problem.expected()
    plan.update(problem.kv_lens)
    for _ in range(2):
        out, lse = problem.outputs("float32" if problem.case.outputs == "float32" else None)
        plan.run(
            **problem.inputs,
            softmax_scale=problem.softmax_scale,
            out=out.array,
            lse=lse.array,
        )
        record_figures(problem.check(out.array, lse.array, expected))
        out.check_guards()
        lse.check_guards()
        buffer[plan.key.layout.partial_rows :] = 0xFF


@pytest.mark.parametrize("heads", [16, 40, 128])
def test_the_kernel_of_a_shape_is_the_one_that_it_is_pinned_to(heads: int) -> None:
    """The kernels add up in other orders, so that bits tell which one ran."""
    problem = make_problem(cp, Case(batch=2, heads=heads, kv_len=3000, outputs="float32"))
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)

    def bits(variant: str | None) -> Array:
        out, lse = problem.outputs("float32")
        decode_by(variant, problem, out=out.array, lse=lse.array)
        return out.bits.copy()

    usual = bits(None)
    assert bool((bits(plan.key.variant) == usual).all())
    if heads == 16:
        assert not bool((bits("one_tile") == usual).all())


REPEATED = {
    "cut, few rows": (Case(batch=3, heads=4, q_len=3), [30_000, 65, 700]),
    "cut, one row tile": (Case(batch=3, heads=48, dtype="float16"), [30_000, 65, 700]),
    "cut, row tiles": (Case(batch=3, heads=48, q_len=2), [30_000, 65, 700]),
    "kv heads": (Case(batch=2, heads=48, kv_heads=3), [9000, 129]),
    "whole requests, some to a part": (Case(batch=300, heads=9), [70, 200, 0] * 100),
}
REPEATED_RUNS = by_every_kernel({name: case for name, (case, _) in REPEATED.items()})


@pytest.mark.parametrize(("name", "variant"), REPEATED_RUNS)
def test_20_repeats_agree_bit_for_bit(name: str, variant: str) -> None:
    """With other work that shifts when thread blocks start; two runs for each update."""
    case, lengths = REPEATED[name]
    problem = make_problem(cp, case, np.array(lengths))
    repeats = Repeats(problem, runs=2, variant=variant)
    assert repeats.plan.key.variant == variant
    other = cp.cuda.Stream(non_blocking=True)
    for seed in range(10):
        with other:
            kernels.noise(seed)
        with repeats.stream:
            repeats.step()
    assert repeats.finish() == 0
    other.synchronize()


CHANGING = (
    [33_000, 0, 0],
    [1, 20_000, 65],
    [33_000, 33_000, 33_000],
    [64, 64, 64],
    [0, 0, 0],
    [5000, 128, 4000],
)
IN_GRAPHS = {
    "few rows": Case(batch=3, heads=4, q_len=4),
    "one row tile": Case(batch=3, heads=20, q_len=3, dtype="float16"),
    "row tiles": Case(batch=3, heads=72, q_len=2),
    "kv heads": Case(batch=3, heads=24, kv_heads=3, q_len=2, causal=False),
}


@pytest.mark.parametrize(("name", "variant"), by_every_kernel(IN_GRAPHS))
def test_a_graph_whose_lengths_change(name: str, variant: str, record_figures: Report) -> None:
    """One graph of an update and two runs."""
    problem = make_problem(cp, IN_GRAPHS[name], np.full(3, 33_000))
    plan, _ = pinned(problem, variant)
    outputs = [problem.outputs() for _ in range(2)]
    stream = cp.cuda.Stream(non_blocking=True)
    plan.prepare()
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(problem.kv_lens)
        for out, lse in outputs:
            plan.run(**problem.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
    for lengths in CHANGING:
        problem.lengths = np.array(lengths, np.int32)
        problem.kv_lens.set(problem.lengths)
        for out, lse in outputs:
            out.repoison()
            lse.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = problem.expected()
        for out, lse in outputs:
            record_figures(problem.check(out.array, lse.array, expected))
            out.check_guards()
            lse.check_guards()
