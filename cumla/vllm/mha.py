# SPDX-License-Identifier: Apache-2.0
"""The backend of models with MHA, GQA or MQA: decoding and prefill, windows, sinks and images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)

import cumla
from cumla._choices import Layers, invariance, log_layers
from cumla._serving import Plans, Step, cache_dtype, current_capture, image_spans
from cumla.compat._engine import refusal
from cumla.mha.bias import MOST_COLUMNS
from cumla.vllm._models import (
    LOGGER,
    MHAKernels,
    divides_steps,
    dtype_name,
    factor,
    is_invariant,
)
from cumla.vllm.reference import ReferenceWindows

__all__ = ["Backend", "Builder", "Impl", "Metadata"]


class Form(NamedTuple):
    """The properties that layers with one plan have in common."""

    num_heads: int
    window: int | None
    has_alibi: bool = False

    @property
    def name(self) -> str:
        """Distinguish the layers of a model."""
        window = "without a window"
        if self.window is not None:
            window = f"with a window of {self.window + 1}"
        return f"{window}, with ALiBi" if self.has_alibi else window


# Plans by model, kind of cache and form of layers. vLLM divides layers of one form into groups;
# each has a builder and a block table, and all have the same lengths.
_PLANS: WeakValueDictionary[Any, Plans] = WeakValueDictionary()


@dataclass
class Metadata:
    """A step.

    Masks are built by the first layer that needs one, in a CUDA graph at each replay.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    offsets: torch.Tensor
    steps: dict[Form, Step]  # without a mask
    causal: torch.Tensor | None = None  # a flag of each request, where they differ
    # Spans of image tokens that see each other, (requests, n, 2). Gemma 4 takes them, by this name,
    # from the layers that have no window.
    mm_prefix_range_tensor: torch.Tensor | None = None
    masked: dict[int, Step] | None = None  # by the number of heads
    masks: dict[Any, cumla.AttentionMask] | None = None
    reference: cumla.AttentionMask | None = None  # of all layers, with reference windows

    def mask(self, window: int | None, clamp: bool) -> cumla.AttentionMask | None:
        """Return what the tokens of layers with a window see, or None for the plain steps."""
        if self.reference is not None:
            return self.reference
        spans, flags = self.mm_prefix_range_tensor, self.causal
        if spans is None and flags is None:
            return None
        assert self.masks is not None
        key = window, clamp, spans is None, current_capture(self.block_table.device)
        if key in self.masks:
            return self.masks[key]
        options: dict[str, Any] = {"qo_indptr": self.offsets, "kv_lens": self.kv_lens}
        options |= {"window": window, "total_tokens": self.num_actual_tokens}
        found = []
        if flags is not None:
            flags = flags.bool()  # in a graph, at each replay
            found.append(cumla.AttentionMask.causal_flags(flags, **options))
        if spans is not None:
            found.append(cumla.AttentionMask.image_spans(spans, clamp=clamp, **options))
        mask = found[0]
        if len(found) > 1:  # what either shows: both intervals hold the token's own key
            starts, ends = zip(*((each.start, each.end) for each in found), strict=True)
            mask = cumla.AttentionMask(torch.minimum(*starts), torch.maximum(*ends))
        self.masks[key] = mask
        return mask


