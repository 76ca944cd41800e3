# SPDX-License-Identifier: Apache-2.0
"""Timing in turns: a GPU changes by several per cent within minutes, which meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from cumla.bench.section import Bench, Call
from cumla.bench.timing import Timing

__all__ = ["in_turns", "time_by_name"]

_ROUNDS = 3
_REPEATS = 10  # runs of one turn


def in_turns(
    time: Callable[[Call], Timing], calls: Sequence[Call], rounds: int = _ROUNDS
) -> list[Timing]:
    """Time calls one after the other, several times: the median of the medians, and extremes."""
    turns = [[time(call) for call in calls] for _ in range(rounds)]
    return [
        Timing(
            float(np.median([time.us for time in times])),
            min(time.low for time in times),
            max(time.high for time in times),
        )
        for times in zip(*turns, strict=True)
    ]


def time_by_name(bench: Bench, calls: dict[str, Call]) -> dict[str, Timing]:
    """Time the calls of a section in turns."""
    times = in_turns(partial(bench.time, repeats=_REPEATS), tuple(calls.values()))
    return dict(zip(calls, times, strict=True))
