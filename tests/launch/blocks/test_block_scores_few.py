# SPDX-License-Identifier: Apache-2.0
"""block_scores_few on the CPU, against a loop over blocks, and which calls it serves."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.blocks import scores
from cumla.launch.blocks import block_scores_few
from tests.blocks.score_cases import Scores, check_scores, few_case
from tests.emulator import emulated_gpu
from tests.selection import some


def run(case: Scores, sm_count: int = 132) -> bytes:
    """Check a call; the bits of its result."""
    with (
        emulated_gpu() as cupy,
        mock.patch.object(block_scores_few, "sm_count_of", return_value=sm_count),
        mock.patch.object(scores, "block_scores_launch", side_effect=AssertionError("another")),
    ):
        there = {name: cupy.like(value) for name, value in case.given.items()}
        got = np.array(cumla.block_scores(**there))
    check_scores(case, got)
    return got.tobytes()


@pytest.mark.parametrize("seed", some(list(range(40)), 8))
def test_scores(seed: int) -> None:
    run(few_case(seed))


@pytest.mark.parametrize("seed", [5, 12, 28])
def test_shares(seed: int) -> None:
    """The bits do not depend on how many warps share the blocks."""
    case = few_case(seed)
    assert len({run(case, sm_count) for sm_count in (1, 3, 132)}) == 1


@pytest.mark.parametrize("seed", [5, 12, 28])
def test_many_blocks(seed: int) -> None:
    """Half of the warps score all blocks, to the same bits."""
    case = few_case(seed)
    few = replace(block_scores_few.RULES, many_blocks=1)
    with mock.patch.object(block_scores_few, "RULES", few):
        by_half = run(case, 1)
    assert by_half == run(case, 1)


@pytest.mark.parametrize(
    ("shape", "columns", "pages", "is_served"),
    [
        ((3, 2, 4), 128, 9, True),
        ((3, 3, 4), 128, 9, False),  # more than 8 query rows
        ((3, 2, 4), 64, 9, False),
        ((1025, 1, 1), 128, 9, False),
        ((12, 4), 128, 9, False),  # query tokens of requests are not known
        ((1000, 1, 1), 128, 1 << 22, False),  # a sum of blocks could pass 32 bits
    ],
)
def test_calls(shape: tuple[int, ...], columns: int, pages: int, is_served: bool) -> None:
    view = mock.Mock(spec=("shape",))
    arguments = mock.Mock(q=view, width=pages)
    view.shape = (*shape, columns)
    assert block_scores_few.has_few_rows(arguments) is is_served
