# SPDX-License-Identifier: Apache-2.0
"""Properties of the paged indexer's schedule: of its NumPy form, the kernel's oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla.launch import mqa_logits, paged_mqa_logits, paged_mqa_schedule
from cumla.launch.indexer_shape import BLOCK_TOKENS, MOST_TOKENS
from cumla.launch.paged_mqa_schedule import (
    PagedMQAKey,
    schedule_bytes,
    schedule_reference,
    visible_tokens,
)
from cumla.launch.source import KernelSpec
from tests.launch.conftest import Compiler
from tests.launch.elf import sections

thorough = settings(deadline=None, max_examples=300)


def blocks_of(key: PagedMQAKey, lengths: np.ndarray) -> np.ndarray:
    """Blocks of each request, from the definition of what its rows see."""
    rows = lengths if key.per_row_lens else lengths[:, None] - np.arange(key.next_n)
    capacity = min(key.max_blocks * key.page_size, MOST_TOKENS)
    blocks: np.ndarray = -(-np.clip(rows, 0, capacity).max(axis=1) // BLOCK_TOKENS)
    return blocks


Place = tuple[int, int]
EVERYTHING = 2**32 - 1


def places(bounds: np.ndarray) -> list[Place]:
    """Where each part begins, and the end."""
    begins: list[Place] = [(int(item), int(block)) for item, block in bounds]
    return [(0, 0), *begins[1:-1], (begins[-1][0], 0)]


def stretch(at: Place, end: Place, skip: int, budget: int, blocks: np.ndarray) -> list[Place]:
    """(request, block) of a piece: struct Stretch of paged_mqa_logits.cu, line by line."""
    (item, block), (end_item, end_block) = at, end
    while item < end_item:
        left = max(int(blocks[item]) + 1 - block, 0)
        if skip < left:
            break
        skip -= left
        item, block = item + 1, 0
    block += skip
    done = []
    while budget > 0 and (item < end_item or (item == end_item and block < end_block)):
        last = int(blocks[item])
        if item == end_item:
            last = min(last, end_block)
        count = min(max(last - block, 0), budget)
        done += [(item, b) for b in range(block, block + count)]
        budget -= count
        if budget > 0 and block <= last:
            budget -= 1
        item, block = item + 1, 0
    return done


def walk(bounds: np.ndarray, blocks: np.ndarray) -> list[list[Place]]:
    """(request, block) of all that belongs to each part."""
    return [
        stretch(at, end, 0, EVERYTHING, blocks) for at, end in itertools.pairwise(places(bounds))
    ]


def handed_out(
    bounds: np.ndarray, blocks: np.ndarray
) -> tuple[list[list[Place]], list[list[Place]]]:
    """What CTAs have from the start, and the pieces that tickets stand for: struct Handout."""
    cost = int(bounds[-1, 1])
    rest = cost // 6
    rounds = rest.bit_length() - 2 if cost >= 48 else 0
    begins = [cost - (rest >> i) for i in range(rounds)]
    parts = list(itertools.pairwise(places(bounds)))
    own = [stretch(*part, 0, begins[0] if rounds else EVERYTHING, blocks) for part in parts]
    pieces = [
        stretch(*part, begin, end - begin, blocks)
        for begin, end in itertools.pairwise([*begins, EVERYTHING])
        for part in parts
    ]
    return own, pieces if rounds else []


@st.composite
def problems(draw: st.DrawFn) -> tuple[PagedMQAKey, np.ndarray]:
    batch = draw(st.integers(1, 40))
    next_n = draw(st.integers(1, 8))
    page_size = draw(st.sampled_from((16, 32, 64, 128)))
    per_row = draw(st.booleans())
    key = PagedMQAKey(
        batch=batch,
        next_n=next_n,
        num_heads=64,
        head_dim=128,
        page_size=page_size,
        max_blocks=draw(st.integers(1, 200)),
        per_row_lens=per_row,
        num_sms=draw(st.sampled_from((1, 3, 78, 132))),
    )
    length = st.integers(-5, 20000) | st.just(0) | st.sampled_from((-(2**31), 2**31 - 1))
    count = batch * next_n if per_row else batch
    lengths = np.array(draw(st.lists(length, min_size=count, max_size=count)), np.int64)
    return key, lengths.reshape(batch, -1) if per_row else lengths


@thorough
@given(problems())
def test_every_block_is_done_once(problem: tuple[PagedMQAKey, np.ndarray]):
    key, lengths = problem
    blocks = blocks_of(key, lengths)
    bounds = schedule_reference(key, lengths)
    assert bounds.dtype == np.int32
    assert bounds.nbytes == schedule_bytes(key)
    wanted = [(r, b) for r in range(key.batch) for b in range(blocks[r])]
    assert list(itertools.chain.from_iterable(walk(bounds, blocks))) == wanted
    own, pieces = handed_out(bounds, blocks)
    assert sorted(itertools.chain.from_iterable(own + pieces)) == wanted


@thorough
@given(problems())
def test_a_sixth_is_handed_out_in_ever_smaller_pieces(problem: tuple[PagedMQAKey, np.ndarray]):
    key, lengths = problem
    blocks = blocks_of(key, lengths)
    bounds = schedule_reference(key, lengths)
    cost = int((blocks + 1).sum()) // key.num_sms
    own, pieces = handed_out(bounds, blocks)
    assert bounds[-1].tolist() == [key.batch, cost]
    assert len(pieces) % key.num_sms == 0
    if not pieces:
        assert cost < 48
        return
    assert max(map(len, own)) <= cost - cost // 6
    last = [len(piece) for piece in pieces[-key.num_sms :]]
    assert max(last) <= 8
    for i in range(0, len(pieces) - key.num_sms, key.num_sms):
        assert max(map(len, pieces[i : i + key.num_sms])) <= -(-(cost // 6) // 2)


@thorough
@given(problems())
def test_parts_cost_the_same_give_or_take_one(problem: tuple[PagedMQAKey, np.ndarray]):
    key, lengths = problem
    blocks = blocks_of(key, lengths)
    starts = np.append(0, np.cumsum(blocks + 1))
    bounds = schedule_reference(key, lengths)
    begins = np.array(places(bounds))
    costs = np.diff(starts[begins[:, 0]] + begins[:, 1])
    assert bounds[0].tolist() == [0, 0]
    assert costs.sum() == starts[-1]
    assert costs.max() - costs.min() <= 1
    assert max(map(len, walk(bounds, blocks))) <= -(-int(starts[-1]) // key.num_sms)


@thorough
@given(problems(), st.data())
def test_other_lengths_are_still_done_whole(
    problem: tuple[PagedMQAKey, np.ndarray], data: st.DataObject
):
    key, lengths = problem
    grown = data.draw(st.integers(-500, 500))
    now = blocks_of(key, np.clip(lengths + grown, 0, 20000))
    own, pieces = handed_out(schedule_reference(key, lengths), now)
    done = sorted(itertools.chain.from_iterable(own + pieces))
    assert done == [(r, b) for r in range(key.batch) for b in range(now[r])]


def last_ticket(order: list[int], tickets: int, parts: int) -> tuple[list[int], int]:
    """Draw as the CTAs do, in this order of turns; what was drawn to do, and what is left."""
    counter, busy, done = 0, list(range(parts)), []
    for turn in itertools.cycle(order):
        if not busy:
            return done, counter
        cta = busy[turn % len(busy)]
        ticket, counter = counter, 0 if counter >= tickets + parts - 1 else counter + 1
        if ticket >= tickets:
            busy.remove(cta)
        else:
            done.append(ticket)
    raise AssertionError("a cycle ends")


@given(st.lists(st.integers(0, 200), min_size=1), st.integers(1, 300), st.integers(1, 132))
def test_tickets_begin_again_by_themselves(order: list[int], tickets: int, parts: int):
    assert last_ticket(order, tickets, parts) == (list(range(tickets)), 0)


def test_what_rows_see():
    key = PagedMQAKey(4, 3, 64, 128, 64, 2, False, 132)
    seen = visible_tokens(key, np.array([0, 2, 100, 2**31 - 1]))
    assert seen.tolist() == [[0, 0, 0], [0, 1, 2], [98, 99, 100], [128, 128, 128]]
    each = key._replace(per_row_lens=True)
    lengths = np.array([[5, -1, 200], [0, 0, 0], [1, 2, 3], [127, 128, 129]])
    assert visible_tokens(each, lengths).tolist() == np.clip(lengths, 0, 128).tolist()


PARAMS = {
    "mqa_logits": mqa_logits._PARAMS,
    "paged_mqa_logits": paged_mqa_logits._PARAMS,
    "paged_mqa_schedule": paged_mqa_schedule._PARAMS,
}
SPECS = (mqa_logits.SPECS[-1], paged_mqa_logits.SPECS[-1], *paged_mqa_schedule.SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_parameters_are_packed_as_large_as_the_kernel_takes_them(
    spec: KernelSpec, compiled: Compiler
):
    bank = sections(compiled(spec).cubin)[f".nv.constant0.{spec.entry}"]
    begin = 0x210  # where parameters begin in the constant bank, but for their alignment
    if spec.stem != "paged_mqa_schedule":  # a tensor map lies on a 64-byte boundary
        begin = -(-begin // 64) * 64
    assert len(bank) == begin + PARAMS[spec.stem].size
