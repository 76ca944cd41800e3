# SPDX-License-Identifier: Apache-2.0
"""Attention of GQA to lists of blocks, as a definition."""

from __future__ import annotations

import numpy as np

from cumla.core.state import AttentionState
from cumla.reference.blocks.lists import chosen_blocks
from cumla.reference.blocks.rows import tokens_seen
from cumla.reference.rows import Array, as_e4m3
from cumla.reference.threads import one_blas_thread


@one_blas_thread()
def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    block_indices: Array,
    *,
    block_size: int,
    kv_lens: Array,
    block_table: Array,
    qo_indptr: Array | None = None,
    topk_lens: Array | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str = "NHD",
    indices_are: str = "blocks",
    out: Array | None = None,
    lse: Array | None = None,
) -> AttentionState:
    """Attend from each query token and kv head to the blocks of a list, in float64.

    A query token sees the tokens of the blocks of its list up to its own position, or up to kv_len
    without `causal`. Nothing else is read.

    Parameters
    ----------
    q, k, v, block_indices, block_size, kv_lens, block_table, qo_indptr, topk_lens, causal
        As in :func:`cumla.block_sparse_attention`, of any strides, and of float32 and float64, too.
    softcap, sinks, softmax_scale, k_scale, v_scale, kv_layout, indices_are, out, lse : optional
        As there.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``, computed in float64 and rounded once.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, k = np.ones((1, 4, 64), np.float16), np.ones((4, 16, 2, 64), np.float16)
    >>> blocks = np.int32([[[0, 2], [2, -1]]])  # of one query token and two kv heads
    >>> state = cumla.reference.block_sparse_attention(
    ...     q[None], k, k, blocks, block_size=16, kv_lens=np.int32([40]),
    ...     block_table=np.int32([[3, 1, 0]]))
    >>> np.exp(state.lse - 8).round(3)[0, 0]  # as many keys as each head sees, all with score 8
    array([24., 24.,  8.,  8.], dtype=float32)
    """
    *lead, num_heads, head_dim = q.shape
    if kv_layout == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    k, v = as_e4m3(k), as_e4m3(v)
    if out is None:
        out = np.empty((*lead, num_heads, v.shape[-1]), q.dtype)
    if lse is None:
        lse = np.empty((*lead, num_heads), np.float32)
    kv_heads = k.shape[2]
    group = num_heads // kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    sink = np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    rows = list(np.ndindex(*lead))
    seen_by = tokens_seen(len(rows), kv_lens, qo_indptr, block_table.shape[1] * k.shape[1], causal)
    factors = [_factors_of_rows(of, k) for of in (k_scale, v_scale)]
    for token, (row, (request, seen)) in enumerate(zip(rows, seen_by, strict=True)):
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            entries = block_indices[token, head % block_indices.shape[1]]
            if topk_lens is not None:
                of_token = np.atleast_1d(topk_lens[token])
                entries = entries[: max(int(of_token[head % len(of_token)]), 0)]
            table = block_table[request] if request >= 0 else block_table[:0].ravel()
            sizes = block_size, k.shape[1], k.shape[0]
            blocks = chosen_blocks(entries, seen, table, *sizes, indices_are == "tokens")
            at = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
            at = at[at < seen]
            page, slot = table[at // k.shape[1]], at % k.shape[1]
            of_keys, of_values = (of[head, page * k.shape[1] + slot, None] for of in factors)
            keys = k[page, slot, head].astype(np.float64) * of_keys
            values = v[page, slot, head].astype(np.float64) * of_values
            found = _attend(q[row][heads], keys, values, scale, softcap, sink[heads])
            out[row][heads], lse[row][heads] = found
    return AttentionState(out, lse)


def _factors_of_rows(factors: Array | float | None, cache: Array) -> Array:
    """Give each kv head and row of a cache its factor, without a copy for each."""
    found = np.asarray(1.0 if factors is None else factors, np.float64)
    if found.ndim < 2:
        found = found.reshape(-1, 1)
    rows = max(cache.shape[0] * cache.shape[1], found.shape[1])
    return np.broadcast_to(found, (cache.shape[2], rows))


def _attend(
    q: Array, keys: Array, values: Array, scale: float, softcap: float | None, sink: Array
) -> tuple[Array, Array]:
    """Attend from q (heads, head_dim) to keys (tokens, head_dim)."""
    if not len(keys):
        return np.zeros((len(q), values.shape[-1])), sink
    scores = scale * (q.astype(np.float64) @ keys.T)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    most = np.finfo(np.float64).max
    top = np.clip(np.maximum(scores.max(axis=-1), sink), -most, most)[:, None]
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink[:, None] - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return weights @ values / np.where(total == 0, 1, total), lse[:, 0]
