# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode: each case is checked against float64, then timed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla import CumlaError, MLADecodePlan
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.ceilings import fill_normal, stream_only
from cumla.bench.gpu import DTYPES, Gpu, bench_spec
from cumla.bench.timing import GpuTimer, Timing, time_cold, time_graph
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = [
    "ATTEND_ROWS",
    "CheckError",
    "DenseTiming",
    "Inputs",
    "Workbench",
    "check",
    "check_rows",
    "check_some",
    "inputs_of",
    "run_case",
]

ATTEND_ROWS = {
    dtype: bench_spec("attend_rows", "AttendRowsParams", 256, dtype=dtype) for dtype in DTYPES
}
_ATTEND_ROWS_PARAMS = struct.Struct("<3Qq4Qd4i")

_DEVIATION = 0.1  # of queries and cache
_CHECKED_ROWS = 510  # of an output, beside the first and the last
# |error| / |row|: two roundings, of weights and output. Averages over 131072 tokens are so small
# that float16 rounds them like numbers of fewer bits.
_ROW_TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3}
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
        One call with its schedule ready.
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
    """Memory for the largest of some cases, and the clock.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    cases : sequence of Case
        What is going to run.
    timer : GpuTimer
        How single calls are timed.

    Raises
    ------
    CumlaError
        A case does not fit into the GPU's memory.
    """

    def __init__(self, gpu: Gpu, cases: tuple[Case, ...], timer: GpuTimer = time_cold) -> None:
        self.gpu = gpu
        self._timer = timer
        largest = max(cases, key=_cache_pages)
        needed = _cache_pages(largest) * PAGE_SIZE * HEAD_DIM * 2
        if needed > gpu.free_bytes():
            raise CumlaError(
                f"{largest.name}: needs {needed / 1e9:.1f} GB for its cache, and "
                f"{gpu.free_bytes() / 1e9:.1f} GB are free; leave such cases out"
            )
        queries = max(case.batch * case.q_len * case.heads for case in cases)
        self._kv = gpu.empty((_cache_pages(largest), PAGE_SIZE, HEAD_DIM), "uint16")
        self._q = gpu.empty((queries, HEAD_DIM), "uint16")
        self._dtype = ""  # of the numbers in both

    def time(self, work: Callable[[], object], repeats: int = 30) -> Timing:
        """Time work on the GPU: a single call."""
        return self._timer(self.gpu, work, repeats=repeats)

    def inputs(self, case: Case, caches: int = 1) -> Inputs:
        """Lay out the arrays of a case: `caches` of them, in pages that are shuffled together.

        All inputs share memory, so those of another dtype lose their numbers.
        """
        gpu = self.gpu
        self._fill(case.dtype)
        count = case.pages * caches
        shuffled = np.random.default_rng(count).permutation(count).astype(np.int32)
        pages = shuffled.reshape(caches, case.pages)
        shape = (case.batch, case.q_len, case.heads)
        slots = self._kv[: count * case.kv_heads]
        return Inputs(
            q=self._q[: case.batch * case.q_len * case.heads].reshape(*shape, HEAD_DIM),
            kv=slots.reshape(count, PAGE_SIZE, case.kv_heads, HEAD_DIM),
            pages=pages,
            tables=[gpu.upload(_block_table(case, own)) for own in pages],
            seqlens=gpu.upload(case.lengths),
            out=gpu.empty((*shape, VALUE_DIM), "uint16"),
            lse=gpu.empty((case.batch, case.heads, case.q_len), "float32"),
            dtype=case.dtype,
            batch_invariant=case.batch_invariant,
        )

    def stream_only(self, case: Case) -> Timing:
        """Time a kernel that brings a case's pages into shared memory and does nothing else."""
        inputs = self.inputs(case)
        return self.time(stream_only(self.gpu, inputs.kv, inputs.pages[0]))

    def _fill(self, dtype: str) -> None:
        if dtype == self._dtype:
            return
        fill_normal(self.gpu, self._kv, dtype, seed=2, deviation=_DEVIATION)
        fill_normal(self.gpu, self._q, dtype, seed=3, deviation=_DEVIATION)
        self._dtype = dtype


