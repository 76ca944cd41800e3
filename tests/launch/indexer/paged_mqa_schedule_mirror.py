# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of cuda/indexer/paged_mqa_schedule.cu in NumPy: the kernel's oracle."""

from __future__ import annotations

import numpy as np

from cumla.launch.indexer.paged_mqa_schedule import PagedMQAKey
from cumla.launch.indexer.shape import BLOCK_TOKENS, MOST_TOKENS


def visible_tokens(key: PagedMQAKey, kv_lens: np.ndarray) -> np.ndarray:
    """Tell how many tokens each row sees.

    Parameters
    ----------
    key : PagedMQAKey
        The plan's shape.
    kv_lens : numpy.ndarray
        ``(batch,)`` or ``(batch, q_len)`` integers.

    Returns
    -------
    numpy.ndarray
        ``(batch, q_len)`` int64.
    """
    lengths = np.clip(np.asarray(kv_lens, np.int64), 0, MOST_TOKENS)
    if not key.per_row_lens:
        lengths = lengths[:, None] - key.q_len + 1 + np.arange(key.q_len)
    return np.clip(lengths, 0, key.most_tokens)


def schedule_reference(key: PagedMQAKey, kv_lens: np.ndarray) -> np.ndarray:
    """Deal the blocks of all requests out to the parts; the mirror of the kernel.

    Parameters
    ----------
    key : PagedMQAKey
        The plan's shape.
    kv_lens : numpy.ndarray
        ``(batch,)`` or ``(batch, q_len)`` integers.

    Returns
    -------
    numpy.ndarray
        ``(num_sms + 1, 2)`` int32: request and block of 64 tokens where each part begins; part i
        ends where i + 1 begins.
    """
    costs = -(-visible_tokens(key, kv_lens).max(axis=1) // BLOCK_TOKENS) + 1
    ends = np.cumsum(costs)
    targets = int(ends[-1]) * np.arange(key.num_sms, dtype=np.int64) // key.num_sms
    requests = np.searchsorted(ends, targets, side="right")
    bounds = np.array([[key.batch, 0]] * (key.num_sms + 1), np.int32)
    bounds[:-1, 0] = requests
    bounds[:-1, 1] = targets - (ends - costs)[requests]
    return bounds
