# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's sparse attention of MiniMax M3 over cumla's: scores, selection, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.blocks.attention import block_sparse_attention
from cumla.blocks.scores import block_scores
from cumla.blocks.select import select_blocks
from cumla.compat._arguments import (
    check_axes,
    check_given,
    check_tensors,
    missing_from,
    refuse_gradients,
)
from cumla.compat._table import Interface
from cumla.compat._torch import import_torch
from cumla.core.arguments import checked_int

if TYPE_CHECKING:
    import torch

__all__ = [
    "msa_proxy_score",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
]
__getattr__ = missing_from(__name__, "flashinfer.msa_ops")

_BLOCK = 128  # tokens, of a page as well
_PAGED = {
    "cu_seqlens_k": "needs None, got offsets of keys without pages; pass pages, page_table and "
    "seqused_k",
    "q_offset": "needs None, got positions of queries; leave it out: the last query token is at "
    "the last key",
}
_FP4 = "needs None, got factors of an FP4 cache; keep the cache in e4m3, and pass {}_global_scale"
_SCORE = Interface(
    {
        "keys": "k",
        "kv_lens": "seqused_k",
        "block_table": "page_table",
        "qo_indptr": "cu_seqlens_q",
        "out": "output",
    },
    refused=_PAGED,
)
_SELECT = Interface(
    {
        "scores": "max_score",
        "visible": "num_valid_pages",
        "init_blocks": "force_begin_blocks",
        "local_blocks": "force_end_blocks",
        "out": "output",
    }
)
_ATTEND = Interface(
    {
        "block_indices": "q2k_indices",
        "kv_lens": "seqused_k",
        "block_table": "page_table",
        "qo_indptr": "cu_seqlens_q",
        "k_scale": "k_global_scale",
        "v_scale": "v_global_scale",
    },
    refused={
        **_PAGED,
        "k_scale": _FP4.format("k"),
        "v_scale": _FP4.format("v"),
        "return_temperature_lse": "needs False, got True; call FlashInfer for it",
    },
    unused={"return_temperature_lse": False},
)


def msa_proxy_score(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: torch.Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: Any = None,
    use_fp32_acc: bool = True,
) -> torch.Tensor:
    """Score blocks of 128 tokens by the largest product of a query row with their keys.

    Differences from FlashInfer: keys are pages, of q's dtype. max_k_tiles is the columns of
    page_table by default, because lengths are not read on the host. Products are added up in
    float32, whatever use_fp32_acc is. max_seqlen_q is ignored. Scores are written with the blocks
    of a row together, and copied to FlashInfer's order of axes: `cumla.block_scores` saves that.
    """
    _SCORE.refuse({"cu_seqlens_k": cu_seqlens_k, "q_offset": q_offset})
    check_tensors(q=q, k=k, cu_seqlens_q=cu_seqlens_q)
    check_given(page_table=page_table, seqused_k=seqused_k, output=output)
    check_axes("q", q, "total_q, num_qo_heads, head_dim")
    _check_pages("k", k)
    table, lens = _given(page_table=page_table, seqused_k=seqused_k)
    refuse_gradients(q=q, k=k)
    torch = import_torch()
    kv_heads, (tokens, heads) = k.shape[1], q.shape[:2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"q: needs a multiple of the {kv_heads} heads of k, one at least, got shape "
            f"{tuple(q.shape)}; pass all heads of both"
        )
    width = table.shape[1]
    if max_k_tiles is not None:
        width = checked_int("max_k_tiles", max_k_tiles, "leave it out", 0)
    shape = 1 if reduce_heads else heads, width, tokens
    if output is not None and (tuple(output.shape), output.dtype) != (shape, torch.float32):
        raise ValueError(
            f"output: needs shape {shape} and {torch.float32}, got {tuple(output.shape)} and "
            f"{output.dtype}; pass such a tensor, or leave it out"
        )
    group, pages = heads // kv_heads, {"kv_lens": lens, "block_table": table}
    scores = q.new_empty(tokens, heads, table.shape[1], dtype=torch.float32)
    with _SCORE():
        for head in range(kv_heads):
            some = slice(head * group, (head + 1) * group)
            options: dict[str, Any] = {"qo_indptr": cu_seqlens_q, "causal": causal, **pages}
            block_scores(q[:, some], k[:, head], block_size=_BLOCK, out=scores[:, some], **options)
    if reduce_heads:
        scores = scores.amax(1, keepdim=True)
    if output is None:
        output = scores.new_empty(shape)
    both = min(width, table.shape[1])
    output[:, :both] = scores[:, :, :both].permute(1, 2, 0)
    output[:, both:] = -torch.inf
    return output


