# SPDX-License-Identifier: Apache-2.0
"""The ring of the indexer's logits: every order of loads and consumers, in a model.

One loader fills slots in turn; what it has begun to load arrives in any order. The two consumers
take turns at blocks, each at its own pace. A barrier's wait sees the parity of its phase only, so
that no wait may come two phases early.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cumla.launch.indexer import mqa_logits, paged_mqa_logits
from cumla.launch.indexer.choice import prefill_shape

CONSUMERS = 2


class State(NamedTuple):
    begun: int  # loads that have begun
    under_way: frozenset[int]  # blocks among them that have not arrived
    done: tuple[int, ...]  # blocks that each consumer is done with


class RingError(Exception):
    pass


def passes(completed: int, parity: int) -> bool:
    """Return whether a wait for the phase with that parity ends, so many phases being complete."""
    return completed % 2 != parity


class Ring(NamedTuple):
    slots: int
    blocks: int

    def freed(self, state: State) -> list[int]:
        return [b for b in range(state.begun) if b // CONSUMERS < state.done[b % CONSUMERS]]

    def phases(self, blocks: list[int], slot: int) -> int:
        return sum(block % self.slots == slot for block in blocks)

    def steps(self, state: State) -> list[State]:
        """All states that one step leads to."""
        found = [state._replace(under_way=state.under_way - {block}) for block in state.under_way]
        freed = self.freed(state)
        block = state.begun
        if block < self.blocks:
            phases = self.phases(freed, block % self.slots)
            if passes(phases, block // self.slots % 2 ^ 1):
                if block >= self.slots and block - self.slots not in freed:
                    raise RingError(f"block {block} overwrites one that is in use")
                found.append(state._replace(begun=block + 1, under_way=state.under_way | {block}))
        here = [b for b in range(state.begun) if b not in state.under_way]
        for consumer, done in enumerate(state.done):
            block = done * CONSUMERS + consumer
            phases = self.phases(here, block % self.slots)
            if block < self.blocks and passes(phases, block // self.slots % 2):
                if block not in here:
                    raise RingError(f"block {block} is read before it has come")
                after = (*state.done[:consumer], done + 1, *state.done[consumer + 1 :])
                found.append(state._replace(done=after))
        return found

    def explore(self) -> set[State]:
        """All states that can be reached."""
        start = State(0, frozenset(), (0,) * CONSUMERS)
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            after = self.steps(state)
            if not after and len(self.freed(state)) < self.blocks:
                raise RingError(f"all wait: {state}")
            new = set(after) - seen
            seen |= new
            left += new
        return seen


@pytest.mark.parametrize("slots", [2, 4, 6])
def test_consumers_that_meet_the_same_slots_read_what_has_come(slots: int) -> None:
    ring = Ring(slots, 2 * slots + 3)
    states = ring.explore()
    assert len(states) > 50
    assert max(len(ring.freed(state)) for state in states) == ring.blocks


@pytest.mark.parametrize("slots", [3, 5, 7])
def test_consumers_that_meet_other_slots_read_too_early(slots: int) -> None:
    with pytest.raises(RingError, match="is read before it has come"):
        Ring(slots, 2 * slots + 3).explore()


def test_every_ring_is_a_multiple_of_its_consumers() -> None:
    shapes = [prefill_shape(heads, dim) for heads, dim in mqa_logits._SPECS]
    for shape in (*shapes, *paged_mqa_logits._SPECS):
        assert shape.stages % CONSUMERS == 0
        assert shape.stages >= 10
        assert shape.smem_bytes <= 227 * 1024
