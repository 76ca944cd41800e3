# SPDX-License-Identifier: Apache-2.0
"""The demo's server: requests decode while the prompts of others are prefilled in chunks.

A step is one call for all of them: `cumla.append_mla_cache` writes the rows of its tokens, and
a `cumla.MLAAttentionPlan`, which is made once and updated in every step, attends from these.
The arrays stay where they are and have room for any mix of `STEP_TOKENS` tokens, so that on a GPU
the step is captured once, into a CUDA graph, and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.demo.backends import Backend
from cumla.cli.demo.cache import BF16, PagedCache
from cumla.cli.demo.check import verdict, worst_error
from cumla.cli.demo.layer import LATENT_DIM, ROPE_DIM, MLALayer
from cumla.cli.demo.text import Request

Array = NDArray[Any]

STEP_TOKENS = 256  # most query tokens of a step

HEADER = ("step", "decoding", "prompt chunks", "cached tokens", "kernel time", "worst error")


def serve(layer: MLALayer, requests: list[Request], backend: Backend, seed: int) -> int:
    """Serve the requests, the shortest prompts first, and check every step; the exit code."""
    print(f"step      up to {STEP_TOKENS} query tokens, {backend.repeats}")
    print()
    print_row(HEADER)
    print_row("-" * len(name) for name in HEADER)
    server = Server(layer, sorted(requests, key=lambda request: request.prompt), backend, seed)
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
    return verdict([step.error for step in steps])


def print_row(cells: Iterable[str]) -> None:
    """Print a row of the table."""
    padded = (cell.ljust(len(name)) for cell, name in zip(cells, HEADER, strict=True))
    print("| " + " | ".join(padded) + " |", flush=True)


class Step(NamedTuple):
    """What a step did."""

    decoding: int  # requests that decode, a token each
    chunks: list[int]  # tokens of each prompt that was prefilled
    cached: int  # tokens of all requests after it
    # Of the whole step, and of writing and attending.
    seconds: float
    kernel_seconds: float
    error: float  # the worst token's


class Inputs(NamedTuple):
    """What the call of a step reads; where there is no token rows and q are NaN, the others -1."""

    # ``(STEP_TOKENS, 576)`` and ``(STEP_TOKENS, heads, 576)`` bfloat16.
    rows: Any
    q: Any
    # ``(STEP_TOKENS,)`` int32: whose tokens these are, and where in their request.
    batch_indices: Any
    positions: Any
    # ``(batch + 1,)`` and ``(batch,)`` int32: of each request its query tokens and its length.
    qo_indptr: Any
    kv_lens: Any

    @classmethod
    def on_host(
        cls, rows: Array, q: Array, positions: Array, counts: Array, kv_lens: Array
    ) -> Inputs:
        """Fill up what a step has for `counts` tokens of each request."""

        def fill(values: Array, dtype: Any, nothing: float) -> Array:
            full = np.full((STEP_TOKENS, *values.shape[1:]), nothing, dtype)
            full[: len(values)] = values
            return full

        requests = np.repeat(np.arange(len(counts)), counts)
        return cls(
            fill(rows, BF16, np.nan),
            fill(q, BF16, np.nan),
            fill(requests, np.int32, -1),
            fill(positions, np.int32, -1),
            np.cumsum([0, *counts], dtype=np.int32),
            kv_lens.astype(np.int32),
        )


class Server:
    """A layer that serves requests from a paged cache, a call a step.

    The requests are in the order of their prefill; `seed` is that of the order of pages.
    """

    def __init__(
        self, layer: MLALayer, requests: list[Request], backend: Backend, seed: int
    ) -> None:
        self._layer, self._requests, self._backend = layer, requests, backend
        self._cache = PagedCache.shuffled(requests, backend, seed)
        self._prompts = np.array([request.prompt for request in requests])
        self._ends = np.array([len(request.tokens) for request in requests])
        self._lengths = np.zeros(len(requests), np.int32)  # tokens in the cache
        columns = LATENT_DIM + ROPE_DIM
        nothing = Inputs.on_host(
            np.empty((0, columns)),
            np.empty((0, layer.heads, columns)),
            np.empty(0),
            np.zeros_like(self._lengths),
            self._lengths,
        )
        self._inputs = Inputs(*map(backend.put, nothing))
        self._out = backend.put(np.full((STEP_TOKENS, layer.heads, LATENT_DIM), np.nan, BF16))
        self._lse = backend.put(np.full((STEP_TOKENS, layer.heads), np.nan, np.float32))
        self._plan = cumla.MLAAttentionPlan.from_arrays(
            self._inputs.q, self._cache.pages, qo_indptr=self._inputs.qo_indptr
        )
        backend.prepare(self._plan, cumla.append_mla_cache)
        self._call = backend.repeatable(self._append_and_attend)

    @property
    def busy(self) -> bool:
        """Whether a request has tokens left."""
        return bool(np.any(self._lengths < self._ends))

    def step(self) -> Step:
        """Serve a token of each request that decodes, and chunks of prompts in order."""
        start = time.perf_counter()
        decoding = (self._prompts <= self._lengths) & (self._lengths < self._ends)
        counts = deal(self._prompts - self._lengths, decoding)
        before, self._lengths = self._lengths, self._lengths + counts
        positions = np.concatenate([*map(np.arange, before, self._lengths)])
        tokens = np.concatenate(
            [r.tokens[a:b] for r, a, b in zip(self._requests, before, self._lengths, strict=True)]
        )
        q_nope, q_rope = self._layer.queries(tokens, positions)
        inputs = Inputs.on_host(
            self._layer.latent_rows(tokens, positions),
            self._layer.absorb(q_nope, q_rope),
            positions,
            counts,
            self._lengths,
        )
        for target, array in zip(self._inputs, inputs, strict=True):
            self._backend.write(target, array)
        _, kernel_seconds = self._backend.timed(self._call)
        attended = self._backend.fetch(self._out)[: len(tokens)].astype(np.float32)
        out = self._layer.unabsorb(attended)
        seconds = time.perf_counter() - start

        expected = self._attend_unabsorbed(q_nope, q_rope, inputs.qo_indptr)
        return Step(
            int(decoding.sum()),
            [int(count) for count in counts[(counts > 0) & ~decoding]],
            int(self._lengths.sum()),
            seconds,
            kernel_seconds,
            worst_error(out, expected),
        )

    def _append_and_attend(self) -> None:
        """Make the call of a step."""
        inputs, cache = self._inputs, self._cache
        cumla.append_mla_cache(
            inputs.rows,
            cache.pages,
            batch_indices=inputs.batch_indices,
            positions=inputs.positions,
            block_table=cache.block_table,
        )
        self._plan.update(inputs.kv_lens, qo_indptr=inputs.qo_indptr)
        self._plan.run(
            inputs.q,
            cache.pages,
            cache.block_table,
            softmax_scale=self._layer.softmax_scale,
            out=self._out,
            lse=self._lse,
        )

    def _attend_unabsorbed(self, q_nope: Array, q_rope: Array, qo_indptr: Array) -> Array:
        """Compute what every token should have got, from the cache as it is."""
        cached = self._cache.read(self._lengths)
        return np.concatenate(
            [
                self._layer.attend_unabsorbed(q_nope[a:b], q_rope[a:b], rows)
                for rows, (a, b) in zip(cached, pairwise(qo_indptr), strict=True)
                if a < b
            ]
        )


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
