# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla demo``: an MLA attention layer decodes a text.

The layer has the shapes of DeepSeek-V2-Lite and seeded random weights. Tokens are the bytes of the
text. Prompts of several lengths are prefilled into one paged cache with shuffled pages. Then every
step appends the next byte of each request, attends by weight absorption to the latent rows, and is
compared with multi-head attention in float32, whose keys and values are computed from these rows.

The layer's products run in NumPy on the GPU, too: those of CuPy need CUDA headers and cuBLAS.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli import positive
from cumla.cli.progress import ProgressBar
from cumla.launch.device import import_cupy, require_hopper
from cumla.reference.threads import one_blas_thread

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
LATENT_DIM, ROPE_DIM, ROW_DIM = 512, 64, 576
PAGE_SIZE = 64
SPARE_PAGES = 3  # of no request; they stay NaN, as does every slot behind the last token
LONGEST_PROMPT = 2048
PROMPT_SHARES = (1.0, 0.625, 0.25, 1 / 64)  # of the longest prompt, one a request
TOLERANCE = 1e-2  # of |out - expected| / |expected|, for each token in each step


class LayerShape(NamedTuple):
    """Sizes in which MLA layers differ."""

    hidden: int  # columns of the hidden states
    heads: int  # query heads
    nope_dim: int  # columns of a head's keys without rotary embedding
    value_dim: int


# without query compression, like the model; with plain rotary embedding, unlike it
DEEPSEEK_V2_LITE = LayerShape(2048, 16, 128, 128)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "demo",
        help="decode a text through an MLA layer and check every step",
        description="Decode a text through an MLA layer of DeepSeek-V2-Lite's shapes, on the GPU "
        "if it can run the kernels. The exit code is 1 if a step is wrong.",
    )
    text = "text whose bytes are the tokens (default: this command's source)"
    parser.add_argument("--file", type=Path, default=Path(__file__), help=text)
    steps = "tokens of each request (default: %(default)s)"
    parser.add_argument("--steps", type=positive, default=32, help=steps)
    parser.set_defaults(func=run)


