# SPDX-License-Identifier: Apache-2.0
"""The backend of models with MHA, GQA or MQA: decoding and prefill, with windows and sinks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)

import cumla
from cumla._choices import Layers, log_layers
from cumla._serving import Plans, Step, cache_dtype
from cumla.vllm._models import LOGGER, NO_ALIBI, MHAKernels, divides_steps, dtype_name, factor

__all__ = ["Backend", "Builder", "Impl", "Metadata"]


class Form(NamedTuple):
    """What layers that share a plan have in common."""

    num_heads: int
    window: int | None

    @property
    def name(self) -> str:
        """Tell the layers of a model from each other."""
        return "without a window" if self.window is None else f"with a window of {self.window + 1}"


# Plans by model, kind of cache and form of layers. vLLM divides layers of one form into groups;
# each has a builder and a block table, and all have the same lengths.
_PLANS: WeakValueDictionary[Any, Plans] = WeakValueDictionary()


@dataclass
class Metadata:
    """A step."""

    num_actual_tokens: int
    block_table: torch.Tensor
    steps: dict[Form, Step]


class Builder(AttentionMetadataBuilder[Metadata]):
    """Tells the layers of a step what its schedules follow from."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        # Layers of a form share a plan; all plans of a step are in use at once.
        self._plans = {
            form: _plans_of(form, kv_cache_spec, vllm_config, device)
            for form in {layers[name].impl.form for name in layer_names}
        }
        impls = Counter(
            (layer.impl.form, layer.impl.num_kv_heads, layer.impl.head_size)
            for layer in layers.values()
            if isinstance(getattr(layer, "impl", None), Impl)
        )
        log_layers(
            LOGGER,
            {
                f"layers {form.name} ({count})": Layers(
                    form.num_heads,
                    kv_cache_spec.block_size,
                    dtype_name(vllm_config.model_config.dtype),
                    cache_dtype(kv_cache_spec.dtype),
                    num_kv_heads,
                    head_size,
                    window=form.window,
                )
                for (form, num_kv_heads, head_size), count in impls.items()
            },
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, *_: Any) -> AttentionCGSupport:
        """Serve graphs of all steps, unless vLLM divides them."""
        if divides_steps(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Begin a step for each form of layers."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                "attention: cumla's backend serves causal attention, got a step without it; leave "
                "out --attention-backend CUSTOM"
            )
        tokens, kv_lens = common.num_actual_tokens, common.seq_lens
        steps = {
            form: plans.begin(
                cumla.AttentionPlan,
                (len(kv_lens), tokens, form.num_heads, self.kv_cache_spec.head_size),
                kv_lens,
                common.query_start_loc,
            )
            for form, plans in self._plans.items()
        }
        return Metadata(tokens, common.block_table_tensor, steps)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Load the kernels of a step that will be captured."""
        metadata = self.build(0, common_attn_metadata)
        for step in metadata.steps.values():
            step.prepare()
        return metadata


def _plans_of(form: Form, spec: Any, vllm_config: Any, device: torch.device) -> Plans:
    """Return the plans of a form of layers, those of another builder where the layers are alike."""

    def make() -> Plans:
        return Plans(
            device,
            {"num_kv_heads": spec.num_kv_heads},
            page_size=spec.block_size,
            dtype=vllm_config.model_config.dtype,
            cache_dtype=cache_dtype(spec.dtype),
            window=form.window,
        )

    if divides_steps(vllm_config):  # parts of a step run beside each other, with a builder each
        return make()
    sizes = spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype
    # All that plans are made with: captured steps may outlive a model, whose id another one gets.
    key = id(vllm_config), str(device), form, *sizes, vllm_config.model_config.dtype
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS[key] = make()
    return plans


class Impl(AttentionImpl[Metadata]):
    """One layer: writes its keys and values, and attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(f"{NO_ALIBI}; leave out --attention-backend CUSTOM")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._sinks: torch.Tensor | None = None
        self._softcap = logits_soft_cap or None
        # W tokens are a window of W - 1 to the left, and one's own.
        self.form = Form(num_heads, None if sliding_window is None else sliding_window - 1)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as they were loaded, in float32; again after each loading.

        They stay where they are: captured graphs have their address.
        """
        if self.sinks is None:
            return
        if self._sinks is None:
            self._sinks = self.sinks.detach().float().clone()
        else:
            self._sinks.copy_(self.sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, into `output` ``(tokens, num_heads, head_size)``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale: cumla's backend writes 16-bit outputs; leave out the fusion of "
                "attention and quantization (pass_config.fuse_attn_quant)"
            )
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        attn_metadata.steps[self.form].run(
            query[:tokens],
            *_pages(kv_cache),
            block_table=attn_metadata.block_table,
            softcap=self._softcap,
            sinks=self._sinks,
            softmax_scale=self.scale,
            **_factors(layer, kv_cache),
            out=output[:tokens],
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the keys and values of new tokens; those whose slot is negative are padding."""
        tokens = len(slot_mapping)
        k_cache, v_cache = _pages(kv_cache)
        factors = _factors(layer, kv_cache)
        cumla.append_kv_cache(
            key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, **factors
        )


class Backend(MHAKernels, AttentionBackend):
    """What vLLM asks before it takes this backend; errors of a model that does not fit are its."""

    impl = Impl
    builder = Builder
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Return the axes of a cache for versions that ask, as later ones have them."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


def _pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, of pages ``(num_blocks, num_kv_heads, block_size, 2 * head_size)``.

    In memory the axes may lie in another order.
    """
    keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
    return keys, values


def _factors(layer: Any, kv_cache: torch.Tensor) -> dict[str, Any]:
    return {
        "k_scale": factor(layer._k_scale, kv_cache),
        "v_scale": factor(layer._v_scale, kv_cache),
    }
