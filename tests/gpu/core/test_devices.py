# SPDX-License-Identifier: Apache-2.0
"""Arrays on another GPU than the current one, several GPUs at once, and what is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.device import properties
from tests.gpu.tools import sanitize
from tests.gpu.tools.arrays import jax_arguments, to_torch
from tests.gpu.tools.cases import Case
from tests.gpu.tools.fp8_problem import Fp8Case, make_fp8
from tests.gpu.tools.problem import Problem, make_problem, typed
from tests.gpu.tools.ragged_problem import Ragged
from tests.gpu.tools.repeats import Repeats

KERNELS = (
    "append_cache",
    "append_fp8_cache",
    "append_indexer_cache",
    "merge_states",
    "ragged_schedule",
    "mla_decode",
    "mla_decode_fp8",
    "mla_decode_swapped",
    "schedule",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_mqa_schedule",
    "quantize_fp8",
    "top_k",
)
MAY_SKIP = ("needs two GPUs",)
cp: Any = pytest.importorskip("cupy")

OTHER = 1


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if cp.cuda.runtime.getDeviceCount() <= OTHER:
        pytest.skip("needs two GPUs")
    cp.cuda.Device(0).use()  # whatever another framework has left current


class OnOther:
    """CuPy, whose arrays are made on the other GPU, whichever is current."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(cp, name)
        if name not in ("asarray", "empty", "zeros", "full"):
            return attribute

        def make(*arguments: Any, **options: Any) -> Any:
            with cp.cuda.Device(OTHER):
                return attribute(*arguments, **options)

        return make


def on_gpu(host: Problem, xp: Any = cp) -> Problem:
    """A problem of packed NumPy arrays as one of CuPy's."""
    arrays = ("q_bits", "kv_bits", "block_table", "kv_lens")
    there = {name: xp.asarray(np.ascontiguousarray(getattr(host, name))) for name in arrays}
    dtype = host.case.dtype
    q, kv_cache = typed(there["q_bits"], dtype), typed(there["kv_bits"], dtype)
    return replace(host, xp=cp, q=q, kv_cache=kv_cache, **there)


def from_other(problem: Problem, out: Any, lse: Any) -> None:
    """Hold results, which must be on the other GPU, against the reference on the host."""
    assert out.device.id == lse.device.id == OTHER
    bits = out.view(np.uint16).get()
    problem.check(typed(bits, problem.case.dtype), lse.get())


CUT = Case(batch=3, heads=16, kv_len=3000)
LENGTHS = np.array([3000, 65, 0])


# --- every operation -----------------------------------------------------------------------------


def decode(cupy: Any) -> None:
    for case, lengths in sanitize.grid(2).values():
        problem = make_problem(np, case, np.array(lengths))
        for out, lse in sanitize.decode(cupy, problem):
            problem.check(out, lse)


def decode_invariant(cupy: Any) -> None:
    problem = make_problem(np, *sanitize.INVARIANT)
    for out, lse in sanitize.decode(cupy, problem, batch_invariant=True):
        problem.check(out, lse)


def attend(cupy: Any) -> None:
    for case in (Ragged(), *sanitize.RAGGED):
        sanitize.attend_ragged(cupy, case)


def attend_fp8(cupy: Any) -> None:
    for case, lengths in sanitize.FP8_CACHES:
        sanitize.attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))


def merge(cupy: Any) -> None:
    sanitize.merge_states(cupy, 2, "bfloat16", in_place=False)
    sanitize.merge_states(cupy, 5, "float32", in_place=True)


def write(cupy: Any) -> None:
    sanitize.append_rows(cupy, "slots")
    sanitize.append_rows(cupy, "requests, rotated")
    sanitize.quantize_rows(cupy, "float32")


def score(cupy: Any) -> None:
    sanitize.score_sequence(cupy)
    sanitize.score_pages(cupy, 2)
    sanitize.score_pages(cupy, 1, clean=False)


