# SPDX-License-Identifier: Apache-2.0
"""block_scores_prompts on the CPU, against loops over keys, and which calls it serves."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.blocks import scores
from cumla.launch.blocks import block_scores_prompts, choice
from cumla.launch.blocks.block_scores_sums import BlockScoresSumsArguments
from tests.blocks.score_cases import check_sums, prompts_case
from tests.emulator import emulated_gpu


@pytest.mark.parametrize("seed", [14, 21, 82])
def test_ranges(seed: int) -> None:
    """The bits do not depend on the keys of a thread block."""
    case, found = prompts_case(seed), set()
    for least in (1, 3, 1000):
        rules = replace(choice.RULES, prompts_least=least)
        with (
            emulated_gpu() as cupy,
            mock.patch.object(choice, "RULES", rules),
            mock.patch.object(
                scores, "block_scores_sums_launch", side_effect=AssertionError("another")
            ),
        ):
            there = {name: cupy.like(value) for name, value in case.given.items()}
            got = np.array(cumla.block_scores(**there))
        check_sums(case, got)
        found.add(got.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("shape", "groups", "rows", "lists", "is_served"),
    [
        ((64, 4, 128), 1, 1, False, True),
        ((16, 16, 128), 4, 1, False, True),
        ((1, 64, 4, 128), 1, 1, False, True),
        ((1, 4, 128), 1, 1, False, True),
        ((64, 3, 128), 1, 1, False, False),  # three heads of a group
        ((64, 4, 64), 1, 1, False, False),
        ((64, 4, 128), 1, 16, False, False),  # blocks of many keys
        ((64, 4, 128), 1, 1, True, False),
    ],
)
def test_calls(
    shape: tuple[int, ...], groups: int, rows: int, lists: bool, is_served: bool
) -> None:
    q = mock.Mock(shape=shape)
    arguments = BlockScoresSumsArguments(
        q=q,
        keys=mock.Mock(),
        block_table=mock.Mock(shape=(1, 2)),
        block_rows=rows,
        stride=4,
        groups=groups,
        weights=None,
        is_relu=True,
        entries=q if lists else None,
        causal=True,
    )
    assert block_scores_prompts.has_prompts(arguments) is is_served


@pytest.mark.parametrize(
    ("steps", "tiles", "each"),
    [(256, 32, 32), (32, 128, 16), (3, 1, 8), (256, 1000, 64), (4096, 32, 64)],
)
def test_steps(steps: int, tiles: int, each: int) -> None:
    """One turn of all thread blocks, of eight to 64 steps."""
    assert choice.prompts_steps(steps, tiles, 264) == each
