# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results: each case is checked against float64, then timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from cumla import merge_attention_states, reference
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.operations import time_copy, time_in_graph
from cumla.bench.timing import GpuTimer, Timing, time_cold

__all__ = ["MERGE", "MergeCase", "measure_merge"]

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

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""
        return asdict(self)


def _case_of(nbytes: int, count: int, dtype: str) -> MergeCase:
    """Choose so many tokens that about `nbytes` are read and written."""
    return MergeCase(count, round(nbytes / MergeCase(count, 1, dtype).nbytes), dtype)


MERGE = tuple(
    _case_of(nbytes, count, dtype)
    for nbytes in (64 << 20, 1 << 30)
    for count, dtype in ((2, "bfloat16"), (8, "bfloat16"), (2, "float32"))
)
"""The cases of the benchmark: 64 MiB and 1 GiB."""


def measure_merge(
    gpu: Gpu, case: MergeCase, timer: GpuTimer = time_cold
) -> tuple[Timing, dict[str, float | None]]:
    """Check a case, then time it.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : MergeCase
        What to run.
    timer : GpuTimer
        How to time a single call.

    Returns
    -------
    tuple
        The time of a call; ``row_error``: the worst relative error of a row; ``copy_us``: how
        long a plain copy of as many bytes takes; and what `time_in_graph` finds.

    Raises
    ------
    CheckError
        A result is wrong.
    """
    one = MergeStep(gpu, case)
    one.run()
    error = one.check()
    timing, copy = timer(gpu, one.run), time_copy(gpu, case.nbytes, timer)
    graph = time_in_graph(gpu, case.nbytes, partial(MergeStep, gpu, case))
    return timing, {"row_error": error, "copy_us": copy.us} | graph


class MergeStep:
    """Arrays of a case on the device; those of the result are poisoned until they are written.

    Attributes
    ----------
    partials, lses : array
        What is merged, of another seed other numbers; the former as uint16.
    out, lse : array
        The result, likewise.
    """

    def __init__(self, gpu: Gpu, case: MergeCase, seed: int = 0) -> None:
        self.gpu, self.case = gpu, case
        self._dtype = DTYPES.get(case.dtype, np.float32)
        words = case.itemsize // 2
        shape = (case.tokens, _HEADS, _HEAD_DIM * words)
        self.partials = gpu.empty((case.count, *shape), "uint16")
        self.out, self.lse = gpu.empty(shape, "uint16"), gpu.empty(shape[:2], "float32")
        # As float32, two bfloat16 numbers are the second of them with some lower bits.
        kind = "float16" if case.dtype == "float16" else "bfloat16"
        fill_normal(gpu, self.partials, kind, seed=5 + seed, deviation=1.0)
        for array in (self.out, self.lse):
            gpu.fill_bytes(array, 0xFF)
        shape_of_lses = (case.count, case.tokens, _HEADS)
        logarithms = np.random.default_rng(5 + seed).standard_normal(shape_of_lses)
        self.lses = gpu.upload(logarithms.astype(np.float32))
        self._inputs = (self.partials.view(self._dtype), self.lses)
        self._outputs = {"out": self.out.view(self._dtype), "lse": self.lse}

    def run(self) -> object:
        """Merge."""
        return merge_attention_states(*self._inputs, **self._outputs)

    def check(self) -> float:
        """Hold some tokens against float64; the worst relative error of a row."""
        gpu, case, dtype = self.gpu, self.case, self._dtype
        worst = 0.0
        for token in (0, case.tokens // 2, case.tokens - 1):
            some = slice(token, token + 1)
            partials = gpu.download(self.partials[:, some]).view(dtype)
            exact = reference.merge_attention_states(
                partials.astype(np.float64), gpu.download(self.lses[:, some])
            )
            got = gpu.download(self.out[some]).view(dtype).astype(np.float64)
            rows = np.linalg.norm(got - exact.out, axis=-1) / np.linalg.norm(exact.out, axis=-1)
            worst = max(worst, float(np.nan_to_num(rows, nan=np.inf).max()))
            if worst > _TOLERANCE[case.dtype]:
                raise CheckError(f"merge {case}: a row of token {token} is off by {worst:.2e}")
            if not np.allclose(gpu.download(self.lse[some]), exact.lse, rtol=1e-6, atol=2e-6):
                raise CheckError(f"merge {case}: the logarithms of token {token} are off")
        return worst
