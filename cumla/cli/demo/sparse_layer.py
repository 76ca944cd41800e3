# SPDX-License-Identifier: Apache-2.0
"""MLA layers with an indexer and random weights, their caches, and the check of their steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.cli.demo.cache import BF16, PAGE_SIZE, PagedCache
from cumla.cli.demo.check import worst_error
from cumla.cli.demo.layer import LATENT_DIM, LAYERS, LayerShape, MLALayer, rotate

Array = NDArray[Any]


class SparseShape(NamedTuple):
    """Sizes in which layers with an indexer differ."""

    layer: LayerShape
    topk: int  # tokens that a query attends to
    index_heads: int
    index_dim: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return 4 * self.topk


SPARSE_LAYERS = {  # the first one's heads and indexer are the model's, its hidden states narrower
    "deepseek-v3.2": SparseShape(LayerShape(2048, 128, 128, 128), 2048, 64, 128),
    "tiny": SparseShape(LAYERS["tiny"], 64, 8, 32),
}


class SparseLayer:
    """Weights and caches of a layer, and the arrays of its steps where attention runs."""

    def __init__(self, shape: SparseShape, cache: PagedCache, batch: int, seed: int) -> None:
        self.shape, self.cache = shape, cache
        self.mla = MLALayer.random(shape.layer, seed)
        rng, hidden = np.random.default_rng((seed, 1)), shape.layer.hidden
        heads, dim = shape.index_heads, shape.index_dim
        columns = (heads * dim, dim, heads)  # of queries, keys and weights of the heads
        drawn = [rng.standard_normal((hidden, n), np.float32) * hidden**-0.5 for n in columns]
        self._w_q, self._w_k, self._w_weights = drawn
        put = cache.backend.put
        pages = len(cache.pages), PAGE_SIZE, 1, dim + 4
        self.index_cache = put(np.full(pages, 0x7F, np.uint8))  # NaN, until it is written
        self.inputs = [put(array) for array in self.step(np.zeros(batch, int), np.arange(batch))]
        self.indices = put(np.full((batch, 1, shape.topk), -1, np.int32))
        self.out = put(np.full((batch, 1, shape.layer.heads, LATENT_DIM), np.nan, BF16))
        self.lse = put(np.full((batch, shape.layer.heads, 1), np.nan, np.float32))

    def rows(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Compute what the caches keep: latent rows and the indexer's keys."""
        keys = rotate(self.mla.embedding[tokens] @ self._w_k, positions)
        return self.mla.latent_rows(tokens, positions).astype(BF16), keys.astype(BF16)

    def step(self, tokens: Array, positions: Array) -> tuple[Array, ...]:
        """Compute a step's rows and keys, absorbed queries, and the indexer's with weights."""
        hidden, heads = self.mla.embedding[tokens], self.shape.index_heads
        q = self.mla.absorb(*self.mla.queries(tokens, positions))[:, None].astype(BF16)
        index_q = rotate((hidden @ self._w_q).reshape(len(tokens), heads, -1), positions[:, None])
        values, scale = cumla.quantize_fp8(index_q[:, None].astype(np.float32))
        weights = hidden @ self._w_weights * scale[:, 0]
        bits = values.view(np.uint8), weights.astype(np.float32)
        return *self.rows(tokens, positions), q, *bits

    def slots(self, requests: Array, positions: Array) -> Array:
        """Find the slots of tokens in both caches."""
        pages = self.cache.table[requests, positions // PAGE_SIZE].astype(np.int64)
        return np.asarray(pages * PAGE_SIZE + positions % PAGE_SIZE)

    def append(self, rows: Any, keys: Any, slots: Any) -> None:
        """Write into both caches."""
        cumla.append_mla_cache(rows, self.cache.pages, slots)
        cumla.append_indexer_cache(keys, self.index_cache, slots)

    def errors(self, indices: Array, kv_lens: Array, *, selects: bool) -> tuple[float, float]:
        """Find how far attention is from float64, and how far a selection from the best one."""
        fetch, table = self.cache.backend.fetch, self.cache.table
        q, index_q, weights = map(fetch, self.inputs[2:])
        outs = fetch(self.out)[:, 0].astype(np.float64)
        pages = fetch(self.index_cache)
        width = table.shape[1] * PAGE_SIZE
        arrays = index_q, pages, weights, table, kv_lens
        logits = cumla.reference.paged_mqa_logits(*arrays, max_kv_len=width) if selects else None
        expected, short = [], 0.0
        for i, rows in enumerate(self.cache.read(kv_lens)):
            chosen = indices[i, 0][indices[i, 0] >= 0]
            if len(np.unique(chosen)) != min(self.shape.topk, len(rows)):
                return np.inf, np.inf
            if logits is not None:
                best = np.sort(logits[i, : len(rows)])[-len(chosen) :]
                lost = best[0] - logits[i][chosen].min()
                short = max(short, float(lost / np.abs(best).max()))
            selected = rows[chosen].astype(np.float64)
            scores = self.mla.softmax_scale * (q[i, 0].astype(np.float64) @ selected.T)
            attention = np.exp(scores - scores.max(axis=1, keepdims=True))
            attention /= attention.sum(axis=1, keepdims=True)
            expected.append(attention @ selected[:, :LATENT_DIM])
        return worst_error(outs, np.stack(expected)), short
