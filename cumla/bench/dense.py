# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode: each case is checked against float64, then timed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla import MLADecodePlan
from cumla.bench.cases import HEAD_DIM, PAGE_SIZE, VALUE_DIM, Case
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import Gpu, bench_spec
from cumla.bench.timing import Timing, time_cold, time_graph

__all__ = ["ATTEND_ROWS", "CheckError", "DenseTiming", "Inputs", "Workbench", "check", "run_case"]

ATTEND_ROWS = bench_spec("attend_rows", "AttendRowsParams", 256)
_ATTEND_ROWS_PARAMS = struct.Struct("<3Qq4Qd3i4x")

_DEVIATION = 0.1  # of queries and cache
_CHECKED_ROWS = 510  # of an output, beside the first and the last
_ROW_TOLERANCE = 4e-3  # |error| / |row|: two roundings to bfloat16, of weights and output
_LSE_TOLERANCE = 8.01 / 65536  # relative

_SMALL_BATCH = 16  # up to here a graph of many calls is timed as well
_GRAPH_CALLS = 20
_MOST_CACHES = 32  # that a graph goes round
_ROTATED_BYTES = 512 << 20  # of cache that a graph goes round, if that many caches are enough


class CheckError(Exception):
    """The kernels' result for a case is wrong; its times would mean nothing."""


class DenseTiming(NamedTuple):
    """What was measured of a case.

    Attributes
    ----------
    single : Timing
        One call with its schedule ready: attention and merge, L2 cold.
    graph : Timing or None
        The same for each of many calls in a graph, where the batch is small.
    row_error, lse_error : float
        Worst relative errors of the rows that were checked.
    """

    single: Timing
    graph: Timing | None
    row_error: float
    lse_error: float


class Workbench:
    """Memory for the largest of some cases, filled once.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    cases : sequence of Case
        What is going to run.
    """

    def __init__(self, gpu: Gpu, cases: tuple[Case, ...]) -> None:
        self.gpu = gpu
        pages = max(case.pages * caches_of(case) for case in cases)
        queries = max(case.batch * case.q_len * case.heads for case in cases)
        self._kv = gpu.empty((pages, PAGE_SIZE, 1, HEAD_DIM), "uint16")
        self._q = gpu.empty((queries, HEAD_DIM), "uint16")
        fill_normal(gpu, self._kv, seed=2, deviation=_DEVIATION)
        fill_normal(gpu, self._q, seed=3, deviation=_DEVIATION)

    def inputs(self, case: Case, caches: int = 1) -> Inputs:
        """Lay out the arrays of a case: `caches` of them, in pages that are shuffled together."""
        gpu = self.gpu
        count = case.pages * caches
        shuffled = np.random.default_rng(count).permutation(count).astype(np.int32)
        tables = shuffled.reshape(caches, case.batch, case.pages_of_request)
        shape = (case.batch, case.q_len, case.heads)
        return Inputs(
            q=self._q[: case.batch * case.q_len * case.heads].reshape(*shape, HEAD_DIM),
            kv=self._kv[:count],
            tables=[gpu.upload(table) for table in tables],
            seqlens=gpu.upload(np.full(case.batch, case.kv_len, np.int32)),
            out=gpu.empty((*shape, VALUE_DIM), "uint16"),
            lse=gpu.empty((case.batch, case.heads, case.q_len), "float32"),
        )


@dataclass(frozen=True)
class Inputs:
    """Arrays of a case on the device; bfloat16 ones as uint16.

    Attributes
    ----------
    q, kv : array
        (batch, q_len, heads, 576) and (pages, 64, 1, 576).
    tables : list of array
        (batch, pages of a request) int32, one for each of the caches in `kv`.
    seqlens : array
        (batch,) int32.
    out, lse : array
        (batch, q_len, heads, 512), and float32 (batch, heads, q_len).
    """

    q: Any
    kv: Any
    tables: list[Any]
    seqlens: Any
    out: Any
    lse: Any

    def arguments(self, cache: int = 0) -> tuple[Any, ...]:
        """List (q, kv_cache, block_table, cache_seqlens, out, lse), bfloat16 ones as such."""
        q, kv, out = (bits.view(ml_dtypes.bfloat16) for bits in (self.q, self.kv, self.out))
        return q, kv, self.tables[cache], self.seqlens, out, self.lse

    def calls(self, count: int = 1) -> list[partial[Any]]:
        """Make calls that go round the caches, with one plan whose schedule is ready."""
        q, kv, *_ = self.arguments()
        plan = MLADecodePlan.from_arrays(q, kv)
        plan.update(self.seqlens)
        calls = []
        for i in range(count):
            *inputs, out, lse = self.arguments(i % len(self.tables))
            calls.append(partial(plan.run, *inputs, out=out, lse=lse))
        return calls


