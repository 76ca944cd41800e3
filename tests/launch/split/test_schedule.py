# SPDX-License-Identifier: Apache-2.0
"""Properties of the schedule (of its NumPy form, the kernel's oracle) and of a plan's shape."""

from __future__ import annotations

import collections
import heapq
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import cumla
from cumla.launch.mla.shape import VALUE_DIM, MLADecodeKey
from cumla.launch.split import plan as mla_plan
from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    ROW_GROUP,
    ROW_TILE,
    RULES,
    min_saving,
    piece_blocks,
    piece_cost,
)
from cumla.launch.split.schedule import (
    SPECS,
    max_tokens,
    schedule_spec,
)
from tests.gpu.tools.parts import (
    LENGTHS,
    PART,
    invariant_parts_table,
    invariant_places_table,
    parts_table,
    places_table,
)
from tests.launch.split.schedule_mirror import Schedule, invariant_schedule, schedule
from tests.selection import some

FIXED_COST, CUT_COST = RULES.fixed_cost, RULES.cut_cost
MIN_BLOCKS, MIN_SHARE = RULES.min_blocks, RULES.min_share

LONGEST = 10**6  # tokens
THREADS = SPECS[0].threads
MOST_PARTS = THREADS - 1  # a thread of the kernel for every bound
PACKED_REQUESTS, PACKED_PARTS, PACKED_SHARE = 256, 160, 2**20  # most that packing takes

thorough = settings(deadline=None)  # as many examples as tests/conftest.py says


class Piece(NamedTuple):
    """Blocks [begin, end) of a request, done by a part; what mla/mla_decode.cu calls a segment."""

    part: int
    request: int
    begin: int
    end: int
    slot: int  # where it is left, if other parts have the rest


