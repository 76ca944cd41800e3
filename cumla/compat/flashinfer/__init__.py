# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MLA interface over cumla's operations: attention, merging, writing into caches.

Code written for FlashInfer 0.6 or 0.7 runs by changing its import line::

    import cumla.compat.flashinfer as flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)

Modules and names are where FlashInfer has them: :mod:`~cumla.compat.flashinfer.mla`,
:mod:`~cumla.compat.flashinfer.cascade`, :mod:`~cumla.compat.flashinfer.page` and
:mod:`~cumla.compat.flashinfer.concat_ops`.

What carries over from FlashInfer:

* A state is an output ``v`` and its log-sum-exp ``s``, a logarithm to base 2. Where nothing was
  attended ``s`` is -inf, and a result that is empty has ``v`` 0.
* The kinds of errors: `ValueError` from the wrapper, `RuntimeError` from the functions.
* Calls can be captured into a CUDA graph, after `cumla.prepare`.
* It is for inference: no gradients flow.

What differs: ``v`` of an empty state may hold anything, NaN included, and an ``s`` of +inf means
empty, too. Tensors on the CPU are computed by `cumla.reference`.
"""

from __future__ import annotations

from cumla.compat.flashinfer import cascade, concat_ops, mla, page
from cumla.compat.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from cumla.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from cumla.compat.flashinfer.page import (
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "append_paged_mla_kv_cache",
    "cascade",
    "concat_ops",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "page",
]
