# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks from sums over index heads and pooled keys: QSA and Step 5."""

from __future__ import annotations

from typing import Any, NamedTuple

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.oracle import sampled

_PAGE = 128  # tokens


class _Model(NamedTuple):
    stride: int  # tokens of a pooled key
    heads: int
    columns: int
    is_weighted: bool


_MODELS = {"QSA": _Model(4, 4, 128, False), "Step 5": _Model(8, 4, 256, True)}


def scores(lab: Lab, model: str, cache: str, batch: int, queries: int, kv_len: int) -> Case:
    batch, queries, kv_len = lab.at_most(
        batch=(batch, 2), queries=(queries, 3), kv_len=(kv_len, 512)
    )
    stride, heads, columns, is_weighted = _MODELS[model]
    pages = kv_len // _PAGE
    keys = lab.normal(batch * pages, _PAGE // stride, columns)
    q = lab.normal(batch, queries, heads, columns)
    if cache == "e4m3":
        keys, q = (x.to(lab.dtype("float8_e4m3fn")) for x in (keys, q))
    table, lens, tokens = lab.table(batch, pages), lab.full(batch, kv_len), batch * queries
    weights = lab.normal(tokens, heads, dtype="float32") if is_weighted else None
    out = lab.empty(tokens, 1, kv_len // stride, dtype="float32")
    given: dict[str, Any] = {"block_size": stride, "stride": stride, "weights": weights, "out": out}

    def run() -> Any:
        return cumla.block_scores(
            q, keys, num_groups=1, activation="relu", kv_lens=lens, block_table=table, **given
        )

    def error(got: Any) -> float:
        worst = 0.0
        for token in sampled(tokens):
            request, behind = token // queries, queries - 1 - token % queries
            rows = keys[table[request].long()].double().view(-1, columns)
            want = (rows @ q.view(tokens, heads, columns)[token].double().T).relu()
            want = (want if weights is None else want * weights[token]).sum(1)
            seen = (kv_len - behind) // stride
            if not seen:
                continue
            there = got[token].view(-1)[:seen]
            worst = max(worst, float((there - want[:seen]).abs().max() / want[:seen].abs().max()))
        return worst

    rows = sum((kv_len - behind) // stride for behind in range(queries))  # of a request's tokens
    return Case(
        run,
        error,
        limit=1e-5,
        nbytes=batch * kv_len // stride * columns * keys.element_size() + out.numel() * 4,
        flops=2 * batch * heads * columns * rows,
        peers={
            "QSA": _qsa_scores if queries == 1 else _qsa_prompts, "Step 5": _step5_scores
        }[model](lab, q, keys, table, lens, weights),
    )  # fmt: skip


def _qsa_scores(
    lab: Lab, q: Any, keys: Any, table: Any, lens: Any, weights: Any
) -> dict[str, list[Variant]]:
    library = lab.libraries.vllm_qsa_scores
    if library is None:
        return {}
    batch, _, heads, columns = q.shape
    rows, width = keys.shape[1], table.shape[1] * keys.shape[1]
    visible, logits = lens // 4, lab.empty(batch, width, dtype="float32")
    tiles = library._decode_tiles_per_program(batch, width)
    block = library._DECODE_BLOCK_N
    grid = batch, -(-width // (block * tiles))
    is_e4m3 = keys.element_size() == 1

    def run() -> Any:  # as qsa_select_paged_decode, without the choice
        library._qsa_mqa_paged_uniform_kernel[grid](
            *(q, keys, table, visible, logits, heads * columns, columns),
            *(*keys.stride()[:2], table.stride(0), width),
            PAGE_SIZE=rows,
            PAGE_TABLE_WIDTH=table.shape[1],
            NUM_HEADS=heads,
            HEAD_DIM=columns,
            DECODE_QUERY_LEN=1,
            BLOCK_N=block,
            TILES_PER_PROG=tiles,
            STAGES=2,
            num_warps=1 if is_e4m3 else 2,
        )
        return logits[:, None]

    return {"vLLM": [Variant("", run)]}


def _qsa_prompts(
    lab: Lab, q: Any, keys: Any, table: Any, lens: Any, weights: Any
) -> dict[str, list[Variant]]:
    library = lab.libraries.vllm_qsa_scores
    if library is None:
        return {}
    batch, queries, heads, columns = q.shape
    tokens, width = batch * queries, table.shape[1] * keys.shape[1]
    behind = lab.torch.arange(queries, device=lab.device).flip(0)
    visible = ((lens[:, None] - behind) // 4).view(-1).int()
    starts, logits = (
        lab.ints(range(0, tokens + 1, queries)),
        lab.empty(tokens * width, dtype="float32"),
    )
    flat, pages = q.view(tokens, heads, columns), keys[:, :, None]

    def run() -> Any:
        found = library._prefill_logits(
            *(flat, pages, table, starts, visible, logits, queries, width, 0, tokens)
        )
        return found[:, None]

    return {"vLLM": [Variant("", run)]}


def _step5_scores(
    lab: Lab, q: Any, keys: Any, table: Any, lens: Any, weights: Any
) -> dict[str, list[Variant]]:
    library = lab.libraries.vllm_step5_scores
    if library is None or q.shape[1] > 1:
        return {}
    batch, _, heads, columns = q.shape
    torch = lab.torch
    padded = torch.zeros(batch, 1, 8, columns, dtype=torch.uint8, device=lab.device)
    padded[:, :, :heads] = q.view(torch.uint8)
    padded = padded.view(q.dtype)
    factors = torch.zeros(batch, 1, 8, device=lab.device)
    factors[:, 0, :heads] = weights
    bits, slots = keys.view(torch.uint8), lens - 1
    capacity = table.shape[1] * keys.shape[1]

    def run() -> Any:
        found, _ = library(padded, factors, bits, table, slots, lens, capacity)
        return found[:, None]

    return {"vLLM": [Variant("", run)]}


SUMS = Section(
    name="block-sums",
    title="Scores of blocks, QSA and Step 5",
    about="`cumla.block_scores` with `activation` and `num_groups=1`: sums over 4 index heads of "
    "products with pooled keys, one of 4 (QSA) or 8 (Step 5, with weights) tokens.",
    columns={
        "model": "model", "cache": "keys", "batch": "requests", "queries": "query tokens",
        "kv_len": "context",
    },
    shapes=shapes(
        "model cache batch queries kv_len",
        ("QSA", "bfloat16", 1, 1, 131072),
        ("QSA", "bfloat16", 64, 1, 32768),
        ("QSA", "bfloat16", 64, 1, 131072),
        ("QSA", "bfloat16", 1, 8192, 8192),
        ("QSA", "bfloat16", 1, 2048, 65536),
        ("QSA", "e4m3", 1, 1, 131072),
        ("QSA", "e4m3", 64, 1, 32768),
        ("QSA", "e4m3", 64, 1, 131072),
        ("QSA", "e4m3", 1, 2048, 65536),
        ("Step 5", "e4m3", 1, 1, 131072),
        ("Step 5", "e4m3", 64, 1, 32768),
        ("Step 5", "e4m3", 64, 1, 131072),
    ),
    build=scores,
)  # fmt: skip
