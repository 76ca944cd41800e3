# SPDX-License-Identifier: Apache-2.0
"""The backend of models with sparse MLA: DeepSeek-V3.2, GLM-5, GLM-5.3 and others.

All query tokens that vLLM does not give to its MLA prefill backend attend to the positions that the
indexer has left in `topk_indices_buffer`, of any number of heads. :mod:`cumla.vllm.indexer` serves
the indexer itself, unless it chooses pools of tokens, as that of GLM-5.3 does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadata

from cumla._choices import Layers, log_layers
from cumla._serving import ListedStep, Plans, ShardedStep, SparseStep, cache_dtype
from cumla.compat._engine import refusal
from cumla.mla.shape import E4M3_512, VALUE_DIM
from cumla.mla.shape import PACKED as V32
from cumla.vllm._models import (
    LOGGER,
    PACKED,
    SPARSE_WIDTHS,
    SparseMLAKernels,
    divides_steps,
    dtype_name,
    factor,
    is_invariant,
    refuse_width,
)
from cumla.vllm.indexer import context_parallel, take_over
from cumla.vllm.mla import merge_every_prefill, uniform_length

__all__ = ["Backend", "Builder", "Impl", "Metadata"]

_ROW_BYTES = 656
# From vLLM 0.33 on its class finds the rows of HiSparse, and calls this with slots and counts.
_TELLS_SLOTS = hasattr(SparseMLACommonImpl, "_forward_mqa_kernel")


class Metadata(AttentionMetadata):
    """Metadata of a step under the names of vLLM's builder, and the steps of cumla."""

    def __init__(self, **told: Any) -> None:
        for name, value in told.items():
            setattr(self, name, value)
        self.steps: dict[int, SparseStep | ShardedStep] = {}  # by their query tokens
        self._listed: dict[int, ListedStep] = {}

    def begin(
        self, plans: Plans, num_heads: int, parallel: Any, offsets: torch.Tensor, pool: int
    ) -> None:
        """Keep what steps are made of; `offsets` are those of the host."""
        self._made_of = plans, num_heads, parallel, offsets, pool

    def step(self, tokens: int) -> SparseStep | ShardedStep:
        """Return the step of the first so many query tokens: all, or those of decoding alone."""
        step = self.steps.get(tokens)
        if step is None:
            told: Any = self
            plans, num_heads, parallel, offsets, pool = self._made_of
            requests = told.req_id_per_token[:tokens]
            count = told.num_reqs if tokens == told.num_actual_tokens else told.num_decodes
            if parallel is not None:
                step = ShardedStep(plans, num_heads, told.topk_tokens, parallel, requests)
            else:
                step = SparseStep(
                    plans,
                    num_heads,
                    told.topk_tokens,
                    partial(uniform_length, offsets[: count + 1], tokens),
                    told.seq_lens[:count],
                    told.query_start_loc[: count + 1],
                    requests,
                    pool,
                )
            self.steps[tokens] = step
        return step

    def listed(self, tokens: int) -> ListedStep:
        """Return the step of so many query tokens for which layers tell slots."""
        if tokens not in self._listed:
            told: Any = self
            plans, num_heads, *_ = self._made_of
            like = told.req_id_per_token
            self._listed[tokens] = ListedStep(plans, num_heads, told.topk_tokens, tokens, like)
        return self._listed[tokens]


