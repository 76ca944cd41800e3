# SPDX-License-Identifier: Apache-2.0
"""Whose stream, which order: side streams, threads, CUDA graphs, repeats."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import bits_of, from_torch, to_torch
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.process import run_fresh

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

LATER_LENGTHS = ([1, 64, 2999], [3000, 0, 65], [0, 0, 0], [3000, 3000, 3000], [7, 2048, 640])


@pytest.fixture(autouse=True)
def _settled() -> None:
    for q_len in (1, 2):
        cumla.MLADecodePlan(3, q_len, 32).prepare()
    cp.cuda.Device().synchronize()


def three_requests(seed: int = 0, **change: Any) -> Problem:
    """A problem whose table and cache serve every length up to 3000."""
    return make_problem(
        cp, Case(batch=3, heads=32, kv_len=3000, seed=seed, **change), np.array([3000] * 3)
    )


def set_lengths(problem: Problem, lengths: list[int]) -> None:
    problem.lengths = np.array(lengths, dtype=np.int32)
    problem.kv_lens.set(problem.lengths)


def same_bits(results: Any, expected: Any) -> bool:
    return all(
        bool((bits_of(x) == bits_of(y)).all()) for x, y in zip(results, expected, strict=True)
    )


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["current", "object", "handle"])
def test_a_side_stream(how: str) -> None:
    """What that stream does before, and late, is seen; another stream would come too early."""
    problem = three_requests()
    stream = cp.cuda.Stream(non_blocking=True)
    late = cp.zeros_like(problem.kv_lens)
    for lengths in (problem.kv_lens, 0):  # CuPy compiles its copies before the stream is busy
        late[...] = lengths
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        late[...] = problem.kv_lens
    problem_lengths, problem.kv_lens = problem.kv_lens, late
    if how == "current":
        with stream:
            result = cumla.mla_decode(*problem.arrays)
    else:
        given = stream if how == "object" else stream.ptr
        result = cumla.mla_decode(*problem.arrays, stream=given)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    problem.kv_lens = problem_lengths
    problem.check(*result)


def test_a_torch_stream_and_a_stream_given_for_torch_arrays() -> None:
    torch = pytest.importorskip("torch")
    problem = three_requests()
    arrays = [to_torch(torch, array) for array in problem.arrays]
    late = torch.zeros_like(arrays[3])
    for stream, given in ((torch.cuda.Stream(), False), (torch.cuda.Stream(), True)):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late.zero_()
            torch.cuda._sleep(20_000_000)
            late.copy_(arrays[3])
        if given:
            out, lse = cumla.mla_decode(*arrays[:3], late, stream=stream)
        else:
            with torch.cuda.stream(stream):
                out, lse = cumla.mla_decode(*arrays[:3], late)
        stream.synchronize()
        problem.check(from_torch(torch, out), from_torch(torch, lse))


def test_a_stream_of_cuda_core() -> None:
    core = pytest.importorskip("cuda.core")
    problem = three_requests()
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    cp.cuda.Device().synchronize()
    result = cumla.mla_decode(*problem.arrays, stream=stream)
    stream.sync()
    problem.check(*result)


def test_the_current_stream_stays() -> None:
    """One made so by use(), which a block of CuPy's own would forget."""
    problem = three_requests()
    current, other = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    cp.cuda.Device().synchronize()
    current.use()
    try:
        result = cumla.mla_decode(*problem.arrays, stream=other)
        assert cp.cuda.get_current_stream() == current
    finally:
        cp.cuda.Stream.null.use()
    other.synchronize()
    problem.check(*result)


def test_two_threads_with_the_same_shape_at_once() -> None:
    problems = [three_requests(seed) for seed in (1, 2)]
    expected = [cumla.mla_decode(*problem.arrays) for problem in problems]
    cp.cuda.Device().synchronize()
    start = threading.Barrier(2)

    def work(index: int) -> bool:
        cp.cuda.Device(0).use()
        with cp.cuda.Stream(non_blocking=True) as stream:
            start.wait()
            results = [cumla.mla_decode(*problems[index].arrays) for _ in range(50)]
            stream.synchronize()
            return all(same_bits(result, expected[index]) for result in results)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [True, True]


def test_two_threads_load_the_kernels_at_once() -> None:
    """In a fresh process, where both come first."""
    script = """
import threading
from concurrent.futures import ThreadPoolExecutor
import cupy as cp
import cumla
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import make_problem
problem = make_problem(cp, Case(kv_len=1000))
cp.cuda.Device().synchronize()
start = threading.Barrier(2)
def work(_):
    with cp.cuda.Stream(non_blocking=True) as stream:
        start.wait()
        result = cumla.mla_decode(*problem.arrays)
        stream.synchronize()
        return problem.check(*result)
with ThreadPoolExecutor(2) as pool:
    print(len(list(pool.map(work, range(2)))), "agree")
"""
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr
    assert "2 agree" in result.stdout


