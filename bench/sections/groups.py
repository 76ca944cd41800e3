# SPDX-License-Identifier: Apache-2.0
"""Sparse GQA by groups of tokens: Qwen QSA, Step 5 and MiniCPM."""

from __future__ import annotations

from typing import Any, NamedTuple

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.oracle import attend, row_error, sampled
from bench.sections.blocks import lists_of_prompt

_PAGE, _KV_LEN, _PROMPT, _CONTEXT = 64, 32768, 8192, 8192  # tokens


class _Model(NamedTuple):
    columns: int
    group: int  # tokens
    top: int  # groups, the query token's own included
    has_shared_lists: bool = False  # one list of a query token for all kv heads


_MODELS = {
    "QSA": _Model(256, 4, 512, has_shared_lists=True),
    "Step 5": _Model(192, 8, 512),
    "MiniCPM": _Model(128, 64, 96),
}


_DTYPES = {"bfloat16": "bfloat16", "e4m3": "float8_e4m3fn"}


class _Work(NamedTuple):
    """Arrays of a row: keys and values are halves of the rows of one cache."""

    q: Any  # (requests, query tokens, heads, columns)
    cache: Any  # (pages, kv heads, page, 2 * columns)
    table: Any
    lists: Any  # (tokens, kv heads or 1, groups), ascending
    lens: Any
    scale: float

    def positions(self, token: int) -> int:
        """The position of a query token; all requests are equally long."""
        queries: int = self.q.shape[1]
        return int(self.lens[0]) - queries + token % queries


def attention(
    lab: Lab, model: str, cache: str, batch: int, queries: int, heads: int, kv_heads: int
) -> Case:
    columns, group, top, is_shared = _MODELS[model]
    kv_len = _KV_LEN if queries == 1 else queries + _CONTEXT
    batch, queries, heads, kv_len, top = lab.at_most(
        batch=(batch, 2),
        queries=(queries, 20),
        heads=(heads, 4 * kv_heads),
        kv_len=(kv_len, 512),
        top=(top, 3),
    )
    tokens, pages = batch * queries, kv_len // _PAGE
    own, of_lists = kv_len // group - 1, 1 if is_shared else kv_heads
    if queries == 1:
        lists = lab.distinct(tokens * of_lists, own + 1, top).view(tokens, of_lists, top)
        lists[..., -1] = own
    else:
        lists = lists_of_prompt(lab, tokens, of_lists, kv_len, top, block=group)
        lists = lists.sort().values.contiguous()
    work = _Work(
        lab.normal(batch, queries, heads, columns),
        lab.normal(batch * pages, kv_heads, _PAGE, 2 * columns).to(lab.dtype(_DTYPES[cache])),
        lab.table(batch, pages),
        lists,
        lab.full(batch, kv_len),
        columns**-0.5,
    )
    k, v = work.cache.split(columns, -1)
    plan = cumla.BlockSparsePlan.from_arrays(work.q, k, v, lists, block_size=group, kv_layout="HND")
    plan.update(work.lens)
    out, lse = lab.empty(*work.q.shape), lab.empty(*work.q.shape[:-1], dtype="float32")
    table = work.table

    def run() -> Any:
        plan.run(work.q, k, v, lists, block_table=table, kv_layout="HND", out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        return _error(lab, work, got.view(tokens, heads, columns), group)

    read = min(tokens * top * group, batch * kv_len) * kv_heads * 2 * work.cache.element_size()
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=(read + tokens * heads * 4) * columns,
        flops=4 * tokens * heads * top * group * columns,
        peers=_PEERS[model](lab, work),
    )


