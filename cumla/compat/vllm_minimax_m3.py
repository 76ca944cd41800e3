# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM's MiniMax M3 over cumla's: attention, scores and choice of blocks.

On Hopper vLLM calls Triton kernels for them, by names of its modules. :func:`replace` puts these
functions there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.blocks.attention import block_sparse_attention
from cumla.blocks.scores import block_scores
from cumla.blocks.select import select_blocks
from cumla.blocks.step import SCORES, SEEN, Sizes
from cumla.compat._arguments import check_axes, check_given, check_tensors, missing_from
from cumla.compat._engine import put_in_place
from cumla.compat._table import Interface
from cumla.compat._torch import import_torch
from cumla.core.arguments import checked_int
from cumla.core.operation import run
from cumla.launch.blocks.block_rows import Tokens

if TYPE_CHECKING:
    import torch

__all__ = [
    "minimax_m3_index_decode",
    "minimax_m3_index_score",
    "minimax_m3_index_topk",
    "minimax_m3_sparse_attn",
    "minimax_m3_sparse_attn_decode",
    "replace",
]
__getattr__ = missing_from(__name__, "vllm.models.minimax_m3.common.ops")

_BLOCK = 128  # tokens, of a page as well
_ATTEND = Interface(
    {
        "k": "kv_cache",
        "v": "kv_cache",
        "block_indices": "topk_idx",
        "kv_lens": "seq_lens",
        "qo_indptr": "cu_seqlens_q",
        "out": "output",
    }
)
_INDEX = Interface(
    {
        "q": "idx_q",
        "keys": "index_kv_cache",
        "kv_lens": "seq_lens",
        "qo_indptr": "cu_seqlens_q",
        "scores": "score",
    }
)
_HOMES = {
    "vllm.models.minimax_m3.common.sparse_attention": (
        *("minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode"),
    ),
    "vllm.models.minimax_m3.common.indexer": (
        *("minimax_m3_index_decode", "minimax_m3_index_score", "minimax_m3_index_topk"),
    ),
}


def replace() -> None:
    """Put these functions in the place of vLLM's, in the modules that call them.

    Call it in each process of vLLM, after its platform is known and before the first step. It
    raises `ImportError` if this vLLM has no MiniMax M3, or other names, and then replaces nothing.
    """
    put_in_place(_HOMES, globals(), _refused)


def _refused(name: str) -> ImportError:
    return ImportError(
        f"{name}: needs a function of that name, got none; this version of vLLM serves MiniMax M3 "
        f"in another way",
        name=name.rpartition(".")[2],
    )


