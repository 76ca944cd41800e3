# SPDX-License-Identifier: Apache-2.0
"""The decoding step that is measured in each framework: its shape, its arrays, and the clock.

A step writes one token of each request into the cache of each layer and attends, all layers by one
schedule. Each layer has a cache of its own, so that no cached row is in L2 when its turn comes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cumla
from cumla.bench.section import Row
from cumla.bench.timing import Timing

__all__ = ["CALL", "CASES", "Arrays", "Budget", "Prepared", "Step", "StepCase", "bits", "row_of"]

Step = Callable[[], Any]
"""Enqueues a step, or a call; returns the output of its last layer."""
Prepared = tuple[Step, Callable[[], object], Row]
"""A step, what waits for it, and more of its row."""

_PAGE = 64
_BURST = 16  # steps that follow each other without a wait


class _Family(NamedTuple):
    """The functions of cumla that a step calls, by their names."""

    append: str
    attend: str
    plan: str


_FAMILIES = {
    "mla": _Family("append_mla_cache", "mla_decode", "MLADecodePlan"),
    "mha": _Family("append_kv_cache", "attention", "AttentionPlan"),
}


@dataclass(frozen=True, slots=True)
class StepCase:
    """Shape of a step: requests of `kv_len` tokens, one query token each, bfloat16."""

    family: str
    heads: int
    kv_heads: int
    batch: int
    kv_len: int
    layers: int = 32

    @property
    def functions(self) -> _Family:
        """The calls of a step."""
        return _FAMILIES[self.family]

    @property
    def width(self) -> int:
        """Columns of a query, and of a cached row."""
        return 576 if self.family == "mla" else 128

    def workspace_bytes(self) -> int:
        """Size of a plan's buffer."""
        plan = getattr(cumla, self.functions.plan)
        if self.family == "mla":
            return int(plan.workspace_bytes(self.batch, 1, self.heads))
        sizes = (self.batch, self.batch, self.heads, self.width)
        return int(plan.workspace_bytes(*sizes, num_kv_heads=self.kv_heads))

    def lay_out(self, upload: Callable[[Any], Any], copy: Callable[[Any], Any]) -> Arrays:
        """Make the arrays of a step; `upload` copies one from NumPy, `copy` one that is there."""
        random = np.random.default_rng(self.kv_len)
        period = (random.standard_normal(65521) * 0.1).astype(ml_dtypes.bfloat16)
        each = -(-self.kv_len // _PAGE)
        pages = random.permutation(self.batch * each).astype(np.int32).reshape(self.batch, each)
        last = self.kv_len - 1
        by_heads = () if self.family == "mla" else (self.kv_heads,)
        count = 1 + len(by_heads)  # of arrays that hold a cached token
        cache = upload(np.resize(period, (pages.size, _PAGE, *by_heads, self.width)))
        row = np.resize(period[7:], (self.batch, *by_heads, self.width))
        return Arrays(
            upload(np.resize(period[3:], (self.batch, 1, self.heads, self.width))),
            tuple([upload(row) for _ in range(count)]),
            [tuple([copy(cache) for _ in range(count)]) for _ in range(self.layers)],
            upload(pages),
            upload(np.full(self.batch, self.kv_len, np.int32)),
            upload(pages[:, last // _PAGE] * np.int32(_PAGE) + np.int32(last % _PAGE)),
        )


class Arrays(NamedTuple):
    """The arrays of a step; one or two hold the cached rows of a layer."""

    q: Any
    rows: tuple[Any, ...]
    caches: list[tuple[Any, ...]]
    table: Any
    kv_lens: Any
    slots: Any


_MLA, _GQA = StepCase("mla", 16, 1, 8, 4096), StepCase("mha", 32, 8, 8, 4096)
CASES = (
    _MLA,
    _GQA,
    replace(_MLA, heads=128, batch=32),
    replace(_GQA, batch=32),
)
CALL = StepCase("mla", 16, 1, 16, 1024, layers=1)
"""Little work for the GPU: of its single calls the host's time counts."""


# --- measuring -----------------------------------------------------------------------------------


@dataclass
class Budget:
    """Time that is left, and what measures with it."""

    seconds: float
    repeats: int = 30

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def row(self, made: Row, prepare: Callable[[], Prepared]) -> Row:
        """Measure what `prepare` makes: a step, what waits for it, and more of the row.

        The times are microseconds: ``us`` until the result is there, ``host_us`` until the step
        returns, ``burst_us`` a step of several without a wait between them.
        """
        if time.monotonic() > self._end:
            return made | {"skipped": "no time was left"}
        try:
            step, wait, more = prepare()
            return made | self._times(step, wait) | more
        except Exception as error:  # of any kind: what is measured later stands
            reason = str(error).strip().partition("\n")[0]
            return made | {"failed": f"{type(error).__name__}: {reason}"}

    def _times(self, step: Step, wait: Callable[[], object]) -> Row:
        waited, alone, bursts = [], [], []
        for _ in range(4):  # plain executions, captures
            step()
            wait()
        for _ in range(self.repeats):
            begin = time.perf_counter_ns()
            step()
            alone.append((time.perf_counter_ns() - begin) / 1e3)
            wait()
            waited.append((time.perf_counter_ns() - begin) / 1e3)
        for _ in range(max(3, self.repeats // 5)):
            begin = time.perf_counter_ns()
            for _ in range(_BURST):
                step()
            wait()
            bursts.append((time.perf_counter_ns() - begin) / 1e3 / _BURST)
        host, burst = Timing.of(alone).us, Timing.of(bursts).us
        return Timing.of(waited).figures() | {"host_us": host, "burst_us": burst}


def row_of(op: str, case: StepCase | None, framework: str, mode: str) -> Row:
    return {"op": op, **(asdict(case) if case else {}), "framework": framework, "mode": mode}


def bits(array: np.ndarray[Any, Any]) -> Row:
    """Identify a result: it is the same to the bit in all frameworks and modes."""
    return {"bits": hashlib.sha256(array.tobytes()).hexdigest()[:16]}
