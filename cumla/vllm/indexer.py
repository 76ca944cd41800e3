# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse MLA: cumla scores and selects where vLLM calls DeepGEMM and its own top-k.

vLLM's layer, its cache and its metadata stay. :func:`take_over` puts :func:`select` in the place of
the operation behind them.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache as cached
from inspect import signature
from typing import Any

import torch
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers import sparse_attn_indexer as theirs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import indexer as metadata

import cumla
from cumla._serving import LogitsStep, Plans
from cumla.compat._engine import refusal
from cumla.distributed import ContextParallel

__all__ = ["context_parallel", "select", "take_over"]

_NAMES = tuple(signature(theirs.sparse_attn_indexer).parameters)
_DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(theirs.sparse_attn_indexer).parameters.items()
    if parameter.default is not parameter.empty
}
_NEEDED = (
    *("k_cache_prefix", "kv_cache", "q_quant", "k", "weights", "scale_fmt", "topk_tokens"),
    *("head_dim", "max_model_len", "total_seq_lens", "topk_indices_buffer", "skip_k_cache_insert"),
)
if _missing := [name for name in _NEEDED if name not in _NAMES]:
    raise AttributeError(f"sparse_attn_indexer has no argument {', '.join(_missing)}")
_REFUSED = "use_fp4_cache", "use_pcp", "candidate_blocks"  # the last: DeepSeek-V4.1, vLLM 0.33
_COLUMNS = 64  # of logits: rows that begin at 16 bytes
_original = theirs.sparse_attn_indexer
_library: Any = None
_model: Any = None  # whose layers ask
_plans: dict[Any, Plans] = {}


def take_over(model: Any = None) -> None:
    """Serve vLLM's operation `sparse_attn_indexer` in this process; errors name the model."""
    global _library, _model
    _model = model
    if _library is not None:
        return
    _library = torch.library.Library("vllm", "FRAGMENT")
    name, key = "sparse_attn_indexer", current_platform.dispatch_key
    ours = theirs.eager_break_during_capture(select)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the operation had an implementation
        _library.impl(name, ours, key, allow_override=True)
    for module in [sys.modules[each] for each in list(sys.modules) if each.startswith("vllm.")]:
        if vars(module).get(name) is _original:  # models of later versions call it
            setattr(module, name, ours)
    metadata.has_deep_gemm = lambda: False  # whose schedule nothing reads then


def context_parallel(page_size: int) -> ContextParallel:
    """Return what tells the tokens of this rank under decode context parallelism.

    vLLM's indexer takes blocks of one token alone (`cp_kv_cache_interleave_size`).
    """
    return _parallel_of(get_dcp_group().device_group, page_size)


@cached  # a later engine of the process has another group
def _parallel_of(group: Any, page_size: int) -> ContextParallel:
    return ContextParallel(group, page_size=page_size, block_size=1)


def select(*args: Any, **kwargs: Any) -> Any:
    """Write the keys of new tokens, and the positions of each token's best ones into the buffer.

    Arguments and result are those of vLLM's operation.
    """
    given = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | kwargs
    for name in _REFUSED:
        found = given.get(name)
        if found is not None and found is not False:
            raise refusal(
                _model,
                f"{name}: cumla's indexer does not have it, got {getattr(found, 'shape', found)}; "
                "leave out --attention-backend CUSTOM",
            )
    steps = theirs.get_forward_context().attn_metadata
    if not isinstance(steps, dict):  # vLLM measures memory
        return _original(*args, **kwargs)
    step = steps[theirs._resolve_layer_name(given["k_cache_prefix"])]
    cache, buffer = given["kv_cache"], given["topk_indices_buffer"]
    if not given["skip_k_cache_insert"]:
        slots = step.slot_mapping
        in_powers = given["scale_fmt"] == "ue8m0"
        cumla.append_indexer_cache(
            given["k"][: len(slots)], cache, slots, power_of_two_scales=in_powers
        )
    if _is_dense(steps, given.get("dense_mha_metadata_layer_name")):
        return buffer
    q, weights, topk = given["q_quant"], given["weights"].float(), given["topk_tokens"]
    is_cut = given.get("dcp_world_size", 1) > 1
    parallel = context_parallel(cache.shape[1]) if is_cut else None
    if step.num_prefills:
        _prefill(step.prefill.chunks, given, q, weights, parallel)
    if step.num_decode_tokens:
        tokens = slice(step.num_decode_tokens)
        out = buffer[tokens, :topk]
        longest = given["max_model_len"]
        _decode(step.decode, cache, q[tokens], weights[tokens], longest, out, parallel)
    return buffer


