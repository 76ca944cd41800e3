# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, as a definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.reference.rows import rotated

Array = NDArray[Any]


def apply_rope(
    q: Array,
    k: Array | None,
    positions: Array,
    cos_sin: Array | Sequence[Array],
    *,
    interleaved: bool = False,
    rotary_offset: int = 0,
    q_out: Array | None = None,
    k_out: Array | None = None,
) -> tuple[Array, Array | None]:
    """Rotate pairs of columns of queries and keys by the position of their token.

    With c and s, cosine and sine of pair j in row ``positions[i]`` of cos_sin, the columns x of
    token i become ``x0, x1 = c * x0 - s * x1, s * x0 + c * x1``, in float64, and are then rounded.
    Of rotary_dim columns, the first of which is `rotary_offset`, pair j is columns j and
    ``j + rotary_dim / 2``, or 2 j and 2 j + 1 if `interleaved`. All others stay as they are, and so
    do rows whose position has no row in cos_sin.

    Parameters
    ----------
    q, k : ndarray, shape (tokens, heads, head_dim)
        Of any floating dtype; k may be None.
    positions : ndarray of integers, shape (tokens,)
    cos_sin : ndarray, shape (max_position, rotary_dim), or pair of ndarray
        Cosines of all pairs, then their sines; or ``(cos, sin)``, each
        ``(max_position, rotary_dim / 2)``.
    interleaved : bool, default False
    rotary_offset : int, default 0
    q_out, k_out : ndarray, optional
        Where to write; q and k themselves are allowed. New arrays by default.

    Returns
    -------
    q_out, k_out : ndarray
        In the dtypes of q and k.
    """
    turned = [
        None if rows is None else turned_rows(rows, positions, cos_sin, interleaved, rotary_offset)
        for rows in (q, k)
    ]
    if q_out is None:
        q_out = np.empty_like(q)
    q_out[...] = turned[0]
    if k is None:
        return q_out, None
    if k_out is None:
        k_out = np.empty_like(k)
    k_out[...] = turned[1]
    return q_out, k_out


def table_of(cos_sin: Array | Sequence[Array]) -> Array:
    """Give one table: cosines, then sines."""
    return cos_sin if isinstance(cos_sin, np.ndarray) else np.concatenate(cos_sin, axis=-1)


def turned_rows(
    rows: Array,
    positions: Array,
    cos_sin: Array | Sequence[Array],
    interleaved: bool,
    rotary_offset: int,
) -> Array:
    """Rotate a copy of rows (tokens, heads, columns), in float64."""
    table = table_of(cos_sin)
    known = (positions >= 0) & (positions < len(table))
    columns = slice(rotary_offset, rotary_offset + table.shape[1])
    turned: Array = rows.astype(np.float64)
    turned[known, :, columns] = rotated(
        rows[known][..., columns], table[positions[known]], interleaved
    )
    return turned
