# SPDX-License-Identifier: Apache-2.0
"""Ten thousand repeats that must agree bit for bit, compared on the device.

Each replay of a graph computes the schedule, attends, merges, compares the results with those of
the first call and makes them NaN again. Meanwhile other work occupies multiprocessors at random, so
that thread blocks start in other orders; a second test puts random delays before every arrival on a
barrier in the kernel itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu import kernels, variants
from tests.gpu.arrays import bits_of
from tests.gpu.cases import Case
from tests.gpu.problem import Problem, make_problem

cp: Any = pytest.importorskip("cupy")

CASES = {
    "one request cut into all parts": (Case(batch=1, heads=16), [17_003]),
    "cuts in every request": (Case(batch=3, heads=64, q_len=2), [4000, 0, 9000]),
    "two row tiles": (Case(batch=2, heads=128), [3000, 2500]),
    "kv heads": (Case(batch=2, heads=8, kv_heads=8, dtype="float16"), [2000, 129]),
    "whole requests, several to a part": (Case(batch=300, heads=16), [70] * 300),
}


def count_differences(problem: Problem, replays: int, *, noise: bool) -> int:
    """Words of out and lse that differed from the first call's in any of the replays."""
    stream = cp.cuda.Stream(non_blocking=True)
    out, lse = problem.outputs()
    wrong = cp.zeros(1, dtype=cp.uint32)
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    cp.cuda.Device().synchronize()
    with stream:

        def step() -> None:
            plan.update(problem.cache_seqlens)
            plan.run(*problem.arrays, out=out.array, lse=lse.array)

        step()
        problem.check(out.array, lse.array)
        first = out.bits.copy(), lse.bits.copy()

        def compare() -> None:
            kernels.compare_and_poison(out.bits, first[0], wrong)
            kernels.compare_and_poison(lse.bits, first[1], wrong)

        compare()
        assert int(wrong[0]) == 0
        kernels.noise(0)
        stream.synchronize()
        stream.begin_capture()
        for _ in range(10):
            step()
            compare()
        graph = stream.end_capture()
        other = cp.cuda.Stream(non_blocking=True)
        for seed in range(replays // 10):
            if noise:
                with other:
                    kernels.noise(seed)
            graph.launch(stream)
        stream.synchronize()
        other.synchronize()
        found = int(wrong[0])
    out.check_guards()
    lse.check_guards()
    return found


@pytest.mark.parametrize("name", CASES)
def test_10000_repeats_agree_bit_for_bit(name: str) -> None:
    case, lengths = CASES[name]
    problem = make_problem(cp, case, np.array(lengths))
    assert count_differences(problem, 10_000, noise=True) == 0


@pytest.mark.parametrize("name", [name for name in CASES if name != "kv heads"])
def test_repeats_with_random_delays_at_every_barrier(name: str) -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernel without them."""
    case, lengths = CASES[name]
    problem = make_problem(cp, case, np.array(lengths))
    expected = cumla.mla_decode(*problem.arrays)
    cp.cuda.Device().synchronize()
    with variants.installed(*variants.DELAYS):
        delayed = cumla.mla_decode(*problem.arrays)
        for one, other in zip(expected, delayed, strict=True):
            assert bool((bits_of(one) == bits_of(other)).all())
        assert count_differences(problem, 500, noise=False) == 0


def test_the_comparison_finds_a_missing_wait() -> None:
    """The same loop on a kernel that reads the other warpgroup's probabilities too early."""
    case, lengths = CASES["cuts in every request"]
    problem = make_problem(cp, case, np.array(lengths))
    with variants.installed(variants.MISSING_WAIT), pytest.raises(AssertionError):
        assert count_differences(problem, 1000, noise=True) == 0
