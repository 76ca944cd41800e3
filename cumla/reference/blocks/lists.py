# SPDX-License-Identifier: Apache-2.0
"""The blocks that a list names, as a definition."""

from __future__ import annotations

import numpy as np

from cumla.reference.rows import Array


def chosen_blocks(
    entries: Array,
    seen: int,
    table: Array,
    block_size: int,
    page_size: int,
    num_pages: int,
    are_tokens: bool = False,
) -> Array:
    """Return the blocks that a list names: ascending, each once, and none that does not exist.

    An entry below 0, one whose block begins at or after the `seen` tokens, and one whose page is
    not in the cache stand for nothing.
    """
    blocks = entries.astype(np.int64)
    blocks = blocks[(blocks >= 0) & (blocks < 2**31)]
    if are_tokens:
        blocks = blocks // block_size
    blocks = np.unique(blocks[blocks * block_size < seen])
    pages = table[blocks * block_size // page_size]
    found: Array = blocks[(pages >= 0) & (pages < num_pages)]
    return found
