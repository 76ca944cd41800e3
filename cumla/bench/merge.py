# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results: each case is checked against float64, then timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from cumla import merge_attention_states, reference
from cumla.bench.cases import Ceilings
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.timing import GpuTimer, time_cold

__all__ = ["MERGE", "MergeCase", "merge_rows"]

_HEADS, _HEAD_DIM = 128, 512
_TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}  # |error| / |row|


@dataclass(frozen=True, slots=True)
class MergeCase:
    """Partial results ``(tokens, 128, 512)``, stacked, with logarithms ``(tokens, 128)``.

    Attributes
    ----------
    count : int
        Of partial results.
    tokens : int
        Of each.
    dtype : str
        Of them and of the result.
    """

    count: int
    tokens: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return (self.count + 1) * self.tokens * _HEADS * (_HEAD_DIM * self.itemsize + 4)


def _case_of(nbytes: int, count: int, dtype: str) -> MergeCase:
    """Choose so many tokens that about `nbytes` are read and written."""
    return MergeCase(count, round(nbytes / MergeCase(count, 1, dtype).nbytes), dtype)


MERGE = tuple(
    _case_of(nbytes, count, dtype)
    for nbytes in (64 << 20, 1 << 30)
    for count, dtype in ((2, "bfloat16"), (8, "bfloat16"), (2, "float32"))
)
"""The cases of the benchmark: 64 MiB and 1 GiB."""


def merge_rows(
    gpu: Gpu,
    ceilings: Ceilings,
    cases: tuple[MergeCase, ...] = MERGE,
    timer: GpuTimer = time_cold,
) -> list[dict[str, Any]]:
    """Run cases.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    ceilings : Ceilings
        Of the same run.
    cases : tuple of MergeCase
        What to run.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    list of dict
        A row a case, ready for JSON: the case, ``nbytes``, ``us`` (median) with ``us_low`` and
        ``us_high``, ``gbps``, and ``efficiency``: the share of the copy ceiling. One whose result
        is wrong has ``failed`` instead of times.
    """
    rows = []
    for case in cases:
        row = asdict(case) | {"nbytes": case.nbytes}
        try:
            rows.append(row | _run(gpu, case, ceilings, timer))
        except CheckError as error:
            rows.append(row | {"failed": str(error)})
    return rows


def _run(gpu: Gpu, case: MergeCase, ceilings: Ceilings, timer: GpuTimer) -> dict[str, float]:
    words = case.itemsize // 2
    shape = (case.tokens, _HEADS, _HEAD_DIM * words)
    bits, out_bits = gpu.empty((case.count, *shape), "uint16"), gpu.empty(shape, "uint16")
    # As float32, two bfloat16 numbers are the second of them with some lower bits.
    fill_normal(
        gpu, bits, "float16" if case.dtype == "float16" else "bfloat16", seed=5, deviation=1.0
    )
    gpu.fill_bytes(out_bits, 0xFF)
    dtype = DTYPES.get(case.dtype, np.float32)
    logarithms = np.random.default_rng(5).standard_normal((case.count, case.tokens, _HEADS))
    lses = gpu.upload(logarithms.astype(np.float32))
    lse = gpu.empty(shape[:2], "float32")
    merge = partial(
        merge_attention_states, bits.view(dtype), lses, out=out_bits.view(dtype), lse=lse
    )
    merge()
    error = _check(gpu, case, bits, lses, out_bits, lse)
    timing = timer(gpu, merge)
    gbps = case.nbytes / (timing.us * 1e3)
    return {
        "us": timing.us,
        "us_low": timing.low,
        "us_high": timing.high,
        "gbps": gbps,
        "efficiency": gbps / ceilings.copy_gbps,
        "row_error": error,
    }


def _check(gpu: Gpu, case: MergeCase, bits: Any, lses: Any, out_bits: Any, lse: Any) -> float:
    """Compare some tokens with float64; returns the worst relative error of a row."""
    dtype = DTYPES.get(case.dtype, np.float32)
    worst = 0.0
    for token in (0, case.tokens // 2, case.tokens - 1):
        some = slice(token, token + 1)
        partials = gpu.download(bits[:, some]).view(dtype)
        exact = reference.merge_attention_states(
            partials.astype(np.float64), gpu.download(lses[:, some])
        )
        got = gpu.download(out_bits[some]).view(dtype).astype(np.float64)
        rows = np.linalg.norm(got - exact.out, axis=-1) / np.linalg.norm(exact.out, axis=-1)
        worst = max(worst, float(np.nan_to_num(rows, nan=np.inf).max()))
        if worst > _TOLERANCE[case.dtype]:
            raise CheckError(f"merge {case}: a row of token {token} is off by {worst:.2e}")
        if not np.allclose(gpu.download(lse[some]), exact.lse, rtol=1e-6, atol=2e-6):
            raise CheckError(f"merge {case}: the logarithms of token {token} are off")
    return worst
