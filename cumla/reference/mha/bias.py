# SPDX-License-Identifier: Apache-2.0
"""The numbers that a bias adds to scores."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cumla.reference.rows import Array

LEAST = -3e38 * np.log(2)  # kernels have scores in base 2, and see none below -3e38


class Bias(Protocol):
    """The arrays of a bias, as :class:`cumla.AttentionBias` has them."""

    slopes: Array | None
    table: Array | None
    first: Array | None


def bias_of(bias: Bias, request: int, rows: Array, positions: Array, kv_len: int) -> Array:
    """Give what each score gets, (queries, num_heads, kv_len) in float64; -inf hides a key.

    `rows` are those of the queries in q, counted over all requests, `positions` their positions in
    the request.
    """
    found = _numbers(bias, request, rows, positions, kv_len)
    return np.where(found < LEAST, -np.inf, found)


def _numbers(bias: Bias, request: int, rows: Array, positions: Array, kv_len: int) -> Array:
    distance = positions[:, None, None] - np.arange(kv_len)  # p - j
    if bias.slopes is not None:
        slopes = bias.slopes[request] if bias.slopes.ndim == 2 else bias.slopes
        return -slopes.astype(np.float64)[None, :, None] * distance
    assert bias.table is not None
    length = bias.table.shape[-1]
    if bias.table.ndim == 2:
        first = 0 if bias.first is None else int(bias.first[0])
        at = np.clip(distance[:, 0] - first, 0, length - 1)
        return bias.table.astype(np.float64)[:, at].swapaxes(0, 1)
    of_rows = bias.table[rows].astype(np.float64)  # (queries, num_heads, E)
    at = np.broadcast_to(np.clip(distance, 0, length - 1), (*of_rows.shape[:2], kv_len))
    known = (distance >= 0) & (distance < length)
    return np.where(known, np.take_along_axis(of_rows, at, axis=-1), 0)
