# SPDX-License-Identifier: Apache-2.0
"""As much of SGLang as the plugin stands on, for tests without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tests.bindings.stand_in import standing_in


class Mode(Enum):
    """The modes of a step."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "verify"

    def is_decode_or_idle(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY


class DecoderType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Base:
    """A base class that asks for nothing."""


class WindowPool:
    """A memory pool with a part of its own for layers with windows."""


class TreeMaskMode(Enum):
    """How masks of trees of drafts lie."""

    FULL_MASK = 0
    QLEN_ONLY = 1


@dataclass(frozen=True)
class VerifyMask:
    """What SGLang writes such masks to."""

    buffer: Any
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True

    def fits(self, bs: int) -> bool:
        return bs <= self.max_bs


class Handlers:
    found: dict[str, Any]

    @classmethod
    def register(cls, name: str, handler: Any) -> None:
        cls.found[name] = handler

    @classmethod
    def get_handler(cls, name: str) -> Any:
        return f"as {name}"


class SparseBackend:
    """SGLang's own for sparse MLA: it passes slots to the kernel that it was told to take."""

    def __init__(self, runner: Any) -> None:
        vars(self).update(runner.sparse)
        self.dsa_prefill_impl = self.dsa_decode_impl = "flashmla_auto"
        self.enable_auto_select_prefill_impl = True
        self.supports_mha_one_shot = True
        self.device = runner.device

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.lengths = forward_batch.lengths

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool) -> None:
        self.lengths.copy_(forward_batch.lengths)

    def forward_decode(
        self, q: Any, cache: Any, slots: Any, *, q_rope: Any = None, attn_sink: Any = None
    ) -> Any:
        assert attn_sink is None or self.dsa_decode_impl == "flashmla_sparse"
        assert self.dsa_decode_impl == self.dsa_prefill_impl
        assert self.get_topk_transform_method("extend") == "slots"  # type: ignore[attr-defined]
        if q_rope is None:
            q, q_rope = q[..., :512], q[..., 512:]
        host: Any = self.hisparse_coordinator  # type: ignore[attr-defined]
        if host is not None:
            slots = host.swap_in_selected_pages(None, self.lengths, slots, 0)
        if self.dsa_decode_impl == "fa3":
            return self._forward_fa3(  # type: ignore[attr-defined]
                q_rope=q_rope,
                kv_cache=cache,
                v_head_dim=512,
                q_nope=q,
                page_table=slots,
                cache_seqlens=self.lengths,
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                max_seqlen_q=1,
                sm_scale=0.1,
                logit_cap=0.0,
                page_size=1,
            )
        import torch

        return self._forward_flashmla_sparse(  # type: ignore[attr-defined]
            q_all=torch.cat([q, q_rope], -1),
            kv_cache=cache,
            page_table_1=slots,
            sm_scale=0.1,
            v_head_dim=512,
            topk_length=self.lengths,
            attn_sink=attn_sink,
        )

    forward_extend = forward_decode

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return IndexerMetadata(
            attn_metadata=forward_batch.step,
            topk_transform_method="slots",
            force_unfused_topk=self.hisparse_coordinator is not None,  # type: ignore[attr-defined]
        )

    def _build_topk_v2_plan(self, seqlens_expanded: Any) -> Any:
        return "SGLang's plan"

    def _refresh_paged_mqa_schedule_metadata(self, metadata: Any, seqlens_32_2d: Any) -> None:
        metadata.schedule = "SGLang's"


@dataclass(frozen=True)
class IndexerMetadata:
    """What SGLang's indexer reads of a step."""

    attn_metadata: Any
    topk_transform_method: str
    force_unfused_topk: bool = False
    paged_mqa_schedule_metadata: Any = None

    def get_seqlens_int32(self) -> Any:
        return self.attn_metadata.cache_seqlens_int32

    def get_seqlens_expanded(self) -> Any:
        return self.attn_metadata.dsa_seqlens_expanded

    def get_page_table_64(self) -> Any:
        return self.attn_metadata.real_page_table

    def get_token_to_batch_idx(self) -> Any:
        return self.attn_metadata.token_to_batch_idx

    def get_dsa_extend_len_cpu(self) -> Any:
        return self.attn_metadata.dsa_extend_seq_lens_list


