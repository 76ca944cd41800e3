# SPDX-License-Identifier: Apache-2.0
"""block_scores_each on the CPU, to the bits of block_scores_few, and which calls it serves."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.launch.blocks import block_scores_few, choice
from tests.blocks.score_cases import Scores, check_scores, few_case
from tests.emulator import emulated_gpu
from tests.selection import some


def run(case: Scores, form: str, sm_count: int = 132) -> bytes:
    """Check a call that a kernel serves; the bits of its result."""
    forms = choice.each_forms(case.given["keys"].dtype.itemsize == 1)
    each = tuple(f._replace(blocks=math.inf) for f in forms if form == f.tag)
    rules = replace(choice.RULES, each=each, each_e4m3=each, each_keys=16)
    made = block_scores_few.launch_of
    with (
        emulated_gpu() as cupy,
        mock.patch.object(choice, "RULES", rules),
        mock.patch.object(block_scores_few, "sm_count_of", return_value=sm_count),
        mock.patch.object(block_scores_few, "launch_of", side_effect=made) as launched,
    ):
        there = {name: cupy.like(value) for name, value in case.given.items()}
        got = np.array(cumla.block_scores(**there))
    entry = launched.call_args.args[0].entry
    assert entry.startswith("block_scores_few") if not each else entry.endswith(f"_{form}")
    check_scores(case, got)
    return got.tobytes()


@pytest.mark.parametrize("seed", some(list(range(40)), 8))
def test_scores(seed: int) -> None:
    """Of all forms, to the bits of block_scores_few; few thread blocks have many blocks each."""
    case = few_case(seed)
    few = run(case, "few")
    for form in ("4", "8"):
        assert run(case, form) == few
    for sm_count in (1, 132):
        assert run(case, "shares", sm_count) == few


@pytest.mark.parametrize(
    ("is_e4m3", "blocks", "form"),
    [
        *((False, 1, "8"), (False, 132, "8"), (False, 133, "shares"), (True, 132, "8")),
        *((True, 133, "4"), (True, 1056, "4"), (True, 1057, "shares")),
    ],
)
def test_forms(is_e4m3: bool, blocks: int, form: str) -> None:
    each = choice.each_form(is_e4m3, blocks, 128, 132)
    assert each is not None
    assert each.tag == form
    assert choice.each_form(is_e4m3, blocks, 112, 132) is None
