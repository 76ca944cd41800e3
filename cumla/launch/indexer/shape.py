# SPDX-License-Identifier: Apache-2.0
"""Sizes, arguments and loads of keys that the launchers of the indexer's logits share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, strided
from cumla.launch.tensor_map import TensorMap

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

FILE = "indexer/paged_mqa_logits"
BLOCK_TOKENS = constant(FILE, "kBlockTokens")  # of one product, and of one load
MOST_TOKENS = constant(FILE, "kMaxTokens")  # of a request
LOGITS_THREADS = constant(FILE, "kLogitsThreads")


class PagedMQAArguments(NamedTuple):
    """Checked views of one call, as :func:`cumla.paged_mqa_logits` describes the arrays."""

    q: ArrayView  # (batch, q_len, num_heads, head_dim) e4m3, rows on 16-byte boundaries
    # (num_pages, page_size, head_dim) e4m3, with mxfp4 half as many bytes; 16-byte boundaries
    k_cache: ArrayView
    # (num_pages, page_size) float32, or four bytes, pages contiguous and on 16-byte boundaries
    scale_cache: ArrayView
    weights: ArrayView  # (batch * q_len, num_heads) float32
    kv_lens: ArrayView  # (batch,) or (batch, q_len) int32
    block_table: ArrayView  # (batch, max_blocks) int32, rows contiguous
    buffer: int  # address of the plan's buffer
    out: ArrayView  # (batch * q_len, max_kv_len) float32 or bfloat16, rows contiguous


def logits_values(q: ArrayView, weights: ArrayView, out: ArrayView, clean: bool) -> dict[str, Any]:
    """Name the values of struct LogitsParams.

    The axes of `q` end with (num_heads, head_dim). Where `clean`, -inf is written where nothing is
    visible.
    """
    rows, width = out.shape
    return {
        **strided(weights, "weights", "weights_stride_row", "weights_stride_head"),
        **strided(out, "out", "out_stride"),
        "rows": rows,
        "width": width,
        "q_stride_head": q.strides[-2],
        "num_heads": q.shape[-2],
        "out_is_bf16": out.dtype == "bfloat16",
        "clean": clean,
    }


def keys_map(name: str, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """Describe rows of e4m3 keys; one load brings up to 64 whole rows.

    The swizzle is as wide as a row. Rows after the last one bring zeros. Errors call the argument
    `name`; `ptr` is a multiple of 16; `shape` is ``(rows, head_dim)`` or ``(num_pages, page_size,
    head_dim)``; `strides` are in bytes, multiples of 16 but for the last one, which is 1.
    """
    head_dim, rows, *pages = sizes = shape[::-1]
    box = (head_dim, min(rows, BLOCK_TOKENS) if pages else BLOCK_TOKENS, *(1 for _ in pages))
    return TensorMap(name, ptr, "UINT8", sizes, strides[-2::-1], box, head_dim)
