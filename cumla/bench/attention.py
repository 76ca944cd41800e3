# SPDX-License-Identifier: Apache-2.0
"""Attention over queries of different lengths: each case is checked against float64, then timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla import MLAAttentionPlan
from cumla.bench.cases import PAGE_SIZE, Case, Ceilings
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError, Inputs, check
from cumla.bench.gpu import Gpu
from cumla.bench.timing import GpuTimer, Timing, time_cold
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = [
    "ATTENTION",
    "AttentionCase",
    "AttentionTiming",
    "attention_row",
    "measure_attention",
]

_DTYPE = "bfloat16"
_DEVIATION = 0.1  # of queries and cache
_REPEATS, _WARMUP = 3, 1  # a call takes up to 60 ms
_CHECKED_TOKENS = 48  # beside the first and the last of each request


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A call of `cumla.mla_attention` in bfloat16, with one kv head.

    Attributes
    ----------
    batch, heads : int
        Requests and query heads.
    q_len : int
        Query tokens of each request, but of those that decode.
    kv_len : int
        Cached tokens of each request.
    causal : bool
        As in `cumla.mla_attention`.
    decodes : int
        So many requests, the first ones, have a single query token.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    decodes: int = 0

    @property
    def name(self) -> str:
        """For example ``attention-b8-h128-q512-kv8192-causal``, or ``...-60decodes``."""
        return (
            f"attention-b{self.batch}-h{self.heads}-q{self.q_len}-kv{self.kv_len}"
            + ("-causal" if self.causal else "")
            + (f"-{self.decodes}decodes" if self.decodes else "")
        )

    @property
    def indptr(self) -> NDArray[np.int64]:
        """Where the query tokens of each request begin, and where the last end, (batch + 1,)."""
        counts = np.full(self.batch, self.q_len)
        counts[: self.decodes] = 1
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return int(self.indptr[-1])

    @property
    def requests(self) -> NDArray[np.int64]:
        """Whose each query token is, (tokens,)."""
        return np.repeat(np.arange(self.batch), np.diff(self.indptr))

    @property
    def visible(self) -> NDArray[np.int64]:
        """How many cached tokens each query token sees, (tokens,)."""
        if not self.causal:
            return np.full(self.tokens, self.kv_len)
        behind = self.indptr[1:][self.requests] - 1 - np.arange(self.tokens)
        visible: NDArray[np.int64] = np.maximum(self.kv_len - behind, 0)
        return visible

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token."""
        return 2 * int(self.visible.sum()) * self.heads * (HEAD_DIM + VALUE_DIM)

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""
        return {"op": "mla_attention"} | asdict(self) | {"page": PAGE_SIZE, "dtype": _DTYPE}


ATTENTION = (
    *(
        AttentionCase(batch, heads, q_len, 8192, causal)
        for batch in (1, 8)
        for heads in (64, 128)
        for q_len in (512, 2048)
        for causal in (False, True)
    ),
    AttentionCase(1, 128, 4096, 4096, causal=True),
    AttentionCase(64, 128, 512, 4096, causal=True, decodes=60),
)
"""The cases of the benchmark: chunks of a prefill, a whole one, and chunks among decoding."""


class AttentionTiming(NamedTuple):
    """What was measured of a case.

    Attributes
    ----------
    single : Timing
        One call with its schedule ready.
    schedule : Timing
        The schedule.
    row_error, lse_error : float
        Worst relative errors of the rows that were checked.
    """

    single: Timing
    schedule: Timing
    row_error: float
    lse_error: float


def measure_attention(
    gpu: Gpu, case: AttentionCase, timer: GpuTimer = time_cold
) -> AttentionTiming:
    """Check a case, then time it.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : AttentionCase
        What to run.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    AttentionTiming

    Raises
    ------
    CheckError
        A result is wrong.
    """
    inputs = _inputs(gpu, case)
    q, kv, table, kv_lens, out, lse = inputs.arguments()
    indptr = gpu.upload(case.indptr.astype(np.int32))
    plan = MLAAttentionPlan.from_arrays(q, kv, indptr, causal=case.causal)
    update = partial(plan.update, indptr, kv_lens)
    attend = partial(plan.run, q, kv, table, out=out, lse=lse)
    update()
    attend()
    row_error, lse_error = _check(gpu, case, inputs)
    single = timer(gpu, attend, repeats=_REPEATS, warmup=_WARMUP)
    return AttentionTiming(single, timer(gpu, update), row_error, lse_error)


