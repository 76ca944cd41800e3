# SPDX-License-Identifier: Apache-2.0
"""The MLA layer's server: `cumla.append_mla_cache`, then a `cumla.MLAAttentionPlan`, a call each.

The plan is made once and updated in every step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from served.server import STEP_TOKENS, Batch, Server, filled

import cumla
from cumla.cli.demo.backends import Backend
from cumla.cli.demo.problem import (
    BF16,
    LATENT_DIM,
    ROPE_DIM,
    UNABSORBED,
    MLALayer,
    PagedCache,
    Request,
    Unabsorbed,
    worst_error,
)

Array = NDArray[Any]


class Inputs(NamedTuple):
    """What the call of a step reads; where there is no token rows and q are NaN, the others -1."""

    # ``(STEP_TOKENS, 576)`` and ``(STEP_TOKENS, heads, 576)`` bfloat16.
    rows: Any
    q: Any
    # ``(STEP_TOKENS,)`` int32: whose tokens these are, and where in their request.
    batch_indices: Any
    positions: Any
    # ``(batch + 1,)`` and ``(batch,)`` int32: of each request its query tokens and its length.
    qo_indptr: Any
    kv_lens: Any

    @classmethod
    def on_host(cls, rows: Array, q: Array, batch: Batch) -> Inputs:
        """Fill up what a step has."""
        return cls(
            filled(rows, BF16, np.nan),
            filled(q, BF16, np.nan),
            filled(batch.requests, np.int32, -1),
            filled(batch.positions, np.int32, -1),
            batch.qo_indptr,
            batch.kv_lens,
        )


class Results(NamedTuple):
    """What a step gave, and the queries that it had."""

    out: Array
    q_nope: Array
    q_rope: Array


class MLAServer(Server):
    """A layer that serves requests from a paged cache, a call a step.

    `seed` is that of the order of pages.
    """

    oracle = UNABSORBED

    def __init__(
        self, layer: MLALayer, requests: list[Request], backend: Backend, seed: int
    ) -> None:
        super().__init__(requests)
        self._layer, self._backend = layer, backend
        self._oracles = [Unabsorbed(layer) for _ in requests]
        self._cache = PagedCache.shuffled(self.requests, backend, seed)
        columns = LATENT_DIM + ROPE_DIM
        none = np.empty(0, np.int32)
        counts = [np.zeros(n, np.int32) for n in (len(requests) + 1, len(requests))]
        nothing = Inputs.on_host(
            np.empty((0, columns)),
            np.empty((0, layer.heads, columns)),
            Batch(none, none, none, *counts),
        )
        self._inputs = Inputs(*map(backend.put, nothing))
        self._out = backend.put(np.full((STEP_TOKENS, layer.heads, LATENT_DIM), np.nan, BF16))
        self._lse = backend.put(np.full((STEP_TOKENS, layer.heads), np.nan, np.float32))
        self._plan = cumla.MLAAttentionPlan.from_arrays(
            self._inputs.q, self._cache.pages, qo_indptr=self._inputs.qo_indptr
        )
        backend.prepare(self._plan, cumla.append_mla_cache)
        self._call = backend.repeatable(self._append_and_attend)

    def compute(self, batch: Batch) -> tuple[Results, float]:
        """Attend from the new tokens; give the heads' values."""
        q_nope, q_rope = self._layer.queries(batch.tokens, batch.positions)
        rows = self._layer.latent_rows(batch.tokens, batch.positions)
        inputs = Inputs.on_host(rows, self._layer.absorb(q_nope, q_rope), batch)
        for target, array in zip(self._inputs, inputs, strict=True):
            self._backend.write(target, array)
        _, kernel_seconds = self._backend.timed(self._call)
        attended = self._backend.fetch(self._out)[: len(rows)].astype(np.float32)
        return Results(self._layer.unabsorb(attended), q_nope, q_rope), kernel_seconds

    def error(self, batch: Batch, results: Results) -> float:
        """Compare with what every token should have got, from the cache as it is."""
        out, q_nope, q_rope = results
        cached = self._cache.read(batch.kv_lens)
        expected = [
            oracle.attend(q_nope[a:b], q_rope[a:b], rows)
            for oracle, rows, (a, b) in zip(
                self._oracles, cached, pairwise(batch.qo_indptr), strict=True
            )
            if a < b
        ]
        return worst_error(out, np.concatenate(expected))

    def _append_and_attend(self) -> None:
        inputs, cache = self._inputs, self._cache
        cumla.append_mla_cache(
            inputs.rows,
            cache.pages,
            batch_indices=inputs.batch_indices,
            positions=inputs.positions,
            block_table=cache.block_table,
        )
        self._plan.update(inputs.kv_lens, qo_indptr=inputs.qo_indptr)
        self._plan.run(
            inputs.q,
            cache.pages,
            block_table=cache.block_table,
            softmax_scale=self._layer.softmax_scale,
            out=self._out,
            lse=self._lse,
        )
