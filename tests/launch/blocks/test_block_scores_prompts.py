# SPDX-License-Identifier: Apache-2.0
"""block_scores_prompts on the CPU, against loops over keys, and which calls it serves."""

from __future__ import annotations

from unittest import mock

import pytest

from cumla.launch.blocks import block_scores_prompts, choice
from cumla.launch.blocks.block_scores_sums import BlockScoresSumsArguments
from tests.blocks.score_cases import prompts_case
from tests.launch.blocks.emulated import bits_of_sums


@pytest.mark.parametrize("seed", [14, 21, 82])
def test_ranges(seed: int) -> None:
    """The bits do not depend on the keys of a thread block."""
    case = prompts_case(seed)
    assert len({bits_of_sums(case, prompts_least=least) for least in (1, 3, 1000)}) == 1


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
