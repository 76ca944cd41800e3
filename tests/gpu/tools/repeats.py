# SPDX-License-Identifier: Apache-2.0
"""Many runs of one call, compared bit for bit without a look from the host."""

from __future__ import annotations

import time
from typing import Any

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.problem import Problem

Array = Any
MOST_WAITED = 60.0  # seconds, for what should take a few


class Hangs(Exception):
    """The device is still at work long after it should be done."""


def wait_for(stream: Any) -> None:
    """Wait for a stream, but not for ever."""
    start = time.monotonic()
    while not stream.done:
        if time.monotonic() - start > MOST_WAITED:
            raise Hangs(f"a stream is not done after {MOST_WAITED} s")
        time.sleep(1e-4)


def plan_of(problem: Problem, variant: str | None = None, **options: Any) -> cumla.MLADecodePlan:
    """A plan for a problem, pinned to a kernel if one is named."""
    pinned = type("Pinned", (cumla.MLADecodePlan,), {"_variant": variant})
    plan: cumla.MLADecodePlan = pinned.from_arrays(
        problem.q, problem.kv_cache, **{"causal": problem.case.causal} | options
    )
    assert variant in (None, plan.key.variant)
    return plan


def decode_by(variant: str | None, problem: Problem, **outputs: Array) -> cumla.AttentionState:
    """A run of a plan that is pinned to a kernel; without one, a call."""
    options = {"softmax_scale": problem.softmax_scale, **outputs}
    if variant is None:
        return cumla.mla_decode(*problem.arrays, causal=problem.case.causal, **options)
    plan = plan_of(problem, variant)
    plan.update(problem.kv_lens)
    return plan.run(**problem.inputs, **options)


class Repeats:
    """Runs of one problem on a stream of its own, compared on the device.

    Before each run the pieces of split requests are NaN, or one that is read too early would be
    that of the last run; each result becomes NaN once it is compared.

    Parameters
    ----------
    problem : Problem
        Of CuPy arrays.
    expected : tuple of arrays, optional
        Bits of out and lse; those of the first run, held against the oracle, by default.
    output : str, optional
        dtype of out.
    runs : int
        Runs for each update.
    variant : str, optional
        Kernel that attends; that of the shape by default.
    """

    def __init__(
        self,
        problem: Problem,
        expected: tuple[Array, Array] | None = None,
        output: str | None = None,
        runs: int = 1,
        variant: str | None = None,
    ) -> None:
        import cupy

        self.problem, self.runs = problem, runs
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.out, self.lse = problem.outputs(output)
        self.wrong = cupy.zeros(1, dtype=cupy.uint32)
        case = problem.case
        nbytes = cumla.MLADecodePlan.workspace_bytes(
            case.batch, case.q_len, case.heads, num_kv_heads=case.kv_heads
        )
        self.workspace = cupy.empty(nbytes, dtype=cupy.uint8)
        self.plan = plan_of(problem, variant, workspace=self.workspace)
        cupy.cuda.Device().synchronize()
        with self.stream:
            self.step(compare=False)
            wait_for(self.stream)
            problem.check(self.out.array, self.lse.array)
            self.expected = expected or (self.out.bits.copy(), self.lse.bits.copy())
            self.compare()
            kernels.noise(0)  # loaded before any capture
            assert int(self.wrong[0]) == 0

    def spoil_pieces(self) -> None:
        import cupy

        begin, end = self.plan.key.layout.partial_rows, self.plan.key.layout.nbytes
        assert begin < end, "nothing is ever split here"
        cupy.cuda.runtime.memsetAsync(
            self.workspace.data.ptr + begin, 0xFF, end - begin, self.stream.ptr
        )

    def compare(self) -> None:
        kernels.compare_and_poison(self.out.bits, self.expected[0], self.wrong)
        kernels.compare_and_poison(self.lse.bits, self.expected[1], self.wrong)

    def step(self, *, compare: bool = True) -> None:
        """An update and its runs, on this stream, which is the current one."""
        self.plan.update(self.problem.kv_lens)
        for _ in range(self.runs):
            self.spoil_pieces()
            self.plan.run(
                **self.problem.inputs,
                softmax_scale=self.problem.softmax_scale,
                out=self.out.array,
                lse=self.lse.array,
            )
            if compare:
                self.compare()

    def graph(self, steps: int) -> Any:
        """Capture a number of steps, compared."""
        with self.stream:
            self.stream.synchronize()
            self.stream.begin_capture()
            for _ in range(steps):
                self.step()
            return self.stream.end_capture()

    def finish(self) -> int:
        """Wait; tell how many words differed."""
        wait_for(self.stream)
        self.out.check_guards()
        self.lse.check_guards()
        return int(self.wrong.get()[0])


def count_differences(problem: Problem, replays: int, *, noise: bool, **options: Any) -> int:
    """Words of out and lse that differed in any of the repeats; `options` are those of Repeats."""
    import cupy

    repeats = Repeats(problem, **options)
    graph = repeats.graph(10)
    other = cupy.cuda.Stream(non_blocking=True)
    for seed in range(replays // 10):
        if noise:
            with other:
                kernels.noise(seed)
        graph.launch(repeats.stream)
    found = repeats.finish()
    other.synchronize()
    return found