class Builder(SparseMLACommonMetadataBuilder[Metadata]):
    """Tells the layers of a step what its schedule follows from."""

    metadata_cls = Metadata

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._requests: dict[int, torch.Tensor] = {}  # of tokens, by equal query lengths
        self._pool = _pool_of(self.model_config)
        offloading = _offloading_of(vllm_config)
        self._is_offloaded = offloading is not None
        if self._is_offloaded and (self._pool > 1 or not _TELLS_SLOTS):
            where = "where the indexer chooses pools of tokens" if _TELLS_SLOTS else "before 0.33"
            raise refusal(
                self.model_config,
                f"hisparse_config: cumla's backend for sparse MLA has no HiSparse {where}, got "
                f"{offloading}; leave out HiSparse, or --attention-backend CUSTOM",
            )
        if self._pool == 1:
            take_over(self.model_config)
        self._parallel = None
        if self.dcp_world_size > 1:
            if self._pool > 1:
                raise refusal(
                    self.model_config,
                    "decode_context_parallel_size: cumla's backend has none where the indexer "
                    f"chooses pools of tokens, got {self.dcp_world_size} ranks; leave it out",
                )
            self._parallel = context_parallel(kv_cache_spec.block_size)
            # No capture may be the first to use the group.
            self._parallel.top_k(torch.zeros((1, 1), device=device), 1)
        self._init_reorder_batch_threshold(128, supports_spec_as_decode=True)
        model, is_packed = self.model_config, vllm_config.cache_config.cache_dtype == PACKED
        own = model.get_num_attention_heads(vllm_config.parallel_config)
        self.num_heads = own * self.dcp_world_size  # queries come from all ranks
        options: dict[str, Any] = {
            "cache_dtype": None if is_packed else cache_dtype(kv_cache_spec.dtype),
            "cache_format": V32 if is_packed else None,
            "batch_invariant": is_invariant(),
        }
        if kv_cache_spec.head_size == VALUE_DIM and options["cache_dtype"] is not None:
            options |= {"cache_dtype": None, "cache_format": E4M3_512}
        self._plans = Plans(device, options, dtype=model.dtype)
        if is_invariant():  # prefills as dense attention would depend on the step's longest one
            vllm_config.attention_config.sparse_mla_force_mqa = True
        page, dtype = kv_cache_spec.block_size, dtype_name(model.dtype)
        layers = Layers(
            self.num_heads,
            page,
            dtype,
            options["cache_dtype"],
            head_dim=kv_cache_spec.head_size,
            topk=self.topk_tokens + self._pool - 1,
            cache_format=options["cache_format"],
            is_invariant=is_invariant(),
        )
        what = f"layers with sparse MLA ({len(layer_names)})"
        if (
            cache_dtype(kv_cache_spec.dtype) is not None and not is_packed
        ):  # other backends make fp8_ds_mla of the same option
            what += f", whose cache has one factor, where {PACKED} has four in each row"
        log_layers(LOGGER, {what: layers})

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, *_: Any) -> AttentionCGSupport:
        """Serve graphs of equal query lengths, as vLLM's indexer does."""
        if divides_steps(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        """Return the request of each token: of equal query lengths it is the same in all steps."""
        common, tokens = common_attn_metadata, common_attn_metadata.num_actual_tokens
        q_len = uniform_length(common.query_start_loc_cpu, tokens)
        if not q_len or self._parallel is not None:
            found: torch.Tensor = super()._build_req_id_per_token(common)
            return found
        if q_len not in self._requests:
            numbers = torch.arange(len(self.req_id_per_token_buffer), device=self.device)
            self._requests[q_len] = (numbers // q_len).int()
        return self._requests[q_len][:tokens]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Begin a step."""
        metadata: Metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        merge_every_prefill(getattr(metadata, "prefill", None))
        host = common_attn_metadata.query_start_loc_cpu
        metadata.begin(self._plans, self.num_heads, self._parallel, host, self._pool)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Load the kernels of a step that will be captured."""
        metadata: Metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        begun = metadata.listed if self._is_offloaded else metadata.step
        begun(common_attn_metadata.num_actual_tokens).prepare()
        return metadata


class Impl(SparseMLACommonImpl[Metadata]):
    """One layer: attends from absorbed queries to the tokens that the indexer chose."""

    can_return_lse_for_decode: bool = True  # a natural logarithm, as lse_base_on_e says
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        model, ranks = config.model_config, config.parallel_config.decode_context_parallel_size
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if kwargs.get(name) is not None:  # the base would go on without it
                raise refusal(
                    model,
                    f"{name}: cumla's backend for sparse MLA does not have it, got "
                    f"{kwargs[name]}; leave out --attention-backend CUSTOM",
                )
        if sinks is not None and ranks > 1:  # those of all heads, on one rank
            raise refusal(
                model,
                "decode_context_parallel_size: cumla's backend for sparse MLA has none beside "
                f"sinks, got {ranks} ranks; leave it out",
            )
        refuse_width(model, kwargs, SPARSE_WIDTHS)
        super().__init__(*args, **kwargs)
        self.sinks = sinks  # a parameter, whose values come later
        self.supports_quant_query_input = False  # queries have 16 bits beside an FP8 cache, too
        self._is_offloaded = _offloading_of(config) is not None
        self._metadata: Any = None

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend: out ``(tokens, num_heads, 512)``, and lse ``(tokens, num_heads)`` where asked."""
        # vLLM brings the rows, and calls the function below. No other micro-batch may come between.
        if self._is_offloaded:
            self._metadata = attn_metadata
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return found
        tokens = len(q[0] if isinstance(q, tuple) else q)
        assert self.topk_indices_buffer is not None
        step = attn_metadata.step(tokens)
        out, lse = step.run_sparse(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer[:tokens, : step.entries],
            attn_metadata.block_table,
            **self._options(layer, kv_c_and_k_pe_cache),
        )
        return out, self._told(lse)

    def _forward_mqa_kernel(
        self,
        q: Any,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to slots of rows that vLLM has brought from the host's memory (HiSparse)."""
        step = self._metadata.listed(len(topk_indices))
        options = self._options(layer, kv_cache)
        out, lse = step.run_listed(q, kv_cache, topk_indices, valid_counts, **options)
        return out, self._told(lse)

    def _options(self, layer: Any, kv_cache: torch.Tensor) -> dict[str, Any]:
        is_packed = kv_cache.shape[-1] == _ROW_BYTES
        return {
            "softmax_scale": self.scale,
            "kv_scale": None if is_packed else factor(layer._k_scale, kv_cache),
            "sinks": None if self.sinks is None else self.sinks.detach().float(),
        }

    def _told(self, lse: torch.Tensor) -> torch.Tensor | None:
        return lse.flatten(0, -2) if self.need_to_return_lse_for_decode else None


class Backend(SparseMLAKernels, AttentionBackend):
    """Answers to vLLM before it takes this backend; vLLM raises the errors of refused models."""

    impl: ClassVar[type] = Impl
    builder: ClassVar[type] = Builder

    @classmethod
    def is_mla(cls) -> bool:
        """Tell that layers pass latent rows."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Tell that layers have an indexer."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Refuse query lengths that are decided on the device: lists follow the host's."""
        return False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        **_: Any,
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache: rows of all columns, or of 656 bytes."""
        return num_blocks, block_size, _ROW_BYTES if cache_dtype_str == PACKED else head_size


def _pool_of(model_config: Any) -> int:
    """Return how many neighbouring tokens an indexer chooses together."""
    text = getattr(model_config, "hf_text_config", model_config.hf_config)
    return getattr(text, "index_kpool", None) or 1


def _offloading_of(config: Any) -> Any:
    """Return vLLM's options for rows in the host's memory (HiSparse), None without."""
    return getattr(getattr(config, "attention_config", None), "hisparse_config", None)