@one_blas_thread()
def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every step is within tolerance, 1 if not, 2 for an unusable text."""
    try:
        text = args.file.read_bytes()
        requests = cut_requests(text, args.steps)
    except (OSError, ValueError) as error:
        print(f"cumla demo: {error}", file=sys.stderr)
        return 2
    backend = Backend.choose()
    prompts = ", ".join(str(request.prompt) for request in requests)
    print(f"text      {args.file}, {len(text)} bytes")
    print(f"requests  {len(requests)}, prompts of {prompts} tokens, shuffled pages of {PAGE_SIZE}")
    print(f"layer     DeepSeek-V2-Lite's shapes, {DEEPSEEK_V2_LITE.heads} heads, random weights")
    print(f"backend   {backend.name} ({backend.reason})")
    return decode(MLALayer(DEEPSEEK_V2_LITE, seed=0), requests, args.steps, backend)


def decode(layer: MLALayer, requests: list[Request], steps: int, backend: Backend) -> int:
    """Prefill, then run and check every step; print times, errors and verdict; the exit code."""
    expected = [layer.attend_unabsorbed(*request) for request in requests]
    table, num_pages = shuffled_pages(requests, seed=0)
    kv_cache = backend.put(np.full((num_pages, PAGE_SIZE, ROW_DIM), np.nan, BF16))
    block_table = backend.put(table)

    def append(request: int | Array, tokens: Array, positions: Array) -> None:
        rows, slots = layer.latent_rows(tokens, positions), find_slots(table, request, positions)
        cumla.append_mla_cache(backend.put(rows), kv_cache, backend.put(slots))

    for i, (tokens, prompt) in enumerate(requests):
        append(i, tokens[:prompt], np.arange(prompt))
    q = backend.put(np.zeros((len(requests), 1, layer.heads, ROW_DIM), BF16))
    backend.prepare(cumla.MLADecodePlan.from_arrays(q, kv_cache))
    step_seconds, kernel_seconds, errors = [], [], []
    with ProgressBar("decoding", steps) as bar:
        for number in range(steps):
            start = time.perf_counter()
            positions = np.array([request.prompt + number for request in requests])
            tokens = np.array([r.tokens[p] for r, p in zip(requests, positions, strict=True)])
            append(np.arange(len(requests)), tokens, positions)
            q = backend.put(layer.absorb(*layer.queries(tokens, positions))[:, None].astype(BF16))
            arrays = q, kv_cache, block_table, backend.put((positions + 1).astype(np.int32))
            attend = partial(cumla.mla_decode, *arrays, softmax_scale=layer.softmax_scale)
            result, seconds = backend.timed(attend)
            kernel_seconds.append(seconds)
            out = layer.unabsorb(backend.fetch(result.out)[:, 0])
            step_seconds.append(time.perf_counter() - start)
            errors.append(worst_error(out, np.stack([outs[number] for outs in expected])))
            bar.advance(note=f"error {errors[-1]:.1e}")
    rate = len(requests) / median(step_seconds)
    print(f"steps     {steps}, {rate:.1f} tokens/s with projections in NumPy, without the check")
    print(f"attention {median(kernel_seconds) * 1e3:.3f} ms, median step, {backend.clock}")
    print(f"error     at most {np.max(errors):.1e}")  # NaN, if one is
    return verdict(errors)


def worst_error(out: Array, expected: Array) -> float:
    """Find the largest relative error of a token; both are (tokens, heads, columns)."""
    errors = np.linalg.norm(out - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    return float(errors.max())


def verdict(worst: Sequence[float], oracle: str = "un-absorbed attention in float32") -> int:
    """Print whether all steps are right, by the worst error of each; the exit code."""
    wrong = np.flatnonzero(~(np.array(worst) <= TOLERANCE))  # NaN is wrong
    if wrong.size:
        print(
            f"WRONG: {wrong.size} of {len(worst)} steps are more than {TOLERANCE:g} away from "
            f"{oracle}, the first is step {wrong[0] + 1}"
        )
        return 1
    print(f"ok: every step within {TOLERANCE:g} of {oracle}")
    return 0


class Request(NamedTuple):
    """A stretch of text: the prompt, and the bytes that the steps append."""

    tokens: Array
    prompt: int


def cut_requests(text: bytes, steps: int, most: int = LONGEST_PROMPT) -> list[Request]:
    """Cut a request of each length from the text, spread from its beginning to its end."""
    longest = min(len(text) - steps, most)
    if longest < 1:
        needed = f"needs a text of more than {steps} bytes, got {len(text)}"
        raise ValueError(f"--steps {steps} {needed}; take fewer steps or a longer --file")
    requests = []
    for i, share in enumerate(PROMPT_SHARES):
        prompt = max(round(share * longest), 1)
        start = (len(text) - prompt - steps) * i // (len(PROMPT_SHARES) - 1)
        requests.append(Request(np.frombuffer(text[start:][: prompt + steps], np.uint8), prompt))
    return requests


def shuffled_pages(requests: list[Request], seed: int) -> tuple[Array, int]:
    """Deal out the pages of a pool: the table, -1 where there is no page, and their number."""
    counts = [-(-len(request.tokens) // PAGE_SIZE) for request in requests]
    total = sum(counts) + SPARE_PAGES
    pool = np.random.default_rng(seed).permutation(total).astype(np.int32)
    table = np.full((len(requests), max(counts)), -1, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], pool = pool[:count], pool[count:]
    return table, total


def find_slots(table: Array, request: int | Array, positions: Array) -> Array:
    """Find the cache slots of positions, of one request or each of its own."""
    pages = table[request, positions // PAGE_SIZE].astype(np.int64)
    return np.asarray(pages * PAGE_SIZE + positions % PAGE_SIZE)


@dataclass
class Backend:
    """Memory of the cache and of attention: NumPy on the CPU, or CuPy on the first GPU."""

    name: str
    reason: str
    cupy: Any = None

    @classmethod
    def choose(cls) -> Self:
        """Take the first GPU if it can run the kernels."""
        try:
            device = require_hopper(0)
        except cumla.CumlaError as error:
            return cls("cumla.reference on the CPU", str(error).splitlines()[0])
        return cls(f"CUDA kernels on {device.name}", "the first GPU", import_cupy())

    @property
    def clock(self) -> str:
        """The clock of `timed`."""
        return "CUDA events around the call, launches included" if self.cupy else "wall clock"

    def prepare(self, *plans_or_functions: Any) -> None:
        """Compile and load kernels."""
        if self.cupy:
            cumla.prepare(*plans_or_functions, device=0)

    def put(self, array: Array) -> Any:
        """Copy from the host; on the CPU this is the array itself."""
        return self.cupy.asarray(array) if self.cupy else array

    def fetch(self, array: Any) -> Array:
        """Copy to the host, after all work so far."""
        return np.asarray(self.cupy.asnumpy(array) if self.cupy else array)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Run a call to its end; its result and its seconds."""
        if not self.cupy:
            began = time.perf_counter()
            return call(), time.perf_counter() - began
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, self.cupy.cuda.get_elapsed_time(start, end) / 1e3


