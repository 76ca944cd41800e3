# SPDX-License-Identifier: Apache-2.0
"""An MLA attention layer with the shapes of DeepSeek-V2-Lite and random weights, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# DeepSeek-V2-Lite's attention: no query compression, plain rotary embedding here.
HIDDEN, HEADS = 2048, 16
NOPE_DIM, ROPE_DIM, VALUE_DIM, LATENT_DIM = 128, 64, 128, 512
SOFTMAX_SCALE = (NOPE_DIM + ROPE_DIM) ** -0.5
ROPE_BASE = 10000.0


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
        """Multi-head attention of the last tokens (n, 16, 128 and 64) to rows (m, 576), as trained.

        Returns (n, 16, 128).
        """
        latent, shared_key = rows[:, :LATENT_DIM], rows[:, LATENT_DIM:]
        keys = latent @ self.w_uk.transpose(0, 2, 1)  # (16, m, 128)
        values = latent @ self.w_uv.transpose(0, 2, 1)
        scores = q_nope.transpose(1, 0, 2) @ keys.transpose(0, 2, 1)
        scores += q_rope.transpose(1, 0, 2) @ shared_key.T
        before = len(rows) - len(q_nope)
        hidden = np.arange(len(rows)) > before + np.arange(len(q_nope))[:, None]
        scores = np.where(hidden, -np.inf, np.float32(SOFTMAX_SCALE) * scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray((weights @ values).transpose(1, 0, 2))


def rotate(x: Array, positions: Array) -> Array:
    """Apply rotary position embedding to the last axis; positions broadcast over the others."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-np.arange(half) / half)
    angles = positions[..., None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
