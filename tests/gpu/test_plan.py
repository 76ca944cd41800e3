# SPDX-License-Identifier: Apache-2.0
"""MLADecodePlan: schedules and their NumPy mirror, several layers, shared buffers, misuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch import mla_schedule
from tests.gpu.arrays import bits_of, to_torch
from tests.gpu.cases import Case
from tests.gpu.problem import Problem, make_problem, typed

cp: Any = pytest.importorskip("cupy")


def make_plan(problem: Problem, **options: Any) -> cumla.MLADecodePlan:
    return cumla.MLADecodePlan.from_arrays(
        problem.q, problem.kv_cache, causal=problem.case.causal, **options
    )


def run_and_check(plan: cumla.MLADecodePlan, problem: Problem) -> None:
    """Run once into poisoned outputs and compare."""
    out, lse = problem.outputs()
    result = plan.run(
        *problem.arrays, softmax_scale=problem.softmax_scale, out=out.array, lse=lse.array
    )
    assert result.out is out.array
    problem.check(out.array, lse.array)
    out.check_guards()
    lse.check_guards()


def bytes_of_ones(nbytes: int) -> Any:
    return cp.full(nbytes, 0xFF, dtype=cp.uint8)


# --- the schedule --------------------------------------------------------------------------------


def schedule_on_device(plan: cumla.MLADecodePlan, buffer: Any) -> mla_schedule.Schedule:
    """Read a schedule out of a plan's buffer."""
    key, layout = plan.key, plan.key.layout
    host = buffer.get()

    def words(offset: int, count: int) -> np.ndarray:
        return host[offset : offset + 4 * count].view(np.int32)

    bounds = words(layout.bounds, 2 * (key.parts + 1)).reshape(-1, 2)
    splits = words(layout.splits, 4 * key.parts).reshape(-1, 4)[:, :3]
    return mla_schedule.Schedule(bounds, splits)


LENGTHS = {
    "equal": lambda rng, batch: np.full(batch, 4096),
    "empty": lambda rng, batch: np.zeros(batch),
    "ragged": lambda rng, batch: rng.integers(0, 9000, size=batch),
    "short": lambda rng, batch: rng.integers(0, 70, size=batch),
    "one long": lambda rng, batch: np.where(np.arange(batch) == batch // 2, 131_072, 3),
    "many empty": lambda rng, batch: rng.integers(0, 3, size=batch) // 2 * 5000,
    "garbage": lambda rng, batch: rng.integers(-(2**31), 2**31 - 1, size=batch),
    "largest": lambda rng, batch: np.full(batch, 2**31 - 1),
}


@pytest.mark.parametrize("batch", [1, 2, 128, 1024, 5000])
@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads"), [(1, 16, 1), (2, 128, 1), (1, 64, 8), (4, 128, 128)]
)
def test_the_schedule_equals_its_mirror(batch: int, q_len: int, heads: int, kv_heads: int) -> None:
    nbytes = cumla.MLADecodePlan.workspace_bytes(batch, q_len, heads, num_kv_heads=kv_heads)
    buffer = bytes_of_ones(nbytes)
    plan = cumla.MLADecodePlan(batch, q_len, heads, num_kv_heads=kv_heads, workspace=buffer)
    rng = np.random.default_rng(batch)
    for name, make in LENGTHS.items():
        lengths = np.asarray(make(rng, batch)).astype(np.int32)
        buffer[...] = 0xFF
        plan.update(cp.asarray(lengths))
        got = schedule_on_device(plan, buffer)
        want = mla_schedule.schedule(lengths, plan.key.parts)
        np.testing.assert_array_equal(got.bounds, want.bounds, err_msg=name)
        cut = want.splits[:, 0] >= 0
        np.testing.assert_array_equal(got.splits[:, 0], want.splits[:, 0], err_msg=name)
        np.testing.assert_array_equal(got.splits[cut], want.splits[cut], err_msg=name)


def test_strided_lengths_are_read_with_their_stride() -> None:
    spread = cp.full(14, -1, dtype=cp.int32)
    lengths = np.array([5, 70_000, 0, 64, 65, 9, 12_345], dtype=np.int32)
    spread[::2] = cp.asarray(lengths)
    buffer = bytes_of_ones(cumla.MLADecodePlan.workspace_bytes(7, 1, 16))
    plan = cumla.MLADecodePlan(7, 1, 16, workspace=buffer)
    plan.update(spread[::2])
    got = schedule_on_device(plan, buffer)
    np.testing.assert_array_equal(got.bounds, mla_schedule.schedule(lengths, plan.key.parts).bounds)


