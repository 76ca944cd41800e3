# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/mqa_logits.cu: indexer logits of new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.indexer.choice import prefill_shape
from cumla.launch.indexer.shape import (
    LOGITS_THREADS,
    keys_map,
    logits_values,
)
from cumla.launch.layouts import launch_of, strided
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

MOST_TOKENS = 2**31 - 1  # rows of k: what the int32 numbers of ks and ke can name


def _spec(heads: int, head_dim: int) -> KernelSpec:
    shape = prefill_shape(heads, head_dim)
    tags, size = (f"h{heads}", f"d{head_dim}"), shape.smem_bytes
    names, numbers = ("mqa_logits", "MqaLogitsParams"), (heads, head_dim, shape.stages, size)
    return KernelSpec.of(
        *("indexer", *names, *numbers), tags=tags, threads=LOGITS_THREADS, smem_bytes=size
    )


# The same kernel writes float32 and bfloat16.
_SPECS = {(heads, dim): _spec(heads, dim) for heads in (8, 16, 32, 64) for dim in (32, 64, 128)}
SPECS = tuple(_SPECS.values())


class MQALogitsArguments(NamedTuple):
    """Checked views of one call, as :func:`cumla.mqa_logits` describes the arrays."""

    q: ArrayView  # (seq_len, num_heads, head_dim) e4m3, rows on 16-byte boundaries
    k: ArrayView  # (seq_len_kv, head_dim) e4m3, rows on 16-byte boundaries
    k_scale: ArrayView  # (seq_len_kv,) float32
    weights: ArrayView  # (seq_len, num_heads) float32
    ks: ArrayView  # (seq_len,) int32
    ke: ArrayView  # (seq_len,) int32
    # (seq_len, seq_len_kv) or, compressed, (seq_len, max_kv_len), float32 or bfloat16, rows
    # contiguous.
    out: ArrayView


def mqa_logits_launch(
    arguments: MQALogitsArguments, *, compressed: bool, clean: bool, sm_count: int
) -> Launch:
    """Describe how to score the tokens that each query row sees, in one thread block an SM.

    There are at least one query row, one token and one column. Where `compressed`, column c is
    token ks + c of its row; where `clean`, -inf is written where nothing is visible.
    """
    a = arguments
    values = {
        "keys": keys_map("k", a.k.ptr, a.k.shape, a.k.strides),
        "logits": logits_values(a.q, a.weights, a.out, clean),
        **strided(a.q, "q", "q_stride_row"),
        **strided(a.k_scale, "k_scale", "k_scale_stride"),
        **strided(a.ks, "ks", "ks_stride"),
        **strided(a.ke, "ke", "ke_stride"),
        "seq_len": a.q.shape[0],
        "seq_len_kv": a.k.shape[0],
        "compressed": compressed,
    }
    _, num_heads, head_dim = a.q.shape
    return launch_of(_SPECS[num_heads, head_dim], (sm_count, 1, 1), values)
