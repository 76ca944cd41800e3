# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla_schedule.cu: deals the KV blocks of all requests out to parts.

:func:`schedule` and :func:`invariant_schedule` are the same arithmetic in NumPy: the kernels'
oracles.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cumla.launch.kernel import PreparedLaunch
from cumla.launch.mla_plan import BLOCK_TOKENS, piece_blocks
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.arrays import ArrayView
    from cumla.launch.mla_plan import MLADecodeKey
    from cumla.launch.module import LoadedKernel

__all__ = [
    "CUT_COST",
    "FIXED_COST",
    "LONG_SHARE",
    "MIN_BLOCKS",
    "SPECS",
    "Schedule",
    "invariant_schedule",
    "max_tokens",
    "min_saving",
    "piece_cost",
    "prepare_schedule",
    "schedule",
    "schedule_spec",
]

FIXED_COST = 2  # of a request, or of a piece of one, in KV blocks: loads before, stores behind
CUT_COST = 16  # of cutting, in KV blocks, or what uneven parts may cost instead of it
MIN_BLOCKS = 4  # no cut of filled parts or of shares is closer to an end of its request
LONG_SHARE = 64  # cost of a share from which on even parts matter less
MIN_SHARE = 2  # cost of a share, or blocks of a piece, at least
_THREADS = 1024
_MAX_LIMITS = 16  # that are tried for filled parts
_FILLED_BOUNDS = 4096  # of all that are tried


def _spec(entry: str) -> KernelSpec:
    return KernelSpec(
        stem="mla_schedule",
        entry=entry,
        function=entry,
        params="MlaScheduleParams",
        threads=_THREADS,
    )


SPECS = (_spec("mla_schedule"), _spec("mla_schedule_invariant"))


def schedule_spec(key: MLADecodeKey) -> KernelSpec:
    """Choose the kernel for a shape: whether requests are cut at fixed positions."""
    return SPECS[key.batch_invariant]


_PARAMS = struct.Struct("<QqQQQ12i")


