# SPDX-License-Identifier: Apache-2.0
"""Tokens of one request that are computed with others: whether each has the same bits in any call.

A placement (last, count) is a request that computes the `count` last of the first `last` tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

COUNTS = (1, 2, 3, 8)
Placements = list[tuple[int, int]]


def around(begin: int, tokens: int = 8) -> Placements:
    """Every placement of 1, 2, 3 or 8 tokens that has one of `tokens` tokens from `begin` on."""
    return [
        (last, count)
        for count in COUNTS
        for last in range(max(begin + 1, count), begin + tokens + count)
    ]


def rows_of(placements: Placements) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tell the rows of q, as numbers of tokens, and qo_indptr and kv_lens of a call of all."""
    rows = [np.arange(last - count, last) for last, count in placements]
    ends = np.cumsum([0, *(count for _, count in placements)]).astype(np.int32)
    return np.concatenate(rows), ends, np.array([last for last, _ in placements], np.int32)


def check_one_set_of_bits(rows: np.ndarray, results: Iterable[Any]) -> None:
    """Check that equal rows have equal results: arrays of bits, a row of q for each first index."""
    for result in results:
        flat = np.ascontiguousarray(result.get().reshape(len(rows), -1))
        found = defaultdict(set)
        for token, row in zip(rows.tolist(), flat, strict=True):
            found[token].add(row.tobytes())
        several = {token: len(bits) for token, bits in found.items() if len(bits) > 1}
        assert not several, f"sets of bits of tokens: {several}"


def check_random_batches(name: str) -> None:
    """Check that each request of a row of `bench.invariance`, which places more, has its bits."""
    pytest.importorskip("torch")
    from bench.invariance import ROWS, placed

    (row,) = [row for row in ROWS if row.name == name]
    assert placed(row, 300)["several"] == []
