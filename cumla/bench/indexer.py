# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits: each case is checked against float64, then timed; and their schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumla import PagedMQALogitsPlan, append_indexer_cache, mqa_logits, quantize_fp8
from cumla.bench.cases import PAGE_SIZE, Ceilings
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.peers import Peers, PeerTime, beside
from cumla.bench.timing import GpuTimer, Timing, time_cold, time_graph

__all__ = [
    "LOGITS",
    "LOGITS_SCHEDULES",
    "DecodeStep",
    "LogitsCase",
    "LogitsTiming",
    "PagedLogitsCase",
    "PrefillLogitsCase",
    "PrefillStep",
    "floor_us",
    "logits_row",
    "logits_schedule_row",
    "measure_logits",
    "time_logits_schedule",
]

HEADS, DIM = 64, 128
TOKEN_BYTES = DIM + 4  # of keys and scale in a cache
_LOGIT_BYTES = 4
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

_ROW_TOLERANCE = 3e-3  # |error| / |row|: tensor cores keep 13 bits or so of a sum of FP8 products
_SMALL_BATCH = 16  # up to here a graph of many calls is timed as well
_GRAPH_CALLS = 20
_MOST_CACHES = 32  # that a graph goes round
_ROTATED_BYTES = 512 << 20  # of cache that a graph goes round, if that many caches are enough


@dataclass(frozen=True, slots=True)
class PagedLogitsCase:
    """Logits of a decoding step, float32 and cleaned, of requests that are equally long.

    Attributes
    ----------
    batch, next_n : int
        As in ``q`` (batch, next_n, 64, 128).
    kv_len : int
        Tokens of each request, the newest included, and columns of the result.
    """

    batch: int
    next_n: int
    kv_len: int

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

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file and of the peers' does."""
        return {
            "op": "paged_mqa_logits",
            "batch": self.batch,
            "next_n": self.next_n,
            "heads": HEADS,
            "dim": DIM,
            "kv_len": self.kv_len,
            "logits": "float32",
        }


@dataclass(frozen=True, slots=True)
class PrefillLogitsCase:
    """Logits of the last tokens of a sequence, causal, float32 and cleaned.

    Attributes
    ----------
    q_len : int
        New tokens.
    kv_len : int
        All tokens.
    """

    q_len: int
    kv_len: int

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

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file and of the peers' does."""
        return {
            "op": "mqa_logits",
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "heads": HEADS,
            "dim": DIM,
            "causal": True,
            "logits": "float32",
        }


LogitsCase: TypeAlias = PagedLogitsCase | PrefillLogitsCase

LOGITS: tuple[LogitsCase, ...] = (
    PagedLogitsCase(64, 1, 8192),
    PagedLogitsCase(64, 1, 32768),
    PagedLogitsCase(128, 1, 32768),
    PagedLogitsCase(64, 2, 8192),
    PagedLogitsCase(128, 2, 32768),
    PagedLogitsCase(128, 4, 32768),
    *(PagedLogitsCase(batch, 1, 131072) for batch in (8, 4, 2, 1)),
    PrefillLogitsCase(4096, 8192),
    PrefillLogitsCase(4096, 32768),
)
"""The cases of the benchmark."""

LOGITS_SCHEDULES = tuple(
    PagedLogitsCase(*shape)
    for shape in ((64, 1, 8192), (64, 2, 8192), (128, 1, 32768), (128, 2, 32768), (1, 1, 131072))
)
"""Shapes whose schedule is timed."""


def floor_us(case: LogitsCase, ceilings: Ceilings) -> float:
    """Time below which no kernel gets while the ceilings hold, in microseconds."""
    memory = case.nbytes / (ceilings.read_gbps * 1e3)
    return max(memory, case.flops / (ceilings.fp8_tflops * 1e6))


class LogitsTiming(NamedTuple):
    """What was measured of a case.

    Attributes
    ----------
    single : Timing
        One call, its schedule ready.
    graph : Timing or None
        The same for each of many calls in a graph, where the batch is small.
    row_error : float
        Worst relative error of the rows that were checked.
    """

    single: Timing
    graph: Timing | None
    row_error: float


