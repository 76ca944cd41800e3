# SPDX-License-Identifier: Apache-2.0
"""Every kernel that could serve a shape, timed beside the one that the library chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from cumla import MLADecodePlan
from cumla.bench.cases import Case, grid
from cumla.bench.dense import CheckError, Inputs, Workbench, check
from cumla.bench.explain import key_of
from cumla.bench.gpu import Gpu
from cumla.bench.run import environment, refuse_slow_kernels
from cumla.bench.timing import time_cold
from cumla.launch.split.plan import SWAPPED_ROWS, VARIANTS, MLADecodeKey

__all__ = ["SHAPES", "admissible", "run_variants", "to_text", "worst"]

SHAPES: tuple[Case, ...] = (
    *grid((1, 4, 16, 128), (1, 2), (8, 16, 32, 64, 128), (1024, 8192)),
    *grid((1, 4), (1,), (16, 64, 128), (131072,)),
)
"""What is looked at if nobody says: 86 shapes."""
_ROUNDS = 9  # in turns, so that a GPU that gets warm is fair
_REPEATS = 8


def admissible(key: MLADecodeKey) -> tuple[str, ...]:
    """List the kernels that can serve a shape."""
    return tuple(name for name in VARIANTS if name != "swapped" or key.group_rows <= SWAPPED_ROWS)


def run_variants(cases: tuple[Case, ...], note: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Check and time every admissible kernel of each case.

    Parameters
    ----------
    cases : tuple of Case
        What to run.
    note : callable
        Told what has been done, a line a case.

    Yields
    ------
    dict
        The results so far, ready for JSON: the same object, fuller each time. ``variants`` has one
        row a case: its shape, ``chosen``, and ``us`` by kernel: the median of the medians of nine
        rounds, L2 cold. ``failed`` instead of times where a result was wrong.

    Raises
    ------
    CumlaError
        There is no GPU to run on, or a variable that makes the kernels slower is set.
    """
    refuse_slow_kernels()
    with Gpu() as gpu:
        bench = Workbench(gpu, cases)
        results: dict[str, Any] = environment(gpu) | {"variants": []}
        for case in cases:
            key = key_of(case, gpu.properties.sm_count)
            row: dict[str, Any] = case.to_json() | {"chosen": key.variant}
            try:
                row["us"] = _times(bench, case, admissible(key))
            except CheckError as error:
                row["failed"] = str(error)
            note(_line(row, case.name))
            results["variants"].append(row)
            results["worst"] = worst(results["variants"])
            yield results


def _times(bench: Workbench, case: Case, names: tuple[str, ...]) -> dict[str, float]:
    """Time kernels in turns, each result held against float64 first."""
    inputs = bench.inputs(case)
    calls = {name: _call(inputs, name) for name in names}
    for call in calls.values():
        bench.gpu.fill_bytes(inputs.out, 0xFF)
        bench.gpu.fill_bytes(inputs.lse, 0xFF)
        call()
        check(bench.gpu, inputs, case)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            times[name].append(time_cold(bench.gpu, call, repeats=_REPEATS, warmup=2).us)
    return {name: float(median(measured)) for name, measured in times.items()}


def _call(inputs: Inputs, variant: str) -> Callable[[], object]:
    """Make a call of one kernel, with its schedule ready."""
    *arrays, out, lse = inputs.arguments()
    plan = MLADecodePlan.from_arrays(*arrays[:2], variant=variant)
    plan.update(inputs.seqlens)
    return partial(plan.run, *arrays, out=out, lse=lse)


def worst(rows: list[dict[str, Any]]) -> float:
    """Tell how much slower than the best kernel the chosen one is at worst: 1 is never."""
    timed = [row for row in rows if "us" in row]
    return max((row["us"][row["chosen"]] / min(row["us"].values()) for row in timed), default=1.0)


def _line(row: dict[str, Any], name: str) -> str:
    if "failed" in row:
        return str(row["failed"])
    ratio = row["us"][row["chosen"]] / min(row["us"].values())
    times = ", ".join(f"{kernel} {us:.1f}" for kernel, us in row["us"].items())
    return f"{name}: {times} us; {row['chosen']} is chosen, {ratio:.2f} x the best"


def to_text(results: dict[str, Any]) -> str:
    """Print what was measured, and the worst choice.

    Parameters
    ----------
    results : dict
        What `run_variants` yielded.

    Returns
    -------
    str
        One line a shape, and a last one.
    """
    rows = results["variants"]
    lines = [_line(row, Case.from_json(row).name) for row in rows]
    lines.append(f"{len(rows)} shapes; worst choice: {results['worst']:.3f} x the best")
    return "\n".join(lines)
