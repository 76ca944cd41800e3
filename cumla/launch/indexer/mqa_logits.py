# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/mqa_logits.cu: indexer logits of new tokens."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.indexer.indexer_shape import LOGITS_FIELDS, LogitsShape, keys_map, logits_values
from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

MOST_TOKENS = 2**31 - 1  # rows of k: what the int32 numbers of ks and ke can name


def _shape(heads: int, head_dim: int) -> LogitsShape:
    return LogitsShape(heads, head_dim, tile=128, tiles=4)


def _spec(heads: int, head_dim: int) -> KernelSpec:
    shape = _shape(heads, head_dim)
    tags, size = (f"h{heads}", f"d{head_dim}"), shape.smem_bytes
    names, numbers = ("mqa_logits", "MqaLogitsParams"), (heads, head_dim, shape.stages, size)
    return KernelSpec.of("indexer", *names, *numbers, tags=tags, threads=384, smem_bytes=size)


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


_PARAMS = struct.Struct(f"<128s{LOGITS_FIELDS}8q4i32x")


def mqa_logits_launch(
    arguments: MQALogitsArguments, *, compressed: bool, clean: bool, sm_count: int
) -> Launch:
    """Describe how to score the tokens that each query row sees, in one thread block an SM.

    There are at least one query row, one token and one column. Where `compressed`, column c is
    token ks + c of its row; where `clean`, -inf is written where nothing is visible.
    """
    a = arguments
    values = (
        keys_map("k", a.k.ptr, a.k.shape, a.k.strides),
        *logits_values(a.q, a.weights, a.out, clean),
        a.q.ptr,
        a.q.strides[0],
        a.k_scale.ptr,
        a.k_scale.strides[0],
        a.ks.ptr,
        a.ke.ptr,
        a.ks.strides[0],
        a.ke.strides[0],
        a.q.shape[0],
        a.k.shape[0],
        compressed,
        0,
    )
    _, num_heads, head_dim = a.q.shape
    return Launch(_SPECS[num_heads, head_dim], (sm_count, 1, 1), _PARAMS, values)
