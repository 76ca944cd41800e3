# SPDX-License-Identifier: Apache-2.0
"""A shape of sparse MLA, and checked views of a call of it."""

from __future__ import annotations

from typing import Any

from cumla.core.arrays import ArrayView
from cumla.launch.sparse.key import MLASparseKey
from cumla.launch.sparse.mla_sparse import SparseArguments

__all__ = ["arguments_of", "key_of", "outputs_of", "strided"]


def strided(at: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> ArrayView:
    """A view at so many tebibytes."""
    return ArrayView(at << 40, shape, strides, dtype, 0)


def key_of(heads: int, cache: str = "same", **changes: Any) -> MLASparseKey:
    """A plan's key: five requests of three query tokens, lists of 700 entries."""
    fields = {"batch": 5, "q_len": 3, "topk": 700, "dtype": "bfloat16", "sm_count": 132}
    return MLASparseKey(num_heads=heads, cache=cache, device=0, **fields | changes)


def arguments_of(key: MLASparseKey, **changes: Any) -> SparseArguments:
    """Views that all have strides of their own; 90 pages of 16 rows."""
    packed, same = key.cache in ("v32", "v32_no_rope"), key.cache == "same"
    lead, heads = (key.batch, key.q_len), key.num_heads
    rows = (16 * 672, 672, 672) if packed else (16 * 1168, 1168, 1168) if same else (9216, 576, 576)
    rope_rows = rows if packed or same else (16 * 144, 144, 144)
    dtype = key.dtype if same else "float8_e4m3fn"
    latent = strided(3, (90, 16, 1, 512), (*rows, 2 if same else 1), dtype)
    rope = strided(4, (90, 16, 1, 64), (*rope_rows, 2), key.dtype)
    scales = None
    if packed:
        rope = rope._replace(ptr=latent.ptr + 528)
        scales = strided(3, (90, 16, 1, 4), (*rows, 4), "float32")._replace(ptr=latent.ptr + 512)
    fields: dict[str, Any] = {
        "q": strided(1, (*lead, heads, 512), (300_016, 100_000, 1168, 2), key.dtype),
        "q_rope": strided(2, (*lead, heads, 64), (300_032, 100_032, 1184, 2), key.dtype),
        "kv_cache": latent,
        "kv_rope": rope,
        "kv_scales": scales,
        "kv_scale": 1.0,
        "indices": strided(5, (*lead, key.topk), (12_000, 3_200, 4), "int32"),
        "block_table": None,
        "row_to_request": None,
        "sinks": None,
        "softmax_scale": 0.25,
    }
    if key.cache == "v32_no_rope":
        fields |= {"q_rope": None, "kv_rope": None}
    return SparseArguments(**fields | changes)


def outputs_of(key: MLASparseKey) -> tuple[ArrayView, ArrayView]:
    """Views of out and lse."""
    lead, heads = (key.batch, key.q_len), key.num_heads
    out = strided(7, (*lead, heads, 512), (900_000, 300_000, 2064, 4), "float32")
    return out, strided(8, (key.batch, heads, key.q_len), (6004, 12, 4), "float32")
