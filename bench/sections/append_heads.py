# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values of many heads, with the rotation of keys and queries: a section."""

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

__all__ = ["SECTION", "AppendHeadsCase"]

_MAX_POSITION = 8192
_CHECKED_TOKENS = 20  # beside the first and the last


@dataclass(frozen=True)
class AppendHeadsCase:
    """New tokens of bfloat16, to slots of shuffled pages; queries are rotated, too."""

    tokens: int
    heads: int
    kv_heads: int
    columns: int
    page: int

    @property
    def name(self) -> str:
        """For example ``append-8192x32/8-d128-page64``."""
        return f"append-{self.tokens}x{self.heads}/{self.kv_heads}-d{self.columns}-page{self.page}"

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written, of queries, keys and values."""
        return 2 * 2 * self.tokens * (self.heads + 2 * self.kv_heads) * self.columns

    def to_json(self) -> Row:
        """Name the case as a row of the results file does."""
        return {"op": "append_kv"} | asdict(self) | {"dtype": "bfloat16", "nbytes": self.nbytes}


class _Step:
    """Arrays of a case on the device; another seed gives other rows, and other places for them."""

    def __init__(self, gpu: Gpu, case: AppendHeadsCase, seed: int) -> None:
        self.gpu, self.case = gpu, case
        rng = np.random.default_rng(seed)
        pages = rng.permutation(-(-case.tokens // case.page))
        places = (pages[:, None] * case.page + np.arange(case.page)).ravel()[: case.tokens]
        angles = 6.28 * rng.random((_MAX_POSITION, case.columns // 2))
        self.given: dict[str, Any] = {
            "positions": np.arange(case.tokens) % _MAX_POSITION,
            "cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
        }
        self.chosen = np.unique(
            [0, case.tokens - 1, *rng.integers(0, case.tokens, _CHECKED_TOKENS)]
        )
        heads = (case.heads, case.kv_heads, case.kv_heads)
        self.rows = [gpu.empty((case.tokens, count, case.columns), "uint16") for count in heads]
        for offset, rows in enumerate(self.rows):
            fill_normal(gpu, rows, "bfloat16", seed=1 + 3 * seed + offset, deviation=1.0)
        shape = (len(pages), case.page, case.kv_heads, case.columns)
        self.caches = [gpu.empty(shape, "uint16") for _ in range(2)]
        self.q_out = gpu.empty(self.rows[0].shape, "uint16")
        for written in (*self.caches, self.q_out):
            gpu.fill_bytes(written, 0xFF)
        self.slots = places.astype(np.int64)
        q, k, v, k_cache, v_cache, q_out = (
            bits.view(DTYPES["bfloat16"]) for bits in (*self.rows, *self.caches, self.q_out)
        )
        there = {name: gpu.upload(array) for name, array in self.given.items()}
        slots = gpu.upload(self.slots)
        self.run = calls.append_heads(k, v, k_cache, v_cache, slots, q=q, q_out=q_out, **there)

    def check(self) -> None:
        """Compare some tokens with what the reference makes of them."""
        gpu, case = self.gpu, self.case
        there, slots = gpu.upload(self.chosen), gpu.upload(self.slots[self.chosen])
        flat = [cache.reshape(-1, case.kv_heads, case.columns) for cache in self.caches]
        got = [gpu.download(self.q_out[there]), *(gpu.download(cache[slots]) for cache in flat)]
        q, k, v = (gpu.download(rows[there]).view(DTYPES["bfloat16"]) for rows in self.rows)
        keys, values = (np.empty_like(rows[:, None]) for rows in (k, v))
        rotation = self.given | {"positions": self.given["positions"][self.chosen]}
        places = np.arange(len(self.chosen))
        reference.append_kv_cache(k, v, keys, values, places, q=q, **rotation)
        for found, wanted in zip(got, (q, keys[:, 0], values[:, 0]), strict=True):
            numbers = found.view(DTYPES["bfloat16"]).astype(np.float32)
            exact = wanted.astype(np.float32)
            # Rotations in float32 may round to the neighbour of what float64 rounds to.
            wrong = ~(np.abs(numbers - exact) <= 2.0**-7 * np.abs(exact) + 1e-5)  # NaN is wrong
            if wrong.any():
                token = self.chosen[wrong.any(axis=(1, 2))][0]
                raise CheckError(f"{case.name}: token {token} was not written as it should be")


def _measure(bench: Bench, case: AppendHeadsCase) -> Row:
    return measure_moves(bench, case.nbytes, partial(_Step, bench.gpu, case))


SECTION = Section(
    name="append_heads",
    title="append keys and values: ",
    cases=tuple(AppendHeadsCase(8192, 32, 8, 128, page) for page in (64, 16)),
    measure=_measure,
    shape=(*columns("tokens", "heads", "kv_heads"), Column("d", "columns"), *columns("page")),
    figures=FIGURES,
)
