# SPDX-License-Identifier: Apache-2.0
"""Sections of the indexer: its logits, their schedule, and what quantises rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.sections import calls
from bench.sections.mla import against
from bench.sections.moves import FIGURES, measure_moves
from cumla import reference
from cumla.bench.cases import PAGE_SIZE, Ceilings
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.section import RATES, Bench, CheckError, Column, Row, Section

HEADS, DIM = 64, 128
TOKEN_BYTES = DIM + 4  # of keys and scale in a cache
_LOGIT_BYTES = 4
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

_ROW_TOLERANCE = 3e-3  # |error| / |row|: tensor cores keep 13 bits or so of a sum of FP8 products

# --- logits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PagedLogitsCase:
    """Logits of a decoding step, float32 and cleaned, of requests that are of the same length."""

    # As in ``q`` (batch, next_n, 64, 128).
    batch: int
    next_n: int
    kv_len: int  # tokens of each request, the newest included, and columns of the result

    @property
    def name(self) -> str:
        """For example ``paged_mqa_logits-b64-n1-kv8192``."""
        return f"paged_mqa_logits-b{self.batch}-n{self.next_n}-kv{self.kv_len}"

    @property
    def pages(self) -> int:
        """Cache pages of all requests."""
        return self.batch * ceil(self.kv_len / PAGE_SIZE)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached tokens."""
        return self.batch * self.kv_len * TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes that must move: each cached token once, the logits."""
        return self.cache_bytes + self.batch * self.next_n * self.kv_len * _LOGIT_BYTES

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token."""
        return 2 * HEADS * DIM * self.batch * sum(self.seen)

    @property
    def seen(self) -> list[int]:
        """How many tokens each query of a request sees."""
        return [max(self.kv_len - hidden, 0) for hidden in reversed(range(self.next_n))]

    def to_json(self) -> Row:
        shape = {"batch": self.batch, "next_n": self.next_n, "heads": HEADS, "dim": DIM}
        return {"op": "paged_mqa_logits", **shape, "kv_len": self.kv_len, "logits": "float32"}


