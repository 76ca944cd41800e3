# SPDX-License-Identifier: Apache-2.0
"""As much of vLLM as the plugin stands on, for tests without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from tests.bindings.stand_in import standing_in

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
def stubbed(version: str = "0.32.0", use_mla: bool = True) -> Iterator[None]:
    """Let the plugin import the stub."""
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config": lambda: config, "CUDAGraphMode": GraphMode},
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
    }
    with standing_in(contents, "cumla.vllm"):
        overrides.clear()
        yield
