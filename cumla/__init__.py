# SPDX-License-Identifier: Apache-2.0
"""Raw CUDA attention kernels for NVIDIA Hopper: MLA, MHA and GQA, sparse attention, its indexer.

Arrays of CuPy, PyTorch, JAX and NumPy go in and come out; kernels are compiled when first used.
Importing this package touches no GPU; NumPy is loaded with the first name that computes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cumla.errors import (
    CompilationError,
    CumlaError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)

if TYPE_CHECKING:
    from cumla import reference as reference
    from cumla.blocks.attention import BlockSparsePlan, block_sparse_attention
    from cumla.blocks.scores import block_scores
    from cumla.blocks.select import select_blocks
    from cumla.blocks.step import BlockSparseStep
    from cumla.indexer.cache import append_indexer_cache
    from cumla.indexer.logits import mqa_logits
    from cumla.indexer.paged_logits import PagedMQALogitsPlan, paged_mqa_logits
    from cumla.indexer.quantize import QuantizedRows, quantize_fp8
    from cumla.merge import AttentionState, merge_attention_states
    from cumla.mha.attention import AttentionPlan, attention
    from cumla.mha.bias import AttentionBias
    from cumla.mha.cache import append_kv_cache
    from cumla.mha.mask import AttentionMask
    from cumla.mha.rope import apply_rope
    from cumla.mla.attention import MLAAttentionPlan, mla_attention
    from cumla.mla.cache import append_mla_cache
    from cumla.mla.decode import MLADecodePlan, mla_decode
    from cumla.prefix_groups import PrefixGroups, find_prefix_groups
    from cumla.preparation import prepare
    from cumla.sparse.dsa import DSAPlan
    from cumla.sparse.mla_sparse import MLASparsePlan, mla_sparse_attention, mla_sparse_decode
    from cumla.sparse.top_k import TopKResult, top_k

__version__ = "0.2.0"

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "AttentionPlan",
    "AttentionState",
    "BlockSparsePlan",
    "BlockSparseStep",
    "CompilationError",
    "CumlaError",
    "DSAPlan",
    "MLAAttentionPlan",
    "MLADecodePlan",
    "MLASparsePlan",
    "MissingDependencyError",
    "NotPreparedError",
    "PagedMQALogitsPlan",
    "PrefixGroups",
    "QuantizedRows",
    "TopKResult",
    "UnsupportedDeviceError",
    "append_indexer_cache",
    "append_kv_cache",
    "append_mla_cache",
    "apply_rope",
    "attention",
    "block_scores",
    "block_sparse_attention",
    "find_prefix_groups",
    "merge_attention_states",
    "mla_attention",
    "mla_decode",
    "mla_sparse_attention",
    "mla_sparse_decode",
    "mqa_logits",
    "paged_mqa_logits",
    "prepare",
    "quantize_fp8",
    "select_blocks",
    "top_k",
]

_NAMES = {  # public names, by the module that is loaded when one is first asked for
    "blocks.attention": ("BlockSparsePlan", "block_sparse_attention"),
    "blocks.scores": ("block_scores",),
    "blocks.select": ("select_blocks",),
    "blocks.step": ("BlockSparseStep",),
    "indexer.cache": ("append_indexer_cache",),
    "indexer.logits": ("mqa_logits",),
    "indexer.paged_logits": ("PagedMQALogitsPlan", "paged_mqa_logits"),
    "indexer.quantize": ("QuantizedRows", "quantize_fp8"),
    "merge": ("AttentionState", "merge_attention_states"),
    "mha.attention": ("AttentionPlan", "attention"),
    "mha.cache": ("append_kv_cache",),
    "mha.bias": ("AttentionBias",),
    "mha.mask": ("AttentionMask",),
    "mha.rope": ("apply_rope",),
    "mla.attention": ("MLAAttentionPlan", "mla_attention"),
    "mla.cache": ("append_mla_cache",),
    "mla.decode": ("MLADecodePlan", "mla_decode"),
    "prefix_groups": ("PrefixGroups", "find_prefix_groups"),
    "preparation": ("prepare",),
    "sparse.dsa": ("DSAPlan",),
    "sparse.mla_sparse": ("MLASparsePlan", "mla_sparse_attention", "mla_sparse_decode"),
    "sparse.top_k": ("TopKResult", "top_k"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # or every name would pass

    def __getattr__(name: str) -> Any:
        """Load what computes when it is first asked for: NumPy takes most of an import's time."""
        if name == "reference":
            return import_module("cumla.reference")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "reference"})
