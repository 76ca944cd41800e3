# SPDX-License-Identifier: Apache-2.0
"""What a plan's buffer must hold of its schedule, as it follows from the mirror."""

from __future__ import annotations

import numpy as np

from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    PART_BYTES,
    PLACE_BYTES,
    TILE_PLACE_BYTES,
    piece_blocks,
)
from cumla.launch.split.schedule import max_tokens
from tests.launch.split.ragged_schedule_mirror import TileSchedule
from tests.launch.split.schedule_mirror import (
    Schedule,
    invariant_schedule,
    schedule,
    whole_requests,
)

FIELDS = (
    "place",
    "block",
    "request",
    "tokens",
    "end_place",
    "end_block",
    "first_part",
    "last_part",
    "first_slot",
    "tail_last_part",
)
PART = np.dtype(
    {
        "names": (*FIELDS, "piece_blocks"),  # the first of `unused`
        "formats": ["<i4"] * (len(FIELDS) + 1),
        "itemsize": PART_BYTES,
    },
)
"""struct Part of cumla/cuda/split/plan.cuh; what is left of its bytes is unused."""

PLACE = np.dtype(
    {"names": ("request", "tokens"), "formats": ["<i4", "<i4"], "itemsize": PLACE_BYTES},
)
"""struct Place."""

TILE_PLACE = np.dtype(
    {
        "names": ("tokens", "first_row", "q_len", "q_begin", "pages"),
        "formats": ["<i4", "<i4", "<i4", "<i4", "<i8"],
        "itemsize": TILE_PLACE_BYTES,
    }
)
"""struct TilePlace."""


def places_table(lengths: np.ndarray, parts: int, row_groups: int, tiles: int = 1) -> np.ndarray:
    """Return what lies at each place for these lengths, derived from :func:`schedule`.

    Returns
    -------
    numpy.ndarray
        ``(batch,)`` of PLACE.
    """
    return _places(schedule(lengths, parts, row_groups, tiles), lengths, max_tokens(len(lengths)))


def parts_table(lengths: np.ndarray, parts: int, row_groups: int, tiles: int = 1) -> np.ndarray:
    """The records of all parts for these lengths, derived from :func:`schedule`.

    Returns
    -------
    numpy.ndarray
        ``(parts,)`` of PART.
    """
    return _records(schedule(lengths, parts, row_groups, tiles), lengths, max_tokens(len(lengths)))


def invariant_places_table(
    lengths: np.ndarray, max_blocks: int, row_groups: int, tiles: int = 1
) -> np.ndarray:
    """The places of a batch-invariant plan, derived from :func:`invariant_schedule`."""
    made = invariant_schedule(lengths, max_blocks, row_groups, tiles)
    return _places(made, lengths, max_blocks * BLOCK_TOKENS)


def invariant_parts_table(
    lengths: np.ndarray,
    max_blocks: int,
    row_groups: int,
    tiles: int = 1,
    *,
    most_pieces: int = 0,
    at_once: int = 1,
) -> np.ndarray:
    """The records of a batch-invariant plan, derived from :func:`invariant_schedule`.

    The first part of a request has all its pieces if they are few and that gains.
    """
    made = invariant_schedule(lengths, max_blocks, row_groups, tiles)
    table = _records(made, lengths, max_blocks * BLOCK_TOKENS)
    shape = lengths, max_blocks, row_groups, tiles
    whole = np.append(whole_requests(*shape, most_pieces, at_once), False)[table["place"]]
    first = whole & (table["block"] == 0)
    table["piece_blocks"][first] = piece_blocks(row_groups)
    table["end_place"][first], table["end_block"][first] = table["place"][first] + 1, 0
    empty = whole & ~first
    for name in ("block", "request", "tokens", "end_block", "first_slot"):
        table[name][empty] = 0
    for name in ("place", "end_place"):
        table[name][empty] = len(lengths)
    index = np.arange(len(table))
    table["tail_last_part"][whole] = index[whole]
    for name in ("first_part", "last_part"):
        table[name][empty] = index[empty]
    return table


def _places(made: Schedule, lengths: np.ndarray, longest: int) -> np.ndarray:
    table = np.zeros(len(lengths), PLACE)
    table["request"] = made.order
    table["tokens"] = np.clip(np.asarray(lengths, np.int64), 0, longest)[made.order]
    return table


def _records(made: Schedule, lengths: np.ndarray, longest: int) -> np.ndarray:
    places = np.append(_places(made, lengths, longest), np.zeros(1, PLACE))  # nothing behind them
    table = _parts(made.bounds, made.splits.tolist())
    for name in PLACE.names or ():
        table[name] = places[table["place"]][name]
    return table


def _parts(bounds: np.ndarray, splits: list[tuple[int, int, int]]) -> np.ndarray:
    """The records of all parts, but for what lies at their places."""
    index = np.arange(len(bounds) - 1)
    table = np.zeros(len(index), PART)
    begins, ends = bounds[:-1], bounds[1:]
    table["place"], table["block"] = begins.T
    table["end_place"], table["end_block"] = ends.T
    for name in ("first_part", "last_part", "tail_last_part"):
        table[name] = index
    for place, first, last in splits:
        among = (index >= first) & (index <= last)
        begin_with_it = among & (begins[:, 0] == place)
        table["first_part"][begin_with_it] = first
        table["last_part"][begin_with_it] = last
        # Only the first of its parts can begin with another request: its piece is the second there.
        table["first_slot"][begin_with_it] = int(begins[first, 0] != place)
        table["tail_last_part"][among & (index < last)] = last
    return table


