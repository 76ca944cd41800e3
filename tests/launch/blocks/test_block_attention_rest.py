# SPDX-License-Identifier: Apache-2.0
"""Prompts over e4m3 blocks, emulated: row tiles, and lists by themselves of those that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cumla
from tests.blocks.block_cases import Sample, check, make
from tests.emulator import emulated_gpu
from tests.launch.blocks.test_block_tiles import plan_of
from tests.launch.blocks.test_widen_blocks import WIDENED, _keys_of_now, ruled
from tests.selection import some

RULES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "all tiles": {"widened_tokens": 100, "left": (0, 1)},
    "no tile": {"left": (1000, 1)},
}
__all__ = ["_keys_of_now"]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("sample", some(WIDENED, 6), ids=str)
def test_prompts(sample: Sample, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left; the bits repeat, in any order of the lists."""
    ruled(monkeypatch, **RULES[rules])
    problem, found = make(sample), []
    rng = np.random.default_rng(0)
    lists = problem.given["block_indices"]
    for given in ({}, {"block_indices": rng.permuted(lists, axis=-1)}):
        if given and sample.counts is not None:
            continue  # other entries count then
        with emulated_gpu(2) as cupy:
            assert plan_of(cupy, problem.given)[0].key.tile.widened
            there = {n: cupy.like(v) for n, v in (problem.given | given).items()}
            got = cumla.AttentionState(*map(np.array, cumla.block_sparse_attention(**there)))
        check(problem, got, sample.dtype)
        found.append(got.out.tobytes() + got.lse.tobytes())
    assert len({*found}) == 1


@pytest.mark.parametrize(
    "lens", [(300,), (320,), (321,), (370,), (400,), (1000, 40), (40, 620)], ids=str
)
def test_blocks_past_the_last_slot(lens: tuple[int, ...]) -> None:
    """All tiles of a request are left then, those whose tokens see fewer blocks, too.

    A workspace of the emulator holds NaN before it is written.
    """
    fixed: dict[str, Any] = {
        "queries": 64 // len(lens),
        "lists": "all",
        "topk": 4,
        "counts": None,
        "of": "heads",
    }
    shape: dict[str, Any] = {
        "block": (64, 1),
        "columns": (128, 128),
        "heads": (16, 1),
        "cache": "e4m3",
    }
    sample = replace(WIDENED[0], **fixed, **shape, lens=lens, causal=True, invariant=False)
    problem = make(sample)
    with emulated_gpu(2) as cupy:
        plan, lengths, there = plan_of(cupy, problem.given)
        assert plan.key.tile.widened == 4 + len(lens)
        plan.update(**lengths)
        check(problem, plan.run(**there), sample.dtype)