class MLALayer:
    """Random weights of a layer in float32, without the output projection: the check precedes it.

    Hidden states, queries, keys and values have variance 1.
    """

    def __init__(self, shape: LayerShape, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int, fan_in: int = 1) -> Array:
            return rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

        hidden, self.heads, nope_dim, value_dim = shape
        # The scale belongs to the head dimension before absorption, not to the 576.
        self.softmax_scale = float((nope_dim + ROPE_DIM) ** -0.5)
        self.embedding = normal(256, hidden)  # hidden state of each byte
        self.w_q = normal(hidden, self.heads * (nope_dim + ROPE_DIM), fan_in=hidden)
        self.w_kv = normal(hidden, ROW_DIM, fan_in=hidden)  # to the latent and the rotary key
        self.norm = 1 + np.float32(0.1) * normal(LATENT_DIM)  # of the latent's RMS
        self.w_uk = normal(self.heads, nope_dim, LATENT_DIM, fan_in=LATENT_DIM)
        self.w_uv = normal(self.heads, value_dim, LATENT_DIM, fan_in=LATENT_DIM)

    def latent_rows(self, tokens: Array, positions: Array) -> Array:
        """Compute the rows that the cache keeps: (tokens, 576) bfloat16."""
        latent, key = np.split(self.embedding[tokens] @ self.w_kv, [LATENT_DIM], axis=1)
        mean_square = np.mean(latent * latent, axis=1, keepdims=True) + np.float32(1e-6)
        latent = self.norm * latent / np.sqrt(mean_square)
        return np.concatenate([latent, rotate(key, positions)], axis=1).astype(BF16)

    def queries(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Compute queries without and with position: (tokens, heads, nope_dim) and 64 columns."""
        q = (self.embedding[tokens] @ self.w_q).reshape(len(tokens), self.heads, -1)
        return q[..., :-ROPE_DIM], rotate(q[..., -ROPE_DIM:], positions[:, None])

    def absorb(self, q_nope: Array, q_rope: Array) -> Array:
        """Move the key projection to the queries: (tokens, heads, 576), to meet latent rows."""
        q_latent = np.einsum("thd,hdc->thc", q_nope, self.w_uk)
        return np.concatenate([q_latent, q_rope], axis=-1)

    def unabsorb(self, attended: Array) -> Array:
        """Project attended latents (tokens, heads, 512) to the heads' values."""
        return np.asarray(np.einsum("thc,hdc->thd", attended.astype(np.float32), self.w_uv))

    def attend_unabsorbed(self, tokens: Array, first: int = 0) -> Array:
        """Attend without a cache: (tokens from the first on, heads, value_dim)."""
        positions = np.arange(len(tokens))
        rows = self.latent_rows(tokens, positions).astype(np.float32)
        latent, rope_keys = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        q_nope, q_rope = self.queries(tokens[first:], positions[first:])
        later = positions > positions[first:, None]
        out = []
        for head in range(self.heads):
            keys, values = latent @ self.w_uk[head].T, latent @ self.w_uv[head].T
            scores = q_nope[:, head] @ keys.T + q_rope[:, head] @ rope_keys.T
            scores = np.where(later, -np.inf, np.float32(self.softmax_scale) * scores)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights @ values / weights.sum(axis=1, keepdims=True))
        return np.stack(out, axis=1)


def rotate(x: Array, positions: Array) -> Array:
    """Apply rotary position embedding to the last axis; positions broadcast over the others."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
