# SPDX-License-Identifier: Apache-2.0
"""The demo's problem: a layer, the requests of a text, their pages, and what steps should give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.demo.backends import Backend

Array = NDArray[Any]

ROPE_DIM, LATENT_DIM = 64, 512  # the kernels' own
ROPE_BASE = 10000.0
LONGEST_PROMPT = 2048
PROMPT_SHARES = (1.0, 0.625, 0.25, 1 / 64)  # of the longest prompt, one a request
PAGE_SIZE = 64
SPARE_PAGES = 3  # of nobody; they stay NaN, as does every slot behind the last token

BF16 = np.dtype(ml_dtypes.bfloat16)
UNABSORBED = "un-absorbed attention"  # to the same cache
TOLERANCE = 1e-2  # of |out - expected| / |expected|, for each token in each step


@dataclass(frozen=True)
class Request:
    """A stretch of text: the prompt, and the bytes that the steps append."""

    tokens: Array
    prompt: int


def load_text(file: Path | None) -> tuple[str, bytes]:
    """Read the text and name it.

    None stands for cumla's README: the one that the installed package carries as its description,
    or that of the source tree.
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


def cut_requests(text: bytes, steps: int, most: int = LONGEST_PROMPT) -> list[Request]:
    """Cut a request of each length from the text, spread from its beginning to its end."""
    longest = min(len(text) - steps, most)
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


