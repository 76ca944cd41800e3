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


def run(case: Scores, form: str) -> bytes:
    """Check a call that a kernel serves; the bits of its result."""
    forms = choice.each_forms(case.given["keys"].dtype.itemsize == 1)
    each = tuple(f._replace(blocks=1 << 20) for f in forms if form == str(f.warps))
    rules = replace(choice.RULES, each=each, each_e4m3=each, each_keys=16)
    made = block_scores_few.launch_of
    with (
        emulated_gpu() as cupy,
        mock.patch.object(choice, "RULES", rules),
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
    """Of both forms, to the bits of block_scores_few; 16-bit keys have the first alone."""
    case = few_case(seed)
    few = run(case, "few")
    for form in choice.each_forms(case.given["keys"].dtype.itemsize == 1):
        assert run(case, str(form.warps)) == few


@pytest.mark.parametrize(
    ("is_e4m3", "blocks", "warps"),
    [
        *((False, 1, 8), (False, 132, 8), (False, 133, None)),
        *((True, 132, 8), (True, 133, 4), (True, 1056, 4), (True, 1057, None)),
    ],
)
def test_forms(is_e4m3: bool, blocks: int, warps: int | None) -> None:
    each = choice.each_form(is_e4m3, blocks, 128, 132)
    assert (each and each.warps) == warps
    assert choice.each_form(is_e4m3, blocks, 112, 132) is None
