# SPDX-License-Identifier: Apache-2.0
"""`cumla.block_scores` and `cumla.select_blocks` on the CPU, against loops over blocks."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from tests.blocks.score_cases import (
    check_scores,
    check_sums,
    chosen,
    scores_case,
    select_case,
    sums_case,
)


@pytest.mark.parametrize("seed", range(60))
def test_scores(seed: int) -> None:
    case = scores_case(seed)
    check_scores(case, cumla.block_scores(**case.given))


@pytest.mark.parametrize("seed", range(90))
def test_sums(seed: int) -> None:
    case = sums_case(seed)
    check_sums(case, cumla.block_scores(**case.given))


@pytest.mark.parametrize("seed", range(120))
def test_selection(seed: int) -> None:
    given = select_case(seed)
    np.testing.assert_array_equal(cumla.select_blocks(**given), chosen(given))
