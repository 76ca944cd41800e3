# SPDX-License-Identifier: Apache-2.0
"""How thread blocks meet to join the pieces of a request: every interleaving, in a model.

The model follows ``join`` of cumla/cuda/split/join.cuh and of mha/attention_decode/join.cuh, and
``arrive`` and ``who_left`` of meeting.cuh; a step is one access to memory that thread blocks share,
or a fence. Loads and stores happen in the order of the program, with one exception: a thread block
that has lost patience leaves a note, and may take it back, with ordinary stores, which may lie in a
store buffer until a fence drains it. What only the thread block itself could notice goes with the
step before.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.launch.kernel_text import modelled

ALL = 1 << 31
MASK = (1 << 32) - 1

Flag = tuple[int, int]  # thread block and slot


class Visit(NamedTuple):
    """A thread block's part in a meeting."""

    meeting: int
    slot: int
    waits: bool  # it has nothing else to do, and may wait


@dataclass(frozen=True)
class Setting:
    """Who meets whom: each thread block's visits, in its order, and who comes to each meeting."""

    visits: tuple[tuple[Visit, ...], ...]
    patient: bool = False  # nobody loses patience
    shares: int = 1 << 31  # of a meeting: who comes later has nothing to join, and does not wait
    fences: bool = True
    takes_back: bool = True  # its note, who sees in the last moment that all are there
    meetings: tuple[tuple[Flag, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        members: dict[int, list[Flag]] = {}
        for block, visits in enumerate(self.visits):
            for visit in visits:
                members.setdefault(visit.meeting, []).append((block, visit.slot))
        object.__setattr__(self, "meetings", tuple(tuple(members[i]) for i in sorted(members)))


class At(enum.Enum):
    """What a thread block does next."""

    ADD = enum.auto()  # store the piece and be counted in
    POLL = enum.auto()
    FENCE = enum.auto()  # after its note that it leaves
    RECHECK = enum.auto()
    TAKE_BACK = enum.auto()  # its note, before it joins its share
    SCAN = enum.auto()  # the last one: read the next note
    TAKE = enum.auto()


class Block(NamedTuple):
    visit: int = 0
    at: At = At.ADD
    before: int = 0  # of the counter
    looking_at: int = 0  # whose note the last one reads next
    buffered: tuple[tuple[Flag, bool], ...] = ()  # notes, and their absence, that are not out yet


class State(NamedTuple):
    blocks: tuple[Block, ...]
    counters: tuple[int, ...]  # of the meetings
    notes: frozenset[Flag]  # of those that have left
    stored: frozenset[Flag]  # pieces
    joined: frozenset[tuple[int, int]]  # meeting and share


class ProtocolError(Exception):
    pass


def begin_run(setting: Setting, counters: tuple[int, ...], notes: frozenset[Flag]) -> State:
    """Begin a run with what an earlier one has left in the tickets."""
    blocks = tuple(Block() for _ in setting.visits)
    return State(blocks, counters, notes, frozenset(), frozenset())


def all_arrived(now: int, before: int) -> bool:
    return bool((now ^ before) & ALL)


def step_of(setting: Setting, meeting: int, block: int) -> int:
    """Return what a thread block adds: the one of the first piece makes the sum of all 2^31."""
    members = setting.meetings[meeting]
    return ALL - (len(members) - 1) if members[0][0] == block else 1


def steps(setting: Setting, state: State) -> Iterator[State]:
    """All states that one step leads to."""
    for i in range(len(state.blocks)):
        yield from steps_of(setting, state, i)


def steps_of(setting: Setting, state: State, i: int) -> Iterator[State]:
    """All states that one step of a thread block leads to; one that can only poll has none."""
    block = state.blocks[i]
    if block.buffered:  # any time
        yield drained(state, i)
    if block.visit == len(setting.visits[i]):
        return
    visit = setting.visits[i][block.visit]
    counter, mine = state.counters[visit.meeting], (i, visit.slot)
    members = setting.meetings[visit.meeting]
    share = members.index(mine)

    if block.at is At.ADD:
        yield from add(setting, state, i)
    elif block.at is At.POLL:
        if all_arrived(counter, block.before):
            yield finished(joined(setting, state, visit.meeting, share), i)
        elif not setting.patient:
            yield changed(state, i, at=At.FENCE, buffered=(*block.buffered, (mine, True)))
    elif block.at is At.FENCE:
        while setting.fences and state.blocks[i].buffered:
            state = drained(state, i)
        yield changed(state, i, at=At.RECHECK)
    elif block.at is At.RECHECK:
        there = all_arrived(counter, block.before)
        yield changed(state, i, at=At.TAKE_BACK) if there else finished(state, i)
    elif (
        block.at is At.TAKE_BACK
    ):  # too late where the last one has read it: the share is done twice
        if setting.takes_back:
            state = changed(state, i, buffered=(*block.buffered, (mine, False)))
        yield finished(joined(setting, state, visit.meeting, share), i)
    elif block.at is At.SCAN:
        left = members[block.looking_at] in state.notes and members[block.looking_at] != mine
        yield changed(state, i, at=At.TAKE) if left else looked(setting, state, i)
    else:
        state = state._replace(notes=state.notes - {members[block.looking_at]})
        state = joined(setting, state, visit.meeting, block.looking_at)
        yield looked(setting, state, i)


def add(setting: Setting, state: State, i: int) -> Iterator[State]:
    """Be counted in, with the piece stored, and with a note if this thread block will not wait."""
    visit = setting.visits[i][state.blocks[i].visit]
    mine, counter = (i, visit.slot), state.counters[visit.meeting]
    now = (counter + step_of(setting, visit.meeting, i)) & MASK
    share = setting.meetings[visit.meeting].index(mine)
    has_share = share < setting.shares
    state = state._replace(
        stored=state.stored | {mine},
        notes=state.notes if visit.waits or not has_share else state.notes | {mine},
    )
    state = with_counter(state, visit.meeting, now)
    if all_arrived(now, counter):
        state = joined(setting, state, visit.meeting, share)
        yield changed(state, i, at=At.SCAN, looking_at=0)
    elif visit.waits and has_share:
        yield changed(state, i, at=At.POLL, before=counter)
    else:
        yield finished(state, i)


def looked(setting: Setting, state: State, i: int) -> State:
    """The last one goes on to the next note; behind the last of them it takes its own back.

    The kernel reads 32 at once and joins afterwards: the same, for joining touches no note.
    """
    block = state.blocks[i]
    visit = setting.visits[i][block.visit]
    if block.looking_at + 1 < len(setting.meetings[visit.meeting]):
        return changed(state, i, at=At.SCAN, looking_at=block.looking_at + 1)
    return finished(state._replace(notes=state.notes - {(i, visit.slot)}), i)


def changed(state: State, i: int, **news: object) -> State:
    blocks = list(state.blocks)
    blocks[i] = blocks[i]._replace(**news)  # type: ignore[arg-type]
    return state._replace(blocks=tuple(blocks))


def finished(state: State, i: int) -> State:
    block = state.blocks[i]
    return changed(state, i, **(Block(block.visit + 1)._asdict() | {"buffered": block.buffered}))


def with_counter(state: State, meeting: int, value: int) -> State:
    counters = list(state.counters)
    counters[meeting] = value
    return state._replace(counters=tuple(counters))


def drained(state: State, i: int) -> State:
    """The oldest store of the buffer is out."""
    (flag, note), *rest = state.blocks[i].buffered
    notes = state.notes | {flag} if note else state.notes - {flag}
    return changed(state._replace(notes=notes), i, buffered=tuple(rest))


def joined(setting: Setting, state: State, meeting: int, share: int) -> State:
    missing = set(setting.meetings[meeting]) - state.stored
    if missing:
        raise ProtocolError(f"share {share} is joined before the pieces {missing} are stored")
    return state._replace(joined=state.joined | {(meeting, share)})


# --- what must hold ------------------------------------------------------------------------------


def explore(setting: Setting, begin: State) -> set[State]:
    """Go through every interleaving; give the states in which it can end."""
    seen, ends, todo = {begin}, set(), [begin]
    while todo:
        state = todo.pop()
        following = set(steps(setting, state)) - {state}
        if not following:
            check_end(setting, begin, state)
            ends.add(state)
        todo.extend(following - seen)
        seen |= following
    return ends


def reachable(setting: Setting) -> set[State]:
    """All states of a run that begins with no notes."""
    begin = begin_run(setting, (0,) * len(setting.meetings), frozenset())
    seen, todo = {begin}, [begin]
    while todo:
        following = set(steps(setting, todo.pop())) - seen
        seen |= following
        todo.extend(following)
    return seen


def check_end(setting: Setting, begin: State, end: State) -> None:
    for block, visits in zip(end.blocks, setting.visits, strict=True):
        if block.visit < len(visits) or block.buffered:
            raise ProtocolError(f"a thread block waits for ever: {block}")
    for meeting, members in enumerate(setting.meetings):
        shares = range(min(len(members), setting.shares))
        missing = set(shares) - {s for m, s in end.joined if m == meeting}
        if missing:
            raise ProtocolError(f"nobody has joined the shares {missing} of meeting {meeting}")
        if end.notes & set(members):
            raise ProtocolError(f"notes stay behind: {end.notes}")
        turned = begin.counters[meeting] ^ ALL
        if end.counters[meeting] != turned:
            raise ProtocolError(f"the counter is {end.counters[meeting]:#x}, not {turned:#x}")


def explore_runs(setting: Setting, *notes: frozenset[Flag]) -> None:
    """Run again and again, from each of some notes and from whatever a run can leave behind."""
    todo = [((0,) * len(setting.meetings), some) for some in notes or (frozenset(),)]
    begun = set(todo)
    while todo:
        ends = explore(setting, begin_run(setting, *todo.pop()))
        news = {(end.counters, end.notes) for end in ends} - begun
        begun |= news
        todo.extend(news)
    assert {counters for counters, _ in begun} == {(c,) * len(setting.meetings) for c in (0, ALL)}


def one_meeting(waits: tuple[bool, ...], **options: int) -> Setting:
    """A request in as many pieces; the first of them may be the second of its part."""
    return Setting(
        tuple((Visit(0, 1 if block == 0 else 0, wait),) for block, wait in enumerate(waits)),
        **options,
    )


def any_notes(setting: Setting) -> list[frozenset[Flag]]:
    (members,) = setting.meetings
    counts = range(len(members) + 1)
    return [frozenset(some) for n in counts for some in itertools.combinations(members, n)]


def modes(n: int) -> list[tuple[bool, ...]]:
    return list(itertools.product((True, False), repeat=n))


@pytest.mark.parametrize("waits", [w for n in (2, 3) for w in modes(n)], ids=str)
def test_every_interleaving_of_two_and_three(waits: tuple[bool, ...]) -> None:
    """Those that wait and those that go on, run after run, with any notes to begin with."""
    setting = one_meeting(waits)
    explore_runs(setting, *any_notes(setting))


@pytest.mark.parametrize("waits", [w for n in (2, 3) for w in modes(n)], ids=str)
@pytest.mark.parametrize("shares", [1, 2])
def test_some_without_a_share(shares: int, waits: tuple[bool, ...]) -> None:
    """As in attention_decode, where a share is rows, of which there may be fewer than pieces."""
    setting = one_meeting(waits, shares=shares)
    explore_runs(setting, *any_notes(setting))


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(waits, marks=pytest.mark.exhaustive if sum(waits) > 2 else ())
        for waits in modes(4)[1::3]
    ],
    ids=str,
)
def test_every_interleaving_of_four(waits: tuple[bool, ...]) -> None:
    setting = one_meeting(waits)
    for notes in (frozenset[Flag](), frozenset(setting.meetings[0])):
        explore(setting, begin_run(setting, (ALL,), notes))


