# SPDX-License-Identifier: Apache-2.0
"""Inputs, poisoned memory and float64 references of the indexer's logits, for NumPy or CuPy.

Whatever no query sees is NaN: keys, scales, pages of nobody, the padding of rows and pages. Unused
table entries are garbage. The caller's output is NaN before the call, with guard bands around its
rows. tests/gpu_tools/test_indexer.py holds the references against `cumla.reference` on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla.reference.rows import e2m1_numbers
from tests.gpu.tools.oracle import matmul

Array = Any

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
NAN_BYTE = 0x7F
ONES = {"float32": np.uint32(0xFFFFFFFF), "bfloat16": np.uint16(0xFFFF)}  # bits of a NaN
GARBAGE = (2147480000, -1, -(2**31), 2**31 - 1)
POOL = 4194319  # a prime: no two rows repeat each other
COS = {"float32": 5e-6, "bfloat16": 3e-5}
COS_UNQUANTISED = 1e-3
# Of |q| |k| and what multiplies it: FP8 products are summed with some 13 bits behind the largest.
ELEMENT = 2.0**-10
HALF_BF16 = 2.0**-8
CHUNK = 1 << 28  # float64 products at a time
MARGIN = 3  # elements on either side of a row of the output


@functools.cache
def _values(xp: Any) -> Array:
    """Float64 values of all bytes."""
    return xp.asarray(np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64))


@functools.cache
def _pool(xp: Any) -> Array:
    numbers = np.random.default_rng(11).standard_normal(POOL, dtype=np.float32)
    return xp.asarray(numbers.astype(E4M3).view(np.uint8))


def some_bytes(xp: Any, shape: tuple[int, ...], offset: int) -> Array:
    """Bits of normal numbers, a copy of the pool from ``offset`` on, over and over."""
    pool = _pool(xp)
    out = xp.empty(int(np.prod(shape)), dtype=xp.uint8)
    filled, begin = 0, offset % POOL
    while filled < out.size:
        part = pool[begin : begin + out.size - filled]
        out[filled : filled + part.size] = part
        filled, begin = filled + part.size, 0
    return out.reshape(shape)


def typed(array: Array) -> Array:
    """The same memory as e4m3 numbers."""
    return array.view(E4M3)


class Rows:
    """An output inside of poisoned memory; its rows lie apart, at no special address."""

    def __init__(self, xp: Any, rows: int, columns: int, dtype: str) -> None:
        self.xp, self.dtype, self.ones = xp, dtype, ONES[dtype]
        bits = xp.uint32 if dtype == "float32" else xp.uint16
        self.base = xp.full((rows + 2, columns + 2 * MARGIN), self.ones, dtype=bits)
        self.bits = self.base[1:-1, MARGIN:-MARGIN]
        self.array = self.bits.view(np.float32 if dtype == "float32" else BF16)

    @property
    def written(self) -> Array:
        return self.bits != self.ones

    def check_guards(self) -> None:
        around = self.base.copy()
        around[1:-1, MARGIN:-MARGIN] = self.ones
        assert bool((around == self.ones).all()), "memory around the logits was written"


def widen(xp: Any, array: Array) -> Array:
    """Float64 values of logits."""
    if array.dtype == np.float32:
        return array.astype(xp.float64)
    bits = xp.ascontiguousarray(array).view(xp.uint16).astype(xp.uint32) << xp.uint32(16)
    return bits.view(xp.float32).astype(xp.float64)


class Expected(NamedTuple):
    """Float64 logits, what an error is measured by, and what is visible; all (rows, columns)."""

    logits: Array
    size: Array
    visible: Array


def score(xp: Any, q: Array, k: Array, scale: Array, weights: Array) -> tuple[Array, Array]:
    """Logits of bytes q (rows, heads, dim) for bytes k (tokens, dim), and the size of a product.

    The size is ``scale |k| sum(|weights| |q|)``.
    """
    rows, heads, dim = q.shape
    values = _values(xp)
    queries, weights, scale = values[q], weights.astype(xp.float64), scale.astype(xp.float64)
    norms = xp.sqrt((queries * queries).sum(axis=-1))
    norm_of_row = (xp.abs(weights) * norms).sum(axis=-1)
    logits = xp.empty((rows, len(k)), dtype=xp.float64)
    size = xp.empty((rows, len(k)), dtype=xp.float64)
    step = max(1, CHUNK // (rows * heads))
    for begin in range(0, len(k), step):
        some = slice(begin, begin + step)
        keys = values[k[some]]
        products = matmul(xp, queries.reshape(-1, dim), xp.ascontiguousarray(keys.T))
        products = xp.maximum(products, 0.0).reshape(rows, heads, -1)
        for row in range(0, rows, 256):
            part = products[row : row + 256] * weights[row : row + 256, :, None]
            logits[row : row + 256, some] = part.sum(axis=1) * scale[some]
        lengths = xp.sqrt((keys * keys).sum(axis=-1)) * scale[some]
        size[:, some] = norm_of_row[:, None] * lengths
    return logits, size


class Figures:
    """How far logits are off, summed up over the parts of a result.

    ``cos`` is that of all values together: a part may be one value that almost cancels, which says
    nothing of the result. ``element`` is the worst element's share of what it is allowed.
    """

    def __init__(self) -> None:
        self.errors = self.norms = self.element = 0.0

    def add(self, xp: Any, got: Array, expected: Expected, *, clean: bool) -> None:
        """Add logits (rows, columns); where nothing is visible they only count if clean."""
        visible = expected.visible
        if clean:
            assert bool((xp.isneginf(widen(xp, got)) == ~visible).all()), "-inf in other places"
        values = xp.where(visible, widen(xp, got), 0.0)
        assert bool(xp.isfinite(values).all()), "NaN or infinities where something is visible"
        wanted = xp.where(visible, expected.logits, 0.0)
        error = xp.abs(values - wanted)
        allowed = ELEMENT * xp.where(visible, expected.size, 1.0)
        if got.dtype.name == "bfloat16":
            allowed = allowed + HALF_BF16 * xp.abs(wanted)
        self.errors += float((error * error).sum())
        self.norms += float((values * values).sum() + (wanted * wanted).sum())
        self.element = max(self.element, float((error / xp.maximum(allowed, 1e-300)).max()))

    def check(self, dtype: str) -> dict[str, float]:
        """Hold them against the limits of a dtype, and name them."""
        cos = self.errors / self.norms if self.norms else 0.0
        figures = {"cos": cos, "element": self.element}
        assert cos <= COS[dtype], figures
        assert self.element <= 1.0, figures
        return figures


def check_logits(
    xp: Any, got: Array, expected: Expected, *, clean: bool = True
) -> dict[str, float]:
    """Hold logits (rows, columns) against their reference; where nothing is visible only if clean.

    Returns
    -------
    dict
        ``cos`` and ``element`` of :class:`Figures`.
    """
    figures = Figures()
    figures.add(xp, got, expected, clean=clean)
    return figures.check(got.dtype.name)


def unquantised(q: np.ndarray, k: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Float64 logits (rows, tokens) of real numbers q (rows, heads, dim) and k (tokens, dim)."""
    products = np.maximum(q.astype(np.float64) @ k.astype(np.float64).T, 0.0)
    return np.einsum("mhn,mh->mn", products, weights, optimize=True)