def msa_topk_select(
    max_score: torch.Tensor,
    topk: int,
    num_valid_pages: int | torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> torch.Tensor:
    """Select the topk blocks with the largest scores for each query token and head.

    Differences from FlashInfer: any topk. The choice is exact, and of equal scores the lowest
    blocks are selected. Forced blocks may be more than those that are visible. The scores are
    copied so that those of a row are contiguous: `cumla.select_blocks` takes them so.
    """
    check_tensors(max_score=max_score)
    check_given(output=output)
    check_axes("max_score", max_score, "num_qo_heads, max_k_tiles, total_qo_len")
    torch = import_torch()
    visible = max_score.shape[1] if num_valid_pages is None else num_valid_pages
    if not hasattr(visible, "new_empty"):
        visible = checked_int("num_valid_pages", visible, "pass 0 where no page is valid", 0)
        kind = {"dtype": torch.int32, "device": max_score.device}
        visible = torch.full((max_score.shape[2],), min(visible, max_score.shape[1]), **kind)
    with _SELECT():
        found: Any = select_blocks(
            max_score.permute(2, 0, 1).contiguous(),
            topk,
            visible=visible,
            init_blocks=force_begin_blocks,
            local_blocks=force_end_blocks,
            out=output,
        )
    return found


def msa_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
    workspace: Any = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Attend to the selected blocks of 128 tokens, with query tokens of different numbers.

    Differences from FlashInfer: keys and values are pages, of q's dtype or e4m3, and may be the
    parts of a packed cache. Any topk, in any order. k_global_scale and v_global_scale are factors
    of e4m3 caches. workspace is ignored.
    """
    given = {"cu_seqlens_k": cu_seqlens_k, "q_offset": q_offset, "k_scale": k_scale}
    given |= {"v_scale": v_scale, "return_temperature_lse": return_temperature_lse}
    _ATTEND.refuse(given)
    check_tensors(q=q, cu_seqlens_q=cu_seqlens_q)
    options = {"qo_indptr": cu_seqlens_q, "causal": causal, "softmax_scale": softmax_scale}
    scales = k_global_scale, v_global_scale
    state = _attend(q, k, v, q2k_indices, page_table, seqused_k, scales, out, options)
    return tuple(state) if return_softmax_lse else state[0]


def msa_sparse_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    partial_dtype: torch.dtype | None = None,
    force_fused: bool | None = None,
    workspace: Any = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Attend to the selected blocks of 128 tokens, with seqlen_q query tokens of each request.

    Differences from FlashInfer are those of `msa_sparse_attention`. partial_dtype and force_fused
    are ignored.
    """
    given = {"cu_seqlens_k": cu_seqlens_k, "q_offset": q_offset, "k_scale": k_scale}
    _ATTEND.refuse(given | {"v_scale": v_scale})
    check_tensors(q=q)
    check_axes("q", q, "batch * seqlen_q, num_qo_heads, head_dim")
    seqlen_q = checked_int("seqlen_q", seqlen_q, "pass the query tokens of each request")
    if q.shape[0] % seqlen_q:
        raise ValueError(
            f"seqlen_q: needs a divisor of the {q.shape[0]} query tokens of q, got {seqlen_q}; "
            f"pass the query tokens of each request, or call msa_sparse_attention"
        )
    check_given(out=out)
    lead, there = (q.shape[0] // seqlen_q, seqlen_q), out
    if out is not None:
        check_axes("out", out, "batch * seqlen_q, num_qo_heads, head_dim")
        if out.shape[0] != q.shape[0]:
            raise ValueError(
                f"out: needs the {q.shape[0]} query tokens of q, got shape {tuple(out.shape)}; "
                f"leave it out"
            )
        there = out.unflatten(0, lead)
    options = {"causal": causal, "softmax_scale": softmax_scale}
    scales = k_global_scale, v_global_scale
    state = _attend(
        q.unflatten(0, lead), k, v, q2k_indices, page_table, seqused_k, scales, there, options
    )
    found = state[0].flatten(0, 1) if out is None else out
    return (found, state[1].flatten(0, 1)) if return_softmax_lse else found


def _attend(
    q: Any,
    k: Any,
    v: Any,
    lists: Any,
    page_table: Any,
    seqused_k: Any,
    scales: tuple[float | None, float | None],
    out: Any,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    check_tensors(k=k, v=v, q2k_indices=lists)
    check_given(page_table=page_table, seqused_k=seqused_k, out=out)
    check_axes("q2k_indices", lists, "num_kv_heads, total_q, topk")
    _check_pages("k", k)
    _check_pages("v", v)
    table, lens = _given(page_table=page_table, seqused_k=seqused_k)
    with _ATTEND():
        state = block_sparse_attention(
            q,
            k,
            v,
            lists.transpose(0, 1),
            block_size=_BLOCK,
            kv_lens=lens,
            block_table=table,
            k_scale=scales[0],
            v_scale=scales[1],
            kv_layout="HND",
            out=out,
            **options,
        )
    return state.out, state.lse


def _check_pages(name: str, pages: Any) -> None:
    check_axes(name, pages, f"num_pages, num_kv_heads, {_BLOCK}, head_dim")
    if pages.shape[2] != _BLOCK:
        raise ValueError(
            f"{name}: needs pages of {_BLOCK} tokens, got shape {tuple(pages.shape)}; call cumla's "
            f"own functions for others"
        )


def _given(**tensors: Any) -> tuple[Any, ...]:
    """Check that these are given."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(
                f"{name}: needs a tensor beside keys in pages, got None; pass the pages of each "
                f"request as page_table, and their keys as seqused_k"
            )
    return tuple(tensors.values())
