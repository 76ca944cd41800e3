# SPDX-License-Identifier: Apache-2.0
"""The kernel of block_scores on the CPU, against a loop over blocks."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from tests.blocks.score_cases import check_scores, scores_case
from tests.emulator import emulated_gpu
from tests.selection import some


@pytest.mark.parametrize("seed", some(list(range(40)), 6))
def test_scores(seed: int) -> None:
    case = scores_case(seed)
    with emulated_gpu() as cupy:
        there = {name: cupy.like(value) for name, value in case.given.items()}
        check_scores(case, np.array(cumla.block_scores(**there)))