def check_unquantised(logits: np.ndarray, wanted: np.ndarray, seen: np.ndarray) -> dict[str, float]:
    """Hold logits against those of what was quantised, of which each row sees the first so many.

    Returns
    -------
    dict
        ``cos_unquantised``, of all values together.
    """
    visible = np.arange(logits.shape[1])[None, :] < seen[:, None]
    assert (np.isneginf(logits) == ~visible).all(), "-inf in other places"
    got, wanted = logits[visible].astype(np.float64), wanted[visible]
    difference = float(((got - wanted) ** 2).sum() / ((got**2).sum() + (wanted**2).sum()))
    assert difference <= COS_UNQUANTISED, difference
    return {"cos_unquantised": difference}


# --- prefill --------------------------------------------------------------------------------------


def causal(seq_len: int, seq_len_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """The last seq_len tokens see what is before them, and themselves."""
    ke = np.arange(seq_len) + seq_len_kv - seq_len + 1
    return np.zeros(seq_len, np.int64), np.maximum(ke, 0)


def context_parallel(seq_len: int, seq_len_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Two runs of queries, from either half of the sequence."""
    half = (seq_len + 1) // 2
    steps = np.arange(seq_len)
    early = seq_len_kv // 3 + steps
    late = seq_len_kv - seq_len_kv // 4 + steps - half
    return np.zeros(seq_len, np.int64), np.clip(np.where(steps < half, early, late), 0, seq_len_kv)


def packed(seq_len: int, seq_len_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Several requests behind each other, each causal; some queries see nothing."""
    rng = np.random.default_rng(seq_len)
    request = np.sort(rng.integers(0, 4, seq_len))
    begin = request * (seq_len_kv // 4)
    ke = begin + rng.integers(0, max(seq_len_kv // 4, 1) + 1, seq_len)
    return begin, np.where(rng.random(seq_len) < 0.1, begin, ke)


def wild(seq_len: int, seq_len_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds outside of the sequence, and ends before beginnings."""
    rng = np.random.default_rng(seq_len + 1)
    most = 2 * seq_len_kv
    bounds = rng.integers(-seq_len_kv, most, (2, seq_len))
    extreme = rng.random((2, seq_len)) < 0.05
    bounds[extreme] = rng.choice([-(2**31), 2**31 - 1], int(extreme.sum()))
    return bounds[0], bounds[1]


RANGES = {"causal": causal, "context parallel": context_parallel, "packed": packed, "wild": wild}


@dataclass
class Prefill:
    """Arrays of one call of `mqa_logits`."""

    xp: Any
    seq_len: int
    seq_len_kv: int
    heads: int
    dim: int
    ranges: str = "causal"
    seed: int = 0
    padded: bool = False

    def __post_init__(self) -> None:
        xp, seed = self.xp, 1009 * self.seed
        rng = np.random.default_rng(self.seed)
        n, m = self.seq_len, self.seq_len_kv
        self.ks, self.ke = (b.astype(np.int32) for b in RANGES[self.ranges](n, m))
        begin, end = np.clip(self.ks, 0, m), np.clip(self.ke, 0, m)
        self.begin, self.end = begin.astype(np.int64), np.maximum(begin, end).astype(np.int64)
        pad = 16 if self.padded else 0
        q = xp.full((n, self.heads, self.dim + pad), NAN_BYTE, dtype=xp.uint8)
        q[..., : self.dim] = some_bytes(xp, (n, self.heads, self.dim), seed + 1)
        k = xp.full((m, self.dim + pad), NAN_BYTE, dtype=xp.uint8)
        k[:, : self.dim] = some_bytes(xp, (m, self.dim), seed + 2)
        scale = 0.01 + rng.random(m, np.float32)
        seen = np.zeros(m + 1, np.int64)
        some = self.begin < self.end
        np.add.at(seen, self.begin[some], 1)
        np.add.at(seen, self.end[some], -1)
        unseen = np.cumsum(seen[:-1]) == 0
        k[xp.asarray(unseen)] = NAN_BYTE
        scale[unseen] = np.nan
        self.q, self.k = q[..., : self.dim], k[:, : self.dim]
        self.scale = xp.asarray(scale)
        self.weights = xp.asarray(rng.standard_normal((n, self.heads), np.float32))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The five arguments."""
        bounds = (self.xp.asarray(self.ks), self.xp.asarray(self.ke))
        return typed(self.q), (typed(self.k), self.scale), self.weights, *bounds

    def expected(self, width: int = 0, rows: slice = slice(None)) -> Expected:
        """The reference of some rows, compressed if there is a width."""
        xp, columns = self.xp, width or self.seq_len_kv
        begin, end = (xp.asarray(bound[rows])[:, None] for bound in (self.begin, self.end))
        k = xp.where(xp.isnan(self.scale)[:, None], xp.uint8(0), self.k)
        scale = xp.nan_to_num(self.scale)
        logits, size = score(xp, self.q[rows], k, scale, self.weights[rows])
        column = xp.arange(columns)[None, :]
        if not width:
            return Expected(logits, size, (column >= begin) & (column < end))
        token = xp.minimum(begin + column, self.seq_len_kv - 1)
        logits, size = (xp.take_along_axis(a, token, axis=1) for a in (logits, size))
        return Expected(logits, size, column < end - begin)


# --- pages ----------------------------------------------------------------------------------------


def ragged(rng: np.random.Generator, batch: int, mean: int) -> np.ndarray:
    """Lengths of mean +-30 %, a seventh of them 0, or one of three."""
    lengths = rng.integers(int(0.7 * mean), int(1.3 * mean) + 1, batch)
    lengths[min(3, max(2, batch - 1)) :: 7] = 0
    return lengths


@dataclass
class Paged:
    """Arrays of one call of `paged_mqa_logits`."""

    xp: Any
    batch: int
    q_len: int
    mean: int
    heads: int = 64
    dim: int = 128
    page_size: int = 64
    per_row: bool = False
    form: str = "fused"  # "fused", "3d", "padded", "pair", "mxfp4"
    seed: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        xp, rng = self.xp, np.random.default_rng(self.seed)
        if not self.lengths.size:
            self.lengths = ragged(rng, self.batch, self.mean)
        steps = np.arange(self.q_len) - self.q_len + 1
        self.seen = np.maximum(self.lengths[:, None] + steps, 0)
        if self.per_row:
            self.seen = (self.lengths[:, None] * rng.random(self.seen.shape)).astype(np.int64)
            self.seen[:, rng.integers(self.q_len)] = self.lengths
        need = -(-self.seen.max(axis=1) // self.page_size)
        self.max_pages = int(need.max()) + 2
        self.num_pages = int(need.sum()) + 3
        order = rng.permutation(self.num_pages)
        self.table = np.resize(np.array(GARBAGE, np.int32), (self.batch, self.max_pages))
        ends = np.cumsum(need)
        for b in range(self.batch):
            self.table[b, : need[b]] = order[ends[b] - need[b] : ends[b]]
        self.make_cache()
        self.q = some_bytes(xp, (self.batch, self.q_len, self.heads, self.dim), self.seed + 5)
        rows = self.batch * self.q_len
        self.weights = xp.asarray(rng.standard_normal((rows, self.heads), np.float32))

    def make_cache(self) -> None:
        """Fused pages, maybe apart from each other; what nobody sees is NaN."""
        xp, pages, size, dim = self.xp, self.num_pages, self.page_size, self.dim
        page_bytes = size * (dim + 4)
        pitch = page_bytes + (48 if self.form == "padded" else 0)
        self.memory = xp.full((pages, pitch), NAN_BYTE, dtype=xp.uint8)
        scales = 0.01 + np.random.default_rng(self.seed + 4).random((pages, size), np.float32)
        used = np.zeros((pages, size), bool)
        for b, length in enumerate(self.seen.max(axis=1)):
            full, rest = divmod(int(length), size)
            used[self.table[b, :full]] = True
            if rest:
                used[self.table[b, full], :rest] = True
        if self.form == "mxfp4":
            self._fill_mxfp4(used)
            return
        scales[~used] = np.nan
        keys = some_bytes(xp, (pages, size, dim), self.seed + 3)
        keys[xp.asarray(~used)] = NAN_BYTE
        self.memory[:, : size * dim] = keys.reshape(pages, -1)
        bits = xp.asarray(scales.view(np.uint8).reshape(pages, -1))
        self.memory[:, size * dim : page_bytes] = bits
        self.scales = xp.asarray(scales)

    def _fill_mxfp4(self, used: np.ndarray) -> None:
        """Pages of 68 bytes a key; also the same keys as e4m3, which holds them, and scales."""
        xp, pages, size, dim = self.xp, self.num_pages, self.page_size, self.dim
        rng = np.random.default_rng(self.seed + 3)
        codes = rng.integers(0, 256, (pages, size, dim // 2)).astype(np.uint8)
        exponents = rng.integers(110, 124, (pages, size, dim // 32)).astype(np.uint8)
        codes[~used], exponents[~used] = NAN_BYTE, 255
        highest = exponents.max(axis=-1, keepdims=True).astype(int)
        factors = np.ldexp(1.0, exponents - highest + 6).repeat(32, axis=-1)
        numbers = e2m1_numbers(codes) * factors
        keys = numbers.astype(ml_dtypes.float8_e4m3fn)
        assert (keys.astype(np.float64) == numbers).all()
        self.keys = xp.asarray(keys.view(np.uint8))
        self.scales = xp.asarray(np.ldexp(np.float32(1), highest[..., 0] - 133))
        whole = [codes.reshape(pages, -1), exponents.reshape(pages, -1)]
        self.memory = xp.asarray(np.concatenate(whole, axis=1))

    @property
    def options(self) -> dict[str, str]:
        """Return what a call, or a plan, has to be told."""
        return {"cache_format": "mxfp4"} if self.form == "mxfp4" else {}

    def move(self, memory: Array, begins: Sequence[int]) -> np.ndarray:
        """Copy the pages, in runs that begin there, into the rows of other memory; the table then.

        Runs are equally long, up to one page.
        """
        table = self.table.copy()
        runs = np.array_split(np.arange(self.num_pages), len(begins))
        for begin, run in zip(begins, runs, strict=True):
            first, behind = int(run[0]), int(run[-1]) + 1
            memory[begin : begin + len(run)] = self.memory[first:behind]
            table[(self.table >= first) & (self.table < behind)] += begin - first
        return table

    @property
    def kv_cache(self) -> Any:
        """The cache in its form."""
        pages, size, dim = self.num_pages, self.page_size, self.dim
        if self.form == "pair":
            keys = self.memory[:, : size * dim].copy().reshape(pages, size, dim)
            return typed(keys), self.scales
        if self.form == "mxfp4":
            return self.memory.reshape(pages, size, 1, dim // 2 + 4)
        shape = (pages, size, dim + 4) if self.form == "3d" else (pages, size, 1, dim + 4)
        inner = (dim + 4, 1) if self.form == "3d" else (dim + 4, dim + 4, 1)
        strided = self.xp.lib.stride_tricks.as_strided
        return strided(self.memory, shape, (self.memory.strides[0], *inner))

    @property
    def kv_lens(self) -> Array:
        return self.xp.asarray((self.seen if self.per_row else self.lengths).astype(np.int32))

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The four arguments of a plan's run; the table is a part of a wider one."""
        wide = self.xp.asarray(np.pad(self.table, ((0, 0), (0, 3)), constant_values=-5))
        return typed(self.q), self.kv_cache, self.weights, wide[:, : self.max_pages]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The five arguments of a call."""
        return *self.inputs, self.kv_lens

    def requests_expected(self, b: int, columns: int) -> Expected:
        """The reference of a request's rows."""
        xp, dim = self.xp, self.dim
        length = min(int(self.seen[b].max()), columns)
        pages = xp.asarray(self.table[b, : -(-length // self.page_size)].astype(np.int64))
        if self.form == "mxfp4":
            k = self.keys[pages].reshape(-1, dim)[:length]
        else:
            k = self.memory[pages][:, : self.page_size * dim].reshape(-1, dim)[:length]
        scale = self.scales[pages].reshape(-1)[:length]
        some = slice(b * self.q_len, (b + 1) * self.q_len)
        logits = xp.zeros((self.q_len, columns), dtype=xp.float64)
        size = xp.ones((self.q_len, columns), dtype=xp.float64)
        if length:
            found = score(xp, self.q[b], k, scale, self.weights[some])
            logits[:, :length], size[:, :length] = found
        visible = xp.arange(columns)[None, :] < xp.asarray(self.seen[b])[:, None]
        return Expected(logits, size, visible)

    def check(self, got: Array, *, clean: bool = True, most: int = 24) -> dict[str, float]:
        """Hold the rows of some requests against the reference; all rows' -inf if clean."""
        xp, columns = self.xp, got.shape[1]
        if clean:
            seen = xp.asarray(self.seen.reshape(-1))[:, None]
            for begin in range(0, len(got), 64):
                hidden = xp.arange(columns)[None, :] >= seen[begin : begin + 64]
                part = got[begin : begin + 64]
                assert bool((xp.isneginf(widen(xp, part)) == hidden).all()), "-inf elsewhere"
        chosen = range(self.batch)
        if self.batch > most:
            chosen = np.random.default_rng(0).choice(self.batch, most, replace=False).tolist()
        figures = Figures()
        for b in chosen:
            rows = got[b * self.q_len : (b + 1) * self.q_len]
            figures.add(xp, rows, self.requests_expected(b, columns), clean=clean)
        return figures.check(got.dtype.name)
