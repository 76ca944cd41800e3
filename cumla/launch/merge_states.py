# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/merge_states.cu: merges up to 60 partial attention results in one pass."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "merge_states"
MOST_PARTIALS = constant(_FILE, "kMostPartials")
MOST_RANKS = constant(_FILE, "kMostRanks")  # that wait for one another
MOST_BLOCKS = 512  # of such a launch: resident at once, ten on each multiprocessor
# Columns, of 16 bytes, that a lane takes at once; and how many partial results are few.
_COLUMNS_OF_FEW, _COLUMNS_OF_MANY, _FEW = (
    constant(_FILE, name) for name in ("kColumnsOfFew", "kColumnsOfMany", "kFew")
)
_WARP = 32

_OUT_TYPES = {dtype: constant(_FILE, f"kOut{dtype.capitalize()}") for dtype in FLOATS}

_SPECS = {
    dtype: KernelSpec.of(
        *("", "merge_states", "MergeStatesParams", dtype),
        tags=[dtype],
        threads=constant(_FILE, "kMergeThreads"),
        min_blocks=10,
    )
    for dtype in FLOATS
}
SPECS = tuple(_SPECS.values())


class StateViews(NamedTuple):
    """An attention output and its log-sum-exp, on the GPU."""

    out: ArrayView  # (batch, tokens, heads, head_dim), rows contiguous, on 16-byte boundaries
    lse: ArrayView  # (batch, tokens, heads) float32

    @property
    def named(self) -> dict[str, Any]:
        """The struct AttentionState of the kernel's file."""
        out, lse = self.out, self.lse
        return {
            "out": out.ptr,
            "out_strides": out.strides[:3],
            "lse": lse.ptr,
            "lse_strides": lse.strides,
        }


class Meeting(NamedTuple):
    """Ranks that wait for one another before any of them reads a partial result."""

    rank: int
    # Addresses of each rank's counters, `MOST_BLOCKS` times the number of ranks of 32 bits each.
    arrivals: tuple[int, ...]
    timeout: int  # in nanoseconds, after which the kernel traps


def merge_launch(
    partials: Sequence[StateViews],
    carried: StateViews | None,
    result: StateViews,
    log2_of_base: float,
    meeting: Meeting | None = None,
) -> Launch:
    """Describe how to merge partial results, after what an earlier launch has merged.

    There are 1 to `MOST_PARTIALS` partials of one shape and dtype. `carried` is the float32 result
    of the launch before this one; `result` is where to write, out float32, bfloat16 or float16. The
    log-sum-exps are of the base whose binary logarithm is given; infinities
    stand for an empty result. With `meeting` it waits for all ranks before its first load.
    """
    first = partials[0].out
    rows = prod(first.shape[:3])
    columns = first.shape[3] * first.strides[3] // 16
    lanes_log2 = _lanes_log2(columns, len(partials))
    values = {
        "result": result.named,
        "carried": None if carried is None else carried.named,
        "rows": rows,
        "tokens": first.shape[1],
        "heads": first.shape[2],
        "columns": columns,
        "lanes_log2": lanes_log2,
        "count": len(partials),
        "out_type": _OUT_TYPES[result.out.dtype],
        "to_log2": log2_of_base,
        "from_log2": 1.0 / log2_of_base,
        "ranks": len(meeting.arrivals) if meeting else 0,
        "rank": meeting.rank if meeting else 0,
        "partials": [partial.named for partial in partials],
        "arrivals": meeting.arrivals if meeting else (),
        "timeout": meeting.timeout if meeting else 0,
    }
    blocks = merge_blocks(rows, columns, len(partials))
    return launch_of(_SPECS[first.dtype], (blocks, 1, 1), values)


def merge_blocks(rows: int, columns: int, count: int) -> int:
    """Count the blocks that merge rows, by their units of 16 bytes, of some partial results."""
    return -(-rows // (SPECS[0].threads >> _lanes_log2(columns, count)))


def _lanes_log2(columns: int, count: int) -> int:
    """Choose the lanes of a row: a power of two, so many that all have columns to take."""
    at_once = _COLUMNS_OF_FEW if count <= _FEW else _COLUMNS_OF_MANY
    lanes = min(-(-columns // at_once), _WARP)
    return (lanes - 1).bit_length()
