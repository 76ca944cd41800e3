# SPDX-License-Identifier: Apache-2.0
"""As much of vLLM as the plugin stands on, for tests without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from tests.bindings.stand_in import CONFIG, PATH, standing_in

torch = pytest.importorskip("torch")
M = TypeVar("M")


class Backends(Enum):
    """The registry of backends."""

    FLASH_ATTN = "vllm.FlashAttention"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in overrides

    def get_path(self) -> str:
        path: str = overrides.get(self, self.value)
        return path


overrides: dict[Backends, str] = {}


class Base(Generic[M]):
    """A base class that asks for nothing."""

    need_to_return_lse_for_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(kwargs)


class SpecBuilder(Base[M]):
    """vLLM's own builder takes its arguments by position."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = spec, names
        self.vllm_config, self.device = config, device


class MLABuilder(SpecBuilder[M]):
    """Sets what the plugin's builder reads, and passes all of a step to its decoding."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: Any) -> None:
        super().__init__(spec, names, config, device)
        self.model_config, self.page_size = config.model_config, spec.block_size
        self.num_heads, self.dcp_world_size = config.num_heads, spec.dcp

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        decode = self._build_decode(**vars(common))  # type: ignore[attr-defined]
        return SimpleNamespace(decode=decode, prefill=getattr(common, "prefill", None))

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


class SparseBuilder(SpecBuilder[M]):
    """Tells of a step what vLLM's own does, whose prefills here are absorbed as decoding is."""

    metadata_cls: Any

    def __init__(self, spec: Any, names: list[str], config: Any, device: Any) -> None:
        super().__init__(spec, names, config, device)
        self.model_config, self.dcp_world_size = config.model_config, spec.dcp
        self.topk_tokens = config.model_config.hf_config.index_topk
        # A graph finds them where they were.
        self.req_id_per_token_buffer = torch.zeros(512, dtype=torch.int32, device=device)

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool) -> None:
        self.reorder_batch_threshold = threshold

    def _build_req_id_per_token(self, common: Any) -> Any:
        lengths = common.query_start_loc_cpu.diff()
        requests = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.req_id_per_token_buffer.zero_()
        self.req_id_per_token_buffer[: len(requests)] = requests.to(self.device)
        return self.req_id_per_token_buffer[: common.num_actual_tokens]

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        tokens, decodes = common.num_actual_tokens, common.num_decodes
        return self.metadata_cls(
            num_reqs=len(common.query_start_loc_cpu) - 1,
            num_actual_tokens=tokens,
            query_start_loc=common.query_start_loc,
            block_table=common.block_table_tensor,
            req_id_per_token=self._build_req_id_per_token(common),
            seq_lens=common.seq_lens,
            topk_tokens=self.topk_tokens,
            num_decodes=decodes,
            num_decode_tokens=int(common.query_start_loc_cpu[decodes]),
            prefill=getattr(common, "prefill", None),
        )

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


class HostedImpl(Base[M]):
    """Brings the rows that lists name from the host's memory, as vLLM 0.33 does (HiSparse).

    Layers get those of decoding and of prefills apart: slots of the rows, and their number.
    """

    topk_indices_buffer: Any

    def forward_mqa(self, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        total = len(q[0] if isinstance(q, tuple) else q)
        cut, found = min(metadata.num_decode_tokens, total), []
        for part in (slice(cut), slice(cut, total)):
            lists = self.topk_indices_buffer[:total][part]
            if not len(lists):
                continue
            pages = metadata.block_table[metadata.req_id_per_token[:total][part].long()]
            places, page = lists.clamp(min=0).long(), cache.shape[1]
            rows = pages.gather(1, places // page) * page + places % page
            data = cache.view(torch.uint8)
            kept = data.flatten(0, 1)[rows].reshape(-1, page, data.shape[-1])
            slots = torch.arange(lists.numel(), dtype=torch.int32).view_as(lists)
            found.append(
                self._forward_mqa_kernel(
                    tuple(each[part] for each in q) if isinstance(q, tuple) else q[part],
                    kept.view(cache.dtype),
                    torch.where(lists < 0, -1, slots),
                    lists.ge(0).sum(-1, dtype=torch.int32),
                    layer=layer,
                    block_size=page,
                    is_decode=part.stop == cut,
                )
            )
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs), None if lses[0] is None else torch.cat(lses)

    def _forward_mqa_kernel(self, q: Any, kv_cache: Any, *lists: Any, **options: Any) -> Any:
        raise NotImplementedError


class Workspace:
    """Memory for the keys of prefills."""

    def get_simultaneous(self, *wanted: Any) -> list[Any]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]


