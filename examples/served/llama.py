# SPDX-License-Identifier: Apache-2.0
"""A small transformer with Llama's shapes and random weights, in NumPy.

`forward` takes attention as a function: one with a cache, or `attend_plainly`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla.cli.demo import rotate

Array = NDArray[Any]

VOCABULARY = 256  # the bytes
EPSILON = np.float32(1e-5)


class ModelShape(NamedTuple):
    """Sizes of a model."""

    layers: int
    hidden: int  # columns of the hidden states
    intermediate: int  # and inside of a feed-forward block
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "small": ModelShape(3, 512, 1408, 16, 4, 64),
    "tiny": ModelShape(2, 64, 160, 4, 2, 16),  # for trying the demo out
}


class LlamaLayer(NamedTuple):
    """Weights of one layer, float32, (columns of the input, columns of the output)."""

    attention_norm: Array
    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    mlp_norm: Array
    w_gate: Array
    w_up: Array
    w_down: Array


class Computed(NamedTuple):
    """Queries, keys and values that a model computes from tokens."""

    attended: list[Array]  # of each layer, (tokens, heads, head_dim)
    logits: Array  # (tokens, VOCABULARY)


@dataclass(frozen=True)
class LlamaModel:
    """Weights of a model, float32."""

    shape: ModelShape
    embedding: Array
    layers: list[LlamaLayer]
    norm: Array
    w_logits: Array

    @classmethod
    def random(cls, shape: ModelShape, seed: int) -> LlamaModel:
        """Draw weights with which queries, keys and values have variance 1."""
        rng = np.random.default_rng(seed)

        def weight(columns: int, to: int) -> Array:
            return rng.standard_normal((columns, to), np.float32) * np.float32(columns**-0.5)

        def norm() -> Array:
            return 1 + np.float32(0.1) * rng.standard_normal(shape.hidden, np.float32)

        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layers = [
            LlamaLayer(
                attention_norm=norm(),
                w_q=weight(shape.hidden, q),
                w_k=weight(shape.hidden, kv),
                w_v=weight(shape.hidden, kv),
                w_o=weight(q, shape.hidden),
                mlp_norm=norm(),
                w_gate=weight(shape.hidden, shape.intermediate),
                w_up=weight(shape.hidden, shape.intermediate),
                w_down=weight(shape.intermediate, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        embedding = rng.standard_normal((VOCABULARY, shape.hidden), np.float32)
        return cls(shape, embedding, layers, norm(), weight(shape.hidden, VOCABULARY))

    def forward(
        self, tokens: Array, attend: Callable[[int, Array, Array, Array], Array]
    ) -> Computed:
        """Compute a step.

        ``attend(layer, q, k, v)`` takes queries, keys and values (tokens, heads, head_dim), not
        rotated, and gives what the queries attend to.
        """
        hidden, attended = self.embedding[tokens], []
        for number, layer in enumerate(self.layers):
            x = rms_norm(hidden, layer.attention_norm)
            q, k, v = (
                (x @ weight).reshape(len(tokens), -1, self.shape.head_dim)
                for weight in (layer.w_q, layer.w_k, layer.w_v)
            )
            attended.append(attend(number, q, k, v))
            hidden = hidden + attended[-1].reshape(len(tokens), -1) @ layer.w_o
            x = rms_norm(hidden, layer.mlp_norm)
            gate = x @ layer.w_gate
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ layer.w_up)) @ layer.w_down
        return Computed(attended, rms_norm(hidden, self.norm) @ self.w_logits)

    def forward_plainly(self, tokens: Array) -> Computed:
        """Compute all tokens of a request at once, without a cache."""
        return self.forward(tokens, lambda _, q, k, v: attend_plainly(q, k, v))


def rms_norm(x: Array, factors: Array) -> Array:
    """Divide rows by the root of their mean square."""
    return np.asarray(factors * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON))


def attend_plainly(q: Array, k: Array, v: Array) -> Array:
    """Rotate, and attend causally, a head at a time: all tokens of a request, in float32."""
    positions = np.arange(len(q))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    group = q.shape[1] // k.shape[1]
    later = positions > positions[:, None]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        scores = np.float32(q.shape[2] ** -0.5) * (q[:, head] @ keys.T)
        scores[later] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out
