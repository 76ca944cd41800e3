# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla demo``: an MLA attention layer decodes real text through `cumla.mla_decode`.

The layer has the shapes of DeepSeek-V2-Lite and seeded random weights; tokens are the bytes of a
text. Prompts of several lengths are prefilled into one paged cache with shuffled pages. Then every
step appends the next byte of each text, attends by weight absorption to the latent rows, and is
compared with multi-head attention that computes keys and values from the same cache in float32.

The model's products run in NumPy on either backend: CuPy's own kernels and its matrix products need
CUDA headers and cuBLAS, which cumla does not. On a GPU the cache, the absorbed queries and the
attention live there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.progress import ProgressBar
from cumla.launch.device import import_cupy, require_hopper

Array = NDArray[Any]

# DeepSeek-V2-Lite's attention: no query compression, plain rotary embedding here.
HIDDEN, HEADS = 2048, 16
NOPE_DIM, ROPE_DIM, VALUE_DIM, LATENT_DIM = 128, 64, 128, 512
SOFTMAX_SCALE = (NOPE_DIM + ROPE_DIM) ** -0.5
ROPE_BASE = 10000.0

PAGE_SIZE = 64
SPARE_PAGES = 3  # of nobody; they stay NaN, as does every slot behind the last token
LONGEST_PROMPT = 2048
PROMPT_SHARES = (1.0, 0.625, 0.25, 1 / 64)  # of the longest prompt, one a request
TOLERANCE = 1e-2  # of |out - reference| / |reference|, for each request in each step
SEED = 0

