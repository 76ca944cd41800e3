# SPDX-License-Identifier: Apache-2.0
"""The oracle of cuda/blocks/block_tiles.cu: the lists of a row tile's query tokens become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

UNIT = 64


def united(lists: Sequence[Any], block: int) -> tuple[Any, Any]:
    """The blocks of all lists of tokens, ascending, and how many of each 64 keys each list has.

    The latter is (units of all blocks, lists): keys that a list has are the first of their unit.
    """
    blocks = np.unique(np.concatenate(lists) // block)
    first = (blocks[:, None] * block + np.arange(0, block, UNIT)).reshape(-1)
    counts = [
        ((tokens >= first[:, None]) & (tokens < first[:, None] + UNIT)).sum(1) for tokens in lists
    ]
    return blocks, np.stack(counts, axis=1)
