# SPDX-License-Identifier: Apache-2.0
"""Timing on the GPU with a cold L2 cache, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from cumla.bench.gpu import Gpu


class Timing(NamedTuple):
    """Repeated measurements of one thing, in microseconds."""

    us: float  # the median
    # A tenth of the measurements is below, and above.
    low: float
    high: float

    @classmethod
    def of(cls, measured: Sequence[float]) -> Timing:
        """Summarise measurements."""
        low, median, high = np.percentile(np.asarray(measured, np.float64), (10, 50, 90))
        return cls(float(median), float(low), float(high))

    def figures(self) -> dict[str, float]:
        """Name the median, and the times between which four fifths of the runs are."""
        return {"us": self.us, "us_low": self.low, "us_high": self.high}

    def rates(self, flops: int, nbytes: int, floor_us: float) -> dict[str, float]:
        """Name the figures, and what the median is by operations, bytes and the least time."""
        return self.figures() | {
            "tflops": flops / (self.us * 1e6),
            "gbps": nbytes / (self.us * 1e3),
            "floor_us": floor_us,
            "efficiency": floor_us / self.us,
        }

    def divided(self, count: int) -> Timing:
        """Share the time out among `count` equal pieces of work."""
        return Timing(*(value / count for value in self))


class GpuTimer(Protocol):
    """`time_cold` or `time_warm`."""

    def __call__(
        self, gpu: Gpu, work: Callable[[], object], *, repeats: int = 30, warmup: int = 5
    ) -> Timing:
        """Time work that goes to the GPU's stream."""


def time_cold(
    gpu: Gpu, work: Callable[[], object], *, repeats: int = 30, warmup: int = 5
) -> Timing:
    """Time work on the GPU, between two events, with an L2 cache full of something else.

    Reading 512 MiB before each run empties the cache of the work's data; meanwhile the host gets
    ahead, so that its launches do not count.
    """
    gpu.rest()
    return _time_after(gpu.flush_l2, gpu, work, repeats, warmup)


def time_warm(
    gpu: Gpu, work: Callable[[], object], *, repeats: int = 30, warmup: int = 5
) -> Timing:
    """Time work on the GPU, between two events, with the L2 cache as the run before has left it."""
    gpu.rest()
    return _time_after(gpu.hold, gpu, work, repeats, warmup)


def _time_after(
    before: Callable[[], None],
    gpu: Gpu,
    work: Callable[[], object],
    repeats: int,
    warmup: int,
) -> Timing:
    """Time work that goes to the stream while `before` keeps the GPU busy."""
    pairs = []
    for _ in range(warmup + repeats):
        before()
        begin = gpu.record()
        work()
        pairs.append((begin, gpu.record()))
    gpu.synchronize()
    return Timing.of([gpu.elapsed_us(begin, end) for begin, end in pairs[warmup:]])


def time_graph(
    gpu: Gpu, calls: Sequence[Callable[[], object]], *, repeats: int = 10, warmup: int = 2
) -> Timing:
    """Time calls back to back in one CUDA graph: a replay's time divided by their number.

    What stays in L2 from one to the next stays, so let neighbours use different caches.
    """

    def work() -> None:
        for call in calls:
            call()

    replay = gpu.capture(work)
    return time_cold(gpu, replay, repeats=repeats, warmup=warmup).divided(len(calls))


def time_sustained(
    gpu: Gpu, work: Callable[[], object], single_us: float, *, seconds: float = 1.5
) -> float:
    """Time work that keeps the GPU busy for so long that its power limit sets the clocks.

    Returns the mean of the second half of the runs; a single one takes about `single_us`.
    """
    half = ceil(seconds / 2 * 1e6 / single_us)
    gpu.rest()
    for _ in range(half):
        work()
    begin = gpu.record()
    for _ in range(half):
        work()
    end = gpu.record()
    gpu.synchronize()
    return gpu.elapsed_us(begin, end) / half
