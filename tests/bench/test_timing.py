# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise

import pytest

from bench.turns import in_turns
from cumla.bench.timing import (
    Timing,
    time_cold,
    time_graph,
    time_sustained,
)
from tests.bench.fake_gpu import FakeGpu


def test_median_and_spread():
    timing = Timing.of([*range(1, 11), 1000])
    assert timing == Timing(us=6.0, low=2.0, high=10.0)
    assert timing.divided(2) == Timing(3.0, 1.0, 5.0)


def test_cold_times_the_work_alone_and_drops_the_warm_up():
    gpu = FakeGpu()
    runs = []

    def work() -> None:
        runs.append(gpu.now)
        gpu.now += 100.0 if len(runs) <= 3 else 7.0

    assert time_cold(gpu, work, repeats=4, warmup=3) == Timing(7.0, 7.0, 7.0)
    assert len(runs) == 7
    gaps = [later - earlier for earlier, later in pairwise(runs)]
    assert min(gaps) >= 1000.0  # the cache is flushed before each


def test_turns_come_one_behind_the_other():
    order = []

    def time(call) -> Timing:
        order.append(call)
        return Timing(*([float(len(order))] * 3))

    calls = (lambda: None, lambda: None)
    assert in_turns(time, calls, rounds=3) == [Timing(3.0, 1.0, 5.0), Timing(4.0, 2.0, 6.0)]
    assert order == [*calls] * 3


def test_graph_shares_a_replay_out_among_its_calls():
    gpu = FakeGpu()
    order = []

    def call(number: int, us: float) -> None:
        order.append(number)
        gpu.now += us

    calls = [lambda: call(0, 10.0), lambda: call(1, 20.0)]
    timing = time_graph(gpu, calls, repeats=3, warmup=1)
    assert timing.us == pytest.approx(15.0)
    assert order == [0, 1] * 4


def test_sustained_times_the_last_half_without_a_pause():
    gpu = FakeGpu()
    runs = []

    def work() -> None:
        runs.append(gpu.now)
        gpu.now += 1400.0 if len(runs) <= 500 else 1600.0 + len(runs) % 2

    assert time_sustained(gpu, work, 1500.0) == 1600.5
    assert len(runs) == 1000  # of 1500 us: 1.5 s
    assert max(later - earlier for earlier, later in pairwise(runs)) <= 1601.0
