# SPDX-License-Identifier: Apache-2.0
"""mask_rows on the CPU: every builder of masks, in all forms of its arrays, and any integers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumla.mha.mask import AttentionMask
from tests.emulator import emulated_gpu
from tests.emulator.fenced import Fenced
from tests.mha.mask_cases import Case, hostile, interval_cases, tree_cases, trees

ROOT = Path(__file__).resolve().parents[3]


def same(one: AttentionMask, other: AttentionMask) -> bool:
    arrays = {name: np.asarray(array) for name, array in one.given.items()}
    return arrays.keys() == other.given.keys() and all(
        arrays[name].tobytes() == array.tobytes() for name, array in other.given.items()
    )


@pytest.mark.parametrize("builder", ["windows", "chunks", "blocks", "causal_flags", "image_spans"])
def test_intervals(builder: str) -> None:
    """As on the CPU, which other tests compare with loops over all keys."""
    cases = [case for case in interval_cases() if case.builder == builder]
    with emulated_gpu() as cupy:
        for case in cases:
            assert same(case.build(cupy.like), case.build()), case


def test_trees() -> None:
    with emulated_gpu() as cupy:
        for case in tree_cases():
            assert same(case.build(cupy.like), case.build()), case


def strided(array: np.ndarray) -> np.ndarray:
    """The same values in every other element of the first axis."""
    return np.repeat(array, 2, axis=0)[::2]


@pytest.mark.parametrize("case", [*interval_cases()[::9], *tree_cases()[::7]], ids=repr)
def test_arrays_with_gaps(case: Case) -> None:
    """Flat masks of trees have none."""
    given = {
        name: strided(value)
        if isinstance(value, np.ndarray) and not case.given.get("full")
        else value
        for name, value in case.given.items()
    }
    places = {
        name: strided(value) if isinstance(value, np.ndarray) else value
        for name, value in case.batch.places.items()
    }
    with emulated_gpu() as cupy:
        got = case._replace(given=given).build(
            cupy.like, **{n: cupy.like(v) for n, v in places.items()}
        )
        assert same(got, case.build())


def test_equal_queries_and_given_arrays() -> None:
    """No offsets; what is written is what came, of more words than the drafts need."""
    tree, lens = trees(3, 5), np.array([9, 5, 70], np.int32)
    with emulated_gpu() as cupy:
        out = AttentionMask(
            start=cupy.zeros(15, np.int32), tree=cupy.zeros((15, 3), np.int32), end=object()
        )
        there: dict[str, Any] = {"kv_lens": cupy.asarray(lens), "window": 3, "out": out}
        assert AttentionMask.from_tree(cupy.asarray(tree), **there) is out
        expected = AttentionMask.from_tree(tree, kv_lens=lens, window=3)
        assert (out.start == expected.start).all()
        assert (out.tree[:, :1].view(np.uint32) == expected.tree).all()
        assert not out.tree[:, 1:].any()
        few = AttentionMask(tree=cupy.zeros((2, 1), np.uint32))
        one = np.ones((1, 40, 40), bool)  # of which one word has 32
        AttentionMask.from_tree(cupy.asarray(one), q_len=2, kv_lens=there["kv_lens"][:1], out=few)
        assert few.tree.tolist() == [[3], [3]]


def test_nothing_to_build() -> None:
    with emulated_gpu() as cupy:
        lens, bounds = cupy.zeros(0, np.int32), cupy.zeros(1, np.int32)
        for places in ({"q_len": 3}, {"qo_indptr": bounds, "total_tokens": 0}):
            assert AttentionMask.blocks(4, kv_lens=lens, **places).end.shape == (0,)
        rows = AttentionMask.blocks(4, kv_lens=lens, qo_indptr=bounds, total_tokens=3)
        assert (rows.start.tolist(), rows.end.tolist()) == ([0] * 3, [-1] * 3)


def run_hostile() -> None:
    """Run calls whose integers mean nothing; a touch of what is no array's ends the process."""
    with emulated_gpu(always=True) as cupy:
        for seed in range(160):
            builder, given, is_ordered = hostile(seed)
            fenced = Fenced(at_end=seed % 20 < 10)
            there = {
                name: fenced.copy(value).view(cupy.ndarray) if hasattr(value, "shape") else value
                for name, value in given.items()
            }
            got = getattr(AttentionMask, builder)(**there)
            expected = getattr(AttentionMask, builder)(**given)
            assert not is_ordered or same(got, expected), (builder, seed)


def test_integers_that_mean_nothing() -> None:
    """In a process of its own, between pages that must not be touched."""
    code = "from tests.launch.mha import test_mask_rows as tests; tests.run_hostile()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