def caches_of(case: Case) -> int:
    """How many caches a graph goes round, so that none is in L2 when its turn comes again."""
    if case.batch > _SMALL_BATCH:
        return 1
    return min(_MOST_CACHES, max(2, -(-_ROTATED_BYTES // case.cache_bytes)))


def run_case(bench: Workbench, case: Case) -> DenseTiming:
    """Check a case, then time it.

    Parameters
    ----------
    bench : Workbench
        Made for this case among others.
    case : Case
        What to run.

    Returns
    -------
    DenseTiming

    Raises
    ------
    CheckError
        A result is wrong.
    """
    gpu = bench.gpu
    inputs = bench.inputs(case)
    (call,) = inputs.calls()
    _poison(gpu, inputs)
    call()
    row_error, lse_error = check(gpu, inputs, case)
    single = time_cold(gpu, call)
    if case.batch > _SMALL_BATCH:
        return DenseTiming(single, None, row_error, lse_error)

    caches = caches_of(case)
    rotating = bench.inputs(case, caches)
    count = max(_GRAPH_CALLS, caches)
    _poison(gpu, rotating)
    graph = time_graph(gpu, rotating.calls(count))
    check(gpu, rotating, case, cache=(count - 1) % caches)  # what the last call of a replay left
    return DenseTiming(single, graph, row_error, lse_error)


def _poison(gpu: Gpu, inputs: Inputs) -> None:
    """Make the outputs NaN, so that what is not written shows."""
    gpu.fill_bytes(inputs.out, 0xFF)
    gpu.fill_bytes(inputs.lse, 0xFF)


def check(gpu: Gpu, inputs: Inputs, case: Case, cache: int = 0) -> tuple[float, float]:
    """Hold rows of the output against float64.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    inputs : Inputs
        With the outputs of a call.
    case : Case
        What was called.
    cache : int
        Which of the caches.

    Returns
    -------
    tuple of float
        Worst relative error of an output row, and of a log-sum-exp.

    Raises
    ------
    CheckError
        One of them is too large, or NaN.
    """
    rows = _sample(case)
    want, want_lse = _attend_rows(gpu, inputs, case, cache, rows)
    request, token, head = rows.T
    bits = gpu.download(inputs.out)[request, token, head]
    got = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    got_lse = gpu.download(inputs.lse)[request, head, token].astype(np.float64)

    row_errors = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    lse_errors = np.abs(got_lse - want_lse) / np.abs(want_lse)
    for what, errors, tolerance in (
        ("out", row_errors, _ROW_TOLERANCE),
        ("lse", lse_errors, _LSE_TOLERANCE),
    ):
        wrong = ~(errors <= tolerance)  # NaN is wrong
        if wrong.any():
            worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
            place = tuple(rows[worst].tolist())
            raise CheckError(
                f"{case.name}: {what} is wrong in {int(wrong.sum())} of {len(rows)} rows, most at "
                f"(request, token, head) {place}: relative error {errors[worst]:.2e}, of at most "
                f"{tolerance:.2e}"
            )
    return float(row_errors.max()), float(lse_errors.max())


def _sample(case: Case) -> np.ndarray[Any, Any]:
    """Choose rows (request, token, head), first and last among them: int32 (rows, 3)."""
    shape = (case.batch, case.q_len, case.heads)
    total = int(np.prod(shape))
    some = np.random.default_rng(total).permutation(total)[:_CHECKED_ROWS]
    chosen = np.unique(np.append(some, (0, total - 1)))
    return np.stack(np.unravel_index(chosen, shape), axis=1).astype(np.int32)


def _attend_rows(
    gpu: Gpu, inputs: Inputs, case: Case, cache: int, rows: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Compute rows of out, and their log-sum-exp, in float64 on the device."""
    table = inputs.tables[cache]
    out = gpu.empty((len(rows), VALUE_DIM), "float64")
    lse = gpu.empty((len(rows),), "float64")
    uploaded = gpu.upload(np.ascontiguousarray(rows))
    values = (
        gpu.address(inputs.q),
        gpu.address(inputs.kv),
        gpu.address(table),
        case.pages_of_request,
        gpu.address(inputs.seqlens),
        *(gpu.address(array) for array in (uploaded, out, lse)),
        HEAD_DIM**-0.5,
        *(case.q_len, case.heads, True),
    )
    gpu.launch(ATTEND_ROWS, len(rows), _ATTEND_ROWS_PARAMS, values)
    return gpu.download(out), gpu.download(lse)
