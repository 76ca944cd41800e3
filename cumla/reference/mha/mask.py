# SPDX-License-Identifier: Apache-2.0
"""The keys that a mask makes visible, and builders of its arrays."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from cumla.reference.rows import Array, clamped, unpacked

_MOST_INT32 = (1 << 31) - 1


class Mask(Protocol):
    """The arrays of a mask, as :class:`cumla.AttentionMask` has them."""

    start: Array | None
    end: Array | None
    prefix_len: Array | None
    tree: Array | None
    tree_start: Array | None


def visible(
    mask: Mask, request: int, rows: range, places: Array, q_len: int, kv_len: int, causal: bool
) -> Array:
    """Tell which keys each query of some sees, (queries, kv_len) bool.

    `rows` are those of the request's queries in the mask, `places` the numbers of some queries in
    the request.
    """
    keys, at = np.arange(kv_len), np.asarray(rows)[places]
    first = np.zeros(len(at), np.int64) if mask.start is None else _numbers(mask.start[at])
    if mask.end is not None:
        last = _numbers(mask.end[at])
    else:
        last = kv_len - q_len + places if causal else np.full(len(at), kv_len - 1)
    seen: Array = (keys >= first[:, None]) & (keys <= last[:, None])
    if mask.prefix_len is not None:
        seen |= keys < int(mask.prefix_len[request])
    if mask.tree is not None:
        begin = kv_len - q_len if mask.tree_start is None else int(mask.tree_start[request])
        bits = unpacked(mask.tree[at])
        number = keys - begin
        known = (number >= 0) & (number < bits.shape[1])
        seen[:, number >= 0] = False
        seen[:, known] = bits[:, number[known]]
    return seen


def _numbers(array: Array) -> Array:
    return array.astype(np.int64)


class Queries(NamedTuple):
    """The request of each query token, -1 for none, and its bounds."""

    request: Array
    begin: Array
    q_len: Array
    kv_len: Array
    position: Array
    lengths: list[tuple[int, int]]  # of each request: queries and keys


def queries_of(
    total_tokens: int,
    batch: int,
    q_len: int,
    qo_indptr: Array | None,
    kv_lens: Array | None,
    positions: Array | None,
) -> Queries:
    """Find the request and the position of each token; `q_len` counts where offsets are None."""
    if qo_indptr is None:
        bounds = [r * q_len for r in range(batch + 1)]
    else:
        bounds = clamped(qo_indptr, total_tokens)
    lens = [_MOST_INT32] * batch if kv_lens is None else [max(n, 0) for n in kv_lens.tolist()]
    rows = np.full((5, total_tokens), 0, np.int64)
    rows[0] = -1
    lengths = []
    for r in range(batch):
        begin, end = bounds[r], max(bounds[r + 1], bounds[r])
        lengths.append((end - begin, lens[r]))
        numbers = r, begin, end - begin, lens[r]
        rows[:4, begin:end] = np.array(numbers)[:, None]
        rows[4, begin:end] = lens[r] - (end - begin) + np.arange(end - begin)
    if positions is not None:
        given = np.clip(positions.astype(np.int64), -_MOST_INT32 - 1, _MOST_INT32)
        rows[4] = np.where(rows[0] < 0, 0, given)
    request, first, queries, keys, position = rows
    return Queries(request, first, queries, keys, position, lengths)


def intervals(
    queries: Queries,
    *,
    left: int = -1,
    right: int = -1,
    chunk: int = 0,
    lookback: int = 0,
    block: int = 0,
    clamp: bool = False,
    spans: Array | None = None,
    flags: Array | None = None,
) -> tuple[Array, Array]:
    """Give the first and the last key that each query sees, (total_tokens,) int32.

    A window is `left` and `right` of the position, negative where it has no bound. `chunk` hides
    the chunks before `lookback` of them, `block` shows the rest of the query's block. `spans`,
    ``(batch, n, 2)`` or ``(total_tokens, 2)``, show all of a span that holds the position, those
    whose first key is not before the last are none; with `clamp` the window bounds them. `flags`,
    ``(batch,)``, are of requests: true for right 0, false for a window that is as wide on the
    right.
    """
    request, _, _, kv_len, position, _ = queries
    exists = request >= 0
    sides = np.full(len(position), right)
    if flags is not None:
        sides = np.where(flags.astype(bool)[request], 0, left) if len(flags) else sides
    first = position * 0 if left < 0 else position - left
    last = np.where(sides < 0, kv_len - 1, position + sides)
    if chunk:
        first = np.maximum(first, (position // chunk - lookback) * chunk)
    if block:
        last = position // block * block + block - 1
    if spans is not None and spans.size:
        of_query = spans[:, None] if spans.ndim == 2 else spans[request]
        begin, end = np.moveaxis(of_query.astype(np.int64), -1, 0)  # (total_tokens, n)
        at = position[:, None]
        holds = (begin < end) & (begin <= at) & (at <= end)
        if not clamp:
            first = np.minimum(first, np.where(holds, begin, _MOST_INT32).min(axis=1))
        last = np.maximum(last, np.where(holds, end, -1 - _MOST_INT32).max(axis=1))
    first = np.where(exists, np.clip(first, 0, _MOST_INT32), 0)
    last = np.where(exists, np.maximum(np.minimum(last, kv_len - 1), -1), -1)
    return first.astype(np.int32), last.astype(np.int32)


def tree_words(queries: Queries, tree: Array, form: str, words: int, left: int = -1) -> Array:
    """Give the bits of the drafts that each query sees, (total_tokens, words) uint32.

    `form` tells what `tree` holds: ``"drafts"`` ``(batch, drafts, drafts)`` bool; ``"bits"``
    ``(total_tokens, bytes)`` uint8; ``"all keys"`` and ``"bits of keys"`` the rows of all requests
    one after another, each ``(q_len, kv_len)``, as bool or as bits, those of a request from a whole
    byte on. `left`, unless it is negative, hides drafts whose position is further back.
    """
    bits = np.zeros((len(queries.request), 32 * words), bool)
    begins = [0]  # of requests, in a tree of all keys
    for q_len, kv_len in queries.lengths:
        elements = q_len * kv_len
        begins.append(begins[-1] + (-(-elements // 8) if form == "bits of keys" else elements))
    for token, r in enumerate(queries.request.tolist()):
        if r < 0:
            continue
        begin, q_len, kv_len = (int(n[token]) for n in queries[1:4])
        row = token - begin
        drafts = np.arange(min(q_len, 32 * words))
        if form == "drafts":
            drafts = drafts[: tree.shape[2] if r < len(tree) and row < tree.shape[1] else 0]
            seen = tree[r, row, drafts] if len(drafts) else np.zeros(0, bool)
        elif form == "bits":
            seen = unpacked(tree[token : token + 1])[0, : len(drafts)]
            drafts = drafts[: len(seen)]
        else:
            keys = kv_len - q_len + drafts
            at = row * kv_len + keys
            place = begins[r] + (at // 8 if form == "bits of keys" else at)
            known = (keys >= 0) & (place < len(tree))
            drafts, at, place = drafts[known], at[known], place[known]
            seen = tree[place] >> (at % 8) & 1 if form == "bits of keys" else tree[place]
        if left >= 0:
            near = queries.position[begin + drafts] >= queries.position[token] - left
            seen = seen.astype(bool) & near
        bits[token, drafts] = seen
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
