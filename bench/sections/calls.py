# SPDX-License-Identifier: Apache-2.0
"""The public functions as the benchmark calls them: schedules ready, outputs given."""

from __future__ import annotations

from functools import partial
from typing import Any

import cumla
from cumla.bench.section import Call


def decode_schedule(shape: tuple[int, int, int], kv_lens: Any) -> Call:
    """Make a call that computes a decode plan's schedule, for (batch, q_len, heads)."""
    return partial(cumla.MLADecodePlan(*shape, like=kv_lens).update, kv_lens)


def attention(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    kv_lens: Any,
    qo_indptr: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool,
) -> tuple[Call, Call]:
    """Make a call that computes an attention plan's schedule, and one that attends."""
    plan = cumla.MLAAttentionPlan.from_arrays(q, kv_cache, qo_indptr=qo_indptr, causal=causal)
    update = partial(plan.update, kv_lens, qo_indptr=qo_indptr)
    return update, partial(plan.run, q, kv_cache, block_table, out=out, lse=lse)


def many_heads(
    q: Any,
    k: Any,
    v: Any,
    block_table: Any,
    lengths: dict[str, Any],
    *,
    window: int | None,
    **options: Any,
) -> tuple[Call, Call]:
    """Make a call that computes a plan's schedule, and one that attends, of MHA or GQA."""
    plan = cumla.AttentionPlan.from_arrays(
        q, k, v, qo_indptr=lengths.get("qo_indptr"), window=window
    )
    return partial(plan.update, **lengths), partial(plan.run, q, k, v, block_table, **options)


def append(
    rows: Any, kv_cache: Any, slots: Any, *, kv_scale: float | None = None, **rotation: Any
) -> Call:
    """Make a call that writes rows into a cache."""
    return partial(cumla.append_mla_cache, rows, kv_cache, slots, kv_scale=kv_scale, **rotation)


def append_heads(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, **rotation: Any) -> Call:
    """Make a call that writes keys and values into a cache, and rotates queries."""
    return partial(cumla.append_kv_cache, k, v, k_cache, v_cache, slots, **rotation)


def merge(outs: Any, lses: Any, out: Any, lse: Any) -> Call:
    """Make a call that merges partial results."""
    return partial(cumla.merge_attention_states, outs, lses, out=out, lse=lse)


def quantize(rows: Any, out: Any, scale_out: Any) -> Call:
    """Make a call that quantises rows."""
    return partial(cumla.quantize_fp8, rows, out=out, scale_out=scale_out)


def append_indexer(rows: Any, kv_cache: Any, slots: Any) -> Call:
    """Make a call that quantises rows into the indexer's cache."""
    return partial(cumla.append_indexer_cache, rows, kv_cache, slots)


def logits(q: Any, kv: Any, weights: Any, ks: Any, ke: Any, out: Any) -> Call:
    """Make a call of a prefill's logits."""
    return partial(cumla.mqa_logits, q, kv, weights, ks, ke, out=out)


def paged_logits(
    q: Any, kv_cache: Any, weights: Any, tables: list[Any], kv_lens: Any, out: Any
) -> list[Call]:
    """Make a call of one decoding step's logits for each block table, all by one plan."""
    plan = cumla.PagedMQALogitsPlan.from_arrays(q, kv_cache, tables[0], kv_lens)
    plan.update(kv_lens)
    options = {"max_kv_len": out.shape[1], "out": out}
    return [partial(plan.run, q, kv_cache, weights, table, **options) for table in tables]


def logits_schedule(shape: tuple[int, int, int, int], max_pages: int, kv_lens: Any) -> Call:
    """Make a call that computes the logits' schedule, for (batch, next_n, heads, head_dim)."""
    plan = cumla.PagedMQALogitsPlan(*shape, max_pages=max_pages, like=kv_lens)
    return partial(plan.update, kv_lens)


def top_k(scores: Any, k: int, lengths: Any, out: Any, counts: Any) -> Call:
    """Make a call that selects from rows."""
    return partial(cumla.top_k, scores, k, lengths=lengths, out=out, valid_counts=counts)


def sparse(
    q: Any, kv_cache: Any, indices: Any, out: Any, lse: Any, **extra: Any
) -> tuple[Call, Call]:
    """Make a call that computes a plan's schedule for full lists, and one that attends to them.

    `extra` names a second cache and its lists.
    """
    plan = cumla.MLASparsePlan.from_arrays(q, kv_cache, indices, **extra)
    return plan.update, partial(plan.run, q, kv_cache, indices, **extra, out=out, lse=lse)


def dsa(
    q: Any,
    kv_cache: Any,
    index_q: Any,
    index_cache: Any,
    weights: Any,
    block_table: Any,
    kv_lens: Any,
    topk: int,
    out: Any,
    lse: Any,
) -> tuple[Call, Call, Call]:
    """Make the calls of a step: schedules, the selection of a layer, its attention."""
    plan = cumla.DSAPlan(q, kv_cache, index_q, index_cache, block_table, topk=topk)
    return (
        partial(plan.update, kv_lens),
        partial(plan.select, index_q, index_cache, weights, block_table),
        partial(plan.run, q, kv_cache, block_table, out=out, lse=lse),
    )
