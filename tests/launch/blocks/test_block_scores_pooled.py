# SPDX-License-Identifier: Apache-2.0
"""block_scores_pooled on the CPU, against loops over keys, and which calls it serves."""

from __future__ import annotations

from math import inf
from unittest import mock

import pytest

from cumla.launch.blocks import block_scores_pooled, choice
from tests.blocks.score_cases import pooled_case
from tests.launch.blocks.emulated import bits_of_sums
from tests.selection import some


@pytest.mark.parametrize("seed", some(list(range(60)), 8))
def test_scores(seed: int) -> None:
    bits_of_sums(pooled_case(seed))


@pytest.mark.parametrize("seed", [5, 12, 28])
def test_units(seed: int) -> None:
    """The bits do not depend on how many keys a thread block takes."""
    case = pooled_case(seed)
    assert len({bits_of_sums(case, pooled=((inf, units),)) for units in (1, 2, 3, 1000)}) == 1


@pytest.mark.parametrize(
    ("shape", "groups", "rows", "lists", "is_served"),
    [
        ((3, 2, 4), 1, 1, False, True),
        ((3, 2, 4), 4, 1, False, True),
        ((3, 3, 4), 1, 1, False, False),  # more than 8 query rows
        ((3, 1, 6), 2, 1, False, False),  # a group of three heads
        ((3, 2, 4), 1, 16, False, False),  # blocks of many keys
        ((3, 2, 4), 1, 1, True, False),
        ((1025, 1, 1), 1, 1, False, True),
        ((1 << 25, 1, 1), 1, 1, False, False),  # more scores than a number of 32 bits counts
        ((12, 4), 1, 1, False, False),  # query tokens of requests are not known
    ],
)
def test_calls(
    shape: tuple[int, ...], groups: int, rows: int, lists: bool, is_served: bool
) -> None:
    q = mock.Mock(shape=(*shape, 128), dtype="bfloat16")
    arguments = mock.Mock(q=q, groups=groups, block_rows=rows, width=90)
    arguments.entries = q if lists else None
    assert block_scores_pooled.has_few_pooled(arguments) is is_served
    q.shape = (*shape, 64)
    assert not block_scores_pooled.has_few_pooled(arguments)


@pytest.mark.parametrize(("units", "each"), [(1, 1), (1056, 1), (1057, 2), (8193, 4)])
def test_units_of_a_thread_block(units: int, each: int) -> None:
    assert choice.pooled_units(units) == each