TWO_MEETINGS = {
    "the second part ends one request and begins the next": (
        (Visit(0, 0, True),),
        (Visit(0, 0, False), Visit(1, 1, True)),
        (Visit(1, 0, True),),
    ),
    "a part with more to do is the first of both": (
        (Visit(0, 1, True),),
        (Visit(0, 0, False), Visit(1, 1, False)),
        (Visit(1, 0, False),),
    ),
    "three pieces, then two": (
        (Visit(0, 1, True),),
        (Visit(0, 0, True),),
        (Visit(0, 0, False), Visit(1, 1, True)),
        (Visit(1, 0, True),),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if len(parts) > 3 else ())
        for name, parts in TWO_MEETINGS.items()
    ],
)
def test_a_thread_block_in_two_meetings(name: str) -> None:
    explore_runs(Setting(TWO_MEETINGS[name]))


@pytest.mark.parametrize("waits", modes(3), ids=str)
def test_without_losing_patience_all_come_through(waits: tuple[bool, ...]) -> None:
    """Where every thread block runs, patience is not what ends the waiting."""
    explore_runs(one_meeting(waits, patient=True))


def test_without_losing_patience_two_meetings_end() -> None:
    explore_runs(Setting(TWO_MEETINGS["three pieces, then two"], patient=True))


