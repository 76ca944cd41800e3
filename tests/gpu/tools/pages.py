# SPDX-License-Identifier: Apache-2.0
"""The same problem in pages of any size, in one array or two: for NumPy or CuPy.

The module `problem` lays a case out in pages of 64. Here its tokens move into other pages, with the
same poison around them: the reference stays what it was, and so must every bit of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import (
    GARBAGE,
    HEAD_DIM,
    INF_BITS,
    NAN_BITS,
    PAGE_SIZE,
    VALUE_DIM,
    Problem,
    typed,
)

PAGE_SIZES = (1, 2, 16, 32, 48, 64, 128, 256)
FORMS = ("one", "pair", "slices", "padded")
"""One array; two; two slices of a wider one, RoPE first; one whose rows are padded."""
HEADS = (16, 48, 64, 128)
Q_LENS = (1, 3, 7, 17)
KV_LENS = (0, 17, 33, 96, 114, 514, 1024, 8736)  # the last one ragged

Array = Any


class PagedCase(NamedTuple):
    """A case, and how its tokens and queries lie."""

    case: Case
    page_size: int
    cache_form: str
    query_form: str

    @property
    def name(self) -> str:
        """For a test's identity."""
        case = self.case
        return (
            f"page{self.page_size}-{self.cache_form}-kv{case.kv_len}-h{case.heads}-"
            f"kvh{case.kv_heads}-q{case.q_len}-{self.query_form}"
            f"{'-causal' if case.causal else ''}"
        )


def sample() -> list[PagedCase]:
    """Every page size with every length, and all pairs of the other factors."""
    cases = []
    for (i, page_size), (j, kv_len) in itertools.product(enumerate(PAGE_SIZES), enumerate(KV_LENS)):
        case = Case(
            batch=3,
            heads=HEADS[(i + j + j // 4) % 4],
            kv_heads=(1, 2)[(i + i // 2 + j // 2 + i // 4 * j) % 2],
            q_len=Q_LENS[(i + 3 * j + i // 4 + j // 4) % 4],
            kv_len=kv_len,
            ragged=kv_len == KV_LENS[-1],
            causal=(i // 2 + j + j // 2) % 2 == 0,
            seed=8 * i + j,
        )
        form = FORMS[(i + 2 * j + i // 4 + j // 2) % 4]
        cases.append(PagedCase(case, page_size, form, FORMS[(j + i // 2 + j // 4) % 4]))
    return cases


class Columns(NamedTuple):
    """Latent and RoPE columns, as views of bits; and the argument that holds both."""

    latent: Array
    rope: Array
    argument: Any


def lay_out(xp: Any, lead: tuple[int, ...], form: str, dtype: str) -> Columns:
    """NaN memory for 576 columns in one of FORMS."""

    def poison(columns: int) -> Array:
        return xp.full((*lead, columns), NAN_BITS[dtype], dtype=xp.uint16)

    rope_dim = HEAD_DIM - VALUE_DIM
    if form == "pair":
        latent, rope = poison(VALUE_DIM), poison(rope_dim + 8)[..., :rope_dim]
    elif form == "slices":
        wide = poison(HEAD_DIM + 64)
        rope, latent = wide[..., 8 : 8 + rope_dim], wide[..., 80 : 80 + VALUE_DIM]
    else:
        whole = poison(HEAD_DIM + (16 if form == "padded" else 0))[..., :HEAD_DIM]
        latent, rope = whole[..., :VALUE_DIM], whole[..., VALUE_DIM:]
        return Columns(latent, rope, typed(whole, dtype))
    return Columns(latent, rope, (typed(latent, dtype), typed(rope, dtype)))


def moved(problem: Problem, page_size: int, form: str = "pair") -> Problem:
    """The problem in other pages, query and cache in one of FORMS: it has the same results."""
    kv_cache, table = cache_in(problem, page_size, form)
    return dataclasses.replace(
        problem,
        q=query_in(problem, form),
        kv_cache=kv_cache,
        block_table=problem.xp.asarray(table),
    )


def query_in(problem: Problem, form: str) -> Any:
    """The query in one of FORMS."""
    columns = lay_out(problem.xp, problem.q_bits.shape[:3], form, problem.case.dtype)
    columns.latent[...] = problem.q_bits[..., :VALUE_DIM]
    columns.rope[...] = problem.q_bits[..., VALUE_DIM:]
    return columns.argument


def cache_in(
    problem: Problem, page_size: int, form: str, shared_tokens: int = 0
) -> tuple[Any, np.ndarray]:
    """The cache in other pages, and its block table, on the host.

    Poison is as in the problem: NaN and infinity in slots and pages that nobody uses, garbage in
    entries that nobody uses. The first `shared_tokens`, whole pages, lie in those of request 0 for
    every request.
    """
    xp, lengths = problem.xp, problem.lengths
    rng = np.random.default_rng(page_size)
    counts = -(-lengths // page_size)
    shared = shared_tokens // page_size
    num_pages = int(counts.sum()) + 3
    pages = rng.permutation(num_pages).astype(np.int32)
    table = np.resize(np.array(GARBAGE, np.int32), (len(lengths), int(counts.max()) + 2))
    table = np.ascontiguousarray(table)
    start = 0
    for row, count in zip(table, counts.tolist(), strict=True):
        row[:count] = pages[start : start + count]
        start += count
    table[:, :shared] = table[0, :shared]

    lead = (num_pages, page_size, problem.case.kv_heads)
    columns = lay_out(xp, lead, form, problem.case.dtype)
    requests = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.arange(len(requests)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    old = problem.table[requests, tokens // PAGE_SIZE], tokens % PAGE_SIZE
    new = table[requests, tokens // page_size], tokens % page_size
    old, new = (tuple(xp.asarray(i.astype(np.int64)) for i in index) for index in (old, new))
    for part, begin, end in (
        (columns.latent, 0, VALUE_DIM),
        (columns.rope, VALUE_DIM, HEAD_DIM),
    ):
        part[:, 1::2] = INF_BITS[problem.case.dtype]
        part[new] = problem.kv_bits[old][..., begin:end]
    return columns.argument, table
