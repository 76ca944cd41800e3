# SPDX-License-Identifier: Apache-2.0
"""Beside attention itself: what a call costs the host, and the schedule kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import cumla
from cumla.bench.cases import Case
from cumla.bench.dense import Workbench
from cumla.bench.gpu import Gpu
from cumla.bench.timing import Timing, time_cold, time_host

__all__ = ["HOST_CASE", "SCHEDULES", "host_times", "time_schedule"]

HOST_CASE = Case(16, 1, 16, 1024)
"""Little work for the GPU: what counts is the host."""

SCHEDULES: tuple[Case, ...] = (
    Case(1, 1, 128, 8192),
    Case(16, 1, 128, 8192),
    Case(128, 1, 128, 4096),
    Case(1024, 1, 128, 4096),
)


def time_schedule(gpu: Gpu, case: Case, *, ragged: bool) -> Timing:
    """Time ``MLADecodePlan.update``: the schedule kernel.

    Parameters
    ----------
    gpu : Gpu
        Entered.
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
    seqlens = gpu.upload(lengths)
    plan = cumla.MLADecodePlan(case.batch, case.q_len, case.heads, like=seqlens)
    return time_cold(gpu, lambda: plan.update(seqlens))


def host_times(bench: Workbench) -> dict[str, Timing]:
    """Time an eager ``mla_decode`` with a ready plan and given outputs, on the host.

    Parameters
    ----------
    bench : Workbench
        Made for `HOST_CASE` among others.

    Returns
    -------
    dict
        ``"CuPy"``, and ``"PyTorch"`` where it is installed, to the time of a call.
    """
    arrays = bench.inputs(HOST_CASE).arguments()
    times = {"CuPy": time_host(_call(arrays), bench.gpu.synchronize)}
    if find_spec("torch") is not None:
        torch = import_module("torch")
        tensors = tuple(_tensor(torch, array) for array in arrays)
        bench.gpu.synchronize()
        times["PyTorch"] = time_host(_call(tensors), torch.cuda.synchronize)
    return times


def _call(arrays: tuple[Any, ...]) -> Callable[[], object]:
    """Bind the public call to (q, kv_cache, block_table, cache_seqlens, out, lse)."""
    *inputs, out, lse = arrays
    q, kv_cache, _, seqlens = inputs
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    plan.update(seqlens)
    return lambda: cumla.mla_decode(*inputs, plan=plan, out=out, lse=lse)


def _tensor(torch: Any, array: Any) -> Any:
    """View the same memory as a tensor; bfloat16 goes over as int16."""
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)
