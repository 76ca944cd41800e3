# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse.cu: MLA attention to lists of cache rows."""

from __future__ import annotations

from math import e, log2
from typing import TYPE_CHECKING, NamedTuple

from cumla.core.arrays import ArrayView
from cumla.launch.merge_states import StateViews, merge_launch
from cumla.launch.mla.mla_decode import TAGS, DecodeArguments, decode_launch
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.mla_sparse_fp8 import (
    sparse_fp8_launch,
    sparse_fp8_packed_launch,
    sparse_fp8_specs,
)
from cumla.launch.sparse.mla_sparse_packed import SPECS as PACKED_SPECS
from cumla.launch.sparse.mla_sparse_packed import sparse_packed_launch
from cumla.launch.sparse.select_rows import SPECS as SELECT_SPECS
from cumla.launch.sparse.select_rows import (
    bound_rows_launch,
    lists_values,
    row_steps,
    select_rows_launch,
)
from cumla.launch.sparse.shape import PACKED
from cumla.launch.split.plan import ROW_TILE
from cumla.launch.split.schedule import schedule_launch, schedule_spec

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "SparseArguments", "attend_launches", "lengths_launches", "sparse_specs"]


class SparseArguments(NamedTuple):
    """Checked views of one call; ragged queries have one batch."""

    q: ArrayView  # (batch, q_len, num_heads, 512)
    q_rope: ArrayView  # (batch, q_len, num_heads, 64)
    kv_cache: ArrayView  # (num_pages, page_size, 1, 512), of q's dtype or of float8_e4m3fn
    kv_rope: ArrayView  # the same with 64 columns
    kv_scales: ArrayView | None  # the same with 4 float32
    kv_scale: ArrayView | float  # factor of all other e4m3 columns
    indices: ArrayView  # (batch, q_len, topk) int32
    block_table: ArrayView | None  # (requests, max_pages) int32
    row_to_request: ArrayView | None  # (batch, q_len) int32
    sinks: ArrayView | None  # (num_heads,) float32
    softmax_scale: float  # factor of the scores


_MOST_SINK = 3e38  # a higher one is infinite: no value has weight beside it
_MANY = 4  # row tiles of lists for each multiprocessor

_SPECS = {
    (dtype, shared): KernelSpec(
        stem="mla_sparse",
        package="cumla.cuda.sparse",
        entry=f"mla_sparse_{dtype}{'_shared_blocks' if shared else ''}",
        function=f"mla_sparse<{tag}, {str(shared).lower()}>",
        params="MlaDecodeParams",
        threads=384,
        smem_bytes=232160,
    )
    for dtype, tag in TAGS.items()
    for shared in (False, True)
}
SPECS = tuple(_SPECS.values())


def sparse_specs(key: MLASparseKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape, in the order in which they run; sinks need one more."""
    return (*SELECT_SPECS, schedule_spec(key), *_attend_specs(key))


def _attend_specs(key: MLASparseKey) -> tuple[KernelSpec, ...]:
    if key.cache == "same":
        return (_spec(key),)
    if key.cache == PACKED and key.row_tile == ROW_TILE:
        return PACKED_SPECS
    return sparse_fp8_specs(key)


def _spec(key: MLASparseKey) -> KernelSpec:
    """Choose by what binds: many lists share rows in L2, and then it is arithmetic."""
    many = key.num_places * key.row_tiles >= _MANY * key.sm_count
    return _SPECS[key.dtype, key.row_tiles > 1 or many]


def lengths_launches(
    key: MLASparseKey, buffer: int, topk_length: ArrayView | None
) -> tuple[Launch, ...]:
    """Describe how to schedule lists of these lengths, ``(batch, q_len)``; None for full ones."""
    places = key.num_places
    bounds = ArrayView(buffer + key.bounds, (places,), (4,), "int32", key.device)
    return bound_rows_launch(key, buffer, topk_length), schedule_launch(key, buffer, bounds)


def attend_launches(
    key: MLASparseKey, buffer: int, arguments: SparseArguments, out: ArrayView, lse: ArrayView
) -> tuple[Launch, ...]:
    """Describe how to select the rows that exist, and to attend to them.

    `buffer` is the address of a plan's buffer, which holds a schedule; `out` is ``(batch, q_len,
    num_heads, 512)`` and `lse` ``(batch, num_heads, q_len)``.
    """
    a = arguments
    parts = tuple(part for part in (a.kv_cache, a.kv_rope, a.kv_scales) if part is not None)
    steps = row_steps(parts)
    num_pages, page_size = a.kv_cache.shape[:2]
    num_pages, page_size = a.kv_cache.shape[:2]
    lists = lists_values(a.indices, (num_pages, page_size), steps, a.block_table, a.row_to_request)
    rows = [_as_rows(part, steps.total, n) for part, n in zip(parts, steps.strides, strict=True)]
    latent, rope, *scales = rows
    selected = ArrayView(
        buffer + key.selected, (key.num_places, key.topk), (key.topk * 4, 4), "int32", key.device
    )
    decode = DecodeArguments(
        a.q,
        a.q_rope,
        latent,
        rope,
        selected,
        scales[0] if scales else None,
        a.kv_scale,
        a.softmax_scale,
        causal=False,
    )
    launches: tuple[Launch, ...]
    if key.cache == PACKED:
        of_key = sparse_packed_launch if key.row_tile == ROW_TILE else sparse_fp8_packed_launch
        launches = (of_key(key, buffer, decode, lists, out, lse),)
    else:
        if key.cache == "same":
            attend = decode_launch(_spec(key), key, buffer, decode, out, lse)
        else:
            attend = sparse_fp8_launch(key, buffer, decode, out, lse)
        launches = select_rows_launch(key, buffer, lists), attend
    return (
        launches if a.sinks is None else (*launches, _sinks_launch(key, buffer, a.sinks, out, lse))
    )


def _as_rows(part: ArrayView, count: int, step: int) -> ArrayView:
    """See pages of one row each."""
    columns = part.shape[3]
    strides = (step, step, step, part.strides[3])
    return part._replace(shape=(count, 1, 1, columns), strides=strides)


def _sinks_launch(
    key: MLASparseKey, buffer: int, sinks: ArrayView, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to take sinks into results: states without a value, merged in place."""
    per_head = lse._replace(shape=tuple(lse.shape[i] for i in (0, 2, 1)))
    per_head = per_head._replace(strides=tuple(lse.strides[i] for i in (0, 2, 1)))
    size = out.strides[3]
    nothing = ArrayView(buffer + key.zeros, out.shape, (0, 0, 0, size), out.dtype, out.device)
    sink = sinks._replace(shape=per_head.shape, strides=(0, 0, sinks.strides[0]))
    result = StateViews(out, per_head)
    return merge_launch((result, StateViews(nothing, sink)), None, result, log2(e), _MOST_SINK)
