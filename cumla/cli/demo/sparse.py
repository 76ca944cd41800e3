# SPDX-License-Identifier: Apache-2.0
"""The demo's sparse decoding: layers append, select and attend through one `cumla.DSAPlan`.

The second layer shares the selection of the first. On a GPU one CUDA graph is a step of all layers.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np

import cumla
from cumla.cli.demo.backends import Backend
from cumla.cli.demo.cache import PagedCache
from cumla.cli.demo.check import verdict
from cumla.cli.demo.sparse_layer import SparseLayer, SparseShape
from cumla.cli.demo.text import Request
from cumla.cli.progress import ProgressBar

NUM_LAYERS = 3
SHARING = 1  # the layer without an indexer
ORACLE = "dense attention to the selected tokens"


def decode_sparse(
    shape: SparseShape, requests: list[Request], steps: int, backend: Backend, seed: int
) -> int:
    """Prefill, then run and check every step; print the verdict; the exit code."""
    caches = [PagedCache.shuffled(requests, backend, seed + i) for i in range(NUM_LAYERS)]
    layers = [SparseLayer(shape, cache, len(requests), seed + i) for i, cache in enumerate(caches)]
    for i, request in enumerate(requests):
        prompt = np.arange(request.prompt)
        for layer in layers:
            rows = layer.rows(request.tokens[: request.prompt], prompt)
            slots = layer.slots(np.full_like(prompt, i), prompt)
            layer.append(*map(backend.put, (*rows, slots)))
    prompts = np.array([request.prompt for request in requests])
    each = np.arange(len(requests))
    slots_there = [backend.put(layer.slots(each, prompts)) for layer in layers]
    kv_lens = backend.put(prompts.astype(np.int32))
    first = layers[0]
    (_, _, q, index_q, _), table = first.inputs, first.cache.block_table
    arrays = q, first.cache.pages, index_q, first.index_cache, table
    plan = cumla.DSAPlan(*arrays, topk=shape.topk)
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
                backend.write(there, layer.slots(each, positions))
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
    return verdict(worst, ORACLE, "float64")


def _step(plan: cumla.DSAPlan, layers: list[SparseLayer], slots: list[Any], kv_lens: Any) -> None:
    """Append, select and attend, in all layers."""
    plan.update(kv_lens)
    for i, layer in enumerate(layers):
        rows, keys, q, index_q, weights = layer.inputs
        layer.append(rows, keys, slots[i])
        table = layer.cache.block_table
        if i != SHARING:
            plan.select(index_q, layer.index_cache, weights, table)
        layer.cache.backend.copy(layer.indices, plan.indices)
        results = {"out": layer.out, "lse": layer.lse}
        scale = layer.mla.softmax_scale
        plan.run(q, layer.cache.pages, table, softmax_scale=scale, **results)