@dataclass(frozen=True, slots=True)
class PrefillLogitsCase:
    """Logits of the last tokens of a sequence, causal, float32 and cleaned."""

    q_len: int  # new tokens
    kv_len: int  # all tokens

    @property
    def name(self) -> str:
        """For example ``mqa_logits-s4096-kv8192``."""
        return f"mqa_logits-s{self.q_len}-kv{self.kv_len}"

    @property
    def nbytes(self) -> int:
        """Bytes that must move: each key once, the logits and the -inf beside them."""
        return self.kv_len * TOKEN_BYTES + self.q_len * self.kv_len * _LOGIT_BYTES

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token."""
        return 2 * HEADS * DIM * int(self.ends.sum())

    @property
    def ends(self) -> NDArray[np.int64]:
        """How many tokens each query sees, (q_len,)."""
        return np.maximum(np.arange(self.q_len) + self.kv_len - self.q_len + 1, 0)

    def to_json(self) -> Row:
        shape = {"q_len": self.q_len, "kv_len": self.kv_len, "heads": HEADS, "dim": DIM}
        return {"op": "mqa_logits", **shape, "causal": True, "logits": "float32"}


LogitsCase: TypeAlias = PagedLogitsCase | PrefillLogitsCase


def floor_us(case: LogitsCase, ceilings: Ceilings) -> float:
    """Time below which no kernel gets while the ceilings hold, in microseconds."""
    memory = case.nbytes / (ceilings.read_gbps * 1e3)
    return max(memory, case.flops / (ceilings.fp8_tflops * 1e6))


class PrefillStep:
    """Arrays of a prefill on the device, and the call that scores the tokens.

    `inputs` are those of `cumla.mqa_logits`; `out` is poisoned until it is written.
    """

    def __init__(self, gpu: Gpu, case: PrefillLogitsCase) -> None:
        self.gpu, self.case = gpu, case
        q, weights = _queries(gpu, (case.q_len,))
        k = gpu.empty((case.kv_len, DIM), "uint8")
        scale = gpu.empty((case.kv_len,), "float32")
        calls.quantize(_normal(gpu, (case.kv_len, DIM), seed=8), k, scale)()
        ks = gpu.upload(np.zeros(case.q_len, np.int32))
        ke = gpu.upload(case.ends.astype(np.int32))
        self.inputs = (q, (k, scale), weights, ks, ke)
        self.out = _poisoned(gpu, (case.q_len, case.kv_len))
        self.run = calls.logits(*self.inputs, self.out)

    def check(self) -> float:
        """Compare rows of `out` with float64; return the worst relative error."""
        gpu, case = self.gpu, self.case
        q, (k, scale), weights, *_ = self.inputs
        keys, scales = gpu.download(k).view(_E4M3), gpu.download(scale)
        return max(
            _row_error(
                f"{case.name}: the logits of query {i}",
                gpu.download(self.out[i]),
                gpu.download(q[i]).view(_E4M3),
                gpu.download(weights[i]),
                keys[: case.ends[i]],
                scales[: case.ends[i]],
            )
            for i in _some(case.q_len)
        )


class DecodeStep:
    """Arrays of a decoding step on the device, with a plan whose schedule is ready.

    They are what `cumla.paged_mqa_logits` takes, with a block table and a call for each of the
    caches; `out` is poisoned until it is written.
    """

    def __init__(self, gpu: Gpu, case: PagedLogitsCase, caches: int) -> None:
        self.gpu, self.case = gpu, case
        self.q, self.weights = _queries(gpu, (case.batch, case.next_n))
        count = case.pages * caches
        self.cache = gpu.empty((count, PAGE_SIZE, 1, TOKEN_BYTES), "uint8")
        tokens = count * PAGE_SIZE
        slots = gpu.upload(np.arange(tokens))
        calls.append_indexer(_normal(gpu, (tokens, DIM), seed=8), self.cache, slots)()
        shuffled = np.random.default_rng(count).permutation(count).astype(np.int32)
        self.pages = shuffled.reshape(caches, case.batch, -1)
        self.tables = [gpu.upload(table) for table in self.pages]
        self.kv_lens = gpu.upload(np.full(case.batch, case.kv_len, np.int32))
        self.out = _poisoned(gpu, (case.batch * case.next_n, case.kv_len))
        arrays = (self.q, self.cache, self.weights, self.tables, self.kv_lens, self.out)
        self.calls = calls.paged_logits(*arrays)

    def check(self, number: int = 0, *, clean: bool = True) -> float:
        """Compare rows of what a cache gave with float64, -inf if clean; return the worst error."""
        gpu, case = self.gpu, self.case
        worst = 0.0
        for request in _some(case.batch):
            pages = gpu.upload(self.pages[number, request])
            own = gpu.download(self.cache[pages]).reshape(len(pages), -1)
            keys = own[:, : PAGE_SIZE * DIM].reshape(-1, DIM).view(_E4M3)
            scales = np.ascontiguousarray(own[:, PAGE_SIZE * DIM :]).view(np.float32).ravel()
            for i in range(case.next_n):
                row = request * case.next_n + i
                seen = case.seen[i]
                got = gpu.download(self.out[row])
                error = _row_error(
                    f"{case.name}: the logits of query {i} of request {request}",
                    got if clean else got[:seen],
                    gpu.download(self.q[request, i]).view(_E4M3),
                    gpu.download(self.weights[row]),
                    keys[:seen],
                    scales[:seen],
                )
                worst = max(worst, error)
        return worst


def _normal(gpu: Gpu, shape: tuple[int, ...], seed: int) -> Any:
    """Make bfloat16 numbers of a normal distribution."""
    bits = gpu.empty(shape, "uint16")
    fill_normal(gpu, bits, "bfloat16", seed=seed, deviation=1.0)
    return bits.view(DTYPES["bfloat16"])


def _queries(gpu: Gpu, lead: tuple[int, ...]) -> tuple[Any, Any]:
    """Make e4m3 queries (*lead, 64, 128), as bytes, and their weights."""
    shape = (*lead, HEADS, DIM)
    q, scale = gpu.empty(shape, "uint8"), gpu.empty(shape[:-1], "float32")
    calls.quantize(_normal(gpu, shape, seed=7), q, scale)()
    rows = int(np.prod(lead))
    weights = np.random.default_rng(7).standard_normal((rows, HEADS), np.float32)
    return q, gpu.upload(weights)


def _poisoned(gpu: Gpu, shape: tuple[int, int]) -> Any:
    """Make an output of NaN, so that what is not written shows."""
    out = gpu.empty(shape, "float32")
    gpu.fill_bytes(out, 0xFF)
    return out


def _some(count: int) -> list[int]:
    """Choose the first, one in the middle and the last."""
    return sorted({0, count // 2, count - 1})


def _row_error(
    name: str,
    got: NDArray[np.float32],
    q: NDArray[Any],
    weights: NDArray[np.float32],
    keys: NDArray[Any],
    scales: NDArray[np.float32],
) -> float:
    """Compare the logits of one query with float64; the tokens that have keys are visible."""
    seen = len(keys)
    products = np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0.0)
    expected = scales * (weights.astype(np.float64) @ products)
    if not np.isneginf(got[seen:]).all():
        raise CheckError(f"{name}: not -inf after the {seen} tokens that are visible")
    size = np.linalg.norm(expected)
    error = float(np.linalg.norm(got[:seen] - expected) / (size if size > 0 else 1.0))
    if not error <= _ROW_TOLERANCE:  # NaN is wrong
        raise CheckError(f"{name} are off by {error:.2e}, of at most {_ROW_TOLERANCE:.2e}")
    return error


def _measure_logits(bench: Bench, case: LogitsCase) -> Row:
    graph_us = None
    if isinstance(case, PrefillLogitsCase):
        prefill = PrefillStep(bench.gpu, case)
        prefill.run()
        error = prefill.check()
        single = bench.time(prefill.run)
    else:
        one = DecodeStep(bench.gpu, case, caches=1)
        one.calls[0]()
        error = one.check()
        single = bench.time(one.calls[0])
        graph_us = _graph_us(bench, case)
    floor = floor_us(case, bench.ceilings)
    return single.rates(case.flops, case.nbytes, floor) | {
        "graph_us": graph_us,
        "row_error": error,
    }


def _graph_us(bench: Bench, case: PagedLogitsCase) -> float | None:
    """Time a call among many in a graph that goes round several caches, of a small batch."""
    caches = bench.limits.caches(case.batch, case.cache_bytes)
    if caches == 1:
        return None
    several, least = DecodeStep(bench.gpu, case, caches), bench.limits.graph_calls
    graph = bench.graph(several.calls, least)
    several.check((max(least, caches) - 1) % caches)  # what the last call of a replay left
    return graph.us


def queries(row: Row) -> int:
    """Count the query tokens of a request."""
    return int(row.get("next_n") or row["q_len"])


_SHAPE = (
    Column("batch", lambda row: row.get("batch", 1)),
    Column("queries", queries),
    Column("kv_len", "kv_len"),
)
_LOGITS = Section(
    name="indexer",
    title="indexer: ",
    ops=("paged_mqa_logits", "mqa_logits"),
    cases=(
        PagedLogitsCase(64, 1, 8192),
        PagedLogitsCase(64, 1, 32768),
        PagedLogitsCase(128, 1, 32768),
        PagedLogitsCase(64, 2, 8192),
        PagedLogitsCase(128, 2, 32768),
        PagedLogitsCase(128, 4, 32768),
        *(PagedLogitsCase(batch, 1, 131072) for batch in (8, 4, 2, 1)),
        PrefillLogitsCase(4096, 8192),
        PrefillLogitsCase(4096, 32768),
    ),
    measure=_measure_logits,
    shape=(Column("op", "op"), *_SHAPE),
    figures=(
        *RATES,
        Column("x DeepGEMM", lambda row: against(row, "DeepGEMM"), usual=None),
        Column("graph us", "graph_us", "us"),
    ),
)

# --- their schedule -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitsScheduleCase:
    """The schedule of a decoding step's logits."""

    batch: int
    next_n: int
    kv_len: int

    @property
    def name(self) -> str:
        """For example ``paged_schedule-b64-n1-kv8192``."""
        return f"paged_schedule-b{self.batch}-n{self.next_n}-kv{self.kv_len}"

    def to_json(self) -> Row:
        shape = {"batch": self.batch, "next_n": self.next_n, "kv_len": self.kv_len}
        return {"op": "paged_schedule", **shape}


