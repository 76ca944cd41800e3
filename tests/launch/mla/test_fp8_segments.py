# SPDX-License-Identifier: Apache-2.0
"""How the warps of mla_decode_fp8 go from one segment to the next, in a model with vector clocks.

Each warp does its steps: waits for barriers and arrivals there, meetings, and accesses to words of
shared memory, which lie where Fp8Layout has them. A race is two accesses to a word, one of them a
write, by two warps, of which no chain of arrivals, waits and meetings has one before the other.
That depends on no order in which the warps happen to run; whether they wait for ever, or for a
phase whose parity has come round again, could, so that they run in random orders.

Of the ring there are the RoPE columns alone, in whose place probabilities may lie. References are
raised as without scales, those of groups of columns together with the others. Behind a cut segment
the warps go on, or all of them add up one item of what is joined.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.launch.kernel_text import modelled
from tests.selection import some

WARPS = range(4)

Key = tuple[str | int, ...]  # of a region or a barrier: its name, then which of them


class Layout(NamedTuple):
    """What Fp8Layout is made for."""

    rows: int
    grouped: bool = False
    whole: bool = False  # packed rows
    tiles: int = 8  # of 64 latent columns

    @property
    def slots(self) -> int:
        return 6 if self.tiles < 8 else 4

    @property
    def queries(self) -> int:
        return 2 if self.rows == 16 else 1


LAYOUTS = (
    Layout(16),
    Layout(16, grouped=True),
    Layout(16, grouped=True, whole=True),
    Layout(32),
    Layout(32, grouped=True),
    Layout(16, tiles=4),
    Layout(32, tiles=4),
)


class Segment(NamedTuple):
    blocks: int
    cut: bool = False
    joins: bool = False  # or else it goes on


# --- shared memory -------------------------------------------------------------------------------


def words(begin: int, size: int) -> set[int]:
    """So many bytes as words."""
    return set(range(begin // 4, (begin + size) // 4))


def regions_of(layout: Layout) -> dict[Key, set[int]]:
    """The words of everything that a warp reads or writes at once, as in Fp8Layout."""
    rows, queries, tile = layout.rows, layout.queries, layout.rows * 128
    own, query_bytes = 4 if layout.whole else 2, (layout.tiles + 1) * tile
    exchange_bytes = 2 * layout.tiles * 128 * 16
    probability_bytes = max(2 * own * tile, exchange_bytes - query_bytes)
    kinds, references, last = (5, 9, 5) if layout.grouped else (1, 1, 1)
    row_floats = (kinds + 1) * 8 + 2 * (references + last) + queries

    first_query = layout.slots * 8192
    probabilities = first_query + query_bytes
    maxima = first_query + queries * query_bytes + probability_bytes
    sums = maxima + kinds * 8 * rows * 4
    reference = sums + rows * 8 * 4
    last_reference = reference + 2 * references * rows * 4
    divisors = last_reference + 2 * last * rows * 4
    role = maxima + row_floats * rows * 4
    assert divisors + queries * rows * 4 == role

    found: dict[Key, set[int]] = {("role",): words(role, 4)}
    for s in range(layout.slots):
        found["RoPE columns", s] = words(s * 8192, 8192)
    for b in range(queries):
        query = first_query + b * (query_bytes + probability_bytes)
        found["query", b] = words(query, query_bytes) | words(divisors + b * rows * 4, rows * 4)
        for loader in range(2):
            found["query rows", b, loader] = set[int]().union(
                words(divisors + (b * rows + loader * rows // 2) * 4, rows * 2),
                *(
                    words(query + k * tile + loader * tile // 2, tile // 2)
                    for k in range(layout.tiles + 1)
                ),
            )
    for c in range(2):
        found["references", c] = words(reference + c * references * rows * 4, references * rows * 4)
        found["last references", c] = words(last_reference + c * last * rows * 4, last * rows * 4)
        for w in WARPS:
            of_both = c * 4 + w
            found["sums", c, w] = {(sums + (row * 8 + of_both) * 4) // 4 for row in range(rows)}
            found["maxima", c, w] = set[int]().union(
                *(
                    words(maxima + (kind * 8 + of_both) * rows * 4, rows * 4)
                    for kind in range(kinds)
                )
            )
            for b in range(queries):
                place = first_query if b == 0 else probabilities
                found["exchange", b, c, w] = set[int]().union(
                    *(
                        words(place + ((c * layout.tiles + i) * 128 + w * 32) * 16, 512)
                        for i in range(layout.tiles)
                    )
                )
            found["rows to join", of_both] = words(probabilities + of_both * 1024, 1024)
            found["pieces to join", of_both] = words(
                of_both * layout.slots * 1024, layout.slots * 1024
            )
            if of_both < 4:
                found["sums to join", of_both] = words(
                    probabilities + of_both * 2048, 2048
                ) | words(maxima + of_both * 128, 128)
        for s in range(layout.slots):
            tiles = [probabilities + (c * own + group) * tile for group in range(own)]
            if not layout.grouped:
                del tiles[1:]
            elif not layout.whole:
                tiles += [s * 8192 + group * tile for group in range(2)]
            found["probabilities", c, s] = set[int]().union(*(words(at, tile) for at in tiles))
            for w in WARPS:  # eight tokens are a chunk, swapped in each row
                found["probabilities", c, s, w] = set[int]().union(
                    *(
                        words(at + row * 128 + ((tokens ^ (row & 7)) << 4), 16)
                        for at in tiles
                        for row in range(rows)
                        for tokens in (2 * w, 2 * w + 1)
                    )
                )
    return found


@cache
def places_of(layout: Layout) -> dict[Key, list[int]]:
    """The same, words that are in the same regions being one place."""
    regions_with: dict[int, list[Key]] = defaultdict(list)
    for key, region in regions_of(layout).items():
        for word in region:
            regions_with[word].append(key)
    places: dict[Key, list[int]] = defaultdict(list)
    for place, keys in enumerate(dict.fromkeys(tuple(keys) for keys in regions_with.values())):
        for key in keys:
            places[key].append(place)
    return places


# --- the steps of the warps ----------------------------------------------------------------------


class Read(NamedTuple):
    region: Key


class Write(NamedTuple):
    region: Key


class Wait(NamedTuple):
    barrier: Key
    phase: int  # that is meant: the wait sees its parity


class Arrive(NamedTuple):
    barrier: Key


class Meet(NamedTuple):
    barrier: Key
    warps: int


Step = Read | Write | Wait | Arrive | Meet

ALL_MEET = Meet(("both",), 8)


def consume(layout: Layout, part: list[Segment], c: int, w: int) -> Iterator[Step]:
    """A warp of a consumer: Fp8Consumer::compute and Fp8Finisher::finish."""
    t = 0
    for n, segment in enumerate(part):
        b = n % layout.queries
        if layout.queries > 1 and n > 0:
            before = n - 1
            yield Wait(("query_free", before % layout.queries), before // layout.queries)
        if w == 0:
            yield Write(("references", c))
        yield Wait(("query_full", b), n // layout.queries)
        for i in range((c ^ t) & 1, segment.blocks, 2):
            yield from attend(layout, b, t + i, c, w, i)
        t += segment.blocks
        yield from finish(layout, b, c, w)
        if segment.cut:
            yield from join(c * 4 + w, segment.joins, n + 1 == len(part))


def attend(layout: Layout, b: int, block: int, c: int, w: int, i: int) -> Iterator[Step]:
    """Block i of a segment: multiply_query, weigh and multiply_values.

    A consumer's first one raises references, its second one when it has stored probabilities.
    """
    s, meet = block % layout.slots, Meet(("consumer", c), 4)
    yield Wait(("full", s), block // layout.slots)
    yield Read(("RoPE columns", s))
    yield Read(("query", b))
    yield meet
    if 2 <= i < 4:
        yield Read(("references", c))
        yield Write(("probabilities", c, s, w))
        yield meet
    if i < 4:
        for _ in range(layout.rows // 16):
            yield Write(("maxima", c, w))
            yield meet
            yield Read(("references", c))
            yield from (Read(("maxima", c, other)) for other in WARPS)
            yield meet
            if w == 0:
                yield Write(("references", c))
        yield meet
    yield Read(("references", c))
    yield Write(("probabilities", c, s, w))
    yield meet
    yield Read(("probabilities", c, s))
    yield Arrive(("free", s))


def finish(layout: Layout, b: int, c: int, w: int) -> Iterator[Step]:
    yield Write(("sums", c, w))
    if w == 0:
        yield Read(("references", c))
        yield Write(("last references", c))
    yield ALL_MEET
    for trade in range(layout.rows // 16):
        if trade > 0:
            yield ALL_MEET
        yield Write(("exchange", b, c, w))
        yield ALL_MEET
        for whose in range(2):
            yield Read(("last references", whose))
            yield from (Read(("sums", whose, other)) for other in WARPS)
        yield Read(("exchange", b, 1 - c, w))
    yield Arrive(("query_free", b))


def join(w: int, joins: bool, last: bool) -> Iterator[Step]:
    """Joiner::join; where it joins, all warps of both consumers are helpers of an item."""
    yield ALL_MEET
    if w == 0:
        yield Write(("role",))
    yield ALL_MEET
    yield Read(("role",))
    if joins:
        yield Write(("rows to join", w))
        if last:
            yield Write(("pieces to join", w))
            yield Read(("pieces to join", w))
        yield Read(("rows to join", w))
        yield ALL_MEET
        for step in (4, 2, 1):
            place = w % step + (0 if step == 4 else step)
            if step <= w < 2 * step:
                yield Write(("sums to join", place))
            yield ALL_MEET
            if w < step:
                yield Read(("sums to join", place))
        yield ALL_MEET
    yield ALL_MEET


def load_query(layout: Layout, part: list[Segment], loader: int) -> Iterator[Step]:
    for n in range(len(part)):
        b = n % layout.queries
        yield Wait(("query_free", b), n // layout.queries - 1)
        yield Write(("query rows", b, loader))
        yield Arrive(("query_full", b))


def load_kv(layout: Layout, part: list[Segment]) -> Iterator[Step]:
    for t in range(sum(segment.blocks for segment in part)):
        s, turn = t % layout.slots, t // layout.slots
        yield Wait(("free", s), turn - 1)
        yield Write(("RoPE columns", s))
        yield Arrive(("full", s))


# --- who knows of what ---------------------------------------------------------------------------

ARRIVALS = {"full": 1, "free": 4, "query_full": 2, "query_free": 8}

Clock = list[int]  # of each warp, how much of it has happened before


class ModelError(Exception):
    pass


class Barrier:
    """An mbarrier: what was known at the arrivals of each phase that is complete."""

    def __init__(self, arrivals: int, warps: int) -> None:
        self.arrivals, self.warps = arrivals, warps
        self.complete: list[Clock] = []
        self.arrived: list[Clock] = []

    def arrive(self, clock: Clock) -> None:
        self.arrived.append(clock[:])
        if len(self.arrived) == self.arrivals:
            self.complete.append(latest(self.arrived))
            self.arrived = []

    def passed(self, phase: int) -> Clock | None:
        """Return what a wait for the phase tells; None if it goes on."""
        if len(self.complete) % 2 == phase % 2:
            return None
        if len(self.complete) != phase + 1:
            raise ModelError(f"a wait for phase {phase} passes with {len(self.complete)} complete")
        return self.complete[phase] if phase >= 0 else [0] * self.warps


def latest(clocks: list[Clock]) -> Clock:
    return [max(times) for times in zip(*clocks, strict=True)]


def without(edit: Edit | None, consumes: bool, steps: Iterator[Step]) -> Iterator[Step]:
    return (step for step in steps if not (edit and edit(consumes, step)))


class Run:
    """The warps of a part, in a random order."""

    def __init__(self, layout: Layout, part: list[Segment], edit: Edit | None) -> None:
        consumers = (consume(layout, part, c, w) for c, w in itertools.product(range(2), WARPS))
        loaders = (load_query(layout, part, loader) for loader in range(2))
        warps = [*consumers, *loaders, load_kv(layout, part)]
        self.steps = [without(edit, i < 8, steps) for i, steps in enumerate(warps)]
        count = len(warps)
        self.places = places_of(layout)
        self.clocks = [[int(i == j) for j in range(count)] for i in range(count)]
        self.barriers: dict[Key, Barrier] = {}
        self.meeting: dict[Key, list[int]] = defaultdict(list)
        # Of each place and, by warp and whether it wrote, the last access: when, and to what.
        self.accesses: dict[int, dict[tuple[int, bool], tuple[int, str]]] = defaultdict(dict)
        self.races: set[tuple[str, str]] = set()

    def go(self, rng: random.Random) -> set[tuple[str, str]]:
        """Run all to the end; between which regions there are races."""
        now = {warp: step for warp, steps in enumerate(self.steps) if (step := next(steps, None))}
        while now:
            for warp in rng.sample(list(now), len(now)):
                if done := self.do(warp, now[warp]):
                    for one in done:
                        del now[one]
                        if step := next(self.steps[one], None):
                            now[one] = step
                    break
            else:
                raise ModelError(f"all wait for ever: {now}")
        return self.races

    def do(self, warp: int, step: Step) -> list[int]:
        """Do a step if it can be done; which warps have done theirs."""
        clock = self.clocks[warp]
        match step:
            case Read() | Write():
                self.access(warp, step.region, isinstance(step, Write))
            case Arrive():
                self.barrier(step.barrier).arrive(clock)
                clock[warp] += 1
            case Wait():
                known = self.barrier(step.barrier).passed(step.phase)
                if known is None:
                    return []
                self.clocks[warp] = latest([clock, known])
            case Meet():
                here = self.meeting[step.barrier]
                if warp not in here:
                    here.append(warp)
                if len(here) < step.warps:
                    return []
                known = latest([self.clocks[one] for one in here])
                for one in here:
                    self.clocks[one] = known[:]
                    self.clocks[one][one] += 1
                return self.meeting.pop(step.barrier)
        return [warp]

    def barrier(self, key: Key) -> Barrier:
        return self.barriers.setdefault(key, Barrier(ARRIVALS[str(key[0])], len(self.clocks)))

    def access(self, warp: int, region: Key, writes: bool) -> None:
        clock, name = self.clocks[warp], str(region[0])
        for place in self.places[region]:
            accesses = self.accesses[place]
            for (other, wrote), (when, what) in accesses.items():
                if other != warp and (writes or wrote) and clock[other] < when:
                    self.races.add((min(name, what), max(name, what)))
            accesses[warp, writes] = clock[warp], name


# --- parts ---------------------------------------------------------------------------------------

BLOCKS = (0, 1, 2, 3, 5, 8)
ENDS = ((False, False), (True, False), (True, True))

Edit = Callable[[bool, Step], bool]  # of a consumer or not, whether it lacks this step


def parts(rng: random.Random) -> list[list[Segment]]:
    """All of one segment; of two all but long pairs; some of three, four. The ends may be cut."""
    blocks = [
        *(pair for pair in itertools.product(BLOCKS, repeat=2) if sum(pair) <= 8),
        *(tuple(rng.choices(BLOCKS[:-1], k=k)) for k in (3, 4) for _ in range(6)),
    ]
    found = [[Segment(count, *end)] for count in BLOCKS for end in ENDS]
    for counts in blocks:
        part = [Segment(count) for count in counts]
        for at in (0, -1):
            part[at] = Segment(counts[at], *rng.choice(ENDS))
        found.append(part)
    return found


def races(layout: Layout, edit: Edit | None = None) -> set[tuple[str, str]]:
    rng = random.Random(layout.rows)
    return set[tuple[str, str]]().union(*(Run(layout, part, edit).go(rng) for part in parts(rng)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_segments_follow_one_another_without_a_race(layout: Layout) -> None:
    assert races(layout) == set()


# --- the model can fail --------------------------------------------------------------------------


def waits_for(step: Step, barrier: str) -> bool:
    return isinstance(step, Wait) and step.barrier[0] == barrier


def waits_for_the_end(consumes: bool, step: Step) -> bool:
    """Of the segment before: a consumer that then begins with the next one."""
    return consumes and waits_for(step, "query_free")


@pytest.mark.parametrize("layout", some(LAYOUTS, 3), ids=str)
def test_without_the_wait_for_the_end_of_the_segment_before(layout: Layout) -> None:
    """A consumer writes over what the other one still adds up, but not with one query."""
    wanted = {
        ("exchange", "probabilities"),
        ("last references", "last references"),
        ("sums", "sums"),
    }
    assert races(layout, waits_for_the_end) == (wanted if layout.queries > 1 else set())


def test_only_behind_whole_segments_consumers_have_not_met() -> None:
    for blocks in itertools.product(BLOCKS, repeat=2):
        for end in ENDS:
            part = [Segment(blocks[0], *end), Segment(blocks[1])]
            found = Run(LAYOUTS[0], part, waits_for_the_end).go(random.Random(0))
            assert bool(found) is not part[0].cut


FAULTS: dict[str, tuple[Edit, tuple[str, str]]] = {
    "no wait for the query": (
        lambda _, step: waits_for(step, "query_full"),
        ("query", "query rows"),
    ),
    "consumers do not meet": (
        lambda _, step: step == ALL_MEET,
        ("exchange", "exchange"),
    ),
    "a consumer's warps do not meet": (
        lambda _, step: isinstance(step, Meet) and step != ALL_MEET,
        ("probabilities", "probabilities"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_other_faults_are_found(fault: str, layout: Layout) -> None:
    edit, race = FAULTS[fault]
    assert race in Run(layout, [Segment(5)], edit).go(random.Random(0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_for_a_query_that_nobody_frees_all_wait_for_ever(layout: Layout) -> None:
    def frees(_: bool, step: Step) -> bool:
        return step == Arrive(("query_free", 0))

    with pytest.raises(ModelError, match="all wait for ever"):
        Run(layout, [Segment(2), Segment(1)], frees).go(random.Random(0))


# --- the model is of this code -------------------------------------------------------------------

MODELLED = {
    "mla/mla_decode_fp8/kernel.cuh": "cb6c2d7e",
    "mla/mla_decode_fp8/load.cuh": "ed00d8d0",
    "mla/mla_decode_fp8/compute.cuh": "0bdbe6c8",
    "mla/mla_decode_fp8/softmax.cuh": "1a3b44a4",
    "mla/mla_decode_fp8/finish.cuh": "210cf2ab",
    "mla/mla_decode_fp8/layout.cuh": "18c1e5b3",
    "split/join.cuh": "cf6f9204",
}


@pytest.mark.parametrize("file", MODELLED)
def test_the_model_follows_the_kernel(file: str) -> None:
    """After a change of what is marked there, change the model, too; then the digest here."""
    assert modelled(file, "fp8_segments") == MODELLED[file]
