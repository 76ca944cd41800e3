# SPDX-License-Identifier: Apache-2.0
"""The backend of models with dense MLA: decoding, drafts and short prefills by cumla.

Longer prefills go to the MLA prefill backend that vLLM chooses, unless bits are to be invariant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from cumla._choices import Layers, invariance, log_layers
from cumla._serving import Plans, Step, append_rows, cache_dtype
from cumla.compat._engine import refusal
from cumla.mla.shape import WIDTHS
from cumla.vllm._models import (
    LOGGER,
    MLAKernels,
    divides_steps,
    dtype_name,
    factor,
    fp8_products,
    is_invariant,
    refuse_width,
)

__all__ = ["Backend", "Builder", "DecodeMetadata", "Impl"]

# From absorbed queries longer prefills cost several times what they do from expanded keys.
_MOST_TOKENS_OF_GRAPHS = 512


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """The decoding part of a step."""

    step: Step


class Builder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Tells the layers of a step what its schedule follows from.

    Where the user asks for full CUDA graphs of mixed steps, a graph serves any requests that fit
    into it, and prefills of that size count as decoding. Under VLLM_BATCH_INVARIANT all prefills
    do: expanded keys would give other bits, and merging chunks others again. With adaptive
    verification vLLM cuts
    drafts on the device, and the host's query lengths are no more than a total: then every step
    reads them on the device.
    """

    query_len_support: ClassVar = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 128  # prefills up to this number of tokens go with the decoding

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        if _has_mixed_graphs(vllm_config):
            most = vllm_config.compilation_config.max_cudagraph_capture_size
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, most)
        invariant = invariance(is_invariant())
        if invariant:
            self.reorder_batch_threshold = vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._cuts_drafts = _cuts_drafts(vllm_config)
        if self._cuts_drafts and self.dcp_world_size > 1:
            raise refusal(
                self.model_config,
                "enable_adaptive_verification: cumla's backend for MLA has none with decode "
                f"context parallelism, got {self.dcp_world_size} ranks; leave one of the two out",
            )
        self._captures_mixture = False
        self._plans = Plans(
            self.device,
            {
                "cache_dtype": cache_dtype(self.kv_cache_spec.dtype),
                "head_dim": self.kv_cache_spec.head_size,
            }
            | invariant,
            page_size=self.page_size,
            dtype=self.model_config.dtype,
        )
        layers = Layers(
            self.num_heads * self.dcp_world_size,
            self.page_size,
            dtype_name(self.model_config.dtype),
            cache_dtype(self.kv_cache_spec.dtype),
            head_dim=self.kv_cache_spec.head_size,
            fp8_products=fp8_products(vllm_config),
            is_invariant=is_invariant(),
        )
        log_layers(LOGGER, {f"layers with MLA ({len(layer_names)})": layers})

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, *_: Any) -> AttentionCGSupport:
        """Serve graphs of mixed steps where they are asked for."""
        if divides_steps(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        mixed = _has_mixed_graphs(vllm_config)
        return AttentionCGSupport.ALWAYS if mixed else AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, *_: Any) -> int | None:
        """Return the most tokens of a request in graphs that read query lengths on the device."""
        if not _cuts_drafts(vllm_config) or divides_steps(vllm_config):
            return None
        return cls.reorder_batch_threshold

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        """Begin a step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        merge_every_prefill(metadata.prefill)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        """Load the kernels of a step that will be captured."""
        self._captures_mixture = _has_mixed_graphs(self.vllm_config)
        try:
            metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captures_mixture = False
        decode = metadata.decode
        assert isinstance(decode, DecodeMetadata)
        decode.step.prepare()
        return metadata

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,  # differ between versions
    ) -> DecodeMetadata:
        q_len = partial(uniform_length, query_start_loc_cpu, num_decode_tokens)
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=self._plans.begin_mla(
                self.num_heads * self.dcp_world_size,
                num_decode_tokens,
                0 if self._captures_mixture or self._cuts_drafts else q_len,
                seq_lens_device,
                query_start_loc_device,
            ),
        )


def merge_every_prefill(prefill: Any) -> None:
    """Let vLLM merge each prefill with its context, wherever it stands in the batch.

    vLLM 0.26 and 0.27 merge the first `prefill_tokens_with_context` tokens alone, as if those
    prefills came first. Their model runner V2 sorts by length: there a longer prefill would lose
    its context. Prefills without a context have a log-sum-exp of -inf for it. 0.25 has no
    `has_empty_context`, and no such log-sum-exp; 0.28 has neither name, nor the fault.
    """
    context: Any = getattr(prefill, "chunked_context", None)
    if hasattr(context, "has_empty_context"):
        context.prefill_tokens_with_context = None


def _has_mixed_graphs(config: Any) -> bool:
    """Return whether one graph is to serve decoding and prefills, as long as prefills are short."""
    settings = config.compilation_config
    most = settings.max_cudagraph_capture_size or 0
    return (
        settings.cudagraph_mode is CUDAGraphMode.FULL
        and most <= _MOST_TOKENS_OF_GRAPHS
        and config.parallel_config.decode_context_parallel_size == 1
        and not divides_steps(config)
    )


def _cuts_drafts(config: Any) -> bool:
    """Return whether vLLM decides on the device how many drafts of a request it verifies."""
    drafts = getattr(config, "speculative_config", None)
    return bool(getattr(drafts, "enable_adaptive_verification", False))


def uniform_length(offsets: torch.Tensor, tokens: int) -> int:
    """Return the query length of every request, or 0 where they differ.

    A full CUDA graph pads a step with requests without queries behind the others; `tokens` counts
    theirs as well.
    """
    lengths = np.diff(offsets.numpy())
    q_len, rest = divmod(tokens, len(lengths))
    if rest or not q_len:
        return 0
    filled, rest = divmod(int(lengths.sum()), q_len)
    even = not rest and (lengths[:filled] == q_len).all()  # then the others have none
    return q_len if even else 0


class Impl(MLACommonImpl[MLACommonMetadata]):
    """One layer: writes the cache, and attends from absorbed queries.

    An option in vLLM's additional_config lets it multiply in FP8 where the cache is FP8.
    """

    can_return_lse_for_decode: bool = True  # a natural logarithm, as lse_base_on_e says
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, sliding_window: int | None = None, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        if sliding_window is not None:  # the base would go on without it
            raise refusal(
                config.model_config,
                f"sliding_window: cumla's backend has no windows for MLA, got {sliding_window}; "
                "leave out --attention-backend CUSTOM",
            )
        refuse_width(config.model_config, kwargs, WIDTHS)
        super().__init__(*args, sliding_window=None, **kwargs)
        self.supports_quant_query_input = False  # queries have 16 bits beside an FP8 cache, too
        self._fp8_products = fp8_products(config)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend: out ``(tokens, num_heads, columns)``, lse ``(tokens, num_heads)`` where asked."""
        decode: DecodeMetadata = attn_metadata.decode
        kv_scale = factor(layer._k_scale, kv_c_and_k_pe_cache)
        out, lse = decode.step.run_mla(
            q,
            kv_c_and_k_pe_cache,
            block_table=decode.block_table,
            softmax_scale=self.scale,
            kv_scale=kv_scale,
            fp8_products=self._fp8_products and kv_scale is not None,  # of an FP8 cache
        )
        return out, lse.flatten(0, -2) if self.need_to_return_lse_for_decode else None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *_: Any,  # differ between versions
    ) -> None:
        """Write the latent rows of new tokens; those whose slot is negative are padding."""
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        rows = kv_c_normed[: len(slots)], k_pe[: len(slots)].squeeze(1)
        append_rows(rows, kv_cache, slots, factor(k_scale, kv_cache))


class Backend(MLAKernels, MLACommonBackend):
    """Answers to vLLM before it takes this backend; vLLM raises the errors of refused models."""

    impl = Impl
    builder = Builder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Take query lengths that are decided on the device: the builder knows of them."""
        return True
