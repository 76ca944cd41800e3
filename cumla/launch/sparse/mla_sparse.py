# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse.cu: MLA attention to lists of cache rows."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cumla.core.arrays import ArrayView
from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode import SMEM_BYTES, DecodeArguments, decode_launch
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.sparse.choice import form_of, reads_lists
from cumla.launch.sparse.mla_sparse_fp8 import sparse_fp8_launch, sparse_fp8_specs
from cumla.launch.sparse.mla_sparse_packed import sparse_packed_launch, sparse_packed_spec
from cumla.launch.sparse.mla_sparse_v4 import sparse_v4_launch, sparse_v4_spec
from cumla.launch.sparse.select_rows import SPECS as SELECT_SPECS
from cumla.launch.sparse.select_rows import (
    RowSteps,
    bound_rows_launch,
    lists_values,
    row_steps,
    select_rows_launch,
)
from cumla.launch.split.schedule import schedule_launch, schedule_spec
from cumla.mla.shape import V4

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.sparse.key import MLASparseKey

__all__ = ["SPECS", "SparseArguments", "attend_launches", "lengths_launches", "sparse_specs"]

Lengths = tuple["ArrayView | None", "ArrayView | None"]
"""Lengths of the lists of a cache, and of a second cache; None for full lists."""


class SparseArguments(NamedTuple):
    """Checked views of one call; ragged queries have one batch."""

    q: ArrayView  # (batch, q_len, num_heads, 512)
    q_rope: ArrayView | None  # (batch, q_len, num_heads, 64); None of rows of 512 columns
    # (num_pages, page_size, 1, 512), of q's dtype or of float8_e4m3fn, or bytes of V4 or V4.1
    kv_cache: ArrayView
    kv_rope: ArrayView | None  # the same with 64 columns
    kv_scales: ArrayView | None  # the same with 4 float32
    kv_scale: ArrayView | float  # factor of all other e4m3 columns
    indices: ArrayView  # (batch, q_len, topk) int32
    block_table: ArrayView | None  # (requests, max_pages) int32
    row_to_request: ArrayView | None  # (batch, q_len) int32
    sinks: ArrayView | None  # (num_heads,) float32
    softmax_scale: float  # factor of the scores
    extra_kv_cache: ArrayView | None = None  # as kv_cache, V4 or V4.1
    extra_indices: ArrayView | None = None  # (batch, q_len, extra_topk) int32
    as_flash_mla: bool = False  # the log-sum-exp is without sinks, and inf for an empty list
    has_max_logits: bool = False  # the largest score of each row is an output, too

    @property
    def columns(self) -> int:
        """Columns of the queries."""
        return VALUE_DIM if self.q_rope is None else HEAD_DIM


_TILES = {
    HEAD_DIM: "SelectedTile<kRowTile>",
    VALUE_DIM: "ValueTile<SelectedTile<kRowTile>>",
}  # by the columns of a row


def _made(dtype: str, columns: int, shared: bool, has_max_logits: bool) -> KernelSpec:
    tile = _TILES[columns]
    params, smem_bytes = "MlaDecodeParams", SMEM_BYTES
    if has_max_logits:
        params, tile = "MlaSparseMaxLogitsParams", f"MaxLogitsTile<{tile}>"
        smem_bytes = constant("sparse/mla_sparse", "SharedLayout(0).max_logit(kRowTile)")
    flags = {"512": columns == VALUE_DIM, "shared_blocks": shared, "max_logits": has_max_logits}
    return KernelSpec.of(
        *("sparse", "mla_sparse", params, dtype, shared, tile),
        tags=[dtype, *[tag for tag, is_on in flags.items() if is_on]],
        threads=384,
        smem_bytes=smem_bytes,
    )


def _swapped(dtype: str, columns: int) -> KernelSpec:
    """Describe the kernel for few heads, which are the N side of its products."""
    tile = _TILES[columns].replace("kRowTile", "kSwappedRows")
    return KernelSpec.of(
        *("sparse", "mla_sparse", "MlaDecodeParams", dtype, False, tile),
        tags=[dtype, *["512"] * (columns == VALUE_DIM), "swapped"],
        threads=384,
        smem_bytes=_SWAPPED_SMEM[columns],
    )


