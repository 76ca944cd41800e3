# SPDX-License-Identifier: Apache-2.0
"""One plan on several streams: order, the end of its buffer, warm-up and capture, cold loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import from_torch, to_torch
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.process import run_fresh

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

LONG = 100_000_000  # clocks: some 50 ms, in which the host is long ahead


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.MLADecodePlan(3, 1, 32).prepare()
    cp.cuda.Device().synchronize()


def three_requests(lengths: list[int], seed: int = 0) -> Problem:
    case = Case(batch=3, heads=32, kv_len=3000, seed=seed)
    return make_problem(cp, case, np.array(lengths))


def busy_streams() -> tuple[Any, Any]:
    """Two streams, the first of which does nothing but wait for a while."""
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    with first:
        kernels.spin(LONG)
    return first, second


def test_a_plan_moves_on_while_the_old_stream_still_runs() -> None:
    """The schedule of the second step must not overtake the run of the first."""
    steps = [three_requests([3000, 64, 0], 1), three_requests([1, 2999, 3000], 2)]
    outputs = [step.outputs() for step in steps]
    plan = cumla.MLADecodePlan.from_arrays(steps[0].q, steps[0].kv_cache)
    cp.cuda.Device().synchronize()
    streams = busy_streams()
    for step, (out, lse), stream in zip(steps, outputs, streams, strict=True):
        plan.update(step.kv_lens, stream=stream)
        plan.run(**step.inputs, out=out.array, lse=lse.array, stream=stream)
    assert not streams[0].done, "a call waited for the device"
    cp.cuda.Device().synchronize()
    for step, (out, lse) in zip(steps, outputs, strict=True):
        step.check(out.array, lse.array)


def test_plans_that_share_a_workspace_on_two_streams() -> None:
    steps = [three_requests([3000, 64, 0], 1), three_requests([1, 2999, 3000], 2)]
    outputs = [step.outputs() for step in steps]
    memory = cp.empty(cumla.MLADecodePlan.workspace_bytes(3, 1, 32), dtype=cp.uint8)
    plans = [
        cumla.MLADecodePlan.from_arrays(step.q, step.kv_cache, workspace=memory) for step in steps
    ]
    cp.cuda.Device().synchronize()
    streams = busy_streams()
    for plan, step, (out, lse), stream in zip(plans, steps, outputs, streams, strict=True):
        plan.update(step.kv_lens, stream=stream)
        plan.run(**step.inputs, out=out.array, lse=lse.array, stream=stream)
    with pytest.raises(ValueError, match="its workspace has been taken by another plan"):
        plans[0].run(**steps[0].inputs, stream=streams[0])
    assert not streams[0].done, "a call waited for the device"
    cp.cuda.Device().synchronize()
    for step, (out, lse) in zip(steps, outputs, strict=True):
        step.check(out.array, lse.array)


def test_the_buffer_of_a_plan_outlives_it_on_another_stream() -> None:
    """Allocated on one stream, used on another: the pool must not hand it out meanwhile."""
    problem = three_requests([3000, 64, 2000])
    out, lse = problem.outputs()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    nbytes = plan.key.layout.nbytes
    cp.full(1, 0xFF, dtype=cp.uint8)  # compiling it would take longer than the stream is busy
    cp.cuda.Device().synchronize()
    stream, _ = busy_streams()
    plan.update(problem.kv_lens, stream=stream)
    plan.run(**problem.inputs, out=out.array, lse=lse.array, stream=stream)
    del plan  # the last reference: a garbage collection would take longer than the stream is busy
    garbage = [cp.full(nbytes, 0xFF, dtype=cp.uint8) for _ in range(4)]
    assert not stream.done
    cp.cuda.Device().synchronize()
    problem.check(out.array, lse.array)
    assert all(bool((block == 0xFF).all()) for block in garbage)


def test_a_torch_buffer_of_a_plan_outlives_it_on_another_stream() -> None:
    torch = pytest.importorskip("torch")
    problem = three_requests([3000, 64, 2000])
    out, lse = problem.outputs()
    arrays = [to_torch(torch, array) for array in problem.arrays]
    results = [to_torch(torch, result.array) for result in (out, lse)]
    plan = cumla.MLADecodePlan.from_arrays(*arrays[:2])
    nbytes = plan.key.layout.nbytes
    torch.full((1,), 0xFF, dtype=torch.uint8, device="cuda")  # as would loading these two
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        plan.update(arrays[3])
        plan.run(*arrays[:2], block_table=arrays[2], out=results[0], lse=results[1])
    del plan  # the last reference: a garbage collection would take longer than the stream is busy
    garbage = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert not stream.query()
    torch.cuda.synchronize()
    problem.check(out.array, lse.array)
    assert all(bool((block == 0xFF).all()) for block in garbage)


def test_a_plan_warmed_up_eagerly_then_captured_on_torchs_stream() -> None:
    torch = pytest.importorskip("torch")
    problem = three_requests([3000, 3000, 3000])
    arrays = [to_torch(torch, array) for array in problem.arrays]
    torch.cuda.synchronize()
    plan = cumla.MLADecodePlan.from_arrays(*arrays[:2])
    plan.update(arrays[3])
    warm = plan.run(*arrays[:2], block_table=arrays[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(arrays[3])
        result = plan.run(*arrays[:2], block_table=arrays[2])
    for lengths in ([1, 64, 2999], [0, 0, 0], [3000, 3000, 3000]):
        problem.lengths = np.array(lengths, dtype=np.int32)
        problem.kv_lens.set(problem.lengths)
        for tensor in result:
            tensor.fill_(float("nan"))
        cp.cuda.Device().synchronize()
        graph.replay()
        torch.cuda.synchronize()
        problem.check(*(from_torch(torch, tensor) for tensor in result))
    assert all(torch.equal(x, y) for x, y in zip(warm, result, strict=True))
    plan.update(arrays[3])  # and back
    again = plan.run(*arrays[:2], block_table=arrays[2])
    assert all(torch.equal(x, y) for x, y in zip(again, result, strict=True))


def test_check_mode_finds_lengths_that_changed_since_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = three_requests([3000, 64, 2000])
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    plan.update(problem.kv_lens)
    problem.check(*plan.run(**problem.inputs))
    problem.kv_lens.set(np.array([3000, 64, 1999], dtype=np.int32))
    with pytest.raises(ValueError, match=r"^kv_lens\[2\]: .*2000, got 1999; call plan\.update"):
        plan.run(**problem.inputs)


def test_a_cold_load_leaves_the_capture_of_another_thread_alone() -> None:
    """In the mode in which the driver forbids such calls to every thread."""
    script = """
import threading
import cupy as cp
import cumla
failures = []
def load():
    try:
        cumla.prepare(cumla.merge_attention_states, cumla.append_mla_cache)
    except BaseException as error:
        failures.append(error)
stream = cp.cuda.Stream(non_blocking=True)
memory = cp.ones(4, dtype=cp.uint8)
cp.cuda.Device().synchronize()
with stream:
    stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
    memory.data.memset_async(7, 4, stream)
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
print(failures, memory.get().tolist())
"""
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == "[] [7, 7, 7, 7]"
