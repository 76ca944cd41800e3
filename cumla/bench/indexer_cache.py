# SPDX-License-Identifier: Apache-2.0
"""FP8 for the indexer: rows quantised, and quantised into pages; checked, then timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cumla import append_indexer_cache, quantize_fp8, reference
from cumla.bench.cases import PAGE_SIZE
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.indexer import DIM, TOKEN_BYTES
from cumla.bench.operations import time_copy
from cumla.bench.timing import GpuTimer, Timing, time_cold

__all__ = ["INDEXER_CACHE", "IndexerCacheCase", "measure_indexer_cache"]

_ROW_BYTES = 2 * DIM  # of bfloat16
_CHECKED_PAGES = 6  # beside the first and the last


@dataclass(frozen=True, slots=True)
class IndexerCacheCase:
    """Rows of 128 bfloat16 numbers that become e4m3 and a float32 scale.

    Attributes
    ----------
    op : str
        ``"quantize_fp8"``, or ``"append_indexer_cache"`` into shuffled pages of 64 tokens.
    mbytes : int
        Bytes that are read and written, in 10^6.
    """

    op: str
    mbytes: int

    @property
    def tokens(self) -> int:
        """Rows, whole pages of them."""
        return self.mbytes * 10**6 // ((_ROW_BYTES + TOKEN_BYTES) * PAGE_SIZE) * PAGE_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return self.tokens * (_ROW_BYTES + TOKEN_BYTES)

    def to_json(self) -> dict[str, Any]:
        """Name the case as a row of the results file does."""
        return {"op": self.op, "tokens": self.tokens, "dim": DIM, "dtype": "bfloat16"}


INDEXER_CACHE = tuple(
    IndexerCacheCase(op, mbytes)
    for op in ("quantize_fp8", "append_indexer_cache")
    for mbytes in (128, 2000)
)
"""The cases of the benchmark."""


def measure_indexer_cache(
    gpu: Gpu, case: IndexerCacheCase, timer: GpuTimer = time_cold
) -> tuple[Timing, dict[str, float | None]]:
    """Check a case, then time it.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    case : IndexerCacheCase
        What to run.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    tuple
        The time of a call, and ``copy_us``: how long a plain copy of as many bytes takes.

    Raises
    ------
    CheckError
        Something is not written as it should be.
    """
    tokens = case.tokens
    bits = gpu.empty((tokens, DIM), "uint16")
    fill_normal(gpu, bits, "bfloat16", seed=9, deviation=1.0)
    rows = bits.view(DTYPES["bfloat16"])
    pages = np.random.default_rng(9).permutation(tokens // PAGE_SIZE)
    written: tuple[Any, ...]
    call: Callable[[], object]
    if case.op == "quantize_fp8":
        pages = np.arange(len(pages))
        values, scale = gpu.empty((tokens, DIM), "uint8"), gpu.empty((tokens,), "float32")
        written = (values.reshape(len(pages), -1), scale.reshape(len(pages), -1).view(np.uint8))
        call = partial(quantize_fp8, rows, out=values, scale_out=scale)
    else:
        cache = gpu.empty((len(pages), PAGE_SIZE, TOKEN_BYTES), "uint8")
        slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()
        written = (cache.reshape(len(pages), -1),)
        call = partial(append_indexer_cache, rows, cache, gpu.upload(slots))
    for array in written:
        gpu.fill_bytes(array, 0xFF)
    call()
    of_page = bits.reshape(len(pages), PAGE_SIZE, DIM)
    _check(gpu, case, of_page, written, pages)
    return timer(gpu, call), {"copy_us": time_copy(gpu, case.nbytes, timer).us}


def _check(
    gpu: Gpu,
    case: IndexerCacheCase,
    rows: Any,
    written: tuple[Any, ...],
    pages: np.ndarray[Any, Any],
) -> None:
    """Compare the bytes of some pages with what the reference makes of their rows."""
    some = np.random.default_rng(1).integers(0, len(pages), _CHECKED_PAGES)
    for i in np.unique([0, len(pages) - 1, *some]):
        own = gpu.download(rows[i]).view(DTYPES["bfloat16"])
        values, scale = reference.quantize_fp8(own)
        expected = np.concatenate([values.view(np.uint8).ravel(), scale.view(np.uint8)])
        got = np.concatenate([gpu.download(array[pages[i]]) for array in written])
        if not np.array_equal(got, expected):
            raise CheckError(f"{case.op} {case}: page {pages[i]} was not written as it should be")
