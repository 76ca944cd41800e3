# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/merge_states.cu: merges up to 60 partial attention results in one pass."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.kernel import Launch
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView

MOST_PARTIALS = 60  # kMostPartials of the kernel
MOST_RANKS = 8  # kMostRanks, that wait for one another
MOST_BLOCKS = 512  # of such a launch: resident at once, ten on each multiprocessor
# kColumnsOfFew and kColumnsOfMany, of 16 bytes, that a lane takes at once; and how many are few.
_COLUMNS_OF_FEW, _COLUMNS_OF_MANY, _FEW = 4, 2, 2
_WARP = 32

_OUT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

_SPECS = {
    dtype: KernelSpec.of(
        *("", "merge_states", "MergeStatesParams", dtype), tags=[dtype], threads=64, min_blocks=10
    )
    for dtype in FLOATS
}
SPECS = tuple(_SPECS.values())


class StateViews(NamedTuple):
    """An attention output and its log-sum-exp, on the GPU."""

    out: ArrayView  # (batch, tokens, heads, head_dim), rows contiguous, on 16-byte boundaries
    lse: ArrayView  # (batch, tokens, heads) float32

    @property
    def fields(self) -> tuple[int, ...]:
        """The struct AttentionState of the kernel's file."""
        return (self.out.ptr, *self.out.strides[:3], self.lse.ptr, *self.lse.strides)


class Meeting(NamedTuple):
    """Ranks that wait for one another before any of them reads a partial result."""

    rank: int
    # Addresses of each rank's counters, `MOST_BLOCKS` times the number of ranks of 32 bits each.
    arrivals: tuple[int, ...]
    timeout: int  # in nanoseconds, after which the kernel traps


_NOTHING = (0,) * 8  # the fields of no state
_RANKS = 25  # where the number of ranks is among the values
_PARAMS = struct.Struct(f"<17q6i2f2i{len(_NOTHING) * MOST_PARTIALS + MOST_RANKS + 1}q")


def merge_launch(
    partials: Sequence[StateViews],
    carried: StateViews | None,
    result: StateViews,
    log2_of_base: float,
) -> Launch:
    """Describe how to merge partial results, after what an earlier launch has merged.

    There are 1 to `MOST_PARTIALS` partials of one shape and dtype. `carried` is the float32 result
    of the launch before this one; `result` is where to write, out float32, bfloat16 or float16. The
    log-sum-exps are of the base whose binary logarithm is given; infinities
    stand for an empty result.
    """
    first = partials[0].out
    rows = prod(first.shape[:3])
    columns = first.shape[3] * first.strides[3] // 16
    lanes_log2 = _lanes_log2(columns, len(partials))
    values = (
        *result.fields,
        *(_NOTHING if carried is None else carried.fields),
        rows,
        first.shape[1],
        first.shape[2],
        columns,
        lanes_log2,
        len(partials),
        _OUT_TYPES[result.out.dtype],
        log2_of_base,
        1.0 / log2_of_base,
        0,
        0,
        *(field for partial in partials for field in partial.fields),
        *_NOTHING * (MOST_PARTIALS - len(partials)),
        *(0,) * (MOST_RANKS + 1),
    )
    blocks = merge_blocks(rows, columns, len(partials))
    return Launch(_SPECS[first.dtype], (blocks, 1, 1), _PARAMS, values)


def merge_after_meeting(launch: Launch, meeting: Meeting) -> Launch:
    """Let a merge wait for all ranks before its first load."""
    ranks = len(meeting.arrivals)
    none = (0,) * (MOST_RANKS - ranks)
    values = launch.values
    first, last = values[:_RANKS], values[_RANKS + 2 : -MOST_RANKS - 1]
    given = (*first, ranks, meeting.rank, *last, *meeting.arrivals, *none, meeting.timeout)
    return launch._replace(values=given)


def merge_blocks(rows: int, columns: int, count: int) -> int:
    """Count the blocks that merge rows of so many times 16 bytes, of some partial results."""
    return -(-rows // (SPECS[0].threads >> _lanes_log2(columns, count)))


def _lanes_log2(columns: int, count: int) -> int:
    """Choose the lanes of a row: a power of two, so many that all have columns to take."""
    at_once = _COLUMNS_OF_FEW if count <= _FEW else _COLUMNS_OF_MANY
    lanes = min(-(-columns // at_once), _WARP)
    return (lanes - 1).bit_length()
