# SPDX-License-Identifier: Apache-2.0
"""The backend of models with dense MLA: decoding, drafts and short prefills by cumla.

Longer prefills go to the MLA prefill backend that vLLM chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

import cumla
from cumla._serving import MLA_WIDTHS, Plans, Step, cache_dtype
from cumla.core.check_mode import environment_flag
from cumla.vllm._kernels import FP8, Kernels, factor

__all__ = ["Backend", "Builder", "DecodeMetadata", "Impl"]


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """The decoding part of a step."""

    step: Step


class Builder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Computes the schedule of a step, before its layers and before each replay of a graph."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 128  # prefills up to so many tokens go with the decoding

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plans = Plans(
            self.device,
            {"cache_dtype": cache_dtype(self.kv_cache_spec.dtype)},
            page_size=self.page_size,
            dtype=self.model_config.dtype,
        )

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
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=self._plans.begin_mla(
                self.num_heads * self.dcp_world_size,
                num_decode_tokens,
                uniform_length(query_start_loc_cpu, num_decode_tokens),
                seq_lens_device,
                query_start_loc_device,
            ),
        )


def uniform_length(offsets: torch.Tensor, tokens: int) -> int:
    """Tell the query length of every request, or 0 where they differ.

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

    ``CUMLA_VLLM_FP8_PRODUCTS`` lets it multiply in FP8 where the cache is FP8.
    """

    can_return_lse_for_decode: bool = True  # a natural logarithm, as lse_base_on_e says
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, sliding_window: int | None = None, **kwargs: Any) -> None:
        if sliding_window is not None:  # the base would go on without it
            raise NotImplementedError(
                f"sliding_window: cumla's backend has no windows for MLA, got {sliding_window}; "
                "leave out --attention-backend CUSTOM"
            )
        super().__init__(*args, sliding_window=None, **kwargs)
        self.supports_quant_query_input = False  # queries have 16 bits beside an FP8 cache, too
        self._fp8_products = environment_flag("CUMLA_VLLM_FP8_PRODUCTS")

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend: out ``(tokens, num_heads, 512)``, and lse ``(tokens, num_heads)`` where asked."""
        decode: DecodeMetadata = attn_metadata.decode
        kv_scale = factor(layer._k_scale, kv_c_and_k_pe_cache)
        out, lse = decode.step.run_mla(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
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
        cumla.append_mla_cache(rows, kv_cache, slots, kv_scale=factor(k_scale, kv_cache))


class Backend(Kernels, MLACommonBackend):
    """What vLLM asks before it takes this backend; errors of a model that does not fit are its."""

    impl = Impl
    builder = Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the widths of a cached row."""
        return [sum(MLA_WIDTHS)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Refuse query lengths that are decided on the device: the host's choose the plan."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """Refuse float16 queries over an FP8 cache."""
        if dtype == torch.float16 and kv_cache_dtype in FP8:
            return "an FP8 cache needs a model in bfloat16"
        return None
