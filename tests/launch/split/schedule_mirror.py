# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of cuda/split/schedule.cu in NumPy: the oracle of its two kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    RULES,
    min_saving,
    piece_blocks,
    piece_cost,
)
from cumla.launch.split.schedule import SPECS, max_tokens

FIXED_COST, CUT_COST = RULES.fixed_cost, RULES.cut_cost
MIN_BLOCKS, MIN_SHARE = RULES.min_blocks, RULES.min_share

THREADS = SPECS[0].threads
_PACKED_REQUESTS = 256  # most that are packed,
_PACKED_PARTS = 160  # most parts that they are packed into,
_LIMITS = 8  # that are tried for that at most,
_PACKED_SHARE = 1 << 20  # and the largest share for which that is done


class Schedule(NamedTuple):
    """Who works on which KV blocks.

    Attributes
    ----------
    bounds : numpy.ndarray
        ``(parts + 1, 2)`` int32: (place, block) where each part begins, the place being that of a
        request in the order; part i ends where i + 1 begins.
    splits : numpy.ndarray
        ``(requests that are cut, 3)`` int32: (place, first part, last part) in ascending order.
    order : numpy.ndarray
        ``(batch,)`` int64: the request at each place.
    """

    bounds: np.ndarray
    splits: np.ndarray
    order: np.ndarray