def _inputs(gpu: Gpu, case: AttentionCase) -> Inputs:
    """Lay out the arrays of a case: shuffled pages, outputs of NaN."""
    count = case.batch * -(-case.kv_len // PAGE_SIZE)
    pages = np.random.default_rng(count).permutation(count).astype(np.int32)
    rows = (case.tokens, case.heads)
    inputs = Inputs(
        q=gpu.empty((*rows, HEAD_DIM), "uint16"),
        kv=gpu.empty((count, PAGE_SIZE, 1, HEAD_DIM), "uint16"),
        pages=pages[None],
        tables=[gpu.upload(pages.reshape(case.batch, -1))],
        seqlens=gpu.upload(np.full(case.batch, case.kv_len, np.int32)),
        out=gpu.empty((*rows, VALUE_DIM), "uint16"),
        lse=gpu.empty(rows, "float32"),
        dtype=_DTYPE,
        batch_invariant=False,
    )
    fill_normal(gpu, inputs.kv, _DTYPE, seed=2, deviation=_DEVIATION)
    fill_normal(gpu, inputs.q, _DTYPE, seed=3, deviation=_DEVIATION)
    gpu.fill_bytes(inputs.out, 0xFF)
    gpu.fill_bytes(inputs.lse, 0xFF)
    return inputs


def _check(gpu: Gpu, case: AttentionCase, inputs: Inputs) -> tuple[float, float]:
    """Hold rows of some tokens against float64, each token a request that decodes."""
    tokens = _sample(case)
    chosen = gpu.upload(tokens)
    decoding = Inputs(
        q=inputs.q[chosen],
        kv=inputs.kv,
        pages=inputs.pages,
        tables=[inputs.tables[0][gpu.upload(case.requests[tokens])]],
        seqlens=gpu.upload(case.visible[tokens].astype(np.int32)),
        out=inputs.out[chosen].reshape(len(tokens), 1, case.heads, VALUE_DIM),
        lse=inputs.lse[chosen].reshape(len(tokens), case.heads, 1),
        dtype=_DTYPE,
        batch_invariant=False,
    )
    try:
        return check(gpu, decoding, Case(len(tokens), 1, case.heads, case.kv_len))
    except CheckError as error:
        raise CheckError(f"{case.name}: some tokens, each a request: {error}") from error


def _sample(case: AttentionCase) -> NDArray[np.int64]:
    """Choose tokens, the first and the last of each request among them.

    The log-sum-exp of a token that sees few is near 0, where a relative error says nothing.
    """
    indptr = case.indptr
    some = np.random.default_rng(case.tokens).integers(0, case.tokens, _CHECKED_TOKENS)
    tokens: NDArray[np.int64] = np.unique(np.concatenate([indptr[:-1], indptr[1:] - 1, some]))
    chosen: NDArray[np.int64] = tokens[case.visible[tokens] >= PAGE_SIZE]
    return chosen


def attention_row(
    case: AttentionCase, timing: AttentionTiming, ceilings: Ceilings
) -> dict[str, Any]:
    """Put a case's time beside the ceilings of matrix products.

    Parameters
    ----------
    case : AttentionCase
        What ran.
    timing : AttentionTiming
        How long it took.
    ceilings : Ceilings
        Of the GPU.

    Returns
    -------
    dict
        A row of the results.
    """
    tflops = case.flops / (timing.single.us * 1e6)
    sustained = ceilings.sustained_tflops
    return (
        case.to_json()
        | timing.single.figures()
        | {
            "tflops": tflops,
            "efficiency": tflops / ceilings.matmul_tflops,
            "sustained_share": tflops / sustained if sustained else None,
            "schedule_us": timing.schedule.us,
            "row_error": timing.row_error,
            "lse_error": timing.lse_error,
        }
    )
