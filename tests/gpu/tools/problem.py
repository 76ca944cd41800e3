# SPDX-License-Identifier: Apache-2.0
"""Inputs, poisoned memory and guarded outputs of one decode case, for NumPy or CuPy.

Whatever the operation has no business to read is NaN (even slots) or infinity (odd ones): slots
past a request's length, pages of nobody, the padding of rows and pages. Unused table entries are
2147480000 or -1. Outputs that the caller gives are NaN before the call, with guard bands around.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.gpu.tools import oracle
from tests.gpu.tools.cases import Case

PAGE_SIZE = 64
HEAD_DIM = 576
VALUE_DIM = 512
GARBAGE = (2147480000, -1)
POOL = 4194319  # a prime: no two cached rows repeat each other
GUARD = 256  # elements on either side of an output
NUMPY_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
NAN_BITS = {"bfloat16": 0x7FC1, "float16": 0x7E01}
INF_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
OUTLIER = 1e4
IN_QUERIES = np.array([0.5, 1.0, 2.0, 4.0])  # what an outlier of the cache meets
IN_CACHE = 4.0  # what an outlier of a query meets

Array = Any


@functools.cache
def _normal_numbers() -> np.ndarray:
    return np.random.default_rng(7).standard_normal(POOL, dtype=np.float32)


@functools.cache
def _pool(xp: Any, dtype: str, scale: float) -> Array:
    """Bits of POOL normal numbers of the given scale, on xp's device."""
    values = (_normal_numbers() * np.float32(scale)).astype(NUMPY_DTYPES[dtype])
    return xp.asarray(values.view(np.uint16))


def normal_bits(xp: Any, shape: tuple[int, ...], dtype: str, scale: float, offset: int) -> Array:
    """Bits of normal numbers, a copy of the pool from ``offset`` on, over and over."""
    pool = _pool(xp, dtype, scale)
    out = xp.empty(int(np.prod(shape)), dtype=xp.uint16)
    filled, begin = 0, offset % POOL
    while filled < out.size:
        part = pool[begin : begin + out.size - filled]
        out[filled : filled + part.size] = part
        filled, begin = filled + part.size, 0
    return out.reshape(shape)


def typed(bits: Array, dtype: str) -> Array:
    """The same memory as an array of ``dtype``."""
    return bits.view(NUMPY_DTYPES[dtype])


class Guarded:
    """A contiguous array of NaN between two guard bands, to be written completely."""

    def __init__(self, xp: Any, shape: tuple[int, ...], dtype: str) -> None:
        self.xp, self.dtype = xp, dtype
        self.bits_type = xp.uint32 if dtype == "float32" else xp.uint16
        size = int(np.prod(shape))
        # all ones: a NaN of every float type, in the array and in the guards
        self.ones = np.uint32(0xFFFFFFFF) if dtype == "float32" else np.uint16(0xFFFF)
        self.base = xp.full(size + 2 * GUARD, self.ones, dtype=self.bits_type)
        self.bits = self.base[GUARD : GUARD + size].reshape(shape)
        self.array = typed(self.bits, dtype)

    def repoison(self) -> None:
        """Make everything NaN again."""
        self.base[...] = self.ones

    def check_guards(self) -> None:
        """Fail if anything around the array was written."""
        for where, band in (("before", self.base[:GUARD]), ("behind", self.base[-GUARD:])):
            assert bool((band == self.ones).all()), f"guard band {where} the array was written"


@dataclass
class Problem:
    """Arrays of one call. ``*_bits`` are uint16 views of what the typed arrays hold."""

    xp: Any
    case: Case
    softmax_scale: float | None
    lengths: np.ndarray
    table: np.ndarray
    q_bits: Array
    kv_bits: Array
    q: Array
    kv_cache: Array
    block_table: Array
    kv_lens: Array

    @property
    def inputs(self) -> dict[str, Array]:
        """Return what a run of a plan takes, by name."""
        return {"q": self.q, "kv_cache": self.kv_cache, "block_table": self.block_table}

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """The four array arguments of a call, in order."""
        return self.q, self.kv_cache, self.block_table, self.kv_lens

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(batch, q_len, heads, 512)."""
        return (self.case.batch, self.case.q_len, self.case.heads, VALUE_DIM)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, q_len, heads)."""
        return self.out_shape[:-1]

    def outputs(self, dtype: str | None = None) -> tuple[Guarded, Guarded]:
        """Poisoned ``out`` and ``lse``."""
        out = Guarded(self.xp, self.out_shape, dtype or self.case.dtype)
        return out, Guarded(self.xp, self.lse_shape, "float32")

    def expected(self, lengths: np.ndarray | None = None) -> oracle.Expected:
        """The float64 result, for other lengths if given."""
        scale = HEAD_DIM**-0.5 if self.softmax_scale is None else self.softmax_scale
        return oracle.decode(
            self.xp,
            self.q_bits,
            self.kv_bits,
            self.table,
            self.lengths if lengths is None else lengths,
            dtype=self.case.dtype,
            softmax_scale=scale,
            causal=self.case.causal,
        )

    def check(
        self, out: Array, lse: Array, expected: oracle.Expected | None = None
    ) -> dict[str, float]:
        """Hold results against the reference; the worst figures, lse's with a prefix."""
        expected = expected or self.expected()
        assert tuple(out.shape) == self.out_shape
        assert tuple(lse.shape) == self.lse_shape and str(lse.dtype) == "float32"
        dtype = str(out.dtype)
        bits = out.view(self.xp.uint32 if dtype == "float32" else self.xp.uint16)
        figures = oracle.check_out(
            self.xp,
            oracle.widen(self.xp, bits, dtype),
            expected.out,
            v_rms=expected.v_rms,
            outliers=self.case.inputs == "outliers",
        )
        lse_figures = oracle.check_lse(self.xp, lse.astype(self.xp.float64), expected.lse)
        return figures | {f"lse_{name}": value for name, value in lse_figures.items()}


