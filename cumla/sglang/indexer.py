# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse MLA: cumla scores and selects where SGLang calls DeepGEMM and its top-k.

SGLang's layer, its cache and its metadata stay. :func:`take_over` puts :func:`select` in the place
of what its layer calls for tokens of decoding, and cumla's logits in that of DeepGEMM's; a backend
passes :class:`Metadata`, which select tokens in all steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa import dsa_indexer, utils
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata

import cumla
from cumla._serving import LogitsStep, Plans
from cumla.compat import deep_gemm

__all__ = ["Metadata", "select", "take_over", "tell"]

_log = logging.getLogger(__name__)
_FUNCTIONS = {  # names in SGLang's files -> what they return
    "resolve_num_sms": deep_gemm.get_num_sms,
    "resolve_paged_mqa_logits_metadata_fn": lambda: deep_gemm.get_paged_mqa_logits_metadata,
    "resolve_fp8_paged_mqa_logits_fn": lambda: deep_gemm.fp8_paged_mqa_logits,
    "resolve_fp8_mqa_logits_fn": lambda: deep_gemm.fp8_mqa_logits,
}
_original = dsa_indexer.Indexer._get_topk_paged
if _missing := [name for name in _FUNCTIONS if not hasattr(utils, name)]:
    raise AttributeError(f"SGLang's indexer has no {', '.join(_missing)}")


def take_over() -> None:
    """Serve SGLang's indexer in this process; again it changes nothing."""
    if dsa_indexer.Indexer._get_topk_paged is select:
        return
    for module in (utils, dsa_indexer, dsa_backend):
        for name, ours in _FUNCTIONS.items():
            if hasattr(module, name):
                setattr(module, name, ours)
    dsa_indexer.Indexer._get_topk_paged = select


@cache
def tell(pool: int) -> None:
    """Say in the log who serves an indexer that chooses pools of so many tokens."""
    if pool > 1:
        _log.info(
            "SGLang scores and selects for the indexer of sparse MLA, with DeepGEMM: it chooses "
            "pools of %s tokens, which cumla's does not",
            pool,
        )
        return
    _log.info(
        "cumla scores and selects for the indexer of sparse MLA: paged_mqa_logits, mqa_logits and "
        "top_k in the place of DeepGEMM and SGLang's top-k"
    )


@dataclass(frozen=True)
class Metadata(DSAIndexerMetadata):
    """Metadata of a step for SGLang's indexer; cumla selects, and finds slots of the pool.

    `steps` are those of decoding by their query tokens, one schedule for all layers.
    """

    steps: dict[tuple[int, int], LogitsStep] = field(default_factory=dict)
    plans: Plans | None = None

    def score(self, q: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(tokens, columns)`` of a layer for tokens of decoding.

        Drafts of a request are its query tokens, though SGLang repeats its page table for each.
        """
        lens, table = self.get_seqlens_expanded(), self.get_page_table_64()
        width = table.shape[1] * cache.shape[1]
        requests = max(len(self.get_seqlens_int32()), 1)
        q_len = max(len(q) // requests, 1)
        if len(q) != requests * q_len or len(table) != len(q):
            q_len = 1
        lens, table = lens[: len(q)].view(-1, q_len), table[: len(q) : q_len]
        key = len(q), q_len
        if key not in self.steps:
            assert self.plans is not None
            self.steps[key] = LogitsStep(self.plans, lens, q, cache, table)
        return self.steps[key].score(q, cache, weights, table, width)

    def topk_transform(
        self,
        logits: torch.Tensor,
        topk: int,
        ks: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        ke_offset: torch.Tensor | None = None,
        batch_idx_list: torch.Tensor | None = None,
        topk_indices_offset_override: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Select for rows of logits ``(rows, columns)``: slots ``(rows, topk)``, -1 behind them.

        Positions of the request instead, where SGLang translates them itself.
        """
        lens = self.get_seqlens_expanded() if ke_offset is None else ke_offset
        options: dict[str, Any] = {"row_lens": lens, "row_starts": ks}
        if not self.force_unfused_topk:
            requests = self.get_token_to_batch_idx() if batch_idx_list is None else batch_idx_list
            table = self.get_page_table_64()
            # None in decoding and with drafts, whose table has a row for each token.
            options |= {"row_to_request": requests, "page_size": self.attn_metadata.page_size}
            options["block_table"] = table[: len(logits)] if requests is None else table
        out = logits.new_empty((len(logits), topk), dtype=torch.int32)
        return cumla.top_k(logits, topk, out=out, **options).indices


def select(
    self: Any,
    forward_batch: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
) -> torch.Tensor:
    """Return the slots ``(tokens, topk)`` of each query token's best keys, -1 behind them.

    Arguments and result are those of the method of SGLang's indexer; another backend's metadata go
    to that, which schedules cumla's logits by the lengths of the call.
    """
    if not isinstance(metadata, Metadata):
        if getattr(metadata, "paged_mqa_schedule_metadata", None) is not None:
            metadata = replace(metadata, paged_mqa_schedule_metadata=None)
        theirs: torch.Tensor = _original(self, forward_batch, layer_id, q_fp8, weights, metadata)
        return theirs
    pool = dsa_indexer.get_token_to_kv_pool()
    cache = self._get_index_k_read_buffer(pool, layer_id)
    cache = cache.view(len(cache), pool.index_page_size, -1)
    tokens = sum(metadata.get_dsa_extend_len_cpu())  # behind them is padding
    logits = metadata.score(q_fp8[:tokens], cache, weights[:tokens].squeeze(-1).float())
    self._mask_init_and_local_tokens(logits, metadata.get_seqlens_expanded())
    slots = metadata.topk_transform(logits, self.index_topk)
    missing = len(q_fp8) - tokens
    return torch.nn.functional.pad(slots, (0, 0, 0, missing), value=-1) if missing > 0 else slots
