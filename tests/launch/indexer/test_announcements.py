# SPDX-License-Identifier: Apache-2.0
"""Announcements of segments in the indexer's logits: the order of all roles, in a model.

The loader alone decides what the segments are. It announces each, then loads its blocks into the
ring as slots become free; the query warps read announcements in turn, at most two segments ahead of
the consumers, which free the blocks of a segment that has its query. Whatever the lengths are that
the loader read, no announcement may be written over before both query warps have read it, and all
must come to their end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from cumla.launch.indexer import mqa_logits, paged_mqa_logits
from tests.launch.kernel_text import constant

QUERY_WARPS = 2


class State(NamedTuple):
    announced: int = 0  # segments, the empty one at the end included
    loaded: int = 0  # blocks that have begun to come
    read: tuple[int, ...] = (0,) * QUERY_WARPS  # announcements
    queries: tuple[int, ...] = (0,) * QUERY_WARPS  # segments whose query has come
    done: tuple[int, int] = (0, 0)  # of each consumer, segments
    freed: frozenset[int] = frozenset()  # blocks


class OverwrittenError(Exception):
    pass


class Roles(NamedTuple):
    segments: tuple[int, ...]  # blocks of each; none is empty
    stages: int
    announcements: int
    takes_turns: bool = True  # each consumer every second block; else both all

    def before(self, segment: int) -> int:
        return sum(self.segments[:segment])

    def steps(self, state: State) -> Iterator[State]:
        yield from self.load(state)
        for warp in range(QUERY_WARPS):
            yield from self.load_query(state, warp)
        for consumer in range(2):
            yield from self.consume(state, consumer)

    def load(self, state: State) -> Iterator[State]:
        if state.loaded < self.before(state.announced):
            old = state.loaded - self.stages
            if old < 0 or old in state.freed:
                yield state._replace(loaded=state.loaded + 1)
        elif state.announced <= len(self.segments):
            if state.announced - self.announcements >= min(state.read):
                raise OverwrittenError
            yield state._replace(announced=state.announced + 1)

    def load_query(self, state: State, warp: int) -> Iterator[State]:
        read, here = state.read[warp], state.queries[warp]
        if here < read:
            if here - 2 < min(state.done):  # its buffer is free
                yield state._replace(queries=replaced(state.queries, warp, here + 1))
        elif read < state.announced:
            yield state._replace(read=replaced(state.read, warp, read + 1))

    def consume(self, state: State, consumer: int) -> Iterator[State]:
        segment = state.done[consumer]
        if segment == len(self.segments) or segment >= min(state.queries):
            return
        blocks = range(self.before(segment), self.before(segment + 1))
        mine = [b for b in blocks if not self.takes_turns or b % 2 == consumer]
        left = [b for b in mine if b not in state.freed]
        if not left or (not self.takes_turns and consumer == 1):
            if not left:
                done = replaced(state.done, consumer, segment + 1)
                yield state._replace(done=(done[0], done[1]))
        elif left[0] < state.loaded:
            yield state._replace(freed=state.freed | {left[0]})

    def ends(self, state: State) -> bool:
        everything = len(self.segments)
        return state.announced == everything + 1 and state.done == (everything, everything)


def replaced(counts: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*counts[:at], value, *counts[at + 1 :])


def explore(roles: Roles) -> int:
    """Go through every order; tell how many states there are."""
    seen, todo = {State()}, [State()]
    while todo:
        state = todo.pop()
        following = set(roles.steps(state))
        assert following or roles.ends(state), f"all wait: {state}"
        todo.extend(following - seen)
        seen |= following
    return len(seen)


SEGMENTS = [(1,) * 7, (2, 1, 1, 3), (5, 1, 1), (1, 1, 4, 1), ()]


@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_no_announcement_is_lost(segments: tuple[int, ...], takes_turns: bool) -> None:
    assert explore(Roles(segments, 2, 3, takes_turns)) >= len(segments)


def test_one_announcement_less_is_lost() -> None:
    with pytest.raises(OverwrittenError):
        explore(Roles((1,) * 7, 2, 2))


def test_random_orders_of_long_walks() -> None:
    rng = random.Random(0)
    for stages in (10, 12, 22, 32):
        roles = Roles(tuple(rng.choices((1, 1, 1, 2, 5), k=80)), stages, stages + 1)
        state = State()
        while steps := list(roles.steps(state)):
            state = rng.choice(steps)
        assert roles.ends(state)


def test_the_kernels_have_as_many() -> None:
    """As the model: one more than blocks of the ring, and room for them in shared memory."""
    layout = "indexer/mqa_logits/layout.cuh"
    assert constant(layout, "kAnnouncements") == "Shape::kStages + 1"
    for spec in (*mqa_logits.SPECS, *paged_mqa_logits.SPECS):
        assert spec.smem_bytes <= 227 * 1024
