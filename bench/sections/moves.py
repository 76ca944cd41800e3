# SPDX-License-Identifier: Apache-2.0
"""Operations that move bytes and do little else: timed beside plain copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, Protocol

from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import Gpu
from cumla.bench.section import Bench, Column, Row

__all__ = ["FIGURES", "Step", "measure_moves"]


class Step(Protocol):
    """Arrays of a case on the device: some that a call reads, others that it writes."""

    def run(self) -> object:
        """Enqueue a call."""

    def check(self) -> float | None:
        """Raise `CheckError` unless the call wrote what it should; the worst error, if any."""


def measure_moves(
    step: Callable[[Gpu, Any, int], Step], bench: Bench, case: Any, *, in_graph: bool = True
) -> Row:
    """Check a call, then time it, and a plain copy that reads and writes as many bytes.

    A single call pays for its launch and for getting under way, and nothing for what it leaves
    unwritten in L2. So cases of up to `Limits.moved_bytes` are timed in a CUDA graph, too: its
    calls go round 512 MiB of arrays, outputs included, and move 4 GiB, as the copy does that is
    the ceiling. Kernels of cumla may be launched while the one before them ends. `step` makes the
    arrays of a call from a seed, so that no two calls read the same numbers; what is written is
    poisoned. Returns times, rates, and shares of the copy ceiling.
    """
    make, nbytes = partial(step, bench.gpu, case), case.nbytes
    one = make(0)
    one.run()
    error = one.check()
    row: Row = bench.time(one.run).figures()
    if error is not None:
        row["row_error"] = error
    row["copy_us"] = bench.time(_copy(bench, nbytes)).us
    if in_graph:
        row |= _in_graphs(bench, nbytes, make)
    for of in ("", "graph_", "graph_copy_"):
        if (us := row.get(f"{of}us")) is not None:
            gbps = nbytes / (us * 1e3)
            row |= {f"{of}gbps": gbps, f"{of}efficiency": gbps / bench.ceilings.copy_gbps}
    return row


def _copy(bench: Bench, nbytes: int) -> Callable[[], None]:
    """Make a plain copy that reads and writes this many bytes."""
    source, destination = (bench.gpu.empty((nbytes // 8 * 2,), "uint16") for _ in range(2))
    fill_normal(bench.gpu, source, "bfloat16", seed=3, deviation=1.0)
    return partial(bench.gpu.copy, destination, source)


def _in_graphs(bench: Bench, nbytes: int, make: Callable[[int], Step]) -> Row:
    """Time calls back to back in a graph, and copies in another; None of large cases."""
    limits = bench.limits
    if nbytes > limits.moved_bytes:
        return {"graph_us": None, "graph_copy_us": None}
    sets, count = ceil(limits.rotated_bytes / nbytes), ceil(limits.replay_bytes / nbytes)
    steps = [make(seed) for seed in range(sets)]
    graph = bench.graph([step.run for step in steps], count)
    for step in steps:
        step.check()
    copy = bench.graph([_copy(bench, nbytes) for _ in range(sets)], count)
    return {"graph_us": graph.us, "graph_copy_us": copy.us}


FIGURES = (
    Column("MB read and written", lambda row: row["nbytes"] / 1e6, ".0f"),
    Column("us", "us", "us"),
    Column("GB/s", "gbps", ".0f"),
    Column("share of the copy ceiling", "efficiency", ".2f"),
    Column("us of a plain copy", "copy_us", "us", usual=None),
    *(
        Column(f"{title} {name}", f"{of}_{key}", form, usual=None)
        for of, title in (("graph", "graph"), ("graph_copy", "graph copy"))
        for name, key, form in (("us", "us", "us"), ("GB/s", "gbps", ".0f"))
        + (("share", "efficiency", ".2f"),)
    ),
)
"""Columns of such a row."""
