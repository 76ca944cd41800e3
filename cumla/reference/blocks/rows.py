# SPDX-License-Identifier: Apache-2.0
"""Definition of the keys that each query token sees."""

from __future__ import annotations

import numpy as np

from cumla.reference.rows import Array


def tokens_seen(
    tokens: int, kv_lens: Array, qo_indptr: Array | None, most: int, causal: bool
) -> list[tuple[int, int]]:
    """Return the request of each query token, -1 for none, and how many of its tokens it sees.

    `most` are the tokens that the pages of a request hold.
    """
    batch = len(kv_lens)
    if qo_indptr is None:
        bounds = np.arange(batch + 1) * (tokens // max(batch, 1))
    else:
        bounds = qo_indptr.astype(np.int64).clip(0, tokens)
    found = [(-1, 0)] * tokens
    for request in range(batch):
        begin, end = int(bounds[request]), int(bounds[request + 1])
        length = min(max(int(kv_lens[request]), 0), most)
        for token in range(begin, end):
            behind = end - 1 - token if causal else 0
            found[token] = request, max(length - behind, 0)
    return found
