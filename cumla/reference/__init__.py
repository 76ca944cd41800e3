# SPDX-License-Identifier: Apache-2.0
"""Definitions of all operations, in NumPy.

The functions here have the names and arguments of the public operations. They are the oracle of the
tests, and they compute whatever is called with arrays in CPU memory.

They take NumPy arrays and trust them: :func:`cumla.mla_decode` and the other operations, which take
arrays of all frameworks, check shapes, dtypes and flags. What these promise for any 32-bit value of
a length, an offset, a page number or a slot holds here, too. Memory grows with the tokens that are
read or written, one request at a time, not with the cache.
"""

from cumla.core.state import AttentionState as AttentionState
from cumla.reference.blocks.attention import block_sparse_attention as block_sparse_attention
from cumla.reference.blocks.scores import block_scores as block_scores
from cumla.reference.blocks.select import select_blocks as select_blocks
from cumla.reference.indexer.cache import append_indexer_cache as append_indexer_cache
from cumla.reference.indexer.logits import mqa_logits as mqa_logits
from cumla.reference.indexer.paged_logits import paged_mqa_logits as paged_mqa_logits
from cumla.reference.indexer.quantize import QuantizedRows as QuantizedRows
from cumla.reference.indexer.quantize import quantize_fp8 as quantize_fp8
from cumla.reference.merge import merge_attention_states as merge_attention_states
from cumla.reference.mha.attention import attention as attention
from cumla.reference.mha.cache import append_kv_cache as append_kv_cache
from cumla.reference.mha.rope import apply_rope as apply_rope
from cumla.reference.mla.attention import mla_attention as mla_attention
from cumla.reference.mla.cache import append_mla_cache as append_mla_cache
from cumla.reference.mla.decode import mla_decode as mla_decode
from cumla.reference.prefix_groups import find_prefix_groups as find_prefix_groups
from cumla.reference.sparse.mla_sparse import mla_sparse_attention as mla_sparse_attention
from cumla.reference.sparse.mla_sparse import mla_sparse_decode as mla_sparse_decode
from cumla.reference.sparse.top_k import TopKResult as TopKResult
from cumla.reference.sparse.top_k import top_k as top_k