@pytest.mark.parametrize("waits", modes(3), ids=str)
def test_nobody_depends_on_anothers_progress(waits: tuple[bool, ...]) -> None:
    """From every state each thread block comes to its end by its own steps."""
    setting = one_meeting(waits)
    for state in reachable(setting):
        for i in range(len(waits)):
            alone, count = state, 0
            while alone.blocks[i].visit < 1:
                *_, alone = steps_of(setting, alone, i)
                count += 1
                assert count < 30


@pytest.mark.parametrize("n", [2, 5, 33, 132])
def test_random_interleavings_of_many(n: int) -> None:
    rng = random.Random(n)
    for most_wait in (0.0, 0.5, 1.0):
        setting = one_meeting(tuple(rng.random() < most_wait for _ in range(n)))
        counters: tuple[int, ...] = (0,)
        notes = frozenset[Flag]()
        for _ in range(4):
            begin = state = begin_run(setting, counters, notes)
            eager = rng.random()
            running = list(range(n))
            while running:
                i = rng.choice(running[: 1 + int(eager * len(running))])
                state = rng.choice(list(steps_of(setting, state, i)))
                block = state.blocks[i]
                if block.visit == 1 and not block.buffered:
                    running.remove(i)
            check_end(setting, begin, state)
            counters, notes = state.counters, state.notes


