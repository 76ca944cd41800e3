# SPDX-License-Identifier: Apache-2.0
"""Lists as pages of virtual requests, the parts into which these are dealt, and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.blocks import attention
from cumla.launch.blocks import key as keys
from cumla.launch.blocks.block_lists import virtual_pages
from cumla.mha.arguments import swapped
from tests.blocks.block_cases import check, make, samples
from tests.emulator import emulated_gpu
from tests.selection import some

BLOCK, PAGE, KV_HEADS = 64, 128, 2


def problem(lens: tuple[int, ...], topk: int, seed: int) -> dict[str, Any]:
    """A query token of each request, whose kv heads have full lists or all that is visible."""
    rng = np.random.default_rng(seed)
    most, batch = -(-max(*lens, 1) // PAGE), len(lens)
    entries = np.full((batch, KV_HEADS, topk), -1, np.int64)
    for request, head in np.ndindex(batch, KV_HEADS):
        visible = rng.permutation(-(-lens[request] // BLOCK))[:topk]
        entries[request, head, : len(visible)] = visible
    cache = rng.standard_normal((2, batch * most, PAGE, KV_HEADS, 64)).astype(np.float16)
    return {
        "q": rng.standard_normal((batch, 1, 4, 64)).astype(np.float16),
        "k": cache[0],
        "v": cache[1],
        "block_indices": entries,
        "block_table": rng.permutation(batch * most).reshape(batch, most).astype(np.int32),
        "kv_lens": np.array(lens, np.int32),
    }


CASES = (
    pytest.param((2000,), 32, 33, False, marks=pytest.mark.exhaustive),  # a list in many parts
    ((2000, 100, 0, 64), 32, 33, False),  # short ones among them, and an empty one
    ((900, 1500, 65), 16, 5, False),  # parts that end within lists
    ((700,) * 5, 8, 4, False),
    ((500,) * 4, 8, 8, False),  # a part for each
    ((640, 1, 2, 3, 0, 0, 640), 10, 3, False),
    ((3000, 10, 1024, 0), 40, 7, True),  # cut every 1,024 tokens
)


@pytest.mark.parametrize(("lens", "topk", "sms", "invariant"), CASES, ids=str)
def test_parts(
    lens: tuple[int, ...], topk: int, sms: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are in one part each; parts agree on who has which piece of a list."""
    launches = attention.block_sparse_launches
    monkeypatch.setattr(attention, "block_sparse_launches", lambda *of: launches(*of)[:1])
    given = problem(lens, topk, sms)
    batch, count = len(lens), len(lens) * KV_HEADS
    with emulated_gpu(sms) as cupy:
        sizes = {"num_kv_heads": KV_HEADS, "batch_invariant": invariant}
        numbers = batch, batch, 4, 64, topk, BLOCK
        nbytes = cumla.BlockSparsePlan.workspace_bytes(*numbers, **sizes, sm_count=sms)
        buffer = cupy.empty(nbytes, np.uint8)
        plan = cumla.BlockSparsePlan(*numbers, **sizes, q_len=1, dtype="float16", workspace=buffer)
        there = {name: cupy.asarray(array) for name, array in given.items()}
        plan.update(there.pop("kv_lens"))
        plan.run(**there)
    key = plan.key
    at = key.pages_at(0)
    pages = buffer[at : at + 4 * count * topk].view(np.int32).reshape(count, topk)
    at = key.schedule_at(0) + key.layout.places
    places = buffer[at : at + 32 * count].view(np.int32).reshape(count, 8)
    at = key.schedule_at(0) + key.layout.parts
    parts = buffer[at : at + 48 * key.parts].view(np.int32).reshape(-1, 12)
    at = key.schedule_at(0) + key.layout.tickets
    assert not buffer[at : at + 16 * key.num_tickets].any()

    steps = virtual_pages(*(view_of(given[n]) for n in "kv"), BLOCK)
    assert steps is not None
    blocks = []
    for index in range(count):
        request, head = divmod(index, KV_HEADS)
        chosen = np.sort(given["block_indices"][request, head])
        chosen = chosen[chosen >= 0]
        page = given["block_table"][request, chosen * BLOCK // PAGE].astype(np.int64)
        numbers_of = (page, chosen % (PAGE // BLOCK), head)
        want = sum(n * step for n, step in zip(numbers_of, steps.steps, strict=True))
        assert (pages[index, : len(chosen)] == want).all()
        seen = np.minimum(BLOCK, lens[request] - chosen * BLOCK).sum()
        assert places[index, :7].tolist() == [seen, 0, 1, index, index, 0, 0]
        blocks.append(-(-int(seen) // 64))
    check_parts(parts, blocks)


ANY_NUMBERS = [
    sample
    for topk in (
        1,
        16,
        32,
        33,
        300,
        1030,
    )  # by a warp, and by four, with more than they load at once
    for sample in samples(14, topk=topk, invariant=False, columns=(64, 64), cache="same")
    if sample.block[0] >= 16
]


@pytest.mark.parametrize("sample", some(ANY_NUMBERS, 12), ids=str)
def test_lists_of_any_numbers(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of each virtual request, and its tokens, as the definition of a list has them."""
    launches = attention.block_sparse_launches
    monkeypatch.setattr(attention, "block_sparse_launches", lambda *of: launches(*of)[:1])
    monkeypatch.setattr(keys, "RULES", replace(keys.RULES, gathered_tokens=0))
    attention._key.cache_clear()
    problem = make(replace(sample, sinks=False))
    given = dict(problem.given)
    heads, (block, in_page) = sample.heads[1], sample.block
    names = ("kv_lens", "qo_indptr", "block_size", "causal", "batch_invariant")
    with emulated_gpu(5) as cupy:
        there = {n: cupy.like(v) for n, v in given.items()}
        fixed = {n: there.pop(n) for n in names if n in there}
        lengths = {n: fixed.pop(n) for n in ("kv_lens", "qo_indptr") if n in fixed}
        shaped = {n: there[n] for n in ("q", "k", "v", "block_indices", "kv_layout")}
        shaped |= {"qo_indptr": lengths["qo_indptr"]} if "qo_indptr" in lengths else {}
        plan = cumla.BlockSparsePlan.from_arrays(**shaped, **fixed)
        plan.update(**lengths)
        plan.run(**there)
        memory = plan._memory
        assert memory is not None
        buffer = np.asarray(memory.owner)
    attention._key.cache_clear()
    key, topk = plan.key, sample.topk
    count = len(problem.seen) * heads
    at = key.pages_at(0)
    pages = buffer[at : at + 4 * count * topk].view(np.int32).reshape(count, topk)
    at = key.schedule_at(0) + key.layout.places
    tokens = buffer[at : at + 32 * count].view(np.int32).reshape(count, 8)[:, 0]
    views = [view_of(given[n]) for n in "kv"]
    if given["kv_layout"] == "HND":
        views = [swapped(view) for view in views]
    numbering = virtual_pages(*views, block)
    assert numbering is not None
    for index in range(count):
        token, head = divmod(index, heads)
        request, seen = problem.seen[token][head]
        blocks = np.unique(seen // block)
        assert tokens[index] == len(seen)
        if not len(blocks):
            continue
        page = given["block_table"][request, blocks // in_page].astype(np.int64)
        parts = zip((page, blocks % in_page, head), numbering.steps, strict=True)
        want = sum(n * step for n, step in parts)
        np.testing.assert_array_equal(pages[index, : len(blocks)], want)


def view_of(array: np.ndarray) -> Any:
    from cumla.core.frameworks import NUMPY

    (view,) = NUMPY.views((("", array),))
    return view


def check_parts(parts: np.ndarray, blocks: list[int]) -> None:
    """Walk over parts as the kernels of attention do."""
    pieces: dict[int, list[tuple[int, int, int, int]]] = {place: [] for place in range(len(blocks))}
    for index, row in enumerate(parts.tolist()):
        place, block, _, _, end_place, end_block, first, last, first_slot, tail_last = row[:10]
        if index + 1 < len(parts) and place < len(blocks):
            following = parts[index + 1, :2].tolist()
            assert [end_place, end_block] == following or following[0] == len(blocks)
        for at in range(place, end_place):
            pieces[at].append((index, block if at == place else 0, blocks[at], at != place))
        if end_block > 0:
            begin = block if end_place == place else 0
            pieces[end_place].append((index, begin, end_block, end_place != place))
        assert first <= index <= last
        if place < len(blocks) and (end_place, end_block) != (place, block):
            own = [i for i, found in enumerate(parts[:, :6].tolist()) if has(found, place)]
            assert (first, last) == (own[0], own[-1])
            assert first_slot == (parts[first, 0] != place)
        if end_block > 0 and end_place != place:
            own = [i for i, found in enumerate(parts[:, :6].tolist()) if has(found, end_place)]
            assert tail_last == own[-1]
    for place, found in pieces.items():
        assert found, place
        assert [index for index, *_ in found] == list(range(found[0][0], found[-1][0] + 1))
        assert [begin for _, begin, *_ in found] == [0, *[end for *_, end, _ in found[:-1]]]
        assert found[-1][2] == blocks[place]
        if len(found) > 1:
            assert all(end > begin for _, begin, end, _ in found)


def has(part: list[int], place: int) -> bool:
    """Return whether a part computes some of a place."""
    begin, block, _, _, end, end_block = part
    if (begin, block) == (end, end_block):
        return False
    return begin <= place < end or (place == end and end_block > 0)


@pytest.mark.parametrize("sample", some(samples(60), 12), ids=str)
def test_attention(sample: Any) -> None:
    """By few multiprocessors, whose parts have several lists."""
    problem = make(sample)
    with emulated_gpu(3 + sample.seed % 4) as cupy:
        there = {name: cupy.like(value) for name, value in problem.given.items()}
        got = cumla.block_sparse_attention(**there)
    check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)


@pytest.mark.parametrize("names", [("q",), ("out", "lse")], ids=str)
def test_heads_and_tokens_that_are_not_evenly_spaced(names: tuple[str, ...]) -> None:
    """Each kv head then takes launches of its own."""
    sizes = {"block": (16, 1), "columns": (64, 64), "topk": 3, "cache": "same"}
    (sample,) = samples(1, heads=(6, 2), queries=2, lens=(40, 33), outputs="given", **sizes)
    problem = make(sample)
    given = dict(problem.given)
    for name in names:
        batch, tokens, heads, *columns = given[name].shape
        wide = np.zeros((batch, tokens + 1, heads + 1, *columns), given[name].dtype)
        given[name] = wide[:, :tokens, :heads]
        given[name][...] = problem.given[name]
    with emulated_gpu(3) as cupy:
        there = {name: cupy.like(value) for name, value in given.items()}
        got = cumla.block_sparse_attention(**there)
        check(problem, cumla.AttentionState(*map(np.array, got)), sample.dtype)


def test_caches_that_lie_differently() -> None:
    """Keys and values are numbered alike, or refused."""
    k = np.zeros((4, 32, 2, 64), np.float16)
    for v in (
        np.zeros((4, 32, 2, 96), np.float16),
        np.zeros((4, 32, 4, 64), np.float16)[:, :, ::2],
    ):
        alike = v.strides[0] * k.strides[2] == v.strides[2] * k.strides[0]
        assert (virtual_pages(view_of(k), view_of(v), 16) is not None) == alike
    padded = np.zeros((5, 33, 2, 64), np.float16)[:4, :32]
    assert virtual_pages(view_of(k), view_of(padded), 16) is None
    assert virtual_pages(view_of(k[:1]), view_of(padded[:1]), 32) is not None
