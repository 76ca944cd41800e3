# SPDX-License-Identifier: Apache-2.0
"""Beside attention itself: what a call costs the host, and the schedule kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cumla
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.dense import Workbench
from cumla.bench.timing import Timing, time_host
from cumla.core.arrays import glance, reopen_call
from cumla.launch.mla.shape import HEAD_DIM

__all__ = ["HOST_CASE", "SCHEDULES", "HostTimes", "as_tensor", "host_times", "time_schedule"]

HOST_CASE = Case(16, 1, 16, 1024)
"""Little work for the GPU: what counts is the host."""

SCHEDULES: tuple[Case, ...] = (
    Case(1, 1, 128, 8192),
    Case(16, 1, 128, 8192),
    Case(128, 1, 128, 4096),
    Case(1024, 1, 128, 4096),
)


class HostTimes(NamedTuple):
    """What calls cost the host.

    Attributes
    ----------
    times : dict
        ``"CuPy"``, and ``"PyTorch"`` and ``"JAX"`` where they are installed, to the time of a call.
    notes : list of str
        Why one of them is missing.
    stages : dict
        Of CuPy's call: ``"arguments"`` (their pointers, shapes and stream are read), ``"launch"``
        (the driver's); what is left finds the prepared launch and notes who uses the memory.
    """

    times: dict[str, Timing]
    notes: list[str]
    stages: dict[str, Timing]


def time_schedule(bench: Workbench, case: Case, *, ragged: bool) -> Timing:
    """Time ``MLADecodePlan.update``: the schedule kernel.

    Parameters
    ----------
    bench : Workbench
        Its GPU and clock are used.
    case : Case
        Shape of the plan, and the lengths.
    ragged : bool
        Lengths between 1 and twice the case's, instead of all the same.

    Returns
    -------
    Timing
    """
    lengths = np.full(case.batch, case.kv_len, np.int32)
    if ragged:
        rng = np.random.default_rng(case.batch)
        lengths = rng.integers(1, 2 * case.kv_len, case.batch, dtype=np.int32)
    seqlens = bench.gpu.upload(lengths)
    plan = cumla.MLADecodePlan(case.batch, case.q_len, case.heads, like=seqlens)
    return bench.time(lambda: plan.update(seqlens))


def host_times(bench: Workbench) -> HostTimes:
    """Time an eager ``mla_decode`` with a ready plan and given outputs, on the host.

    JAX's arrays cannot be written to: there the time includes two outputs.

    Parameters
    ----------
    bench : Workbench
        Made for `HOST_CASE` among others.

    Returns
    -------
    HostTimes
    """
    arrays = bench.inputs(HOST_CASE).arguments()
    times = {"CuPy": time_host(_call(*arrays), bench.gpu.synchronize)}
    stages = _stages(bench, *arrays)
    notes = []
    if find_spec("torch") is not None:
        torch = import_module("torch")
        tensors = tuple(as_tensor(torch, array) for array in arrays)
        bench.gpu.synchronize()
        times["PyTorch"] = time_host(_call(*tensors), torch.cuda.synchronize)
    if find_spec("jax") is not None:
        try:
            times["JAX"] = time_host(_call(*_jax_arrays()), bench.gpu.synchronize)
        except Exception as error:  # JAX for the CPU, or for another CUDA: no reason to stop
            reason = str(error).strip().partition("\n")[0]
            notes.append(f"JAX: no host time ({type(error).__name__}: {reason})")
    return HostTimes(times, notes, stages)


def _stages(bench: Workbench, *arrays: Any) -> dict[str, Timing]:
    """Time what a call consists of, each part alone."""
    q, kv_cache, block_table, seqlens, out, lse = arrays
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    plan.update(seqlens)
    plan.run(q, kv_cache, block_table, seqlens, out=out, lse=lse)
    parts: dict[str, Callable[[], object]] = {
        "arguments": lambda: (glance(arrays), reopen_call(q, plan.key.device)),
    }
    if plan._memory is not None:  # as it is for arrays on the CPU
        (parts["launch"],) = plan._memory.ready.values()
    return {name: time_host(part, bench.gpu.synchronize) for name, part in parts.items()}


def _call(
    q: Any, kv_cache: Any, block_table: Any, seqlens: Any, out: Any = None, lse: Any = None
) -> Callable[[], object]:
    """Bind the public call to its arguments and a plan."""
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    plan.update(seqlens)
    return lambda: cumla.mla_decode(q, kv_cache, block_table, seqlens, plan=plan, out=out, lse=lse)


def _jax_arrays() -> tuple[Any, ...]:
    """Make (q, kv_cache, block_table, cache_seqlens) of `HOST_CASE` on JAX's first GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most memory
    jax = import_module("jax")
    (gpu, *_) = jax.devices("gpu")
    case = HOST_CASE
    return tuple(
        jax.device_put(array, gpu).block_until_ready()
        for array in (
            np.zeros((case.batch, case.q_len, case.heads, HEAD_DIM), ml_dtypes.bfloat16),
            np.zeros((case.pages, PAGE_SIZE, HEAD_DIM), ml_dtypes.bfloat16),
            np.arange(case.pages, dtype=np.int32).reshape(case.batch, -1),
            case.lengths,
        )
    )


def as_tensor(torch: Any, array: Any) -> Any:
    """View the same memory as a tensor; bfloat16 goes over as int16."""
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)
