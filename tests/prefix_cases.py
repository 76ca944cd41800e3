# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests share prefixes, and what detection has to find, by plain loops."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla import reference

LEAST, MOST = -(2**31), 2**31 - 1


class Group(NamedTuple):
    """Neighbouring requests with a common prefix."""

    members: int
    prefix: int  # tokens, whole pages
    own: tuple[int, ...] = (5, 40)  # tokens behind the prefix, of one request after the other


class Batch(NamedTuple):
    """Lengths and pages of requests."""

    block_table: np.ndarray
    kv_lens: np.ndarray
    qo_indptr: np.ndarray
    page_size: int
    num_pages: int


def batch_of(
    groups: list[Group], page_size: int, q_lens: tuple[int, ...] = (1,), *, seed: int = 0
) -> Batch:
    """Give each group pages of its own; behind a request's pages the table holds anything."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    lens: list[int] = []
    used = 0
    for group in groups:
        shared = list(range(used, used + group.prefix // page_size))
        used += len(shared)
        for member in range(group.members):
            own = group.own[member % len(group.own)]
            rows.append([*shared, *range(used, used + -(-own // page_size))])
            used += -(-own // page_size)
            lens.append(len(shared) * page_size + own)
    numbers = rng.permutation(used + 1).astype(np.int32)
    table = rng.integers(LEAST, MOST, (len(rows), max(map(len, rows), default=0) + 1))
    table = table.astype(np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = numbers[pages]
    counts = [min(q_lens[i % len(q_lens)], n) for i, n in enumerate(lens)]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    return Batch(table, np.array(lens, np.int32), offsets, page_size, used + 1)


def detection_cases() -> dict[str, tuple[Batch, int]]:
    """Batches, and the least tokens that are worth sharing."""
    found: dict[str, tuple[Batch, int]] = {
        "none": (batch_of([Group(1, 64, (70,))] * 9, 16), 16),
        "all": (batch_of([Group(40, 320)], 16), 16),
        "one request": (batch_of([Group(1, 320)], 16), 16),
        "runs of 1 to 64": (batch_of([Group(n, 16 * (1 + n % 7)) for n in range(1, 65)], 16), 16),
        "more than a window": (batch_of([Group(1000, 32), Group(700, 48)], 16), 16),
        "pages of one token": (batch_of([Group(5, 333), Group(2, 7), Group(3, 90)], 1), 50),
        "large pages": (batch_of([Group(3, 512), Group(2, 256)], 256, (1, 3)), 1),
        "drafts": (batch_of([Group(4, 128, (3, 9)), Group(3, 64)], 16, (0, 8, 3, 1)), 16),
        "short ones": (batch_of([Group(6, 128), Group(6, 112)], 16), 128),
    }
    fork = batch_of([Group(5, 96, (40,))], 16)
    fork.kv_lens[:] = 96 + 7  # the fork is inside the last page that has keys
    found["fork inside a page"] = fork, 16
    again = batch_of([Group(6, 128)], 16)
    again.block_table[2:4, 1] = again.block_table[5, 7]  # other second pages, and equal ones later
    found["equal first page"] = again, 16
    short = batch_of([Group(6, 128)], 16, (1, 2))
    short.kv_lens[2], short.kv_lens[4] = 40, 0
    found["lengths within the prefix"] = short, 16
    nested = batch_of([Group(8, 128)] * 8, 16)
    nested.block_table[:, :2] = nested.block_table[0, :2]
    found["system prompt"] = nested, 16
    deep = batch_of([Group(2, 128)] * 3, 16)
    deep.block_table[:, :7] = deep.block_table[0, :7]
    found["long system prompt"] = deep, 16
    hostile = batch_of([Group(7, 128), Group(9, 64)], 16, (2,))
    hostile.block_table[:5] = -1
    hostile.kv_lens[:] = [MOST, LEAST, -1, 5000, 100, 0, 70, *[MOST] * 9]
    hostile.qo_indptr[3:6] = [MOST, LEAST, 3]
    found["hostile"] = hostile, 16
    return found


class Problem(NamedTuple):
    """A call of attention, and its batch."""

    given: dict[str, Any]
    batch: Batch
    tokens: int  # of requests; later rows of q are of none


def problem_of(
    batch: Batch,
    heads: tuple[int, int],
    columns: tuple[int, int],
    dtype: Any,
    *,
    cache: Any = None,
    padding: int = 0,
    seed: int = 0,
) -> Problem:
    """Fill arrays; pages that no request has, and rows behind a request's end, hold NaN."""
    rng = np.random.default_rng(seed)
    tokens = int(batch.qo_indptr[-1])
    shape = batch.num_pages, batch.page_size, heads[1]
    caches = [rng.standard_normal((*shape, n)).clip(-3, 3).astype(cache or dtype) for n in columns]
    seen = np.zeros(shape[:2], bool)
    for row, length in zip(batch.block_table, batch.kv_lens, strict=True):
        for token in range(0, length, batch.page_size):
            page = row[token // batch.page_size]
            seen[page, : max(length - token, 0)] = True
    for one in caches:
        one[~seen] = np.nan
    q = rng.standard_normal((tokens + padding, heads[0], columns[0])).astype(dtype)
    q[tokens:] = np.nan
    given = {"q": q, "k": caches[0], "v": caches[1], "block_table": batch.block_table}
    given |= {"kv_lens": batch.kv_lens, "qo_indptr": batch.qo_indptr}
    return Problem(given, batch, tokens)


def reference_of(problem: Problem, **options: Any) -> tuple[Any, np.ndarray]:
    """Attend without groups in float64; also with the sizes of values in place of these."""
    given = dict(problem.given)
    for name in ("q", "k", "v"):
        given[name] = given[name].astype(np.float64)
    shape = (*given["q"].shape[:-1], given["v"].shape[-1])
    places = {"out": np.zeros(shape), "lse": np.zeros(shape[:-1], np.float32)}
    state = reference.attention(**given, **places, **options)
    given["v"] = np.abs(given["v"])
    places = {"out": np.zeros(shape), "lse": np.zeros(shape[:-1], np.float32)}
    return state, reference.attention(**given, **places, **options).out


def check(problem: Problem, got: Any, rounding: float, **options: Any) -> None:
    """Compare the rows of requests with the reference."""
    expected, sizes = reference_of(problem, **options)
    rows = slice(0, problem.tokens)
    out = np.asarray(got.out).reshape(expected.out.shape)[rows].astype(np.float64)
    errors = np.linalg.norm(out - expected.out[rows], axis=-1)
    tolerance = 3 * rounding * np.linalg.norm(sizes[rows], axis=-1) + 1e-6
    assert (errors <= tolerance).all(), (errors / tolerance).max()
    lse = np.asarray(got.lse).reshape(expected.lse.shape)[rows]
    np.testing.assert_allclose(lse, expected.lse[rows], rtol=1.2e-5, atol=1.2e-5)


class Sample(NamedTuple):
    """One point of the grid of attention with shared prefixes."""

    groups: tuple[Group, ...]
    page_size: int
    q_lens: tuple[int, ...]
    heads: tuple[int, int]
    columns: tuple[int, int]
    dtype: str
    cache: str
    sinks: bool
    softcap: float | None
    causal: bool
    padding: int
    seed: int


FACTORS: dict[str, tuple[Any, ...]] = {
    "groups": (
        (Group(3, 256), Group(1, 64), Group(4, 512, (1, 70))),
        (Group(9, 1280, (3, 130)),),
        (Group(1, 256, (90,)), Group(1, 768)),
        (Group(2, 256), Group(40, 256, (5,)), Group(1, 256)),
    ),
    "page_size": (1, 16, 64, 128),
    "q_lens": ((1,), (1,), (3,), (0, 5, 1, 2), (1, 40)),
    "heads": ((4, 1), (8, 2), (3, 3), (16, 1)),
    "columns": ((64, 64), (128, 128), (96, 40), (192, 128), (256, 256), (512, 512)),
    "dtype": ("bfloat16", "float16", "float16", "float32"),
    "cache": ("same", "same", "e4m3"),
    "sinks": (False, True),
    "softcap": (None, None, 5.0),
    "causal": (True, True, False),
    "padding": (0, 3),
}


def samples(count: int) -> list[Sample]:
    """List the same points every time."""
    rng = random.Random(20261130)
    return [
        Sample(**{name: rng.choice(values) for name, values in FACTORS.items()}, seed=seed)
        for seed in range(count)
    ]


def make(sample: Sample) -> tuple[Problem, dict[str, Any]]:
    """Make the call of a sample, and its options."""
    s = sample
    batch = batch_of(list(s.groups), s.page_size, s.q_lens, seed=s.seed)
    kind = np.dtype(getattr(ml_dtypes, s.dtype, s.dtype))
    fits = s.cache == "e4m3" and s.dtype != "float32" and max(s.columns) <= 256
    columns = (96, 48) if fits and s.columns == (96, 40) else s.columns
    cache = np.dtype(ml_dtypes.float8_e4m3fn) if fits else None
    more: dict[str, Any] = {"cache": cache, "padding": s.padding, "seed": s.seed}
    problem = problem_of(batch, s.heads, columns, kind, **more)
    options: dict[str, Any] = {"causal": s.causal, "softcap": s.softcap}
    if s.sinks:
        rng = np.random.default_rng(s.seed)
        options["sinks"] = rng.normal(2, 3, s.heads[0]).astype(np.float32)
    return problem, options
