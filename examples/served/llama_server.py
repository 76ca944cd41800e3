# SPDX-License-Identifier: Apache-2.0
"""The Llama model's server: `cumla.append_kv_cache`, with the rotation, and `cumla.AttentionPlan`.

All layers have their pages in one pool, and a layer's block table is that of the first, moved on.
So one call, and on a GPU one CUDA graph, serves every layer of every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from served.graph import GraphBackend
from served.llama import Computed, LlamaModel
from served.server import STEP_TOKENS, Batch, Server, filled

import cumla
from cumla.cli.demo import PAGE_SIZE, Request, rotate, shuffled_pages, worst_error

Array = NDArray[Any]

FP16 = np.dtype(np.float16)


class Inputs(NamedTuple):
    """Arrays that the call of a layer reads; q, k and v are NaN where there is no token."""

    # ``(STEP_TOKENS, heads or kv_heads, head_dim)`` float16, not rotated; q is, by the call.
    q: Any
    k: Any
    v: Any
    # ``(batch, max_pages)`` int32, of this layer.
    block_table: Any
    # ``(batch + 1,)`` and ``(batch,)`` int32: of each request its query tokens and its length.
    qo_indptr: Any
    kv_lens: Any


class LlamaServer(Server):
    """A model that serves requests from a paged cache, a call a layer and step.

    `seed` is that of the order of pages.
    """

    oracle = "attention without a cache in float32"

    def __init__(
        self, model: LlamaModel, requests: list[Request], backend: GraphBackend, seed: int
    ) -> None:
        super().__init__(requests)
        self._model, self._backend = model, backend
        self._expected = [model.forward_plainly(request.tokens) for request in self.requests]
        self._table, self._pages = shuffled_pages(self.requests, seed)
        shape = model.shape
        pool = (shape.layers * self._pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self._caches = [backend.put(np.full(pool, np.nan, FP16)) for _ in "kv"]
        longest = np.arange(max(len(request.tokens) for request in requests))
        unit = np.repeat(np.array([1, 0], np.float32), shape.head_dim // 2)
        self._cos_sin = backend.put(rotate(unit, longest))  # cosines, then sines
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        rows = [np.full((STEP_TOKENS, n, shape.head_dim), np.nan, FP16) for n in heads]
        counts = [np.zeros(n, np.int32) for n in (len(requests) + 1, len(requests))]
        self._inputs = Inputs(*map(backend.put, (*rows, self._table.copy(), *counts)))
        self._out = backend.put(rows[0].copy())
        self._lse = backend.put(np.full((STEP_TOKENS, shape.heads), np.nan, np.float32))
        self._plan = cumla.AttentionPlan.from_arrays(
            self._inputs.q, *self._caches, qo_indptr=self._inputs.qo_indptr
        )
        backend.prepare(self._plan, cumla.append_kv_cache)
        self._call = backend.repeatable(self._append_and_attend)

    def compute(self, batch: Batch) -> tuple[Computed, float]:
        """Run the model on the new tokens."""
        seconds = 0.0

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal seconds
            rows = [filled(array, FP16, np.nan) for array in (q, k, v)]
            table = np.where(self._table < 0, -1, self._table + np.int32(layer * self._pages))
            inputs = (*rows, table, batch.qo_indptr, batch.kv_lens)
            for target, array in zip(self._inputs, inputs, strict=True):
                self._backend.write(target, array)
            _, taken = self._backend.timed(self._call)
            seconds += taken
            return self._backend.fetch(self._out)[: len(q)].astype(np.float32)

        computed = self._model.forward(batch.tokens, attend)
        return computed, seconds

    def error(self, batch: Batch, results: Computed) -> float:
        """Compare every layer's attention, and the logits, with those of the whole requests."""

        def wanted(arrays: list[Array]) -> Array:
            rows = zip(batch.requests, batch.positions, strict=True)
            return np.stack([arrays[request][position] for request, position in rows])

        logits = wanted([computed.logits for computed in self._expected])
        errors = [worst_error(results.logits[:, None], logits[:, None])]
        for layer, attended in enumerate(results.attended):
            expected = wanted([computed.attended[layer] for computed in self._expected])
            errors.append(worst_error(attended, expected))
        return float(np.max(errors))  # NaN, if one is

    def _append_and_attend(self) -> None:
        inputs, (k_cache, v_cache) = self._inputs, self._caches
        cumla.append_kv_cache(
            **inputs._asdict(), k_cache=k_cache, v_cache=v_cache, cos_sin=self._cos_sin
        )
        self._plan.update(inputs.kv_lens, qo_indptr=inputs.qo_indptr)
        results = {"out": self._out, "lse": self._lse}
        self._plan.run(inputs.q, k_cache, v_cache, block_table=inputs.block_table, **results)