def test_20_repeats_give_the_same_bits() -> None:
    for case in (
        Case(batch=1, heads=16, kv_len=20_000, ragged=False),
        Case(batch=6, heads=128, q_len=2, kv_len=4096),
        Case(batch=200, heads=9, kv_len=300, dtype="float16"),
    ):
        problem = make_problem(cp, case)
        results = [cumla.mla_decode(*problem.arrays) for _ in range(20)]
        problem.check(*results[0])
        assert all(same_bits(result, results[0]) for result in results[1:])


# --- CUDA graphs ---------------------------------------------------------------------------------


def capture_with_cupy(problem: Problem) -> tuple[Any, Any, Any, Any]:
    """A graph of update and run, its stream, and the guarded outputs."""
    stream = cp.cuda.Stream(non_blocking=True)
    out, lse = problem.outputs()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(problem.kv_lens)
        plan.run(**problem.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
    return graph, stream, out, (lse, plan)


def test_a_cupy_graph_replayed_with_new_lengths() -> None:
    problem = three_requests(q_len=2)
    graph, stream, out, (lse, _plan) = capture_with_cupy(problem)
    for lengths in LATER_LENGTHS:
        set_lengths(problem, lengths)
        out.repoison()
        lse.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        problem.check(out.array, lse.array)
        out.check_guards()
        lse.check_guards()


def test_a_graph_keeps_the_schedule_of_an_update_before_the_capture() -> None:
    """Update outside, runs of two layers inside."""
    layers = [three_requests(seed) for seed in (3, 4)]
    stream = cp.cuda.Stream(non_blocking=True)
    outputs = [layer.outputs() for layer in layers]
    plan = cumla.MLADecodePlan.from_arrays(layers[0].q, layers[0].kv_cache)
    cp.cuda.Device().synchronize()
    with stream:
        plan.update(layers[0].kv_lens)
        stream.begin_capture()
        for layer, (out, lse) in zip(layers, outputs, strict=True):
            plan.run(**layer.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
        for lengths in LATER_LENGTHS[:3]:
            for layer in layers:
                set_lengths(layer, lengths)
            plan.update(layers[0].kv_lens)
            graph.launch(stream)
            stream.synchronize()
            for layer, (out, lse) in zip(layers, outputs, strict=True):
                layer.check(out.array, lse.array)


@pytest.mark.parametrize("with_plan", [False, True])
def test_a_torch_graph_replayed_with_new_lengths(with_plan: bool) -> None:
    """Outputs, workspace and the plan made inside come from the graph's pool."""
    torch = pytest.importorskip("torch")
    problem = three_requests(q_len=2)
    arrays = [to_torch(torch, array) for array in problem.arrays]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if with_plan:
            plan = cumla.MLADecodePlan.from_arrays(arrays[0], arrays[1])
            plan.update(arrays[3])
            result = plan.run(*arrays[:2], block_table=arrays[2])
        else:
            result = cumla.mla_decode(*arrays)
    for lengths in LATER_LENGTHS:
        set_lengths(problem, lengths)
        for tensor in result:
            tensor.fill_(float("nan"))
        cp.cuda.Device().synchronize()
        graph.replay()
        torch.cuda.synchronize()
        problem.check(from_torch(torch, result.out), from_torch(torch, result.lse))


def test_an_eager_call_beside_a_replaying_graph() -> None:
    """A call without a plan shares nothing with the graph of the same shape."""
    captured, eager = three_requests(5), three_requests(6)
    graph, stream, out, (lse, _plan) = capture_with_cupy(captured)
    expected = cumla.mla_decode(*eager.arrays)
    cp.cuda.Device().synchronize()
    results = []
    with cp.cuda.Stream(non_blocking=True) as other:
        for _ in range(50):
            graph.launch(stream)
            results.append(cumla.mla_decode(*eager.arrays))
        other.synchronize()
    stream.synchronize()
    captured.check(out.array, lse.array)
    eager.check(*expected)
    assert all(same_bits(result, expected) for result in results)


def test_a_cupy_capture_needs_its_memory_beforehand() -> None:
    problem = three_requests()
    out, lse = problem.outputs()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            plan.update(problem.kv_lens)
            with pytest.raises(cumla.NotPreparedError, match="pass out= and lse=, and use a plan"):
                cumla.mla_decode(*problem.arrays)
            with pytest.raises(cumla.NotPreparedError, match="out="):
                plan.run(**problem.inputs)
            with pytest.raises(cumla.NotPreparedError, match="pass lse=, made before the capture"):
                plan.run(**problem.inputs, out=out.array)
            with pytest.raises(cumla.NotPreparedError):
                cumla.mla_decode(*problem.arrays, out=out.array, lse=lse.array)
            with pytest.raises(cumla.NotPreparedError):
                cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
            plan.run(**problem.inputs, out=out.array, lse=lse.array)
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    problem.check(out.array, lse.array)
