# SPDX-License-Identifier: Apache-2.0
"""The MLA layer's server: `cumla.append_mla_cache`, then a `cumla.MLAAttentionPlan`, a call each.

The plan is made once and updated in every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from served.graph import GraphBackend
from served.server import STEP_TOKENS, Batch, Server, filled

import cumla
from cumla.cli.demo import (
    BF16,
    LATENT_DIM,
    PAGE_SIZE,
    ROW_DIM,
    MLALayer,
    Request,
    shuffled_pages,
    worst_error,
)

Array = NDArray[Any]


class Inputs(NamedTuple):
    """Arrays of a step; rows and q without a token are NaN, the others -1."""

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


class MLAServer(Server):
    """A layer that serves requests from a paged cache, a call a step.

    `seed` is that of the order of pages.
    """

    oracle = "un-absorbed attention in float32"

    def __init__(
        self, layer: MLALayer, requests: list[Request], backend: GraphBackend, seed: int
    ) -> None:
        super().__init__(requests)
        self._layer, self._backend = layer, backend
        self._expected = [layer.attend_unabsorbed(request.tokens) for request in self.requests]
        table, pages = shuffled_pages(self.requests, seed)
        self._block_table = backend.put(table)
        self._kv_cache = backend.put(np.full((pages, PAGE_SIZE, ROW_DIM), np.nan, BF16))
        none = np.empty(0, np.int32)
        counts = [np.zeros(n, np.int32) for n in (len(requests) + 1, len(requests))]
        nothing = Inputs.on_host(
            np.empty((0, ROW_DIM)),
            np.empty((0, layer.heads, ROW_DIM)),
            Batch(none, none, none, *counts),
        )
        self._inputs = Inputs(*map(backend.put, nothing))
        self._out = backend.put(np.full((STEP_TOKENS, layer.heads, LATENT_DIM), np.nan, BF16))
        self._lse = backend.put(np.full((STEP_TOKENS, layer.heads), np.nan, np.float32))
        self._plan = cumla.MLAAttentionPlan.from_arrays(
            self._inputs.q, self._kv_cache, qo_indptr=self._inputs.qo_indptr
        )
        backend.prepare(self._plan, cumla.append_mla_cache)
        self._call = backend.repeatable(self._append_and_attend)

    def compute(self, batch: Batch) -> tuple[Array, float]:
        """Attend from the new tokens; give the heads' values."""
        q = self._layer.absorb(*self._layer.queries(batch.tokens, batch.positions))
        rows = self._layer.latent_rows(batch.tokens, batch.positions)
        inputs = Inputs.on_host(rows, q, batch)
        for target, array in zip(self._inputs, inputs, strict=True):
            self._backend.write(target, array)
        _, kernel_seconds = self._backend.timed(self._call)
        return self._layer.unabsorb(self._backend.fetch(self._out)[: len(rows)]), kernel_seconds

    def error(self, batch: Batch, results: Array) -> float:
        """Compare with attention of the whole requests."""
        rows = zip(batch.requests, batch.positions, strict=True)
        return worst_error(results, np.stack([self._expected[i][token] for i, token in rows]))

    def _append_and_attend(self) -> None:
        inputs = self._inputs
        cumla.append_mla_cache(
            inputs.rows,
            self._kv_cache,
            batch_indices=inputs.batch_indices,
            positions=inputs.positions,
            block_table=self._block_table,
        )
        self._plan.update(inputs.kv_lens, qo_indptr=inputs.qo_indptr)
        self._plan.run(
            inputs.q,
            self._kv_cache,
            block_table=self._block_table,
            softmax_scale=self._layer.softmax_scale,
            out=self._out,
            lse=self._lse,
        )