class Builder(AttentionMetadataBuilder[Metadata]):
    """Tells the layers of a step what its schedules follow from."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _refuse(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        self._config = vllm_config
        # Layers of a form share a plan; all plans of a step are in use at once.
        self._plans = {
            form: _plans_of(form, kv_cache_spec, vllm_config, device)
            for form in {layers[name].impl.form for name in layer_names}
        }
        for name in layer_names:
            layers[name].impl.settle(device)
        window = getattr(vllm_config.model_config, "rswa_window", None)
        self._reference = ReferenceWindows(window, vllm_config, device) if window else None
        self._others: dict[Any, Plans] = {}  # of steps that are not causal, and of those with masks
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
                    is_invariant=is_invariant(),
                )
                for (form, num_kv_heads, head_size), count in impls.items()
            },
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, *_: Any) -> AttentionCGSupport:
        """Serve graphs of all steps, unless vLLM divides them, or some have images and masks."""
        if divides_steps(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if _has_spans(vllm_config):  # the rest of a prompt may have as many tokens as drafts
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Begin a step for each form of layers."""
        common = common_attn_metadata
        if self._reference is not None:
            return self._with_reference(common, self._reference)
        plans, flags = self._plans, None
        if common.causal is not True:
            self._refuse_alibi()
            flags = common.causal if isinstance(common.causal, torch.Tensor) else None
            plans = {} if flags is not None else {f: self._other(f, "all") for f in plans}
        metadata = Metadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            {form: self._begin(common, of_form, form) for form, of_form in plans.items()},
        )
        if flags is not None or common.mm_req_doc_ranges:
            self._add_mask(metadata, common, flags)
        return metadata

    def _with_reference(self, common: Any, reference: ReferenceWindows) -> Metadata:
        """Begin a step whose requests are two each; in vLLM, too, windows of layers do nothing."""
        if common.causal is not True or common.mm_req_doc_ranges:
            raise refusal(
                self._config.model_config,
                "rswa_window: cumla's backend has causal steps alone beside reference windows, got "
                "another, or images whose tokens see each other; leave out --attention-config",
            )
        self._refuse_alibi()
        tokens = common.num_actual_tokens
        kv_lens, offsets, table, mask = reference.fill(common)
        metadata = Metadata(tokens, table, kv_lens, offsets, {}, reference=mask, masked={})
        assert metadata.masked is not None
        for num_heads in {form.num_heads for form in self._plans}:
            form = Form(num_heads, None)
            plans = self._other(form, "rows")
            metadata.masked[num_heads] = self._begun(form, plans, kv_lens, offsets, tokens)
        return metadata

    def _begin(self, common: Any, plans: Plans, form: Form) -> Step:
        tokens = common.num_actual_tokens
        return self._begun(form, plans, common.seq_lens, common.query_start_loc, tokens)

    def _begun(
        self, form: Form, plans: Plans, kv_lens: torch.Tensor, offsets: torch.Tensor, tokens: int
    ) -> Step:
        shape = len(kv_lens), tokens, form.num_heads, self.kv_cache_spec.head_size
        return plans.begin(cumla.AttentionPlan, shape, kv_lens, offsets)

    def _add_mask(self, metadata: Metadata, common: Any, flags: torch.Tensor | None) -> None:
        """Begin steps with a mask where some request is not causal, or a query is in an image."""
        spans = _spans(common, self.device) if common.mm_req_doc_ranges else None
        if flags is None and spans is None:
            return
        self._refuse_alibi()
        metadata.causal = flags
        metadata.mm_prefix_range_tensor = spans
        metadata.masks, metadata.masked = {}, {}
        for num_heads in {form.num_heads for form in self._plans}:
            form = Form(num_heads, None)  # the window is the mask's
            metadata.masked[num_heads] = self._begin(common, self._other(form, "rows"), form)

    def _refuse_alibi(self) -> None:
        """Refuse ALiBi where a query sees later keys, whose distance counts there."""
        if any(form.has_alibi for form in self._plans):
            raise refusal(
                self._config.model_config,
                "alibi_slopes: cumla's backend has no ALiBi in steps with images, with requests "
                "that are not causal, or with reference windows; leave out --attention-backend "
                "CUSTOM",
            )

    def _other(self, form: Form, sees: str) -> Plans:
        plans = self._others.get((form, sees))
        if plans is None:
            plans = _plans_of(form, self.kv_cache_spec, self._config, self.device, sees)
            self._others[form, sees] = plans
        return plans

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Load the kernels of a step that will be captured."""
        metadata = self.build(0, common_attn_metadata)
        for step in (*metadata.steps.values(), *(metadata.masked or {}).values()):
            step.prepare()
        return metadata


def _refuse(vllm_config: Any) -> None:
    """Refuse models whose steps the plugin would compute by another rule."""
    model = vllm_config.model_config
    if _has_spans(vllm_config) and divides_steps(vllm_config):
        raise refusal(
            model,
            "enable_dbo: vLLM tells no micro-batch where its images are, and cumla's backend "
            "would let their tokens see no later ones; leave out --enable-dbo",
        )
    if getattr(model, "rswa_window", None) and divides_steps(vllm_config):
        raise refusal(
            model,
            "enable_dbo: vLLM tells no micro-batch where its prompts end, and with reference "
            "windows cumla's backend would take them for generated tokens; leave out --enable-dbo",
        )


def _has_spans(vllm_config: Any) -> bool:
    """Return whether image tokens of the model see each other."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def _spans(common: Any, device: torch.device) -> torch.Tensor | None:
    """Return the spans that hold query tokens of a step, None for a step without them.

    vLLM lists those of a request in all its steps, decoding included. Its upper bound of the
    lengths is exact for prompts.
    """
    if common.max_query_len == 1:
        return None
    starts, bounds = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
    lengths = [0] * len(starts) if bounds is None else bounds.tolist()
    requests = range(len(starts) - 1)
    images = [common.mm_req_doc_ranges.get(request, ()) for request in requests]
    firsts = [lengths[r] - (starts[r + 1] - starts[r]) for r in requests]
    return image_spans(images, firsts, device)


