# SPDX-License-Identifier: Apache-2.0
"""What cumla's kernels need, as vLLM asks for it; ``python -m cumla info --vllm`` asks the same.

Without torch and vLLM: a dtype is torch's, or its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cumla.launch.mha.attention import MOST_E4M3_COLUMNS
from cumla.mha.arguments import MAX_HEAD_DIM
from cumla.mla.shape import HEAD_DIM

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16")
FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of the caches that the kernels read
LOGGER = "vllm.cumla"  # vLLM shows what its own loggers, and those below, say
NO_ALIBI = "alibi_slopes: cumla's backend has no ALiBi"


class Kernels:
    """The part of a backend that both kinds of attention share: comes before its own base class."""

    impl: ClassVar[type]
    builder: ClassVar[type]
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
    def supports_dtype(cls, dtype: torch.dtype | str) -> bool:
        """Tell whether the kernels take a model of this dtype."""
        return dtype_name(dtype) in DTYPES

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Tell whether the kernels run there."""
        return (capability.major, capability.minor) == (9, 0)


class MLAKernels(Kernels):
    """Those of models with MLA."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the widths of a cached row."""
        return [HEAD_DIM]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Tell which widths of a cached row the kernels take."""
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Refuse layers with windows."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Refuse layers with a sink per head."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse float16 queries over an FP8 cache."""
        if dtype_name(dtype) == "float16" and kv_cache_dtype in FP8:
            return "an FP8 cache needs a model in bfloat16"
        return None


class MHAKernels(Kernels):
    """Those of models with MHA, GQA or MQA."""

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Tell which numbers of columns the kernels take."""
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Serve layers with windows, also beside layers without."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Serve layers with a sink per head."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse FP8 caches of columns that the kernels do not take."""
        if kv_cache_dtype in FP8 and (head_size % 16 or head_size > MOST_E4M3_COLUMNS):
            return (
                f"an FP8 cache needs a head size that is a multiple of 16, up to "
                f"{MOST_E4M3_COLUMNS}"
            )
        return None


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype of torch, or of a name."""
    return str(dtype).removeprefix("torch.")


def factor(scale: torch.Tensor, cache: torch.Tensor) -> torch.Tensor | None:
    """Return a scale as the kernels of an FP8 cache take it, None for other caches."""
    return scale.view(1) if cache.dtype.itemsize == 1 else None
