# SPDX-License-Identifier: Apache-2.0
"""Attention to short lists in one launch: by clusters of all sizes, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.launch.blocks import key as keys
from cumla.launch.blocks.choice import ListForm
from cumla.launch.blocks.key import BlockKey
from tests.blocks.block_cases import check, make, samples
from tests.emulator import emulated_gpu
from tests.selection import some

LISTS = [
    sample
    for columns in ((128, 128), (96, 112), (80, 128))
    for sample in samples(40, columns=columns, invariant=False)
    if sample.block[0] % 32 == 0 and sample.heads[0] // sample.heads[1] <= 16
]


def key(tokens: int, kv_heads: int = 1, heads: int = 16, topk: int = 16, **more: Any) -> BlockKey:
    sizes = {"block_size": 128, "columns": (128, 128), "dtypes": ("bfloat16",) * 2} | more
    named = {name: sizes.pop(name) for name in ("columns", "block_size", "dtypes")}
    given = {"sm_count": 132, "device": 0, "requests": tokens, "query_len": 1} | sizes
    return BlockKey.of(tokens, kv_heads, heads, **named, topk=topk, **given)


def run(sample: Any, sms: int) -> None:
    problem = make(sample)
    with emulated_gpu(sms) as cupy:
        there = {name: cupy.like(value) for name, value in problem.given.items()}
        got = cumla.block_sparse_attention(**there)
    check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)


@pytest.mark.parametrize("sample", some(LISTS, 6), ids=str)
def test_lists(sample: Any) -> None:
    """By thread blocks of their own, and by clusters."""
    run(sample, 2)
    run(replace(sample, lens=sample.lens[:2]), 132)


@pytest.mark.parametrize("topk", [33, 96, 128])
def test_long_lists(topk: int) -> None:
    """Of more entries than a warp has lanes, in any order, some of them twice."""
    fixed: dict[str, Any] = {"columns": (128, 128), "invariant": False, "lists": "hostile"}
    (sample,) = samples(1, block=(64, 2), topk=topk, heads=(16, 1), lens=(2300, 700), **fixed)
    run(sample, 132)


OF_ROWS: dict[str, Any] = {"cache": "e4m3", "scales": "rows", "lists": "hostile"}


@pytest.mark.parametrize(("warps", "ctas"), [(8, 3), (4, 1), (2, 1)])
@pytest.mark.parametrize("heads", [(16, 1), (6, 2)])
def test_factors_of_rows(heads: tuple[int, int], warps: int, ctas: int) -> None:
    """Of very unlike sizes; those of rows that no query sees are NaN."""
    (sample,) = samples(
        1, block=(64, 2), columns=(128, 128), heads=heads, lens=(900, 33), **OF_ROWS
    )
    with mock.patch.object(keys, "list_form", return_value=ListForm(warps, ctas, 1)):
        run(replace(sample, invariant=False), 132)


@pytest.mark.parametrize("form", [{"queries": "prompts"}, {"topk": 96}, {"invariant": True}])
def test_factors_of_rows_of_other_calls(form: dict[str, Any]) -> None:
    """Each token of a prompt has its list; long ones; splits that do not depend on the batch."""
    given = OF_ROWS | {"block": (32, 1), "columns": (96, 112), "heads": (12, 2), "lens": (700, 1)}
    for sample in samples(2, **given | form):
        run(sample, 3)


def test_heads_that_are_not_evenly_spaced() -> None:
    """One launch serves all kv heads, wherever their rows and factors lie."""
    fixed: dict[str, Any] = {"columns": (128, 128), "invariant": False, "cache": "e4m3"}
    (sample,) = samples(
        1, block=(64, 1), heads=(6, 2), queries=2, lens=(140, 33), scales="heads", sinks=True,
        outputs="given", lists="random", **fixed,
    )  # fmt: skip
    problem = make(sample)
    given = dict(problem.given)
    for name in ("q", "out", "lse"):
        batch, tokens, heads, *columns = given[name].shape
        wide = np.zeros((batch, tokens + 1, heads + 1, *columns), given[name].dtype)
        given[name] = wide[:, :tokens, :heads]
        given[name][...] = problem.given[name]
    with emulated_gpu(3) as cupy:
        there = {name: cupy.like(value) for name, value in given.items()}
        got = cumla.block_sparse_attention(**there)
        check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)


def test_which_lists() -> None:
    """Of few blocks, of 65 to 128 columns, for up to 16 heads of a kv head."""
    assert key(64).is_direct
    assert key(64, topk=128).is_direct
    assert key(64, batch_invariant=True).is_direct
    assert not key(64, topk=129).is_direct
    assert not key(64, heads=17).is_direct
    assert not key(64, block_size=16).is_direct
    assert not key(64, columns=(192, 128)).is_direct


def test_prompts() -> None:
    """Row tiles read less; e4m3 blocks are widened for them."""
    prompt: dict[str, Any] = {"requests": 1, "query_len": 8192}
    assert not key(8192, 4, **prompt).is_direct
    of_e4m3 = key(8192, 4, **prompt, dtypes=("bfloat16", "float8_e4m3fn"))
    assert not of_e4m3.is_direct
    assert of_e4m3.tile and of_e4m3.tile.widened * 128 >= 4 * 8192


def test_forms() -> None:
    """As many thread blocks as multiprocessors, but fewer of clusters that need room."""
    tokens = (9, 12, 13, 16, 17, 25, 26, 34, 35, 66, 67, 165, 166, 1000)
    forms = [key(n).list_form[:2] for n in tokens]
    of_lists = [(8, 8), (4, 8), (4, 4), (8, 3), (4, 2), (4, 1), (2, 1)]  # warps, thread blocks
    assert forms == [form for form in of_lists for _ in range(2)]
    assert {key(n, topk=1).list_form[:2] for n in (9, 34, 66)} == {(4, 2)}
    assert [key(n, topk=48).list_form[:2] for n in (25, 26, 33, 34)] == [
        (4, 4),
        (4, 6),
        (4, 6),
        (8, 3),
    ]
    assert {key(n, batch_invariant=True).list_form[:2] for n in tokens} == {(4, 2)}


@pytest.mark.parametrize(("warps", "ctas"), [(8, 3), (8, 8), (4, 7)])
@pytest.mark.parametrize("sample", some(LISTS, 2), ids=str)
def test_clusters(sample: Any, warps: int, ctas: int) -> None:
    """Of any size, and of eight warps, of which some have nothing to do."""
    form = ListForm(warps, ctas, 1)
    with mock.patch.object(keys, "list_form", return_value=form):
        run(replace(sample, lens=sample.lens[:2]), 132)


@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_two_warps(cache: str) -> None:
    """A thread block whose warps have every second chunk."""
    fixed: dict[str, Any] = {"columns": (128, 128), "invariant": False, "cache": cache}
    for sample in samples(2, block=(64, 2), heads=(32, 4), topk=17, lens=(2300, 70), **fixed):
        run(sample, 1)


def test_batch_invariance() -> None:
    """A token has the same bits with others and alone."""
    sizes: dict[str, Any] = {"block": (64, 2), "columns": (128, 128), "heads": (16, 2)}
    fixed = {"queries": 1, "lens": (2300, 90, 700), "scales": "none", "counts": None}
    (sample,) = samples(1, invariant=True, outputs="new", sinks=False, topk=17, **sizes, **fixed)
    given = make(sample).given
    with emulated_gpu(132) as cupy:
        got = []
        for requests in (slice(None), slice(2, 3)):
            some_of = dict(given)
            for name in ("q", "block_indices", "kv_lens", "block_table"):
                some_of[name] = given[name][requests]
            there = {name: cupy.like(value) for name, value in some_of.items()}
            got.append(np.array(cumla.block_sparse_attention(**there).out))
    assert got[0][2:].tobytes() == got[1].tobytes()
