# SPDX-License-Identifier: Apache-2.0
"""block_scores_each on the CPU, to the bits of block_scores_few, and which calls it serves."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.launch.blocks import block_scores_few, choice
from tests.blocks.score_cases import Scores, check_scores, few_case
from tests.emulator import emulated_gpu
from tests.selection import some


def run(case: Scores, each_blocks: int, entry: str) -> bytes:
    """Check a call that this kernel serves; the bits of its result."""
    rules = replace(choice.RULES, each_keys=16, each_blocks=each_blocks)
    made = block_scores_few.launch_of
    with (
        emulated_gpu() as cupy,
        mock.patch.object(choice, "RULES", rules),
        mock.patch.object(block_scores_few, "launch_of", side_effect=made) as launched,
    ):
        there = {name: cupy.like(value) for name, value in case.given.items()}
        got = np.array(cumla.block_scores(**there))
    assert launched.call_args.args[0].entry.startswith(entry)
    check_scores(case, got)
    return got.tobytes()


@pytest.mark.parametrize("seed", some(list(range(40)), 8))
def test_scores(seed: int) -> None:
    case = few_case(seed)
    each = run(case, 1 << 20, "block_scores_each")
    assert each == run(case, 0, "block_scores_few")


@pytest.mark.parametrize(
    ("blocks", "block_size", "is_each"),
    [(1, 128, True), (132, 128, True), (133, 128, False), (64, 112, False)],
)
def test_calls(blocks: int, block_size: int, is_each: bool) -> None:
    assert choice.has_each(blocks, block_size, 132) is is_each
