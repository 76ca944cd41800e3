# SPDX-License-Identifier: Apache-2.0
"""The ring of KV tiles of mla_decode_swapped: every order of loads and consumers, in a model.

A loader fills slots in turn; what it has begun to load arrives in any order. Of pages whose rows
are copied one by one there are two loaders, half of a tile each, whose copies arrive in their
order; a tile has come when both halves have, and the first loader alone says that the loads of a
block have begun. Two consumers take every second block each, at their own pace. A barrier's wait
sees the parity of its phase only, so that no wait may come two phases early. The first ring is a
third of the kernel's, 8 slots and blocks of 3. Those of other widths hold whole blocks, three or
five of them, and have more barriers that say that loads have begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.launch.kernel_text import modelled
from tests.selection import some


class Ring(NamedTuple):
    slots: int
    tiles: int  # of a block
    begun: int  # barriers that say that the loads of a block have begun, for blocks in turn
    blocks: int


RING, THREE_BLOCKS, FIVE_BLOCKS = Ring(8, 3, 2, 7), Ring(6, 2, 4, 7), Ring(10, 2, 6, 9)


class State(NamedTuple):
    begun: tuple[int, ...]  # of each loader, loads that have begun
    under_way: frozenset[tuple[int, int]] = frozenset()  # loader and tile: not arrived of these
    blocks: tuple[int, int] = (0, 1)  # of each consumer, the one that it is at
    at: tuple[int, int] = (0, 0)  # step there: a wait for the loads to begin, the tiles, freeing
    freed: frozenset[int] = frozenset()  # tiles
    ring: Ring = RING


class RingError(Exception):
    pass


def passes(completed: int, parity: int) -> bool:
    """Return whether a wait for the phase with that parity ends, so many phases being complete."""
    return completed % 2 != parity


def of_slot(state: State, tiles: Iterable[int], slot: int) -> int:
    return sum(tile % state.ring.slots == slot for tile in tiles)


def completed(state: State, slot: int) -> int:
    """Phases of a slot's barrier for tiles that come: each takes an arrival of every loader."""
    begun = sum(of_slot(state, range(tiles), slot) for tiles in state.begun)
    missing = of_slot(state, (tile for _, tile in state.under_way), slot)
    return (begun - missing) // len(state.begun)


def steps(state: State, *, waits_for_begin: bool) -> list[State]:
    """All states that one step leads to."""
    found = [state._replace(under_way=state.under_way - {it}) for it in next_to_come(state)]
    for loader in range(len(state.begun)):
        found += load(state, loader)
    for consumer in (0, 1):
        if state.blocks[consumer] < state.ring.blocks:
            found += consume(state, consumer, waits_for_begin)
    return found


def next_to_come(state: State) -> Iterable[tuple[int, int]]:
    """Loads that may arrive now: of two loaders the first of each."""
    if len(state.begun) == 1:
        return state.under_way
    return {min(it for it in state.under_way if it[0] == loader) for loader, _ in state.under_way}


def load(state: State, loader: int) -> list[State]:
    """Begin to load a tile; with two loaders RoPE, or all of V, when all of its slots are free."""
    first, (slots, of_block, _, blocks) = state.begun[loader], state.ring
    if first == of_block * blocks:
        return []
    alone = len(state.begun) == 1 or first % of_block == 0
    tiles = range(first, first + (1 if alone else of_block - 1))
    for tile in tiles:
        if not passes(of_slot(state, state.freed, tile % slots), tile // slots % 2 ^ 1):
            return []
        if tile >= slots and tile - slots not in state.freed:
            raise RingError(f"tile {tile} overwrites one that is in use")
    begun = tuple(tiles.stop if i == loader else n for i, n in enumerate(state.begun))
    under_way = state.under_way | {(loader, tile) for tile in tiles}
    return [state._replace(begun=begun, under_way=under_way)]


def consume(state: State, consumer: int, waits_for_begin: bool) -> list[State]:
    block, at = state.blocks[consumer], state.at[consumer]
    slots, of_block, begun, _ = state.ring
    if at == 0:
        blocks_begun = range(block % begun, state.begun[0] // of_block, begun)
        if waits_for_begin and not passes(len(blocks_begun), block // begun % 2):
            return []
        return [moved(state, consumer, block, 1)]
    if at <= of_block:
        tile = block * of_block + at - 1
        if not passes(completed(state, tile % slots), tile // slots % 2):
            return []
        waiting = {late for _, late in state.under_way}
        if tile >= min(state.begun) or tile in waiting:
            raise RingError(f"tile {tile} is read before it has come")
        return [moved(state, consumer, block, at + 1)]
    tile = block * of_block + at - of_block - 1
    state = state._replace(freed=state.freed | {tile})
    return [moved(state, consumer, *((block, at + 1) if at < 2 * of_block else (block + 2, 0)))]


def moved(state: State, consumer: int, block: int, at: int) -> State:
    blocks, ats = list(state.blocks), list(state.at)
    blocks[consumer], ats[consumer] = block, at
    return state._replace(blocks=(blocks[0], blocks[1]), at=(ats[0], ats[1]))


def explore(loaders: int, *, waits_for_begin: bool, ring: Ring = RING) -> int:
    """Go through every order; tell how many states there are."""
    start = State((0,) * loaders, ring=ring)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = set(steps(state, waits_for_begin=waits_for_begin))
        if not following and len(state.freed) < ring.tiles * ring.blocks:
            raise RingError(f"all wait for ever: {state}")
        todo.extend(following - seen)
        seen |= following
    return len(seen)


SHORT = FIVE_BLOCKS._replace(tiles=1, slots=5)
CASES = [(RING, 1), (RING, 2), (THREE_BLOCKS, 2), (THREE_BLOCKS, 1), (SHORT, 1), (SHORT, 2)]


@pytest.mark.parametrize(("ring", "loaders"), some(CASES, 2))
def test_every_tile_is_read_when_it_has_come(loaders: int, ring: Ring) -> None:
    assert explore(loaders, waits_for_begin=True, ring=ring) > 1000


@pytest.mark.parametrize("ring", [THREE_BLOCKS, FIVE_BLOCKS])
def test_whole_blocks_with_a_barrier_for_each_consumer_wait_for_ever(ring: Ring) -> None:
    """The loader is more than one of a consumer's blocks ahead: its barrier is two phases on."""
    with pytest.raises(RingError, match="all wait for ever"):
        explore(1, waits_for_begin=True, ring=ring._replace(begun=2))


def test_without_the_wait_for_the_loads_to_begin_one_is_read_too_early() -> None:
    with pytest.raises(RingError, match="read before it has come"):
        explore(1, waits_for_begin=False)


# --- the model is of this code -------------------------------------------------------------------

MODELLED = {  # but for the bits of absent rows, where the kernel reads lists
    "mla/mla_decode_swapped/kernel.cuh": "4d0663eb",
    "mla/mla_decode_swapped/compute.cuh": "05aa3c59",
}


@pytest.mark.parametrize("file", MODELLED)
def test_the_model_follows_the_kernel(file: str) -> None:
    """After a change of what is marked there, change the model, too; then the digest here."""
    assert modelled(file, "swapped_ring") == MODELLED[file]