def _listed(dtype: str, swapped: bool) -> KernelSpec:
    """Describe the kernel of rows of 512 columns that reads lists itself: of heads of one tile."""
    tile = "ListedTile<kSwappedRows>" if swapped else "ListedTile<kRowTile>"
    return KernelSpec.of(
        *("sparse", "mla_sparse", "MlaSparseListsParams", dtype, not swapped, tile),
        tags=[dtype, "512", *["swapped"] * swapped, "lists"],
        threads=384,
        smem_bytes=_LISTED_SMEM[swapped],
    )


_LISTED_SMEM = (
    constant("sparse/mla_sparse", "RingLayout(0).bits(0) + RingLayout::kBits * 16"),
    constant("mla/mla_decode_swapped", "SwappedLayoutOf<8, false>(0).exist(3, 2)"),
)


_SWAPPED_SMEM = {
    HEAD_DIM: constant("mla/mla_decode_swapped", "SwappedLayout(0).query_free() + 8"),
    VALUE_DIM: constant("mla/mla_decode_swapped", "SwappedLayoutOf<8, false>(0).query_free() + 8"),
}
_SWAPPED = {(dtype, columns): _swapped(dtype, columns) for dtype in HALVES for columns in _TILES}
_FLAGS = False, True
_LISTED = {names: _listed(*names) for names in product(HALVES, _FLAGS)}
_SPECS = {
    (dtype, columns, shared, has_max_logits): _made(dtype, columns, shared, has_max_logits)
    for dtype, columns, shared, has_max_logits in product(HALVES, _TILES, _FLAGS, _FLAGS)
    if shared or columns == HEAD_DIM
}
SPECS = (*_SPECS.values(), *_SWAPPED.values(), *_LISTED.values())


