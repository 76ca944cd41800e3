# SPDX-License-Identifier: Apache-2.0
"""Writing rows into a paged MLA cache: a section of operations that move bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.sections import calls
from bench.sections.moves import FIGURES, measure_moves
from cumla import reference
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.section import Bench, CheckError, Column, Row, Section, columns
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = ["SECTION", "AppendCase"]

_ROW_BYTES = 2 * HEAD_DIM
_ROPE_DIM = HEAD_DIM - VALUE_DIM
_MAX_POSITION = 8192
_CHECKED_ROWS = 510  # beside the first and the last


@dataclass(frozen=True)
class AppendCase:
    """Rows of bfloat16 that are written."""

    mbytes: int  # size of the rows, in 10^6 bytes; as much is read as is written
    page_size: int  # tokens of a page; the pages are shuffled
    rotated: bool = False  # with the rotation of the RoPE columns, by a float32 table

    @property
    def name(self) -> str:
        """For example ``append-64MB-page64-rotated``."""
        rotated = "-rotated" if self.rotated else ""
        return f"append-{self.mbytes}MB-page{self.page_size}{rotated}"

    @property
    def tokens(self) -> int:
        """Rows, whole pages of them."""
        return self.mbytes * 10**6 // (_ROW_BYTES * self.page_size) * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return 2 * self.tokens * _ROW_BYTES

    def to_json(self) -> Row:
        """Name the case as a row of the results file does."""
        return asdict(self) | {"tokens": self.tokens, "dtype": "bfloat16", "nbytes": self.nbytes}


class _Step:
    """Arrays of a case on the device; another seed gives other rows, and other places for them."""

    def __init__(self, gpu: Gpu, case: AppendCase, seed: int) -> None:
        self.gpu, self.case = gpu, case
        rng = np.random.default_rng(seed)
        tokens = case.tokens
        pages = rng.permutation(tokens // case.page_size)
        self.slots = (pages[:, None] * case.page_size + np.arange(case.page_size)).ravel()
        self.rows, self.cache = (gpu.empty((tokens, HEAD_DIM), "uint16") for _ in range(2))
        fill_normal(gpu, self.rows, "bfloat16", seed=1 + seed, deviation=1.0)
        gpu.fill_bytes(self.cache, 0xFF)
        self.rotation: dict[str, Any] = {}
        if case.rotated:
            angles = 6.28 * rng.random((_MAX_POSITION, _ROPE_DIM // 2))
            table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
            self.rotation = {"positions": np.arange(tokens) % _MAX_POSITION, "cos_sin": table}
        self._chosen = np.unique([0, tokens - 1, *rng.integers(0, tokens, _CHECKED_ROWS)])
        rows, cache = (bits.view(DTYPES["bfloat16"]) for bits in (self.rows, self.cache))
        given = {name: gpu.upload(array) for name, array in self.rotation.items()}
        pages_of_cache = cache.reshape(-1, case.page_size, HEAD_DIM)
        self.run = calls.append(rows, pages_of_cache, gpu.upload(self.slots), **given)

    def check(self) -> None:
        """Compare some rows with what the reference makes of them."""
        gpu, case, chosen, rotation = self.gpu, self.case, self._chosen, self.rotation
        rows = gpu.download(self.rows[gpu.upload(chosen)]).view(DTYPES["bfloat16"])
        got = gpu.download(self.cache[gpu.upload(self.slots[chosen])]).view(DTYPES["bfloat16"])
        expected = np.empty_like(rows)
        if rotation:
            rotation = rotation | {"positions": rotation["positions"][chosen]}
        reference.append_mla_cache(rows, expected[:, None], np.arange(len(chosen)), **rotation)
        got, expected = got.astype(np.float32), expected.astype(np.float32)
        # Rotations in float32 may round to the neighbour of what float64 rounds to.
        allowed = np.zeros_like(expected)
        if case.rotated:
            allowed[:, VALUE_DIM:] = 2.0**-7 * np.abs(expected[:, VALUE_DIM:]) + 1e-5
        wrong = ~(np.abs(got - expected) <= allowed).all(axis=1)
        if wrong.any():
            row = chosen[wrong][0]
            raise CheckError(f"{case.name}: row {row} was not written as it should be")


def _measure(bench: Bench, case: AppendCase) -> Row:
    return measure_moves(bench, case.nbytes, partial(_Step, bench.gpu, case))


SECTION = Section(
    name="append",
    title="append: ",
    cases=tuple(
        AppendCase(mbytes, page_size, rotated)
        for mbytes in (64, 1000)
        for page_size, rotated in ((64, False), (1, False), (64, True))
    ),
    measure=_measure,
    shape=(*columns("tokens"), Column("page", "page_size"), *columns("rotated", "dtype")),
    figures=FIGURES,
)
