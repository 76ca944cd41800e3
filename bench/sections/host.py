# SPDX-License-Identifier: Apache-2.0
"""What an eager call costs the host: CuPy's, PyTorch's and JAX's arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any

import ml_dtypes
import numpy as np

from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.gpu import Gpu
from cumla.bench.problem import decode, lay_out
from cumla.bench.section import Row
from cumla.bench.timing import Timing
from cumla.core.arrays import glance, reopen_call
from cumla.launch.mla.shape import HEAD_DIM

__all__ = ["HOST_CASE", "as_tensor", "measure_host", "time_host"]

HOST_CASE = Case(16, 1, 16, 1024)
"""Little work for the GPU: the host counts."""


def measure_host(gpu: Gpu, case: Case = HOST_CASE) -> Row:
    """Time eager calls of a ready plan with given outputs, on the host.

    JAX's arrays cannot be written to: there the time includes two outputs.
    """
    arrays = lay_out(gpu, case).arguments()
    call = decode(*arrays)
    times = {"CuPy": time_host(call, gpu.synchronize)}
    stages = _stages(gpu, call, arrays)
    notes = []
    if find_spec("torch") is not None:
        torch = import_module("torch")
        tensors = tuple(as_tensor(torch, array) for array in arrays)
        gpu.synchronize()
        times["PyTorch"] = time_host(decode(*tensors), torch.cuda.synchronize)
    if find_spec("jax") is not None:
        try:
            times["JAX"] = time_host(decode(*_jax_arrays(case)), gpu.synchronize)
        except Exception as error:  # JAX for the CPU, or for another CUDA: no reason to stop
            reason = str(error).strip().partition("\n")[0]
            notes.append(f"JAX: no host time ({type(error).__name__}: {reason})")
    of = {"host": times, "host_stages": stages}
    figures = {key: {name: time.figures() for name, time in of[key].items()} for key in of}
    return {**figures, "notes": notes}


def time_host(
    call: Callable[[], object],
    drain: Callable[[], object],
    *,
    repeats: int = 512,
    warmup: int = 64,
    burst: int = 16,
) -> Timing:
    """Time how long a call keeps the host; `drain` waits for the GPU between bursts of calls."""
    measured = []
    for i in range(warmup + repeats):
        if i % burst == 0:
            drain()
        begin = perf_counter_ns()
        call()
        measured.append((perf_counter_ns() - begin) / 1e3)
    drain()
    return Timing.of(measured[warmup:])


def _stages(gpu: Gpu, call: Any, arrays: tuple[Any, ...]) -> dict[str, Timing]:
    """Time what a call consists of, each part alone."""
    call()
    plan = call.func.__self__
    given = (*arrays[:3], *arrays[4:])  # the lengths are the plan's
    parts: dict[str, Callable[[], object]] = {
        "arguments": lambda: (glance(given), reopen_call(given[0], plan.key.device)),
    }
    if plan._memory is not None:  # as it is for arrays on the CPU
        (parts["launch"],) = plan._memory.ready.values()
    return {name: time_host(part, gpu.synchronize) for name, part in parts.items()}


def _jax_arrays(case: Case) -> tuple[Any, ...]:
    """Make (q, kv_cache, block_table, kv_lens) of a case on JAX's first GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most memory
    jax = import_module("jax")
    (gpu, *_) = jax.devices("gpu")
    arrays = (
        np.zeros((case.batch, case.q_len, case.heads, HEAD_DIM), ml_dtypes.bfloat16),
        np.zeros((case.pages, PAGE_SIZE, HEAD_DIM), ml_dtypes.bfloat16),
        np.arange(case.pages, dtype=np.int32).reshape(case.batch, -1),
        case.lengths,
    )
    return tuple(jax.device_put(array, gpu).block_until_ready() for array in arrays)


def as_tensor(torch: Any, array: Any) -> Any:
    """View the same memory as a tensor; bfloat16 goes over as int16."""
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)