def make_problem(xp: Any, case: Case, lengths: np.ndarray | None = None) -> Problem:
    """Build the arrays of a case on the device of ``xp``, the same ones every time."""
    rng = np.random.default_rng(1000 + case.seed)
    lengths = _lengths(case, rng) if lengths is None else lengths.astype(np.int32)
    table, num_pages = _shuffled_table(lengths, rng)
    scale = {"0.1": 0.1, "1": 1.0, "outliers": 0.5}[case.inputs]
    offset = 77777 * (case.seed + 1)

    q_bits = _query(xp, case, normal_bits(xp, _query_shape(case), case.dtype, scale, offset))
    kv_shape = (num_pages, PAGE_SIZE, case.kv_heads, HEAD_DIM)
    values = normal_bits(xp, kv_shape, case.dtype, scale, 3 * offset)
    if case.inputs == "outliers":
        _plant_outliers(xp, case, q_bits, values, lengths, table, rng)
    kv_bits = _cache(xp, case, num_pages)
    kv_bits[...] = values
    del values
    poison_unused(xp, kv_bits, lengths, table, case.dtype)

    kv_typed = typed(kv_bits, case.dtype)
    return Problem(
        xp=xp,
        case=case,
        softmax_scale=None if case.softmax == "default" else 192**-0.5,
        lengths=lengths,
        table=table,
        q_bits=q_bits,
        kv_bits=kv_bits,
        q=typed(q_bits, case.dtype),
        kv_cache=kv_typed[:, :, 0, :] if case.cache == "3d" else kv_typed,
        block_table=_table(xp, case, table),
        kv_lens=xp.asarray(lengths),
    )