def _measure_schedule(bench: Bench, case: LogitsScheduleCase) -> Row:
    kv_lens = bench.gpu.upload(np.full(case.batch, case.kv_len, np.int32))
    shape = (case.batch, case.next_n, HEADS, DIM)
    update = calls.logits_schedule(shape, ceil(case.kv_len / PAGE_SIZE), kv_lens)
    return bench.time(update).figures()


_SCHEDULE = Section(
    name="indexer",
    title="indexer schedule: ",
    ops=("paged_schedule",),
    cases=tuple(
        LogitsScheduleCase(*shape)
        for shape in ((64, 1, 8192), (64, 2, 8192), (128, 1, 32768), (128, 2, 32768))
        + ((1, 1, 131072),)
    ),
    measure=_measure_schedule,
    shape=_SHAPE,
    figures=(
        Column("us", "us", "us"),
        Column("over empty", lambda row: row["us"] - row["empty_us"], "us"),
        Column("DeepGEMM, published", "deep_gemm_us", "us", usual=None),
    ),
)

# --- quantising -----------------------------------------------------------------------------------

_ROW_BYTES = 2 * DIM  # of bfloat16
_CHECKED_PAGES = 6  # beside the first and the last


@dataclass(frozen=True, slots=True)
class CacheCase:
    """Rows of 128 bfloat16 numbers that become e4m3 and a float32 scale."""

    op: str  # ``"quantize_fp8"``, or ``"append_indexer_cache"`` into shuffled pages of 64 tokens
    mbytes: int  # bytes that are read and written, in 10^6

    @property
    def name(self) -> str:
        """For example ``quantize_fp8-128MB``."""
        return f"{self.op}-{self.mbytes}MB"

    @property
    def tokens(self) -> int:
        """Rows, whole pages of them."""
        return self.mbytes * 10**6 // ((_ROW_BYTES + TOKEN_BYTES) * PAGE_SIZE) * PAGE_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return self.tokens * (_ROW_BYTES + TOKEN_BYTES)

    def to_json(self) -> Row:
        shape = {"op": self.op, "tokens": self.tokens, "dim": DIM}
        return shape | {"dtype": "bfloat16", "nbytes": self.nbytes}


