# SPDX-License-Identifier: Apache-2.0
"""Timing in turns: a GPU changes by several per cent within minutes, which meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cumla.bench.section import Call
from cumla.bench.timing import Timing

__all__ = ["in_turns"]

_ROUNDS = 3


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
