# SPDX-License-Identifier: Apache-2.0
"""Rows of the operations beside attention, which move bytes and do little else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, Protocol

from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import STREAM_BYTES, Gpu
from cumla.bench.timing import GpuTimer, Timing, time_graph

__all__ = ["Measure", "OperationCase", "Step", "operation_row", "time_copy", "time_in_graph"]

_GRAPH_BYTES = 256 * 10**6  # up to here a graph of many calls is timed as well
_REPLAY_BYTES = STREAM_BYTES  # that a graph reads and writes: as many as the ceiling's copy
_ROTATED_BYTES = 512 << 20  # of inputs and outputs that it goes round

Measure = Callable[[], tuple[Timing, dict[str, float | None]]]
"""Checks a case, times it, and says what else was found; raises `CheckError` if it is wrong."""


class OperationCase(Protocol):
    """What is run."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""


class Step(Protocol):
    """Arrays of a case on the device: some that a call reads, others that it writes."""

    def run(self) -> object:
        """Enqueue a call."""

    def check(self) -> object:
        """Raise `CheckError` unless the call wrote what it should."""


def time_copy(gpu: Gpu, nbytes: int, timer: GpuTimer) -> Timing:
    """Time what there is to compare with: a plain copy within the device's memory.

    Of some 64 MB, launching and getting under way are a large part, of a copy's time too.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    nbytes : int
        Bytes that are read and written, half of them each.
    timer : GpuTimer
        As for what is compared with it.

    Returns
    -------
    Timing
    """
    return timer(gpu, _copy(gpu, nbytes))


def _copy(gpu: Gpu, nbytes: int) -> Callable[[], None]:
    """Make a plain copy that reads and writes so many bytes."""
    source, destination = (gpu.empty((nbytes // 8 * 2,), "uint16") for _ in range(2))
    fill_normal(gpu, source, "bfloat16", seed=3, deviation=1.0)
    return partial(gpu.copy, destination, source)


def time_in_graph(gpu: Gpu, nbytes: int, make: Callable[[int], Step]) -> dict[str, float | None]:
    """Time calls back to back in a CUDA graph, and plain copies in another one.

    The calls go round 512 MiB of arrays, those that are written included, so none is in L2 when
    its turn comes again. A single call pays for its launch and for getting under way, and nothing
    for what it leaves unwritten in L2. These calls share one such start and one such end among
    4 GiB, as many bytes as the copy moves that is the ceiling. Kernels of cumla may be launched
    while the one before them ends.

    Parameters
    ----------
    gpu : Gpu
        Entered; the kernels are loaded.
    nbytes : int
        Bytes that a call reads and writes.
    make : callable
        Makes the arrays of a call, by a seed, so that no two calls read the same numbers. What is
        written is poisoned.

    Returns
    -------
    dict
        ``graph_us`` and ``graph_copy_us``: a replay's time divided by the number of calls, or of
        copies of as many bytes; both None where `nbytes` is above 256 MB.

    Raises
    ------
    CheckError
        What the last replay left is wrong in one of the sets of arrays.
    """
    if nbytes > _GRAPH_BYTES:
        return {"graph_us": None, "graph_copy_us": None}
    sets, count = ceil(_ROTATED_BYTES / nbytes), ceil(_REPLAY_BYTES / nbytes)
    steps = [make(seed) for seed in range(sets)]
    graph = time_graph(gpu, [steps[i % sets].run for i in range(count)])
    for step in steps:
        step.check()
    copies = [_copy(gpu, nbytes) for _ in range(sets)]
    graph_copy = time_graph(gpu, [copies[i % sets] for i in range(count)])
    return {"graph_us": graph.us, "graph_copy_us": graph_copy.us}


def operation_row(case: OperationCase, copy_gbps: float, measure: Measure) -> dict[str, Any]:
    """Put a case's time beside the copy ceiling.

    Parameters
    ----------
    case : OperationCase
        What is run.
    copy_gbps : float
        What a copy reads and writes in the same run, in GB/s.
    measure : callable
        Of the case.

    Returns
    -------
    dict
        Ready for JSON: the case, ``nbytes``, ``us`` (median) with ``us_low`` and ``us_high``,
        ``gbps``, ``efficiency``: the share of the copy ceiling, and what else was found. Where
        ``graph_us`` and ``graph_copy_us`` are times, ``graph_gbps``, ``graph_efficiency``,
        ``graph_copy_gbps`` and ``graph_copy_efficiency`` say the same of them. One whose result is
        wrong has ``failed`` instead.
    """
    row = case.to_json() | {"nbytes": case.nbytes}
    try:
        timing, found = measure()
    except CheckError as error:
        return row | {"failed": str(error)}
    row |= timing.figures() | found
    for of in ("", "graph_", "graph_copy_"):
        us = row.get(f"{of}us")
        if us is not None:
            gbps = case.nbytes / (us * 1e3)
            row |= {f"{of}gbps": gbps, f"{of}efficiency": gbps / copy_gbps}
    return row
