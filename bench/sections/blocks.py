# SPDX-License-Identifier: Apache-2.0
"""Sparse GQA by blocks: attention to chosen blocks, scores of blocks, and their choice."""

from __future__ import annotations

from typing import Any

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.oracle import attend, row_error, sampled

_BLOCK, _TOP, _COLUMNS, _KV_LEN = 128, 16, 128, 32768
_INDEX_HEADS = 4


def decode(lab: Lab, cache: str, batch: int, queries: int, heads: int, kv_heads: int) -> Case:
    batch, heads, kv_len, top = lab.at_most(
        batch=(batch, 2), heads=(heads, 4 * kv_heads), kv_len=(_KV_LEN, 512), top=(_TOP, 2)
    )
    torch, visible, scale = lab.torch, kv_len // _BLOCK, _COLUMNS**-0.5
    pages = min(batch * visible, 32768 // kv_heads)  # of which few are read twice
    table = lab.ints(torch.randint(0, pages, (batch, visible), device=lab.device))
    both = lab.normal(pages, kv_heads, _BLOCK, 2 * _COLUMNS)  # as vLLM has them: K beside V
    if cache == "e4m3":
        both = both.to(lab.dtype("float8_e4m3fn"))
    k, v = (x.transpose(1, 2) for x in both.split(_COLUMNS, -1))
    q = lab.normal(batch, queries, heads, _COLUMNS)
    tokens = batch * queries
    lists = lab.distinct(tokens * kv_heads, visible, top).view(tokens, kv_heads, top)
    lists[..., -1] = visible - 1  # its own block, which is visible in part
    lens = lab.full(batch, kv_len)
    out, lse = lab.empty(*q.shape), lab.empty(*q.shape[:-1], dtype="float32")
    plan = cumla.BlockSparsePlan.from_arrays(q, k, v, lists, block_size=_BLOCK)
    plan.update(lens)

    def run() -> Any:
        plan.run(q, k, v, lists, block_table=table, out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        group, worst = heads // kv_heads, 0.0
        for token in sampled(tokens):
            request, behind = token // queries, queries - 1 - token % queries
            for head in range(kv_heads):
                page = table[request, lists[token, head].long()].long()
                keys, values = (
                    x[page, :, head].float().reshape(-1, _COLUMNS)[: top * _BLOCK - behind]
                    for x in (k, v)
                )
                some = slice(head * group, (head + 1) * group)
                want = attend(q.view(tokens, heads, -1)[token, some], keys, values, scale)
                worst = max(worst, row_error(got.view(tokens, heads, -1)[token, some], want))
        return worst

    unit = k.element_size()
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=tokens * (kv_heads * top * _BLOCK * 2 * unit + heads * 4) * _COLUMNS,
        flops=4 * tokens * heads * top * _BLOCK * _COLUMNS,
        peers=_plain(lab, q, k, v, table, lists)
        | _flash_infer(lab, q, k, v, table, lists, lens)
        | _vllm(lab, q, k, v, table, lists, lens),
    )


def _vllm(
    lab: Lab, q: Any, k: Any, v: Any, table: Any, lists: Any, lens: Any
) -> dict[str, list[Variant]]:
    """vLLM's kernels, for decoding and, with one request, for prompts."""
    library = lab.libraries.vllm_blocks
    if library is None:
        return {}
    rows, cache = q.flatten(0, 1), _both(lab, k, v)
    batch, queries = q.shape[:2]
    of_heads, out = lists.transpose(0, 1).contiguous(), lab.empty(*rows.shape)
    starts, before = lab.ints([0, queries]), lens - queries
    last = (k.shape[2], _COLUMNS**-0.5, out)

    def run() -> Any:
        given = rows, cache, of_heads, table
        if batch == 1 and queries > 1:
            library.minimax_m3_sparse_attn(*given, starts, lens, before, queries, *last)
        else:
            library.minimax_m3_sparse_attn_decode(*given, lens, *last, queries)
        return out.view(q.shape)

    return {"vLLM": [Variant("", run)]}


def _flash_infer(
    lab: Lab, q: Any, k: Any, v: Any, table: Any, lists: Any, lens: Any
) -> dict[str, list[Variant]]:
    """FlashInfer over e4m3 caches, whose keys and values are neighbours there."""
    library = lab.libraries.flash_infer_blocks if k.element_size() == 1 else None
    if library is None:
        return {}
    keys, values = _both(lab, k, v).split(_COLUMNS, -1)
    of_heads, out = lists.transpose(0, 1).contiguous(), lab.empty(*q.flatten(0, 1).shape)

    def run() -> Any:
        library.msa_sparse_decode_attention(
            *(q.flatten(0, 1), keys, values, of_heads),
            page_table=table,
            seqused_k=lens,
            seqlen_q=q.shape[1],
            out=out,
        )
        return out.view(q.shape)

    return {"FlashInfer": [Variant("", run)]}


def _both(lab: Lab, k: Any, v: Any) -> Any:
    """Keys and values as other libraries take them: halves of rows of both, by heads."""
    return lab.torch.stack([k, v], -2).permute(0, 2, 1, 3, 4).contiguous().flatten(3)


def _plain(lab: Lab, q: Any, k: Any, v: Any, table: Any, lists: Any) -> dict[str, list[Variant]]:
    """Plain attention to pages that hold the chosen blocks alone, where these are whole pages."""
    if k.shape[2] > 1 or q.shape[1] > 1:
        return {}
    pages = lab.ints(table.gather(1, lists[:, 0].long())).contiguous()
    lens = lab.full(len(q), pages.shape[1] * _BLOCK)
    out, lse = lab.empty(*q.shape), lab.empty(*q.shape[:-1], dtype="float32")
    plan = cumla.AttentionPlan.from_arrays(q, k, v)
    plan.update(lens)

    def run() -> Any:
        plan.run(q, k, v, block_table=pages, out=out, lse=lse)
        return out

    return {"plain": [Variant("plain", run)]}


DECODE = Section(
    name="blocks",
    title="Sparse GQA by blocks, MiniMax M3",
    about="`cumla.BlockSparsePlan.run`: each query token and kv head attends to its own 16 of 256 "
    "blocks of 128 tokens, 128 columns. Beside it `cumla.AttentionPlan.run` over pages that hold "
    "these blocks alone.",
    columns={
        "cache": "K/V",
        "batch": "requests",
        "queries": "query tokens",
        "heads": "heads",
        "kv_heads": "kv heads",
    },
    shapes=shapes(
        "cache batch queries heads kv_heads",
        *(
            (cache, *sizes)
            for cache in ("bfloat16", "e4m3")
            for sizes in (
                *((batch, 1, 16, 1) for batch in (1, 8, 32, 64, 128, 256)),
                (128, 1, 64, 4),
                (64, 4, 16, 1),
            )
        ),
    ),
    build=decode,
    baseline={"plain": "attention to these pages"},
)


def prefill(lab: Lab, cache: str, context: int, heads: int, kv_heads: int) -> Case:
    tokens, heads, kv_len, top = lab.at_most(
        tokens=(8192, 40), heads=(heads, 8 * kv_heads), kv_len=(8192 + context, 1024), top=(_TOP, 2)
    )
    torch, width, scale = lab.torch, kv_len // _BLOCK, _COLUMNS**-0.5
    k, v = (lab.normal(width, _BLOCK, kv_heads, _COLUMNS) for _ in range(2))
    if cache == "e4m3":
        k, v = (x.to(lab.dtype("float8_e4m3fn")) for x in (k, v))
    q, table = lab.normal(1, tokens, heads, _COLUMNS), lab.table(1, width)
    lists = lists_of_prompt(lab, tokens, kv_heads, kv_len, top)
    lens = lab.full(1, kv_len)
    out, lse = lab.empty(*q.shape), lab.empty(*q.shape[:-1], dtype="float32")
    plan = cumla.BlockSparsePlan.from_arrays(q, k, v, lists, block_size=_BLOCK)
    plan.update(lens)
    all_keys = cumla.AttentionPlan.from_arrays(q, k, v)
    all_keys.update(lens)
    of_all, lse_of_all = lab.empty(*q.shape), lab.empty(*q.shape[:-1], dtype="float32")

    def run() -> Any:
        plan.run(q, k, v, lists, block_table=table, out=out, lse=lse)
        return out

    def run_all() -> Any:
        all_keys.run(q, k, v, block_table=table, out=of_all, lse=lse_of_all)
        return of_all

    def error(got: Any) -> float:
        group, worst = heads // kv_heads, 0.0
        for token in sampled(tokens):
            seen = kv_len - tokens + token + 1
            for head in range(kv_heads):
                listed = (
                    lists[token, head] if got is not of_all else torch.arange(-(-seen // _BLOCK))
                )
                blocks = listed[listed >= 0].long().sort().values.to(lab.device)
                page = table[0, blocks].long()
                keys, values = (
                    x[page, :, head]
                    .float()
                    .reshape(-1, _COLUMNS)[
                        : (len(blocks) - 1) * _BLOCK + seen - int(blocks[-1]) * _BLOCK
                    ]
                    for x in (k, v)
                )
                some = slice(head * group, (head + 1) * group)
                want = attend(q[0, token, some], keys, values, scale)
                worst = max(worst, row_error(got[0, token, some], want))
        return worst

    listed = int((lists >= 0).sum())
    shared = len(torch.unique(lists)) * kv_heads * _BLOCK * 2 * k.element_size()
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=(shared + tokens * heads * 4) * _COLUMNS,
        flops=4 * heads // kv_heads * listed * _BLOCK * _COLUMNS,
        peers={"plain": [Variant("all keys", run_all)]}
        | _flash_infer_of_prompts(lab, q[0], k, v, table, lists, lens)
        | _vllm(lab, q, k, v, table, lists, lens),
    )


def _flash_infer_of_prompts(
    lab: Lab, q: Any, k: Any, v: Any, table: Any, lists: Any, lens: Any
) -> dict[str, list[Variant]]:
    """The kernel that FlashInfer takes for prompts, and that for shorter ones, which needs less."""
    library = lab.libraries.flash_infer_blocks if k.element_size() == 1 else None
    if library is None:
        return {}
    keys, values = _both(lab, k, v).split(_COLUMNS, -1)
    starts, of_heads, out = (
        lab.ints([0, len(q)]),
        lists.transpose(0, 1).contiguous(),
        lab.empty(*q.shape),
    )
    given = {"page_table": table, "seqused_k": lens, "out": out, "softmax_scale": _COLUMNS**-0.5}

    def run() -> Any:
        library.msa_sparse_attention(q, keys, values, of_heads, starts, causal=True, **given)
        return out[None]

    def run_short() -> Any:
        library.cake_hopper_sm90.hopper_msa_sparse_attention(
            q, keys, values, of_heads, starts, **given
        )
        return out[None]

    return {"FlashInfer": [Variant("", run), Variant("short", run_short)]}


def lists_of_prompt(
    lab: Lab, tokens: int, kv_heads: int, kv_len: int, top: int, *, block: int = _BLOCK
) -> Any:
    """The own block of each token, and the best others by scores that 8 neighbours partly share."""
    torch, width = lab.torch, kv_len // block
    own = torch.arange(kv_len - tokens, kv_len, device=lab.device) // block
    shared = lab.normal(-(-tokens // 8), kv_heads, width, dtype="float32")
    scores = lab.normal(tokens, kv_heads, width, dtype="float32")
    scores += 2 * shared.repeat_interleave(8, 0)[:tokens]
    blocks = torch.arange(width, device=lab.device)
    scores.masked_fill_(blocks > own[:, None, None], -torch.inf)
    scores.masked_fill_(blocks == own[:, None, None], torch.inf)
    best = scores.topk(min(top, width))
    return lab.ints(torch.where(best.values == -torch.inf, -1, best.indices))


PREFILL = Section(
    name="block-prefill",
    title="Prompts of MiniMax M3",
    about="`cumla.BlockSparsePlan.run` for 8,192 query tokens of a prompt behind a context: each "
    "query token and kv head attends to its own block of 128 tokens and to 15 others. Scores of 8 "
    "neighbours have four fifths of their variance in common. Beside it `cumla.AttentionPlan.run` "
    "over all keys.",
    columns={"cache": "K/V", "context": "context", "heads": "heads", "kv_heads": "kv heads"},
    shapes=shapes(
        "cache context heads kv_heads",
        *(
            (cache, *sizes)
            for cache in ("bfloat16", "e4m3")
            for sizes in ((0, 64, 4), (8192, 64, 4), (8192, 16, 1))
        ),
    ),
    build=prefill,
    baseline={"plain": "attention to all keys"},
)


def scores(lab: Lab, cache: str, batch: int, kv_len: int) -> Case:
    batch, kv_len = lab.at_most(batch=(batch, 2), kv_len=(kv_len, 512))
    pages = kv_len // _BLOCK
    keys, q = lab.normal(batch * pages, _BLOCK, _COLUMNS), lab.normal(batch, 1, 4, _COLUMNS)
    if cache == "e4m3":
        keys, q = (x.to(lab.dtype("float8_e4m3fn")) for x in (keys, q))
    table, lens = lab.table(batch, pages), lab.full(batch, kv_len)
    out = lab.empty(batch, _INDEX_HEADS, pages, dtype="float32")

    def run() -> Any:
        return cumla.block_scores(
            q, keys, block_size=_BLOCK, kv_lens=lens, block_table=table, out=out
        )

    def error(got: Any) -> float:
        worst = 0.0
        for request in sampled(batch):
            rows = keys[table[request].long()].float()
            want = (rows @ q[request, 0].float().T).amax(1).T
            worst = max(worst, float((got[request] - want).abs().max() / want.abs().max()))
        return worst

    return Case(
        run,
        error,
        limit=1e-5,
        nbytes=batch * kv_len * _COLUMNS * keys.element_size() + out.numel() * 4,
        flops=2 * batch * _INDEX_HEADS * kv_len * _COLUMNS,
        peers=_flash_infer_scores(lab, q, keys, table, lens)
        | _vllm_scores(lab, q, keys, table, lens),
    )


def _flash_infer_scores(
    lab: Lab, q: Any, keys: Any, table: Any, lens: Any
) -> dict[str, list[Variant]]:
    library = lab.libraries.flash_infer_blocks
    if library is None:
        return {}
    outs = [
        lab.empty(q.shape[2], table.shape[1], len(q), dtype="float32")
        for _ in _proxies(lab, q, keys, table, lens)
    ]

    def variant(name: str, score: Any, out: Any) -> Variant:
        def run() -> Any:
            score(out)
            return out.permute(2, 0, 1)

        return Variant(name, run)

    proxies = zip(_proxies(lab, q, keys, table, lens), outs, strict=True)
    return {"FlashInfer": [variant(*of, out) for of, out in proxies]}


def _proxies(lab: Lab, q: Any, keys: Any, table: Any, lens: Any) -> list[tuple[str, Any]]:
    """FlashInfer's functions that write scores (heads, blocks, requests), by what they are."""
    library, starts = lab.libraries.flash_infer_blocks, lab.ints(range(len(q) + 1))
    given = {"page_table": table, "seqused_k": lens, "max_seqlen_q": 1}

    def usual(out: Any) -> None:
        most = table.shape[1]
        library.msa_proxy_score(
            q[:, 0], keys[:, None], starts, max_k_tiles=most, output=out, **given
        )

    def short(out: Any) -> None:
        library.cake_hopper_sm90.hopper_msa_proxy_score_decode(
            q[:, 0], keys[:, None], per_head=out, batch_size=len(q), **given
        )

    return [("", usual), ("short", short)] if keys.element_size() == 1 else [("", usual)]


def _vllm_scores(lab: Lab, q: Any, keys: Any, table: Any, lens: Any) -> dict[str, list[Variant]]:
    library, heads = lab.libraries.vllm_choice, q.shape[2]
    if library is None:
        return {}
    most = table.shape[1] * _BLOCK

    def run() -> Any:
        scores = library.minimax_m3_index_decode_score(
            q[:, 0], keys, table, lens, most, 0, 0, heads, 1, 1
        )
        return scores.transpose(0, 1)[..., : table.shape[1]]

    return {"vLLM": [Variant("", run)]}


SCORES = Section(
    name="block-scores",
    title="Scores of blocks, MiniMax M3",
    about="`cumla.block_scores`: the largest products of 4 index heads with the keys of each block "
    "of 128 tokens.",
    columns={"cache": "keys", "batch": "requests", "kv_len": "context"},
    shapes=shapes(
        "cache batch kv_len",
        *(
            (cache, batch, kv_len)
            for cache in ("bfloat16", "e4m3")
            for batch, kv_len in (
                *((1, 8192), (1, 131072), (8, 131072)),
                *((64, 32768), (64, 131072)),
            )
        ),
    ),
    build=scores,
)


def select(lab: Lab, rows: int, width: int, top: int) -> Case:
    peers_of = _choosing if top == _TOP else _top_k
    rows, width, top = lab.at_most(rows=(rows, 4), width=(width, 64), top=(top, 8))
    torch = lab.torch
    values, visible = lab.normal(rows, 4, width, dtype="float32"), lab.full(rows, width)
    out = lab.empty(rows, 4, top, dtype="int32")

    def run() -> Any:
        return cumla.select_blocks(values, top, visible=visible, local_blocks=1, out=out)

    def error(got: Any) -> float:
        best = values[..., :-1].topk(top - 1).indices.sort().values
        last = torch.full_like(best[..., :1], width - 1)
        return float((got.long().sort().values != torch.cat([best, last], -1)).any())

    nbytes, peers = rows * 4 * (width + top) * 4, peers_of(lab, values, visible, top)
    return Case(run, error, limit=0.0, nbytes=nbytes, peers=peers, peer_limit=0.0)


def _choosing(lab: Lab, values: Any, visible: Any, top: int) -> dict[str, list[Variant]]:
    """FlashInfer and vLLM, which choose 16 blocks; of scores as each lays them out."""
    library, vllm = lab.libraries.flash_infer_blocks, lab.libraries.vllm_choice
    found, rows = {}, len(values)
    if library is not None:
        scores = values.permute(1, 2, 0).contiguous()
        out = lab.empty(rows, values.shape[1], top, dtype="int32")

        def run() -> Any:
            library.msa_topk_select(scores, top, visible, out, force_end_blocks=1)
            return out

        found["FlashInfer"] = [Variant("", run)]
    if vllm is not None:
        of_heads = values.transpose(0, 1).contiguous()
        starts, before = lab.ints(range(rows + 1)), visible * _BLOCK - 1

        def run_vllm() -> Any:
            chosen = vllm.minimax_m3_index_topk(of_heads, starts, before, 1, top, 0, 1)
            return chosen.transpose(0, 1)

        found["vLLM"] = [Variant("", run_vllm)]
    return found


def _top_k(lab: Lab, values: Any, visible: Any, top: int) -> dict[str, list[Variant]]:
    """vLLM's top-k, as it chooses for QSA and Step 5; the forced block has the largest score."""
    operators = lab.libraries.vllm_operators
    if operators is None:
        return {}
    scores = values.flatten(0, 1).clone()
    scores[:, -1] = 1e30
    rows, width = scores.shape
    lens, out = visible.repeat_interleave(4), lab.empty(rows, top, dtype="int32")
    memory = lab.torch.zeros(1 << 20, dtype=lab.torch.uint8, device=lab.device)

    def run() -> Any:
        operators.persistent_topk(scores, lens, out, memory, top, width)
        return out.view(*values.shape[:2], top)

    return {"vLLM": [Variant("persistent", run)]}


SELECT = Section(
    name="block-choice",
    title="The choice of blocks",
    about="`cumla.select_blocks` for 4 kv heads, exact; the last block is forced.",
    columns={"rows": "query tokens", "width": "blocks", "top": "chosen"},
    shapes=shapes("rows width top", (1, 1024, 16), (128, 1024, 16), (64, 32768, 512)),
    build=select,
)


def step(lab: Lab, cache: str, batch: int, kv_len: int) -> Case:
    batch, kv_len, top = lab.at_most(batch=(batch, 2), kv_len=(kv_len, 512), top=(_TOP, 2))
    visible = kv_len // _BLOCK
    k, v, keys = (lab.normal(batch * visible, _BLOCK, *n, _COLUMNS) for n in ((1,), (1,), ()))
    q, index_q = lab.normal(batch, 1, 16, _COLUMNS), lab.normal(batch, 1, 1, _COLUMNS)
    if cache == "e4m3":
        k, v, keys, index_q = (x.to(lab.dtype("float8_e4m3fn")) for x in (k, v, keys, index_q))
    table, lens = lab.table(batch, visible), lab.full(batch, kv_len)
    out, lse = lab.empty(*q.shape), lab.empty(*q.shape[:-1], dtype="float32")
    chosen: dict[str, Any] = {"topk": top, "block_size": _BLOCK, "local_blocks": 1}
    of = cumla.BlockSparseStep.from_arrays(q, k, v, index_q, keys, block_table=table, **chosen)
    of.update(lens)

    def run() -> Any:
        of.select(index_q, keys, block_table=table)
        of.run(q, k, v, block_table=table, out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        worst = 0.0
        for request in sampled(batch):
            rows = keys[table[request].long()].float()
            best = (rows @ index_q[request, 0, 0].float()).amax(1)[:-1].topk(top - 1).indices
            blocks = [*best.sort().values.tolist(), visible - 1]
            assert of.blocks[request, 0].tolist() == blocks
            page = table[request, lab.ints(blocks).long()].long()
            keys_of, values = (x[page, :, 0].float().reshape(-1, _COLUMNS) for x in (k, v))
            want = attend(q[request, 0], keys_of, values, _COLUMNS**-0.5)
            worst = max(worst, row_error(got[request, 0], want))
        return worst

    unit = k.element_size()
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=batch * (kv_len * unit + top * _BLOCK * 2 * unit + 16 * 4) * _COLUMNS,
        peers=_flash_infer_step(lab, (q, index_q), (k, v, keys), table, lens, top)
        | _vllm_step(lab, (q, index_q), (k, v, keys), table, lens, top),
    )


def _flash_infer_step(
    lab: Lab, rows: tuple[Any, ...], caches: tuple[Any, ...], table: Any, lens: Any, top: int
) -> dict[str, list[Variant]]:
    """Three calls, over e4m3 caches."""
    (q, index_q), (k, v, keys) = rows, caches
    library = lab.libraries.flash_infer_blocks if k.element_size() == 1 else None
    if library is None:
        return {}
    halves = _both(lab, k, v).split(_COLUMNS, -1)
    scores = lab.empty(1, table.shape[1], len(q), dtype="float32")
    blocks, out = lab.empty(len(q), 1, top, dtype="int32"), lab.empty(*q[:, 0].shape)
    visible = lab.full(len(q), table.shape[1])
    given = {"page_table": table, "seqused_k": lens, "seqlen_q": 1, "out": out}

    def variant(name: str, score: Any) -> Variant:
        def run() -> Any:
            score(scores)
            library.msa_topk_select(scores, top, visible, blocks, force_end_blocks=1)
            chosen = blocks.view(1, len(q), top)
            library.msa_sparse_decode_attention(q[:, 0], *halves, chosen, **given)
            return out[:, None]

        return Variant(name, run)

    return {"FlashInfer": [variant(*of) for of in _proxies(lab, index_q, keys, table, lens)]}


def _vllm_step(
    lab: Lab, rows: tuple[Any, ...], caches: tuple[Any, ...], table: Any, lens: Any, top: int
) -> dict[str, list[Variant]]:
    """Scores and choice in one call, then attention."""
    (q, index_q), (k, v, keys) = rows, caches
    choice, attending = lab.libraries.vllm_choice, lab.libraries.vllm_blocks
    if choice is None or attending is None:
        return {}
    cache, out, most = _both(lab, k, v), lab.empty(*q[:, 0].shape), table.shape[1] * _BLOCK

    def run() -> Any:
        chosen = choice.minimax_m3_index_decode(
            index_q[:, 0], keys, table, lens, most, top, 0, 1, 1, 1, 1
        )
        attending.minimax_m3_sparse_attn_decode(
            q[:, 0], cache, chosen, table, lens, 1, _COLUMNS**-0.5, out, 1
        )
        return out[:, None]

    return {"vLLM": [Variant("", run)]}


STEP = Section(
    name="block-step",
    title="A layer of MiniMax M3: scores, choice and attention",
    about="`select` and `run` of `cumla.BlockSparseStep`, 16 query heads, a kv head and an index "
    "head of 128 columns: 16 blocks of 128 tokens of each request.",
    columns={"cache": "caches", "batch": "requests", "kv_len": "context"},
    shapes=shapes(
        "cache batch kv_len",
        *(
            (cache, batch, kv_len)
            for cache in ("bfloat16", "e4m3")
            for batch, kv_len in ((1, 32768), (64, 32768))
        ),
    ),
    build=step,
)
