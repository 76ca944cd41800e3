# SPDX-License-Identifier: Apache-2.0
"""The backend of models with sparse MLA in SGLang: DeepSeek-V3.2, GLM-5, GLM-5.3 and others.

SGLang's own backend for them, `dsa`, keeps its metadata and its dense attention of short prompts.
cumla scores and selects for the indexer, and attends to the slots that it chose, with any number of
heads, in pools of 16 bits and in those of packed FP8 rows. An indexer that chooses pools of tokens
stays SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

import cumla
from cumla._choices import Layers, log_layers
from cumla._serving import LogitsStep, Plans, Step, cache_dtype, in_parts
from cumla.compat._engine import refusal
from cumla.mla.shape import E4M3_512, NO_ROPE, PACKED, WIDTH
from cumla.sglang import is_deterministic
from cumla.sglang.indexer import Metadata, take_over, tell

__all__ = ["Backend"]

_WITHOUT_ROPE = WIDTH[0], 0
# Functions that SGLang's backend calls: both pass slots and their number.
_IN_PARTS = "fa3"  # and queries in two parts
_WITH_SINKS = "flashmla_sparse"  # and sinks, with queries of which it makes one array


class Backend(DeepseekSparseAttnBackend):
    """Attends where SGLang's backend would call FlashAttention-3, in all of its steps.

    With sinks that is where it would call FlashMLA's sparse prefill.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        width = self.kv_lora_rank, self.qk_rope_head_dim
        refused: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "kv_lora_rank, qk_rope_head_dim": (width, (WIDTH, _WITHOUT_ROPE)),
            "dcp_size": (self.dcp_size, (1,)),
        }
        if self.dsa_index_kpool > 1:  # whose lists have tokens behind the lengths that are told
            refused["hisparse_coordinator"] = (self.hisparse_coordinator, (None,))
        for name, (found, served) in refused.items():
            if found not in served:
                raise refusal(
                    runner.model_config,
                    f"{name}: cumla's backend for sparse MLA needs "
                    f"{' or '.join(map(str, served))}, got {found}; leave out --attention-backend "
                    f"cumla",
                )
        if self.dsa_index_kpool == 1:
            take_over()
        tell(self.dsa_index_kpool)
        self._choose(None)
        self.enable_auto_select_prefill_impl = False
        stored, is_packed = cache_dtype(runner.kv_cache_dtype), self.dsa_kv_cache_store_fp8
        self._is_packed = is_packed
        self._columns = sum(width)
        self._sizes: dict[str, Any] = {
            "cache_dtype": None if is_packed else stored,
            "cache_format": PACKED if is_packed else None,
        }
        if width == _WITHOUT_ROPE and stored is not None:
            form = NO_ROPE if is_packed else E4M3_512
            self._sizes = {"cache_dtype": None, "cache_format": form}
        self._is_deterministic = is_deterministic()
        if self._is_deterministic:  # dense attention would depend on the longest prompt of a step
            self.supports_mha_one_shot = False
        self._dtype = runner.dtype
        self._plans: Plans | None = None
        self._steps: dict[tuple[int, int], Step] = {}
        self._scored: dict[tuple[int, int], LogitsStep] = {}
        self._scoring = Plans(torch.device(self.device), {})

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs eagerly."""
        super().init_forward_metadata(forward_batch)
        self._begin()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step before its graph is captured or replayed."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._begin()

    def _begin(self) -> None:
        for steps in (self._steps, self._scored):
            steps.clear()

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        """Return what the indexer of a layer reads, which selects by cumla."""
        found = super().get_indexer_metadata(layer_id, forward_batch)
        if self.dsa_index_kpool > 1:
            return found
        return Metadata(**vars(found), steps=self._scored, plans=self._scoring)

    def _build_topk_v2_plan(self, seqlens_expanded: torch.Tensor) -> Any:
        """Plan nothing for SGLang's own top-k, which runs with pools of tokens alone."""
        return super()._build_topk_v2_plan(seqlens_expanded) if self.dsa_index_kpool > 1 else None

    def _refresh_paged_mqa_schedule_metadata(self, metadata: Any, seqlens_32_2d: Any) -> None:
        """Schedule nothing before a replay: its graph does."""
        if self.dsa_index_kpool > 1:
            super()._refresh_paged_mqa_schedule_metadata(metadata, seqlens_32_2d)

    def get_topk_transform_method(self, forward_mode: Any = None) -> Any:
        """Ask for slots of the pool: no rows are copied for a prefill."""
        return TopkTransformMethod.PAGED

    def _resolve_kpool_tail_backend(self, topk_indices: Any, dsa_impl: str) -> str:
        """Keep the function below where lists have tokens behind those of whole pools."""
        return dsa_impl

    def _check_kpool_tail_backend(self, topk_indices: Any, dsa_impl: str, phase: str) -> None:
        """Refuse nothing: the function below takes lists of any lengths."""

    def forward_extend(self, *args: Any, attn_sink: Any = None, **options: Any) -> torch.Tensor:
        """Write the new rows of a layer, and attend."""
        self._choose(attn_sink)
        out: torch.Tensor = super().forward_extend(*args, attn_sink=attn_sink, **options)
        return out

    def forward_decode(self, *args: Any, attn_sink: Any = None, **options: Any) -> torch.Tensor:
        """Write the new rows of a layer, and attend."""
        self._choose(attn_sink)
        out: torch.Tensor = super().forward_decode(*args, attn_sink=attn_sink, **options)
        return out

    def _choose(self, sinks: Any) -> None:
        self.dsa_prefill_impl = self.dsa_decode_impl = _IN_PARTS if sinks is None else _WITH_SINKS

    def _forward_fa3(
        self,
        q_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        q_nope: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *args: Any,
        sm_scale: float,
        **options: Any,
    ) -> torch.Tensor:
        """Attend: ``(tokens, num_heads, 512)``."""
        q = in_parts((q_nope, q_rope))
        return self._attend(q, kv_cache, page_table, sm_scale, cache_seqlens, None)

    def _forward_flashmla_sparse(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: ``(tokens, num_heads, 512)``."""
        return self._attend(q_all, kv_cache, page_table_1, sm_scale, topk_length, attn_sink)

    def _attend(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        sm_scale: float,
        lens: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, num_heads, _ = (q[0] if isinstance(q, tuple) else q).shape
        key = tokens, num_heads
        if key not in self._steps:
            topk = slots.shape[1]
            # Behind those of whole pools a list has the tokens of the last one.
            if self.dsa_index_kpool > 1 or lens is None or len(lens) != tokens:
                lens = slots.new_full((tokens,), topk, dtype=torch.int32)
            shape = (1, tokens, num_heads, topk)
            plans = self._plans or self._made(num_heads, topk)
            self._steps[key] = Step(plans, lambda: (cumla.MLASparsePlan, shape), lens, lens)
        sinks = None if sinks is None else sinks.detach().float()
        step = self._steps[key]
        if self._is_packed:  # SGLang passes rows of bytes as e4m3
            kv_cache = kv_cache.view(torch.uint8)
        return step.run(q, kv_cache, slots, sinks=sinks, softmax_scale=sm_scale).out

    def _made(self, num_heads: int, topk: int) -> Plans:
        sizes = self._sizes | {"batch_invariant": self._is_deterministic}
        self._plans = Plans(torch.device(self.device), sizes, dtype=self._dtype)
        dtype = str(self._dtype).removeprefix("torch.")
        of_layers = self._sizes | {
            "head_dim": self._columns,
            "is_invariant": self._is_deterministic,
        }
        layers = Layers(num_heads, 1, dtype, topk=topk, **of_layers)
        log_layers("cumla.sglang", {"layers with sparse MLA": layers})
        return self._plans