def _error(lab: Lab, work: _Work, got: Any, group: int) -> float:
    columns, per_head, worst = got.shape[-1], got.shape[1] // work.cache.shape[1], 0.0
    queries = work.q.flatten(0, 1)
    for token in sampled(len(got)):
        for head in range(work.cache.shape[1]):
            listed = work.lists[token, head % work.lists.shape[1]].long()
            seen = (listed[:, None] * group + lab.torch.arange(group, device=lab.device)).flatten()
            seen = seen[seen <= work.positions(token)]
            page = work.table[token // work.q.shape[1], seen // _PAGE].long()
            keys, values = work.cache[page, head, seen % _PAGE].float().split(columns, -1)
            some = slice(head * per_head, (head + 1) * per_head)
            want = attend(queries[token, some], keys, values, work.scale)
            worst = max(worst, row_error(got[token, some], want))
    return worst


def _qsa(lab: Lab, work: _Work) -> dict[str, list[Variant]]:
    """vLLM's kernel, which takes tokens and their number, and a gate, here as good as 1."""
    attend_to = lab.libraries.vllm_qsa
    if attend_to is None:
        return {}
    batch, queries = work.q.shape[:2]
    group, tokens = _MODELS["QSA"].group, batch * queries
    each = lab.torch.arange(group, device=lab.device)
    seen = (work.lists[:, 0, :, None] * group + each).flatten(1)
    before = lab.torch.arange(tokens, device=lab.device) % queries
    seen = seen.where(seen <= (int(work.lens[0]) - queries + before)[:, None], -1)
    packed = lab.ints(lab.torch.cat([seen, (seen >= 0).sum(1, keepdim=True)], 1))
    of_request = lab.ints(lab.torch.arange(tokens) // queries)
    k, v = work.cache.transpose(1, 2).split(work.q.shape[-1], -1)
    out, gate = lab.empty(*work.q.flatten(0, 1).shape), lab.torch.full_like(work.q, 100.0)

    def run() -> Any:
        attend_to(
            *(work.q.flatten(0, 1), k, v, packed, work.table, of_request, queries > 1, out),
            *(1.0, 1.0),
            output_gate=gate.flatten(1),
        )
        return out

    return {"vLLM": [Variant("", run)]}


def _step5(lab: Lab, work: _Work) -> dict[str, list[Variant]]:
    """vLLM's kernel of decoding, for prompts as well: there vLLM gathers rows for FlashInfer."""
    library = lab.libraries.vllm_step5
    if library is None:
        return {}
    batch, queries = work.q.shape[:2]
    kv_heads = work.cache.shape[1]
    rows = work.q.reshape(batch * queries * kv_heads, -1, work.q.shape[-1])
    at = lab.torch.arange(queries, device=lab.device) + int(work.lens[0]) - queries
    positions = at.repeat(batch).repeat_interleave(kv_heads)
    active = lab.torch.ones(len(rows), dtype=lab.torch.bool, device=lab.device)
    out, one = lab.empty(*rows.shape), lab.torch.ones(1, device=lab.device)
    splits = library.sparse_decode_splits(len(rows))

    def run() -> Any:
        library.sparse_decode_attention(
            *(rows, work.cache, work.lists.flatten(0, 1), work.table, positions, active, out),
            scale=work.scale,
            query_len=queries,
            splits=splits,
            k_scale=one,
            v_scale=one,
        )
        return out

    return {"vLLM": [Variant("", run)]}


def _minicpm(lab: Lab, work: _Work) -> dict[str, list[Variant]]:
    """FlashAttention-3 over pages of each query token and kv head, as SGLang calls it to decode."""
    library, (batch, queries, heads, columns) = lab.libraries.flash_attention, work.q.shape
    if library is None or queries > 1:
        return {}
    kv_heads = work.cache.shape[1]
    pages = work.table[:, None].expand(-1, kv_heads, -1).gather(2, work.lists.long())
    each = lab.ints(range(kv_heads))[:, None]
    table = (pages * kv_heads + each).flatten(0, 1).contiguous()
    lens = lab.full(batch * kv_heads, table.shape[1] * _PAGE)
    q = work.q.view(batch * kv_heads, 1, heads // kv_heads, columns)
    k, v = work.cache.flatten(0, 1)[:, :, None].split(columns, -1)
    out = lab.empty(*q.shape)
    sizes: dict[str, Any] = {"max_q": 1, "max_kv": int(lens[0])}
    of = {"heads": (q.shape[2], 1), "columns": (columns, columns), "dtype": q.dtype}
    more = {"scale": work.scale, "out": out, "lens": lens, "table": table}

    def variant(splits: int) -> Variant:
        made = library.schedule(lens, **sizes, **of, page=_PAGE, splits=splits)
        options = more | {"schedule": made, "splits": splits} | sizes

        def run() -> Any:
            return library(q, k, v, **options)

        return Variant(f"splits {splits}", run)

    return {"FlashAttention-3": [variant(splits) for splits in (0, 1)]}


_PEERS = {"QSA": _qsa, "Step 5": _step5, "MiniCPM": _minicpm}

GROUPS = Section(
    name="block-models",
    title="Sparse GQA of Qwen QSA, Step 5 and MiniCPM",
    about="`cumla.BlockSparsePlan.run`: each query token attends to 512 groups of 4 tokens (QSA, "
    "256 columns), or for each kv head to 512 of 8 (Step 5, 192 columns) or 96 of 64 (MiniCPM, 128 "
    "columns); requests have 32,768 tokens, the prompt of 8,192 a context of as many. vLLM's "
    "kernel for QSA has a gate to multiply by; for prompts of Step 5 vLLM calls another than here.",
    columns={
        "model": "model",
        "cache": "K/V",
        "batch": "requests",
        "queries": "query tokens",
        "heads": "heads",
        "kv_heads": "kv heads",
    },
    shapes=shapes(
        "model cache batch queries heads kv_heads",
        *(
            (model, cache, *sizes)
            for model, heads, kv_heads, prompt, caches in (
                ("QSA", 12, 1, (24, 2), ("bfloat16", "e4m3")),
                ("Step 5", 16, 1, (64, 4), ("bfloat16", "e4m3")),
                ("MiniCPM", 32, 2, (32, 2), ("bfloat16",)),
            )
            for cache in caches
            for sizes in (
                *((batch, 1, heads, kv_heads) for batch in (8, 64, 128)),
                (1, _PROMPT, *prompt),
            )
        ),
    ),
    build=attention,
)
