# SPDX-License-Identifier: Apache-2.0
"""The launches of select_blocks on the CPU, against a loop over blocks."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from tests.blocks.score_cases import chosen, select_case
from tests.emulator import emulated_gpu
from tests.selection import some

SEEDS = [seed for seed in range(60) if select_case(seed)["scores"].size < 100_000]


@pytest.mark.parametrize("seed", some(SEEDS, 10))
def test_selection(seed: int) -> None:
    given = select_case(seed)
    with emulated_gpu() as cupy:
        got = cumla.select_blocks(**{name: cupy.like(value) for name, value in given.items()})
    np.testing.assert_array_equal(np.array(got), chosen(given))
