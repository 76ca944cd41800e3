# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/paged_mqa_logits_few.cu: indexer logits of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.indexer.choice import RULES
from cumla.launch.indexer.paged_mqa_schedule import lengths_values
from cumla.launch.indexer.shape import keys_map, logits_values
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.indexer.paged_mqa_schedule import PagedMQAKey
    from cumla.launch.indexer.shape import PagedMQAArguments
    from cumla.launch.kernel import Launch

_FILE = "indexer/paged_mqa_logits_few"
_COLUMNS, _HEAD_DIM, _THREADS, _SMEM = (
    constant(_FILE, name)
    for name in (
        "LogitsFewLayout::kColumns",
        "LogitsFewLayout::kDim",
        "kFewThreads",
        "LogitsFewLayout::kBytes",
    )
)
_SPECS = {
    heads: KernelSpec.of(
        *("indexer", "paged_mqa_logits_few", "PagedMqaFewParams", heads),
        tags=[f"h{heads}"],
        threads=_THREADS,
        smem_bytes=_SMEM,
    )
    for heads in (32, 64)
}
SPECS = tuple(_SPECS.values())


def few_logits_spec(key: PagedMQAKey) -> KernelSpec | None:
    """Look up the kernel, if it serves this shape."""
    heads = max(key.num_heads, RULES.fewest_heads)
    serves = (
        key.batch == 1
        and key.q_len * heads <= _COLUMNS
        and key.head_dim == _HEAD_DIM
        and not key.mxfp4
    )
    return _SPECS[heads] if serves else None


def few_logits_launch(
    spec: KernelSpec, key: PagedMQAKey, arguments: PagedMQAArguments, *, clean: bool
) -> Launch:
    """Describe how to score the tokens that each row of the request sees."""
    a = arguments
    num_pages, page_size, _ = a.k_cache.shape
    values = {
        "keys": keys_map("kv_cache", a.k_cache.ptr, a.k_cache.shape, a.k_cache.strides),
        "logits": logits_values(a.q, a.weights, a.out, clean),
        "kv_lens": lengths_values(key, a.kv_lens, min(key.most_tokens, a.out.shape[1])),
        "q": a.q.ptr,
        "q_stride_row": a.q.strides[1],
        "scales": a.scale_cache.ptr,
        "scales_stride": a.scale_cache.strides[0],
        "block_table": a.block_table.ptr,
        "num_pages": num_pages,
        "log2_of_page": page_size.bit_length() - 1,
    }
    return launch_of(spec, (key.num_sms, 1, 1), values)
