# SPDX-License-Identifier: Apache-2.0
"""The section that users measure: dense decoding of MLA."""

from __future__ import annotations

from cumla.bench.cases import DENSE, Case
from cumla.bench.ceilings import stream_only
from cumla.bench.problem import Problem, check, lay_out
from cumla.bench.section import RATES, Bench, Column, Row, Section, columns
from cumla.bench.timing import Timing


def time_checked(bench: Bench, problem: Problem) -> tuple[Timing, tuple[float, float]]:
    """Check a problem, then time it: one call with its schedule ready."""
    call = problem.call()
    call()
    errors = check(bench.gpu, problem)
    return bench.time(call), errors


def _measure(bench: Bench, case: Case) -> Row:
    problem = lay_out(bench.gpu, case)
    single, (row_error, lse_error) = time_checked(bench, problem)
    order = bench.gpu.download(problem.tables[0])
    stream = bench.time(stream_only(bench.gpu, problem.kv, order[order >= 0]))
    floor = case.floor_us(bench.ceilings)
    return single.rates(case.flops, case.nbytes, floor) | {
        "stream_only_us": stream.us,
        "graph_us": _graph_us(bench, case),
        "row_error": row_error,
        "lse_error": lse_error,
    }


def _graph_us(bench: Bench, case: Case) -> float | None:
    """Time a call among many in a graph that goes round several caches, of a small batch."""
    caches = bench.limits.caches(case.batch, case.cache_bytes)
    if caches == 1:
        return None
    problem = lay_out(bench.gpu, case, caches)
    rotating = [problem.call(cache) for cache in range(caches)]
    least = bench.limits.graph_calls
    graph = bench.graph(rotating, least)
    check(bench.gpu, problem, cache=(max(least, caches) - 1) % caches)  # what the last call left
    return graph.us


SECTION = Section(
    name="rows",
    cases=DENSE,
    measure=_measure,
    shape=(
        *columns("batch", "q_len", "heads", "kv_len"),
        Column("kv_heads", "kv_heads", usual=1),
        Column("dtype", "dtype", usual="bfloat16"),
        Column("lengths", "lengths", usual="equal"),
        Column("batch_invariant", "batch_invariant", usual=False),
    ),
    figures=(
        *RATES,
        Column("stream-only us", "stream_only_us", "us"),
        Column("graph us", "graph_us", "us"),
    ),
)
