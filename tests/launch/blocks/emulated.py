# SPDX-License-Identifier: Apache-2.0
"""Sums of scores by kernels that the CPU runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import cumla
from cumla.blocks import scores
from cumla.launch.blocks import choice
from tests.blocks.score_cases import Scores, check_sums
from tests.emulator import emulated_gpu


def bits_of_sums(case: Scores, **rules: Any) -> bytes:
    """Check a call that block_scores_sums does not serve, with other rules; the result's bits."""
    other = mock.patch.object(
        scores, "block_scores_sums_launch", side_effect=AssertionError("another")
    )
    changed = mock.patch.object(choice, "RULES", replace(choice.RULES, **rules))
    with emulated_gpu() as cupy, changed, other:
        there = {name: cupy.like(value) for name, value in case.given.items()}
        got = np.array(cumla.block_scores(**there))
    check_sums(case, got)
    return got.tobytes()
