# SPDX-License-Identifier: Apache-2.0
"""Rows of the operations beside attention, which move bytes and do little else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cumla.bench.dense import CheckError
from cumla.bench.timing import Timing

__all__ = ["Measure", "OperationCase", "operation_row"]

Measure = Callable[[], tuple[Timing, dict[str, float]]]
"""Checks a case, times it, and says what else was found; raises `CheckError` if it is wrong."""


class OperationCase(Protocol):
    """What is run."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""


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
