# SPDX-License-Identifier: Apache-2.0
"""Qwen's QSA layers, which attend to groups of tokens without asking for a backend.

vLLM's layers, their indexer, which chooses groups, and their caches stay; attention is cumla's in
steps where that is faster than vLLM's Triton kernel.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

import cumla
from cumla.vllm._models import FP8, LOGGER

__all__ = ["attend"]

# Query tokens of a step, from which on cumla attends: so many take less than with vLLM's kernel,
# the gate included (block-hooks.json). Prompts over caches of 16 bits take longer.
_LEAST_TOKENS, _LEAST_FP8_TOKENS = 64, 96


def attend(impl: Any) -> None:
    """Let the layers of an object of vLLM's class attend by cumla, and say so once in the log.

    Parameters
    ----------
    impl : object
        A `Qwen4ExpQSAFlashAttentionImpl`.
    """
    theirs = impl.forward_qsa

    def forward_qsa(
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        token_to_req: Any,
        use_prefill_config: bool,
        output_gate: Any,
        **more: Any,
    ) -> Any:
        count = attn_metadata.num_actual_tokens
        if impl.kv_cache_dtype in FP8:
            is_ours = count >= _LEAST_FP8_TOKENS
        else:
            is_ours = count >= _LEAST_TOKENS and not use_prefill_config
        if not is_ours or any(scale is not None for scale in more.values()):
            rows = layer, query, key, value, kv_cache, attn_metadata, output
            return theirs(*rows, token_to_req, use_prefill_config, output_gate, **more)
        output[count:].zero_()
        chosen = layer.topk_indices_buffer[:count]
        _attend(impl, layer, query[:count], kv_cache, chosen, attn_metadata, output[:count])
        output[:count].mul_(torch.sigmoid(output_gate[:count]).view_as(output[:count]))
        return output

    impl.forward_qsa = forward_qsa
    _say()


def _attend(
    impl: Any, layer: Any, q: Any, cache: Any, chosen: Any, metadata: Any, out: Any
) -> None:
    """Attend to the tokens of a list by the first of each group; its last column is a number."""
    factors = {}
    if impl.kv_cache_dtype in FP8:  # vLLM allocates bytes
        cache = cache.view(torch.float8_e4m3fn)
        factors = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
    k, v = cache.split(impl.head_size, -1)
    group = layer.indexer.compress_ratio
    cumla.block_sparse_attention(
        *(q, k, v, chosen[:, None, :-1:group]),
        block_size=group,
        indices_are="tokens",
        kv_lens=metadata.seq_lens,
        qo_indptr=metadata.query_start_loc,
        block_table=metadata.block_table,
        softmax_scale=impl.head_size**-0.5,
        kv_layout="HND",
        out=out,
        **factors,
    )


@cache
def _say() -> None:
    logging.getLogger(LOGGER).info(
        "cumla attends in layers of QSA: block_sparse_attention in the place of vLLM's Triton "
        "kernel, in steps of decoding of at least %s tokens; with an FP8 cache in all steps of at "
        "least %s",
        *(_LEAST_TOKENS, _LEAST_FP8_TOKENS),
    )