def _plans_of(
    form: Form, spec: Any, vllm_config: Any, device: torch.device, sees: str = "causal"
) -> Plans:
    """Return the plans of a form of layers, those of another builder where the layers are alike.

    Tokens see "causal" keys, "all" of them, as far as the window goes on both sides, or "rows" of a
    mask.
    """
    windows: dict[str, dict[str, Any]] = {
        "causal": {"window": form.window},
        "all": {"causal": False, "window": (form.window, form.window)},
        "rows": {"mask_form": "rows"},
    }

    if form.has_alibi:
        windows[sees]["bias_form"] = "linear"

    def make() -> Plans:
        return Plans(
            device,
            {"num_kv_heads": spec.num_kv_heads} | invariance(is_invariant()),
            page_size=spec.block_size,
            dtype=vllm_config.model_config.dtype,
            cache_dtype=cache_dtype(spec.dtype),
            **windows[sees],
        )

    if divides_steps(vllm_config):  # parts of a step run beside each other, with a builder each
        return make()
    sizes = spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype
    # All that plans are made with: captured steps may outlive a model, whose id another one gets.
    key = id(vllm_config), str(device), form, sees, *sizes, vllm_config.model_config.dtype
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
        if alibi_slopes is not None and (logits_soft_cap or head_size > MOST_COLUMNS):
            raise refusal(
                get_current_vllm_config().model_config,
                f"alibi_slopes: needs heads of at most {MOST_COLUMNS} columns and no soft cap, got "
                f"{head_size} and {logits_soft_cap}; leave out --attention-backend CUSTOM",
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._sinks: torch.Tensor | None = None
        self._softcap = logits_soft_cap or None
        self._slopes = alibi_slopes
        self._bias: cumla.AttentionBias | None = None  # of the slopes, on the device
        # W tokens are a window of W - 1 to the left, and one's own.
        window = None if sliding_window is None else sliding_window - 1
        self.form = Form(num_heads, window, alibi_slopes is not None)

    def settle(self, device: torch.device) -> None:
        """Bring the slopes to the device, before any step."""
        if self._slopes is not None and self._bias is None:
            slopes = torch.tensor(self._slopes, dtype=torch.float32, device=device)
            self._bias = cumla.AttentionBias(slopes)

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
        clamp = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        mask = attn_metadata.mask(self.form.window, clamp)
        if mask is None:
            step = attn_metadata.steps[self.form]
        else:
            assert attn_metadata.masked is not None
            step = attn_metadata.masked[self.num_heads]
        step.run(
            query[:tokens],
            *_pages(kv_cache),
            block_table=attn_metadata.block_table,
            mask=mask,
            bias=self._bias,
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
    """Answers to vLLM before it takes this backend; vLLM raises the errors of refused models."""

    impl = Impl
    builder = Builder
    forward_includes_kv_cache_update = False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Serve models whose image tokens see each other."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """Serve models with reference windows."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Serve steps, and requests, that are not causal."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Return the axes of a cache for versions that ask, as later ones have them."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


def _pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, of pages ``(num_blocks, num_kv_heads, block_size, 2 * head_size)``.

    In memory the axes may have another order.
    """
    keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
    return keys, values


def _factors(layer: Any, kv_cache: torch.Tensor) -> dict[str, Any]:
    return {
        "k_scale": factor(layer._k_scale, kv_cache),
        "v_scale": factor(layer._v_scale, kv_cache),
    }