def blocks_of(lengths: np.ndarray) -> np.ndarray:
    """KV blocks of each request."""
    blocks: np.ndarray = -(-np.maximum(lengths, 0) // BLOCK_TOKENS)
    return blocks


def pieces_of(made: Schedule, lengths: np.ndarray) -> list[Piece]:
    """Return what each part does, in order, from the bounds: as the kernel reads them."""
    blocks = blocks_of(lengths).tolist()
    pieces = []
    for part, (begin, end) in enumerate(itertools.pairwise(made.bounds.tolist())):
        last_place = end[0] if end[1] > 0 else end[0] - 1
        for place in range(begin[0], last_place + 1):
            first, request = place == begin[0], int(made.order[place])
            pieces.append(
                Piece(
                    part,
                    request,
                    begin[1] if first else 0,
                    end[1] if place == end[0] else blocks[request],
                    0 if first else 1,
                )
            )
    return pieces


def pieces_by_request(made: Schedule, lengths: np.ndarray) -> list[list[Piece]]:
    """The pieces of every request, in the order of the parts."""
    found: list[list[Piece]] = [[] for _ in lengths]
    for piece in pieces_of(made, lengths):
        found[piece.request].append(piece)
    return found


def cost_of_parts(made: Schedule, lengths: np.ndarray, piece: int = 0) -> np.ndarray:
    """What each part costs: blocks and FIXED_COST of all it works on, `piece` if not whole."""
    costs = np.zeros(len(made.bounds) - 1, np.int64)
    for pieces in pieces_by_request(made, lengths):
        for one in pieces:
            price = piece if len(pieces) > 1 else 0
            costs[one.part] += one.end - one.begin + FIXED_COST + price
    return costs


def share_of(lengths: np.ndarray, parts: int) -> int:
    """What a part costs if all cost the same, before anything is cut; never below MIN_SHARE."""
    total = int((blocks_of(lengths) + FIXED_COST).sum())
    return max(-(-total // parts), MIN_SHARE)


def whole_price(lengths: np.ndarray, parts: int) -> int:
    """Cost of the dearest part where ceil(batch / parts) whole requests go to each."""
    costs = blocks_of(lengths) + FIXED_COST
    group = -(-len(lengths) // parts)
    return max(int(costs[i : i + group].sum()) for i in range(0, len(costs), group))


def parts_needed(lengths: np.ndarray, size: int, row_groups: int) -> int:
    """Parts that hold each request alone, where pieces of ``size`` blocks save enough."""
    short = size + min_saving(row_groups)
    return sum(1 if n < short else -(-n // size) for n in blocks_of(lengths).tolist())


def sizes_of_pieces(lengths: np.ndarray, parts: int) -> range:
    """Candidates for the size of pieces: from equal ones up, in steps of 1 part in 16."""
    least = max(-(-int(blocks_of(lengths).sum()) // parts), MIN_SHARE)
    step = max(1, least // 16)
    return range(least, least + 32 * step, step)


def size_of_pieces(lengths: np.ndarray, parts: int, row_groups: int) -> int:
    """The first candidate with which all requests get parts of their own.

    There is one where two parts fall on each request: a request takes less than blocks / size + 1
    parts, so that twice the blocks of equal pieces always fit, and the candidates go that far.
    """
    sizes = sizes_of_pieces(lengths, parts)
    return next(size for size in sizes if parts_needed(lengths, size, row_groups) <= parts)


class Packing(NamedTuple):
    """Who does what under a limit."""

    cost: int  # of the dearest part, full pieces counted as the limit
    parts: list[list[tuple[int, int, int]]]  # of each: request, and its blocks [begin, end)


def pack(blocks: list[int], parts: int, limit: int, piece: int) -> Packing | None:
    """Pack requests: the dearest of what is left goes to the cheapest part, and so on.

    Of a request above the limit full pieces are taken off, for parts of their own, until one piece
    would hold the rest. Of rests a part takes two. None if parts are few.
    """
    full_pieces: dict[int, int] = {}
    left, items = list(blocks), []
    for request in range(len(blocks)):
        if blocks[request] + FIXED_COST > limit:
            full_pieces[request] = 0
            while left[request] > limit - FIXED_COST - piece:
                left[request] -= limit - FIXED_COST - piece
                full_pieces[request] += 1
            left[request] = max(left[request], MIN_BLOCKS)
        price = piece if request in full_pieces else 0
        items.append((-(left[request] + FIXED_COST + price), request))
    others = parts - sum(full_pieces.values())
    if others < 1 or len(full_pieces) > 2 * others:
        return None

    held: list[list[int]] = [[] for _ in range(others)]
    heapq.heapify(items)
    loads = [(0, part) for part in range(others)]
    while items:
        minus_cost, request = heapq.heappop(items)
        passed_over = []
        while request in full_pieces and sum(r in full_pieces for r in held[loads[0][1]]) == 2:
            passed_over.append(heapq.heappop(loads))
        load, part = loads[0]
        heapq.heapreplace(loads, (load - minus_cost, part))
        held[part].append(request)
        for passed in passed_over:
            heapq.heappush(loads, passed)

    dealt: list[list[tuple[int, int, int]]] = []
    for requests in held:
        rests = [r for r in requests if r in full_pieces]
        here = [(r, 0, blocks[r]) for r in requests if r not in full_pieces]
        behind = []
        for request in rests[:1]:  # it ends here
            own = blocks[request] - left[request]
            dealt += [[(request, *ends)] for ends in evenly(0, own, full_pieces[request])]
            here.insert(0, (request, own, blocks[request]))
        for request in rests[1:]:  # it begins here
            here.append((request, 0, left[request]))
            ends_of = evenly(left[request], blocks[request], full_pieces[request])
            behind += [[(request, *ends)] for ends in ends_of]
        dealt += [here, *behind]
    return Packing(max(max(loads)[0], limit if full_pieces else 0), dealt)


def evenly(begin: int, end: int, count: int) -> list[tuple[int, int]]:
    """Ranges of equal size, but for the rounding."""
    edges = [begin + i * (end - begin) // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def limits_of(lengths: np.ndarray, parts: int, piece: int) -> range:
    """Limits to try, from the equal share up; a thread of the kernel for each of all requests.

    Below the first one what is between two cuts could be too small, and what is left uncuttable.
    """
    share = share_of(lengths, parts)
    least = max(share, FIXED_COST + piece + 2 * MIN_BLOCKS - 1)
    warps = -(-len(lengths) // 32)
    tries = min(8, 32 // warps)
    step = max(-(-(FIXED_COST + 2 * piece) // (tries - 1)), share // 64)
    return range(least, least + tries * step, step)


def packable(lengths: np.ndarray, parts: int) -> bool:
    """Return whether there are few enough of all for packing."""
    few = len(lengths) <= PACKED_REQUESTS and parts <= PACKED_PARTS
    return few and share_of(lengths, parts) <= PACKED_SHARE


def packings(lengths: np.ndarray, parts: int, row_groups: int) -> dict[int, Packing]:
    """All that are tried and that there are enough parts for, by their limits."""
    blocks, piece = blocks_of(lengths).tolist(), piece_cost(row_groups)
    limits = limits_of(lengths, parts, piece)
    tried = {limit: pack(blocks, parts, limit, piece) for limit in limits}
    return {limit: packing for limit, packing in tried.items() if packing}


def best_limit(found: dict[int, Packing]) -> int:
    """The one whose dearest part is cheapest, of equal ones the least."""
    return min(found, key=lambda limit: (found[limit].cost, limit))


def kind(lengths: np.ndarray, parts: int, row_groups: int) -> str:
    """How requests are dealt out: apart, whole ones in groups, packed, or in equal shares."""
    share, price = share_of(lengths, parts), whole_price(lengths, parts)
    two_each = 2 * len(lengths) <= parts
    if two_each and size_of_pieces(lengths, parts, row_groups) + FIXED_COST <= share + CUT_COST:
        return "apart"
    if price <= share + min(CUT_COST, share // 32):
        return "whole"
    found = packings(lengths, parts, row_groups) if packable(lengths, parts) else {}
    if found:
        packed = found[best_limit(found)].cost
        if packed <= most_of("packed", lengths, parts, row_groups):
            return "whole" if price <= packed else "packed"
    return "whole" if price <= share + FIXED_COST + 2 * piece_cost(row_groups) else "shares"


# What a part of equal shares may cost beyond a share: a part's range of the summed cost is one
# share; only its two cuts add to that. Let a cut fall o into the cost b + FIXED_COST of a request
# of b blocks.
#     - Where it stays, the piece behind it costs b - o + FIXED_COST, its part of the cost, and that
#       before it o + FIXED_COST: FIXED_COST more.
#     - Where o < MIN_BLOCKS it moves to the begin: the part behind it costs o more, MIN_BLOCKS - 1
#       at most.
#     - Where b - o < MIN_BLOCKS it moves to the end: the part before it costs b + FIXED_COST - o
#       more, MIN_BLOCKS - 1 + FIXED_COST at most.
#     The worst is a cut moved to the begin and the next one moved to the end. What a moved cut
#     gives to one part the other one lacks, so that no part lacks more than that either.
# With the price of pieces the worst is two cuts that stay: a moved one leaves no piece, and a piece
# costs MIN_BLOCKS or more.
SHARE_EXCESS = 2 * (MIN_BLOCKS - 1) + FIXED_COST


def most_of(how: str, lengths: np.ndarray, parts: int, row_groups: int) -> int:
    """What the dearest part may cost: with its pieces' price, but for those of requests apart.

    5 % beyond an equal share, or what cutting costs: two pieces' price, and once more FIXED_COST.
    """
    share = share_of(lengths, parts)
    if how == "apart":  # what is not cut is longer than a piece by less than min_saving
        return share + CUT_COST + min_saving(row_groups) - 1
    return share + max(share // 20, 2 * piece_cost(row_groups) + FIXED_COST)


def dearest_of(how: str, lengths: np.ndarray, parts: int, row_groups: int) -> int:
    """What the dearest part costs, with its pieces' price, but for those of requests apart."""
    piece = 0 if how == "apart" else piece_cost(row_groups)
    return int(cost_of_parts(schedule(lengths, parts, row_groups), lengths, piece).max())


MIXES = {
    "equal": lambda rng, batch, most: np.full(batch, rng.integers(0, most + 1)),
    "ragged": lambda rng, batch, most: rng.integers(0, most + 1, size=batch),
    "log-normal": lambda rng, batch, most: np.minimum(
        rng.lognormal(np.log(1 + most / 10), 0.8, size=batch), most
    ),
    "bimodal": lambda rng, batch, most: np.where(rng.random(batch) < 0.5, most, most // 100),
    "one giant, many dwarfs": lambda rng, batch, most: np.where(
        np.arange(batch) == rng.integers(batch), most, rng.integers(0, 65, size=batch)
    ),
    "mostly empty": lambda rng, batch, most: np.where(
        rng.random(batch) < 0.1, rng.integers(0, most + 1, size=batch), 0
    ),
    "negative ones": lambda rng, batch, most: rng.integers(-most - 1, most + 1, size=batch),
}


@st.composite
def mixed_lengths(draw: st.DrawFn, largest_batch: int = 3000) -> np.ndarray:
    """Lengths of a mix that servers see."""
    make = MIXES[draw(st.sampled_from(sorted(MIXES)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.one_of(st.integers(1, 50), st.integers(1, largest_batch)))
    most = draw(st.one_of(st.integers(0, 1000), st.integers(0, LONGEST)))
    return np.asarray(make(rng, batch, most)).astype(np.int32)


few_lengths = st.lists(
    st.one_of(st.integers(-70, 700), st.integers(0, LONGEST)), min_size=1, max_size=12
).map(lambda values: np.array(values, np.int32))
any_lengths = st.one_of(few_lengths, mixed_lengths())
any_parts = st.one_of(st.integers(1, 8), st.integers(1, 200), st.integers(1, MOST_PARTS))
any_row_groups = st.integers(1, ROW_TILE // ROW_GROUP)


@st.composite
def cut_as_they_fall(
    draw: st.DrawFn, batches: tuple[int, ...] = (1, 1, 150, THREADS + 1)
) -> tuple[np.ndarray, int, int]:
    """Lengths, less than two parts for each, and row groups; some are much longer than the rest."""
    longest = draw(st.sampled_from([5, 10, 40, 400]))  # blocks
    blocks = draw(st.lists(st.integers(0, longest), min_size=2, max_size=100))
    blocks *= -(-draw(st.sampled_from(batches)) // len(blocks))
    for giant in draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=3)):
        blocks[giant] = draw(st.integers(20, 5000))
    parts = draw(st.integers(2, min(2 * len(blocks) - 1, MOST_PARTS)))
    return np.array(blocks) * BLOCK_TOKENS, parts, draw(any_row_groups)


@st.composite
def many_above_the_limit(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths of which most cost more than a share, parts to pack them into, and row groups."""
    short = draw(st.lists(st.integers(0, 40), max_size=20))
    most = draw(st.sampled_from([1500, 20_000]))  # blocks
    long = draw(st.lists(st.integers(most // 2, most), min_size=2, max_size=60))
    blocks = draw(st.permutations([*short, *long]))
    parts = draw(st.integers(len(long), min(2 * len(blocks) - 1, PACKED_PARTS)))
    return np.array(blocks) * BLOCK_TOKENS, parts, draw(any_row_groups)


packed_or_shares = st.one_of(cut_as_they_fall(), many_above_the_limit())
any_case = st.one_of(st.tuples(any_lengths, any_parts, any_row_groups), packed_or_shares)


# --- who does what --------------------------------------------------------------------------------


@thorough
@given(any_lengths, any_parts, any_row_groups)
@example(np.array([1, 0, 65], np.int32), 400, 4)
def test_bounds_run_from_the_first_block_to_the_last(
    lengths: np.ndarray, parts: int, row_groups: int
) -> None:
    made = schedule(lengths, parts, row_groups)
    bounds = made.bounds
    assert (bounds.shape, bounds.dtype) == ((parts + 1, 2), np.dtype(np.int32))
    assert bounds[0].tolist() == [0, 0]
    assert bounds[-1].tolist() == [len(lengths), 0]
    places, blocks = bounds.T
    assert (np.diff(places) >= 0).all()
    assert (np.diff(blocks)[np.diff(places) == 0] >= 0).all()
    inside = blocks > 0  # a cut in the middle of a request leaves something on both sides
    assert (blocks >= 0).all()
    assert (blocks[inside] < blocks_of(lengths)[made.order][places[inside]]).all()


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_every_request_has_a_place(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    """That of its number, but for packed ones."""
    order = schedule(lengths, parts, row_groups).order
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(len(lengths)))
    if kind(lengths, parts, row_groups) != "packed":
        np.testing.assert_array_equal(order, np.arange(len(lengths)))


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_every_block_belongs_to_one_part(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    made = schedule(lengths, parts, row_groups)
    every = zip(pieces_by_request(made, lengths), blocks_of(lengths).tolist(), strict=True)
    for pieces, blocks in every:
        edges = [piece.begin for piece in pieces] + [blocks]
        assert edges[0] == 0
        assert [piece.end for piece in pieces] == edges[1:]
        if blocks == 0:
            assert len(pieces) == 1
        else:
            assert all(piece.begin < piece.end for piece in pieces)


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_records_are_of_the_requests_that_several_parts_touch(
    lengths: np.ndarray, parts: int, row_groups: int
) -> None:
    made = schedule(lengths, parts, row_groups)
    by_request = pieces_by_request(made, lengths)
    by_place = [by_request[request] for request in made.order]
    wanted = [
        (place, pieces[0].part, pieces[-1].part)
        for place, pieces in enumerate(by_place)
        if len(pieces) > 1
    ]
    assert made.splits.dtype == np.int32
    assert made.splits.shape == (len(wanted), 3)
    assert made.splits.tolist() == [list(record) for record in wanted]
    assert len(wanted) <= parts - 1
    for pieces in by_request:  # without a gap
        assert [p.part for p in pieces] == list(range(pieces[0].part, pieces[-1].part + 1))


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_a_part_holds_a_piece_a_slot(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    """Slot 0 for the request with which the part begins, 1 for the one with which it ends."""
    made = schedule(lengths, parts, row_groups)
    taken: set[tuple[int, int]] = set()
    for pieces in pieces_by_request(made, lengths):
        for piece in pieces if len(pieces) > 1 else ():
            assert (piece.part, piece.slot) not in taken
            taken.add((piece.part, piece.slot))
        # mla_decode looks for all but the first piece in slot 0
        assert all(piece.slot == 0 for piece in pieces[1:])


@thorough
@given(few_lengths, any_parts, any_row_groups)
def test_negative_lengths_are_empty_ones(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    made = schedule(lengths, parts, row_groups)
    other = schedule(np.maximum(lengths, 0), parts, row_groups)
    for one, same in zip(made, other, strict=True):
        np.testing.assert_array_equal(one, same)


@thorough
@given(mixed_lengths(largest_batch=50), any_parts, any_row_groups, st.integers(1, BLOCK_TOKENS))
def test_only_the_number_of_blocks_counts(
    lengths: np.ndarray, parts: int, row_groups: int, tail: int
) -> None:
    other = np.maximum((blocks_of(lengths) - 1) * BLOCK_TOKENS + tail, 0)
    made = schedule(lengths, parts, row_groups), schedule(other, parts, row_groups)
    for one, same in zip(*made, strict=True):
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("batch", [1, 7, 31, 32, 3000, 100_000])
def test_the_largest_lengths_do_not_overflow(batch: int) -> None:
    """The kernel adds costs up in 32 bits; no cache is as large as where lengths are clamped."""
    longest = max_tokens(batch)
    assert batch * (blocks_of(np.array([longest]))[0] + FIXED_COST) <= 2**30
    assert longest * batch * 1152 > 2**40 or longest >= 2**31 - BLOCK_TOKENS
    lengths = np.full(batch, 2**31 - 1, np.int32)
    bounds = schedule(lengths, 132, 4).bounds.astype(np.int64)
    np.testing.assert_array_equal(bounds, schedule(np.full(batch, longest), 132, 4).bounds)
    assert bounds[-1].tolist() == [batch, 0]
    each = longest // BLOCK_TOKENS
    assert (bounds[:, 1] < each).all()
    blocks = bounds[:, 0] * each + bounds[:, 1]
    np.testing.assert_allclose(np.diff(blocks), blocks[-1] / 132, atol=132, rtol=1e-3)


# --- what a thread block reads of it -------------------------------------------------------------


class Segment(NamedTuple):
    """A piece as mla_decode finds it in the record of its part, and where its peers' pieces are."""

    piece: Piece
    first_part: int
    last_part: int
    first_slot: int


def segments_of(
    part: int, record: np.void, places: np.ndarray, lengths: np.ndarray
) -> list[Segment]:
    """Return what a thread block works on: segment_of in cumla/cuda/mla/mla_decode/layout.cuh."""
    blocks = blocks_of(lengths).tolist()
    r = {name: int(record[name]) for name in PART.names or ()}
    last_place = r["end_place"] if r["end_block"] > 0 else r["end_place"] - 1
    found = []
    for place in range(r["place"], last_place + 1):
        head, tail = place == r["place"], place == r["end_place"]
        request, tokens = (r["request"], r["tokens"]) if head else places[place].tolist()
        assert tokens == max(lengths[request], 0)
        end = r["end_block"] if tail else blocks[request]
        piece = Piece(part, request, r["block"] if head else 0, end, 0 if head else 1)
        last = r["last_part"] if head else r["tail_last_part"] if tail else part
        first, slot = (r["first_part"], r["first_slot"]) if head else (part, 1)
        found.append(Segment(piece, first, last, slot))
    return found


def check_records(
    table: np.ndarray, places: np.ndarray, made: Schedule, lengths: np.ndarray
) -> None:
    """Every thread block finds its pieces, and the pieces of those with whom it joins them."""
    by_request = pieces_by_request(made, lengths)
    read: list[list[Segment]] = [[] for _ in lengths]
    for part, record in enumerate(table):
        for segment in segments_of(part, record, places, lengths):
            read[segment.piece.request].append(segment)
    meetings = set()
    for pieces, segments in zip(by_request, read, strict=True):
        assert [segment.piece for segment in segments] == pieces
        ends = (pieces[0].part, pieces[-1].part)
        assert all((s.first_part, s.last_part) == ends for s in segments)
        if len(pieces) > 1:
            assert all(s.first_slot == pieces[0].slot for s in segments)
            assert ends[0] not in meetings, "two requests would meet at one ticket"
            meetings.add(ends[0])


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_records_of_the_parts(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    case = (lengths, parts, row_groups)
    check_records(parts_table(*case), places_table(*case), schedule(*case), lengths)


@pytest.mark.parametrize("name", LENGTHS)
def test_records_that_the_gpu_tests_compare(name: str) -> None:
    case = LENGTHS[name]
    lengths = np.minimum(case[0], max_tokens(len(case[0])))
    check_records(parts_table(*case), places_table(*case), schedule(*case), lengths)


def test_the_compared_schedules_are_of_every_kind() -> None:
    kinds = collections.defaultdict(set)
    for lengths, parts, row_groups in LENGTHS.values():
        case = np.minimum(lengths, max_tokens(len(lengths))), parts, row_groups
        made, blocks = schedule(*case), blocks_of(case[0])
        of = kind(*case)
        kinds[of].add("cut" if len(made.splits) else "not cut")
        kinds[of] |= {"zeros"} if not blocks.all() else set()
        kinds[of] |= {"more requests than threads"} if len(blocks) > THREADS else set()
        idle = made.bounds[:-1, 0] == len(blocks)
        kinds[of] |= {"idle at the end"} if idle.any() else set()
        empty = (made.bounds[1:] == made.bounds[:-1]).all(axis=1) & ~idle
        kinds[of] |= {"empty in the middle"} if empty.any() else set()
        if of == "apart":
            uncut = np.delete(blocks, made.splits[:, 0])
            longer = (uncut > size_of_pieces(*case)).any()
            kinds[of] |= {"longer than a piece, not cut"} if longer and len(made.splits) else set()
        if of == "packed":
            kinds[of] |= kinds_of_packing(made, case[0])
        if of == "shares":
            kinds[of] |= {"of too few parts to pack"} if packable(*case[:2]) else set()
            kinds[of] |= {"too long to pack"} if share_of(*case[:2]) > PACKED_SHARE else set()
    everywhere = {"zeros", "idle at the end"}
    assert kinds == {
        "apart": everywhere | {"cut", "not cut", "longer than a piece, not cut"},
        "whole": everywhere | {"not cut", "more requests than threads"},
        "packed": everywhere
        | {"cut", "not cut", "256 requests", "one rest and whole requests", "one rest alone"}
        | {"two rests and whole requests", "two rests alone", "whole requests", "equal costs"}
        | {"160 parts"},
        "shares": {"zeros", "cut", "empty in the middle", "more requests than threads"}
        | {"idle at the end", "of too few parts to pack", "too long to pack"},
    }
    tables = {name: parts_table(*case) for name, case in LENGTHS.items()}
    assert any(table["first_slot"].any() for table in tables.values())
    spans = tables["one request over all warps of the schedule"]
    assert (spans["last_part"] - spans["first_part"]).max() > 300


def kinds_of_packing(made: Schedule, lengths: np.ndarray) -> set[str]:
    blocks, parts = blocks_of(lengths), len(made.bounds) - 1
    found = {"256 requests"} if len(blocks) == PACKED_REQUESTS else set()
    found |= {"160 parts"} if parts == PACKED_PARTS else set()
    found |= {"equal costs"} if len(np.unique(blocks)) < len(blocks) else set()
    for here in packed_parts(made, lengths):
        rests, wholes = len(here.rests), len(here.wholes)
        name = ("whole requests", "one rest", "two rests")[rests]
        if rests:
            name += " and whole requests" if wholes else " alone"
        found |= {name} if rests or wholes else set()
    return found


# --- how well ------------------------------------------------------------------------------------


@thorough
@given(any_lengths, st.one_of(st.just(1), st.integers(1, 4), any_parts), any_row_groups)
@example(np.full(33, 20 * BLOCK_TOKENS), 2, 1)  # a block dearer than equal shares may be
def test_whole_requests(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    """As many to each part, in order."""
    assume(kind(lengths, parts, row_groups) == "whole")
    made = schedule(lengths, parts, row_groups)
    group = -(-len(lengths) // parts)
    wanted = np.minimum(np.arange(parts + 1) * group, len(lengths))
    np.testing.assert_array_equal(made.bounds[:, 0], wanted)
    assert not made.bounds[:, 1].any()
    assert not len(made.splits)


@thorough
@given(any_case)
def test_requests_are_cut_only_where_whole_ones_are_dearer(
    case: tuple[np.ndarray, int, int],
) -> None:
    how, whole = kind(*case), whole_price(*case[:2])
    dearest = dearest_of(how, *case)
    assert dearest < whole if how in ("packed", "shares") else dearest <= whole


@thorough
@given(any_case)
def test_the_dearest_part(case: tuple[np.ndarray, int, int]) -> None:
    how = kind(*case)
    assert dearest_of(how, *case) <= most_of(how, *case)


def tiled(blocks: list[int], batch: int, giant: int) -> list[int]:
    """The same lengths again and again, and a longer one among them."""
    made = np.resize(blocks, batch)
    made[batch // 2] = giant
    return made.tolist()


@pytest.mark.parametrize(
    ("how", "blocks", "parts", "row_groups", "short"),
    [
        ("apart", [56, 103, 322, 80], 9, 1, 0),
        ("apart", [210, 169, 110, 234], 8, 3, 0),
        ("whole", [212, 47, 155, 67], 2, 3, 0),
        ("packed", [23, 58, 52, 51], 6, 2, 0),
        ("shares", tiled([25, 30, 38, 11, 12], 361, 90), 110, 1, 0),
    ],
)
def test_the_bounds_of_the_cost_are_met(
    how: str, blocks: list[int], parts: int, row_groups: int, short: int
) -> None:
    """They are about as small as they can be stated: these come that close."""
    lengths = np.array(blocks) * BLOCK_TOKENS
    assert kind(lengths, parts, row_groups) == how
    case = lengths, parts, row_groups
    assert dearest_of(how, *case) == most_of(how, *case) - short


@st.composite
def few_among_parts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths, at least two parts for each, and row groups."""
    longest = draw(st.sampled_from([10, 40, 400, 15_000]))  # blocks
    blocks = draw(st.lists(st.integers(0, longest), min_size=1, max_size=20))
    parts = draw(st.integers(2 * len(blocks), 200))
    return np.array(blocks) * BLOCK_TOKENS, parts, draw(any_row_groups)


@thorough
@given(few_among_parts())
@example((np.array([2433]), 8, 1))
@example((np.array([0, 1217, 64]), 6, 2))
@example((np.array([10, 9, 300]) * BLOCK_TOKENS, 132, 4))
def test_requests_apart(case: tuple[np.ndarray, int, int]) -> None:
    """Equal pieces of a part each; only where that makes a request so much shorter."""
    assume(kind(*case) == "apart")
    lengths, _, row_groups = case
    size, saving = size_of_pieces(*case), min_saving(row_groups)
    made = schedule(*case)
    pieces = pieces_of(made, lengths)
    assert [piece.part for piece in pieces] == list(range(len(pieces)))
    assert (made.bounds[len(pieces) :, 0] == len(lengths)).all()  # all idle parts are at the end
    for of_request in pieces_by_request(made, lengths):
        sizes = [piece.end - piece.begin for piece in of_request]
        assert max(sizes) - min(sizes) <= 1
        if len(sizes) > 1:
            assert max(sizes) <= size <= sum(sizes) - saving
        else:
            assert sizes[0] < size + saving


@thorough
@given(few_among_parts())
def test_the_size_of_pieces_is_the_smallest_but_for_a_step(
    case: tuple[np.ndarray, int, int],
) -> None:
    lengths, parts, row_groups = case
    sizes = sizes_of_pieces(lengths, parts)
    smallest = next(
        s for s in itertools.count(sizes[0]) if parts_needed(lengths, s, row_groups) <= parts
    )
    size = size_of_pieces(*case)
    assert smallest <= size < smallest + sizes.step
    assert size < 2 * sizes[0] + sizes.step


@thorough
@given(packed_or_shares)
def test_split_requests_are_not_cut_close_to_an_end(case: tuple[np.ndarray, int, int]) -> None:
    assume(kind(*case) in ("packed", "shares"))
    made, lengths = schedule(*case), case[0]
    places, cuts = made.bounds.T
    inside = cuts > 0
    assert (cuts[inside] >= MIN_BLOCKS).all()
    behind = blocks_of(lengths)[made.order][places[inside]] - cuts[inside]
    assert (behind >= MIN_BLOCKS).all()


@thorough
@given(cut_as_they_fall(batches=(PACKED_REQUESTS + 1, THREADS + 1)))
def test_no_share_lacks_much(case: tuple[np.ndarray, int, int]) -> None:
    """Parts without work are at the end, and all but the last one with some are full."""
    assume(kind(*case) == "shares")
    lengths, parts, _ = case
    share = share_of(lengths, parts)
    costs = cost_of_parts(schedule(*case), lengths)
    used = -(-int((blocks_of(lengths) + FIXED_COST).sum()) // share)
    assert not costs[used:].any()
    assert (costs[: used - 1] >= share - SHARE_EXCESS).all()  # the last one gets what is left


# --- packed --------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """What was packed into a part, by request: (cost, request); full pieces have other parts."""

    wholes: list[tuple[int, int]]
    rests: list[tuple[int, int]]

    @property
    def items(self) -> list[tuple[int, int]]:
        return [*self.wholes, *self.rests]

    @property
    def load(self) -> int:
        return sum(cost for cost, _ in self.items)


def packed_parts(made: Schedule, lengths: np.ndarray, piece: int = 0) -> list[Packed]:
    """All parts but those of full pieces.

    The rest of a request is its last piece, which ends in a part that then takes others; only where
    that part had a rest already, the second one is the first piece, and in slot 1.
    """
    found = [Packed([], []) for _ in made.bounds[:-1]]
    full = set()
    for pieces in pieces_by_request(made, lengths):
        rest = pieces[0] if len(pieces) == 1 or pieces[0].slot == 1 else pieces[-1]
        cost = rest.end - rest.begin + FIXED_COST
        if len(pieces) == 1:
            found[rest.part].wholes.append((cost, rest.request))
        else:
            found[rest.part].rests.append((cost + piece, rest.request))
        full |= {one.part for one in pieces if one != rest}
    assert not any(found[part].items for part in full)
    return [here for part, here in enumerate(found) if part not in full]


@thorough
@given(packed_or_shares)
@example((np.tile([3000, 0, 700, 3000, 0], 40), 132, 3))
@example((np.full(88, 30_000), 132, 1))
def test_packed_parts(case: tuple[np.ndarray, int, int]) -> None:
    """Of the limit, among those tried, whose dearest part is cheapest."""
    assume(kind(*case) == "packed")
    lengths, parts, _ = case
    found = packings(*case)
    made = schedule(*case)
    dealt: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    for piece in pieces_of(made, lengths):
        dealt[piece.part].append(piece[1:4])
    assert dealt == found[best_limit(found)].parts
    dearest = dearest_of("packed", *case)
    assert dearest <= min(packing.cost for packing in found.values())


@thorough
@given(packed_or_shares)
def test_only_requests_above_the_limit_are_cut(case: tuple[np.ndarray, int, int]) -> None:
    """No piece costs more than it; full ones are equal, and have parts of their own."""
    assume(kind(*case) == "packed")
    lengths, _, row_groups = case
    limit, made = best_limit(packings(*case)), schedule(*case)
    alone = np.bincount([piece.part for piece in pieces_of(made, lengths)]) == 1
    by_request = pieces_by_request(made, lengths)
    for pieces, blocks in zip(by_request, blocks_of(lengths).tolist(), strict=True):
        assert (len(pieces) > 1) == (blocks + FIXED_COST > limit)
        if len(pieces) == 1:
            continue
        sizes = [piece.end - piece.begin for piece in pieces]
        assert max(sizes) + FIXED_COST + piece_cost(row_groups) <= limit
        at = 0 if pieces[0].slot == 1 else len(pieces) - 1
        full = sizes[:at] + sizes[at + 1 :]
        assert max(full) - min(full) <= 1
        assert all(alone[piece.part] for piece in pieces[:at] + pieces[at + 1 :])
        # with a piece less they would have been larger than the limit, or the rest nothing
        most = limit - FIXED_COST - piece_cost(row_groups)
        assert len(pieces) == -(-blocks // most)


@thorough
@given(packed_or_shares)
@example((np.tile([3000, 0, 700, 3000, 0], 40), 132, 3))
def test_nothing_was_packed_where_it_is_dearer(case: tuple[np.ndarray, int, int]) -> None:
    """Without its last item a part is no dearer than any other that could have taken it.

    So the dearest part costs less than the average and its last item, but where parts with two
    rests had to be passed over.
    """
    assume(kind(*case) == "packed")
    lengths, _, row_groups = case
    here = packed_parts(schedule(*case), lengths, piece_cost(row_groups))
    for part in here:
        assert len(part.rests) <= 2
        if not part.items:
            continue
        cost, request = min(part.items, key=lambda item: (item[0], -item[1]))
        is_rest = (cost, request) in part.rests
        others = [o.load for o in here if not (is_rest and len(o.rests) == 2)]
        assert part.load - cost <= min(others, default=part.load)
    if all(len(part.rests) < 2 for part in here):
        average = sum(part.load for part in here) / len(here)
        largest = max(cost for part in here for cost, _ in part.items)
        assert max(part.load for part in here) <= average + largest * (1 - 1 / len(here))


@thorough
@given(packed_or_shares)
def test_the_order_of_a_part(case: tuple[np.ndarray, int, int]) -> None:
    """The dearer rest, whole requests from the dearest on, the other rest."""
    assume(kind(*case) == "packed")
    made, lengths = schedule(*case), case[0]
    place_of = np.argsort(made.order)
    here = packed_parts(made, lengths)
    for part in here:
        rests = sorted(part.rests, key=lambda item: (-item[0], item[1]))
        wholes = sorted(part.wholes, key=lambda item: (-item[0], item[1]))
        wanted = [request for _, request in [*rests[:1], *wholes, *rests[1:]]]
        places = place_of[wanted].tolist()
        assert places == list(range(places[0], places[0] + len(places))) if places else True
    used = [bool(part.items) for part in here]  # all idle parts are at the end
    assert used == sorted(used, reverse=True)


def ragged(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(0, 9000, batch)


@pytest.mark.parametrize(
    ("blocks", "parts", "packed"),
    [
        (blocks_of(ragged(PACKED_REQUESTS)), 132, True),
        (blocks_of(ragged(PACKED_REQUESTS + 1)), 132, False),
        (blocks_of(ragged(200)), PACKED_PARTS, True),
        (blocks_of(ragged(200)), PACKED_PARTS + 1, False),
        (np.array([PACKED_SHARE - 12, PACKED_SHARE - 12, 8, 8]), 2, True),
        (np.array([PACKED_SHARE - 12, PACKED_SHARE - 12, 8, 9]), 2, False),
    ],
)
def test_how_much_is_packed(blocks: np.ndarray, parts: int, packed: bool) -> None:
    """Beyond, there are equal shares, of requests in their own order."""
    lengths = blocks * BLOCK_TOKENS
    assert packable(lengths, parts) == packed
    assert kind(lengths, parts, 1) == ("packed" if packed else "shares")
    order = schedule(lengths, parts, 1).order
    assert (order != np.arange(len(lengths))).any() == packed


@thorough
@given(packed_or_shares)
def test_costs_of_packed_parts_fit_24_bits(case: tuple[np.ndarray, int, int]) -> None:
    """The kernel has them beside a part's number; the same lengths, with the largest share."""
    lengths, parts, row_groups = case
    blocks = blocks_of(lengths[:PACKED_REQUESTS])
    parts = min(parts, PACKED_PARTS)
    blocks = blocks * (PACKED_SHARE * parts - 2 * FIXED_COST * len(blocks)) // max(blocks.sum(), 1)
    lengths = blocks * BLOCK_TOKENS
    assert packable(lengths, parts)
    for packing in packings(lengths, parts, row_groups).values():
        assert packing.cost < 1 << 24


# --- lengths that servers see --------------------------------------------------------------------


@pytest.mark.parametrize("row_groups", some([1, 2, 3, 4], 3))
@pytest.mark.parametrize("parts", some([132, 66, 33, 8], 2))
@pytest.mark.parametrize("mix", ["log-normal", "bimodal", "one giant, many dwarfs"])
def test_the_largest_part_of_a_servers_lengths(
    mix: str,
    parts: int,
    row_groups: int,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """Blocks beyond ceil(total / parts): what it may cost beyond a share, but for a FIXED_COST.

    A share holds the FIXED_COST of batch / parts requests; where the largest part has fewer of
    them, it has more blocks.
    """
    rng = np.random.default_rng(parts)
    worst: dict[str, int] = collections.defaultdict(int)
    for batch, most in itertools.product(
        (1, 2, 3, 6, 8, 16, 48, 96, 256), (1000, 4000, 16_000, 262_144)
    ):
        lengths = np.asarray(MIXES[mix](rng, batch, most)).astype(np.int32)
        made = schedule(lengths, parts, row_groups)
        held = np.zeros(parts, int)
        for piece in pieces_of(made, lengths):
            held[piece.part] += piece.end - piece.begin
        equal = -(-int(blocks_of(lengths).sum()) // parts)
        beyond = int(held.max()) - equal
        of = kind(lengths, parts, row_groups)
        excess = most_of(of, lengths, parts, row_groups) - share_of(lengths, parts)
        most_beyond = excess - FIXED_COST + -(-FIXED_COST * batch // parts)
        assert beyond <= most_beyond, (of, batch, most)
        worst[of] = max(worst[of], beyond)
    record_testsuite_property(f"{mix}, {parts} parts, {row_groups} row groups", dict(worst))


# --- batch-invariant -----------------------------------------------------------------------------


@st.composite
def invariant_cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths, the most blocks of a request, which some may exceed, and row groups."""
    row_groups = draw(any_row_groups)
    size = piece_blocks(row_groups)
    near = st.builds(
        lambda pieces, tokens: max(pieces * size * BLOCK_TOKENS + tokens, 0),
        st.integers(0, 5),
        st.integers(-2 * BLOCK_TOKENS, 12 * BLOCK_TOKENS),
    )
    one = st.one_of(st.integers(-70, 700), near, st.integers(0, 100_000))
    lengths = np.array(draw(st.lists(one, min_size=1, max_size=20)), np.int32)
    longest = int(blocks_of(lengths).max())
    return lengths, draw(st.one_of(st.just(longest), st.integers(0, longest))), row_groups


def cuts_of(made: Schedule, request: int) -> list[int]:
    """Blocks at which a request is cut."""
    requests, blocks = made.bounds.T
    found: list[int] = blocks[(requests == request) & (blocks > 0)].tolist()
    return found


@thorough
@given(invariant_cases())
@example((np.array([0, 65, 0], np.int32), 2, 1))
@example((np.array([1, 0], np.int32), 0, 4))
def test_batch_invariant_parts_hold_a_piece_each(case: tuple[np.ndarray, int, int]) -> None:
    lengths, max_blocks, _ = case
    lengths = np.clip(lengths, 0, max_blocks * BLOCK_TOKENS)
    made = invariant_schedule(*case)
    np.testing.assert_array_equal(made.order, np.arange(len(lengths)))
    pieces = pieces_of(made, lengths)
    assert [piece.part for piece in pieces] == list(range(len(pieces)))
    assert (made.bounds[len(pieces) :] == [len(lengths), 0]).all()  # all idle parts are at the end
    assert all(piece.slot == 0 for piece in pieces)
    of_requests = pieces_by_request(made, lengths)
    for of_request, blocks in zip(of_requests, blocks_of(lengths).tolist(), strict=True):
        edges = [piece.begin for piece in of_request] + [blocks]
        assert edges[0] == 0
        assert [piece.end for piece in of_request] == edges[1:]
        assert blocks == 0 or all(piece.begin < piece.end for piece in of_request)


@thorough
@given(invariant_cases())
def test_batch_invariant_cuts_are_at_fixed_positions(case: tuple[np.ndarray, int, int]) -> None:
    """All multiples of a size, but for the last where too little would be left behind it."""
    lengths, max_blocks, row_groups = case
    made, size, saving = invariant_schedule(*case), piece_blocks(row_groups), min_saving(row_groups)
    for request, blocks in enumerate(np.minimum(blocks_of(lengths), max_blocks).tolist()):
        wanted = [cut for cut in range(size, blocks, size) if blocks - cut >= saving]
        assert cuts_of(made, request) == wanted


@thorough
@given(invariant_cases(), st.randoms(use_true_random=False), st.integers(0, 3000))
def test_batch_invariant_cuts_do_not_depend_on_the_batch(
    case: tuple[np.ndarray, int, int], random: Any, more: int
) -> None:
    """Nor on the longest request that there is room for."""
    lengths, max_blocks, row_groups = case
    lengths = np.clip(lengths, 0, max_blocks * BLOCK_TOKENS)
    made = invariant_schedule(lengths, max_blocks, row_groups)
    order = random.choices(range(len(lengths)), k=random.randrange(1, 2 * len(lengths) + 1))
    other = invariant_schedule(lengths[order], max_blocks + more, row_groups)
    for place, request in enumerate(order):
        alone = invariant_schedule(lengths[request : request + 1], max_blocks, row_groups)
        assert cuts_of(made, request) == cuts_of(other, place) == cuts_of(alone, 0)


@thorough
@given(invariant_cases())
def test_records_of_batch_invariant_parts(case: tuple[np.ndarray, int, int]) -> None:
    lengths, max_blocks, _ = case
    table = invariant_parts_table(*case)
    held = np.clip(lengths, 0, max_blocks * BLOCK_TOKENS)
    check_records(table, invariant_places_table(*case), invariant_schedule(*case), held)
    assert not table["first_slot"].any()
    idle = table[table["place"] == len(lengths)]
    for name in ("block", "request", "tokens", "end_block"):
        assert not idle[name].any(), name
    assert (idle["end_place"] == len(lengths)).all()
    for name in ("first_part", "last_part", "tail_last_part"):
        np.testing.assert_array_equal(idle[name], np.arange(len(table))[len(table) - len(idle) :])


@thorough
@given(invariant_cases(), st.sampled_from([1, 78, 132]))
def test_batch_invariant_parts_of_a_plan(case: tuple[np.ndarray, int, int], sm_count: int) -> None:
    """As many as the mirror makes, on any GPU; all needed where all requests are longest."""
    lengths, max_blocks, row_groups = case
    shape = (len(lengths), 1, ROW_GROUP * row_groups, 1, BLOCK_TOKENS, "bfloat16", False, 0)
    key = MLADecodeKey(*shape, sm_count, batch_invariant=True, max_blocks=max_blocks)
    assert key.row_groups == row_groups
    assert key.parts == len(invariant_schedule(*case).bounds) - 1
    whole_pieces = piece_blocks(row_groups) * (key.parts // len(lengths))
    full = np.full(len(lengths), whole_pieces * BLOCK_TOKENS)
    assert (invariant_schedule(full, whole_pieces, row_groups).bounds[:-1, 0] < len(lengths)).all()


def test_the_kernel_of_a_batch_invariant_plan() -> None:
    shape = (2, 1, 16, 1, 64, "bfloat16", False, 0, 132)
    assert schedule_spec(MLADecodeKey(*shape)).entry == "mla_schedule"
    invariant = MLADecodeKey(*shape, batch_invariant=True, max_blocks=5)
    assert schedule_spec(invariant).entry == "mla_schedule_invariant"


# --- the shape of a plan -------------------------------------------------------------------------


@st.composite
def keys(draw: st.DrawFn) -> MLADecodeKey:
    """Shapes of plans, on GPUs of every size."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 8, 128]))
    invariant = draw(st.booleans())
    return MLADecodeKey(
        batch=draw(st.integers(1, 6000)),
        q_len=draw(st.one_of(st.integers(1, 4), st.integers(1, 300))),
        num_heads=kv_heads * draw(st.integers(1, 128)),
        num_kv_heads=kv_heads,
        page_size=64,
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        causal=draw(st.booleans()),
        device=0,
        sm_count=draw(st.one_of(st.sampled_from([78, 114, 132]), st.integers(1, 400))),
        batch_invariant=invariant,
        max_blocks=draw(st.integers(0, 80)) if invariant else 0,
    )


def filled(key: MLADecodeKey, parts: int) -> float:
    """Share of the multiprocessors that work, over the waves of that many parts."""
    blocks = parts * key.tiles
    return blocks / (-(-blocks // key.sm_count) * key.sm_count)


@thorough
@given(keys())
def test_tiles_hold_all_query_rows(key: MLADecodeKey) -> None:
    assert key.group_rows == key.q_len * key.num_heads // key.num_kv_heads
    assert (key.row_tiles - 1) * ROW_TILE < key.group_rows <= key.row_tiles * ROW_TILE
    assert key.tiles == key.row_tiles * key.num_kv_heads
    assert key.row_groups * ROW_GROUP >= min(key.group_rows, ROW_TILE)
    assert (key.row_groups - 1) * ROW_GROUP < min(key.group_rows, ROW_TILE)


@thorough
@given(keys())
def test_parts_fill_the_gpu_within_a_few_waves(key: MLADecodeKey) -> None:
    assume(not key.batch_invariant)
    most = RULES.max_waves * key.sm_count // key.tiles
    assert 1 <= key.parts <= max(1, most)
    assert key.parts + 1 <= THREADS  # a thread of mla_schedule for every bound
    if key.tiles <= key.sm_count:
        assert key.parts * key.tiles > key.sm_count - key.tiles  # one wave at least
        best = max(filled(key, parts) for parts in range(key.sm_count // key.tiles, most + 1))
        assert filled(key, key.parts) >= min(best, RULES.good_fill) - 1e-9


@pytest.mark.parametrize(
    ("rows", "parts"), [(16, 132), (64, 132), (128, 66), (256, 33), (90 * 64, 4), (200 * 64, 1)]
)
def test_parts_of_a_gpu_with_132_multiprocessors(rows: int, parts: int) -> None:
    key = MLADecodeKey(8, 1, rows, 1, 64, "bfloat16", False, 0, 132)
    assert key.parts == parts


@thorough
@given(keys())
def test_a_thread_block_waits_only_where_all_of_them_run_at_once(key: MLADecodeKey) -> None:
    assert key.may_wait == (key.parts * key.tiles <= key.sm_count)
    if key.sm_count % key.tiles == 0 and not key.batch_invariant:  # one wave fills the GPU
        assert key.may_wait


@thorough
@given(keys())
def test_what_lies_in_the_buffer_does_not_overlap(key: MLADecodeKey) -> None:
    layout, parts = key.layout, key.parts
    cuts = parts > 1  # a part alone cuts nothing
    if key.batch_invariant:
        cuts = key.max_blocks - key.min_saving >= key.piece_blocks
    tickets = key.tiles * parts if cuts else 0
    rows = tickets * 2 * key.row_groups * ROW_GROUP
    assert key.num_tickets == tickets
    sizes = {
        "places": 8 * key.batch,
        "parts": 48 * parts,
        "tickets": 16 * tickets,
        "partial_rows": 8 * rows,
        "partial_out": 3 * rows * VALUE_DIM,
    }
    begins = [getattr(layout, name) for name in sizes]
    assert begins[0] == 0
    for (name, size), begin, end in zip(
        sizes.items(), begins, [*begins[1:], layout.nbytes], strict=True
    ):
        assert begin % 256 == 0
        assert begin + size <= end, name
    assert layout.nbytes <= sum(sizes.values()) + len(sizes) * 255


@thorough
@given(keys())
def test_workspace_bytes_is_pure(key: MLADecodeKey) -> None:
    """A function of its numbers alone: no GPU is asked, and nothing is remembered."""
    assume(key.parts <= mla_plan.MOST_PARTS and (key.max_blocks > 0) == key.batch_invariant)
    shape = (key.batch, key.q_len, key.num_heads)
    mode: dict[str, Any] = {}
    if key.batch_invariant:
        mode = {"batch_invariant": True, "max_kv_len": key.max_blocks * BLOCK_TOKENS - 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        first, again = (
            cumla.MLADecodePlan.workspace_bytes(
                *shape, num_kv_heads=key.num_kv_heads, sm_count=key.sm_count, **mode
            )
            for _ in range(2)
        )
    assert first == again == key.layout.nbytes
    assert isinstance(first, int)