@pytest.mark.parametrize("current", [0, OTHER])
@pytest.mark.parametrize(
    "operation", [decode, decode_invariant, attend, attend_fp8, merge, write, score]
)
def test_an_operation_on_the_other_gpu(operation: Any, current: int) -> None:
    with cp.cuda.Device(current):
        operation(OnOther())
        assert cp.cuda.Device().id == current
    operation(cp)  # and on the first one again: nothing that is kept is taken for the other's


@pytest.mark.parametrize("current", [0, OTHER])
def test_torch_on_the_other_gpu(current: int) -> None:
    torch = pytest.importorskip("torch")
    host = make_problem(np, CUT, LENGTHS)
    problem = on_gpu(host, OnOther())
    with torch.cuda.device(current):
        arrays = [to_torch(torch, array) for array in problem.arrays]
        plan = cumla.MLADecodePlan.from_arrays(*arrays[:2])
        plan.update(arrays[3])
        results = [cumla.mla_decode(*arrays), plan.run(*arrays[:2], block_table=arrays[2])]
        with torch.cuda.stream(torch.cuda.Stream(OTHER)):
            torch.cuda.current_stream(OTHER).wait_stream(torch.cuda.default_stream(OTHER))
            results.append(cumla.mla_decode(*arrays))
        assert torch.cuda.current_device() == current
    torch.cuda.synchronize(OTHER)
    for out, lse in results:
        assert out.device == lse.device == torch.device("cuda", OTHER)
        bits = out.view(torch.int16).cpu().numpy()
        host.check(typed(bits.view(np.uint16), CUT.dtype), lse.cpu().numpy())


def test_jax_on_the_other_gpu(jax: Any) -> None:
    host = make_problem(np, CUT, LENGTHS)
    device = jax.devices()[OTHER]
    with jax.default_device(device):
        arguments = jax_arguments(jax.numpy, on_gpu(host))
    arrays = [jax.device_put(array, device) for array in arguments]
    jax.block_until_ready(arrays)
    cp.cuda.Device(0).use()
    out, lse = cumla.mla_decode(*arrays)
    assert cp.cuda.Device().id == 0
    assert out.devices() == lse.devices() == {device}
    host.check(np.asarray(out), np.asarray(lse))


# --- plans, streams, graphs ----------------------------------------------------------------------


def test_a_plan_between_streams_of_the_other_gpu() -> None:
    """Its updates and runs are ordered there, while another GPU is current."""
    host = make_problem(np, CUT, LENGTHS)
    problem = on_gpu(host, OnOther())
    with cp.cuda.Device(OTHER):
        streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
        cp.cuda.Device().synchronize()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    for stream in streams * 3:
        plan.update(problem.kv_lens, stream=stream)
        out, lse = plan.run(**problem.inputs, stream=stream)
        stream.synchronize()
        from_other(host, out, lse)
    assert cp.cuda.Device().id == 0


def test_a_graph_on_the_other_gpu() -> None:
    host = make_problem(np, CUT, LENGTHS)
    problem = on_gpu(host, OnOther())
    with cp.cuda.Device(OTHER):
        out = cp.empty(problem.out_shape, dtype=np.uint16)
        lse = cp.empty(problem.lse_shape, dtype=np.float32)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    outputs = {"out": typed(out, CUT.dtype), "lse": lse, "stream": stream}
    plan.update(problem.kv_lens, stream=stream)
    plan.run(**problem.inputs, **outputs)
    stream.synchronize()
    with cp.cuda.Device(OTHER), stream:
        stream.begin_capture()
        with cp.cuda.Device(0):
            plan.update(problem.kv_lens, stream=stream)
            plan.run(**problem.inputs, **outputs)
        graph = stream.end_capture()
        out[...], lse[...] = 0xFFFF, np.nan
        graph.launch(stream)
        stream.synchronize()
    from_other(host, outputs["out"], lse)