# --- update and run ------------------------------------------------------------------------------


def test_a_step_of_several_layers_and_then_longer_steps() -> None:
    """One update a step serves all layers; lengths grow over page ends, and jump."""
    case = Case(batch=5, q_len=2, heads=32, kv_len=5000)
    start = np.array([63, 64, 4999, 0, 700])
    layers = [
        make_problem(cp, Case(**{**vars(case), "seed": seed}), start + 200) for seed in range(3)
    ]
    plan = make_plan(layers[0])
    for step in (0, 1, 2, 65, 200):
        lengths = (start + step).astype(np.int32)
        shared = cp.asarray(lengths)
        plan.update(shared)
        for layer in layers:
            layer.lengths, layer.cache_seqlens = lengths, shared
            run_and_check(plan, layer)


def test_the_lengths_of_the_last_update_count() -> None:
    problem = make_problem(cp, Case(batch=3), np.array([500, 20, 3000]))
    updated = np.array([130, 20, 2500], dtype=np.int32)
    lengths = cp.asarray(updated)
    plan = make_plan(problem)
    plan.update(lengths)
    lengths[...] = problem.cache_seqlens  # changed since: not what this run attends to
    problem.cache_seqlens = lengths
    out, lse = problem.outputs()
    plan.run(*problem.arrays, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(updated))


def test_other_lengths_than_those_of_the_update_are_safe() -> None:
    """Garbage lengths in run(), and a table too small for the lengths of the update."""
    problem = make_problem(cp, Case(batch=3), np.array([256, 256, 256]))
    plan = make_plan(problem)
    plan.update(cp.asarray(np.array([100_000, 2**31 - 1, -3], dtype=np.int32)))
    problem.block_table = problem.block_table[:, :4]
    problem.cache_seqlens = cp.asarray(np.array([-1, 2**31 - 1, 77], dtype=np.int32))
    out, lse = problem.outputs()
    plan.run(*problem.arrays, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(np.array([256, 256, 0])))
    out.check_guards()
    lse.check_guards()


@pytest.mark.parametrize("causal", [True, False])
def test_mla_decode_with_a_plan_gives_the_bits_of_one_without(causal: bool) -> None:
    problem = make_problem(cp, Case(batch=4, q_len=3, heads=40, kv_len=3000, causal=causal))
    plan = make_plan(problem)
    plan.update(problem.cache_seqlens)
    with_plan = cumla.mla_decode(*problem.arrays, causal=causal, plan=plan)
    without = cumla.mla_decode(*problem.arrays, causal=causal)
    for one, other in zip(with_plan, without, strict=True):
        assert bool((bits_of(one) == bits_of(other)).all())
    problem.check(*with_plan)


def test_plans_share_a_workspace_full_of_garbage() -> None:
    """Each is updated before it runs; what another plan left there does not matter."""
    problems = [
        make_problem(cp, Case(batch=2, heads=128, kv_len=9000)),
        make_problem(cp, Case(batch=7, heads=16, q_len=2, kv_len=1000, dtype="float16")),
        make_problem(cp, Case(batch=1, heads=8, kv_heads=8, kv_len=4096, ragged=False)),
    ]
    sizes = [
        cumla.MLADecodePlan.workspace_bytes(
            p.case.batch, p.case.q_len, p.case.heads, num_kv_heads=p.case.kv_heads
        )
        for p in problems
    ]
    guard = 4096
    buffer = bytes_of_ones(max(sizes) + guard)
    workspace = buffer[: max(sizes)]
    plans = [make_plan(problem, workspace=workspace) for problem in problems]
    for _ in range(2):
        for plan, problem in zip(plans, problems, strict=True):
            plan.update(problem.cache_seqlens)
            run_and_check(plan, problem)
    assert bool((buffer[-guard:] == 0xFF).all()), "memory behind the workspace was written"


def test_workspace_bytes_is_what_a_plan_allocates() -> None:
    plan = cumla.MLADecodePlan(3, 2, 48, num_kv_heads=3)
    nbytes = cumla.MLADecodePlan.workspace_bytes(3, 2, 48, num_kv_heads=3)
    assert nbytes == plan.key.layout.nbytes
    with pytest.raises(ValueError, match=r"workspace: needs \d+ bytes.*workspace_bytes"):
        cumla.MLADecodePlan(3, 2, 48, num_kv_heads=3, workspace=bytes_of_ones(nbytes - 1))