def prepare_schedule(
    kernel: LoadedKernel, key: MLADecodeKey, buffer: int, cache_seqlens: ArrayView, stream: int
) -> PreparedLaunch:
    """Prepare to compute the schedule for these lengths into the plan's buffer.

    Parameters
    ----------
    kernel : LoadedKernel
        Of :func:`schedule_spec`.
    key : MLADecodeKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer.
    cache_seqlens : ArrayView
        ``(batch,)`` int32.
    stream : int
        CUstream handle.

    Returns
    -------
    PreparedLaunch
        To be called.
    """
    layout = key.layout
    values = (
        cache_seqlens.ptr,
        cache_seqlens.strides[0] // 4,
        buffer + layout.seqlens,
        buffer + layout.parts,
        buffer + layout.tickets,
        key.batch,
        key.parts,
        key.num_tickets,
        FIXED_COST,
        CUT_COST,
        piece_cost(key.row_groups, 0),
        LONG_SHARE,
        MIN_BLOCKS,
        MIN_SHARE,
        min_saving(key.row_groups),
        key.max_blocks * BLOCK_TOKENS if key.batch_invariant else max_tokens(key.batch),
        piece_blocks(key.row_groups),
    )
    blocks = -(-key.parts // kernel.spec.threads) if key.batch_invariant else 1
    return PreparedLaunch(kernel, (blocks, 1, 1), _PARAMS, values, stream)


def min_saving(row_groups: int) -> int:
    """Tell how many KV blocks cutting a request must save: what joining costs, as measured.

    Parameters
    ----------
    row_groups : int
        Groups of 16 query rows, whose partial results are stored and joined.

    Returns
    -------
    int
        KV blocks.
    """
    return 1 + 2 * row_groups


def piece_cost(row_groups: int, share: int) -> int:
    """Tell how many KV blocks a piece of a request costs: to be stored, counted and joined.

    Parameters
    ----------
    row_groups : int
        Groups of 16 query rows, whose partial results are stored and joined.
    share : int
        An equal share of the cost. Long parts that end early leave the others bandwidth, and a
        higher clock, so that even ones are worth less: with more than LONG_SHARE, pieces are better
        priced at half.

    Returns
    -------
    int
        KV blocks, as measured with log-normal lengths.
    """
    cost = 2 * row_groups + 2
    return cost // 2 if share > LONG_SHARE else cost


def max_tokens(batch: int) -> int:
    """Tell how long a request may be: so that the summed cost of the batch stays below 2**30.

    Parameters
    ----------
    batch : int
        Requests.

    Returns
    -------
    int
        Tokens; longer requests count as this long. 2**31 - 64 up to a batch of 31.
    """
    return min(0x7FFFFFC0, ((1 << 30) // batch - FIXED_COST) * BLOCK_TOKENS)


class Schedule(NamedTuple):
    """Who works on which KV blocks.

    Attributes
    ----------
    bounds : numpy.ndarray
        ``(parts + 1, 2)`` int32: (request, block) where each part begins; part i ends where i + 1
        begins.
    splits : numpy.ndarray
        ``(requests that are cut, 3)`` int32: (request, first part, last part) in ascending order.
    """

    bounds: np.ndarray
    splits: np.ndarray


def schedule(cache_seqlens: np.ndarray, parts: int, row_groups: int) -> Schedule:
    """Deal the KV blocks of all requests out to ``parts``; the mirror of the kernel.

    Parameters
    ----------
    cache_seqlens : numpy.ndarray
        ``(batch,)`` integers, tokens of each request; negative counts as 0.
    parts : int
        How many shares to make.
    row_groups : int
        Groups of 16 query rows in a tile.

    Returns
    -------
    Schedule
        Each request in equal pieces of its own parts where there are two parts a request or more,
        short ones uncut; else whole requests in groups where that is no dearer; else parts that
        are filled up to a common limit, or, of more requests than the kernel has threads, equal
        shares of the summed cost, with requests cut where a part is full or a share ends.
    """
    lengths = np.clip(np.asarray(cache_seqlens, np.int64), 0, max_tokens(len(cache_seqlens)))
    batch = len(lengths)
    blocks = -(-lengths // BLOCK_TOKENS)
    ends = np.cumsum(blocks + FIXED_COST)
    starts = ends - blocks - FIXED_COST
    total = int(ends[-1])

    bounds = np.zeros((parts + 1, 2), np.int32)

    share = max(-(-total // parts), MIN_SHARE)
    saving = min_saving(row_groups)
    piece = _find_piece(blocks, parts, saving) if 2 * batch <= parts else 0
    if 0 < piece <= share + CUT_COST - FIXED_COST:
        pieces = _pieces(blocks, piece, saving)
        requests = np.repeat(np.arange(batch), pieces)
        index = np.arange(len(requests)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        bounds[1:, 0] = batch
        bounds[: len(requests), 0] = requests
        bounds[: len(requests), 1] = index * blocks[requests] // pieces[requests]
        return Schedule(bounds, _splits(bounds))

    many = batch > _THREADS
    limit = share + (CUT_COST if many else min(CUT_COST, share // 32))
    group = -(-batch // parts)
    price = int(np.diff(np.append(starts[::group], total)).max())
    places = np.minimum(np.arange(parts, dtype=np.int64) * share, total)
    if price > limit and not many:
        limit, places = _fill(starts, ends, parts, share, piece_cost(row_groups, share))
    if price <= limit:
        bounds[:, 0] = np.minimum(np.arange(parts + 1) * group, batch)
        return Schedule(bounds, _splits(bounds))

    bounds[1:, 0] = batch
    for index in np.flatnonzero(places < total):
        request = int(np.searchsorted(ends, places[index], side="right"))
        offset = int(places[index] - starts[request])
        bounds[index] = _place_cut(request, int(blocks[request]), offset)
    return Schedule(bounds, _splits(bounds))


def invariant_schedule(cache_seqlens: np.ndarray, max_blocks: int, row_groups: int) -> Schedule:
    """Cut each request at fixed positions, a part for each piece; the mirror of the kernel.

    Parameters
    ----------
    cache_seqlens : numpy.ndarray
        ``(batch,)`` integers, tokens of each request; negative counts as 0.
    max_blocks : int
        Most KV blocks of a request; longer ones count as that long.
    row_groups : int
        Groups of 16 query rows in a tile.

    Returns
    -------
    Schedule
        Cuts at multiples of :func:`cumla.launch.mla_plan.piece_blocks`. What is left at the end of
        a request is a piece of its own if that saves :func:`min_saving` blocks. Parts behind the
        last piece are empty.
    """
    lengths = np.clip(np.asarray(cache_seqlens, np.int64), 0, max_blocks * BLOCK_TOKENS)
    batch, size = len(lengths), piece_blocks(row_groups)
    blocks = -(-lengths // BLOCK_TOKENS)
    pieces = 1 + np.maximum(blocks - min_saving(row_groups), 0) // size
    requests = np.repeat(np.arange(batch), pieces)
    index = np.arange(len(requests)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bounds = np.zeros((batch * max(1, -(-max_blocks // size)) + 1, 2), np.int32)
    bounds[:, 0] = batch
    bounds[: len(requests), 0] = requests
    bounds[: len(requests), 1] = index * size
    return Schedule(bounds, _splits(bounds))


def _splits(bounds: np.ndarray) -> np.ndarray:
    """Find the requests that bounds cut: (request, first part, last part)."""
    inside = np.flatnonzero(bounds[:, 1] > 0)
    requests, first, count = np.unique(bounds[inside, 0], return_index=True, return_counts=True)
    splits = np.stack([requests, inside[first] - 1, inside[first + count - 1]], axis=1)
    return splits.astype(np.int32)


def _pieces(blocks: np.ndarray, size: int, saving: int) -> np.ndarray:
    """Count the parts of requests that have some of their own."""
    return np.where(blocks - size < saving, 1, -(-blocks // size))


def _find_piece(blocks: np.ndarray, parts: int, saving: int) -> int:
    """Find a size of pieces with which each request can have parts of its own."""
    least = max(-(-int(blocks.sum()) // parts), MIN_SHARE)
    step = max(least // 16, 1)
    sizes = range(least, least + 32 * step, step)
    return next(size for size in sizes if int(_pieces(blocks, size, saving).sum()) <= parts)


def _fill(
    starts: np.ndarray, ends: np.ndarray, parts: int, share: int, piece: int
) -> tuple[int, np.ndarray]:
    """Find the least limit with which filled parts suffice, and where they begin."""
    least = max(share, FIXED_COST + piece + 2 * MIN_BLOCKS - 1)
    limits = min(_MAX_LIMITS, _FILLED_BOUNDS // parts)
    step = -(-(FIXED_COST + 2 * max(piece, MIN_BLOCKS - 1)) // (limits - 1))
    each = starts.tolist(), ends.tolist()
    tried = (
        (limit, _fill_up_to(limit, *each, parts, piece))
        for limit in range(least, least + limits * step, step)
    )
    return next((limit, np.array(places)) for limit, places in tried if places)


def _fill_up_to(
    limit: int, starts: list[int], ends: list[int], parts: int, piece: int
) -> list[int]:
    """Fill parts up to a limit: where they begin on the axis of costs; nothing if they are few."""
    places = [0]
    reach = limit
    while reach < ends[-1]:
        if len(places) == parts:
            return []
        request = bisect_right(starts, reach) - 1
        start, end = starts[request], ends[request]
        first_cut = start + (MIN_BLOCKS if end - start > limit else max(MIN_BLOCKS, piece + 1))
        lost = FIXED_COST + piece
        if places[-1] > start:  # in this request
            first_cut, lost = places[-1] + MIN_BLOCKS, FIXED_COST
        cut = min(reach - lost, end - FIXED_COST - MIN_BLOCKS)
        places.append(cut if cut >= first_cut else start)
        reach = places[-1] + limit - (piece if cut >= first_cut else 0)
    return places + [ends[-1]] * (parts - len(places))


def _place_cut(request: int, blocks: int, offset: int) -> tuple[int, int]:
    """Place a cut that falls ``offset`` into the cost of a request: (request, block)."""
    if offset < MIN_BLOCKS:
        return request, 0
    if blocks - offset < MIN_BLOCKS:
        return request + 1, 0
    return request, offset
