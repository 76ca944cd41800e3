# SPDX-License-Identifier: Apache-2.0
"""What every operation means, in NumPy.

The functions here have the names and arguments of the public operations. They are the oracle of the
tests, and they compute whatever is called with arrays in CPU memory.
"""

from cumla.reference.cache import append_mla_cache
from cumla.reference.merge import AttentionState, merge_attention_states
from cumla.reference.mla import MLADecodeResult, mla_decode

__all__ = [
    "AttentionState",
    "MLADecodeResult",
    "append_mla_cache",
    "merge_attention_states",
    "mla_decode",
]
