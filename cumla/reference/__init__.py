# SPDX-License-Identifier: Apache-2.0
"""What every operation means, in NumPy.

The functions here have the names and arguments of the public operations. They are the oracle of the
tests, and they compute whatever is called with arrays in CPU memory.
"""

from cumla.reference.indexer.cache import QuantizedRows, append_indexer_cache, quantize_fp8
from cumla.reference.indexer.logits import mqa_logits, paged_mqa_logits
from cumla.reference.merge import AttentionState, merge_attention_states
from cumla.reference.mla.attention import MLAAttentionResult, mla_attention
from cumla.reference.mla.cache import append_mla_cache
from cumla.reference.mla.decode import MLADecodeResult, mla_decode

__all__ = [
    "AttentionState",
    "MLAAttentionResult",
    "MLADecodeResult",
    "QuantizedRows",
    "append_indexer_cache",
    "append_mla_cache",
    "merge_attention_states",
    "mla_attention",
    "mla_decode",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_fp8",
]
