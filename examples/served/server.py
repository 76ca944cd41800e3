# SPDX-License-Identifier: Apache-2.0
"""Servers: requests decode while the prompts of others are prefilled in chunks.

A step has up to `STEP_TOKENS` tokens (see `deal`). What a model makes of them is in its own module.
The arrays of a step stay where they are and have room for any mix, so that on a GPU it is captured
once, into a CUDA graph, and replayed.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from served.graph import GraphBackend

from cumla.cli.demo import Request, cut_requests, verdict
from cumla.reference.threads import one_blas_thread

Array = NDArray[Any]

STEP_TOKENS = 256  # most query tokens of a step

HEADER = ("step", "decoding", "prompt chunks", "cached tokens", "kernel time", "worst error")


class Batch(NamedTuple):
    """The tokens of a step, those of one request after those of the other."""

    # ``(tokens,)``: the tokens, whose they are, and where in their request.
    tokens: Array
    requests: Array
    positions: Array
    # ``(batch + 1,)`` and ``(batch,)`` int32: of each request its new tokens and its length.
    qo_indptr: Array
    kv_lens: Array


class Step(NamedTuple):
    """Results of a step."""

    decoding: int  # requests that decode, a token each
    chunks: list[int]  # tokens of each prompt that was prefilled
    cached: int  # tokens of all requests after it
    # The whole step, and writing and attending.
    seconds: float
    kernel_seconds: float
    error: float  # the worst token's


class Server(ABC):
    """Serves requests, those with the shortest prompts first, and checks every step."""

    oracle: str  # what steps are compared with

    def __init__(self, requests: list[Request]) -> None:
        self.requests = sorted(requests, key=lambda request: request.prompt)
        self._prompts = np.array([request.prompt for request in self.requests])
        self._ends = np.array([len(request.tokens) for request in self.requests])
        self._lengths = np.zeros(len(requests), np.int32)  # tokens in the cache

    @abstractmethod
    def compute(self, batch: Batch) -> tuple[Any, float]:
        """Run the model on new tokens; what `error` compares, and the seconds of the kernels."""

    @abstractmethod
    def error(self, batch: Batch, results: Any) -> float:
        """Find the largest relative error of a token."""

    @property
    def busy(self) -> bool:
        """Return whether a request has tokens left."""
        return bool(np.any(self._lengths < self._ends))

    def step(self) -> Step:
        """Serve a token of each request that decodes, and chunks of prompts in order."""
        start = time.perf_counter()
        decoding = (self._prompts <= self._lengths) & (self._lengths < self._ends)
        counts = deal(self._prompts - self._lengths, decoding)
        before, self._lengths = self._lengths, self._lengths + counts
        spans = zip(self.requests, before, self._lengths, strict=True)
        batch = Batch(
            np.concatenate([request.tokens[a:b] for request, a, b in spans]),
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([*map(np.arange, before, self._lengths)]),
            np.cumsum([0, *counts], dtype=np.int32),
            self._lengths.astype(np.int32),
        )
        results, kernel_seconds = self.compute(batch)
        seconds = time.perf_counter() - start
        return Step(
            int(decoding.sum()),
            [int(count) for count in counts[(counts > 0) & ~decoding]],
            int(self._lengths.sum()),
            seconds,
            kernel_seconds,
            self.error(batch, results),
        )


@one_blas_thread()
def serve_text(
    argv: list[str] | None,
    script: str,
    shapes: Mapping[str, Any],
    make: Callable[[Any, list[Request], GraphBackend], Server],
) -> int:
    """Serve four requests, whose tokens are the bytes of a text; 0 if every step is right."""
    parser = argparse.ArgumentParser(description="Chunked prefill beside decoding, checked.")
    parser.add_argument("--file", type=Path, default=Path(script), help="default: this program")
    parser.add_argument("--steps", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--layer", choices=shapes, help=f"default: {next(iter(shapes))} on a GPU, tiny on the CPU"
    )
    args = parser.parse_args(argv)
    backend = GraphBackend.choose()
    name = args.layer or (next(iter(shapes)) if backend.cupy else "tiny")
    requests = cut_requests(args.file.read_bytes(), args.steps)
    print(f"layers    {name}: {shapes[name].heads} heads, random weights")
    print(f"backend   {backend.name} ({backend.reason})")
    return serve(make(shapes[name], requests, backend), backend)


def serve(server: Server, backend: GraphBackend) -> int:
    """Run all steps, and print a line for each and the verdict; the exit code."""
    print(f"step      up to {STEP_TOKENS} query tokens, {backend.repeats}")
    print()
    print_row(HEADER)
    print_row("-" * len(name) for name in HEADER)
    steps: list[Step] = []
    while server.busy:
        steps.append(step := server.step())
        chunks = "+".join(map(str, step.chunks)) or "-"
        kernel = f"{step.kernel_seconds * 1e3:.3f} ms"
        cells = (len(steps), step.decoding, chunks, step.cached, kernel, f"{step.error:.1e}")
        print_row(map(str, cells))
    tokens = sum(step.decoding + sum(step.chunks) for step in steps)
    rate = tokens / sum(step.seconds for step in steps)
    print(f"{tokens} tokens, {rate:.1f} a second, projections in NumPy, without the check")
    print(f"kernel time: append, schedule and attention, {backend.clock}")
    return verdict([step.error for step in steps], server.oracle)


def print_row(cells: Iterable[str]) -> None:
    """Print a row of the table."""
    padded = (cell.ljust(len(name)) for cell, name in zip(cells, HEADER, strict=True))
    print("| " + " | ".join(padded) + " |", flush=True)


def filled(values: Array, dtype: Any, nothing: float) -> Array:
    """Fill rows of tokens up to those of a full step."""
    full = np.full((STEP_TOKENS, *values.shape[1:]), nothing, dtype)
    full[: len(values)] = values
    return full


def deal(left: Array, decoding: Array) -> Array:
    """Deal the tokens of a step out: one to each request that decodes, the rest to prompts.

    `left` are the tokens of each request's prompt that are not in the cache; where there are none,
    at most 0. Query tokens of each request come back, at most STEP_TOKENS together.
    """
    counts = decoding.astype(np.int32)
    room = STEP_TOKENS - int(counts.sum())
    for i in np.flatnonzero(left > 0):
        counts[i] = min(int(left[i]), room)
        room -= int(counts[i])
    return counts
