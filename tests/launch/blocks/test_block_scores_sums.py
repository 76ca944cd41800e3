# SPDX-License-Identifier: Apache-2.0
"""The kernel of block_scores for sums over heads on the CPU, against loops over blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cumla
from tests.blocks.score_cases import Scores, check_sums, prompts_case, sums_case
from tests.emulator import emulated_gpu
from tests.selection import some


@pytest.mark.parametrize("draw", [sums_case, prompts_case])
@pytest.mark.parametrize("seed", some(list(range(60)), 6))
def test_sums(seed: int, draw: Callable[[int], Scores]) -> None:
    case = draw(seed)
    with emulated_gpu() as cupy:
        there = {name: cupy.like(value) for name, value in case.given.items()}
        check_sums(case, np.array(cumla.block_scores(**there)))