def measure_logits(gpu: Gpu, case: LogitsCase, timer: GpuTimer = time_cold) -> LogitsTiming:
    """Check a case, then time it.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : LogitsCase
        What to run.
    timer : GpuTimer
        How to time a single call.

    Returns
    -------
    LogitsTiming

    Raises
    ------
    CheckError
        A result is wrong.
    """
    if isinstance(case, PrefillLogitsCase):
        prefill = PrefillStep(gpu, case)
        prefill.run()
        error = prefill.check()
        return LogitsTiming(timer(gpu, prefill.run), None, error)
    one = DecodeStep(gpu, case, caches=1)
    one.run()
    error = one.check()
    single = timer(gpu, one.run)
    if case.batch > _SMALL_BATCH:
        return LogitsTiming(single, None, error)
    caches = min(_MOST_CACHES, max(2, -(-_ROTATED_BYTES // case.cache_bytes)))
    several = DecodeStep(gpu, case, caches)
    calls = [partial(several.run, i % caches) for i in range(max(_GRAPH_CALLS, caches))]
    graph = time_graph(gpu, calls)
    several.check((len(calls) - 1) % caches)  # what the last call of a replay left
    return LogitsTiming(single, graph, error)


def time_logits_schedule(gpu: Gpu, case: PagedLogitsCase, timer: GpuTimer = time_cold) -> Timing:
    """Time the schedule kernel.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : PagedLogitsCase
        Shape of the plan, and the lengths.
    timer : GpuTimer
        How to time it.

    Returns
    -------
    Timing
    """
    lengths = gpu.upload(np.full(case.batch, case.kv_len, np.int32))
    pages = case.pages // case.batch
    shape = (case.batch, case.next_n, HEADS, DIM)
    plan = PagedMQALogitsPlan(*shape, max_pages=pages, page_size=PAGE_SIZE, like=lengths)
    return timer(gpu, partial(plan.update, lengths))


class PrefillStep:
    """Arrays of a prefill on the device.

    Attributes
    ----------
    inputs : tuple
        Those of `cumla.mqa_logits`.
    out : array
        Poisoned, until it is written.
    """

    def __init__(self, gpu: Gpu, case: PrefillLogitsCase) -> None:
        self.gpu, self.case = gpu, case
        q, weights = _queries(gpu, (case.q_len,))
        k = gpu.empty((case.kv_len, DIM), "uint8")
        scale = gpu.empty((case.kv_len,), "float32")
        quantize_fp8(_normal(gpu, (case.kv_len, DIM), seed=8), out=k, scale_out=scale)
        ks = gpu.upload(np.zeros(case.q_len, np.int32))
        ke = gpu.upload(case.ends.astype(np.int32))
        self.inputs = (q, (k, scale), weights, ks, ke)
        self.out = _poisoned(gpu, (case.q_len, case.kv_len))

    def run(self) -> object:
        """Score the tokens."""
        return mqa_logits(*self.inputs, out=self.out)

    def check(self) -> float:
        """Hold rows of `out` against float64; the worst relative error."""
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

    Attributes
    ----------
    q, cache, weights, lengths, tables
        What `cumla.paged_mqa_logits` takes, a block table for each of the caches.
    out : array
        Poisoned, until it is written.
    plan : PagedMQALogitsPlan
        For all of them.
    """

    def __init__(self, gpu: Gpu, case: PagedLogitsCase, caches: int) -> None:
        self.gpu, self.case = gpu, case
        self.q, self.weights = _queries(gpu, (case.batch, case.next_n))
        count = case.pages * caches
        self.cache = gpu.empty((count, PAGE_SIZE, 1, TOKEN_BYTES), "uint8")
        tokens = count * PAGE_SIZE
        slots = gpu.upload(np.arange(tokens))
        append_indexer_cache(_normal(gpu, (tokens, DIM), seed=8), self.cache, slots)
        shuffled = np.random.default_rng(count).permutation(count).astype(np.int32)
        self.pages = shuffled.reshape(caches, case.batch, -1)
        self.tables = [gpu.upload(table) for table in self.pages]
        self.lengths = gpu.upload(np.full(case.batch, case.kv_len, np.int32))
        self.out = _poisoned(gpu, (case.batch * case.next_n, case.kv_len))
        arrays = (self.q, self.cache, self.lengths, self.tables[0])
        self.plan = PagedMQALogitsPlan.from_arrays(*arrays)
        self.plan.update(self.lengths)

    def run(self, number: int = 0) -> object:
        """Score the tokens of one of the caches."""
        inputs = (self.q, self.cache, self.weights, self.lengths, self.tables[number])
        return self.plan.run(*inputs, max_context_len=self.case.kv_len, out=self.out)

    def check(self, number: int = 0, *, clean: bool = True) -> float:
        """Hold rows of what a cache gave against float64, -inf if clean; the worst error."""
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
    quantize_fp8(_normal(gpu, shape, seed=7), out=q, scale_out=scale)
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
    """Hold the logits of one query against float64; visible are the tokens that have keys."""
    seen = len(keys)
    products = np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0.0)
    expected = scales * (weights.astype(np.float64) @ products)
    if not np.isneginf(got[seen:]).all():
        raise CheckError(f"{name}: not -inf behind the {seen} tokens that are visible")
    size = np.linalg.norm(expected)
    error = float(np.linalg.norm(got[:seen] - expected) / (size if size > 0 else 1.0))
    if not error <= _ROW_TOLERANCE:  # NaN is wrong
        raise CheckError(f"{name} are off by {error:.2e}, of at most {_ROW_TOLERANCE:.2e}")
    return error


def logits_row(
    case: LogitsCase, timing: LogitsTiming, ceilings: Ceilings, peers: Peers
) -> dict[str, Any]:
    """Put a case's times beside its floor and its peers.

    Parameters
    ----------
    case : LogitsCase
        What ran.
    timing : LogitsTiming
        How long it took.
    ceilings : Ceilings
        Of the GPU.
    peers : Peers
        Who else ran it.

    Returns
    -------
    dict
        A row of the results.
    """
    us, floor = timing.single.us, floor_us(case, ceilings)
    ratio = floor / floor_us(case, peers.ceilings)
    return (
        case.to_json()
        | timing.single.figures()
        | {
            "tflops": case.flops / (us * 1e6),
            "gbps": case.nbytes / (us * 1e3),
            "floor_us": floor,
            "efficiency": floor / us,
            "graph_us": None if timing.graph is None else timing.graph.us,
            "peers": beside(us, _of_peers(case, ratio, ceilings, peers)),
            "row_error": timing.row_error,
        }
    )


def _of_peers(
    case: LogitsCase, ratio: float, ceilings: Ceilings, peers: Peers
) -> dict[str, PeerTime]:
    """Find who ran a case; a prefill with the kernel that writes -inf, which memory bounds."""
    times = peers.times(case.to_json(), ratio)
    if not isinstance(case, PrefillLogitsCase):
        return times
    share = peers.ceilings.read_gbps / ceilings.read_gbps
    cleaning = peers.times(case.to_json() | {"op": "clean_logits"}, share)
    return {
        name: replace(time, us=time.us + clean.us, scaled_us=time.scaled_us + clean.scaled_us)
        for name, time in times.items()
        if (clean := cleaning.get(name)) is not None
    }


def logits_schedule_row(case: PagedLogitsCase, timing: Timing, peers: Peers) -> dict[str, Any]:
    """Put the time of a schedule beside a peer's, which is launch-bound and so never scaled.

    Parameters
    ----------
    case : PagedLogitsCase
        What ran.
    timing : Timing
        How long it took.
    peers : Peers
        Who else ran it.

    Returns
    -------
    dict
        A row of the results.
    """
    shape = {"batch": case.batch, "next_n": case.next_n, "kv_len": case.kv_len}
    row = {"op": "paged_schedule", **shape}
    times = [time.us for time in peers.times(row, 1.0).values()]
    return row | timing.figures() | {"deep_gemm_us": times[0] if times else None}
