# SPDX-License-Identifier: Apache-2.0
"""The kernel of block_scores for sums over heads on the CPU, against loops over blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.launch.blocks import block_scores_prompts, block_scores_sums
from tests.blocks.score_cases import Scores, check_sums, prompts_case, sums_case
from tests.emulator import emulated_gpu
from tests.selection import some


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_bits_do_not_depend_on_other_requests(heads: int) -> None:
    """With a prompt beside it, a request is scored by the other form."""
    rng = np.random.default_rng(heads)
    q = rng.standard_normal((64, heads, 128)).astype(np.float16)
    weights = rng.standard_normal((64, heads)).astype(np.float32)
    given: dict[str, Any] = {
        "keys": rng.standard_normal((12, 8, 128)).astype(np.float16),
        "block_size": 4,
        "stride": 4,
        "num_groups": 1,
        "activation": "relu",
    }
    bounds, lens = np.int32([0, 4, 64]), np.int32([170, 190])
    table = np.arange(12, dtype=np.int32).reshape(2, 6)
    found, entries = [], []
    make = block_scores_sums.launch_of

    def spied(spec: Any, *others: Any) -> Any:
        entries.append(spec.entry)
        return make(spec, *others)

    for many in (1, 2):
        tokens = int(bounds[many])
        call = given | {"q": q[:tokens], "weights": weights[:tokens], "kv_lens": lens[:many]}
        call |= {"block_table": table[:many], "qo_indptr": bounds[: many + 1]}
        with (
            emulated_gpu() as cupy,
            mock.patch.object(block_scores_sums, "launch_of", side_effect=spied),
            mock.patch.object(block_scores_prompts, "launch_of", side_effect=spied),
        ):
            there = {name: cupy.like(value) for name, value in call.items()}
            found.append(np.array(cumla.block_scores(**there))[:4].tobytes())
    if heads == 4:
        assert entries == [f"block_scores_prompts_{form}float16" for form in ("few_", "")]
    else:
        assert entries == [f"block_scores_sums_{form}float16_128" for form in ("", "prompts_")]
    assert found[0] == found[1]


@pytest.mark.parametrize("draw", [sums_case, prompts_case])
@pytest.mark.parametrize("seed", some(list(range(60)), 6))
def test_sums(seed: int, draw: Callable[[int], Scores]) -> None:
    case = draw(seed)
    with emulated_gpu() as cupy:
        there = {name: cupy.like(value) for name, value in case.given.items()}
        check_sums(case, np.array(cumla.block_scores(**there)))