def _cache_pages(case: Case) -> int:
    """Pages of one kv head of all the caches that a case needs."""
    return case.pages * case.kv_heads * caches_of(case)


def _block_table(case: Case, pages: NDArray[np.int32]) -> NDArray[np.int32]:
    """Deal pages out to the requests; entries behind a request's last page name no page."""
    counts = case.pages_of_requests
    used = np.arange(counts.max()) < counts[:, None]
    table = np.full(used.shape, -1, np.int32)
    table[used] = pages
    return table


@dataclass(frozen=True)
class Inputs:
    """Arrays of a case on the device; those of 16-bit floats as uint16.

    Attributes
    ----------
    q, kv : array
        (batch, q_len, heads, 576) and (pages, 64, kv_heads, 576).
    pages : numpy.ndarray
        (caches, pages of a cache) int32: the pages of all requests, one after the other.
    tables : list of array
        (batch, pages of the longest request) int32, one for each of the caches in `kv`.
    seqlens : array
        (batch,) int32.
    out, lse : array
        (batch, q_len, heads, 512), and float32 (batch, heads, q_len).
    dtype : str
        Of `q`, `kv` and `out`.
    batch_invariant : bool
        How the calls are to be planned.
    """

    q: Any
    kv: Any
    pages: NDArray[np.int32]
    tables: list[Any]
    seqlens: Any
    out: Any
    lse: Any
    dtype: str
    batch_invariant: bool

    def arguments(self, cache: int = 0) -> tuple[Any, ...]:
        """List (q, kv_cache, block_table, cache_seqlens, out, lse), 16-bit floats as such."""
        q, kv, out = (bits.view(DTYPES[self.dtype]) for bits in (self.q, self.kv, self.out))
        return q, kv, self.tables[cache], self.seqlens, out, self.lse

    def calls(self, count: int = 1) -> list[partial[Any]]:
        """Make calls that go round the caches, with one plan whose schedule is ready."""
        q, kv, *_ = self.arguments()
        longest = self.tables[0].shape[1] * PAGE_SIZE if self.batch_invariant else None
        plan = MLADecodePlan.from_arrays(
            q, kv, batch_invariant=self.batch_invariant, max_seqlen=longest
        )
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
    single = bench.time(call)
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
    row_error, want_lse, rows = _check_out(gpu, inputs, case, cache, _ROW_TOLERANCE[case.dtype])
    request, token, head = rows.T
    got_lse = gpu.download(inputs.lse)[request, head, token].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row that sees nothing: inf in both
        errors = np.where(got_lse == want_lse, 0.0, np.abs(got_lse - want_lse) / np.abs(want_lse))
    return row_error, _worst(case, "lse", rows, errors, _LSE_TOLERANCE)


def inputs_of(gpu: Gpu, case: Case, q: Any, kv: Any, pages: NDArray[np.int32]) -> Inputs:
    """Put a query and a cache into a call of one table, with outputs that are NaN.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : Case
        Their shape.
    q, kv : array of uint16
        Query and cache; of a cache in two arrays the latent columns.
    pages : numpy.ndarray
        ``(batch, pages of a request)`` int32, the block table.

    Returns
    -------
    Inputs
        With outputs of their own.
    """
    inputs = Inputs(
        q=q,
        kv=kv,
        pages=pages.reshape(1, -1),
        tables=[gpu.upload(pages)],
        seqlens=gpu.upload(case.lengths),
        out=gpu.empty((case.batch, case.q_len, case.heads, VALUE_DIM), "uint16"),
        lse=gpu.empty((case.batch, case.heads, case.q_len), "float32"),
        dtype=case.dtype,
        batch_invariant=False,
    )
    gpu.fill_bytes(inputs.out, 0xFF)
    gpu.fill_bytes(inputs.lse, 0xFF)
    return inputs


