# SPDX-License-Identifier: Apache-2.0
"""An MLA attention layer with random weights, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROPE_DIM, LATENT_DIM = 64, 512  # the kernels' own
ROPE_BASE = 10000.0


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

    def attend_unabsorbed(self, q_nope: Array, q_rope: Array, rows: Array) -> Array:
        """Multi-head attention of the last n tokens to rows (m, 576), as trained.

        Returns (n, heads, value_dim).
        """
        latent, shared_key = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        keys = latent @ self.w_uk.transpose(0, 2, 1)  # (heads, m, nope_dim)
        values = latent @ self.w_uv.transpose(0, 2, 1)
        scores = q_nope.transpose(1, 0, 2) @ keys.transpose(0, 2, 1)
        scores += q_rope.transpose(1, 0, 2) @ shared_key.T
        before = len(rows) - len(q_nope)
        hidden = np.arange(len(rows)) > before + np.arange(len(q_nope))[:, None]
        scores = np.where(hidden, -np.inf, np.float32(self.softmax_scale) * scores)
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
