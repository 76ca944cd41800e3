# SPDX-License-Identifier: Apache-2.0
"""Row tiles of several query tokens: places, united lists, and attention to them, emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.blocks import attention
from cumla.launch.blocks.block_lists import virtual_pages
from cumla.mha.arguments import swapped
from tests.blocks.block_cases import check, make, prompts
from tests.emulator import emulated_gpu
from tests.launch.blocks.block_tiles_mirror import united
from tests.launch.blocks.test_block_lists import view_of
from tests.selection import some

FIXED = ("block_size", "causal", "batch_invariant")
SHAPED = ("q", "k", "v", "block_indices", "kv_layout")
TILED = [sample for sample in prompts(60) if not sample.widens]


def plan_of(cupy: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Make a plan; what its update takes, and what its run."""
    there = {n: cupy.like(v) for n, v in given.items()}
    fixed = {n: there.pop(n) for n in FIXED if n in there}
    lengths = {n: there.pop(n) for n in ("kv_lens", "qo_indptr") if n in there}
    shaped = {n: there[n] for n in SHAPED} | {n: v for n, v in lengths.items() if n != "kv_lens"}
    return cumla.BlockSparsePlan.from_arrays(**shaped, **fixed), lengths, there


def planned(cupy: Any, given: dict[str, Any]) -> Any:
    """Run a plan, and return it."""
    plan, lengths, there = plan_of(cupy, given)
    plan.update(**lengths)
    plan.run(**there)
    return plan


@pytest.mark.parametrize("cache", ["e4m3", "same"])
def test_which_prompts(cache: str) -> None:
    """Blocks of e4m3 lists that block_attention serves are widened, on the GPU tests' prompts."""
    of_cache = [sample for sample in prompts(120) if sample.has_e4m3 == (cache == "e4m3")]
    assert {sample.widens for sample in of_cache} == {False, cache == "e4m3"}
    for sample in of_cache:
        with emulated_gpu(1 + sample.seed % 2) as cupy:
            key = plan_of(cupy, make(sample).given)[0].key
        assert key.tile and not key.is_direct, str(sample)
        assert (key.tile.widened > 0) == sample.widens, str(sample)


@pytest.mark.parametrize("sample", some(TILED, 8), ids=str)
def test_united_lists(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has a tile, which has the blocks of its tokens, and what each of them sees."""
    launches = attention.block_sparse_launches
    monkeypatch.setattr(attention, "block_sparse_launches", lambda *of: launches(*of)[:1])
    problem = make(sample)
    with emulated_gpu(2) as cupy:
        plan = planned(cupy, problem.given)
        buffer = np.asarray(plan._memory.owner)
    tile, at = plan.key.tile, plan.key.schedule_at(0)
    count = int(buffer[tile.count_at(at) : tile.count_at(at) + 4].view(np.int32)[0])
    begin = tile.layout.schedule_at(at)[0]
    found = buffer[begin : begin + 32 * count].view(np.int32).reshape(-1, 8)
    heads, block = sample.heads[1], sample.block[0]
    views = [view_of(problem.given[n]) for n in "kv"]
    if problem.given["kv_layout"] == "HND":
        views = [swapped(view) for view in views]
    one = [view._replace(shape=(*view.shape[:2], 1, view.shape[3])) for view in views]
    numbering = virtual_pages(one[0], one[1], block)
    assert numbering is not None
    steps = numbering.steps

    def part(begin: int, dtype: Any, *shape: int) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return buffer[begin : begin + size].view(dtype).reshape(shape)

    most, units = tile.most_blocks, tile.units
    pages = part(tile.pages_at(at), np.int32, tile.num_places, heads, most)
    seen = part(tile.seen_at(at), np.uint8, tile.num_places, heads, most * units, 16)
    numbers = part(tile.units_at(at), np.int32, tile.num_places, heads)
    tokens = np.concatenate([np.arange(begin, begin + n) for n, begin in found[:, 2:4]])
    np.testing.assert_array_equal(tokens, np.arange(len(problem.seen)))
    for place, (n, begin) in enumerate(found[:, 2:4]):
        of_tile = problem.seen[begin : begin + n]
        assert len({request for ((request, _), *_) in of_tile}) == 1
        for head in range(heads):
            lists = [of_heads[head][1] for of_heads in of_tile]
            request = of_tile[0][head][0]
            blocks, counts = united(lists, block)
            assert numbers[place, head] == len(blocks) * units
            if not len(blocks):
                continue
            page = problem.given["block_table"][request, blocks // sample.block[1]].astype(np.int64)
            want = page * steps[0] + blocks % sample.block[1] * steps[1]
            np.testing.assert_array_equal(pages[place, head, : len(blocks)], want)
            got = seen[place, head, : len(counts), : len(lists)]
            np.testing.assert_array_equal(got, counts)


@pytest.mark.parametrize("sample", some(prompts(60), 10), ids=str)
def test_prompts(sample: Any) -> None:
    problem = make(sample)
    with emulated_gpu(2) as cupy:
        given = {n: cupy.like(v) for n, v in problem.given.items()}
        check(problem, cumla.block_sparse_attention(**given), sample.dtype)
