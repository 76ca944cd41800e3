# SPDX-License-Identifier: Apache-2.0
"""What every operation means, in NumPy.

The functions here have the names and arguments of the public operations. They are the oracle of the
tests, and they compute whatever is called with arrays in CPU memory.

They take NumPy arrays and trust them: :func:`cumla.mla_decode` and the other operations, which take
arrays of all frameworks, check shapes, dtypes and flags. What these promise for any 32-bit value of
a length, an offset, a page number or a slot holds here, too. Memory grows with the tokens that are
read or written, one request at a time, not with the cache.
"""

from cumla.core.state import AttentionState
from cumla.reference.indexer.cache import append_indexer_cache
from cumla.reference.indexer.logits import mqa_logits
from cumla.reference.indexer.paged_logits import paged_mqa_logits
from cumla.reference.indexer.quantize import QuantizedRows, quantize_fp8
from cumla.reference.merge import merge_attention_states
from cumla.reference.mha.attention import attention
from cumla.reference.mha.cache import append_kv_cache
from cumla.reference.mha.rope import apply_rope
from cumla.reference.mla.attention import mla_attention
from cumla.reference.mla.cache import append_mla_cache
from cumla.reference.mla.decode import mla_decode
from cumla.reference.sparse.mla_sparse import mla_sparse_attention, mla_sparse_decode
from cumla.reference.sparse.top_k import TopKResult, top_k

__all__ = [
    "AttentionState",
    "QuantizedRows",
    "TopKResult",
    "append_indexer_cache",
    "append_kv_cache",
    "append_mla_cache",
    "apply_rope",
    "attention",
    "merge_attention_states",
    "mla_attention",
    "mla_decode",
    "mla_sparse_attention",
    "mla_sparse_decode",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_fp8",
    "top_k",
]