class Pool:
    """The keys of an indexer as SGLang keeps them: a row of bytes for each page."""

    index_page_size = 64
    keys: Any = None


def indexer_class() -> Any:
    """Make SGLang's class of a layer's indexer, of which the plugin replaces a method."""

    class Indexer:
        index_topk = 24
        num_init_tokens = num_local_tokens = 0

        def _get_topk_paged(self, *args: Any) -> Any:
            self.asked = args
            return "SGLang's"

        def _get_index_k_read_buffer(self, pool: Any, layer_id: int) -> Any:
            return pool.keys

        def _mask_init_and_local_tokens(self, logits: Any, lengths: Any) -> None:
            """Mask nothing."""

    return Indexer


class Hooks:
    """SGLang's registry of hooks; each is around a function."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        assert kind == "around"
        assert target not in self.found
        self.found[target] = hook


def deep_gemm_is_missing() -> Any:
    raise ModuleNotFoundError("No module named 'deep_gemm'")


choices: list[str] = []
deterministic: tuple[list[str], list[str]] = (
    [],
    [],
)  # the backends, and those with cached prefixes
backends: dict[str, Any] = {}
absorbing: list[str] = []


def register_attention_backend(name: str) -> Any:
    return lambda make: backends.__setitem__(name, make)


@contextmanager
def stubbed(
    version: str = "0.5.23",
    drafts: int | None = None,
    topk: int | None = None,
    dcp: int = 1,
    is_deterministic: bool = False,
    in_two: bool = False,
    asked: tuple[str, str] = ("cumla", "cumla"),
) -> Iterator[Hooks]:
    """Let the plugin import the stub; the hooks are those that it registers."""
    hooks = Hooks()
    dsa = "sglang.srt.layers.attention.dsa"
    of_deep_gemm = {
        f"resolve_{name}": deep_gemm_is_missing
        for name in (
            *("num_sms", "paged_mqa_logits_metadata_fn"),
            *("fp8_paged_mqa_logits_fn", "fp8_mqa_logits_fn"),
        )
    }
    spec = SimpleNamespace(speculative_num_draft_tokens=drafts, speculative_eagle_topk=topk)
    parallel = SimpleNamespace(attn_dcp_size=dcp)
    mode = SimpleNamespace(enable_deterministic_inference=is_deterministic)
    overlap = SimpleNamespace(enable_two_batch_overlap=in_two)
    common = "sglang.srt.models.deepseek_common"
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": choices,
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": deterministic[0],
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": deterministic[1],
        },
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": Base},
        "sglang.srt.layers.attention.verify_mask": {"VerifyMask": VerifyMask},
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": TreeMaskMode},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": WindowPool},
        "sglang.srt.models": {},
        common: {},
        f"{common}.attention_backend_handler": {
            "AttentionBackendRegistry": Handlers,
            "AttnForwardMethod": SimpleNamespace(MLA="absorbed"),
        },
        "sglang.srt.configs": {},
        "sglang.srt.configs.model_config": {
            "is_deepseek_dsa": lambda config: hasattr(config, "index_topk")
        },
        dsa: {},
        f"{dsa}.dsa_topk_backend": {
            "TopkTransformMethod": SimpleNamespace(PAGED="slots", RAGGED="rows")
        },
        f"{dsa}.dsa_indexer_metadata": {"DSAIndexerMetadata": IndexerMetadata},
        f"{dsa}.dsa_indexer": of_deep_gemm
        | {"Indexer": indexer_class(), "get_token_to_kv_pool": lambda: Pool},
        f"{dsa}.utils": of_deep_gemm,
        f"{dsa}_backend": of_deep_gemm | {"DeepseekSparseAttnBackend": SparseBackend},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": hooks,
            "HookType": SimpleNamespace(AROUND="around"),
        },
        f"{common}.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": absorbing},
        "sglang.srt.runtime_context": {
            "attention_backends": lambda: asked,
            "get_exec": lambda: SimpleNamespace(deterministic=mode, overlap=overlap),
            "get_parallel": lambda: parallel,
            "get_spec": lambda: spec,
        },
    }
    with standing_in(contents, "cumla.sglang"):
        for known in (choices, *deterministic):
            known[:] = ["fa3"]
        absorbing[:] = ["fa3"]
        backends.clear()
        Handlers.found = {}
        yield hooks