def check_some(
    gpu: Gpu, inputs: Inputs, case: Case, gather: Callable[[NDArray[np.int64]], Any]
) -> None:
    """Hold rows of some requests against float64, over a cache that is gathered for that.

    So neither the cache nor the query of the call need lie as `check` reads them.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    inputs : Inputs
        With the outputs of a call; `kv` and `tables` are not looked at.
    case : Case
        What was called: requests of the same length.
    gather : callable
        Given requests, their pages one behind the other: (pages, 64, kv_heads, 576) uint16,
        contiguous.

    Raises
    ------
    CheckError
        As `check`, which numbers the requests among those it is shown.
    """
    requests = np.unique([0, case.batch // 2, case.batch - 1])
    each = -(-case.kv_len // PAGE_SIZE)
    table = np.arange(len(requests) * each, dtype=np.int32).reshape(-1, each)
    chosen = gpu.upload(requests)
    some = Inputs(
        q=inputs.q[chosen],
        kv=gather(requests),
        pages=table.reshape(1, -1),
        tables=[gpu.upload(table)],
        seqlens=gpu.upload(case.lengths[requests]),
        out=inputs.out[chosen],
        lse=inputs.lse[chosen],
        dtype=case.dtype,
        batch_invariant=False,
    )
    check(gpu, some, replace(case, batch=len(requests)))


def check_rows(gpu: Gpu, inputs: Inputs, case: Case, tolerance: float) -> float:
    """Hold rows of the output against float64, whoever computed it.

    Parameters
    ----------
    gpu, inputs, case
        As for `check`.
    tolerance : float
        Largest relative error of a row.

    Returns
    -------
    float
        Worst relative error of a row.

    Raises
    ------
    CheckError
        It is too large, or NaN.
    """
    return _check_out(gpu, inputs, case, 0, tolerance)[0]


def _check_out(
    gpu: Gpu, inputs: Inputs, case: Case, cache: int, tolerance: float
) -> tuple[float, NDArray[np.float64], NDArray[np.int32]]:
    """Check `out`; its worst error, and the log-sum-exps that belong to the rows looked at."""
    rows = _sample(case)
    want, want_lse = _attend_rows(gpu, inputs, case, cache, rows)
    request, token, head = rows.T
    bits = gpu.download(inputs.out)[request, token, head]
    got = bits.view(DTYPES[case.dtype]).astype(np.float64)
    sizes = np.linalg.norm(want, axis=1)
    errors = np.linalg.norm(got - want, axis=1) / np.where(sizes > 0, sizes, 1.0)
    return _worst(case, "out", rows, errors, tolerance), want_lse, rows


def _worst(
    case: Case, what: str, rows: NDArray[np.int32], errors: NDArray[np.float64], tolerance: float
) -> float:
    """Refuse errors above the tolerance; the worst of them."""
    wrong = ~(errors <= tolerance)  # NaN is wrong
    if wrong.any():
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        place = tuple(rows[worst].tolist())
        raise CheckError(
            f"{case.name}: {what} is wrong in {int(wrong.sum())} of {len(rows)} rows, most at "
            f"(request, token, head) {place}: relative error {errors[worst]:.2e}, of at most "
            f"{tolerance:.2e}"
        )
    return float(errors.max())


def _sample(case: Case) -> NDArray[np.int32]:
    """Choose rows (request, token, head), first and last among them: int32 (rows, 3)."""
    shape = (case.batch, case.q_len, case.heads)
    total = int(np.prod(shape))
    some = np.random.default_rng(total).permutation(total)[:_CHECKED_ROWS]
    chosen = np.unique(np.append(some, (0, total - 1)))
    return np.stack(np.unravel_index(chosen, shape), axis=1).astype(np.int32)


def _attend_rows(
    gpu: Gpu, inputs: Inputs, case: Case, cache: int, rows: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute rows of out, and their log-sum-exp, in float64 on the device."""
    table = inputs.tables[cache]
    out = gpu.empty((len(rows), VALUE_DIM), "float64")
    lse = gpu.empty((len(rows),), "float64")
    uploaded = gpu.upload(np.ascontiguousarray(rows))
    values = (
        gpu.address(inputs.q),
        gpu.address(inputs.kv),
        gpu.address(table),
        table.shape[1],
        gpu.address(inputs.seqlens),
        *(gpu.address(array) for array in (uploaded, out, lse)),
        HEAD_DIM**-0.5,
        *(case.q_len, case.heads, case.kv_heads, True),
    )
    gpu.launch(ATTEND_ROWS[case.dtype], len(rows), _ATTEND_ROWS_PARAMS, values)
    return gpu.download(out), gpu.download(lse)
