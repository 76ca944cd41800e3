# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 and vLLM's Triton kernel with masks and biases, computed by PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import cumla


class Blocks(NamedTuple):
    """Blocks of keys for blocks of query tokens: those to mask, and those that all see."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any
    full_block_idx: Any
    block_size: tuple[int, int]


def _interval(b: Any, h: Any, q: Any, kv: Any, before: int, aux: Any) -> Any:
    return (kv >= aux[0][b, q]) & (kv <= aux[1][b, q])


def _tree(b: Any, h: Any, q: Any, kv: Any, before: int, aux: Any) -> Any:
    return (kv < before) | (aux[0][b, q, (kv - before).clamp(min=0)] != 0)


def _slopes(heads: int) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any, before: int, aux: Any) -> Any:
        assert aux is None
        return score + torch.exp2((h + 1) * (-8.0 / heads)) * (kv - q - before)

    return score_mod


def _slopes_of_array(score: Any, b: Any, h: Any, q: Any, kv: Any, before: int, aux: Any) -> Any:
    return score + aux[0][h] * (kv - q - before)


def _table(score: Any, b: Any, h: Any, q: Any, kv: Any, before: int, aux: Any) -> Any:
    away = q + before - kv
    held = away.clamp(0, aux[0].shape[3] - 1)
    return score + torch.where(away == held, aux[0][b, q, h, held].float(), 0.0)


mods = SimpleNamespace(
    interval=_interval,
    tree=_tree,
    slopes=_slopes,
    slopes_of_array=_slopes_of_array,
    table=_table,
    table_of_any=_table,
)


def _listed(count: Any, indices: Any, blocks: int) -> Any:
    """Tell which blocks a list names: (batch, blocks of queries, blocks of keys)."""
    count, indices = count[:, 0], indices[:, 0].long()
    valid = torch.arange(indices.shape[-1]) < count[..., None]
    named = torch.zeros(*count.shape, blocks + 1, dtype=torch.bool)
    named.scatter_(2, torch.where(valid, indices, blocks), value=True)
    return named[..., :blocks]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    score_mod: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    block_sparse_tensors: Blocks | None = None,
) -> tuple[Any, None]:
    """Attend; blocks that no list names are skipped, and those of the second are not masked."""
    (batch, q_len, heads, columns), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    b, h, i = (
        torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate((batch, heads, q_len))
    )
    j, before = torch.arange(kv_len), kv_len - q_len
    keys, values = (rows.float().repeat_interleave(heads // kv_heads, 2) for rows in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), keys) * columns**-0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j, before, aux_tensors)
    seen = (j <= before + i) if causal or window_size[1] == 0 else j >= 0
    if window_size[0] is not None:
        seen = seen & (before + i - j <= window_size[0])
    if mask_mod is not None:
        assert block_sparse_tensors is not None
        *lists, (rows_of, keys_of) = block_sparse_tensors
        blocks = -(-kv_len // keys_of)
        some, whole = (
            _listed(*lists[at : at + 2], blocks)[:, None, i // rows_of, j // keys_of]
            for at in (0, 2)
        )
        assert not (some & whole).any()
        seen = whole | (some & mask_mod(b, h, i, j, before, aux_tensors))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, values).to(q.dtype), None


flash_attention_4 = SimpleNamespace(flash_attn_func=flash_attn_func)


def vllm_attention(q: Any, k: Any, v: Any, out: Any, **given: Any) -> None:
    """Attend with images, chunks or slopes, as `unified_attention` is called."""
    places = {"kv_lens": given["seqused_k"], "qo_indptr": given["cu_seqlens_q"]}
    before, after = given["window_size"]
    assert given["causal"]
    assert after == given["softcap"] == 0
    window, mask, bias = None if before < 0 else before, None, None
    if given["chunk_lookback"] == 0:
        mask, window = cumla.AttentionMask.chunks(before + 1, total_tokens=len(q), **places), None
    if given["mm_prefix_range"] is not None:
        spans = given["mm_prefix_range"]
        mask = cumla.AttentionMask.image_spans(spans, window=window, total_tokens=len(q), **places)
        window = None
    if given["alibi_slopes"] is not None:
        bias = cumla.AttentionBias(slopes=given["alibi_slopes"])
    more: dict[str, Any] = {"block_table": given["block_table"], "mask": mask, "bias": bias}
    out.copy_(cumla.attention(q, k, v, window=window, **more, **places).out)
