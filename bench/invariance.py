# SPDX-License-Identifier: Apache-2.0
"""Test that a request has the same bits in any batch, with ``batch_invariant=True``.

    python -m bench.invariance FILE [REQUESTS]

Requests of a pool are placed in random batches, in any order and number, until REQUESTS (10,000 by
default) of each row have been computed: by functions, whose block tables have random numbers of
columns, and by plans for random longest requests. Rows of one split compute any stretch of a
request's query tokens: decoding, drafts, a chunk or the whole prefill. FILE holds a row for each
operation: requests, batches, and which requests had more than one set of bits, which ends with
status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import cumla

DEVICE = "cuda"
PAGE, POOL = 64, 96
MOST_BATCH, MOST_TOKENS = 64, 20_000
CUT = 1024  # tokens, of which cuts are at multiples
TOP, BLOCKS, BLOCK = 1500, 20, 64  # rows of a list, blocks of one, tokens of a block


@dataclass(frozen=True)
class Row:
    """An operation, and what its requests are like."""

    name: str
    operation: str  # of cumla
    heads: int
    kv_heads: int
    columns: int
    q_lens: tuple[int, ...]  # one number: q has an axis of requests
    options: dict[str, Any] = field(default_factory=dict)
    is_e4m3: bool = False
    given: str = ""  # what each token or head has: a mask, a bias, a list
    one_split: bool = False  # any stretch of the query tokens, by plans that split no request


DRAFTS = (1, 1, 1, 2, 3, 8, 100, 0)
CHUNKS = (1, 2, 5, 40, 300)
ROWS = (
    Row("mla_decode, 16 heads", "mla_decode", 16, 1, 576, (1,)),
    Row("mla_decode, 128 heads", "mla_decode", 128, 1, 576, (1,)),
    Row("mla_decode, 128 heads, 2 tokens", "mla_decode", 128, 1, 576, (2,)),
    Row("mla_decode, 64 heads, FP8", "mla_decode", 64, 1, 576, (1,), is_e4m3=True),
    Row("mla_attention, 16 heads", "mla_attention", 16, 1, 576, DRAFTS),
    Row("mla_attention, 128 heads", "mla_attention", 128, 1, 576, DRAFTS),
    Row("mla_attention, window", "mla_attention", 16, 1, 576, DRAFTS, {"window": 1500}),
    Row("attention", "attention", 32, 8, 128, DRAFTS),
    Row("attention, one token", "attention", 32, 8, 128, (1,)),
    Row("attention, window", "attention", 32, 8, 128, DRAFTS, {"window": 1500}),
    Row("attention, 64 columns, softcap", "attention", 8, 1, 64, DRAFTS, {"softcap": 30.0}),
    Row("attention, FP8", "attention", 8, 2, 128, DRAFTS, is_e4m3=True),
    Row("attention, mask", "attention", 32, 8, 128, DRAFTS, given="mask"),
    Row("attention, bias", "attention", 32, 8, 128, DRAFTS, given="bias"),
    Row("mla_sparse_decode, 16 heads", "mla_sparse_decode", 16, 1, 576, DRAFTS, given="list"),
    Row("mla_sparse_decode, 128 heads", "mla_sparse_decode", 128, 1, 576, DRAFTS, given="list"),
    Row("block_sparse_attention", "block_sparse_attention", 32, 4, 128, DRAFTS, given="blocks"),
    Row("mla_attention, one split", "mla_attention", 16, 1, 576, CHUNKS, one_split=True),
    Row("attention, one split", "attention", 32, 8, 128, CHUNKS, one_split=True),
)


class Pool:
    """Requests with pages and queries of their own."""

    def __init__(self, row: Row, rng: np.random.Generator) -> None:
        self.row, self.rng = row, rng
        lens = np.exp(rng.uniform(np.log(8), np.log(MOST_TOKENS), POOL)).astype(np.int32)
        near = rng.random(POOL) < 0.3  # cuts, or without any key
        lens[near] = rng.integers(0, 12, near.sum()) * CUT + rng.integers(-2, 3, near.sum())
        self.lens = np.maximum(lens, 0)
        self.q_lens = np.resize(row.q_lens, POOL)
        self.ends = np.cumsum([0, *self.q_lens])
        counts = -(-self.lens // PAGE)
        numbers = rng.permutation(int(counts.sum())).astype(np.int32)
        self.pages = np.split(numbers, np.cumsum(counts)[:-1])
        of_cache = (len(numbers), PAGE, row.kv_heads, row.columns)
        is_mla = row.operation.startswith("mla")
        self.caches = [self._random(of_cache, row.is_e4m3) for _ in range(1 if is_mla else 2)]
        self.q = self._random((int(self.ends[-1]), row.heads, row.columns))
        values = 512 if is_mla else row.columns
        self.out = torch.empty((len(self.q), row.heads, values), dtype=self.q.dtype, device=DEVICE)
        self.lse = torch.empty((len(self.q), row.heads), device=DEVICE)
        self.is_known = torch.zeros(len(self.q), dtype=torch.bool, device=DEVICE)
        self.given = self._given(row.given)
        self.is_wrong = torch.zeros(len(self.q), dtype=torch.bool, device=DEVICE)

    @staticmethod
    def _random(shape: tuple[int, ...], is_e4m3: bool = False) -> torch.Tensor:
        numbers = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        return numbers.to(torch.float8_e4m3fn) if is_e4m3 else numbers

    def _given(self, kind: str) -> dict[str, Any]:
        """Return what each query token, request or head has of its own."""
        rng, tokens = self.rng, len(self.q)
        last = np.maximum(np.repeat(self.lens, self.q_lens), 1)
        if kind == "mask":
            start = (last * rng.random(tokens) ** 3).astype(np.int32)
            end = (start + (last - start) * rng.random(tokens)).astype(np.int32)
            prefix = (self.lens * rng.random(POOL) ** 4).astype(np.int32)
            found = {"start": start, "end": end, "prefix_len": prefix}
        elif kind == "bias":
            found = {"slopes": -(2.0 ** -np.linspace(0.5, 8, self.row.heads)).astype(np.float32)}
        elif kind == "list":
            rows = np.full((tokens, TOP), -1, np.int32)
            for at, r in enumerate(np.repeat(np.arange(POOL), self.q_lens)):
                if len(self.pages[r]):
                    at_pages = rng.integers(0, len(self.pages[r]), TOP)
                    rows[at] = self.pages[r][at_pages] * PAGE + rng.integers(0, PAGE, TOP)
            lens = rng.integers(0, TOP + 1, tokens).astype(np.int32)
            found = {"indices": rows, "topk_lens": lens}
        elif kind == "blocks":
            picked = rng.random((tokens, self.row.kv_heads, BLOCKS))
            blocks = (picked * -(-last // BLOCK)[:, None, None]).astype(np.int32)
            found = {"block_indices": blocks}
        else:
            found = {}
        return {name: torch.from_numpy(array).to(DEVICE) for name, array in found.items()}

    def place(self) -> int:
        """Compute a random batch, and compare each of its requests with the first time."""
        rng = self.rng
        batch = rng.integers(0, POOL, rng.integers(1, MOST_BATCH + 1))
        begins, ends = self.ends[batch], self.ends[batch + 1]
        lens = self.lens[batch]
        if self.row.one_split:
            counts = np.maximum(1, (ends - begins) * rng.random(len(batch)) ** 2).astype(int)
            begins = rng.integers(begins, ends - counts + 1)
            lens = (lens - (ends - begins - counts)).astype(np.int32)
            ends = begins + counts
        rows = np.concatenate([np.arange(*span) for span in zip(begins, ends, strict=True)])
        if not len(rows):
            return 0
        most = max(1, *(len(self.pages[r]) for r in batch)) + int(rng.choice([0, 0, 1, 40]))
        table = np.full((len(batch), most), -1, np.int32)
        for i, r in enumerate(batch):
            table[i, : len(self.pages[r])] = self.pages[r]
        at = torch.from_numpy(rows).to(DEVICE)
        state = self._call(at, batch, table, lens, ends - begins)
        first = ~self.is_known[at]
        self.is_known[at] = True
        for known, found in zip((self.out, self.lse), state, strict=True):
            found = found.reshape(len(rows), *known.shape[1:])
            known[at[first]] = found[first]
            bits = torch.int16 if known.dtype == torch.bfloat16 else torch.int32
            differs = known[at].view(bits) != found.view(bits)
            self.is_wrong[at[differs.flatten(1).any(1)]] = True
        return len(batch)

    def _call(
        self, at: Any, batch: np.ndarray, table: np.ndarray, lens: np.ndarray, q_lens: np.ndarray
    ) -> Any:
        row, rng = self.row, self.rng
        q = self.q[at]
        lengths: dict[str, Any] = {"kv_lens": torch.from_numpy(lens).to(DEVICE)}
        if len(row.q_lens) == 1:
            q = q.reshape(len(lens), row.q_lens[0], *q.shape[1:])
        else:
            ends = np.cumsum([0, *q_lens]).astype(np.int32)
            lengths["qo_indptr"] = torch.from_numpy(ends).to(DEVICE)
        pages = {"block_table": torch.from_numpy(table).to(DEVICE)}
        options = {"batch_invariant": True, **row.options}
        function: Callable[..., Any] = getattr(cumla, row.operation)
        given = {
            name: array if name == "slopes" else array[batch if name == "prefix_len" else at]
            for name, array in self.given.items()
        }
        is_function = not row.one_split and rng.random() < 0.5
        if row.given == "list":
            given = {name: array[:, None] for name, array in given.items()}
            arrays = (q[:, None], self.caches[0], given.pop("indices"))
            if is_function:
                return function(*arrays, **given, **options)
            lists = cumla.MLASparsePlan.from_arrays(*arrays, **options)
            lists.update(given["topk_lens"])
            return lists.run(*arrays)
        if row.given == "blocks":
            arrays = (q, *self.caches, given["block_indices"])
            options["block_size"] = BLOCK
            if is_function:
                return function(*arrays, **lengths, **pages, **options)
            blocks = cumla.BlockSparsePlan.from_arrays(
                *arrays, qo_indptr=lengths["qo_indptr"], **options
            )
            blocks.update(**lengths)
            return blocks.run(*arrays, **pages)
        of_run: dict[str, Any] = {}
        of_plan: dict[str, Any] = {}
        if row.given == "mask":
            of_run["mask"], of_plan["mask_form"] = cumla.AttentionMask(**given), "rows"
        if row.given == "bias":
            of_run["bias"], of_plan["bias_form"] = cumla.AttentionBias(**given), "linear"
        if is_function:
            return function(q, *self.caches, **lengths, **pages, **options, **of_run)
        plans = {"mla_decode": "MLADecodePlan", "mla_attention": "MLAAttentionPlan"}
        kind = getattr(cumla, plans.get(row.operation, "AttentionPlan"))
        of_run |= {n: options.pop(n) for n in ("softcap",) if n in options}
        most = max(1, int(lens.max())) + int(rng.choice([0, 1, 700, 30_000]))
        if row.one_split:
            most = 1
        if "qo_indptr" in lengths:
            options["qo_indptr"] = lengths["qo_indptr"]
        plan = kind.from_arrays(q, *self.caches, max_kv_len=most, **options, **of_plan)
        plan.update(**lengths)
        return plan.run(q, *self.caches, **pages, **of_run)


def placed(row: Row, requests: int, seed: int = 0) -> dict[str, Any]:
    """Place so many requests, and tell what came of it."""
    pool, done, batches = Pool(row, np.random.default_rng(seed)), 0, 0
    while done < requests:
        done += pool.place()
        batches += 1
    wrong = pool.is_wrong.cpu().numpy()
    several = [r for r in range(POOL) if wrong[pool.ends[r] : pool.ends[r + 1]].any()]
    return {"row": row.name, "requests": done, "batches": batches, "several": several}


def main(path: str, requests: int = 10_000) -> int:
    torch.manual_seed(0)
    found = []
    for row in ROWS:
        found.append(placed(row, requests))
        print(found[-1], flush=True)
    props = torch.cuda.get_device_properties(0)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"gpu": props.name, "pool": POOL, "rows": found}, file, indent=1)
        file.write("\n")
    return int(any(row["several"] for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])))
