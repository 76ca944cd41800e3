# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla demo``: an MLA attention layer decodes real text.

The layer has the shapes of DeepSeek-V2-Lite and seeded random weights. Tokens are the bytes of a
text. Prompts of several lengths are prefilled into one paged cache with shuffled pages. Then every
step appends the next byte of each text, attends by weight absorption to the latent rows, and is
compared with multi-head attention that computes keys and values from it in float32.

The layer's products run in NumPy on either backend: CuPy's own kernels and its matrix products need
CUDA headers and cuBLAS, which cumla does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli import positive
from cumla.cli.demo.backends import Backend, choose_backend
from cumla.cli.demo.problem import (
    BF16,
    LAYERS,
    PAGE_SIZE,
    MLALayer,
    PagedCache,
    Request,
    Unabsorbed,
    cut_requests,
    load_text,
    verdict,
    worst_error,
)
from cumla.cli.progress import ProgressBar
from cumla.reference.threads import one_blas_thread

SEED = 0
Array = NDArray[Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "demo",
        help="decode real text through an MLA layer and check every step",
        description="Decode real text through an MLA attention layer with random weights and "
        "compare every step with un-absorbed attention in float32. Runs on the GPU if it can, else "
        "on the CPU. The exit code is 1 if a step is off. More: examples/ in the repository.",
    )
    parser.add_argument(
        "--file", type=Path, help="text whose bytes are the tokens (default: cumla's README)"
    )
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        default=next(iter(LAYERS)),
        help="shapes of the layer; tiny is for trying the demo out (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=32,
        help="decoding steps of each request (default: %(default)s)",
    )
    parser.set_defaults(func=run)


@one_blas_thread()
def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every step is within tolerance, 1 if not, 2 for an unusable text."""
    backend, reason = choose_backend()
    shape = LAYERS[args.layer]
    try:
        title, text = load_text(args.file)
        requests = cut_requests(text, args.steps)
    except (OSError, ValueError) as error:
        print(f"cumla demo: {error}", file=sys.stderr)
        return 2
    prompts = ", ".join(str(request.prompt) for request in requests)
    print(f"text      {title}, {len(text)} bytes")
    print(
        f"requests  {len(requests)}, prompts of {prompts} tokens in shuffled pages of {PAGE_SIZE}"
    )
    print(f"layer     {args.layer}: {shape.heads} heads, random weights")
    print(f"backend   {backend.name} ({reason})")
    return decode(MLALayer.random(shape, SEED), requests, args.steps, backend, SEED)


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
    done, oracles = [], [Unabsorbed(layer) for _ in requests]
    with ProgressBar("decoding", steps) as bar:
        for number in range(steps):
            done.append(decode_step(layer, oracles, cache, requests, number))
            bar.advance(note=f"error {done[-1].error:.1e}")
    print_table(done, backend)
    return verdict([step.error for step in done])


def decode_step(
    layer: MLALayer,
    oracles: list[Unabsorbed],
    cache: PagedCache,
    requests: list[Request],
    number: int,
) -> Step:
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
        oracle.attend(q_nope[i : i + 1], q_rope[i : i + 1], rows)
        for i, (oracle, rows) in enumerate(zip(oracles, cache.read(lengths), strict=True))
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