# --- the model can fail --------------------------------------------------------------------------


def test_a_note_that_is_not_taken_back_stays_behind() -> None:
    """Of one that lost patience in the last moment: the next run would do its share twice."""
    explore_runs(one_meeting((True, True), patient=True, takes_back=False))
    with pytest.raises(ProtocolError, match="notes stay behind"):
        explore_runs(one_meeting((True, True), takes_back=False))


def test_the_last_one_may_have_read_a_note_that_is_taken_back() -> None:
    """Both then join its share: such interleavings are among those that are gone through."""
    states = reachable(one_meeting((True, True)))
    assert any({At.TAKE, At.TAKE_BACK} == {block.at for block in state.blocks} for state in states)


def test_without_the_leavers_fence_a_share_is_lost() -> None:
    with pytest.raises(ProtocolError, match="nobody has joined the shares"):
        explore_runs(one_meeting((True, True), fences=False))


@pytest.mark.parametrize("wrong", [ALL, ALL - 1, ALL + 1, ALL - 3])
def test_another_first_step_fails(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = step_of
    assert right(one_meeting((True,) * 3), 0, 0) == ALL - 2
    monkeypatch.setitem(globals(), "step_of", lambda *of: wrong if right(*of) != 1 else right(*of))
    with pytest.raises(ProtocolError):
        explore_runs(one_meeting((True, True, True)))


# --- the model is of this code -------------------------------------------------------------------


def test_the_model_follows_the_kernel() -> None:
    """After a change of what is marked there, change the model, too; then the digest here."""
    assert modelled("split/join.cuh", "join") == "06c7e60e"
    assert modelled("split/meeting.cuh", "join") == "b4c3f9c8"
    assert modelled("mha/attention_decode/join.cuh", "join") == "a7d301c0"