def tile_places_table(made: TileSchedule) -> np.ndarray:
    """Return what lies at each place where query lengths differ: ``(tiles,)`` of TILE_PLACE."""
    table = np.zeros(len(made.places), TILE_PLACE)
    for name, column in zip(TILE_PLACE.names or (), made.places.T, strict=True):
        table[name] = column
    return table


def tile_parts_table(made: TileSchedule) -> np.ndarray:
    """The records of all parts where query lengths differ; of requests they say nothing."""
    inside = made.bounds[:-1, 1] > 0  # parts that begin inside a tile
    cut = np.unique(made.bounds[:-1, 0][inside])
    splits = []
    for tile in cut.tolist():
        (parts,) = np.nonzero(inside & (made.bounds[:-1, 0] == tile))
        splits.append((tile, int(parts[0]) - 1, int(parts[-1])))
    return _parts(made.bounds, splits)


LENGTHS = {
    "one request": (np.array([20_000]), 132, 1),
    "one short request, parts without work": (np.array([1300]), 132, 1),
    "one request of one block": (np.array([64]), 132, 2),
    "a giant among dwarfs": (np.array([70, 3, 64, 131_072, 1, 65, 0, 130]), 132, 4),
    "zeros at both ends and in the middle": (
        np.array([0, 0, 9000, 0, 0, 4000, 30_000, 0, 700, 0, 0]),
        132,
        1,
    ),
    "short requests beside long ones, not cut": (
        np.array([0, 700, 9000, 0, 520, 4000, 30_000, 0, 896, 900, 0]),
        132,
        4,
    ),
    "nothing but zeros": (np.zeros(300, int), 132, 1),
    "few parts": (np.array([5000, 100, 7000, 0, 12_000]), 4, 4),
    "one part": (np.array([5000, 100]), 1, 4),
    "more parts than blocks to deal out": (np.where(np.arange(100) == 50, 2560, 256), 132, 1),
    "batch 1000, ragged": (np.random.default_rng(0).integers(0, 20_000, 1000), 132, 1),
    "batch 1024, half of them empty": (
        np.random.default_rng(1).integers(0, 2, 1024) * 5000,
        132,
        3,
    ),
    "batch 2000, two to a thread": (np.random.default_rng(2).integers(0, 9000, 2000), 132, 1),
    "batch 2000, a giant": (np.where(np.arange(2000) == 1001, 900_000, 3), 132, 2),
    "batch 5000, giants at odd places": (
        np.where(np.arange(5000) % 997 == 13, 200_000, 1),
        66,
        4,
    ),
    "batch 1100, more parts than most requests have blocks": (
        np.tile([640, 576, 64, 64, 64, 0, 64, 64, 64, 64], 110) + 3000 * (np.arange(1100) == 700),
        1000,
        2,
    ),
    "batch 128, log-normal": (
        np.random.default_rng(3).lognormal(6.7, 0.8, 128).astype(int),
        66,
        4,
    ),
    "batch 1024, log-normal": (
        np.random.default_rng(4).lognormal(7, 0.8, 1024).astype(int),
        132,
        1,
    ),
    "batch 100, log-normal, 33 parts": (
        np.random.default_rng(5).lognormal(8, 0.8, 100).astype(int),
        33,
        4,
    ),
    "packed, not cut": (np.array([9000, 9000, 600, 600]), 2, 4),
    "two rests to a part": (np.full(88, 30_000), 132, 1),
    "more rests than the other parts take": (np.full(96, 30_000), 132, 1),
    "giants among dwarfs, a rest and whole ones to a part": (
        np.where(np.arange(100) % 31 == 7, 60_000 + 700 * np.arange(100), 900),
        66,
        2,
    ),
    "a giant among 70": (np.where(np.arange(70) == 33, 1_000_000, 64 * np.arange(70)), 132, 1),
    "equal lengths, some without tokens": (np.tile([3000, 0, 700, 3000, 0], 40), 132, 3),
    "batch 256, log-normal": (
        np.random.default_rng(6).lognormal(8.5, 0.8, 256).astype(int),
        132,
        1,
    ),
    "batch 257, log-normal": (
        np.random.default_rng(7).lognormal(8.5, 0.8, 257).astype(int),
        132,
        1,
    ),
    "batch 200, ragged, 160 parts": (np.random.default_rng(8).integers(0, 9000, 200), 160, 1),
    "batch 200, ragged, 161 parts": (np.random.default_rng(8).integers(0, 9000, 200), 161, 1),
    "shares that no cache holds": (np.array([2**31 - 1, 5, 2**31 - 1, 2**30]), 7, 4),
    "whole requests": (np.full(132, 300), 132, 1),
    "whole requests, two to a part": (np.full(200, 300), 132, 4),
    "batch 1500, whole requests": (np.full(1500, 300), 132, 1),
    "shares that cut most requests": (np.full(250, 30_000), 400, 2),
    "one request over all warps of the schedule": (np.array([3, 4_000_000, 5]), 400, 1),
}
"""Schedules that differ in kind: name -> (lengths, parts, row groups)."""
