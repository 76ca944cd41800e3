# SPDX-License-Identifier: Apache-2.0
"""Properties of the schedule (of its NumPy form, the kernel's oracle) and of a plan's shape."""

from __future__ import annotations

import collections
import itertools
import sys
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import cumla
from cumla.launch import mla_plan
from cumla.launch.mla_plan import BLOCK_TOKENS, ROW_GROUP, ROW_TILE, VALUE_DIM, MLADecodeKey
from cumla.launch.mla_schedule import (
    CUT_COST,
    FIXED_COST,
    MIN_SHARE,
    SPECS,
    Schedule,
    max_tokens,
    schedule,
)
from tests.gpu.parts import LENGTHS, PART, parts_table

LONGEST = 10**6  # tokens

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


def cost_of_parts(made: Schedule, lengths: np.ndarray) -> np.ndarray:
    """What each part costs: the blocks of its pieces, and FIXED_COST for each."""
    costs = np.zeros(len(made.bounds) - 1, np.int64)
    for piece in pieces_of(made, lengths):
        costs[piece.part] += piece.end - piece.begin + FIXED_COST
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


MIXES = {
    "equal": lambda rng, batch, most: np.full(batch, rng.integers(0, most + 1)),
    "ragged": lambda rng, batch, most: rng.integers(0, most + 1, size=batch),
    "log-normal": lambda rng, batch, most: np.minimum(
        rng.lognormal(np.log(1 + most / 20), 1.5, size=batch), most
    ),
    "bimodal": lambda rng, batch, most: np.where(rng.random(batch) < 0.5, most, most // 100),
    "giant and dwarfs": lambda rng, batch, most: np.where(
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
    batch = draw(st.integers(1, largest_batch))
    return np.asarray(make(rng, batch, draw(st.integers(0, LONGEST)))).astype(np.int32)


few_lengths = st.lists(
    st.one_of(st.integers(-70, 700), st.integers(0, LONGEST)), min_size=1, max_size=12
).map(lambda values: np.array(values, np.int32))
any_lengths = st.one_of(few_lengths, mixed_lengths())
any_parts = st.one_of(st.integers(1, 8), st.integers(1, 400))


# --- who does what --------------------------------------------------------------------------------


@thorough
@given(any_lengths, any_parts)
@example(np.array([1, 0, 65], np.int32), 400)
def test_bounds_run_from_the_first_block_to_the_last(lengths: np.ndarray, parts: int) -> None:
    bounds = schedule(lengths, parts).bounds
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
@given(any_lengths, any_parts)
def test_every_block_belongs_to_one_part(lengths: np.ndarray, parts: int) -> None:
    made = schedule(lengths, parts)
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
@given(any_lengths, any_parts)
def test_records_are_of_the_requests_that_several_parts_touch(
    lengths: np.ndarray, parts: int
) -> None:
    made = schedule(lengths, parts)
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
@given(any_lengths, any_parts)
def test_a_part_holds_a_piece_a_slot(lengths: np.ndarray, parts: int) -> None:
    """Slot 0 for the request with which the part begins, 1 for the one with which it ends."""
    made = schedule(lengths, parts)
    taken: set[tuple[int, int]] = set()
    for pieces in pieces_by_request(made, lengths):
        for piece in pieces if len(pieces) > 1 else ():
            assert (piece.part, piece.slot) not in taken
            taken.add((piece.part, piece.slot))
        # mla_decode looks for all but the first piece in slot 0
        assert all(piece.slot == 0 for piece in pieces[1:])


@thorough
@given(few_lengths, any_parts)
def test_negative_lengths_are_empty_ones(lengths: np.ndarray, parts: int) -> None:
    made, other = schedule(lengths, parts), schedule(np.maximum(lengths, 0), parts)
    np.testing.assert_array_equal(made.bounds, other.bounds)
    np.testing.assert_array_equal(made.splits, other.splits)


@thorough
@given(mixed_lengths(largest_batch=50), any_parts, st.integers(1, BLOCK_TOKENS))
def test_only_the_number_of_blocks_counts(lengths: np.ndarray, parts: int, tail: int) -> None:
    other = np.maximum((blocks_of(lengths) - 1) * BLOCK_TOKENS + tail, 0)
    np.testing.assert_array_equal(schedule(lengths, parts).bounds, schedule(other, parts).bounds)


@pytest.mark.parametrize("batch", [1, 7, 31, 32, 3000, 100_000])
def test_the_largest_lengths_do_not_overflow(batch: int) -> None:
    """The kernel adds costs up in 32 bits; no cache is as large as where lengths are clamped."""
    longest = max_tokens(batch)
    assert batch * (blocks_of(np.array([longest]))[0] + FIXED_COST) <= 2**30
    assert longest * batch * 1152 > 2**40 or longest >= 2**31 - BLOCK_TOKENS
    lengths = np.full(batch, 2**31 - 1, np.int32)
    bounds = schedule(lengths, 132).bounds.astype(np.int64)
    np.testing.assert_array_equal(bounds, schedule(np.full(batch, longest), 132).bounds)
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


def check_records(table: np.ndarray, lengths: np.ndarray, parts: int) -> None:
    """Every thread block finds its pieces, and the pieces of those with whom it joins them."""
    by_request = pieces_by_request(schedule(lengths, parts), lengths)
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
@given(any_lengths, any_parts)
def test_records_of_the_parts(lengths: np.ndarray, parts: int) -> None:
    check_records(parts_table(lengths, parts), lengths, parts)


@pytest.mark.parametrize("name", LENGTHS)
def test_records_that_the_gpu_tests_compare(name: str) -> None:
    check_records(parts_table(*LENGTHS[name]), *LENGTHS[name])


def test_the_compared_schedules_are_of_every_kind() -> None:
    cut = {name: len(schedule(*case).splits) for name, case in LENGTHS.items()}
    assert {name for name, count in cut.items() if not count} == {
        "one request of one block",
        "nothing but zeros",
        "one part",
        "whole requests",
        "whole requests, two to a part",
    }
    tables = {name: parts_table(*case) for name, case in LENGTHS.items()}
    assert 2 < (tables["one short request, parts without work"]["request"] == 0).sum() < 20
    assert any(table["first_slot"].any() for table in tables.values())
    spans = tables["one request over all warps of the schedule"]
    assert (spans["last_part"] - spans["first_part"]).max() > 300


# --- how well ------------------------------------------------------------------------------------


@thorough
@given(any_lengths, any_parts)
def test_requests_are_cut_only_where_whole_ones_are_dearer(lengths: np.ndarray, parts: int) -> None:
    made = schedule(lengths, parts)
    whole = whole_price(lengths, parts) <= share_of(lengths, parts) + CUT_COST
    if whole:
        group = -(-len(lengths) // parts)
        wanted = np.minimum(np.arange(parts + 1) * group, len(lengths))
        np.testing.assert_array_equal(made.bounds[:, 0], wanted)
        assert not made.bounds[:, 1].any()
        assert not len(made.splits)
    else:
        assert cost_of_parts(made, lengths).max() < whole_price(lengths, parts)


def kind(lengths: np.ndarray, parts: int) -> str:
    """How requests are dealt out: whole, cut but apart from each other, or in equal shares."""
    if whole_price(lengths, parts) <= share_of(lengths, parts) + CUT_COST:
        return "whole"
    held = collections.Counter(piece.part for piece in pieces_of(schedule(lengths, parts), lengths))
    apart = 2 * len(lengths) <= parts and max(held.values()) == 1
    return "apart" if apart else "shares"


@thorough
@given(any_lengths, any_parts)
def test_the_dearest_part(lengths: np.ndarray, parts: int) -> None:
    """Whole requests, and those kept apart, cost up to CUT_COST more than the ideal share; shares
    less than two FIXED_COST and a block.

    Where shares are cut, a part ends in up to two pieces whose FIXED_COST its share holds only in
    proportion, and each of its two cuts moves by up to half a block.
    """
    share = share_of(lengths, parts)
    dearest = int(cost_of_parts(schedule(lengths, parts), lengths).max())
    if kind(lengths, parts) == "shares":
        assert dearest < share + 2 * FIXED_COST + 1
    else:
        assert dearest <= share + CUT_COST


@thorough
@given(few_lengths, any_parts)
@example(np.array([2433], np.int32), 8)
@example(np.array([0, 1217, 64], np.int32), 6)
def test_requests_that_are_apart_are_cut_into_equal_pieces(lengths: np.ndarray, parts: int) -> None:
    assume(kind(lengths, parts) == "apart")
    made = schedule(lengths, parts)
    pieces = pieces_of(made, lengths)
    assert [piece.part for piece in pieces] == list(range(len(pieces)))  # idle ones at the end
    for of_request in pieces_by_request(made, lengths):
        sizes = [piece.end - piece.begin for piece in of_request]
        assert max(sizes) - min(sizes) <= 1


@thorough
@given(any_lengths, any_parts)
def test_no_part_is_idle_where_there_is_work_for_all(lengths: np.ndarray, parts: int) -> None:
    """Of parts with equal shares, those get something whose share lies within the work."""
    share = share_of(lengths, parts)
    assume(kind(lengths, parts) == "shares")
    total = int((blocks_of(lengths) + FIXED_COST).sum())
    costs = cost_of_parts(schedule(lengths, parts), lengths)
    used = -(-total // share)
    assert not costs[used:].any()
    # the last one gets what is left; the others lose half a block, or too small a piece, at an end
    assert (costs[: used - 1] >= share - 2).all()


def test_the_bounds_of_the_cost_are_met() -> None:
    """They are as small as they can be stated: some input comes that close."""
    rng = np.random.default_rng(0)
    worst = {"whole": 0, "apart": 0, "shares": 0}
    for _ in range(3000):
        lengths = rng.integers(0, rng.integers(2, 5000), size=rng.integers(1, 40))
        parts = int(rng.integers(1, 60))
        excess = cost_of_parts(schedule(lengths, parts), lengths).max() - share_of(lengths, parts)
        of = kind(lengths, parts)
        worst[of] = max(worst[of], int(excess))
    assert worst["whole"] == CUT_COST
    assert worst["shares"] == 2 * FIXED_COST
    assert CUT_COST / 2 < worst["apart"] <= CUT_COST


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("batch", [1, 6, 128, 1000])
def test_long_contexts_are_dealt_out_evenly(mix: str, batch: int) -> None:
    """Within a few parts in a hundred of the ideal, once a part has some 500 blocks."""
    rng = np.random.default_rng(batch)
    parts = 132
    lengths = np.asarray(MIXES[mix](rng, batch, LONGEST)).astype(np.int32)
    ideal = (blocks_of(lengths) + FIXED_COST).sum() / parts
    if ideal < 500:
        lengths[0] = 500 * parts * BLOCK_TOKENS
        ideal = (blocks_of(lengths) + FIXED_COST).sum() / parts
    dearest = cost_of_parts(schedule(lengths, parts), lengths).max()
    assert ideal <= dearest <= 1.04 * ideal


# --- the shape of a plan -------------------------------------------------------------------------


@st.composite
def keys(draw: st.DrawFn) -> MLADecodeKey:
    """Shapes of plans, on GPUs of every size."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 8, 128]))
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
    most = mla_plan._MAX_WAVES * key.sm_count // key.tiles
    assert 1 <= key.parts <= max(1, most)
    assert key.parts + 1 <= SPECS[0].threads  # a thread of mla_schedule for every bound
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
    if key.sm_count % key.tiles == 0:  # one wave fills the GPU
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
    shape = (key.batch, key.q_len, key.num_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        first, again = (
            cumla.MLADecodePlan.workspace_bytes(
                *shape, num_kv_heads=key.num_kv_heads, sm_count=key.sm_count
            )
            for _ in range(2)
        )
    assert first == again == key.layout.nbytes
    assert isinstance(first, int)
