# SPDX-License-Identifier: Apache-2.0
"""Inputs, poisoned memory and guarded outputs of queries of different lengths, for NumPy or CuPy.

As in the module `problem`: slots past a request's length, pages of nobody, padding and the query
rows of no request are NaN or infinity; page numbers that nobody uses are garbage; outputs that the
caller gives are NaN before the call, with guard bands around. The reference is that of
:mod:`tests.gpu.tools.oracle`, a few query tokens at a time.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.tools import oracle
from tests.gpu.tools.pages import FORMS, lay_out
from tests.gpu.tools.problem import GARBAGE, HEAD_DIM, INF_BITS, VALUE_DIM, Guarded, normal_bits

SCORE_BYTES = 1 << 30
"""Most memory that the scores of a few query tokens of one request take in the reference."""

Array = Any


@dataclass(frozen=True)
class Ragged:
    """A batch: its lengths, and how everything lies."""

    q_lens: tuple[int, ...] = (3, 1, 0, 40)
    kv_lens: tuple[int, ...] = (300, 64, 17, 65)
    heads: int = 16
    kv_heads: int = 1
    causal: bool = True
    dtype: str = "bfloat16"
    page_size: int = 64
    paging: str = "table"  # or "list"
    cache_form: str = "one"  # of pages.FORMS
    query_form: str = "one"
    before: int = 0  # query rows that belong to no request
    behind: int = 0
    shared: int = 0  # tokens of request 0, whole pages, that lie in the same pages for all
    scale: float = 0.1  # of the inputs
    seed: int = 0

    @property
    def total_tokens(self) -> int:
        """Rows of q."""
        return self.before + sum(self.q_lens) + self.behind

    @property
    def qo_indptr(self) -> np.ndarray:
        """Return where the rows of each request begin."""
        return (self.before + np.cumsum([0, *self.q_lens])).astype(np.int32)

    @property
    def name(self) -> str:
        """A short test id."""
        q, kv = self.q_lens, self.kv_lens
        return (
            f"b{len(q)}-q{q[0]}-kv{kv[0]}-h{self.heads}x{self.kv_heads}-page{self.page_size}-"
            f"{self.paging}-{self.cache_form}-{self.query_form}-{self.dtype[0]}16"
            f"{'-causal' if self.causal else ''}"
        )


@dataclass
class RaggedProblem:
    """Arrays of one call. ``q_bits`` and ``kv_bits`` are what the reference reads."""

    xp: Any
    case: Ragged
    pages: list[np.ndarray]
    q_bits: Array
    kv_bits: Array
    q: Any
    kv_cache: Any
    qo_indptr: Array
    kv_lens: Array
    paging: dict[str, Array]

    @property
    def arguments(self) -> dict[str, Any]:
        """All that a call takes."""
        return self.inputs | self.lengths | {"causal": self.case.causal}

    @property
    def lengths(self) -> dict[str, Array]:
        """Return what a plan is updated with."""
        taken = {"kv_lens": self.kv_lens, "qo_indptr": self.qo_indptr}
        return taken | {n: a for n, a in self.paging.items() if n == "kv_indptr"}

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what a run of a plan takes."""
        pages = {n: a for n, a in self.paging.items() if n != "kv_indptr"}
        return {"q": self.q, "kv_cache": self.kv_cache, "block_table": None} | pages

    def outputs(self, dtype: str | None = None) -> tuple[Guarded, Guarded]:
        """Poisoned ``out`` and ``lse``."""
        shape = (self.case.total_tokens, self.case.heads)
        out = Guarded(self.xp, (*shape, VALUE_DIM), dtype or self.case.dtype)
        return out, Guarded(self.xp, shape, "float32")

    def expected(
        self, qo_indptr: np.ndarray | None = None, kv_lens: np.ndarray | None = None
    ) -> tuple[Array, Array, np.ndarray]:
        """The float64 results, for other lengths if given, and the rows that have one."""
        xp, case = self.xp, self.case
        indptr = case.qo_indptr if qo_indptr is None else qo_indptr
        lengths = case.kv_lens if kv_lens is None else kv_lens
        out = xp.zeros((case.total_tokens, case.heads, VALUE_DIM), dtype=xp.float64)
        lse = xp.zeros((case.total_tokens, case.heads), dtype=xp.float64)
        written = np.zeros(case.total_tokens, bool)
        for count, pieces in self._pieces(indptr, lengths).items():
            rows = np.array([begin for _, begin, _ in pieces])[:, None] + np.arange(count)
            most = max(1, *(len(self.pages[r]) for r, _, _ in pieces))
            table = np.zeros((len(pieces), most), np.int32)
            for row, (r, _, _) in zip(table, pieces, strict=True):
                row[: len(self.pages[r])] = self.pages[r]
            made = oracle.decode(
                xp,
                self.q_bits[xp.asarray(rows)],
                self.kv_bits,
                table,
                np.array([length for _, _, length in pieces]),
                dtype=case.dtype,
                softmax_scale=HEAD_DIM**-0.5,
                causal=case.causal,
            )
            index = xp.asarray(rows.ravel())
            out[index] = made.out.reshape(-1, case.heads, VALUE_DIM)
            lse[index] = made.lse.reshape(-1, case.heads)
            written[rows.ravel()] = True
        return out, lse, written

    def _pieces(self, indptr: np.ndarray, kv_lens: Any) -> dict[int, list[tuple[int, int, int]]]:
        """Few query tokens each: their number -> request, first row, and length as if the last."""
        pieces: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for r, (begin, end) in enumerate(itertools.pairwise(indptr.tolist())):
            each = max(1, SCORE_BYTES // (8 * self.case.heads * max(int(kv_lens[r]), 1)))
            for first in range(begin, end, each):
                count = min(each, end - first)
                behind = end - first - count if self.case.causal else 0
                pieces[count].append((r, first, max(int(kv_lens[r]) - behind, 0)))
        return pieces

    def check(
        self, out: Array, lse: Array, expected: tuple[Array, Array, np.ndarray] | None = None
    ) -> dict[str, float]:
        """Hold results against the reference; rows of no request must be as they were."""
        xp = self.xp
        want_out, want_lse, written = expected or self.expected()
        assert tuple(out.shape) == want_out.shape
        assert tuple(lse.shape) == want_lse.shape
        dtype = str(out.dtype)
        bits = out.view(xp.uint32 if dtype == "float32" else xp.uint16)
        mine = xp.asarray(np.flatnonzero(written))
        if not mine.size:
            return {}
        figures = oracle.check_out(
            xp,
            oracle.widen(xp, bits[mine], dtype),
            want_out[mine],
            v_rms=self.case.scale,
            outliers=False,
        )
        lse_figures = oracle.check_lse(xp, lse[mine].astype(xp.float64), want_lse[mine])
        return figures | {f"lse_{name}": value for name, value in lse_figures.items()}

    def check_untouched(
        self, out: Guarded, lse: Guarded, written: np.ndarray | None = None
    ) -> None:
        """Guards, and rows of no request, are as before the call."""
        if written is None:
            written = np.zeros(self.case.total_tokens, bool)
            written[self.case.qo_indptr[0] : self.case.qo_indptr[-1]] = True
        others = self.xp.asarray(np.flatnonzero(~written))
        for name, output in (("out", out), ("lse", lse)):
            output.check_guards()
            assert bool((output.bits[others] == output.ones).all()), f"{name}: rows of no request"


def make_ragged(xp: Any, case: Ragged) -> RaggedProblem:
    """Build the arrays of a case on the device of ``xp``, the same ones every time."""
    rng = np.random.default_rng(2000 + case.seed)
    offset = 77777 * (case.seed + 1)
    pages, num_pages = _deal_pages(case, rng)
    query = lay_out(xp, (case.total_tokens, case.heads), case.query_form, case.dtype)
    q_shape = (case.total_tokens, case.heads, HEAD_DIM)
    q_bits = normal_bits(xp, q_shape, case.dtype, case.scale, offset)
    own = slice(case.before, case.total_tokens - case.behind)
    query.latent[own] = q_bits[own, :, :VALUE_DIM]
    query.rope[own] = q_bits[own, :, VALUE_DIM:]

    kv_shape = (num_pages, case.page_size, case.kv_heads, HEAD_DIM)
    kv_bits = normal_bits(xp, kv_shape, case.dtype, case.scale, 3 * offset)
    cache = lay_out(xp, kv_shape[:3], case.cache_form, case.dtype)
    used = np.zeros(kv_shape[:2], bool)
    for row, length in zip(pages, case.kv_lens, strict=True):
        token = np.arange(length)
        used[row[token // case.page_size], token % case.page_size] = True
    index = tuple(xp.asarray(i) for i in np.nonzero(used))
    for part, begin, end in ((cache.latent, 0, VALUE_DIM), (cache.rope, VALUE_DIM, HEAD_DIM)):
        part[:, 1::2] = INF_BITS[case.dtype]
        part[index] = kv_bits[index][..., begin:end]
    return RaggedProblem(
        xp=xp,
        case=case,
        pages=pages,
        q_bits=q_bits,
        kv_bits=kv_bits,
        q=query.argument,
        kv_cache=cache.argument,
        qo_indptr=xp.asarray(case.qo_indptr),
        kv_lens=xp.asarray(np.array(case.kv_lens, np.int32)),
        paging=_paging(xp, case, pages),
    )


def _deal_pages(case: Ragged, rng: np.random.Generator) -> tuple[list[np.ndarray], int]:
    """Deal shuffled physical pages to the requests; some pages stay nobody's."""
    counts = [-(-length // case.page_size) for length in case.kv_lens]
    num_pages = sum(counts) + 3
    numbers = rng.permutation(num_pages).astype(np.int32)
    pages = np.split(numbers, np.cumsum(counts))[: len(counts)]
    for row in pages:
        shared = min(case.shared // case.page_size, len(row))
        row[:shared] = pages[0][:shared]
    return pages, num_pages


def _paging(xp: Any, case: Ragged, pages: list[np.ndarray]) -> dict[str, Array]:
    """A table, or a list that begins and ends with pages of nobody; garbage where nobody looks."""
    counts = [len(row) for row in pages]
    if case.paging == "list":
        garbage = np.array(GARBAGE, np.int32)
        indptr = len(garbage) + np.cumsum([0, *counts])
        indices = np.concatenate([garbage, *pages, garbage])
        return {
            "kv_indptr": xp.asarray(indptr.astype(np.int32)),
            "kv_indices": xp.asarray(indices),
        }
    table = np.resize(np.array(GARBAGE, np.int32), (len(pages), max(counts) + 2))
    table = np.ascontiguousarray(table)
    for entries, row in zip(table, pages, strict=True):
        entries[: len(row)] = row
    return {"block_table": xp.asarray(table)}


# --- the grid -------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 3, 5, 7, 157),
    "kv_len": (0, 17, 33, 96, 97, 114, 514, 1024),
    "q_len": (1, 3, 7, 16, 17),
    "heads": (16, 48, 64, 96, 128),
    "causal": (True, False),
    "page_size": (1, 16, 64),
    "paging": ("table", "list"),
    "kv_heads": (1, 2),
    "dtype": ("bfloat16", "float16"),
    "cache_form": FORMS,
    "query_form": FORMS,
}
TRIPLES = (("q_len", "heads", "causal"),)
"""Covered completely, beyond all pairs: where heads do not divide a row tile."""


class GridCase(NamedTuple):
    """A case, and its kind of outputs."""

    case: Ragged
    outputs: str


def cover(
    factors: Mapping[str, tuple[Any, ...]],
    triples: tuple[tuple[str, ...], ...],
    candidates: int = 30,
) -> list[dict[str, Any]]:
    """Points of a grid that together hold every pair of values, and the triples.

    Greedy, and always the same.
    """
    rng = random.Random(20261122)
    groups = [*itertools.combinations(factors, 2), *triples]
    starts = {
        tuple(zip(names, values, strict=True)): (i, values)
        for i, names in enumerate(groups)
        for values in itertools.product(*(factors[name] for name in names))
    }
    wanted = {*starts.values()}
    held_by = [(i, itemgetter(*names)) for i, names in enumerate(groups)]
    points: list[dict[str, Any]] = []
    for start in sorted(starts, key=lambda c: (-len(c), repr(c))):
        if starts[start] not in wanted:
            continue
        tries = [
            {name: rng.choice(values) for name, values in factors.items()} | dict(start)
            for _ in range(candidates)
        ]
        held = [{(i, of_group(values)) for i, of_group in held_by} for values in tries]
        best = max(range(candidates), key=lambda i: len(held[i] & wanted))
        wanted -= held[best]
        points.append(tries[best])
    return points


@cache
def covering_sample() -> tuple[GridCase, ...]:
    """Cases that together hold every pair of FACTORS, and TRIPLES."""
    cases: list[GridCase] = []
    for number, values in enumerate(cover(FACTORS, TRIPLES)):
        batch, q_len, kv_len = (values.pop(name) for name in ("batch", "q_len", "kv_len"))
        lengths = {"q_lens": (q_len,) * batch, "kv_lens": (kv_len,) * batch}
        around = {"before": number % 3, "behind": number % 2 * 5}
        case = Ragged(**lengths, **values, **around, seed=number)
        cases.append(GridCase(case, ("given", "float32", "allocated")[number % 3]))
    return tuple(cases)
