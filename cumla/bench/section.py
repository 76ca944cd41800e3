# SPDX-License-Identifier: Apache-2.0
"""A section of the benchmark as data: its cases, how one is measured, and the columns it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

from cumla.bench.cases import Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.timing import GpuTimer, Timing, time_cold, time_graph

Row = dict[str, Any]
Note = Callable[[str], None]
Call = Callable[[], object]


class CheckError(Exception):
    """The kernels' result for a case is wrong; its times would mean nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the measurements in CUDA graphs keep to."""

    small_batch: int = 16  # up to this batch a graph of many calls is timed as well
    # Least number of calls in such a graph; most caches that it goes round.
    graph_calls: int = 20
    most_caches: int = 32
    # Memory that a graph goes round, so that none of it is in L2 when its turn comes again.
    rotated_bytes: int = 512 << 20

    def caches(self, batch: int, cache_bytes: int) -> int:
        """Count the caches that a graph goes round; 1 where there is no graph."""
        if batch > self.small_batch:
            return 1
        return min(self.most_caches, max(2, ceil(self.rotated_bytes / cache_bytes)))


@dataclass(frozen=True)
class Bench:
    """The tools of a section."""

    gpu: Gpu  # entered
    ceilings: Ceilings  # of that GPU, in the same run
    timer: GpuTimer = time_cold  # how single calls are timed
    results: Row = field(default_factory=dict)  # what has been measured so far
    limits: Limits = field(default_factory=Limits)  # sizes of the graphs

    def time(self, call: Call, *, repeats: int = 30, warmup: int = 5) -> Timing:
        """Time a single call."""
        return self.timer(self.gpu, call, repeats=repeats, warmup=warmup)

    def graph(self, calls: Sequence[Call], least: int) -> Timing:
        """Time calls back to back in one graph, `least` of them or each once."""
        count = max(least, len(calls))
        return time_graph(self.gpu, [calls[i % len(calls)] for i in range(count)])


def show_us(time: float | None) -> str:
    """Print microseconds with three digits."""
    if time is None:
        return "-"
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a section's table."""

    title: str  # its heading
    # Key of a row, or what computes the cell's value from the row. None prints as "-".
    value: str | Callable[[Row], Any]
    form: str = ""  # ``"us"``, or a format specification
    usual: Any = ...  # if given, the column is left out where every row has this value

    def of(self, row: Row) -> Any:
        """Find the value of a row."""
        return row.get(self.value) if isinstance(self.value, str) else self.value(row)

    def is_shown(self, rows: Sequence[Row]) -> bool:
        """Return whether any row has something to show."""
        if self.usual is ...:
            return True
        return any(self.of(row) not in (None, self.usual) for row in rows)

    def cell(self, row: Row) -> str:
        """Print the value of a row."""
        value = self.of(row)
        if value is None:
            return "-"
        return show_us(value) if self.form == "us" else format(value, self.form)


def _said(row: Row) -> str:
    """Sum up the time of a row, or its times by name."""
    times = row["us"].values() if isinstance(row["us"], dict) else [row["us"]]
    return ", ".join(map(show_us, times)) + " us"


def columns(*names: str) -> tuple[Column, ...]:
    """Make columns that have the names of their keys."""
    return tuple(Column(name, name) for name in names)


RATES = (
    Column("us", "us", "us"),
    Column("TFLOP/s", "tflops", ".0f"),
    Column("GB/s", "gbps", ".0f"),
    Column("efficiency", "efficiency", ".2f"),
)
"""Columns of what `Timing.rates` names."""


class Case(Protocol):
    """A case that a section measures."""

    @property
    def name(self) -> str:
        """Identify the case in messages."""

    def to_json(self) -> Row:
        """Name the case as a row of the results file does."""


@dataclass(frozen=True)
class Section:
    """A part of the benchmark: one table of one operation."""

    name: str  # key of its rows in the results
    cases: tuple[Any, ...]  # what is measured: a name, and `to_json`, which begins the row
    # Checks a case against float64, times it, and returns the rest of its row. Raises `CheckError`
    # where a result is wrong.
    measure: Callable[[Bench, Any], Row]
    # The key of a case; the measured values.
    shape: tuple[Column, ...]
    figures: tuple[Column, ...]

    def run(self, bench: Bench, note: Note) -> Iterator[Row]:
        """Measure one case after the other; whatever goes wrong with one leaves the others."""
        for case in self.cases:
            row = case.to_json()
            bench.gpu.release()
            try:
                row |= self.measure(bench, case)
                note(f"{case.name}: {_said(row)}")
            except CheckError as error:
                row["failed"] = str(error)
            except Exception as error:  # of any kind: what is measured later stands
                reason = str(error).strip().partition("\n")[0]
                row["failed"] = f"{case.name}: {type(error).__name__}: {reason}"
            if "failed" in row:
                note(f"FAILED: {row['failed']}")
            yield row

    def table(self, results: Row) -> list[list[str]]:
        """Print this section's rows as a table of text; empty where there are none."""
        lines: list[Row] = results.get(self.name, [])
        if not lines:
            return []
        shape = [column for column in self.shape if column.is_shown(lines)]
        figures = [column for column in self.figures if column.is_shown(lines)]
        table = [[column.title for column in (*shape, *figures)]]
        for line in lines:
            cells = [column.cell(line) for column in shape]
            if "failed" in line:
                cells += ["failed", *[""] * (len(figures) - 1)]
            else:
                cells += [column.cell(line) for column in figures]
            table.append(cells)
        return table