def minimax_m3_sparse_attn(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend from query tokens of different numbers to their blocks, into output.

    Differences from vLLM: the last query token is at the last key, so prefix_lens is not read, nor
    is max_query_len. e4m3 caches have one factor, or k_scale and v_scale (num_kv_heads,
    max_kv_tokens); e5m2 ones are refused.
    """
    check_tensors(q=q, cu_seqlens_q=cu_seqlens_q, output=output)
    rows = {"q": q, "qo_indptr": cu_seqlens_q, "out": output}
    arrays = kv_cache, topk_idx, block_table, seq_lens
    _attend(rows, *arrays, num_kv_heads, sm_scale, k_scale, v_scale)


def minimax_m3_sparse_attn_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend from decode_query_len query tokens of each request to their blocks, into output.

    Differences from vLLM are those of `minimax_m3_sparse_attn`.
    """
    check_tensors(q=q, output=output, seq_lens=seq_lens)
    lead = _lead("q", q, seq_lens, decode_query_len)
    check_axes("output", output, "total_q, num_heads, head_dim")
    if output.shape[0] != q.shape[0]:
        raise ValueError(
            f"output: needs the {q.shape[0]} query tokens of q, got shape {tuple(output.shape)}; "
            f"pass a tensor of q's shape"
        )
    rows = {"q": q.unflatten(0, lead), "out": output.unflatten(0, lead)}
    arrays = kv_cache, topk_idx, block_table, seq_lens
    _attend(rows, *arrays, num_kv_heads, sm_scale, k_scale, v_scale)


def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Score the blocks of each query token and head: (heads, tokens, blocks) float32.

    Differences from vLLM: blocks that a query token does not see have -inf. prefix_lens and
    max_query_len are not read, num_kv_heads is not compared with the heads.
    """
    check_tensors(idx_q=idx_q, cu_seqlens_q=cu_seqlens_q)
    check_axes("idx_q", idx_q, "total_q, num_idx_heads, head_dim")
    table = _table(block_table, max_seq_len)
    tokens, heads = idx_q.shape[:2]
    scores = idx_q.new_empty(heads, tokens, table.shape[1], dtype=import_torch().float32)
    _check_pages(index_kv_cache)
    with _INDEX():
        block_scores(
            idx_q,
            index_kv_cache,
            block_size=_BLOCK,
            kv_lens=seq_lens,
            block_table=table,
            qo_indptr=cu_seqlens_q,
            out=scores.transpose(0, 1),
        )
    return scores


def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose topk blocks of each row of scores: (heads, tokens, topk) int32, -1 behind them.

    Differences from vLLM: exact, ties go to the lowest block, and blocks ascend. Forced blocks are
    chosen whatever their scores are, NaN included. max_query_len is not read.
    """
    check_tensors(score=score, cu_seqlens_q=cu_seqlens_q, prefix_lens=prefix_lens)
    check_axes("score", score, "num_idx_heads, total_q, max_block")
    tokens, most = score.shape[1], score.shape[2] * _BLOCK
    lengths = {"kv_lens": prefix_lens + cu_seqlens_q.diff(), "qo_indptr": cu_seqlens_q}
    of = Tokens(tokens, prefix_lens.shape[0], causal=True), most, _BLOCK
    with _INDEX():
        _, visible = run(SEEN, lengths, {"rows": None, "visible": None}, of)
    return _choose(score, visible, topk, (init_blocks, local_blocks), out)


def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score and choose blocks for decode_query_len query tokens of each request.

    Differences from vLLM are those of `minimax_m3_index_topk`. score_out is not written to.
    """
    check_tensors(idx_q=idx_q, seq_lens=seq_lens)
    check_axes("idx_q", idx_q, "total_q, num_idx_heads, head_dim")
    lead, table = (
        _lead("idx_q", idx_q, seq_lens, decode_query_len),
        _table(block_table, max_seq_len),
    )
    _check_pages(index_kv_cache)
    (tokens, heads), columns = idx_q.shape[:2], table.shape[1]
    of = Tokens(tokens, lead[0], causal=True), columns * _BLOCK, _BLOCK
    sizes = Sizes(tokens, heads, lead[0], columns, _BLOCK, _BLOCK)
    scores = idx_q.new_empty(heads, tokens, columns, dtype=import_torch().float32)
    with _INDEX():
        outputs = {"rows": None, "visible": None}
        rows, visible = run(SEEN, {"kv_lens": seq_lens}, outputs, of)
        arrays = {"q": idx_q.unflatten(0, lead), "keys": index_kv_cache}
        arrays |= {"block_table": table, "rows": rows}
        run(SCORES, arrays, {"out": scores.transpose(0, 1)}, sizes)
    return _choose(scores, visible, topk, (init_blocks, local_blocks), out)


def _attend(
    rows: dict[str, Any],
    kv_cache: Any,
    topk_idx: Any,
    block_table: Any,
    seq_lens: Any,
    num_kv_heads: int,
    sm_scale: float,
    k_scale: Any,
    v_scale: Any,
) -> None:
    check_tensors(kv_cache=kv_cache, topk_idx=topk_idx, block_table=block_table, seq_lens=seq_lens)
    check_axes("topk_idx", topk_idx, "num_kv_heads, total_q, topk")
    columns = rows["q"].shape[-1]
    wanted = (num_kv_heads, _BLOCK, 2 * columns)
    if tuple(kv_cache.shape[1:]) != wanted:
        raise ValueError(
            f"kv_cache: needs shape (num_blocks, num_kv_heads, {_BLOCK}, 2 * head_dim) with "
            f"{wanted[0]} kv heads and head_dim {columns}, got {tuple(kv_cache.shape)}; pass the "
            f"cache of this layer"
        )
    with _ATTEND():
        block_sparse_attention(
            k=kv_cache[..., :columns],
            v=kv_cache[..., columns:],
            block_indices=topk_idx.transpose(0, 1),
            block_size=_BLOCK,
            kv_lens=seq_lens,
            block_table=block_table,
            softmax_scale=sm_scale,
            k_scale=_factor(k_scale),
            v_scale=_factor(v_scale),
            kv_layout="HND",
            **rows,
        )


def _factor(scale: Any) -> Any:
    """View one factor as an array of one; None is 1."""
    if scale is None or not hasattr(scale, "new_empty"):
        return scale
    return scale.reshape(1) if scale.numel() == 1 else scale


def _choose(
    scores: Any, visible: Any, topk: int, forced: tuple[int, int], out: Any
) -> torch.Tensor:
    check_given(out=out)
    if out is not None:
        check_axes("out", out, "num_idx_heads, total_q or more, topk")
        if out.shape[0] != scores.shape[0]:
            raise ValueError(
                f"out: needs num_idx_heads {scores.shape[0]} on its first axis, got shape "
                f"{tuple(out.shape)}; vLLM 0.26 passes a buffer by tokens where it expects one by "
                f"heads, whichever functions it calls on Hopper: take a newer version"
            )
        out = out[:, : scores.shape[1]].transpose(0, 1)
    init, local = forced
    with _INDEX():
        found: Any = select_blocks(
            scores.transpose(0, 1),
            topk,
            visible=visible,
            init_blocks=init,
            local_blocks=local,
            out=out,
        )
    return found.transpose(0, 1)


def _lead(name: str, rows: Any, seq_lens: Any, q_len: int) -> tuple[int, int]:
    """Add the axes of requests and of their tokens to query rows."""
    q_len = checked_int("decode_query_len", q_len, "pass the query tokens of each request")
    if rows.shape[0] != seq_lens.shape[0] * q_len:
        raise ValueError(
            f"{name}: needs {q_len} query tokens of each of the {seq_lens.shape[0]} requests of "
            f"seq_lens, got shape {tuple(rows.shape)}; pass those of the decoding requests alone"
        )
    return seq_lens.shape[0], q_len


def _table(block_table: Any, max_seq_len: int) -> Any:
    """Take the pages that the longest request may have."""
    check_tensors(block_table=block_table)
    check_axes("block_table", block_table, "num_reqs, max_blocks")
    most = checked_int("max_seq_len", max_seq_len, "pass the keys of the longest request")
    return block_table[:, : -(-most // _BLOCK)]


def _check_pages(cache: Any) -> None:
    check_tensors(index_kv_cache=cache)
    check_axes("index_kv_cache", cache, f"num_blocks, {_BLOCK}, head_dim")
    if cache.shape[1] != _BLOCK:
        raise ValueError(
            f"index_kv_cache: needs pages of {_BLOCK} tokens, got shape {tuple(cache.shape)}; set "
            f"vLLM's block size to {_BLOCK}"
        )