def sparse_specs(key: MLASparseKey, columns: int | None = None) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape; of rows in 16 bits for so many columns, or for each width."""
    return (*SELECT_SPECS, schedule_spec(key), *_attend_specs(key, columns))


def _attend_specs(key: MLASparseKey, columns: int | None) -> tuple[KernelSpec, ...]:
    if key.cache == "same":
        return tuple([_spec(key, width) for width in _TILES if columns in (None, width)])
    if key.is_widened:
        return (sparse_v4_spec(key),)
    if key.has_whole_rows:
        return (sparse_packed_spec(key),)
    return sparse_fp8_specs(key)


def _spec(key: MLASparseKey, columns: int) -> KernelSpec:
    form = form_of(key, columns)
    if columns == VALUE_DIM and reads_lists(key):
        return _LISTED[key.dtype, form == "swapped"]
    if form == "swapped":
        return _SWAPPED[key.dtype, columns]
    return _SPECS[key.dtype, columns, form == "shared_blocks", key.has_max_logits]


def lengths_launches(key: MLASparseKey, buffer: int, lengths: Lengths) -> tuple[Launch, ...]:
    """Describe how to schedule lists of these lengths, ``(batch, q_len)``."""
    places = key.num_places
    bounds = ArrayView(buffer + key.bounds, (places,), (4,), "int32", key.device)
    caches = 2 if key.extra_topk else 1
    bound = [bound_rows_launch(key, buffer, lengths[i], i) for i in range(caches)]
    return *bound, schedule_launch(key, buffer, bounds)


def attend_launches(
    key: MLASparseKey,
    buffer: int,
    arguments: SparseArguments,
    out: ArrayView,
    lse: ArrayView,
    max_logits: ArrayView | None = None,
) -> tuple[Launch, ...]:
    """Describe how to select the rows that exist, and to attend to them.

    `buffer` is the address of a plan's buffer, which holds a schedule; `out` is ``(batch, q_len,
    num_heads, 512)`` and `lse` ``(batch, num_heads, q_len)``. `max_logits`, of keys that have it,
    has the layout of lse.
    """
    if key.is_widened:
        return _v4_launches(key, buffer, arguments, out, lse)
    return _row_launches(key, buffer, arguments, out, lse, max_logits)


def _row_launches(
    key: MLASparseKey,
    buffer: int,
    a: SparseArguments,
    out: ArrayView,
    lse: ArrayView,
    max_logits: ArrayView | None,
) -> tuple[Launch, ...]:
    """Describe both for rows of 576 columns, or of 512 that are numbers or whole rows."""
    given = tuple(part for part in (a.kv_cache, a.kv_rope, a.kv_scales) if part is not None)
    steps = row_steps(given)
    pages = a.kv_cache.shape[0], a.kv_cache.shape[1]
    lists = lists_values(a.indices, pages, steps, a.block_table, a.row_to_request)
    latent, *others = (
        _as_rows(part, steps.total, n) for part, n in zip(given, steps.strides, strict=True)
    )
    rope = _zeros(key, buffer, latent.shape) if a.kv_rope is None else others[0]
    scales = None if a.kv_scales is None else others[-1]
    decode = _decode_arguments(key, buffer, a, latent, rope)._replace(kv_scales=scales)
    if key.reads_lists:
        return (sparse_packed_launch(key, buffer, decode, lists, out, lse),)
    if key.cache == "same":
        spec, more = _spec(key, a.columns), {}
        if max_logits is not None:
            at = buffer + key.partial_max_logits
            more = {"max_logits": max_logits.ptr, "partial_max_logits": at}
        if spec in _LISTED.values():
            return (decode_launch(spec, key, buffer, decode, out, lse, lists=lists),)
        attend = decode_launch(spec, key, buffer, decode, out, lse, **more)
    else:
        attend = sparse_fp8_launch(key, buffer, decode, out, lse)
    return select_rows_launch(key, buffer, lists), attend


def _v4_launches(
    key: MLASparseKey, buffer: int, a: SparseArguments, out: ArrayView, lse: ArrayView
) -> tuple[Launch, ...]:
    """Describe it for rows of V4 or V4.1, of one or two caches."""
    given = [(a.kv_cache, a.indices, a.block_table, a.row_to_request)]
    if key.extra_topk and a.extra_kv_cache is not None and a.extra_indices is not None:
        given.append((a.extra_kv_cache, a.extra_indices, None, None))
    caches = []
    for cache, indices, table, requests in given:
        pages = cache.shape[0], cache.shape[1]
        row_step = 1 if key.cache == V4 else cache.strides[1]
        steps = RowSteps(pages[1], row_step, pages[0] * pages[1], ())
        caches.append((cache, lists_values(indices, pages, steps, table, requests)))
    nothing = _zeros(key, buffer, (1, 1, 1))
    firsts = ArrayView(
        buffer + key.list_bounds[0], (key.num_places, key.entries), (4, 0), "int32", key.device
    )
    decode = _decode_arguments(key, buffer, a, nothing, nothing)._replace(block_table=firsts)
    return (sparse_v4_launch(key, buffer, decode, tuple(caches), out, lse),)


def _decode_arguments(
    key: MLASparseKey, buffer: int, a: SparseArguments, latent: ArrayView, rope: ArrayView
) -> DecodeArguments:
    """See lists as the block tables of requests, whose pages are single rows of a cache."""
    selected = ArrayView(
        buffer + key.selected,
        (key.num_places, key.entries),
        (key.entries * 4, 4),
        "int32",
        key.device,
    )
    return DecodeArguments(
        a.q,
        _zeros(key, buffer, a.q.shape) if a.q_rope is None else a.q_rope,
        latent,
        rope,
        selected,
        None,
        a.kv_scale,
        a.softmax_scale,
        causal=False,
        empty_lse=inf if a.as_flash_mla else -inf,
        sinks=a.sinks,
        sink_in_lse=not a.as_flash_mla,
    )


def _zeros(key: MLASparseKey, buffer: int, shape: tuple[int, ...]) -> ArrayView:
    """View the plan's row of zeros in the place of RoPE columns that there are not."""
    return ArrayView(buffer + key.zeros, (*shape[:3], 64), (0, 0, 0, 2), key.dtype, key.device)


def _as_rows(part: ArrayView, count: int, step: int) -> ArrayView:
    """See pages of one row each."""
    columns = part.shape[3]
    strides = (step, step, step, part.strides[3])
    return part._replace(shape=(count, 1, 1, columns), strides=strides)