def test_a_torch_plan_lives_in_torch_memory() -> None:
    torch = pytest.importorskip("torch")
    problem = make_problem(cp, Case(batch=2, kv_len=2000))
    cp.cuda.Device().synchronize()
    q, kv, table, lengths = (to_torch(torch, array) for array in problem.arrays)
    before = torch.cuda.memory_allocated()
    plan = cumla.MLADecodePlan.from_arrays(q, kv)
    assert torch.cuda.memory_allocated() - before >= plan.key.layout.nbytes
    plan.update(lengths)
    out, lse = plan.run(q, kv, table, lengths)
    torch.cuda.synchronize()
    problem.check(cp.from_dlpack(out.view(torch.int16)).view(problem.q.dtype), cp.from_dlpack(lse))


# --- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 3}, r"plan: made for .*\(2, 1, 16, 1, 64, 'bfloat16'\), got \(3,"),
        ({"q_len": 2}, "plan: made for"),
        ({"heads": 32}, "plan: made for"),
        ({"kv_heads": 2}, "plan: made for"),
        ({"dtype": "float16"}, "plan: made for.*got .*'float16'"),
    ],
)
def test_a_plan_of_another_shape(change: dict[str, Any], message: str) -> None:
    problem = make_problem(cp, Case())
    plan = make_plan(problem)
    plan.update(problem.cache_seqlens)
    other = make_problem(cp, Case(**change))
    with pytest.raises(ValueError, match=message):
        plan.run(*other.arrays)
    with pytest.raises(ValueError, match=message):
        cumla.mla_decode(*other.arrays, plan=plan)
    run_and_check(plan, problem)


def test_a_plan_of_another_mask() -> None:
    problem = make_problem(cp, Case(q_len=2, causal=False))
    plan = make_plan(problem)
    plan.update(problem.cache_seqlens)
    with pytest.raises(ValueError, match="plan: made with causal=False, got causal=True"):
        cumla.mla_decode(*problem.arrays, plan=plan, causal=True)


def test_a_plan_that_was_never_updated() -> None:
    problem = make_problem(cp, Case())
    with pytest.raises(ValueError, match=r"never updated; call plan\.update"):
        make_plan(problem).run(*problem.arrays)


def test_a_plan_on_another_stream_than_its_update() -> None:
    problem = make_problem(cp, Case())
    plan = make_plan(problem)
    plan.update(problem.cache_seqlens)
    stream = cp.cuda.Stream(non_blocking=True)
    with pytest.raises(ValueError, match="one stream at a time"):
        plan.run(*problem.arrays, stream=stream)
    cp.cuda.Device().synchronize()
    plan.update(problem.cache_seqlens, stream=stream)
    out, lse = problem.outputs()
    cp.cuda.Device().synchronize()
    plan.run(*problem.arrays, out=out.array, lse=lse.array, stream=stream)
    stream.synchronize()
    problem.check(out.array, lse.array)


def test_arrays_on_the_cpu_with_a_plan_of_the_gpu() -> None:
    problem, host = make_problem(cp, Case()), make_problem(np, Case())
    plan = make_plan(problem)
    plan.update(problem.cache_seqlens)
    with pytest.raises(ValueError, match="plan: made for CUDA device 0, got arrays on the CPU"):
        plan.run(*host.arrays)
    with pytest.raises(ValueError, match="plan: made for CUDA device 0, got arrays on the CPU"):
        plan.update(host.cache_seqlens)


def test_a_plan_of_another_device() -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    problem = make_problem(cp, Case())
    plan = cumla.MLADecodePlan(2, 1, 16, device=1)
    assert cp.cuda.Device().id == 0
    with pytest.raises(ValueError, match="plan: made for CUDA device 1, got arrays on CUDA device"):
        plan.update(problem.cache_seqlens)


def test_another_current_device_than_that_of_the_arrays() -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    problem = make_problem(cp, Case())
    with cp.cuda.Device(1):
        q, kv = (cp.asarray(bits.get()) for bits in (problem.q_bits, problem.kv_bits))
        table, lengths = cp.asarray(problem.table), cp.asarray(problem.lengths)
        cp.cuda.Device(1).synchronize()
    out, lse = cumla.mla_decode(
        typed(q, problem.case.dtype), typed(kv, problem.case.dtype), table, lengths
    )
    assert cp.cuda.Device().id == 0
    assert out.device.id == lse.device.id == 1
    with cp.cuda.Device(1):
        host_out, host_lse = out.view(cp.uint16).get(), lse.get()
    problem.check(typed(cp.asarray(host_out), problem.case.dtype), cp.asarray(host_lse))
