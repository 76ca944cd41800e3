# SPDX-License-Identifier: Apache-2.0
"""Measures a case: checked first, then cumla and every library interleaved, with a cold L2."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from bench.case import Call, Case, Variant
from cumla.bench.gpu import Gpu
from cumla.bench.section import CheckError

ROUNDS = 25
_LONG_US = 1500.0  # calls longer than this run fewer rounds
_WARM_UP = 2  # rounds
_QUICK = 5  # rounds that choose among the variants of a library
_SYNCHRONIZE_EVERY = 8  # rounds: events and launches do not pile up
_SPIN_CYCLES = 1980  # of a microsecond at the highest clock

Row = dict[str, Any]


class Lost(Exception):
    """The GPU's context is lost: nothing more can run in this process."""


@dataclass
class _Timed:
    """One library's call, as it is measured."""

    name: str
    variant: Variant
    error: float
    limit: float
    quick: dict[str, float] = field(default_factory=dict)  # us of the variants
    host_us: float = 0.0
    us: float = 0.0
    low: float = 0.0
    graph: Any = None  # a captured call and what it returns
    graph_us: float | None = None

    def row(self) -> Row:
        found: Row = {"us": self.us, "us_low": self.low, "graph_us": self.graph_us}
        found |= {"host_us": self.host_us, "error": self.error}
        if self.name:
            found |= {"variant": self.variant.name, "variants": self.quick}
        return found


class Stopwatch:
    """Times calls on PyTorch's current stream, which is the GPU's."""

    def __init__(self, gpu: Gpu, torch: Any) -> None:
        self.gpu, self.torch = gpu, torch

    def host_us(self, call: Call) -> float:
        """Host time of a call."""
        self.torch.cuda.synchronize()
        begin = perf_counter()
        call()
        us = (perf_counter() - begin) * 1e6
        self.torch.cuda.synchronize()
        return us

    def in_turns(
        self, calls: Sequence[Call], rounds: int, hold_us: float
    ) -> list[tuple[float, float]]:
        """Medians and tenth percentiles: each call once a round, every round begins with another.

        Before a call 512 MiB are read through L2, and the GPU is kept busy until the host has
        launched it.
        """
        event = partial(self.torch.cuda.Event, enable_timing=True)
        taken: list[list[tuple[Any, Any]]] = [[] for _ in calls]
        for round_ in range(rounds + _WARM_UP):
            for turn in range(len(calls)):
                place = (turn + round_) % len(calls)
                self.gpu.flush_l2()
                self.torch.cuda._sleep(int(min(hold_us, _LONG_US) * _SPIN_CYCLES))
                begin, end = event(), event()
                begin.record()
                calls[place]()
                end.record()
                if round_ >= _WARM_UP:
                    taken[place].append((begin, end))
            if round_ % _SYNCHRONIZE_EVERY == _SYNCHRONIZE_EVERY - 1:
                self.torch.cuda.synchronize()
        self.torch.cuda.synchronize()
        found = []
        for pairs in taken:
            times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
            found.append((times[len(times) // 2], times[len(times) // 10]))
        return found

    def capture(self, call: Call) -> tuple[Any, Any]:
        """A call in a CUDA graph, and what it returned."""
        call()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
            out = call()
        return graph, out


def check(case: Case, out: Any, limit: float, who: str) -> float:
    """The error of an output; `CheckError` if it is above the limit, or NaN."""
    error = case.error(out)
    if not error <= limit:
        raise CheckError(f"{who} is off by {error:.1e}, allowed are {limit:.0e}")
    return error


def measure(watch: Stopwatch, case: Case, note: Callable[[str], None], rounds: int = ROUNDS) -> Row:
    """Measure a case; `CheckError` if cumla is wrong. Libraries that are wrong are left out."""
    case.run()
    own = _Timed(
        "", Variant("", case.run), check(case, case.run(), case.limit, "cumla"), case.limit
    )
    timed = [own]
    for name, variants in case.peers.items():
        found = _fastest(watch, case, name, variants, note)
        if found is not None:
            timed.append(found)
    for of in timed:
        of.variant.call()
        of.host_us = min(watch.host_us(of.variant.call) for _ in range(3))
    calls = [of.variant.call for of in timed]
    ((once, _),) = watch.in_turns(calls[:1], 3, 200)
    rounds = rounds if once < _LONG_US else max(7, rounds // 3)
    hold = 1.6 * max(of.host_us for of in timed) + 40
    for of, (us, low) in zip(timed, watch.in_turns(calls, rounds, hold), strict=True):
        of.us, of.low = us, low
    _in_graphs(watch, timed, rounds, note)
    timed = [of for of in timed if _is_right_again(case, of, note)]
    gc.collect()
    return own.row() | {"peers": {of.name: of.row() for of in timed[1:]}}


def _fastest(
    watch: Stopwatch, case: Case, name: str, variants: list[Variant], note: Callable[[str], None]
) -> _Timed | None:
    """The fastest variant of a library that is right."""
    right: list[tuple[float, Variant, float]] = []
    for variant in variants:
        who = f"{name} ({variant.name})" if variant.name else name
        try:
            variant.call()
            error = check(case, variant.call(), case.peer_limit, who)
            us = 0.0
            if len(variants) > 1:
                hold = 1.5 * watch.host_us(variant.call) + 30
                ((us, _),) = watch.in_turns([variant.call], _QUICK, hold)
        except Exception as problem:
            note(_said(problem, who))
        else:
            right.append((us, variant, error))
    if not right:
        return None
    _, variant, error = min(right, key=lambda of: of[0])
    quick = {of.name: us for us, of, _ in right}
    return _Timed(name, variant, error, case.peer_limit, quick)


def _in_graphs(
    watch: Stopwatch, timed: list[_Timed], rounds: int, note: Callable[[str], None]
) -> None:
    """Time the same calls as replays of CUDA graphs, in turns, too."""
    for of in timed:
        try:
            of.graph = watch.capture(of.variant.call)
        except Exception as problem:
            watch.torch.cuda.synchronize()
            note(_said(problem, f"no graph of {of.name or 'cumla'}"))
    have = [of for of in timed if of.graph is not None]
    times = watch.in_turns([of.graph[0].replay for of in have], rounds, 60) if have else []
    for of, (us, _) in zip(have, times, strict=True):
        of.graph_us = us


def _is_right_again(case: Case, of: _Timed, note: Callable[[str], None]) -> bool:
    """Check what graph and call give after all those runs; `CheckError` if cumla is wrong."""
    who = of.name or "cumla"
    try:
        if of.graph is not None:
            graph, out = of.graph
            if out is not None:
                out.zero_()
            graph.replay()
            check(case, out, of.limit, f"{who}, as a graph after the timing,")
        check(case, of.variant.call(), of.limit, f"{who}, after the timing,")
    except CheckError as problem:
        if not of.name:
            raise
        note(str(problem))
        return False
    finally:
        of.graph = None
    return True


def _said(problem: Exception, who: str) -> str:
    """A line about a problem; `Lost` if the context is."""
    reason = str(problem).strip().partition("\n")[0]
    if isinstance(problem, CheckError):
        return reason
    line = f"{who}: {type(problem).__name__}: {reason[:160]}"
    if "CUDA error" in reason or "illegal" in reason:
        raise Lost(line) from problem
    return line
