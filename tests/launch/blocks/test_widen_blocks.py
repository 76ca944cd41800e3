# SPDX-License-Identifier: Apache-2.0
"""e4m3 blocks of prompts, emulated: their slots, numbers of 16 bits, and tiles that are left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cumla.blocks import attention
from cumla.launch.blocks import block_tiles, choice
from cumla.launch.blocks import key as keys
from tests.blocks.block_cases import Sample, make, prompts
from tests.emulator import emulated_gpu
from tests.launch.blocks.block_places_mirror import slots
from tests.launch.blocks.block_tiles_mirror import united
from tests.launch.blocks.test_block_tiles import plan_of
from tests.launch.blocks.widen_blocks_mirror import widened
from tests.selection import some

WIDENED = [sample for sample in prompts(140) if sample.widens]


@pytest.fixture(autouse=True)
def _keys_of_now() -> Iterator[None]:
    """Keys are kept, with what follows from the rules."""
    attention._key.cache_clear()
    yield
    attention._key.cache_clear()


def ruled(monkeypatch: pytest.MonkeyPatch, **numbers: Any) -> None:
    for module in (keys, block_tiles):
        monkeypatch.setattr(module, "RULES", replace(choice.RULES, **numbers))


def part(buffer: Any, begin: int, dtype: Any, *shape: int) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def first_launches(monkeypatch: pytest.MonkeyPatch, sample: Sample, number: int) -> Any:
    """Update a plan, and run so many of its launches; the plan, its buffer, and the call."""
    launches = attention.block_sparse_launches
    monkeypatch.setattr(attention, "block_sparse_launches", lambda *of: launches(*of)[:number])
    problem = make(sample)
    with emulated_gpu(2) as cupy:
        plan, lengths, there = plan_of(cupy, problem.given)
        plan.update(**lengths)
        plan.run(**there)
        return plan.key, np.asarray(plan._memory.owner), problem


@pytest.mark.parametrize("tokens", [1, 4, 100])
@pytest.mark.parametrize("sample", some(WIDENED, 4), ids=str)
def test_slots(sample: Sample, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a request has one, if all of them have; each number is that of the cache."""
    ruled(monkeypatch, widened_tokens=tokens)
    key, buffer, problem = first_launches(monkeypatch, sample, 1)
    tile, at, given = key.tile, key.schedule_at(0), problem.given
    rows = part(buffer, key.rows_at(0), np.int32, key.batch, 4)
    requests = rows[:, 0].tolist()
    first, want = slots(requests, rows[:, 1].tolist(), sample.block[0], tile.widened)
    bases = part(buffer, tile.bases_at(at), np.int32, tile.batch)
    assert {request: bases[request] for request in first} == first
    found = part(buffer, tile.slots_at(at), np.int32, tile.widened, 2)
    assert [*map(tuple, found.tolist())] == want
    views = [np.asarray(given[n]).view(keys.E4M3) for n in "kv"]
    if given["kv_layout"] == "HND":
        views = [view.swapaxes(1, 2) for view in views]
    block = sample.block[0]
    for view, begin in zip(views, (tile.keys_at(at), tile.values_at(at)), strict=True):
        shape = tile.widened, sample.heads[1], block, view.shape[3]
        got = part(buffer, begin, given["q"].dtype, *shape)
        numbers = widened(view, given["block_table"], want, block, given["q"].dtype)
        for slot, rows in numbers.items():
            np.testing.assert_array_equal(got[slot].astype(np.float32), rows.astype(np.float32))


@pytest.mark.parametrize("share", [(0, 1), (5, 2), (3, 1), (1000, 1)], ids=str)
@pytest.mark.parametrize("sample", some(WIDENED, 4), ids=str)
def test_what_is_left(
    sample: Sample, share: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles whose lists share little, or whose request has no slots."""
    ruled(monkeypatch, left=share, widened_tokens=6)
    key, buffer, problem = first_launches(monkeypatch, sample, 2)
    tile, at = key.tile, key.schedule_at(0)
    count = part(buffer, tile.count_at(at), np.int32, 1)[0]
    places = part(buffer, tile.layout.schedule_at(at)[0], np.int32, count, 8)
    numbers = part(buffer, tile.units_at(at), np.int32, tile.num_places, sample.heads[1])
    has_tiles, number = part(buffer, tile.counts_at(at), np.int32, 2)
    left = {*part(buffer, tile.left_at(at), np.int32, number).tolist()}
    rows = part(buffer, key.rows_at(0), np.int32, key.batch, 4)
    block = sample.block[0]
    first, _ = slots(rows[:, 0].tolist(), rows[:, 1].tolist(), block, tile.widened)
    assert len(left) == number
    assert has_tiles == (number < count * sample.heads[1])
    for place, ((n, begin), units) in enumerate(zip(places[:, 2:4], numbers, strict=False)):
        request, cached, behind, _ = rows[begin + n - 1]
        blocks = -(-max(cached - behind, 0) // block) if request >= 0 else 0
        has_slots = not blocks or first[request] >= 0
        for head, found in enumerate(units):
            lists = [of_heads[head][1] for of_heads in problem.seen[begin : begin + n]]
            union, _ = united(lists, block)
            listed = sum(len(np.unique(at // block)) for at in lists)
            is_left = not has_slots or len(union) * share[0] > listed * share[1]
            assert (place * len(units) + head in left) == is_left
            assert found == (0 if is_left else len(union) * tile.units)
