# SPDX-License-Identifier: Apache-2.0
"""`cumla.reference.top_k` against one sort, and its indices against loops."""

from __future__ import annotations

import numpy as np
import pytest

from cumla import reference
from tests.sparse.top_k_cases import DTYPES, KINDS, expected, same_bits, scores_of, values_at


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str, dtype: str, is_sorted: bool) -> None:
    scores = scores_of(kind, 5, 300, dtype)
    starts, lengths = (
        np.array([0, 3, 50, 300, 0], np.int32),
        np.array([300, 297, 64, 0, 2], np.int32),
    )
    for k in (1, 63, 64, 65, 299, 300):
        want = expected(scores, k, lengths, starts, is_sorted)
        result = reference.top_k(
            scores, k, row_lens=lengths, row_starts=starts, values=True, sorted=is_sorted
        )
        np.testing.assert_array_equal(result.indices, want)
        np.testing.assert_array_equal(result.counts, np.minimum(lengths, k))
        shifted = np.where(want < 0, -1, want + starts[:, None])
        assert same_bits(result.values, values_at(scores, shifted))
        assert result.positions is None


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_slots(page_size: int) -> None:
    """Of any request, page number and offset; what has no slot is -1 in its place."""
    rng = np.random.default_rng(0)
    scores = scores_of("normal", 6, 100)
    table = rng.integers(-1, 9, (3, 90 // page_size)).astype(np.int32)
    table[2, -1] = 2**31 - 1
    requests = np.array([0, 1, 2, -1, 3, 2], np.int32)
    offsets = np.array([0, 5, -50, 0, 0, 2**31 - 1], np.int32)
    positions = np.empty((6, 40), np.int32)
    result = reference.top_k(
        scores,
        40,
        block_table=table,
        page_size=page_size,
        row_to_request=requests,
        offsets=offsets,
        out_positions=positions,
    )
    np.testing.assert_array_equal(positions, expected(scores, 40))
    for row, slot in np.ndindex(6, 40):
        place, request = int(positions[row, slot]) + int(offsets[row]), requests[row]
        page, want = place // page_size, -1
        if 0 <= request < 3 and 0 <= page < table.shape[1] and table[request, page] >= 0:
            want = int(table[request, page]) * page_size + place % page_size
        assert result.indices[row, slot] == (want if want < 2**31 else -1)


def test_lengths_and_starts_of_any_number() -> None:
    scores = scores_of("normal", 6, 10)
    lengths = np.array([-(2**31), -1, 11, 2**31 - 1, 4, 10], np.int32)
    starts = np.array([0, 0, 0, 2**31 - 1, -7, 9], np.int32)
    result = reference.top_k(scores, 20, row_lens=lengths, row_starts=starts)
    assert result.counts.tolist() == [0, 0, 10, 0, 4, 1]
    assert [(row >= 0).sum() for row in result.indices] == result.counts.tolist()
