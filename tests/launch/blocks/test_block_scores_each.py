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


def run(case: Scores, each_keys: int, entry: str, parts: int = 32, sm_count: int = 132) -> bytes:
    """Check a call that this kernel serves; the bits of its result."""
    rules = replace(choice.RULES, each_keys=each_keys, each_parts=parts)
    made = block_scores_few.launch_of
    with (
        emulated_gpu() as cupy,
        mock.patch.object(choice, "RULES", rules),
        mock.patch.object(block_scores_few, "RULES", rules),
        mock.patch.object(block_scores_few, "sm_count_of", return_value=sm_count),
        mock.patch.object(block_scores_few, "launch_of", side_effect=made) as launched,
    ):
        there = {name: cupy.like(value) for name, value in case.given.items()}
        got = np.array(cumla.block_scores(**there))
    assert launched.call_args.args[0].entry.startswith(entry)
    check_scores(case, got)
    return got.tobytes()


@pytest.mark.parametrize("seed", some(list(range(40)), 8))
def test_scores(seed: int) -> None:
    """With as many blocks of a thread block as there may be, and with one."""
    case = few_case(seed)
    few = run(case, 1 << 20, "block_scores_few")
    for parts, sm_count in ((32, 132), (1, 1), (2, 3)):
        assert run(case, 16, "block_scores_each", parts, sm_count) == few


@pytest.mark.parametrize(
    ("blocks", "width", "form"),
    [(1, 1, (8, 1)), (132, 66, (8, 1)), (133, 133, (4, 1)), (4224, 64, (4, 1)), (4225, 65, (4, 2))],
)
def test_forms(blocks: int, width: int, form: tuple[int, int]) -> None:
    assert choice.each_form(blocks, width, 132) == form


def test_short_blocks_are_not_served() -> None:
    run(few_case(0), few_case(0).given["block_size"] + 1, "block_scores_few")