def test_two_gpus_at_once() -> None:
    """A thread each, the same problem: the same bits, again and again and on both."""
    host = make_problem(np, CUT, LENGTHS)
    found: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=60)  # memory that one allocates breaks the other's capture

    def work(device: int) -> None:
        with cp.cuda.Device(device):
            repeats = Repeats(on_gpu(host), runs=2)
            both.wait()
            graph = repeats.graph(5)
            both.wait()
            for _ in range(20):
                graph.launch(repeats.stream)
            differing = repeats.finish()
            found[device] = differing, [bits.get() for bits in repeats.expected]

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[device][0] for device in (0, OTHER)] == [0, 0]
    if properties(0).sm_count == properties(OTHER).sm_count:  # the requests are cut alike
        for first, second in zip(found[0][1], found[OTHER][1], strict=True):
            np.testing.assert_array_equal(first, second)


def test_kernels_prepared_for_the_other_gpu() -> None:
    cumla.MLADecodePlan(3, 1, 16, dtype="float16", device=OTHER).prepare()
    cumla.prepare(cumla.merge_attention_states, device=OTHER)
    assert cp.cuda.Device().id == 0
    host = make_problem(np, replace(CUT, dtype="float16"), LENGTHS)
    from_other(host, *cumla.mla_decode(*on_gpu(host, OnOther()).arrays))


# --- refused -------------------------------------------------------------------------------------


def test_a_plan_of_another_device() -> None:
    problem = on_gpu(make_problem(np, CUT, LENGTHS))
    plan = cumla.MLADecodePlan(3, 1, 16, device=OTHER)
    assert cp.cuda.Device().id == 0
    with pytest.raises(ValueError, match="plan: made for CUDA device 1, got arrays on CUDA device"):
        plan.update(problem.kv_lens)


@pytest.mark.parametrize("place", range(4))
def test_arrays_on_two_gpus(place: int) -> None:
    host = make_problem(np, CUT, LENGTHS)
    here, there = on_gpu(host), on_gpu(host, OnOther())
    mixed = [*here.arrays]
    mixed[place] = there.arrays[place]
    with pytest.raises(ValueError, match=r"on CUDA device [01], got .*CUDA device [01]"):
        cumla.mla_decode(*mixed)
    from_other(host, *cumla.mla_decode(*there.arrays))


def test_outputs_and_a_scale_on_another_gpu() -> None:
    host = make_problem(np, CUT, LENGTHS)
    there, out = on_gpu(host, OnOther()), cp.empty((3, 1, 16, 512), dtype=np.uint16)
    with pytest.raises(ValueError, match=r"^out: .*on CUDA device 1, got .*CUDA device 0"):
        cumla.mla_decode(*there.arrays, out=typed(out, CUT.dtype))
    problem = make_fp8(np, Fp8Case(form="one", heads=16), np.array([64, 65]))
    cache = OnOther().asarray(np.ascontiguousarray(problem.inputs["kv_cache"]).view(np.uint8))
    q = OnOther().asarray(problem.inputs["q"].view(np.uint16))
    table, lengths = (
        OnOther().asarray(problem.inputs["block_table"]),
        OnOther().asarray(problem.lengths_of_plan["kv_lens"]),
    )
    scale = cp.ones((), dtype=np.float32)
    with pytest.raises(ValueError, match=r"kv_scale: .*CUDA device"):
        cumla.mla_decode(typed(q, "bfloat16"), cache, table, lengths, kv_scale=scale)


def test_a_stream_of_another_gpu() -> None:
    """The driver refuses it; what follows works."""
    host = make_problem(np, CUT, LENGTHS)
    there = on_gpu(host, OnOther())
    stream = cp.cuda.Stream(non_blocking=True)  # of the first GPU
    with pytest.raises(cumla.CumlaError, match="stream"):
        cumla.mla_decode(*there.arrays, stream=stream)
    from_other(host, *cumla.mla_decode(*there.arrays))
    assert cp.cuda.Device().id == 0
