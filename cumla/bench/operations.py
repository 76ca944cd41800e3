# SPDX-License-Identifier: Apache-2.0
"""Rows of the operations beside attention, which move bytes and do little else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import Gpu
from cumla.bench.timing import GpuTimer, Timing

__all__ = ["Measure", "OperationCase", "operation_row", "time_copy"]

Measure = Callable[[], tuple[Timing, dict[str, float]]]
"""Checks a case, times it, and says what else was found; raises `CheckError` if it is wrong."""


class OperationCase(Protocol):
    """What is run."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""


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
    source, destination = (gpu.empty((nbytes // 8 * 2,), "uint16") for _ in range(2))
    fill_normal(gpu, source, "bfloat16", seed=3, deviation=1.0)
    return timer(gpu, lambda: gpu.copy(destination, source))


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
        ``gbps``, ``efficiency``: the share of the copy ceiling, and what else was found. One whose
        result is wrong has ``failed`` instead.
    """
    row = case.to_json() | {"nbytes": case.nbytes}
    try:
        timing, found = measure()
    except CheckError as error:
        return row | {"failed": str(error)}
    gbps = case.nbytes / (timing.us * 1e3)
    return row | timing.figures() | {"gbps": gbps, "efficiency": gbps / copy_gbps} | found
