# SPDX-License-Identifier: Apache-2.0
"""Step 5's layers that choose regions, which decode without asking for a backend.

vLLM's layers, their indexer and its choice, their caches and their prefill stay;
:func:`sparse_decode_attention` attends in the steps of decoding and of drafts in which that is
faster than vLLM's Triton kernel.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch

import cumla
from cumla.compat._engine import put_in_place
from cumla.vllm._models import LOGGER

__all__ = ["attend", "sparse_decode_attention"]

_HOME = "vllm.models.step5.nvidia.flashinfer_sparse"
_REGION = 8  # tokens
# Query tokens by kv heads of a step, from which on cumla attends over e4m3 caches: so many take
# less than with vLLM's kernel (block-hooks.json). Those of 16 bits take as long.
_LEAST_ROWS = 96
_theirs: Any = None


@cache
def attend() -> None:
    """Put cumla's function in the place of vLLM's, once in a process, and say so in the log.

    Raises
    ------
    RuntimeError
        This version of vLLM has another function.
    """
    global _theirs
    _theirs = getattr(import_module(_HOME), "sparse_decode_attention", None)
    put_in_place({_HOME: ("sparse_decode_attention",)}, globals(), _refused)
    logging.getLogger(LOGGER).info(
        "cumla attends in layers of Step 5 that choose regions: block_sparse_attention in the "
        "place of vLLM's Triton kernel, in steps of decoding with an FP8 cache of at least %s "
        "tokens by kv heads",
        _LEAST_ROWS,
    )


def _refused(name: str) -> RuntimeError:
    return RuntimeError(
        f"vllm: cumla's backend needs {name}, which this version does not use for Step 5; leave "
        f"out --attention-backend CUSTOM"
    )


def sparse_decode_attention(
    query: Any,
    cache: Any,
    regions: Any,
    block_table: Any,
    positions: Any,
    active: Any,
    output: Any,
    *,
    scale: float,
    query_len: int = 1,
    splits: int,
    clear_inactive: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    gate: Any = None,
) -> None:
    """Attend to the regions of each row: a query token's heads of one kv head.

    Parameters
    ----------
    query, output : tensor
        ``(rows, heads, head_dim)``, by request, query token and kv head.
    cache : tensor
        ``(pages, kv_heads, page_size, 2 * head_dim)``: K, then V.
    regions : tensor
        ``(rows, topk)`` numbers of regions, -1 where there is none.
    block_table : tensor
        ``(requests, max_pages)`` int32.
    positions, active : tensor
        ``(rows,)``: where the query token is, and whether there is one.
    scale, query_len : float, int
        The factor of the scores, and query tokens of each request.
    splits : int
        Parts of a list, for vLLM's kernel.
    clear_inactive : bool
        Write 0 to rows that are not active.
    k_scale, v_scale : tensor, optional
        Factors of an e4m3 cache.
    gate : tensor, optional
        ``(tokens, kv_heads * heads)``, whose sigmoid is multiplied by.
    """
    rows, heads, columns = query.shape
    if not rows:
        return
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn) or rows < _LEAST_ROWS:
        _theirs(
            *(query, cache, regions, block_table, positions, active, output),
            scale=scale,
            query_len=query_len,
            splits=splits,
            clear_inactive=clear_inactive,
            k_scale=k_scale,
            v_scale=v_scale,
            gate=gate,
        )
        return
    kv_heads = cache.shape[1]
    tokens, requests = rows // kv_heads, rows // (kv_heads * query_len)
    cache = cache.view(torch.float8_e4m3fn)
    k, v = cache.split(columns, -1)
    first = slice(None, None, kv_heads * query_len)  # row of each request
    lens = torch.empty(requests, dtype=torch.int32, device=query.device)
    torch.add(positions[first], query_len, out=lens)
    lens.masked_fill_(active[first] == 0, 0)
    lead = requests, query_len, kv_heads * heads, columns
    cumla.block_sparse_attention(
        *(query.view(lead), k, v, regions.view(tokens, kv_heads, -1)),
        block_size=_REGION,
        kv_lens=lens,
        block_table=block_table,
        softmax_scale=scale,
        kv_layout="HND",
        out=output.view(lead),
        k_scale=k_scale.reshape(1),
        v_scale=v_scale.reshape(1),
    )
    if clear_inactive and query_len > 1:
        output.masked_fill_((active == 0)[:, None, None], 0)
    if gate is not None:
        output.view(tokens, kv_heads * heads, columns).mul_(torch.sigmoid(gate)[..., None])