def shuffled_pages(requests: list[Request], seed: int) -> tuple[Array, int]:
    """Deal the pages of a pool out: the table, -1 where there is no page, and their number."""
    counts = [-(-len(request.tokens) // PAGE_SIZE) for request in requests]
    total = sum(counts) + SPARE_PAGES
    pool = np.random.default_rng(seed).permutation(total).astype(np.int32)
    table = np.full((len(requests), max(counts)), -1, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], pool = pool[:count], pool[count:]
    return table, total


@dataclass(frozen=True)
class PagedCache:
    """Latent rows of all requests in bfloat16 pages, where attention runs."""

    backend: Backend
    table: Array
    pages: Any
    block_table: Any

    @classmethod
    def shuffled(cls, requests: list[Request], backend: Backend, seed: int) -> PagedCache:
        """Assign each request pages from a shuffled pool, full of NaN so far."""
        table, total = shuffled_pages(requests, seed)
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


def worst_error(out: Array, expected: Array) -> float:
    """Find the largest relative error of a token; both are (tokens, heads, columns)."""
    errors = np.linalg.norm(out - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    return float(errors.max())


def verdict(worst: Sequence[float], oracle: str = UNABSORBED, arithmetic: str = "float32") -> int:
    """Print whether all steps are right, by the worst error of each; the exit code."""
    wrong = np.flatnonzero(~(np.array(worst) <= TOLERANCE))  # NaN is wrong
    if wrong.size:
        print(
            f"WRONG: {wrong.size} of {len(worst)} steps are more than {TOLERANCE:g} away from "
            f"{oracle} in {arithmetic}, the first is step {wrong[0] + 1}"
        )
        return 1
    print(f"ok: every step within {TOLERANCE:g} of {oracle} in {arithmetic}")
    return 0


class LayerShape(NamedTuple):
    """Sizes in which MLA layers differ."""

    hidden: int  # columns of the hidden states
    heads: int  # query heads
    # Columns of a head's keys without rotary embedding, and of its values.
    nope_dim: int
    value_dim: int


LAYERS = {
    # without query compression, like the model; with plain rotary embedding, unlike it
    "deepseek-v2-lite": LayerShape(2048, 16, 128, 128),
    "tiny": LayerShape(64, 2, 16, 16),  # of no model: for trying the demo out
}


@dataclass(frozen=True)
class MLALayer:
    """Weights of one attention layer, float32, and what they make of hidden states.

    The output projection is left out: it comes after what is compared, the same on both sides.
    """

    embedding: Array  # hidden state of each byte
    w_q: Array  # to queries: nope_dim columns of each head without and 64 with rotary embedding
    w_kv: Array  # to the latent 512 and the shared rotary key
    norm: Array  # factors of the latent's RMS normalisation
    # From the latent to each head's keys and values.
    w_uk: Array
    w_uv: Array

    @classmethod
    def random(cls, shape: LayerShape, seed: int) -> MLALayer:
        """Draw weights with which hidden states, queries, keys and values have variance 1."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int, fan_in: int = 1) -> Array:
            return rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

        hidden, heads, nope_dim, value_dim = shape
        return cls(
            embedding=normal(256, hidden),
            w_q=normal(hidden, heads * (nope_dim + ROPE_DIM), fan_in=hidden),
            w_kv=normal(hidden, LATENT_DIM + ROPE_DIM, fan_in=hidden),
            norm=1 + np.float32(0.1) * normal(LATENT_DIM),
            w_uk=normal(heads, nope_dim, LATENT_DIM, fan_in=LATENT_DIM),
            w_uv=normal(heads, value_dim, LATENT_DIM, fan_in=LATENT_DIM),
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.w_uk.shape[0])

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores: of the head dimension before absorption, not of the 576."""
        return float((self.w_uk.shape[1] + ROPE_DIM) ** -0.5)

    def latent_rows(self, tokens: Array, positions: Array) -> Array:
        """Compute the rows that the cache keeps: (tokens, 576)."""
        rows = self.embedding[tokens] @ self.w_kv
        latent, key = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        mean_square = np.mean(latent * latent, axis=1, keepdims=True)
        latent = self.norm * latent / np.sqrt(mean_square + np.float32(1e-6))
        return np.concatenate([latent, rotate(key, positions)], axis=1)

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
        return np.asarray(np.einsum("thc,hdc->thd", attended, self.w_uv))


class Unabsorbed:
    """Attends as trained, to keys and values of a request that it computes from each row once."""

    def __init__(self, layer: MLALayer) -> None:
        self._layer = layer
        self._rows = np.empty((0, LATENT_DIM + ROPE_DIM), np.float32)
        self._keys: Array = np.empty((layer.heads, 0, layer.w_uk.shape[1]), np.float32)
        self._values: Array = np.empty((layer.heads, 0, layer.w_uv.shape[1]), np.float32)

    def attend(self, q_nope: Array, q_rope: Array, rows: Array) -> Array:
        """Compute multi-head attention of the last n tokens to rows (m, 576).

        Returns (n, heads, value_dim).
        """
        layer, known = self._layer, len(self._rows)
        if not np.array_equal(rows[:known], self._rows):  # somebody wrote over them
            known = 0
        latent = rows[known:, :LATENT_DIM]
        self._rows = rows
        keys, values = (
            np.concatenate([old[:, :known], latent @ weight.transpose(0, 2, 1)], axis=1)
            for old, weight in ((self._keys, layer.w_uk), (self._values, layer.w_uv))
        )
        self._keys, self._values = keys, values  # (heads, m, nope_dim) and (heads, m, value_dim)
        scores = q_nope.transpose(1, 0, 2) @ keys.transpose(0, 2, 1)
        scores += q_rope.transpose(1, 0, 2) @ rows[:, LATENT_DIM:].T
        before = len(rows) - len(q_nope)
        hidden = np.arange(len(rows)) > before + np.arange(len(q_nope))[:, None]
        scores = np.where(hidden, -np.inf, np.float32(layer.softmax_scale) * scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray((weights @ values).transpose(1, 0, 2))


def rotate(x: Array, positions: Array) -> Array:
    """Apply rotary position embedding to the last axis; positions broadcast over the others."""
    half = x.shape[-1] // 2
    cos, sin = cosines_and_sines(positions, half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def cosines_and_sines(positions: Array, half: int) -> tuple[Array, Array]:
    """Compute those of all pairs of columns, along a last axis of this length, in float32."""
    frequencies = ROPE_BASE ** (-np.arange(half) / half)
    angles = positions[..., None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