device = "cpu"  # of that memory
dcp_group: Any = None  # of torch.distributed
steps: dict[str, Any] | None = {}  # of layers, as the forward context has them


def sparse_attn_indexer(
    hidden_states: Any,
    k_cache_prefix: str,
    kv_cache: Any,
    q_quant: Any,
    q_scale: Any,
    k: Any,
    weights: Any,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: Any,
    skip_k_cache_insert: bool,
    use_pcp: bool,
    use_fp4_cache: bool = False,
    dcp_rank: int = 0,
    dcp_world_size: int = 1,
) -> Any:
    """The operation of vLLM, where it measures memory."""
    return topk_indices_buffer


def gather_keys(cache: Any, keys: Any, scales: Any, table: Any, starts: Any) -> None:
    """cp_gather_indexer_k_quant_cache: keys and scales of requests, one after another."""
    pages, page, _ = cache.shape
    rows = cache.view(pages, -1)
    of_keys = rows[:, : page * 128].view(pages, page, 128)
    of_scales = rows[:, page * 128 :].view(pages, page, 4)
    for i, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        places = torch.arange(end - begin, device=cache.device)
        at = table[i, places // page].long(), places % page
        keys.view(torch.uint8)[begin:end] = of_keys[at]
        scales[begin:end] = of_scales[at]


class GraphMode(Enum):
    """What CUDA graphs are captured of."""

    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)


@dataclass
class DecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


@contextmanager
def stubbed(
    version: str = "0.32.0",
    use_mla: bool = True,
    index_topk: int | None = None,
    dcp: int = 1,
    hosted: Any = None,
) -> Iterator[None]:
    """Let the plugin import the stub; `hosted` are options for rows in the host's memory."""
    of_model = {} if index_topk is None else {"index_topk": index_topk}
    config = SimpleNamespace(**vars(CONFIG) | of_model)
    model = SimpleNamespace(use_mla=use_mla, hf_config=config, model=PATH)
    asked = SimpleNamespace(backend=Backends.CUSTOM, backend_per_kind=None, hisparse_config=hosted)
    parallel = SimpleNamespace(decode_context_parallel_size=dcp)
    config = SimpleNamespace(model_config=model, attention_config=asked, parallel_config=parallel)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config": lambda: config, "CUDAGraphMode": GraphMode},
        "vllm.distributed": {"get_dcp_group": lambda: SimpleNamespace(device_group=dcp_group)},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Backends,
            "register_backend": overrides.__setitem__,
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": Base,
            "AttentionCGSupport": SimpleNamespace(
                UNIFORM_SINGLE_TOKEN_DECODE=1, UNIFORM_BATCH=2, ALWAYS=3
            ),
            "AttentionImpl": Base,
            "AttentionMetadata": Base,
            "AttentionMetadataBuilder": SpecBuilder,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {},
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": Base,
            "MLACommonDecodeMetadata": DecodeMetadata,
            "MLACommonImpl": Base,
            "MLACommonMetadata": Base,
            "MLACommonMetadataBuilder": MLABuilder,
            "QueryLenSupport": SimpleNamespace(VARLEN="varlen"),
        },
        "vllm.model_executor.layers.attention.sparse_mla_attention": {
            "SparseMLACommonImpl": HostedImpl if hosted else Base,
            "SparseMLACommonMetadataBuilder": SparseBuilder,
        },
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "sparse_attn_indexer": sparse_attn_indexer,
            "eager_break_during_capture": lambda function: function,
            "get_forward_context": lambda: SimpleNamespace(attn_metadata=steps),
            "_resolve_layer_name": lambda name: name,
            "current_workspace_manager": Workspace,
            "has_deep_gemm": lambda: True,
            "ops": SimpleNamespace(cp_gather_indexer_k_quant_cache=gather_keys),
        },
        "vllm.v1.attention.backends.mla": {},
        "vllm.v1.attention.backends.mla.indexer": {"has_deep_gemm": lambda: True},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(
                dispatch_key="CPU", fp8_dtype=lambda: torch.float8_e4m3fn
            )
        },
    }
    with standing_in(contents, "cumla.vllm"):
        overrides.clear()
        yield
        kept = [finder for finder in sys.meta_path if type(finder).__module__ != "cumla.vllm"]
        sys.meta_path[:] = kept
