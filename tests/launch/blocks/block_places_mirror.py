# SPDX-License-Identifier: Apache-2.0
"""The oracle of cuda/blocks/block_places.cu: query tokens become row tiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def places(requests: Sequence[int], tile_tokens: int) -> list[tuple[int, int]]:
    """The first token and the tokens of each tile; `requests` are those of the tokens, or -1."""
    found, begin = [], 0
    for _, same in groupby(requests):
        end = begin + len(list(same))
        found += [(at, min(tile_tokens, end - at)) for at in range(begin, end, tile_tokens)]
        begin = end
    return found


def slots(
    requests: Sequence[int], tokens: Sequence[int], block_size: int, most: int
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """The first slot of each request that has query tokens, or -1, and the block of each slot.

    `tokens` are those that are cached, of the request of each query token.
    """
    first: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    end = 0
    for request, cached in zip(requests, tokens, strict=True):
        if request < 0 or request in first:
            continue
        blocks = -(-cached // block_size)
        fits = 0 < blocks <= most - end
        first[request] = end if fits else -1
        if fits:
            found += [(request, block) for block in range(blocks)]
        end = min(end + blocks, most)
    return first, found + [(-1, -1)] * (most - len(found))


def parts(count: int, number: int) -> list[int]:
    """The tiles of each part."""
    return [len(range(i, count, number)) for i in range(number)]
