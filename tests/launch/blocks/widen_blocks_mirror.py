# SPDX-License-Identifier: Apache-2.0
"""The oracle of cuda/blocks/widen_blocks.cu: blocks of e4m3 caches, as numbers of 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def widened(
    cache: Any, table: Any, slots: Sequence[tuple[int, int]], block_size: int, dtype: Any
) -> dict[int, Any]:
    """The rows of each kv head, by slots; those whose page does not exist are not written.

    `cache` is (pages, page size, kv heads, columns); a slot has a request and a block of it.
    """
    found = {}
    for slot, (request, block) in enumerate(slots):
        column, row = divmod(block * block_size, cache.shape[1])
        page = table[request, column] if request >= 0 and column < table.shape[1] else -1
        if 0 <= page < len(cache):
            rows = cache[page, row : row + block_size].swapaxes(0, 1)
            found[slot] = rows.astype(np.float32).astype(dtype)
    return found
