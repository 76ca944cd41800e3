# SPDX-License-Identifier: Apache-2.0
"""Properties of the paged indexer's schedule: of its NumPy form, the kernel's oracle."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla.launch.indexer.paged_mqa_schedule import (
    PagedMQAKey,
    schedule_bytes,
)
from cumla.launch.indexer.shape import BLOCK_TOKENS, MOST_TOKENS
from tests.launch.indexer.paged_mqa_schedule_mirror import schedule_reference, visible_tokens

thorough = settings(deadline=None)  # as many examples as tests/conftest.py says


def blocks_of(key: PagedMQAKey, lengths: np.ndarray) -> np.ndarray:
    """Blocks of each request, from the definition of what its rows see."""
    rows = lengths if key.per_row_lens else lengths[:, None] - np.arange(key.q_len)
    capacity = min(key.max_blocks * key.page_size, MOST_TOKENS)
    blocks: np.ndarray = -(-np.clip(rows, 0, capacity).max(axis=1) // BLOCK_TOKENS)
    return blocks


def walk(bounds: np.ndarray, blocks: np.ndarray) -> list[list[tuple[int, int]]]:
    """(request, block) of all that each part does: SegmentCursor of the kernels."""
    parts = []
    for (item, block), (end_item, end_block) in itertools.pairwise(bounds.tolist()):
        done = []
        while item < end_item or (item == end_item and end_block > 0):
            last = min(blocks[item], end_block) if item == end_item else blocks[item]
            done += [(item, b) for b in range(block, last)]
            item, block = item + 1, 0
        parts.append(done)
    return parts


@st.composite
def problems(draw: st.DrawFn) -> tuple[PagedMQAKey, np.ndarray]:
    batch = draw(st.integers(1, 40))
    q_len = draw(st.integers(1, 8))
    page_size = draw(st.sampled_from((16, 32, 64, 128)))
    per_row = draw(st.booleans())
    key = PagedMQAKey(
        batch=batch,
        q_len=q_len,
        num_heads=64,
        head_dim=128,
        page_size=page_size,
        max_blocks=draw(st.integers(1, 200)),
        per_row_lens=per_row,
        num_sms=draw(st.sampled_from((1, 3, 78, 132))),
    )
    length = st.integers(-5, 20000) | st.just(0) | st.sampled_from((-(2**31), 2**31 - 1))
    count = batch * q_len if per_row else batch
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
    done = list(itertools.chain.from_iterable(walk(bounds, blocks)))
    assert done == [(r, b) for r in range(key.batch) for b in range(blocks[r])]


@thorough
@given(problems())
def test_parts_cost_the_same_give_or_take_one(problem: tuple[PagedMQAKey, np.ndarray]):
    key, lengths = problem
    blocks = blocks_of(key, lengths)
    starts = np.append(0, np.cumsum(blocks + 1))
    bounds = schedule_reference(key, lengths)
    costs = np.diff(starts[bounds[:, 0]] + bounds[:, 1])
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
    done = list(itertools.chain.from_iterable(walk(schedule_reference(key, lengths), now)))
    assert done == [(r, b) for r in range(key.batch) for b in range(now[r])]


def test_what_rows_see():
    key = PagedMQAKey(4, 3, 64, 128, 64, 2, False, 132)
    seen = visible_tokens(key, np.array([0, 2, 100, 2**31 - 1]))
    assert seen.tolist() == [[0, 0, 0], [0, 1, 2], [98, 99, 100], [128, 128, 128]]
    each = key._replace(per_row_lens=True)
    lengths = np.array([[5, -1, 200], [0, 0, 0], [1, 2, 3], [127, 128, 129]])
    assert visible_tokens(each, lengths).tolist() == np.clip(lengths, 0, 128).tolist()
