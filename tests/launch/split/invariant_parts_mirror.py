# SPDX-License-Identifier: Apache-2.0
"""What cuda/split/invariant_parts.cu computes, in NumPy."""

from __future__ import annotations

import numpy as np

__all__ = ["parts_of"]


def parts_of(
    tiles: list[tuple[int, int]], places: int, parts: int, piece_blocks: int, max_pieces: int
) -> np.ndarray:
    """List the first ten numbers of struct Part.

    `tiles` are tokens of the request and its query rows of a kv head, of each row tile.
    """
    found = []
    for place, (tokens, rows) in enumerate(tiles):
        blocks = -(-tokens // 64)
        pieces = 1 if rows > 64 else min(max(1, -(-blocks // piece_blocks)), max_pieces)
        first, last = len(found), len(found) + pieces - 1
        for piece in range(pieces):
            block, index = piece * piece_blocks, first + piece
            end = (place + 1, 0) if index == last else (place, block + piece_blocks)
            found.append((place, block, 0, tokens, *end, first, last, 0, last))
    for index in range(len(found), parts):
        found.append((places, 0, 0, 0, places, 0, index, index, 0, index))
    return np.array(found, np.int32)
