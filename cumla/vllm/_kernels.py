# SPDX-License-Identifier: Apache-2.0
"""What cumla's kernels need, as vLLM asks for it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of the caches that the kernels read


class Kernels:
    """The part of a backend that both kinds of attention share: comes before its own base class."""

    impl: ClassVar[type]
    builder: ClassVar[type]
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry, where vLLM looks it up."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the class of the layers."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the class that prepares a step."""
        return cls.builder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Prefer pages of whole 64-token blocks; any others work as well."""
        return default_block_size if default_block_size % 64 == 0 else 64

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Tell whether the kernels run there."""
        return (capability.major, capability.minor) == (9, 0)


def factor(scale: torch.Tensor, cache: torch.Tensor) -> torch.Tensor | None:
    """Return a scale as the kernels of an FP8 cache take it, None for other caches."""
    return scale.view(1) if cache.dtype.itemsize == 1 else None
