# SPDX-License-Identifier: Apache-2.0
"""Dense attention over queries of different lengths, as a definition: one request at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla.launch.mla.shape import VALUE_DIM
from cumla.mla.checks import checked_flag
from cumla.reference.mla.decode import mla_decode

Array = NDArray[Any]


class MLAAttentionResult(NamedTuple):
    """Result of MLA attention over queries of different lengths, in the framework of the query.

    Attributes
    ----------
    out : array, shape (total_tokens, num_heads, 512)
        Attention output.
    lse : array of float32, shape (total_tokens, num_heads)
        Natural logarithm of the sum of ``exp(softmax_scale * q.k)`` over the visible tokens.
    """

    out: Any
    lse: Any


def mla_attention(
    q: Array | tuple[Array, ...],
    kv_cache: Array | tuple[Array, ...],
    *,
    qo_indptr: Array,
    kv_lens: Array,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_scale: Array | float | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
) -> MLAAttentionResult:
    """Attend from any number of query tokens a request to its cached latent rows.

    Each request is :func:`mla_decode` of a batch of one: of the query tokens from ``qo_indptr[r]``
    to ``qo_indptr[r + 1]``, and of the pages in row r of the table, or in the list from
    ``kv_indptr[r]`` to ``kv_indptr[r + 1]``. Offsets are clamped to the arrays.

    Parameters
    ----------
    q : ndarray, shape (total_tokens, num_heads, 576)
        Absorbed queries, in a dtype of :func:`mla_decode`, or a tuple as there.
    kv_cache : ndarray or tuple of ndarray
        As in :func:`mla_decode`.
    qo_indptr : ndarray of int32, shape (batch + 1,)
        Where the query tokens of each request begin, and where the last ones end.
    kv_lens : ndarray of int32, shape (batch,)
        Number of cached tokens of each request, those of the queries included.
    block_table : ndarray of int32, shape (batch, max_pages), optional
        As in :func:`mla_decode`.
    kv_indptr, kv_indices : ndarray of int32, shapes (batch + 1,) and (pages,), optional
        In place of a table: where the pages of each request begin in a list of page numbers.
    causal, softmax_scale, kv_scale, accumulate
        As in :func:`mla_decode`, of each request for itself.
    out : ndarray of q's dtype or float32, shape (total_tokens, num_heads, 512), optional
        Where to write the output. Rows of no request are not written.
    lse : ndarray of float32, shape (total_tokens, num_heads), optional
        Where to write the logarithms, likewise.

    Returns
    -------
    MLAAttentionResult
        ``out`` and ``lse``. A query that sees no token has out 0 and lse +inf.

    Raises
    ------
    ValueError
        If shapes disagree, for pages in both forms or in none, and as :func:`mla_decode`.
    TypeError
        As :func:`mla_decode`.
    """
    causal = checked_flag("causal", causal)
    parts = q if isinstance(q, tuple) else (q,)
    for part in parts:
        if part.ndim != 3:
            raise ValueError(
                f"q: needs shape (total_tokens, num_heads, columns), got {part.shape}; reshape it"
            )
    tokens, num_heads, _ = parts[0].shape
    batch = len(kv_lens)
    if qo_indptr.shape != (batch + 1,):
        raise ValueError(
            f"qo_indptr: needs shape ({batch + 1},), got {qo_indptr.shape}; give each request of "
            f"kv_lens a begin, and the last one an end"
        )
    tables = _tables(batch, block_table, kv_indptr, kv_indices)
    if out is None:
        out = np.empty((tokens, num_heads, VALUE_DIM), parts[0].dtype)
    if lse is None:
        lse = np.empty((tokens, num_heads), np.float32)

    ends = np.clip(qo_indptr, 0, tokens)
    for r, (begin, end) in enumerate(pairwise(ends)):
        if end <= begin:
            continue
        rows = tuple(part[None, begin:end] for part in parts)
        mla_decode(
            rows if len(rows) == 2 else rows[0],
            kv_cache,
            tables[r][None],
            kv_lens[r : r + 1],
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            causal=causal,
            out=out[None, begin:end],
            lse=lse[begin:end].T[None],
            accumulate=accumulate,
        )
    return MLAAttentionResult(out, lse)


def _tables(
    batch: int, block_table: Array | None, kv_indptr: Array | None, kv_indices: Array | None
) -> list[Array]:
    """Take the page numbers of each request."""
    if block_table is not None and kv_indptr is None and kv_indices is None:
        if block_table.ndim != 2 or len(block_table) != batch:
            raise ValueError(
                f"block_table: needs shape ({batch}, max_pages), got {block_table.shape}; give "
                f"each request a row"
            )
        return [*block_table]
    if block_table is not None or kv_indptr is None or kv_indices is None:
        raise ValueError(
            "block_table: needs either a block table or both kv_indptr and kv_indices; pass one "
            "form"
        )
    if kv_indptr.shape != (batch + 1,):
        raise ValueError(
            f"kv_indptr: needs shape ({batch + 1},), got {kv_indptr.shape}; give each request a "
            f"begin, and the last one an end"
        )
    ends = np.clip(kv_indptr, 0, len(kv_indices))
    return [kv_indices[begin:end] for begin, end in pairwise(ends)]
