# SPDX-License-Identifier: Apache-2.0
"""Properties of the schedule (of its NumPy form, the kernel's oracle) and of a plan's shape."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import cumla
from cumla.launch import mla_plan
from cumla.launch.mla_plan import (
    BLOCK_TOKENS,
    ROW_GROUP,
    ROW_TILE,
    VALUE_DIM,
    MLADecodeKey,
    piece_blocks,
)
from cumla.launch.mla_schedule import (
    CUT_COST,
    FIXED_COST,
    MIN_BLOCKS,
    MIN_SHARE,
    SPECS,
    Schedule,
    invariant_schedule,
    max_tokens,
    min_saving,
    piece_cost,
    schedule,
    schedule_spec,
)
from tests.gpu.parts import LENGTHS, PART, invariant_parts_table, parts_table

LONGEST = 10**6  # tokens
THREADS = SPECS[0].threads
MOST_PARTS = THREADS - 1  # a thread of the kernel for every bound

thorough = settings(deadline=None, max_examples=300)


class Piece(NamedTuple):
    """Blocks [begin, end) of a request, done by a part; what mla_decode.cu calls a segment."""

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
    """What each part does, in order, from the bounds: as the kernel reads them."""
    blocks = blocks_of(lengths).tolist()
    pieces = []
    for part, (begin, end) in enumerate(itertools.pairwise(made.bounds.tolist())):
        last_request = end[0] if end[1] > 0 else end[0] - 1
        for request in range(begin[0], last_request + 1):
            first = request == begin[0]
            pieces.append(
                Piece(
                    part,
                    request,
                    begin[1] if first else 0,
                    end[1] if request == end[0] else blocks[request],
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


def fill(blocks: list[int], parts: int, limit: int, piece: int) -> list[tuple[int, int]]:
    """Where parts begin that are filled up to a limit, one after the other; [] if they are few."""
    bounds = [(0, 0)]
    request = block = 0
    while len(bounds) <= parts:
        room = limit - (piece if block else 0)
        while request < len(blocks) and blocks[request] - block + FIXED_COST <= room:
            room -= blocks[request] - block + FIXED_COST
            request, block = request + 1, 0
        if request == len(blocks):
            return bounds + [(request, 0)] * (parts + 1 - len(bounds))
        room -= FIXED_COST + (0 if block else piece)
        taken = min(room, blocks[request] - block - MIN_BLOCKS)
        whole_fits = not block and blocks[request] + FIXED_COST <= limit
        if taken >= MIN_BLOCKS and (taken > piece or not whole_fits):
            block += taken
        bounds.append((request, block))
    return []


def limits_of(lengths: np.ndarray, parts: int, piece: int) -> range:
    """Limits to try, from the equal share up; that the last one will do is derived in the kernel.

    Below the first one what is between two cuts could be too small, and what is left uncuttable.
    """
    least = max(share_of(lengths, parts), FIXED_COST + piece + 2 * MIN_BLOCKS - 1)
    tries = min(16, 4096 // parts)
    beyond = FIXED_COST + 2 * max(piece, MIN_BLOCKS - 1)
    step = -(-beyond // (tries - 1))
    return range(least, least + tries * step, step)


def limit_of(lengths: np.ndarray, parts: int, row_groups: int) -> int:
    """The first limit with which filled parts suffice."""
    blocks, piece = blocks_of(lengths).tolist(), piece_cost(row_groups, share_of(lengths, parts))
    limits = limits_of(lengths, parts, piece)
    return next(limit for limit in limits if fill(blocks, parts, limit, piece))


def kind(lengths: np.ndarray, parts: int, row_groups: int) -> str:
    """How requests are dealt out: apart, whole ones in groups, or to filled parts or shares."""
    share, price = share_of(lengths, parts), whole_price(lengths, parts)
    two_each = 2 * len(lengths) <= parts
    if two_each and size_of_pieces(lengths, parts, row_groups) + FIXED_COST <= share + CUT_COST:
        return "apart"
    if len(lengths) > THREADS:
        return "whole" if price <= share + CUT_COST else "shares"
    if price <= share + min(CUT_COST, share // 32):
        return "whole"
    return "whole" if price <= limit_of(lengths, parts, row_groups) else "filled"


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
SHARE_EXCESS = 2 * (MIN_BLOCKS - 1) + FIXED_COST


def most_of(how: str, lengths: np.ndarray, parts: int, row_groups: int) -> int:
    """What the dearest part may cost: a filled one with its pieces' price, others without."""
    share = share_of(lengths, parts)
    if how == "apart":  # what is not cut is longer than a piece by less than min_saving
        return share + CUT_COST + min_saving(row_groups) - 1
    if how == "shares":
        return share + SHARE_EXCESS
    last = limits_of(lengths, parts, piece_cost(row_groups, share_of(lengths, parts)))[-1]
    if how == "filled":
        return last
    cheap = CUT_COST if len(lengths) > THREADS else min(CUT_COST, share // 32)
    return max(share + cheap, 0 if len(lengths) > THREADS else last)


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


# --- who does what --------------------------------------------------------------------------------


@thorough
@given(any_lengths, any_parts, any_row_groups)
@example(np.array([1, 0, 65], np.int32), 400, 4)
def test_bounds_run_from_the_first_block_to_the_last(
    lengths: np.ndarray, parts: int, row_groups: int
) -> None:
    bounds = schedule(lengths, parts, row_groups).bounds
    assert (bounds.shape, bounds.dtype) == ((parts + 1, 2), np.dtype(np.int32))
    assert bounds[0].tolist() == [0, 0]
    assert bounds[-1].tolist() == [len(lengths), 0]
    requests, blocks = bounds.T
    assert (np.diff(requests) >= 0).all()
    assert (np.diff(blocks)[np.diff(requests) == 0] >= 0).all()
    inside = blocks > 0  # a cut in the middle of a request leaves something on both sides
    assert (blocks >= 0).all()
    assert (blocks[inside] < blocks_of(lengths)[requests[inside]]).all()


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
    wanted = [
        (request, pieces[0].part, pieces[-1].part)
        for request, pieces in enumerate(pieces_by_request(made, lengths))
        if len(pieces) > 1
    ]
    assert made.splits.dtype == np.int32
    assert made.splits.shape == (len(wanted), 3)
    assert made.splits.tolist() == [list(record) for record in wanted]
    assert len(wanted) <= parts - 1
    for pieces in pieces_by_request(made, lengths):  # without a gap
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
    np.testing.assert_array_equal(made.bounds, other.bounds)
    np.testing.assert_array_equal(made.splits, other.splits)


@thorough
@given(mixed_lengths(largest_batch=50), any_parts, any_row_groups, st.integers(1, BLOCK_TOKENS))
def test_only_the_number_of_blocks_counts(
    lengths: np.ndarray, parts: int, row_groups: int, tail: int
) -> None:
    other = np.maximum((blocks_of(lengths) - 1) * BLOCK_TOKENS + tail, 0)
    np.testing.assert_array_equal(
        schedule(lengths, parts, row_groups).bounds, schedule(other, parts, row_groups).bounds
    )


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


def segments_of(part: int, record: np.void, lengths: np.ndarray) -> list[Segment]:
    """What a thread block works on: segment_of in cumla/cuda/mla_decode_layout.cuh."""
    blocks = blocks_of(lengths).tolist()
    r = {name: int(record[name]) for name in PART.names or ()}
    last_request = r["end_request"] if r["end_block"] > 0 else r["end_request"] - 1
    found = []
    for request in range(r["request"], last_request + 1):
        head, tail = request == r["request"], request == r["end_request"]
        if head:
            assert r["tokens"] == max(lengths[request], 0)
        end = r["end_block"] if tail else blocks[request]
        piece = Piece(part, request, r["block"] if head else 0, end, 0 if head else 1)
        last = r["last_part"] if head else r["tail_last_part"] if tail else part
        first, slot = (r["first_part"], r["first_slot"]) if head else (part, 1)
        found.append(Segment(piece, first, last, slot))
    return found


def check_records(table: np.ndarray, made: Schedule, lengths: np.ndarray) -> None:
    """Every thread block finds its pieces, and the pieces of those with whom it joins them."""
    by_request = pieces_by_request(made, lengths)
    read: list[list[Segment]] = [[] for _ in lengths]
    for part, record in enumerate(table):
        for segment in segments_of(part, record, lengths):
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
    check_records(parts_table(*case), schedule(*case), lengths)


@pytest.mark.parametrize("name", LENGTHS)
def test_records_that_the_gpu_tests_compare(name: str) -> None:
    case = LENGTHS[name]
    check_records(parts_table(*case), schedule(*case), case[0])


def test_the_compared_schedules_are_of_every_kind() -> None:
    kinds = collections.defaultdict(set)
    for case in LENGTHS.values():
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
    everywhere = {"zeros", "idle at the end"}
    assert kinds == {
        "apart": everywhere | {"cut", "not cut", "longer than a piece, not cut"},
        "whole": everywhere | {"not cut", "more requests than threads"},
        "filled": everywhere | {"cut"},
        "shares": everywhere | {"cut", "empty in the middle", "more requests than threads"},
    }
    tables = {name: parts_table(*case) for name, case in LENGTHS.items()}
    assert any(table["first_slot"].any() for table in tables.values())
    spans = tables["one request over all warps of the schedule"]
    assert (spans["last_part"] - spans["first_part"]).max() > 300


# --- how well ------------------------------------------------------------------------------------


@thorough
@given(any_lengths, any_parts, any_row_groups)
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
@given(any_lengths, any_parts, any_row_groups)
def test_requests_are_cut_only_where_whole_ones_are_dearer(
    lengths: np.ndarray, parts: int, row_groups: int
) -> None:
    made = schedule(lengths, parts, row_groups)
    dearest, whole = cost_of_parts(made, lengths).max(), whole_price(lengths, parts)
    how = kind(lengths, parts, row_groups)
    if how == "filled":
        assert (
            cost_of_parts(made, lengths, piece_cost(row_groups, share_of(lengths, parts))).max()
            < whole
        )
    elif how == "shares":
        assert dearest < whole
    else:
        assert dearest <= whole


@thorough
@given(any_lengths, any_parts, any_row_groups)
def test_the_dearest_part(lengths: np.ndarray, parts: int, row_groups: int) -> None:
    how = kind(lengths, parts, row_groups)
    piece = piece_cost(row_groups, share_of(lengths, parts)) if how == "filled" else 0
    dearest = int(cost_of_parts(schedule(lengths, parts, row_groups), lengths, piece).max())
    assert dearest <= most_of(how, lengths, parts, row_groups)


ODD = [27, 22, 58, 57, 40, 23, 12, 56, 16, 33, 40, 14, 18, 44, 11, 40, 56, 41, 38, 27, 58, 13]


def tiled(blocks: list[int], batch: int, giant: int) -> list[int]:
    """The same lengths again and again, and a longer one among them."""
    made = np.resize(blocks, batch)
    made[batch // 2] = giant
    return made.tolist()


@pytest.mark.parametrize(
    ("how", "blocks", "parts", "row_groups", "short"),
    [
        ("whole", [40, 56, 55, 81, 45, 51, 62, 36, 23, 95, 47, 71, 78, 53, 27, 79, 31], 2, 1, 0),
        ("apart", [56, 103, 322, 80], 9, 1, 0),
        ("apart", [142, 116, 81, 320, 371, 77], 12, 4, 0),
        ("filled", [14] * 48, 46, 2, 1),
        ("shares", tiled(ODD, 1050, 99), 738, 1, 0),
    ],
)
def test_the_bounds_of_the_cost_are_met(
    how: str, blocks: list[int], parts: int, row_groups: int, short: int
) -> None:
    """They are about as small as they can be stated: these come that close."""
    lengths = np.array(blocks) * BLOCK_TOKENS
    assert kind(lengths, parts, row_groups) == how
    piece = piece_cost(row_groups, share_of(lengths, parts)) if how == "filled" else 0
    dearest = int(cost_of_parts(schedule(lengths, parts, row_groups), lengths, piece).max())
    assert dearest == most_of(how, lengths, parts, row_groups) - short


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


@st.composite
def cut_as_they_fall(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths, less than two parts for each, and row groups; some are much longer than the rest."""
    longest = draw(st.sampled_from([5, 10, 40, 400]))  # blocks
    blocks = draw(st.lists(st.integers(0, longest), min_size=2, max_size=100))
    blocks *= draw(st.sampled_from([1, 1 + THREADS // len(blocks)]))
    for giant in draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=3)):
        blocks[giant] = draw(st.integers(20, 5000))
    parts = draw(st.integers(2, min(2 * len(blocks) - 1, MOST_PARTS)))
    return np.array(blocks) * BLOCK_TOKENS, parts, draw(any_row_groups)


@thorough
@given(cut_as_they_fall())
def test_split_requests_are_not_cut_close_to_an_end(case: tuple[np.ndarray, int, int]) -> None:
    assume(kind(*case) in ("filled", "shares"))
    lengths, _, _ = case
    requests, cuts = schedule(*case).bounds.T
    inside = cuts > 0
    assert (cuts[inside] >= MIN_BLOCKS).all()
    assert (blocks_of(lengths)[requests[inside]] - cuts[inside] >= MIN_BLOCKS).all()


@thorough
@given(cut_as_they_fall())
@example((np.array([9, 8, 3, 1, 4, 11, 11, 187, 2, 15, 12, 7, 9]) * BLOCK_TOKENS, 19, 1))
@example((np.where(np.arange(100) == 50, 40, 4) * BLOCK_TOKENS, 132, 1))
def test_no_part_lacks_much(case: tuple[np.ndarray, int, int]) -> None:
    """Parts without work are at the end, and all but the last one with some are full."""
    how = kind(*case)
    assume(how in ("filled", "shares"))
    lengths, parts, row_groups = case
    made, share = schedule(*case), share_of(lengths, parts)
    if how == "filled":
        piece = piece_cost(row_groups, share_of(lengths, parts))
        costs = cost_of_parts(made, lengths, piece)
        lacks = FIXED_COST + 2 * max(piece, MIN_BLOCKS - 1)
        least = limit_of(*case) - lacks
        used = int(np.flatnonzero(costs)[-1]) + 1
    else:
        costs, least, used = cost_of_parts(made, lengths), share - SHARE_EXCESS, 0
        used = -(-int((blocks_of(lengths) + FIXED_COST).sum()) // share)
    assert not costs[used:].any()
    assert (costs[: used - 1] >= least).all()  # the last one gets what is left


@thorough
@given(cut_as_they_fall())
def test_filled_parts(case: tuple[np.ndarray, int, int]) -> None:
    """Up to the least limit, each as far as it goes."""
    assume(kind(*case) == "filled")
    lengths, parts, row_groups = case
    piece = piece_cost(row_groups, share_of(lengths, parts))
    wanted = fill(blocks_of(lengths).tolist(), parts, limit_of(*case), piece)
    assert schedule(*case).bounds.tolist() == [list(bound) for bound in wanted]


@thorough
@given(cut_as_they_fall(), st.integers(0, 30))
def test_the_last_limit_always_does(case: tuple[np.ndarray, int, int], piece: int) -> None:
    """Whatever a piece costs."""
    lengths, parts, _ = case
    bounds = fill(blocks_of(lengths).tolist(), parts, limits_of(lengths, parts, piece)[-1], piece)
    assert bounds[-1:] == [(len(lengths), 0)]


def fill_by_a_warp(starts: list[int], parts: int, limit: int, piece: int) -> list[int]:
    """fill_parts of the kernel, lane by lane: its bounds on the axis of costs, [] for false."""
    batch, nowhere = len(starts) - 1, -0x7FFFFFFF
    starts = starts + [starts[-1]] * (THREADS - batch)
    lost = FIXED_COST + piece
    bounds = [0]
    cut_at = limit - lost
    for base in range(0, batch, 32):
        begins, ends = starts[base : base + 32], starts[base + 1 : base + 33]
        assert len(ends) == 32
        again = [0] * 32
        while True:
            offers = []
            for lane, (start, end) in enumerate(zip(begins, ends, strict=True)):
                fits = end - start <= limit
                first_cut = start + (max(MIN_BLOCKS, piece + 1) if fits else MIN_BLOCKS)
                cut = min(max(cut_at, again[lane]), end - FIXED_COST - MIN_BLOCKS)
                cuts = cut >= first_cut
                bound = cut if cuts else start
                if start - lost <= cut_at < end - lost:
                    next_at = bound + limit - lost - (piece if cuts else 0)
                    offers.append((next_at, lane, bound, cuts))
                    assert nowhere < next_at < 2**31
            assert len(offers) <= 1, "lanes that end the same part"
            if not offers:
                break
            if len(bounds) == parts:
                return []
            next_at, lane, bound, cuts = offers[0]
            assert bound > bounds[-1] or (bound, parts) == (0, 1), "a part without work"
            bounds.append(bound)
            if cuts:
                again[lane] = bound + limit - lost
            cut_at = next_at
    return bounds + [starts[-1]] * (parts - len(bounds))


@thorough
@given(cut_as_they_fall(), st.integers(0, 30), st.integers(0, 100))
@example((np.full(1024, 9000), 300, 4), 6, 3)
@example((np.array([(1 << 30) * BLOCK_TOKENS // 4] * 3), 2, 4), 6, 14)
def test_how_the_lanes_of_a_warp_fill_parts(
    case: tuple[np.ndarray, int, int], piece: int, more: int
) -> None:
    lengths, parts, _ = case
    lengths = lengths[:THREADS]
    blocks = blocks_of(lengths)
    parts = min(parts, 2 * len(lengths) - 1)
    starts = np.append(0, np.cumsum(blocks + FIXED_COST))
    limit = limits_of(lengths, parts, piece)[0] + more
    wanted = fill(blocks.tolist(), parts, limit, piece)
    places = [int(starts[request]) + block for request, block in wanted]
    assert fill_by_a_warp(starts.tolist(), parts, limit, piece) == places[:-1]


def equal_shares(lengths: np.ndarray, parts: int) -> Schedule:
    """As requests were cut before pieces had a price: in proportion, where a share ends."""
    blocks = blocks_of(lengths)
    ends = np.cumsum(blocks + FIXED_COST)
    share = share_of(lengths, parts)
    bounds = np.full((parts + 1, 2), [len(lengths), 0], np.int32)
    bounds[0] = 0
    for index in range(1, min(parts, -(-int(ends[-1]) // share))):
        request = int(np.searchsorted(ends, index * share, side="right"))
        cost = int(blocks[request]) + FIXED_COST
        offset = index * share - (int(ends[request]) - cost)
        block = (2 * offset * int(blocks[request]) + cost) // (2 * cost)
        if block < MIN_BLOCKS:
            bounds[index] = request, 0
        elif blocks[request] - block < MIN_BLOCKS:
            bounds[index] = request + 1, 0
        else:
            bounds[index] = request, block
    return Schedule(bounds, np.zeros((0, 3), np.int32))


@pytest.mark.parametrize("row_groups", [1, 2, 4])
@pytest.mark.parametrize("parts", [132, 66, 33, 8])
@pytest.mark.parametrize("mix", ["log-normal", "bimodal", "one giant, many dwarfs"])
def test_filled_parts_are_no_dearer_than_equal_shares(
    mix: str, parts: int, row_groups: int
) -> None:
    """With their pieces' price; it is not proved, and not so below the least limit there is."""
    rng = np.random.default_rng(parts)
    gained = 0
    sizes = itertools.product((16, 40, 128, 300, 1000), (1000, 4000, 16_000, 64_000, 262_144))
    for batch, most in sizes:
        lengths = np.asarray(MIXES[mix](rng, batch, most)).astype(np.int32)
        piece = piece_cost(row_groups, share_of(lengths, parts))
        if kind(lengths, parts, row_groups) != "filled":
            continue
        before = cost_of_parts(equal_shares(lengths, parts), lengths, piece).max()
        after = cost_of_parts(schedule(lengths, parts, row_groups), lengths, piece).max()
        assert after <= max(before, FIXED_COST + piece + 2 * MIN_BLOCKS - 1), (batch, most)
        gained += int(before - after)
    assert gained > 0


@pytest.mark.parametrize("row_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [132, 66, 33, 8])
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
        (1, 2, 3, 4, 6, 8, 16, 32, 48, 64, 96, 128, 256), (1000, 4000, 16_000, 64_000, 262_144)
    ):
        lengths = np.asarray(MIXES[mix](rng, batch, most)).astype(np.int32)
        made = schedule(lengths, parts, row_groups)
        largest = np.zeros(parts, int)
        for piece in pieces_of(made, lengths):
            largest[piece.part] += piece.end - piece.begin
        equal = -(-int(blocks_of(lengths).sum()) // parts)
        beyond = int(largest.max()) - equal
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
    check_records(table, invariant_schedule(*case), held)
    assert not table["first_slot"].any()
    idle = table[table["request"] == len(lengths)]
    assert not (idle["block"].any() or idle["tokens"].any() or idle["end_block"].any())
    assert (idle["end_request"] == len(lengths)).all()
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
    most = mla_plan._MAX_WAVES * key.sm_count // key.tiles
    assert 1 <= key.parts <= max(1, most)
    assert key.parts + 1 <= THREADS  # a thread of mla_schedule for every bound
    if key.tiles <= key.sm_count:
        assert key.parts * key.tiles > key.sm_count - key.tiles  # one wave at least
        best = max(filled(key, parts) for parts in range(key.sm_count // key.tiles, most + 1))
        assert filled(key, key.parts) >= min(best, mla_plan._GOOD_FILL) - 1e-9


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
    tickets = key.tiles * parts if parts > 1 else 0  # a part alone cuts nothing
    rows = tickets * 2 * key.row_groups * ROW_GROUP
    assert key.num_tickets == tickets
    sizes = {
        "seqlens": 4 * key.batch,
        "parts": 48 * parts,
        "tickets": 16 * tickets,
        "partial_lse": 4 * rows,
        "partial_out": 4 * rows * VALUE_DIM,
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
        mode = {"batch_invariant": True, "max_seqlen": key.max_blocks * BLOCK_TOKENS - 3}
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
