# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's interface over cumla's operations: attention, rotation, caches, merging, top-k.

Code written for FlashInfer 0.6 or 0.7 runs by changing its import line::

    import cumla.compat.flashinfer as flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

Modules and names are where FlashInfer has them. Calls can be captured into a CUDA graph, after
`cumla.prepare`. Wrappers, and attention in one request, raise `ValueError`; other functions raise
`RuntimeError`, and so does a `run` without a plan.

Differences from FlashInfer:

* Inference only: no gradients flow.
* A state is an output ``v`` and its log-sum-exp ``s`` to base 2, as there. ``v`` of an empty state,
  whose ``s`` is -inf, may hold anything, NaN included; an ``s`` of +inf means empty, too.
* Tensors on the CPU are computed by `cumla.reference`.
"""

from __future__ import annotations

from cumla.compat._arguments import missing_from
from cumla.compat.flashinfer import (
    cascade,
    concat_ops,
    decode,
    mla,
    msa_ops,
    page,
    prefill,
    rope,
    topk,
)
from cumla.compat.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from cumla.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from cumla.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from cumla.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from cumla.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from cumla.compat.flashinfer.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from cumla.compat.flashinfer.topk import (
    TopKTieBreak,
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "TopKTieBreak",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "cascade",
    "concat_ops",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "msa_ops",
    "page",
    "prefill",
    "rope",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
]
__getattr__ = missing_from(
    __name__,
    "flashinfer",
    BatchDecodeMlaWithPagedKVCacheWrapper="BatchMLAPagedAttentionWrapper of cumla's mla",
)