def _is_dense(steps: dict[str, Any], name: Any) -> bool:
    """Return whether the layer attends to all tokens, and reads no list; vLLM 0.33 names it."""
    step = steps.get(theirs._resolve_layer_name(name)) if name else None
    prefill = getattr(step, "prefill", None)
    return getattr(prefill, "use_dense_mha", False) and not getattr(step, "num_decode_tokens", 1)


def _top_k(parallel: ContextParallel | None, logits: Any, out: Any, **rows: Any) -> None:
    """Select among all tokens, of which each rank has scored its own."""
    if parallel is None:
        cumla.top_k(logits, out.shape[1], out=out, **rows)
    else:
        out.copy_(parallel.top_k(logits, out.shape[1], **rows))


def _prefill(
    chunks: list[Any],
    given: dict[str, Any],
    q: Any,
    weights: Any,
    parallel: ContextParallel | None,
) -> None:
    """Select for chunks of prefills, whose keys vLLM gathers."""
    fp8 = current_platform.fp8_dtype()
    specs = (
        ((given["total_seq_lens"], given["head_dim"]), fp8),
        (
            (given["total_seq_lens"], 4),
            torch.uint8,
        ),
    )
    keys, scales = theirs.current_workspace_manager().get_simultaneous(*specs)
    for chunk in chunks:
        tokens = slice(chunk.token_start, chunk.token_end)
        count, starts = chunk.total_seq_lens, chunk.cu_seq_lens
        if parallel is not None:
            count, starts = max(1, chunk.local_total_seq_lens), chunk.local_cu_seq_lens
        k, scale = keys[:count], scales[:count]
        if not chunk.skip_kv_gather:
            theirs.ops.cp_gather_indexer_k_quant_cache(
                given["kv_cache"], k, scale, chunk.block_table, starts
            )
        ks, ke = chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
        if not hasattr(chunk, "row_lens"):
            chunk.row_lens = ke - ks  # for all layers
        pair = k, scale.view(torch.float32).squeeze(-1)
        logits = cumla.mqa_logits(q[tokens], pair, weights[tokens], ks, ke, clean=False)
        out = given["topk_indices_buffer"][tokens, : given["topk_tokens"]]
        _top_k(parallel, logits, out, row_starts=ks, row_lens=chunk.row_lens)


def _decode(
    step: Any,
    cache: torch.Tensor,
    q: Any,
    weights: Any,
    max_model_len: int,
    out: Any,
    parallel: ContextParallel | None,
) -> None:
    """Select for query tokens of decoding, by one schedule for all layers."""
    if not hasattr(step, "scored"):
        lens, table = step.seq_lens, step.block_table
        if step.requires_padding or lens.numel() != len(q):
            lens, table = _each(step, len(q), parallel)
        builder = getattr(step.schedule_metadata, "data_ptr", int)()  # each has its own
        plans = _plans.setdefault((q.device, builder), Plans(q.device, {}))
        step.scored = LogitsStep(plans, lens, q, cache, table), lens.reshape(-1), table
    scored, row_lens, table = step.scored
    width = -(-max_model_len // _COLUMNS) * _COLUMNS
    logits = scored.score(q, cache, weights, table, width)
    _top_k(parallel, logits, out, row_lens=row_lens)


def _each(
    step: Any, tokens: int, parallel: ContextParallel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See query tokens of requests that have different numbers of them as requests of one each."""
    ends = step.decode_lens.cumsum(0, dtype=torch.int32)
    token = torch.arange(tokens, dtype=torch.int32, device=ends.device)
    request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    whole = step.seq_lens[:, -1] if parallel is None else step.global_seq_lens
    visible = whole[request] - (ends[request] - 1 - token)
    visible = torch.where(token < ends[-1], visible, 0).to(torch.int32)
    table = step.block_table[request].contiguous()
    if parallel is not None:
        table, visible = parallel.pages(visible, table)
    return visible[:, None], table
