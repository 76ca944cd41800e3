# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding of a text: layers append, select and attend through one cumla.DSAPlan.

Three MLA layers with an indexer and random weights decode as those of DeepSeek-V3.2 do; the second
one shares the selection of the first. Tokens are the bytes of a text. On a GPU, with CuPy, one CUDA
graph is a step of all layers; without, they run on NumPy arrays. Every step is compared with dense
attention to the selected tokens in float64.

    python examples/sparse_decoding.py [--file TEXT] [--steps N] [--layer deepseek-v3.2 | tiny]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from served.graph import GraphBackend

import cumla
from cumla.cli.demo import (
    BF16,
    LATENT_DIM,
    PAGE_SIZE,
    ROW_DIM,
    LayerShape,
    MLALayer,
    Request,
    cut_requests,
    find_slots,
    rotate,
    shuffled_pages,
    verdict,
    worst_error,
)
from cumla.cli.progress import ProgressBar
from cumla.reference.threads import one_blas_thread

NUM_LAYERS = 3
SHARING = 1  # the layer without an indexer
ORACLE = "dense attention to the selected tokens in float64"
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
    "tiny": SparseShape(LayerShape(64, 2, 16, 16), 64, 8, 32),
}


class SparseLayer:
    """Weights and caches of a layer, and the arrays of its steps where attention runs."""

    def __init__(
        self, shape: SparseShape, requests: list[Request], backend: GraphBackend, seed: int
    ) -> None:
        self.shape, self.backend, put, batch = shape, backend, backend.put, len(requests)
        self.mla = MLALayer(shape.layer, seed)
        self.table, num_pages = shuffled_pages(requests, seed)
        self.block_table = put(self.table)
        self.kv_cache = put(np.full((num_pages, PAGE_SIZE, ROW_DIM), np.nan, BF16))
        rng, hidden = np.random.default_rng((seed, 1)), shape.layer.hidden
        heads, dim = shape.index_heads, shape.index_dim
        columns = (heads * dim, dim, heads)  # of queries, keys and weights of the heads
        drawn = [rng.standard_normal((hidden, n), np.float32) * hidden**-0.5 for n in columns]
        self._w_q, self._w_k, self._w_weights = drawn
        pages = num_pages, PAGE_SIZE, 1, dim + 4
        self.index_cache = put(np.full(pages, 0x7F, np.uint8))  # NaN, until it is written
        self.inputs = [put(array) for array in self.step(np.zeros(batch, int), np.arange(batch))]
        self.indices = put(np.full((batch, 1, shape.topk), -1, np.int32))
        self.out = put(np.full((batch, 1, shape.layer.heads, LATENT_DIM), np.nan, BF16))
        self.lse = put(np.full((batch, 1, shape.layer.heads), np.nan, np.float32))

    def rows(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Compute what the caches keep: latent rows and the indexer's keys."""
        keys = rotate(self.mla.embedding[tokens] @ self._w_k, positions)
        return self.mla.latent_rows(tokens, positions), keys.astype(BF16)

    def step(self, tokens: Array, positions: Array) -> tuple[Array, ...]:
        """Compute a step's rows and keys, absorbed queries, and the indexer's with weights."""
        hidden, heads = self.mla.embedding[tokens], self.shape.index_heads
        q = self.mla.absorb(*self.mla.queries(tokens, positions))[:, None].astype(BF16)
        index_q = rotate((hidden @ self._w_q).reshape(len(tokens), heads, -1), positions[:, None])
        values, scale = cumla.quantize_fp8(index_q[:, None].astype(np.float32))
        weights = hidden @ self._w_weights * scale[:, 0]
        bits = values.view(np.uint8), weights.astype(np.float32)
        return *self.rows(tokens, positions), q, *bits

    def append(self, rows: Any, keys: Any, slots: Any) -> None:
        """Write into both caches."""
        cumla.append_mla_cache(rows, self.kv_cache, slots)
        cumla.append_indexer_cache(keys, self.index_cache, slots)

    def errors(self, indices: Array, kv_lens: Array, *, selects: bool) -> tuple[float, float]:
        """Find how far attention is from float64, and how far a selection from the best one."""
        fetch, table = self.backend.fetch, self.table
        q, index_q, weights = map(fetch, self.inputs[2:])
        outs = fetch(self.out)[:, 0].astype(np.float64)
        pages = fetch(self.index_cache)
        width = table.shape[1] * PAGE_SIZE
        arrays = index_q, pages, weights, table, kv_lens
        logits = cumla.reference.paged_mqa_logits(*arrays, max_kv_len=width) if selects else None
        expected, short = [], 0.0
        cached = fetch(self.kv_cache)
        for i, length in enumerate(kv_lens):
            rows = cached[table[i]].reshape(-1, ROW_DIM)[:length]
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


@one_blas_thread()
def decode_sparse(
    shape: SparseShape, requests: list[Request], steps: int, backend: GraphBackend, seed: int
) -> int:
    """Prefill, then run and check every step; print the verdict; the exit code."""
    layers = [SparseLayer(shape, requests, backend, seed + i) for i in range(NUM_LAYERS)]
    for i, request in enumerate(requests):
        prompt = np.arange(request.prompt)
        for layer in layers:
            rows = layer.rows(request.tokens[: request.prompt], prompt)
            slots = find_slots(layer.table, i, prompt)
            layer.append(*map(backend.put, (*rows, slots)))
    prompts = np.array([request.prompt for request in requests])
    each = np.arange(len(requests))
    slots_there = [backend.put(find_slots(layer.table, each, prompts)) for layer in layers]
    kv_lens = backend.put(prompts.astype(np.int32))
    first = layers[0]
    (_, _, q, index_q, _), table = first.inputs, first.block_table
    arrays = q, first.kv_cache, index_q, first.index_cache
    plan = cumla.DSAPlan.from_arrays(*arrays, block_table=table, topk=shape.topk)
    backend.prepare(plan, cumla.append_mla_cache, cumla.append_indexer_cache)
    call = backend.repeatable(partial(_step, plan, layers, slots_there, kv_lens))
    worst, seconds, read, seen = [], [], 0, 0
    with ProgressBar("decoding", steps) as bar:
        for number in range(steps):
            positions = prompts + number
            tokens = np.array([r.tokens[p] for r, p in zip(requests, positions, strict=True)])
            lengths = (positions + 1).astype(np.int32)
            backend.write(kv_lens, lengths)
            for layer, there in zip(layers, slots_there, strict=True):
                backend.write(there, find_slots(layer.table, each, positions))
                for target, array in zip(layer.inputs, layer.step(tokens, positions), strict=True):
                    backend.write(target, array)
            seconds.append(backend.timed(call)[1])
            errors: list[float] = []
            for i, layer in enumerate(layers):
                indices = backend.fetch(layer.indices)
                errors += layer.errors(indices, lengths, selects=i != SHARING)
                read, seen = read + int((indices >= 0).sum()), seen + int(lengths.sum())
            worst.append(float(np.max(errors)))  # NaN, if one is
            bar.advance(note=f"error {worst[-1]:.1e}")
    print(f"read      {read / seen:.1%} of the cached tokens, {read} of {seen}")
    print(f"error     at most {np.max(worst):.1e}: of attention, and of scores below the best ones")
    print(f"time      {median(seconds) * 1e3:.3f} ms of a step, {backend.repeats}, {backend.clock}")
    return verdict(worst, ORACLE)


def _step(plan: cumla.DSAPlan, layers: list[SparseLayer], slots: list[Any], kv_lens: Any) -> None:
    """Append, select and attend, in all layers."""
    plan.update(kv_lens)
    for i, layer in enumerate(layers):
        rows, keys, q, index_q, weights = layer.inputs
        layer.append(rows, keys, slots[i])
        table = layer.block_table
        if i != SHARING:
            plan.select(index_q, layer.index_cache, weights, block_table=table)
        layer.backend.copy(layer.indices, plan.indices)
        results = {"out": layer.out, "lse": layer.lse}
        scale = layer.mla.softmax_scale
        plan.run(q, layer.kv_cache, block_table=table, softmax_scale=scale, **results)


def main(argv: list[str] | None = None) -> int:
    """Decode four requests; 0 if every step is right."""
    parser = argparse.ArgumentParser(description="Sparse decoding of a text, checked at each step.")
    parser.add_argument("--file", type=Path, default=Path(__file__), help="default: this file")
    parser.add_argument("--steps", type=int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--layer", choices=SPARSE_LAYERS, help="default: deepseek-v3.2 on a GPU, tiny on the CPU"
    )
    args = parser.parse_args(argv)
    backend = GraphBackend.choose()
    name = args.layer or ("deepseek-v3.2" if backend.cupy else "tiny")
    shape = SPARSE_LAYERS[name]
    requests = cut_requests(args.file.read_bytes(), args.steps, shape.longest)
    print(
        f"layers    {name}: {NUM_LAYERS}, {shape.layer.heads} heads, random weights; "
        f"{shape.topk} tokens selected by {shape.index_heads} heads of {shape.index_dim}"
    )
    print(f"backend   {backend.name} ({backend.reason})")
    return decode_sparse(shape, requests, args.steps, backend, seed=0)


if __name__ == "__main__":
    if main():
        raise SystemExit("the results differ")