def _lengths(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Equal lengths, or ragged ones of which the first is the longest and the last is empty."""
    if not case.ragged:
        return np.full(case.batch, case.kv_len, dtype=np.int32)
    lengths = rng.integers(0, case.kv_len + 1, size=case.batch, dtype=np.int32)
    if case.batch > 1:
        lengths[-1] = 0
    lengths[0] = case.kv_len
    return lengths


def _shuffled_table(lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Deal shuffled physical pages to the requests; some pages stay nobody's."""
    blocks = -(-lengths // PAGE_SIZE)
    used = int(blocks.sum())
    num_pages = used + 3
    pages = rng.permutation(num_pages).astype(np.int32)
    table = np.empty((len(lengths), int(blocks.max()) + 2), dtype=np.int32)
    table[...] = np.resize(np.array(GARBAGE, dtype=np.int32), table.shape[1])
    start = 0
    for row, count in zip(table, blocks.tolist(), strict=True):
        row[:count] = pages[start : start + count]
        start += count
    return table, num_pages


def _query_shape(case: Case) -> tuple[int, int, int, int]:
    return (case.batch, case.q_len, case.heads, HEAD_DIM)


def _query(xp: Any, case: Case, values: Array) -> Array:
    """Lay the query out as the case asks; what lies between its rows is NaN."""
    if case.query == "plain":
        return values
    if case.query == "transposed":
        view = xp.empty((case.batch, case.heads, case.q_len, HEAD_DIM), dtype=xp.uint16)
        view = view.transpose(0, 2, 1, 3)
    else:
        shape = (case.batch, case.q_len + 1, case.heads + 2, HEAD_DIM + 8)
        base = xp.full(shape, NAN_BITS[case.dtype], dtype=xp.uint16)
        view = base[:, : case.q_len, : case.heads, :HEAD_DIM]
    view[...] = values
    return view


def _cache(xp: Any, case: Case, num_pages: int) -> Array:
    """An uninitialised view of NaN memory, (num_pages, 64, kv_heads, 576), strided as asked.

    With padded pages the first row starts 16 bytes into its allocation.
    """
    heads = case.kv_heads
    pitch = HEAD_DIM + (8 if case.cache in ("padded rows", "padded both") else 0)
    if case.cache == "heads first":
        row, head = pitch, PAGE_SIZE * pitch
    else:
        row, head = heads * pitch, pitch
    padded = case.cache in ("padded pages", "padded both")
    page = PAGE_SIZE * heads * pitch + (24 if padded else 0)
    start = 8 if padded else 0
    base = xp.full(start + num_pages * page, NAN_BITS[case.dtype], dtype=xp.uint16)
    strides = tuple(2 * stride for stride in (page, row, head, 1))
    shape = (num_pages, PAGE_SIZE, heads, HEAD_DIM)
    return xp.lib.stride_tricks.as_strided(base[start:], shape=shape, strides=strides)


def _table(xp: Any, case: Case, table: np.ndarray) -> Array:
    if case.table == "plain":
        return xp.asarray(table)
    base = xp.full((table.shape[0], table.shape[1] + 3), GARBAGE[0], dtype=xp.int32)
    view = base[:, : table.shape[1]]
    view[...] = xp.asarray(table)
    return view


def poison_unused(
    xp: Any, kv_bits: Array, lengths: np.ndarray, table: np.ndarray, dtype: str
) -> None:
    """Make slots past the lengths, and pages of nobody, NaN (even slots) and infinity (odd)."""
    used = np.zeros((kv_bits.shape[0], PAGE_SIZE), dtype=bool)
    for row, length in zip(table, lengths.tolist(), strict=True):
        full, rest = divmod(length, PAGE_SIZE)
        used[row[:full]] = True
        if rest:
            used[row[full], :rest] = True
    pages, slots = np.nonzero(~used)
    for parity, bits in ((0, NAN_BITS[dtype]), (1, INF_BITS[dtype])):
        some = slots % 2 == parity
        if some.any():
            kv_bits[xp.asarray(pages[some]), xp.asarray(slots[some])] = bits


def _plant_outliers(
    xp: Any,
    case: Case,
    q_bits: Array,
    values: Array,
    lengths: np.ndarray,
    table: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Put +-1e4 into even columns of a few cached rows, and an odd one of a query row a request.

    Honest rounding of probabilities and output must be able to pass (see `tests.mla.tolerance`), so
    every score that an outlier touches lies hundreds away from the others: its token takes all of
    the weight of a query row or none of it. In the columns of a request's cached outliers its
    queries hold +-0.5, 1, 2 and 4: no signed sum of some of these is small, whichever outliers
    fall on one token. The query with an outlier of its own holds 0 there, and finds +-4, more than
    any other cached number, in one of the tokens that it sees.
    """

    def bits(numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(NUMPY_DTYPES[case.dtype]).view(np.uint16)

    def signs(*shape: int) -> np.ndarray:
        return rng.choice((-1.0, 1.0), size=shape)

    b = np.flatnonzero(lengths)
    each = np.arange(len(b))
    query, head = (rng.integers(0, most, len(b)) for most in (case.q_len, case.heads))

    tokens = rng.integers(0, lengths[b, None], size=(len(b), len(IN_QUERIES)))
    columns = 2 * rng.random((len(b), HEAD_DIM // 2)).argsort(axis=1)[:, : len(IN_QUERIES)]
    index = (*_slots(table, b[:, None], tokens), rng.integers(0, case.kv_heads, tokens.shape))
    _scatter(xp, values, (*index, columns), bits(OUTLIER * signs(*tokens.shape)))
    factors = IN_QUERIES * signs(len(b), case.q_len, case.heads, len(IN_QUERIES))
    factors[each, query, head] = 0
    rows = np.ix_(b, range(case.q_len), range(case.heads), [0])[:3]
    _scatter(xp, q_bits, (*rows, columns[:, None, None, :]), bits(factors))

    sign, column = signs(len(b)), 2 * rng.integers(0, HEAD_DIM // 2, len(b)) + 1
    _scatter(xp, q_bits, (b, query, head, column), bits(OUTLIER * sign))
    seen = lengths[b] - (case.q_len - 1 - query if case.causal else 0)
    token = rng.integers(0, np.maximum(seen, 1))
    kv_head = head // (case.heads // case.kv_heads)
    _scatter(xp, values, (*_slots(table, b, token), kv_head, column), bits(IN_CACHE * sign))


def _slots(
    table: np.ndarray, requests: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Page and slot of tokens."""
    return table[requests, tokens // PAGE_SIZE].astype(np.int64), tokens % PAGE_SIZE


def _scatter(xp: Any, array: Array, index: tuple[np.ndarray, ...], values: np.ndarray) -> None:
    array[tuple(xp.asarray(i) for i in index)] = xp.asarray(values)
