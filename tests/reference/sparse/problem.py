# SPDX-License-Identifier: Apache-2.0
"""Small calls of mla_sparse_attention, and what they mean, entry by entry."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


class Case(NamedTuple):
    """Arguments of a call; rows of the cache that no list names are NaN."""

    q: Array  # (tokens, heads, 576)
    kv_cache: Array  # (pages, page_size, 576)
    indices: Array  # (tokens, topk)
    block_table: Array | None = None
    row_to_request: Array | None = None

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {n: a for n, a in (self._asdict() | changes).items() if a is not None}


def make_case(
    tokens: int = 3,
    *,
    heads: int = 4,
    topk: int = 9,
    pages: int = 5,
    page_size: int = 8,
    table: bool = False,
    dtype: Any = BF16,
    seed: int = 0,
) -> Case:
    """Random lists, with rows named twice, over half of a cache; with a table of two requests."""
    rng = np.random.default_rng(seed)
    slots = pages * page_size
    cache = np.full((pages, page_size, 576), np.nan, dtype)
    q = (0.3 * rng.standard_normal((tokens, heads, 576))).astype(dtype)
    if not table:
        indices = rng.choice(rng.permutation(slots)[: slots // 2 + 1], (tokens, topk))
        named = indices
        block_table = requests = None
    else:
        block_table = np.stack([rng.permutation(pages), rng.permutation(pages)]).astype(np.int32)
        requests = rng.integers(0, 2, tokens).astype(np.int32)
        indices = rng.integers(0, slots, (tokens, topk))
        named = block_table[requests[:, None], indices // page_size] * page_size
        named = named + indices % page_size
    used = np.unique(named)
    cache.reshape(slots, 576)[used] = (0.3 * rng.standard_normal((len(used), 576))).astype(dtype)
    return Case(q, cache, indices.astype(np.int32), block_table, requests)


def naive(
    case: Case, scale: float = 576**-0.5, lengths: Any = None, sinks: Any = None
) -> tuple[Array, Array]:
    """Attend in Python's numbers, one entry after another."""
    tokens, heads, _ = case.q.shape
    pages, page_size, _ = case.kv_cache.shape
    out, lse = np.zeros((tokens, heads, 512)), np.full((tokens, heads), -np.inf)
    for i in range(tokens):
        length = case.indices.shape[1] if lengths is None else int(lengths[i])
        rows = []
        for index in case.indices[i, : max(length, 0)].tolist():
            page, slot = index // page_size, index % page_size
            if case.block_table is not None and case.row_to_request is not None:
                request = int(case.row_to_request[i])
                table = case.block_table
                known = 0 <= request < len(table) and 0 <= page < table.shape[1]
                page = int(table[request, page]) if known else -1
            if index >= 0 and 0 <= page < pages:
                rows.append(case.kv_cache[page, slot].astype(np.float64))
        for h in range(heads):
            query = case.q[i, h].astype(np.float64)
            scores = [scale * math.fsum(query * row) for row in rows]
            sink = [] if sinks is None else [float(sinks[h])]
            top = max([*scores, *sink], default=-math.inf)
            if top == -math.inf:
                continue
            weights = [math.exp(score - top) for score in [*scores, *sink]]
            lse[i, h] = top + math.log(math.fsum(weights))
            for weight, row in zip(weights, rows, strict=False):
                out[i, h] += weight * row[:512]
            out[i, h] /= math.fsum(weights)
    return out, lse


def float32_out(case: Case) -> Array:
    """An output that does not round to 16 bits."""
    return np.empty((*case.q.shape[:2], 512), np.float32)
