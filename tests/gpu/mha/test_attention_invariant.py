# SPDX-License-Identifier: Apache-2.0
"""``batch_invariant=True``: a token keeps its bits, however many queries its request has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.placements import (
    Placements,
    around,
    check_one_set_of_bits,
    check_random_batches,
    rows_of,
)

KERNELS = ("attention", "invariant_parts", "ragged_schedule")
cp: Any = pytest.importorskip("cupy")

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = 9000
WINDOWS = (None, 0, 63, 100, 300, 1000)
SHAPES = [
    # columns, query and kv heads, page size, e4m3
    pytest.param(128, (32, 8), 64, False, id="128"),
    pytest.param(64, (8, 1), 16, False, id="64"),
    pytest.param(256, (4, 2), 1, False, id="256"),
    pytest.param(128, (8, 2), 16, True, id="e4m3"),
]
ATTENTION = (
    *("attention", "attention, one token", "attention, window", "attention, FP8"),
    *("attention, mask", "attention, bias", "attention, one split"),
)
CHUNKS = [(last, count) for last in (700, 1100) for count in (65, 200, 500)]


@lru_cache(maxsize=1)
def cache_of(columns: int, heads: tuple[int, int], page_size: int, is_e4m3: bool) -> dict[str, Any]:
    """Keys, values and queries of one request, and its pages."""
    rng, pages = np.random.default_rng(columns), -(-TOKENS // page_size)
    shape, found = (pages, page_size, heads[1], columns), {}
    for name in "kv":
        numbers = rng.standard_normal(shape, np.float32)
        kind = ml_dtypes.float8_e4m3fn if is_e4m3 else BF16
        found[name] = cp.asarray(numbers.astype(kind).view(np.uint8 if is_e4m3 else kind))
    q = rng.standard_normal((TOKENS, heads[0], columns), np.float32).astype(BF16)
    table = rng.permutation(pages).astype(np.int32)
    return found | {"q": cp.asarray(q), "pages": cp.asarray(table)}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("columns", "heads", "page_size", "is_e4m3"), SHAPES)
def test_any_number_of_queries(
    columns: int, heads: tuple[int, int], page_size: int, is_e4m3: bool, window: Any
) -> None:
    """1, 2, 3 and 8 of them, between two cuts; windows begin in even and in odd blocks."""
    given = cache_of(columns, heads, page_size, is_e4m3)
    for begin in (100, 700, 1500, 5000, 8300):
        check(given, around(begin) + around(begin + 64), window)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("columns", "heads", "page_size", "is_e4m3"), SHAPES)
def test_chunks_of_a_plan_that_cuts_nothing(
    columns: int, heads: tuple[int, int], page_size: int, is_e4m3: bool, window: Any
) -> None:
    """Its chunks of a prompt have the bits of decoding."""
    given = cache_of(columns, heads, page_size, is_e4m3)
    decoding = [place for last in (700, 1100) for i in (60, 8) for place in around(last - i, 4)]
    check(given, CHUNKS + decoding, window, max_kv_len=1)


@pytest.mark.parametrize("name", ATTENTION)
def test_random_batches(name: str) -> None:
    """Each request has one set of bits, in calls and by plans."""
    check_random_batches(name)


def check(given: dict[str, Any], placements: Placements, window: Any, **plan: Any) -> None:
    """Compute all placements in one call, or by a plan."""
    rows, ends, lens = rows_of(placements)
    k, v, q = given["k"], given["v"], given["q"][cp.asarray(rows)]
    pages = given["pages"]
    table = cp.ascontiguousarray(cp.broadcast_to(pages, (len(lens), len(pages))))
    lengths = {"kv_lens": cp.asarray(lens), "qo_indptr": cp.asarray(ends)}
    modes = {"window": window, "batch_invariant": True}
    if plan:
        bounds = lengths["qo_indptr"]
        made = cumla.AttentionPlan.from_arrays(q, k, v, qo_indptr=bounds, **modes, **plan)
        made.update(**lengths)
        found = made.run(q, k, v, block_table=table)
    else:
        found = cumla.attention(q, k, v, **lengths, block_table=table, **modes)
    check_one_set_of_bits(rows, map(bits_of, found))
