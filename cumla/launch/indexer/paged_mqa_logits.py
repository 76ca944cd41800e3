# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/paged_mqa_logits.cu: indexer logits over a paged cache."""

from __future__ import annotations

from itertools import product, starmap
from typing import TYPE_CHECKING

from cumla.launch.indexer.choice import LogitsShape, paged_shape
from cumla.launch.indexer.paged_mqa_logits_few import few_logits_launch, few_logits_spec
from cumla.launch.indexer.paged_mqa_schedule import PagedMQAKey, lengths_values
from cumla.launch.indexer.shape import (
    LOGITS_THREADS,
    keys_map,
    logits_values,
)
from cumla.launch.layouts import launch_of, strided
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.indexer.shape import PagedMQAArguments
    from cumla.launch.kernel import Launch
    from cumla.launch.tensor_map import TensorMap

_NO_MAP = bytes(128)


def _spec(shape: LogitsShape) -> KernelSpec:
    tags, size = [f"h{shape.heads}", f"d{shape.head_dim}", f"n{shape.columns}"], shape.smem_bytes
    params = "PagedMqaMxfp4Params" if shape.mxfp4 else "PagedMqaParams"
    numbers = (*shape[:4], shape.stages, size, *([True] if shape.mxfp4 else []))
    names = "indexer", "paged_mqa_logits", params
    tags += ["mxfp4"] if shape.mxfp4 else []
    return KernelSpec.of(*names, *numbers, tags=tags, threads=LOGITS_THREADS, smem_bytes=size)


_SHAPES = (
    *starmap(paged_shape, product((32, 64), (32, 64, 128), range(1, 9))),
    *starmap(paged_shape, product((32, 64), (128,), range(1, 9), (True,))),
)
_SPECS = {shape: _spec(shape) for shape in _SHAPES}  # several shapes are equal
SPECS = tuple(_SPECS.values())


def paged_mqa_logits_spec(key: PagedMQAKey) -> KernelSpec:
    """Choose the kernel; the same one serves all page sizes, and float32 and bfloat16."""
    return few_logits_spec(key) or _batch_spec(key)


def _batch_spec(key: PagedMQAKey) -> KernelSpec:
    return _SPECS[paged_shape(key.num_heads, key.head_dim, key.q_len, key.mxfp4)]


def paged_mqa_logits_launch(
    key: PagedMQAKey, arguments: PagedMQAArguments, *, clean: bool
) -> Launch:
    """Describe how to score the tokens that each row sees, as the plan's schedule deals them out.

    There are at least one request, one page and one column. Where `clean`, -inf is written where
    nothing is visible.
    """
    if (few := few_logits_spec(key)) is not None:
        return few_logits_launch(few, key, arguments, clean=clean)
    a = arguments
    num_pages, page_size, _ = a.k_cache.shape
    keys: TensorMap | bytes = _NO_MAP
    more: dict[str, int] = {}
    if key.mxfp4:
        more = strided(a.k_cache, "values", "values_stride")
    else:
        keys = keys_map("kv_cache", a.k_cache.ptr, a.k_cache.shape, a.k_cache.strides)
    values = {
        "keys": keys,
        **more,
        "logits": logits_values(a.q, a.weights, a.out, clean),
        "kv_lens": lengths_values(key, a.kv_lens, min(key.most_tokens, a.out.shape[1])),
        **strided(a.q, "q", "q_stride_request", "q_stride_row"),
        **strided(a.scale_cache, "scales", "scales_stride"),
        **strided(a.block_table, "block_table", "block_table_stride"),
        "bounds": a.buffer,
        "num_pages": num_pages,
        "log2_of_page": page_size.bit_length() - 1,
    }
    return launch_of(_batch_spec(key), (key.num_sms, 1, 1), values)