def schedule(kv_lens: np.ndarray, parts: int, row_groups: int, tiles: int = 1) -> Schedule:
    """Deal the KV blocks of all requests out to ``parts``; the mirror of the kernel.

    Parameters
    ----------
    kv_lens : numpy.ndarray
        ``(batch,)`` integers, tokens of each request; negative counts as 0.
    parts : int
        How many shares to make.
    row_groups : int
        Groups of 16 query rows in a tile.
    tiles : int
        Thread blocks of a part.

    Returns
    -------
    Schedule
        Each request in equal pieces of its own parts where there are two parts a request or more,
        short ones uncut; else whole requests in groups where that is no dearer; else packed parts,
        which take what fits whole and cut only requests above a limit, or, of many requests or
        parts, equal shares of the summed cost, cut wherever one ends.
    """
    lengths = np.clip(np.asarray(kv_lens, np.int64), 0, max_tokens(len(kv_lens)))
    batch = len(lengths)
    blocks = -(-lengths // BLOCK_TOKENS)
    ends = np.cumsum(blocks + FIXED_COST)
    starts = ends - blocks - FIXED_COST
    total = int(ends[-1])

    order = np.arange(batch)
    bounds = np.zeros((parts + 1, 2), np.int32)

    share = max(-(-total // parts), MIN_SHARE)
    saving = min_saving(row_groups, tiles)
    piece = _find_piece(blocks, parts, saving) if 2 * batch <= parts else 0
    if 0 < piece <= share + CUT_COST - FIXED_COST:
        pieces = _pieces(blocks, piece, saving)
        requests = np.repeat(order, pieces)
        index = np.arange(len(requests)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        bounds[1:, 0] = batch
        bounds[: len(requests), 0] = requests
        bounds[: len(requests), 1] = index * blocks[requests] // pieces[requests]
        return Schedule(bounds, _splits(bounds), order)

    packable = batch <= _PACKED_REQUESTS and parts <= _PACKED_PARTS and share <= _PACKED_SHARE
    each = piece_cost(row_groups)
    limit = share + min(CUT_COST, share // 32)
    of_shares = share + FIXED_COST + 2 * each  # they cost that at most
    group = -(-batch // parts)
    price = int(np.diff(np.append(starts[::group], total)).max())
    packed = None
    if packable and price > limit:
        packed = _pack(blocks, parts, share, each)
    if packed and packed.cost > max(of_shares, share + share // 20):
        packed = None
    if price <= max(limit, packed.cost if packed else of_shares):
        bounds[:, 0] = np.minimum(np.arange(parts + 1) * group, batch)
        return Schedule(bounds, _splits(bounds), order)
    if packed:
        return Schedule(packed.bounds, _splits(packed.bounds), packed.order)

    bounds[1:, 0] = batch
    for index, place in enumerate(range(0, min(parts * share, total), share)):
        request = int(np.searchsorted(ends, place, side="right"))
        bounds[index] = _place_cut(request, int(blocks[request]), place - int(starts[request]))
    return Schedule(bounds, _splits(bounds), order)


def invariant_schedule(
    kv_lens: np.ndarray, max_blocks: int, row_groups: int, tiles: int = 1
) -> Schedule:
    """Cut each request at fixed positions, a part for each piece; the mirror of the kernel.

    Parameters
    ----------
    kv_lens : numpy.ndarray
        ``(batch,)`` integers, tokens of each request; negative counts as 0.
    max_blocks : int
        Most KV blocks of a request; longer ones count as that long.
    row_groups : int
        Groups of 16 query rows in a tile.
    tiles : int
        Thread blocks of a part.

    Returns
    -------
    Schedule
        Cuts at multiples of :func:`cumla.launch.split.plan.piece_blocks`. What is left at the end
        of a request is a piece of its own if that saves :func:`min_saving` blocks. Parts after
        the last piece are empty.
    """
    lengths = np.clip(np.asarray(kv_lens, np.int64), 0, max_blocks * BLOCK_TOKENS)
    batch, size = len(lengths), piece_blocks(row_groups)
    blocks = -(-lengths // BLOCK_TOKENS)
    saving = min_saving(row_groups, tiles)
    pieces = 1 + np.maximum(blocks - saving, 0) // size
    requests = np.repeat(np.arange(batch), pieces)
    index = np.arange(len(requests)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    most = 1 + max(max_blocks - saving, 0) // size
    bounds = np.zeros((batch * most + 1, 2), np.int32)
    bounds[:, 0] = batch
    bounds[: len(requests), 0] = requests
    bounds[: len(requests), 1] = index * size
    return Schedule(bounds, _splits(bounds), np.arange(batch))


def whole_requests(
    kv_lens: np.ndarray, max_blocks: int, row_groups: int, tiles: int, most: int, at_once: int
) -> np.ndarray:
    """Tell which requests have one part for all their pieces: ``(batch,)`` bool.

    Parameters as for :func:`invariant_schedule`; `most` pieces may be in one part, and `at_once`
    parts run at the same time.
    """
    lengths = np.clip(np.asarray(kv_lens, np.int64), 0, max_blocks * BLOCK_TOKENS)
    blocks = -(-lengths // BLOCK_TOKENS)
    pieces = 1 + np.maximum(blocks - min_saving(row_groups, tiles), 0) // piece_blocks(row_groups)
    few = pieces <= most
    count, parts = int(pieces.sum()), int(np.where(few, 1, pieces).sum())
    longest = np.float32(np.max(blocks, where=few, initial=0))

    def waves(parts: int) -> np.float32:
        return np.float32(-(-parts // at_once))

    total, piece = int(blocks.sum()), piece_cost(row_groups)
    whole = np.float32(total + 2 * RULES.fixed_cost * count)
    apart = np.float32(total + (RULES.fixed_cost + piece) * count)
    mean = whole / np.float32(parts)
    late = whole / np.float32(at_once) + (longest - mean) / np.float32(2)
    ends = max(waves(parts) * mean, late, longest)
    gains = parts < count and ends < waves(count) * (apart / np.float32(count))
    return few & (pieces > 1) & gains


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


class _Packed(NamedTuple):
    cost: int  # of the dearest part
    bounds: np.ndarray
    order: np.ndarray


def _pack(blocks: np.ndarray, parts: int, share: int, piece: int) -> _Packed | None:
    """Pack requests into parts with the limit, of a few, that makes the dearest part cheapest."""
    least = max(share, FIXED_COST + piece + 2 * MIN_BLOCKS - 1)
    tries = _limits(len(blocks))
    step = max(-(-(FIXED_COST + 2 * piece) // (tries - 1)), share // 64)
    limits = range(least, least + tries * step, step)
    tried = (_pack_up_to(limit, blocks.tolist(), parts, piece) for limit in limits)
    return min((packed for packed in tried if packed), key=lambda packed: packed.cost, default=None)


def _limits(batch: int) -> int:
    """Tell how many limits are tried: as many as there are threads for all requests."""
    return min(_LIMITS, THREADS // (-(-batch // 32) * 32))


def _pack_up_to(limit: int, blocks: list[int], parts: int, piece: int) -> _Packed | None:
    """Pack requests into parts, those that cost more than a limit in pieces.

    Such a request gets parts of its own for all that it has but the last piece, its rest. Rests and
    whole requests go to the other parts, the dearest first, each to the cheapest of them. A part
    takes two rests at most: one ends there, and the other one begins.
    """
    size = limit - FIXED_COST - piece
    cuts = [(n - 1) // size if n + FIXED_COST > limit else 0 for n in blocks]
    rests = [max(n - k * size, MIN_BLOCKS) if k else n for n, k in zip(blocks, cuts, strict=True)]
    costs = [n + FIXED_COST + (piece if k else 0) for n, k in zip(rests, cuts, strict=True)]
    others = parts - sum(cuts)
    if others < 1 or sum(k > 0 for k in cuts) > 2 * others:
        return None

    loads = [0] * others
    whole: list[list[int]] = [[] for _ in loads]
    cut: list[list[int]] = [[] for _ in loads]
    for request in sorted(range(len(blocks)), key=lambda r: (-costs[r], r)):
        k = cuts[request]
        free = (p for p in range(others) if not k or len(cut[p]) < 2)
        part = min(free, key=lambda p: (loads[p], p))
        loads[part] += costs[request]
        (cut if k else whole)[part].append(request)

    order: list[int] = []
    bounds: list[tuple[int, int]] = []
    for requests, cut_here in zip(whole, cut, strict=True):
        first, last = (*cut_here, None, None)[:2]
        begin = len(order), 0
        if first is not None:
            own = blocks[first] - rests[first]
            bounds += [(len(order), j * own // cuts[first]) for j in range(cuts[first])]
            begin = len(order), own
        bounds.append(begin)
        order += cut_here[:1] + requests + cut_here[1:]
        if last is not None:
            own = blocks[last] - rests[last]
            pieces = range(cuts[last])
            bounds += [(len(order) - 1, rests[last] + j * own // cuts[last]) for j in pieces]
    bounds.append((len(blocks), 0))
    cost = max(max(loads), limit if any(cuts) else 0)
    return _Packed(cost, np.array(bounds, np.int32), np.array(order))


def _place_cut(request: int, blocks: int, offset: int) -> tuple[int, int]:
    """Place a cut that falls ``offset`` into the cost of a request: (request, block)."""
    if offset < MIN_BLOCKS:
        return request, 0
    if blocks - offset < MIN_BLOCKS:
        return request + 1, 0
    return request, offset
