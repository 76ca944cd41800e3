# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of cuda/split/ragged_schedule.cu in NumPy: the kernel's oracle."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from cumla.launch.split.plan import BLOCK_TOKENS, MOST_TOKENS, ROW_TILE, RULES, RaggedKey

_THREADS = 1024


class TileSchedule(NamedTuple):
    """Who works on which KV blocks.

    Attributes
    ----------
    places : numpy.ndarray
        ``(tiles, 5)`` int64: tokens, first_row, q_len, q_begin and pages of the row tile at each
        place.
    bounds : numpy.ndarray
        ``(parts + 1, 2)`` int32: (place, block) where each part begins; part i ends where i + 1
        begins.
    """

    places: np.ndarray
    bounds: np.ndarray


def schedule(
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    kv_indptr: np.ndarray | None,
    key: RaggedKey,
    is_whole: bool | None = None,
) -> TileSchedule:
    """Deal the KV blocks of all row tiles out to the parts; the mirror of the kernel.

    Parameters
    ----------
    qo_indptr, kv_lens, kv_indptr : numpy.ndarray
        As of :func:`cumla.launch.split.ragged_schedule.ragged_schedule_launch`.
    key : RaggedKey
        The plan's shape.
    is_whole : bool, optional
        Of a mixed batch: whether its whole tiles are asked for, or the others.

    Returns
    -------
    TileSchedule
        The tiles dealt out like cards; where that leaves a part too dear, equal shares of the
        summed cost, which cut a tile where one ends; where that is no dearer, equal pieces of each
        tile, one a part.
    """
    group = key.heads_per_group
    indptr = np.asarray(qo_indptr, np.int64)
    begins = np.clip(indptr[:-1], 0, key.total_tokens)
    counts = np.maximum(np.minimum(indptr[1:], key.total_tokens) - begins, 0)
    tokens = np.maximum(np.asarray(kv_lens, np.int64), 0)
    pages = np.arange(key.batch)
    if kv_indptr is not None:
        pages = np.asarray(kv_indptr, np.int64)[:-1]
        tokens = np.minimum(
            tokens, np.maximum(np.diff(np.asarray(kv_indptr, np.int64)), 0) * key.page_size
        )
    tokens = np.minimum(tokens, MOST_TOKENS)
    if is_whole is not None:
        counts = np.where(_are_whole(counts * group, tokens, key) == is_whole, counts, 0)
        key = key.beside if is_whole else key

    tiles_of = -(-counts * group // key.row_tile)
    request = np.repeat(np.arange(key.batch), tiles_of)
    index = np.arange(len(request)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    request, index = request[: key.num_places], index[: key.num_places]
    first = index * key.row_tile
    columns = (tokens[request], first, counts[request], begins[request], pages[request])
    dealt = [np.arange(part, len(request), key.parts) for part in range(key.parts)]
    places = np.stack(columns, axis=1)[np.concatenate(dealt)]

    last_row = np.minimum(places[:, 1] + key.row_tile, places[:, 2] * group) - 1
    hidden = places[:, 2] - 1 - last_row // group if key.causal else 0
    blocks = -(-np.maximum(places[:, 0] - hidden, 0) // BLOCK_TOKENS)
    before = np.zeros(len(blocks), np.int64)  # blocks before the windows of all rows
    if key.schedule_window >= 0:
        first = places[:, 0] - places[:, 2] + places[:, 1] // group - key.schedule_window
        before = np.maximum(first, 0) // BLOCK_TOKENS
        blocks -= before
    if key.row_tile > ROW_TILE and len(blocks) <= _THREADS:  # whole tiles
        is_full = places[:, 2] * group - places[:, 1] > ROW_TILE
        order = np.argsort(blocks * (1 + is_full), kind="stable")
        places, blocks = places[order], blocks[order]
    bounds = _bounds(blocks, [len(own) for own in dealt], key)
    cuts = bounds[:, 1] > 0
    bounds[cuts, 1] += before[bounds[cuts, 0]].astype(np.int32)
    return TileSchedule(places, bounds)


def _bounds(blocks: np.ndarray, dealt: list[int], key: RaggedKey) -> np.ndarray:
    """Find where parts begin; `dealt`: how many places each gets if none is cut."""
    ends = np.cumsum(blocks + RULES.fixed_cost)
    share = max(-(-int(ends[-1] if len(ends) else 0) // key.parts), RULES.min_share)
    bounds = np.zeros((key.parts + 1, 2), np.int32)
    bounds[:, 0] = np.cumsum([0, *dealt])
    prices = np.diff(np.append(0, ends)[bounds[:, 0]])
    if prices.max() <= share + RULES.fixed_cost + 2 * key.piece_cost:
        return bounds
    bounds[:, 0] = len(blocks)
    for part, at in enumerate(range(0, min(key.parts * share, int(ends[-1])), share)):
        place = int(np.searchsorted(ends, at, side="right"))
        block = at - int(ends[place] - blocks[place] - RULES.fixed_cost)
        if block < key.min_blocks:
            bounds[part] = place, 0
        elif blocks[place] - block < key.min_blocks:
            bounds[part] = place + 1, 0
        else:
            bounds[part] = place, block
    pieces = _whole_tiles_cut(blocks, key, share, _dearest(bounds, ends, blocks, key))
    if pieces is not None:
        counts = np.asarray(pieces)
        tile = np.repeat(np.arange(len(blocks)), counts)
        piece = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        size, rest = np.divmod(blocks, counts)
        bounds[:, 0], bounds[:, 1] = len(blocks), 0
        bounds[: len(tile), 0] = tile
        bounds[: len(tile), 1] = piece * size[tile] + np.minimum(piece, rest[tile])
    return bounds


def _are_whole(rows: np.ndarray, tokens: np.ndarray, key: RaggedKey) -> np.ndarray:
    """Tell which requests of a mixed batch are whole tiles."""
    blocks = -(-tokens // BLOCK_TOKENS)
    total = int((-(-rows // key.beside.row_tile) * blocks).sum())
    is_full = rows > ROW_TILE
    return is_full | (is_full.any() & (blocks * key.shares <= total))


def _dearest(bounds: np.ndarray, ends: np.ndarray, blocks: np.ndarray, key: RaggedKey) -> int:
    """Tell what the dearest part between these bounds costs."""
    starts = np.append(ends - blocks - RULES.fixed_cost, ends[-1])
    dearest = 0
    for (place, block), (next_place, next_block) in itertools.pairwise(bounds.tolist()):
        cost = starts[next_place] + next_block - starts[place] - block
        if next_block > (block if next_place == place else 0):
            cost += RULES.fixed_cost + key.piece_cost
        if block > 0 and next_place != place:
            cost += key.piece_cost
        dearest = max(dearest, int(cost))
    return dearest


def _whole_tiles_cut(
    blocks: np.ndarray, key: RaggedKey, share: int, dearest: int
) -> list[int] | None:
    """Count the pieces of each tile if each part has one, unless that is dearer."""
    if len(blocks) > key.parts:
        return None
    least, found = max(share - RULES.fixed_cost, key.min_blocks), None
    for size in range(least, least + 32):
        pieces = [max(min(-(-b // size), b // key.min_blocks), 1) for b in blocks.tolist()]
        costs = [
            -(-b // n) + RULES.fixed_cost + (key.piece_cost if n > 1 else 0)
            for b, n in zip(blocks.tolist(), pieces, strict=True)
        ]
        if sum(pieces) <= key.parts and max(costs) <= dearest:
            dearest, found = max(costs) - 1, pieces  # a later size must be cheaper
    return found