BF16 = np.dtype(ml_dtypes.bfloat16)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "demo",
        help="decode real text through an MLA layer and check every step",
        description="Decode real text through an MLA attention layer of DeepSeek-V2-Lite's shapes "
        "and compare every step with un-absorbed attention in float32. Runs on the GPU if it can, "
        "else on the CPU. The exit code is 1 if a step is off.",
    )
    parser.add_argument(
        "--file", type=Path, help="text whose bytes are the tokens (default: cumla's README)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=32, help="decoding steps (default: %(default)s)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every step is within tolerance, 1 if not, 2 for an unusable text."""
    try:
        title, text = load_text(args.file)
        requests = cut_requests(text, args.steps)
    except (OSError, ValueError) as error:
        print(f"cumla demo: {error}", file=sys.stderr)
        return 2
    backend, reason = choose_backend()
    prompts = ", ".join(str(request.prompt) for request in requests)
    print(f"text      {title}, {len(text)} bytes")
    print(
        f"requests  {len(requests)}, prompts of {prompts} tokens in shuffled pages of {PAGE_SIZE}"
    )
    print(f"backend   {backend.name} ({reason})")
    steps = decode(MLALayer.random(SEED), requests, args.steps, backend)
    return report(steps, backend)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs at least 1, got {number}")
    return number


# ------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class Request:
    """A stretch of text: the prompt, and the bytes that the steps append."""

    tokens: Array
    prompt: int


def load_text(file: Path | None) -> tuple[str, bytes]:
    """Read the text and name it.

    Parameters
    ----------
    file : Path or None
        None stands for cumla's README: the one that the installed package carries as its
        description, or that of the source tree.
    """
    if file is not None:
        return str(file), file.read_bytes()
    try:
        description = metadata.metadata("cumla").json.get("description")
    except metadata.PackageNotFoundError:
        description = None
    if isinstance(description, str):
        return "README of the installed cumla", description.encode()
    readme = Path(cumla.__file__).parent.parent / "README.md"
    if readme.is_file():
        return "README.md of cumla's source tree", readme.read_bytes()
    raise ValueError("cumla is installed without its README; name a text with --file")


def cut_requests(text: bytes, steps: int) -> list[Request]:
    """Cut a request of each length from the text, spread from its beginning to its end."""
    longest = min(len(text) - steps, LONGEST_PROMPT)
    if longest < 1:
        raise ValueError(
            f"--steps {steps} needs a text of more than {steps} bytes, got {len(text)}; "
            "take fewer steps or name a longer text with --file"
        )
    data = np.frombuffer(text, np.uint8)
    requests = []
    for i, share in enumerate(PROMPT_SHARES):
        prompt = max(round(share * longest), 1)
        start = (len(text) - prompt - steps) * i // (len(PROMPT_SHARES) - 1)
        requests.append(Request(data[start : start + prompt + steps], prompt))
    return requests


# ------------------------------------------------------------------------------ backends


class Backend(Protocol):
    """Where the cache lives and attention runs."""

    name: str
    clock: str

    def put(self, array: Array) -> Any:
        """Bring a host array to where attention runs."""

    def fetch(self, array: Any) -> Array:
        """Bring it back."""

    def write(self, target: Any, array: Array) -> None:
        """Overwrite a contiguous part of an array there."""

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Run a call to its end; its result and its seconds."""


class CPUBackend:
    """NumPy arrays, which `cumla.mla_decode` hands to `cumla.reference`."""

    name = "cumla.reference on the CPU"
    clock = "wall clock"

    def put(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def fetch(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def write(self, target: Array, array: Array) -> None:
        """Copy."""
        target[...] = array

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Time by the clock on the wall."""
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start


class GPUBackend:
    """CuPy arrays, on which `cumla.mla_decode` runs its kernels. Only copies are left to CuPy."""

    clock = "CUDA events around the call, launches included"

    def __init__(self, cupy: Any, device: str) -> None:
        self._cupy = cupy
        self.name = f"CUDA kernels on {device}"

    def put(self, array: Array) -> Any:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def fetch(self, array: Any) -> Array:
        """Copy to the host, after all work so far."""
        return np.asarray(self._cupy.asnumpy(array))

    def write(self, target: Any, array: Array) -> None:
        """Copy to the GPU, into a contiguous part of an array."""
        target.set(array)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Time by events on the current stream."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, self._cupy.cuda.get_elapsed_time(start, end) / 1e3


def choose_backend() -> tuple[Backend, str]:
    """Take the first GPU, kernels ready, if it can run them; say why or why not."""
    try:
        device = require_hopper(0)
    except cumla.CumlaError as error:
        return CPUBackend(), str(error).splitlines()[0]
    cumla.prepare(0, dtypes=("bfloat16",))
    return GPUBackend(import_cupy(), device.name), "the first GPU"


# ------------------------------------------------------------------------------ model


@dataclass(frozen=True)
class MLALayer:
    """Weights of one attention layer, float32, and what they make of hidden states.

    The output projection is left out: it comes after what is compared, the same on both sides.

    Attributes
    ----------
    embedding : ndarray, shape (256, 2048)
        Hidden state of each byte.
    w_q : ndarray, shape (2048, 16 * 192)
        To queries: of each head 128 without and 64 with rotary embedding.
    w_kv : ndarray, shape (2048, 576)
        To the latent 512 and the shared rotary key.
    norm : ndarray, shape (512,)
        Factors of the latent's RMS normalisation.
    w_uk, w_uv : ndarray, shape (16, 128, 512)
        From the latent to each head's keys and values.
    """

    embedding: Array
    w_q: Array
    w_kv: Array
    norm: Array
    w_uk: Array
    w_uv: Array

    @classmethod
    def random(cls, seed: int) -> MLALayer:
        """Draw weights with which hidden states, queries, keys and values have variance 1."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int, fan_in: int = 1) -> Array:
            return rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

        return cls(
            embedding=normal(256, HIDDEN),
            w_q=normal(HIDDEN, HEADS * (NOPE_DIM + ROPE_DIM), fan_in=HIDDEN),
            w_kv=normal(HIDDEN, LATENT_DIM + ROPE_DIM, fan_in=HIDDEN),
            norm=1 + np.float32(0.1) * normal(LATENT_DIM),
            w_uk=normal(HEADS, NOPE_DIM, LATENT_DIM, fan_in=LATENT_DIM),
            w_uv=normal(HEADS, VALUE_DIM, LATENT_DIM, fan_in=LATENT_DIM),
        )

    def latent_rows(self, tokens: Array, positions: Array) -> Array:
        """Compute the rows that the cache keeps: (tokens, 576)."""
        rows = self.embedding[tokens] @ self.w_kv
        latent, key = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        mean_square = np.mean(latent * latent, axis=1, keepdims=True)
        latent = self.norm * latent / np.sqrt(mean_square + np.float32(1e-6))
        return np.concatenate([latent, rotate(key, positions)], axis=1)

    def queries(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Compute queries without and with position: (tokens, 16, 128) and (tokens, 16, 64)."""
        q = (self.embedding[tokens] @ self.w_q).reshape(-1, HEADS, NOPE_DIM + ROPE_DIM)
        return q[..., :NOPE_DIM], rotate(q[..., NOPE_DIM:], positions[:, None])

    def absorb(self, q_nope: Array, q_rope: Array) -> Array:
        """Move the key projection to the queries: (tokens, 16, 576), to meet latent rows."""
        q_latent = np.einsum("thd,hdc->thc", q_nope, self.w_uk)
        return np.concatenate([q_latent, q_rope], axis=-1)

    def unabsorb(self, attended: Array) -> Array:
        """Project attended latents (tokens, 16, 512) to the heads' values (tokens, 16, 128)."""
        return np.asarray(np.einsum("thc,hdc->thd", attended, self.w_uv))

    def attend_unabsorbed(self, q_nope: Array, q_rope: Array, rows: Array) -> Array:
        """Multi-head attention of one token (16, 128 and 64) to rows (n, 576), as trained."""
        latent, shared_key = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        keys = latent @ self.w_uk.transpose(0, 2, 1)  # (16, n, 128)
        values = latent @ self.w_uv.transpose(0, 2, 1)
        scores = (keys @ q_nope[:, :, None])[..., 0] + q_rope @ shared_key.T
        weights = np.exp(np.float32(SOFTMAX_SCALE) * (scores - scores.max(axis=1, keepdims=True)))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.asarray((weights[:, None, :] @ values)[:, 0])


def rotate(x: Array, positions: Array) -> Array:
    """Apply rotary position embedding to the last axis; positions broadcast over the others."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-np.arange(half) / half)
    angles = positions[..., None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# ------------------------------------------------------------------------------ cache


@dataclass(frozen=True)
class PagedCache:
    """Latent rows of all requests in bfloat16 pages, where attention runs."""

    backend: Backend
    table: Array
    pages: Any
    block_table: Any

    @classmethod
    def shuffled(cls, requests: list[Request], backend: Backend, seed: int) -> PagedCache:
        """Give each request its pages from a shuffled pool, full of NaN so far."""
        counts = [-(-len(request.tokens) // PAGE_SIZE) for request in requests]
        total = sum(counts) + SPARE_PAGES
        pool = np.random.default_rng(seed).permutation(total).astype(np.int32)
        table = np.full((len(requests), max(counts)), -1, np.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count], pool = pool[:count], pool[count:]
        pages = np.full((total, PAGE_SIZE, LATENT_DIM + ROPE_DIM), np.nan, BF16)
        return cls(backend, table, backend.put(pages), backend.put(table))

    def write(self, request: int, start: int, rows: Array) -> None:
        """Store the rows of a request's tokens from position start on."""
        rows = rows.astype(BF16)
        while len(rows):
            page, slot = self.table[request, start // PAGE_SIZE], start % PAGE_SIZE
            chunk = rows[: PAGE_SIZE - slot]
            self.backend.write(self.pages[page, slot : slot + len(chunk)], chunk)
            start, rows = start + len(chunk), rows[len(chunk) :]

    def read(self, lengths: Array) -> list[Array]:
        """Read back each request's rows, in float32."""
        pages = self.backend.fetch(self.pages)
        return [
            pages[row[: -(-int(n) // PAGE_SIZE)]].reshape(-1, pages.shape[2])[:n].astype(np.float32)
            for row, n in zip(self.table, lengths, strict=True)
        ]


# ------------------------------------------------------------------------------ decoding


class Step(NamedTuple):
    """Seconds of a whole step and of its attention, and the worst request's relative error."""

    tokens: int
    seconds: float
    kernel_seconds: float
    error: float


def decode(layer: MLALayer, requests: list[Request], steps: int, backend: Backend) -> list[Step]:
    """Prefill, then run and check every step."""
    cache = PagedCache.shuffled(requests, backend, SEED)
    for i, request in enumerate(requests):
        prompt = np.arange(request.prompt)
        cache.write(i, 0, layer.latent_rows(request.tokens[: request.prompt], prompt))
    done = []
    with ProgressBar("decoding", steps) as bar:
        for number in range(steps):
            done.append(decode_step(layer, cache, requests, number))
            bar.advance(note=f"error {done[-1].error:.1e}")
    return done


def decode_step(layer: MLALayer, cache: PagedCache, requests: list[Request], number: int) -> Step:
    """Append one token to each request and attend; compare with un-absorbed attention."""
    start = time.perf_counter()
    positions = np.array([request.prompt + number for request in requests], np.int32)
    tokens = np.array([r.tokens[p] for r, p in zip(requests, positions, strict=True)])
    for i, row in enumerate(layer.latent_rows(tokens, positions)):
        cache.write(i, int(positions[i]), row[None])
    q_nope, q_rope = layer.queries(tokens, positions)
    lengths = positions + np.int32(1)
    attended, kernel_seconds = attend_cached(cache, layer.absorb(q_nope, q_rope), lengths)
    out = layer.unabsorb(attended)
    seconds = time.perf_counter() - start

    expected = np.stack(
        [
            layer.attend_unabsorbed(q_nope[i], q_rope[i], rows)
            for i, rows in enumerate(cache.read(lengths))
        ]
    )
    errors = np.linalg.norm(out - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    return Step(len(requests), seconds, kernel_seconds, float(errors.max()))


def attend_cached(cache: PagedCache, queries: Array, lengths: Array) -> tuple[Array, float]:
    """Run `cumla.mla_decode` on absorbed queries (tokens, 16, 576); the result in float32."""
    backend = cache.backend
    q, seqlens = backend.put(queries[:, None].astype(BF16)), backend.put(lengths)
    result, seconds = backend.timed(
        lambda: cumla.mla_decode(
            q, cache.pages, cache.block_table, seqlens, softmax_scale=SOFTMAX_SCALE
        )
    )
    return backend.fetch(result.out)[:, 0].astype(np.float32), seconds


def report(steps: list[Step], backend: Backend) -> int:
    """Print the table and the verdict; the exit code."""
    errors = np.array([step.error for step in steps])
    rate = steps[0].tokens / median(step.seconds for step in steps)
    kernel = median(step.kernel_seconds for step in steps)
    header = ("steps", "tokens/s", "kernel time", "worst error", "backend")
    cells = (str(len(steps)), f"{rate:.1f}", f"{kernel * 1e3:.3f} ms", f"{errors.max():.1e}")
    widths = [max(len(a), len(b)) for a, b in zip(header, (*cells, backend.name), strict=True)]
    print()
    for row in (header, tuple("-" * width for width in widths), (*cells, backend.name)):
        print("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
    print("tokens/s: median step of the one layer, its projections in NumPy, without the check")
    print(f"kernel time: median step, {backend.clock}")

    wrong = np.flatnonzero(~(errors <= TOLERANCE))  # NaN is wrong
    if wrong.size:
        print(
            f"WRONG: {wrong.size} of {len(steps)} steps are more than {TOLERANCE:g} away from "
            f"un-absorbed attention in float32, the first is step {wrong[0] + 1}"
        )
        return 1
    print(f"ok: every step within {TOLERANCE:g} of un-absorbed attention in float32")
    return 0
