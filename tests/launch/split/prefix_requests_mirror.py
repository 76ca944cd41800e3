# SPDX-License-Identifier: Apache-2.0
"""What prefix_requests writes, in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST = 2**31 - 1


class Requests(NamedTuple):
    """The arrays of rests and prefixes as requests of one schedule."""

    tokens: np.ndarray
    lengths: np.ndarray
    pages: np.ndarray
    ends: np.ndarray
    states: np.ndarray


def prefix_requests(
    kv_lens: np.ndarray,
    qo_indptr: np.ndarray,
    group: np.ndarray,
    prefix_len: np.ndarray,
    total_tokens: int,
    page_size: int,
    max_pages: int,
    rest_begin: int,
) -> Requests:
    """List rests, then prefixes, the last request first, as pairs of a begin and an end."""
    batch = len(kv_lens)
    first = qo_indptr[:-1].astype(np.int64)
    last = qo_indptr[1:].astype(np.int64)
    begin = first.clip(0, total_tokens)
    end = np.maximum(last, begin).clip(0, total_tokens)
    keys = kv_lens.astype(np.int64).clip(0, max_pages * page_size)
    own = np.minimum(prefix_len.astype(np.int64).clip(0), np.maximum(keys - (end - begin), 0))
    own = np.where(first <= last, own // page_size * page_size, 0)
    shared, leads, until = np.zeros(batch, np.int64), np.zeros(batch, bool), end.copy()
    r = 0
    while r < batch:
        stop = r + 1
        while stop < batch and group[stop] == group[r]:
            stop += 1
        if stop - r > 1 and own[r:stop].min() > 0:
            shared[r:stop], leads[r], until[r] = own[r:stop].min(), True, end[stop - 1]
        r = stop
    rows = np.arange(batch) * max_pages
    cut = rows + shared // page_size
    none = np.zeros(batch, np.int64)

    def pairs(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.stack([one, other], axis=-1)[::-1].reshape(-1)

    def both(rests: np.ndarray, end_of_rests: int, prefixes: np.ndarray) -> np.ndarray:
        return np.concatenate([rests, [end_of_rests], prefixes, [0]])

    of_groups = pairs(begin, np.where(leads, until, begin))
    tokens = both(rest_begin + pairs(begin, end), rest_begin, of_groups)
    lengths = both(pairs(keys - shared, none), 0, pairs(np.where(leads, shared, 0), none))
    pages = both(pairs(cut, rows + max_pages), 0, pairs(rows, cut))
    ends, states = np.full(2 * total_tokens, MOST), np.zeros(total_tokens)
    for request in range(batch):
        of = np.arange(begin[request], end[request])
        states[of] = 1 + (shared[request] > 0)
        ends[total_tokens + of] = keys[request] - shared[request] - end[request] + of
    found = tokens, lengths, pages, ends, states
    return Requests(*[array.astype(np.int32) for array in found])
