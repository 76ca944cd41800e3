# SPDX-License-Identifier: Apache-2.0
"""Calls of block-sparse attention, drawn at random from all that it can be asked; NumPy arrays.

All that no query sees holds NaN, in K and in V: tokens of blocks that no list has, tokens behind
what a query sees, other heads' rows, unused pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES: dict[str, Any] = {"bfloat16": BF16, "float16": np.dtype(np.float16)}
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
LEAST, MOST = -(2**31), 2**31 - 1

FACTORS: dict[str, tuple[Any, ...]] = {
    "block": ((16, 1), (16, 4), (64, 1), (64, 2), (128, 1), (128, 2), (8, 8), (4, 4)),
    "columns": (
        *((64, 64), (128, 128), (128, 128), (192, 192), (256, 256), (192, 128)),
        *((96, 96), (40, 136), (512, 512)),
    ),
    "dtype": ("bfloat16", "bfloat16", "float16"),
    "cache": ("same", "same", "e4m3"),
    "heads": ((1, 1), (3, 1), (16, 1), (16, 2), (8, 4), (12, 2), (32, 1), (6, 2)),
    "layout": ("NHD", "HND", "packed", "padded"),
    "lens": ((700,), (90, 33, 0, 257), (1, 2, 3), (1500, 40), (300,) * 5, (2300,)),
    "queries": (1, 2, 4, "ragged", "ragged"),
    "topk": (1, 3, 16, 17, 40),
    "lists": ("random", "all", "sorted", "hostile", "hostile", "none", "same"),
    "of": ("heads", "heads", "token"),
    "counts": (None, None, "token", "heads"),
    "entries": ("int32", "int64"),
    "are": ("blocks", "blocks", "tokens"),
    "causal": (True, True, False),
    "softcap": (None, None, 4.0),
    "sinks": (False, False, True),
    "scales": ("none", "numbers", "one", "heads"),
    "outputs": ("new", "given", "float32"),
    "invariant": (False, False, True),
}


@dataclass(frozen=True)
class Sample:
    """One point of the grid."""

    block: tuple[int, int]  # tokens, and blocks of a page
    columns: tuple[int, int]
    dtype: str
    cache: str
    heads: tuple[int, int]
    layout: str
    lens: tuple[int, ...]
    queries: Any
    topk: int
    lists: str
    of: str
    counts: str | None
    entries: str
    are: str
    causal: bool
    softcap: float | None
    sinks: bool
    scales: str
    outputs: str
    invariant: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.block[0]}-{self.columns[0]}-{self.cache}-{self.lists}"

    @property
    def has_e4m3(self) -> bool:
        """Return whether keys and values are e4m3: cumla takes such columns only."""
        return self.cache == "e4m3" and all(n % 16 == 0 and n <= 256 for n in self.columns)

    @property
    def widens(self) -> bool:
        """Return whether blocks of these prompts are widened."""
        heads, most = self.heads[0] // self.heads[1], max(self.columns)
        return self.has_e4m3 and heads <= 16 and 64 < most <= 128


def samples(count: int, **fixed: Any) -> list[Sample]:
    """List the same points every time; each kind of lists comes equally often."""
    rng = random.Random(20261129)
    found = []
    for seed in range(count):
        chosen = {name: rng.choice(values) for name, values in FACTORS.items()}
        chosen["lists"] = FACTORS["lists"][seed % len(FACTORS["lists"])]
        found.append(Sample(**{**chosen, **fixed}, seed=seed))
    return found


def prompts(count: int) -> list[Sample]:
    """List calls of prompts; neighbouring query tokens of most of them share row tiles."""
    forms = {
        "block": ((64, 1), (64, 2), (128, 1), (128, 2), (192, 1)),
        "columns": ((128, 128), (128, 128), (192, 128), (96, 96), (136, 40)),
        "heads": ((16, 1), (16, 2), (32, 2), (12, 1), (32, 1), (30, 3)),
        "lens": ((700,), (90, 33, 0, 257), (300,) * 3, (2000, 40), (9, 9)),
    }
    rng, found = random.Random(54), []
    fixed: dict[str, Any] = {"queries": "prompts", "invariant": False}
    for sample in samples(count, **fixed):
        found.append(replace(sample, **{name: rng.choice(of) for name, of in forms.items()}))
    return found


class Problem(NamedTuple):
    """A call, and which tokens each query token sees: a list for each kv head."""

    given: dict[str, Any]
    seen: list[list[tuple[int, Any]]]  # request, tokens
    scales: tuple[Any, Any]  # of each kv head and row of the cache

    @property
    def lengths(self) -> dict[str, Any]:
        """Return what an update takes."""
        return {n: self.given[n] for n in ("kv_lens", "qo_indptr") if n in self.given}


def make(sample: Sample) -> Problem:
    """Draw the arrays of a call."""
    rng = np.random.default_rng(sample.seed)
    (block, in_page), (heads, kv_heads) = sample.block, sample.heads
    page, dtype = block * in_page, DTYPES[sample.dtype]
    lens = np.array(sample.lens, np.int32)
    batch = len(lens)
    bounds, lead, requests = _queries(sample, rng, lens)
    most = max(1, -(-int(lens.max()) // page))
    num_pages = batch * most + 3
    table = rng.permutation(num_pages)[: batch * most].reshape(batch, most).astype(np.int32)
    held = -(-lens // page)
    table[np.arange(most) >= held[:, None]] = rng.choice([-1, LEAST, MOST, num_pages])
    entries, seen, lengths = _lists(sample, rng, requests, table, num_pages)

    used = np.zeros((num_pages, page, kv_heads), bool)
    for (request, _), of_heads in zip(requests, seen, strict=True):
        for head, (_, at) in enumerate(of_heads):
            if request >= 0:
                used[table[request, at // page], at % page, head] = True
    is_e4m3 = sample.has_e4m3
    caches = [
        _cache(rng, used, n, E4M3 if is_e4m3 else dtype, sample.layout) for n in sample.columns
    ]
    if sample.layout == "packed" and sample.columns[0] == sample.columns[1]:
        both = np.concatenate(caches, axis=-1)
        caches = list(np.split(both, 2, axis=-1))
    q = rng.standard_normal((*lead, heads, sample.columns[0])).astype(dtype)
    if bounds is not None:
        q[[r < 0 for r, _ in requests]] = np.nan
    given: dict[str, Any] = {
        "q": q,
        "k": caches[0],
        "v": caches[1],
        "block_indices": entries,
        "block_size": block,
        "kv_lens": lens,
        "block_table": table,
        "causal": sample.causal,
        "kv_layout": "HND" if sample.layout in ("HND", "packed") else "NHD",
        "indices_are": sample.are,
        "batch_invariant": sample.invariant,
    }
    if bounds is not None:
        given["qo_indptr"] = bounds
    if lengths is not None:
        given["topk_lens"] = lengths
    if sample.softcap:
        given["softcap"] = sample.softcap
    if sample.sinks:
        given["sinks"] = rng.standard_normal(heads).astype(np.float32)
        given["sinks"][0] = rng.choice([-np.inf, 3.0])
    factors = np.ones((2, kv_heads), np.float32)
    if is_e4m3 and sample.scales != "none":
        factors = rng.uniform(0.5, 2, (2, kv_heads)).astype(np.float32)
        if sample.scales != "heads":
            factors[:] = factors[:, :1]
        for name, of in zip(("k_scale", "v_scale"), factors, strict=True):
            forms = {"numbers": float(of[0]), "one": of[:1].copy(), "heads": of.copy()}
            given[name] = forms.get(sample.scales)
    scales = [np.broadcast_to(of[:, None], (kv_heads, used[..., 0].size)) for of in factors]
    if is_e4m3 and sample.scales == "rows":
        for i, name in enumerate(("k_scale", "v_scale")):
            given[name] = _factors_of_rows(rng, used)
            scales[i] = given[name]
    if sample.outputs != "new":
        kind = np.dtype(np.float32) if sample.outputs == "float32" else dtype
        given["out"] = np.full((*lead, heads, sample.columns[1]), np.nan, kind)
        given["lse"] = np.full((*lead, heads), np.nan, np.float32)
    return Problem(given, seen, (scales[0], scales[1]))


def _queries(sample: Sample, rng: Any, lens: Any) -> tuple[Any, tuple[int, ...], Any]:
    """Draw offsets of requests, the axes of q, and the request and visible tokens of each token."""
    batch = len(lens)
    if sample.queries in ("ragged", "prompts"):
        counts = rng.integers(0, 5, batch)
        if sample.queries == "prompts":
            counts += rng.permutation(np.arange(batch)) * 7 + 15
        before, after = rng.integers(0, 2, 2)
        bounds = (before + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)
        lead: tuple[int, ...] = (int(bounds[-1] + after),)
    else:
        counts = np.full(batch, sample.queries)
        bounds, lead = None, (batch, sample.queries)
    requests = [(-1, 0)] * int(np.prod(lead))
    begin = 0 if bounds is None else int(bounds[0])
    for request, count in enumerate(counts):
        for i in range(count):
            behind = count - 1 - i if sample.causal else 0
            requests[begin + i] = request, max(int(lens[request]) - int(behind), 0)
        begin += int(count)
    return bounds, lead, requests


def _lists(
    sample: Sample, rng: Any, requests: Any, table: Any, num_pages: int
) -> tuple[Any, Any, Any]:
    """Draw the lists; with the tokens that they let each query token and kv head see."""
    (block, in_page), (_, kv_heads) = sample.block, sample.heads
    lists = kv_heads if sample.of == "heads" else 1
    tokens, topk = len(requests), sample.topk
    entries = np.full((tokens, lists, topk), -1, np.int64)
    lengths = None
    if sample.counts:
        shape = (tokens,) if sample.counts == "token" else (tokens, lists)
        lengths = rng.choice([0, topk // 2, topk, topk + 5, -3], shape).astype(np.int32)
    seen = []
    for token, (_, limit) in enumerate(requests):
        visible = -(-limit // block)
        for of in range(lists):
            entries[token, of] = _list(sample, rng, visible, topk)
            if sample.lists == "same" and token and topk:
                entries[token, of] = entries[0, of]
    if sample.are == "tokens":
        inside = (entries >= 0) & (entries < MOST // block)
        entries[inside] = entries[inside] * block + rng.integers(0, block, inside.sum())
    for token, (request, limit) in enumerate(requests):
        of_heads = []
        for head in range(kv_heads):
            of = head % lists
            count = topk
            if lengths is not None:
                count = int(lengths[token] if lengths.ndim == 1 else lengths[token, of])
            chosen = {
                int(entry) // (block if sample.are == "tokens" else 1)
                for entry in entries[token, of][: max(count, 0)]
                if 0 <= entry <= MOST
            }
            at = [
                t
                for b in sorted(chosen)
                if b * block < limit and 0 <= table[request, b // in_page] < num_pages
                for t in range(b * block, min((b + 1) * block, limit))
            ]
            of_heads.append((request, np.array(at, np.int64)))
        seen.append(of_heads)
    return entries.astype(sample.entries), seen, lengths


def _list(sample: Sample, rng: Any, visible: int, topk: int) -> Any:
    found = np.full(topk, -1, np.int64)
    if sample.lists == "none":
        return found
    count = min(visible, topk)
    if sample.lists in ("all", "sorted"):
        chosen = np.sort(rng.permutation(visible)[:count])
        if sample.lists == "all":
            chosen = np.arange(visible)[-count:] if count else chosen
        found[:count] = chosen
    elif sample.lists == "hostile":
        odd = [-1, LEAST, MOST, visible, visible + 1, max(visible - 1, 0), 0, 0, 2**20]
        found[:] = rng.choice([*odd, *range(visible)], topk)
    else:
        found[:count] = rng.permutation(visible)[:count]
    return found


def _cache(rng: Any, used: Any, columns: int, dtype: Any, layout: str) -> Any:
    """Numbers where a query sees them, NaN elsewhere; of the axes of the layout."""
    numbers = rng.standard_normal((*used.shape, columns))
    numbers[~used] = np.nan
    cache = numbers.astype(dtype)
    if layout in ("HND", "packed"):
        cache = np.ascontiguousarray(cache.swapaxes(1, 2))
    if layout == "padded":
        wide = np.full((used.shape[0], used.shape[1], used.shape[2] + 1, columns), np.nan, dtype)
        wide[:, :, :-1] = cache
        cache = wide[:, :, :-1]
    return cache


def _factors_of_rows(rng: Any, used: Any) -> Any:
    """Factors of very unlike sizes where a query sees the row, NaN elsewhere."""
    of_rows = used.reshape(-1, used.shape[2]).T
    factors = np.exp2(rng.uniform(-9, 1, of_rows.shape)).astype(np.float32)
    factors[~of_rows] = np.nan
    return np.concatenate([factors, np.full((len(factors), 5), np.nan, np.float32)], axis=1)


def check(problem: Problem, got: Any, dtype: str) -> None:
    """Compare all rows with float64."""
    given = problem.given
    q, k, v = given["q"], given["k"], given["v"]
    heads = q.shape[-2]
    if given["kv_layout"] == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    group, page = heads // k.shape[2], k.shape[1]
    out = np.asarray(got.out).reshape(-1, heads, v.shape[-1])
    lse = np.asarray(got.lse).reshape(-1, heads)
    queries = q.reshape(-1, heads, q.shape[-1]).astype(np.float64)
    sinks = given.get("sinks", np.full(heads, -np.inf)).astype(np.float64)
    cap = given.get("softcap")
    rounding = ROUNDING[dtype] * (2 if k.dtype == E4M3 else 1)
    for token, of_heads in enumerate(problem.seen):
        for head, (request, at) in enumerate(of_heads):
            some = slice(head * group, (head + 1) * group)
            if not len(at):
                assert not out[token, some].any(), (token, head)
                of_sinks = sinks[some].astype(np.float32)  # converted to base 2 and back
                np.testing.assert_allclose(lse[token, some], of_sinks, rtol=1e-6, atol=1e-6)
                continue
            pages = given["block_table"][request, at // page]
            rows = pages * page + at % page
            of_keys, of_values = (of[head, rows, None] for of in problem.scales)
            keys = k[pages, at % page, head].astype(np.float64) * of_keys
            values = v[pages, at % page, head].astype(np.float64) * of_values
            scores = queries[token, some] @ keys.T * q.shape[-1] ** -0.5
            scores = cap * np.tanh(scores / cap) if cap else scores
            top = np.maximum(scores.max(axis=1), sinks[some])[:, None]
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[some, None] - top)
            weights /= total
            want = weights @ values
            sizes = np.linalg.norm(np.abs(weights) @ np.abs(values), axis=-1)
            errors = np.linalg.norm(out[token, some].astype(np.float64) - want, axis=-1)
            assert (errors <= 3 * rounding * sizes + 1e-6).all(), (token, head, errors, sizes)
            np.testing.assert_allclose(
                lse[token, some], (top + np.log(total))[:, 0], rtol=2e-5, atol=2e-5
            )
