# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/ragged_schedule.cu: deals out KV blocks where query lengths differ.

:func:`schedule` is the same arithmetic in NumPy: the kernel's oracle.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_TOKENS, ROW_TILE
from cumla.launch.split.schedule import FIXED_COST, MIN_BLOCKS, MIN_SHARE, piece_cost

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.split.plan import RaggedKey

__all__ = ["SPECS", "TileSchedule", "ragged_schedule_launch", "schedule"]

SPECS = (
    KernelSpec(
        stem="ragged_schedule",
        package="cumla.cuda.split",
        entry="mla_attention_schedule",
        function="ragged_schedule",
        params="RaggedScheduleParams",
        threads=1024,
    ),
)

_PARAMS = struct.Struct("<QqQqQqQQQ12i")


def ragged_schedule_launch(
    key: RaggedKey,
    buffer: int,
    qo_indptr: ArrayView,
    kv_lens: ArrayView,
    kv_indptr: ArrayView | None,
) -> Launch:
    """Describe how to compute the schedule for these lengths into the plan's buffer.

    Parameters
    ----------
    key : RaggedKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer.
    qo_indptr, kv_lens : ArrayView
        ``(batch + 1,)`` and ``(batch,)`` int32.
    kv_indptr : ArrayView or None
        ``(batch + 1,)`` int32 where pages come as a list, None where as a block table.

    Returns
    -------
    Launch
    """
    layout = key.layout
    values = (
        qo_indptr.ptr,
        qo_indptr.strides[0] // 4,
        kv_lens.ptr,
        kv_lens.strides[0] // 4,
        0 if kv_indptr is None else kv_indptr.ptr,
        0 if kv_indptr is None else kv_indptr.strides[0] // 4,
        buffer + layout.places,
        buffer + layout.parts,
        buffer + layout.tickets,
        key.batch,
        key.total_tokens,
        key.num_places,
        key.parts,
        key.num_tickets,
        key.heads_per_group,
        key.page_size,
        key.causal,
        FIXED_COST,
        piece_cost(key.row_groups),
        MIN_BLOCKS,
        MIN_SHARE,
    )
    return Launch(SPECS[0], (1, 1, 1), _PARAMS, values)


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
) -> TileSchedule:
    """Deal the KV blocks of all row tiles out to the parts; the mirror of the kernel.

    Parameters
    ----------
    qo_indptr, kv_lens, kv_indptr : numpy.ndarray
        As of :func:`ragged_schedule_launch`.
    key : RaggedKey
        The plan's shape.

    Returns
    -------
    TileSchedule
        The tiles dealt out like cards; where that leaves a part too dear, equal shares of the
        summed cost, which cut a tile where one ends.
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

    tiles_of = -(-counts * group // ROW_TILE)
    request = np.repeat(np.arange(key.batch), tiles_of)
    index = np.arange(len(request)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    request, index = request[: key.num_places], index[: key.num_places]
    columns = (tokens[request], index * ROW_TILE, counts[request], begins[request], pages[request])
    dealt = [np.arange(part, len(request), key.parts) for part in range(key.parts)]
    places = np.stack(columns, axis=1)[np.concatenate(dealt)]

    last_row = np.minimum(places[:, 1] + ROW_TILE, places[:, 2] * group) - 1
    hidden = places[:, 2] - 1 - last_row // group if key.causal else 0
    blocks = -(-np.maximum(places[:, 0] - hidden, 0) // BLOCK_TOKENS)
    ends = np.cumsum(blocks + FIXED_COST)
    total = int(ends[-1]) if len(ends) else 0
    share = max(-(-total // key.parts), MIN_SHARE)
    bounds = np.zeros((key.parts + 1, 2), np.int32)
    bounds[:, 0] = np.cumsum([0, *map(len, dealt)])
    prices = np.diff(np.append(0, ends)[bounds[:, 0]])
    if prices.max() <= share + FIXED_COST + 2 * piece_cost(key.row_groups):
        return TileSchedule(places, bounds)
    bounds[:, 0] = len(places)
    for part, at in enumerate(range(0, min(key.parts * share, total), share)):
        place = int(np.searchsorted(ends, at, side="right"))
        block = at - int(ends[place] - blocks[place] - FIXED_COST)
        if block < MIN_BLOCKS:
            bounds[part] = place, 0
        elif blocks[place] - block < MIN_BLOCKS:
            bounds[part] = place + 1, 0
        else:
            bounds[part] = place, block
    return TileSchedule(places, bounds)
