# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM AutoDeploy's cached attention over `cumla.attention` and `cumla.append_kv_cache`.

Its operations are functions here, and operations of PyTorch after `register`::

    from cumla.compat import auto_deploy

    auto_deploy.register()  # torch.ops.cumla.fused_mha_with_cache and the others
    auto_deploy.register("attention", "rope")  # the names that AutoDeploy has

The descriptors ``"cumla"``, for contiguous caches, and ``"cumla_paged"`` are registered.

The interface is that of TensorRT-LLM 0.19, the first release with AutoDeploy. Later releases rotate
outside of attention, without freqs_cis, and call the operations
``torch.ops.auto_deploy.triton_attention_...``: those are not here.

The module works without TensorRT-LLM. So it has AutoDeploy's own description of a batch, of a layer
and of its descriptors as well, nearly half of its lines. In the rest each operation is one function
with AutoDeploy's signature, from which its schema follows.

Differences from AutoDeploy:

* The caches are declared as written to, and the operations have the shapes of their results, also
  where values have another head_dim than keys.
* No operation waits for the GPU. Calls can be captured into a CUDA graph, after `cumla.prepare`,
  also those of mixed batches: `prepare_fused_mha_metadata` leaves requests without tokens in these.
* `fused_mha_with_cache` sees the history in the cache, and new tokens may begin inside a page.
* Requests whose tokens have no place in the cache, or in freqs_cis, do not write outside of it.
* Arguments that do not fit raise `TypeError` and `ValueError`. FP8 caches are refused.
"""

from __future__ import annotations

from cumla.compat._arguments import missing_from
from cumla.compat.auto_deploy.descriptors import (
    AttentionDescriptor,
    AttentionRegistry,
    CumlaAttention,
    CumlaPagedAttention,
)
from cumla.compat.auto_deploy.functions import (
    apply_rope_on_flattened_inputs,
    apply_rope_with_input_pos,
    fused_flattened_mha_with_cache,
    fused_flattened_mha_with_cache_rope_fusion,
    fused_flattened_mha_with_paged_cache,
    fused_mha_with_cache,
    fused_mha_with_paged_cache,
    prepare_fused_mha_metadata,
    prepare_paged_mha_metadata,
    scaled_dot_product_attention,
)
from cumla.compat.auto_deploy.ops import register
from cumla.compat.auto_deploy.sequence import (
    AttentionInfo,
    CacheConfig,
    PositionalEmbeddingConfig,
    SequenceInfo,
)

__all__ = [
    "AttentionDescriptor",
    "AttentionInfo",
    "AttentionRegistry",
    "CacheConfig",
    "CumlaAttention",
    "CumlaPagedAttention",
    "PositionalEmbeddingConfig",
    "SequenceInfo",
    "apply_rope_on_flattened_inputs",
    "apply_rope_with_input_pos",
    "fused_flattened_mha_with_cache",
    "fused_flattened_mha_with_cache_rope_fusion",
    "fused_flattened_mha_with_paged_cache",
    "fused_mha_with_cache",
    "fused_mha_with_paged_cache",
    "prepare_fused_mha_metadata",
    "prepare_paged_mha_metadata",
    "register",
    "scaled_dot_product_attention",
]
__getattr__ = missing_from(__name__, "tensorrt_llm._torch.auto_deploy")
