# SPDX-License-Identifier: Apache-2.0
"""The arrays of an MLA call on the device, and their check against float64."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import DTYPES, Gpu, bench_spec
from cumla.bench.section import Call, CheckError
from cumla.errors import CumlaError
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

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


@dataclass(frozen=True)
class Problem:
    """Arrays of a call on the device; those of 16-bit floats as uint16."""

    case: Case  # shape and dtype
    # (batch, q_len, heads, 576) and (pages, 64, kv_heads, 576).
    q: Any
    kv: Any
    # (batch, pages of the longest request) int32, one for each of the caches in `kv`.
    tables: list[Any]
    kv_lens: Any  # (batch,) int32
    # (batch, q_len, heads, 512), and float32 (batch, q_len, heads).
    out: Any
    lse: Any

    @classmethod
    def of(
        cls, gpu: Gpu, case: Case, q: Any, kv: Any, tables: NDArray[np.int32], *rows: int
    ) -> Problem:
        """Put arrays into a call; outputs are NaN, and of shape `rows` if that is not the case's.

        `tables` is (caches, batch, pages of a request).
        """
        shape = rows or (case.batch, case.q_len, case.heads)
        out, lse = gpu.empty((*shape, VALUE_DIM), "uint16"), gpu.empty(shape, "float32")
        uploaded = [gpu.upload(table) for table in tables]
        problem = cls(case, q, kv, uploaded, gpu.upload(case.lengths), out, lse)
        problem.poison(gpu)
        return problem

    def poison(self, gpu: Gpu) -> None:
        """Make the outputs NaN, so that what is not written shows."""
        gpu.fill_bytes(self.out, 0xFF)
        gpu.fill_bytes(self.lse, 0xFF)

    def arguments(self, cache: int = 0) -> tuple[Any, ...]:
        """List (q, kv_cache, block_table, kv_lens, out, lse), 16-bit floats as such."""
        dtype = DTYPES[self.case.dtype]
        q, kv, out = (bits.view(dtype) for bits in (self.q, self.kv, self.out))
        return q, kv, self.tables[cache], self.kv_lens, out, self.lse

    def call(self, cache: int = 0, **options: Any) -> Call:
        """Make a call with its schedule ready."""
        if self.case.batch_invariant:
            options["invariant_len"] = self.tables[0].shape[1] * PAGE_SIZE
        return decode(*self.arguments(cache), **options)


def decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    kv_lens: Any,
    out: Any = None,
    lse: Any = None,
    *,
    kv_scale: float | None = None,
    invariant_len: int | None = None,
) -> Call:
    """Make a call of a decode plan; with `invariant_len`, its longest length, batch-invariant."""
    plan = cumla.MLADecodePlan.from_arrays(
        q, kv_cache, batch_invariant=invariant_len is not None, max_kv_len=invariant_len
    )
    plan.update(kv_lens)
    outputs = {"kv_scale": kv_scale, "out": out, "lse": lse}
    return partial(plan.run, q, kv_cache, block_table=block_table, **outputs)


def filled(gpu: Gpu, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Make an array of normal numbers, as uint16."""
    array = gpu.empty(shape, "uint16")
    fill_normal(gpu, array, dtype, seed=seed, deviation=_DEVIATION)
    return array


def lay_out(gpu: Gpu, case: Case, caches: int = 1) -> Problem:
    """Make the arrays of a case: `caches` of them, in pages that are shuffled together."""
    needed = caches * case.pages * PAGE_SIZE * case.kv_heads * HEAD_DIM * 2
    if needed > gpu.free_bytes():
        raise CumlaError(
            f"needs {needed / 1e9:.1f} GB for its cache, and {gpu.free_bytes() / 1e9:.1f} GB are "
            f"free; leave such cases out"
        )
    count = case.pages * caches
    kv = filled(gpu, (count, PAGE_SIZE, case.kv_heads, HEAD_DIM), case.dtype, seed=2)
    q = filled(gpu, (case.batch, case.q_len, case.heads, HEAD_DIM), case.dtype, seed=3)
    pages = np.random.default_rng(count).permutation(count).astype(np.int32)
    tables = [_block_table(case, own) for own in pages.reshape(caches, case.pages)]
    return Problem.of(gpu, case, q, kv, np.stack(tables))


def _block_table(case: Case, pages: NDArray[np.int32]) -> NDArray[np.int32]:
    """Deal pages out to the requests; entries past a request's last page name no page."""
    counts = case.pages_of_requests
    used = np.arange(counts.max()) < counts[:, None]
    table = np.full(used.shape, -1, np.int32)
    table[used] = pages
    return table


def check(
    gpu: Gpu, problem: Problem, cache: int = 0, *, tolerance: float | None = None
) -> tuple[float, float]:
    """Compare rows of the output with float64; raise `CheckError`, or return the worst errors.

    They are relative: of an output row, and of a log-sum-exp. With a tolerance for rows, as for
    results of other libraries, `lse` is not looked at.
    """
    case, rows = problem.case, sample(problem.case)
    want, want_lse = _attend_rows(gpu, problem, cache, rows)
    request, token, head = rows.T
    bits = gpu.download(problem.out)[request, token, head]
    got = bits.view(DTYPES[case.dtype]).astype(np.float64)
    sizes = np.linalg.norm(want, axis=1)
    errors = np.linalg.norm(got - want, axis=1) / np.where(sizes > 0, sizes, 1.0)
    row_error = _worst(case, "out", rows, errors, tolerance or _ROW_TOLERANCE[case.dtype])
    if tolerance is not None:
        return row_error, 0.0
    got_lse = gpu.download(problem.lse)[request, token, head].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row that sees nothing: infinite in both
        errors = np.where(got_lse == want_lse, 0.0, np.abs(got_lse - want_lse) / np.abs(want_lse))
    return row_error, _worst(case, "lse", rows, errors, _LSE_TOLERANCE)


def _worst(
    case: Case, what: str, rows: NDArray[np.int32], errors: NDArray[np.float64], tolerance: float
) -> float:
    """Refuse errors above the tolerance; return the worst."""
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


def sample(case: Case) -> NDArray[np.int32]:
    """Choose rows (request, token, head), first and last among them: int32 (rows, 3)."""
    shape = (case.batch, case.q_len, case.heads)
    total = int(np.prod(shape))
    some = np.random.default_rng(total).permutation(total)[:_CHECKED_ROWS]
    chosen = np.unique(np.append(some, (0, total - 1)))
    return np.stack(np.unravel_index(chosen, shape), axis=1).astype(np.int32)


def _attend_rows(
    gpu: Gpu, problem: Problem, cache: int, rows: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute rows of out, and their log-sum-exp, in float64 on the device."""
    case, table = problem.case, problem.tables[cache]
    out = gpu.empty((len(rows), VALUE_DIM), "float64")
    lse = gpu.empty((len(rows),), "float64")
    uploaded = gpu.upload(np.ascontiguousarray(rows))
    values = (
        gpu.address(problem.q),
        gpu.address(problem.kv),
        gpu.address(table),
        table.shape[1],
        gpu.address(problem.kv_lens),
        *(gpu.address(array) for array in (uploaded, out, lse)),
        HEAD_DIM**-0.5,
        *(case.q_len, case.heads, case.kv_heads, True),
    )
    gpu.launch(ATTEND_ROWS[case.dtype], len(rows), _ATTEND_ROWS_PARAMS, values)
    return gpu.download(out), gpu.download(lse)
