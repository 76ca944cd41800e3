# SPDX-License-Identifier: Apache-2.0
"""The largest scores of rows: a section of an operation that reads its scores once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.sections import calls
from cumla import reference
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import Gpu
from cumla.bench.section import Bench, CheckError, Column, Row, Section, columns

__all__ = ["SECTION", "TopKCase"]


@dataclass(frozen=True, slots=True)
class TopKCase:
    """Scores ``(rows, width)``, float32: normal numbers, or all of them in one bin of a pass."""

    rows: int
    width: int
    k: int = 2048
    ragged: bool = False  # lengths from 1 to the width; else that
    scores: str = "normal"  # or "narrow"

    @property
    def name(self) -> str:
        """For example ``top-k-128x32768-k2048``."""
        more = "-ragged" * self.ragged + f"-{self.scores}" * (self.scores != "normal")
        return f"top-k-{self.rows}x{self.width}-k{self.k}{more}"

    @property
    def lengths(self) -> Any:
        """Scores of each row."""
        if self.ragged:
            return np.random.default_rng(self.rows).integers(1, self.width + 1, self.rows, np.int32)
        return np.full(self.rows, self.width, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the scores that are read, once, and of the indices."""
        lengths = self.lengths.astype(np.int64)
        return int(lengths[lengths > self.k].sum() + self.rows * self.k) * 4

    def to_json(self) -> Row:
        return {"op": "top_k"} | asdict(self) | {"nbytes": self.nbytes}


class _Step:
    """Arrays of a case on the device."""

    def __init__(self, gpu: Gpu, case: TopKCase) -> None:
        self.gpu, self.case = gpu, case
        words = gpu.empty((case.rows, 2 * case.width), "uint16")
        # As float32, two bfloat16 numbers are the second of them with some lower bits.
        fill_normal(gpu, words, "bfloat16", seed=7, deviation=1.0)
        if case.scores == "narrow":  # 1 and something: 2,048 steps of the second number
            words[:, 1::2] = 0x3F80
        self.scores = words.view(np.float32)
        self.out = gpu.empty((case.rows, case.k), "int32")
        self.counts = gpu.empty((case.rows,), "int32")
        for output in (self.out, self.counts):
            gpu.fill_bytes(output, 0xEE)
        lengths = gpu.upload(case.lengths)
        self.run = calls.top_k(self.scores, case.k, lengths, self.out, self.counts)

    def check(self) -> None:
        """Compare some rows with the reference."""
        gpu, case = self.gpu, self.case
        for row in sorted({0, case.rows // 2, case.rows - 1}):
            some = slice(row, row + 1)
            want = reference.top_k(
                gpu.download(self.scores[some]), case.k, lengths=case.lengths[some]
            )
            got = gpu.download(self.out[some]), gpu.download(self.counts[some])
            if not all(map(np.array_equal, got, (want.indices, want.valid_counts))):
                raise CheckError(f"{case.name}: the indices of row {row} are wrong")


def _measure(bench: Bench, case: TopKCase) -> Row:
    step = _Step(bench.gpu, case)
    step.run()
    step.check()
    row: Row = bench.time(step.run).figures()
    gbps = case.nbytes / (row["us"] * 1e3)
    return row | {"gbps": gbps, "efficiency": gbps / bench.ceilings.read_gbps}


SECTION = Section(
    name="sparse",
    title="top-k: ",
    ops=("top_k",),
    cases=(
        *(TopKCase(rows, width) for rows in (1, 8, 64, 128) for width in (8192, 32768, 131072)),
        TopKCase(64, 131072, 512),
        TopKCase(64, 131072, scores="narrow"),
        *(TopKCase(rows, 1 << 20) for rows in (1, 8)),
        TopKCase(4096, 32768, ragged=True),
    ),
    measure=_measure,
    shape=(
        *columns("rows", "width", "k"),
        Column("lengths", lambda row: "ragged" if row["ragged"] else "whole", usual="whole"),
        Column("scores", "scores", usual="normal"),
    ),
    figures=(
        Column("MB", lambda row: row["nbytes"] / 1e6, ".1f"),
        Column("us", "us", "us"),
        Column("GB/s", "gbps", ".0f"),
        Column("share of the read ceiling", "efficiency", ".2f"),
    ),
)
