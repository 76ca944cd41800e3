# SPDX-License-Identifier: Apache-2.0
"""The demo's decoding: every step appends a token to each request, through `cumla.mla_decode`."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.demo.backends import Backend
from cumla.cli.demo.cache import BF16, PagedCache
from cumla.cli.demo.check import verdict, worst_error
from cumla.cli.demo.layer import MLALayer
from cumla.cli.demo.text import Request
from cumla.cli.progress import ProgressBar

Array = NDArray[Any]


class Step(NamedTuple):
    """Seconds of a whole step and of its attention, and the worst request's relative error."""

    tokens: int
    seconds: float
    kernel_seconds: float
    error: float


def decode(
    layer: MLALayer, requests: list[Request], steps: int, backend: Backend, seed: int
) -> int:
    """Prefill, then run and check every step; print the table and the verdict; the exit code."""
    cache = PagedCache.shuffled(requests, backend, seed)
    for i, request in enumerate(requests):
        prompt = np.arange(request.prompt)
        rows = layer.latent_rows(request.tokens[: request.prompt], prompt)
        cache.write(i, 0, rows)
    queries = backend.put(np.zeros((len(requests), 1, layer.heads, rows.shape[1]), BF16))
    backend.prepare(cumla.MLADecodePlan.from_arrays(queries, cache.pages))
    done = []
    with ProgressBar("decoding", steps) as bar:
        for number in range(steps):
            done.append(decode_step(layer, cache, requests, number))
            bar.advance(note=f"error {done[-1].error:.1e}")
    print_table(done, backend)
    return verdict([step.error for step in done])


def decode_step(layer: MLALayer, cache: PagedCache, requests: list[Request], number: int) -> Step:
    """Append one token to each request and attend; compare with un-absorbed attention."""
    start = time.perf_counter()
    positions = np.array([request.prompt + number for request in requests], np.int32)
    tokens = np.array([r.tokens[p] for r, p in zip(requests, positions, strict=True)])
    for i, row in enumerate(layer.latent_rows(tokens, positions)):
        cache.write(i, int(positions[i]), row[None])
    q_nope, q_rope = layer.queries(tokens, positions)
    lengths = positions + np.int32(1)
    queries = layer.absorb(q_nope, q_rope)
    attended, kernel_seconds = attend_cached(cache, queries, lengths, layer.softmax_scale)
    out = layer.unabsorb(attended)
    seconds = time.perf_counter() - start

    expected = [
        layer.attend_unabsorbed(q_nope[i : i + 1], q_rope[i : i + 1], rows)
        for i, rows in enumerate(cache.read(lengths))
    ]
    error = worst_error(out, np.concatenate(expected))
    return Step(len(requests), seconds, kernel_seconds, error)


def attend_cached(
    cache: PagedCache, queries: Array, lengths: Array, softmax_scale: float
) -> tuple[Array, float]:
    """Run `cumla.mla_decode` on absorbed queries (tokens, heads, 576); the result in float32."""
    backend = cache.backend
    q, kv_lens = backend.put(queries[:, None].astype(BF16)), backend.put(lengths)
    result, seconds = backend.timed(
        lambda: cumla.mla_decode(
            q, cache.pages, cache.block_table, kv_lens, softmax_scale=softmax_scale
        )
    )
    return backend.fetch(result.out)[:, 0].astype(np.float32), seconds


def print_table(steps: list[Step], backend: Backend) -> None:
    """Print the rate, the time of the attention and the worst error."""
    rate = steps[0].tokens / median(step.seconds for step in steps)
    kernel = median(step.kernel_seconds for step in steps)
    worst = np.max([step.error for step in steps])  # NaN, if one is
    header = ("steps", "tokens/s", "kernel time", "worst error", "backend")
    cells = (str(len(steps)), f"{rate:.1f}", f"{kernel * 1e3:.3f} ms", f"{worst:.1e}")
    widths = [max(len(a), len(b)) for a, b in zip(header, (*cells, backend.name), strict=True)]
    print()
    for row in (header, tuple("-" * width for width in widths), (*cells, backend.name)):
        print("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
    print("tokens/s: median step of the one layer, its projections in NumPy, without the check")
    print(f"kernel time: median step, {backend.clock}")