class _CacheStep:
    """Arrays of a case on the device."""

    def __init__(self, gpu: Gpu, case: CacheCase, seed: int) -> None:
        self.gpu, self.case = gpu, case
        count = case.tokens // PAGE_SIZE
        rows = _normal(gpu, (case.tokens, DIM), seed=9 + seed)
        self.rows = rows.reshape(count, PAGE_SIZE, DIM)
        self.pages = np.arange(count)
        if case.op == "quantize_fp8":
            values = gpu.empty((case.tokens, DIM), "uint8")
            scale = gpu.empty((case.tokens,), "float32")
            self.written: tuple[Any, ...] = (
                values.reshape(count, -1),
                scale.reshape(count, -1).view(np.uint8),
            )
            self.run = calls.quantize(rows, values, scale)
        else:
            self.pages = np.random.default_rng(9 + seed).permutation(count)
            cache = gpu.empty((count, PAGE_SIZE, TOKEN_BYTES), "uint8")
            slots = (self.pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()
            self.written = (cache.reshape(count, -1),)
            self.run = calls.append_indexer(rows, cache, gpu.upload(slots))
        for array in self.written:
            gpu.fill_bytes(array, 0xFF)

    def check(self) -> None:
        """Compare the bytes of some pages with what the reference makes of their rows."""
        gpu, pages = self.gpu, self.pages
        some = np.random.default_rng(1).integers(0, len(pages), _CHECKED_PAGES)
        for i in np.unique([0, len(pages) - 1, *some]):
            values, scale = reference.quantize_fp8(gpu.download(self.rows[i]))
            expected = np.concatenate([values.view(np.uint8).ravel(), scale.view(np.uint8)])
            got = np.concatenate([gpu.download(array[pages[i]]) for array in self.written])
            if not np.array_equal(got, expected):
                name = self.case.name
                raise CheckError(f"{name}: page {pages[i]} was not written as it should be")


def _cache_section(op: str, shape: tuple[Column, ...]) -> Section:
    return Section(
        name="indexer",
        title=f"{op}: ",
        ops=(op,),
        cases=tuple(CacheCase(op, mbytes) for mbytes in (128, 2000)),
        measure=partial(measure_moves, _CacheStep, in_graph=False),
        shape=(*shape, Column("dtype", "dtype")),
        figures=FIGURES,
    )


SECTIONS = (
    _LOGITS,
    _SCHEDULE,
    _cache_section("quantize_fp8", (Column("rows", "tokens"), Column("columns", "dim"))),
    _cache_section("append_indexer_cache", (Column("tokens", "tokens"), Column("head_dim", "dim"))),
)
