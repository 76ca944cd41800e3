# SPDX-License-Identifier: Apache-2.0
"""Sections of writing into caches, with rotations: latent rows, and keys and values."""

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
from cumla.bench.section import CheckError, Column, Row, Section, columns
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = ["SECTIONS", "AppendCase", "AppendHeadsCase"]

_ROW_BYTES = 2 * HEAD_DIM
_ROPE_DIM = HEAD_DIM - VALUE_DIM
_MAX_POSITION = 8192
_CHECKED_ROWS, _CHECKED_TOKENS = 510, 20  # beside the first and the last


def _rotation(rng: np.random.Generator, tokens: int, columns: int) -> dict[str, Any]:
    """Draw a table, and give each token a position."""
    angles = 6.28 * rng.random((_MAX_POSITION, columns // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return {"positions": np.arange(tokens) % _MAX_POSITION, "cos_sin": table}


# --- latent rows ----------------------------------------------------------------------------------


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
        self.rotation = _rotation(rng, tokens, _ROPE_DIM) if case.rotated else {}
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


_ROWS = Section(
    name="append",
    title="append: ",
    cases=tuple(
        AppendCase(mbytes, page_size, rotated)
        for mbytes in (64, 1000)
        for page_size, rotated in ((64, False), (1, False), (64, True))
    ),
    measure=partial(measure_moves, _Step),
    shape=(*columns("tokens"), Column("page", "page_size"), *columns("rotated", "dtype")),
    figures=FIGURES,
)

# --- keys and values ------------------------------------------------------------------------------


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
        return {"op": "append_kv"} | asdict(self) | {"dtype": "bfloat16", "nbytes": self.nbytes}


class _HeadsStep:
    """Arrays of a case on the device; another seed gives other rows, and other places for them."""

    def __init__(self, gpu: Gpu, case: AppendHeadsCase, seed: int) -> None:
        self.gpu, self.case = gpu, case
        rng = np.random.default_rng(seed)
        pages = rng.permutation(-(-case.tokens // case.page))
        places = (pages[:, None] * case.page + np.arange(case.page)).ravel()[: case.tokens]
        self.given = _rotation(rng, case.tokens, case.columns)
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


_HEADS = Section(
    name="append_heads",
    title="append keys and values: ",
    cases=tuple(AppendHeadsCase(8192, 32, 8, 128, page) for page in (64, 16)),
    measure=partial(measure_moves, _HeadsStep),
    shape=(*columns("tokens", "heads", "kv_heads"), Column("d", "columns"), *columns("page")),
    figures=FIGURES,
)

SECTIONS = (_ROWS, _HEADS)
