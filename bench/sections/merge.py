# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results: a section of operations that move bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from bench.sections import calls
from bench.sections.moves import FIGURES, measure_moves
from cumla import reference
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.section import CheckError, Column, Row, Section, columns

__all__ = ["SECTION", "MergeCase"]

_HEADS, _HEAD_DIM = 128, 512
_TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}  # |error| / |row|


@dataclass(frozen=True, slots=True)
class MergeCase:
    """Partial results ``(tokens, 128, 512)``, stacked, with logarithms ``(tokens, 128)``."""

    count: int  # number of partial results
    tokens: int  # tokens of each
    dtype: str = "bfloat16"  # theirs and the result's

    @property
    def name(self) -> str:
        """For example ``merge-2x170-bfloat16``."""
        return f"merge-{self.count}x{self.tokens}-{self.dtype}"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return (self.count + 1) * self.tokens * _HEADS * (_HEAD_DIM * self.itemsize + 4)

    def to_json(self) -> Row:
        return asdict(self) | {"nbytes": self.nbytes}


class _Step:
    """Arrays of a case on the device; another seed gives other numbers."""

    def __init__(self, gpu: Gpu, case: MergeCase, seed: int) -> None:
        self.gpu, self.case = gpu, case
        self._dtype = DTYPES.get(case.dtype, np.float32)
        shape = (case.tokens, _HEADS, _HEAD_DIM * case.itemsize // 2)
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
        partials, out = self.partials.view(self._dtype), self.out.view(self._dtype)
        self.run = calls.merge(partials, self.lses, out, self.lse)

    def check(self) -> float:
        """Compare some tokens with float64; return the worst relative error of a row."""
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
                raise CheckError(f"{case.name}: a row of token {token} is off by {worst:.2e}")
            if not np.allclose(gpu.download(self.lse[some]), exact.lse, rtol=1e-6, atol=2e-6):
                raise CheckError(f"{case.name}: the logarithms of token {token} are off")
        return worst


def _case_of(nbytes: int, count: int, dtype: str) -> MergeCase:
    """Choose the tokens so that about `nbytes` are read and written."""
    return MergeCase(count, round(nbytes / MergeCase(count, 1, dtype).nbytes), dtype)


SECTION = Section(
    name="merge",
    title="merge: ",
    cases=tuple(
        _case_of(nbytes, count, dtype)
        for nbytes in (64 << 20, 1 << 30)
        for count, dtype in ((2, "bfloat16"), (8, "bfloat16"), (2, "float32"))
    ),
    measure=partial(measure_moves, _Step),
    shape=(Column("partial results", "count"), *columns("tokens", "dtype")),
    figures=FIGURES,
)
