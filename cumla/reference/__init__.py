# SPDX-License-Identifier: Apache-2.0
"""What every operation means, in NumPy.

The functions here have the names and arguments of the public operations. They are the oracle of the
tests, and they compute whatever is called with arrays in CPU memory.
"""

from cumla.reference.cache import append_mla_cache
from cumla.reference.indexer import mqa_logits, paged_mqa_logits
from cumla.reference.indexer_cache import QuantizedRows, append_indexer_cache, quantize_fp8
from cumla.reference.merge import AttentionState, merge_attention_states
from cumla.reference.mla import MLADecodeResult, mla_decode
from cumla.reference.ragged import MLAAttentionResult, mla_attention

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
