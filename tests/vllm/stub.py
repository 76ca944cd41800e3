# SPDX-License-Identifier: Apache-2.0
"""As much of vLLM as the plugin stands on, for tests without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

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
        self.kv_cache_spec, self.vllm_config, self.device = spec, config, device


@dataclass
class DecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


def a_vllm(version: str, use_mla: bool) -> dict[str, ModuleType]:
    """The modules that the plugin imports, by name."""
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Backends,
            "register_backend": overrides.__setitem__,
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": Base,
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH=2, ALWAYS=3),
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
            "MLACommonMetadataBuilder": Base,
            "QueryLenSupport": SimpleNamespace(VARLEN="varlen"),
        },
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(values)
    return modules


@contextmanager
def stubbed(version: str = "0.32.0", use_mla: bool = True) -> Iterator[None]:
    """Let `import vllm` find the stub, and the plugin's modules be loaded anew."""
    stubs = a_vllm(version, use_mla)
    real = {name: sys.modules.get(name) for name in stubs}
    forget_the_plugin()
    overrides.clear()
    sys.modules.update(stubs)  # and keep whatever else is imported meanwhile, parts of torch say
    try:
        yield
    finally:
        for name, module in real.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        forget_the_plugin()


def forget_the_plugin() -> None:
    """Let the plugin's modules be loaded anew: their bases are those of one stub."""
    for name in [name for name in sys.modules if name.startswith("cumla.vllm.")]:
        del sys.modules[name]
        delattr(sys.modules["cumla.vllm"], name.rpartition(".")[2])
