# SPDX-License-Identifier: Apache-2.0
"""Small calls of mla_decode."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)


class Case(NamedTuple):
    """The arguments of one call."""

    q: Array
    kv_cache: Array
    block_table: Array
    kv_lens: Array


def make_case(
    lengths: list[int],
    *,
    q_len: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    page_size: int = 16,
    dtype: DTypeLike = BF16,
    scale: float = 0.1,
    outliers: bool = False,
    seed: int = 0,
) -> Case:
    """Random queries and a cache of shuffled pages in which everything unused is poison."""
    rng = np.random.default_rng(seed)

    def row() -> Array:
        values = scale * rng.standard_normal((kv_heads, 576))
        if outliers:
            values = np.where(rng.random(values.shape) < 1e-3, 1e4 * np.sign(values), values)
        return values

    pages = [-(-n // page_size) for n in lengths]
    cache = np.full((sum(pages) + 2, page_size, kv_heads, 576), np.nan, dtype)
    table = np.full((len(lengths), max(pages) + 1), 2147480000, np.int32)
    free = rng.permutation(len(cache))
    for b, (used, n) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :used], free = free[:used], free[used:]
        for t in range(n):
            cache[table[b, t // page_size], t % page_size] = row()
    q = scale * rng.standard_normal((len(lengths), q_len, heads, 576))
    if outliers:  # a token with an outlier takes all of the weight or none, see tests.mla.tolerance
        q += 0.5 * np.sign(q)
    return Case(q.astype(dtype), cache, table, np.array(lengths, np.int32))


def float32_out(case: Case) -> Array:
    """An output array that does not round to 16 bits."""
    return np.empty((*case.q.shape[:3], 512), np.float32)
