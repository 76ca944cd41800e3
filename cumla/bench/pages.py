# SPDX-License-Identifier: Apache-2.0
"""Dense decoding with pages of other sizes than 64: checked, then timed in turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError, check_some, inputs_of
from cumla.bench.gpu import Gpu
from cumla.bench.timing import GpuTimer, Timing, in_turns, time_cold
from cumla.launch.mla.shape import HEAD_DIM

__all__ = ["PAGES", "PAGE_SIZES", "measure_pages", "pages_row"]

PAGES: tuple[Case, ...] = (
    Case(128, 1, 16, 4096),
    Case(128, 1, 128, 4096),
    Case(16, 1, 128, 8192),
)
"""Cases whose times with pages of several sizes are held against those with pages of 64."""
PAGE_SIZES = (PAGE_SIZE, 1, 16, 32, 48, 128)

_DEVIATION = 0.1  # of queries and cache
_REPEATS = 10  # runs of a turn


def measure_pages(gpu: Gpu, case: Case, timer: GpuTimer = time_cold) -> dict[int, Timing]:
    """Check a case with pages of every size, then time all of them in turns.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : Case
        What to run: bfloat16, one kv head, requests of the same length.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    dict
        From each of `PAGE_SIZES` to its time: the median of the turns, and their extremes.

    Raises
    ------
    CheckError
        A result is wrong.
    """
    slots = case.batch * max(-(-case.kv_len // size) * size for size in PAGE_SIZES)
    cached = gpu.empty((slots, HEAD_DIM), "uint16")
    q = gpu.empty((case.batch, case.q_len, case.heads, HEAD_DIM), "uint16")
    fill_normal(gpu, cached, case.dtype, seed=2, deviation=_DEVIATION)
    fill_normal(gpu, q, case.dtype, seed=3, deviation=_DEVIATION)
    calls = {size: _checked_call(gpu, case, q, cached, size) for size in PAGE_SIZES}
    times = in_turns(partial(timer, gpu, repeats=_REPEATS), tuple(calls.values()))
    return dict(zip(calls, times, strict=True))


def _checked_call(gpu: Gpu, case: Case, q: Any, cached: Any, page_size: int) -> partial[Any]:
    """Make a call with shuffled pages of a size, its schedule ready, and check what it gives."""
    count = case.batch * -(-case.kv_len // page_size)
    shuffled = np.random.default_rng(count).permutation(count).astype(np.int32)
    pages = shuffled.reshape(case.batch, -1)
    kv = cached[: count * page_size].reshape(count, page_size, 1, HEAD_DIM)
    inputs = inputs_of(gpu, case, q, kv, pages)
    (call,) = inputs.calls()
    call()
    try:
        check_some(gpu, inputs, case, partial(_gathered, gpu, case, cached, pages, page_size))
    except CheckError as error:
        raise CheckError(f"pages of {page_size}: some requests of {case.name}: {error}") from error
    return call


def _gathered(
    gpu: Gpu,
    case: Case,
    cached: Any,
    pages: NDArray[np.int32],
    page_size: int,
    requests: NDArray[np.int64],
) -> Any:
    """Gather the tokens of some requests into pages of 64."""
    each = -(-case.kv_len // PAGE_SIZE)
    tokens = np.minimum(np.arange(each * PAGE_SIZE), case.kv_len - 1)
    slots = pages[requests][:, tokens // page_size].astype(np.int64) * page_size
    gathered = cached[gpu.upload((slots + tokens % page_size).ravel())]
    return gathered.reshape(-1, PAGE_SIZE, 1, HEAD_DIM)


def pages_row(case: Case, times: dict[int, Timing]) -> dict[str, Any]:
    """Put the times with pages of several sizes beside that with pages of 64.

    Parameters
    ----------
    case : Case
        What ran.
    times : dict
        What `measure_pages` gave.

    Returns
    -------
    dict
        A row of the results, a list ``pages`` in it.
    """
    row = case.to_json()
    del row["page"]
    usual = times[PAGE_SIZE].us
    return row | {
        "pages": [
            {"page": size, **time.figures(), "ratio": time.us / usual}
            for size, time in times.items()
        ]
    }
