# SPDX-License-Identifier: Apache-2.0
"""Launcher of the kernels of cuda/mha that attend to keys and values, in pages or rows."""

from __future__ import annotations

from math import e, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import launch_of, strided
from cumla.launch.mha.append_kv_cache import Scale
from cumla.launch.mha.attention_decode import CHUNK_TOKENS, tile_bytes
from cumla.launch.mha.attention_simt import ROWS
from cumla.launch.mha.bias_arrays import NO_BIAS, BiasArrays
from cumla.launch.mha.choice import with_caps
from cumla.launch.mha.mask_arrays import NO_MASK, MaskArrays
from cumla.launch.mha.shape import COLUMNS, E4M3
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import MOST_TOKENS, ROW_TILE
from cumla.launch.tensor_map import TensorMap, paged_kv_map

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.key import MHAKey

_LOG2_E = log2(e)


class MHAArguments(NamedTuple):
    """Checked views of one call; rows without pages are one page."""

    q: ArrayView  # (tokens, num_heads, columns) or (batch, q_len, num_heads, columns)
    k: ArrayView  # (num_pages, page_size, num_kv_heads, columns)
    v: ArrayView
    pages: ArrayView | None  # (batch, max_pages) int32, or a list (pages,)
    sinks: ArrayView | None  # (num_heads,) float32
    softmax_scale: float
    softcap: float  # 0: none
    window: tuple[int, int]  # left, right; -1: unbounded
    causal: bool
    layout: str  # of the pages that were given
    k_scale: Scale = Scale()  # of e4m3
    v_scale: Scale = Scale()
    mask: MaskArrays = NO_MASK
    bias: BiasArrays = NO_BIAS


def attention_launch(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the blocks of every part.

    `buffer` is the address of the plan's buffer, which holds a schedule; out has the axes of q, lse
    is (batch, num_heads, tokens), of one request if q has three axes.
    """
    values = attention_values(key, buffer, arguments, out, lse)
    choice = key.choice
    # Neighbours are kv heads that read the same pages where parts mostly have whole requests, and
    # elsewhere parts that join pieces. With windows the former took 1 % more.
    if choice.takes_single_rows:
        grid = (key.num_places * (ROW_TILE // ROWS), 1, key.num_kv_heads)
    elif choice.takes_full_tiles:
        grid = (key.sm_count, 1, 1)
    elif choice.box_heads > 1:
        # Two CTAs of a cluster, side by side, read neighbouring pairs of the same tokens. Clusters
        # of four do not all fit at once.
        grid = (key.num_kv_heads // choice.box_heads, key.parts, 1)
        return launch_of(choice.spec, grid, values, cluster=2 - grid[0] % 2)
    elif choice.takes_few_rows or (key.batch > key.parts and not key.has_window):
        grid = (key.num_kv_heads, key.parts, 1)
    else:
        grid = (1, key.parts, key.num_kv_heads)
    needs_caps = arguments.softcap or out.dtype == "float32"
    return launch_of(with_caps(choice.spec) if needs_caps else choice.spec, grid, values)


def attention_values(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> dict[str, Any]:
    """Name the values of struct AttentionParams, or of one that is derived from it."""
    a = arguments
    left, right = (-1, -1) if key.masked else a.window
    if 0 in a.k.shape:  # of which nothing is read, but copies of zeros need an address that exists
        a = a._replace(k=a.k._replace(ptr=a.q.ptr), v=a.v._replace(ptr=a.q.ptr))
    pages = a.pages
    if pages is not None and len(pages.shape) == 1:  # a table whose rows are a page apart
        pages = pages._replace(shape=(1, *pages.shape), strides=(4, 4))
    lse_batch, lse_head, lse_token = lse.strides
    entries_apart = 0 if pages is None else pages.strides[0] // 4
    if pages is None:
        tokens = entries = a.k.shape[1]
    else:
        tokens = pages.shape[1] * key.page_size
        entries = (pages.shape[0] - 1) * entries_apart + pages.shape[1]
    columns = "base", "stride_page", "stride_row", "stride_head"
    places, parts, tickets = key.layout.schedule_at(buffer)
    partial_out, partial_rows = key.layout.partials_at(buffer)
    return {
        "key_map": _map(key, "k", a.k),
        "value_map": _map(key, "v", a.v),
        "keys": strided(a.k, *columns),
        "values": strided(a.v, *columns),
        **_queries("q", a.q),
        **_queries("out", out),
        "lse": lse.ptr,
        "lse_stride_batch": lse_batch // 4,
        "lse_stride_head": lse_head // 4,
        "lse_stride_token": lse_token // 4,
        "block_table": 0 if pages is None else pages.ptr,
        "block_table_stride": entries_apart,
        "sinks": 0 if a.sinks is None else a.sinks.ptr,
        "places": places,
        "parts_in": parts,
        "tickets": tickets,
        "partial_out": partial_out,
        "partial_rows": partial_rows,
        "max_tokens": min(tokens, MOST_TOKENS),
        "page_entries": entries,
        "batch": key.num_places,
        "parts": max(key.cut_parts, 1),  # of one, no request is split, whatever a plan holds
        "num_pages": a.k.shape[0],
        "page_size": key.page_size,
        "box_rows": key.box_rows,
        "key_columns": key.head_dim,
        "value_columns": key.head_dim_v,
        "q_len": key.total_tokens,
        "tokens_apart": key.q_len,
        "heads_per_group": key.heads_per_group,
        "row_groups": key.row_groups,
        "may_wait": key.may_wait,
        "causal": key.causal,
        "window_left": left,
        "window_right": right,
        "out_is_float": out.dtype == "float32",
        "scale_log2": (a.softcap or a.softmax_scale) * _LOG2_E,
        "to_softcap": 2 * a.softmax_scale / a.softcap * _LOG2_E if a.softcap else 0.0,
        "by_heads_per_group": divisor_of(key.heads_per_group),
        "by_page_size": divisor_of(key.page_size or 1),
        "by_tokens_apart": divisor_of(key.q_len or 1 << 31),
        "batch_invariant": key.batch_invariant,
        "empty_lse": -inf,
        "key_scale": _scales(a.k_scale),
        "value_scale": _scales(a.v_scale),
        "num_kv_heads": key.num_kv_heads,
        "is_of_chunks": key.is_of_chunks,
        **({"mask": _mask(key, a)} if key.masked else {}),
        **a.bias.values,
    }


def _mask(key: MHAKey, a: MHAArguments) -> dict[str, int]:
    """Name the values of struct MaskArrays."""
    arrays = {"start", "end", "prefix_len", "tree", "tree_start", "words"}
    return {
        **{name: getattr(a.mask, name) for name in arrays},
        "is_causal": a.causal,
        "requests": key.batch,
    }


def _queries(name: str, view: ArrayView) -> dict[str, int]:
    """Name where rows of queries or of results begin; those without requests are of one."""
    if len(view.shape) == 3:
        view = view._replace(strides=(0, *view.strides))
    return strided(view, name, *(f"{name}_stride_{axis}" for axis in ("batch", "token", "head")))


def _scales(scale: Scale) -> dict[str, Any]:
    """Name the values of struct Scales."""
    view = scale.view
    request, head = (0, 0) if view is None else view.strides
    return {
        "data": 0 if view is None else view.ptr,
        "stride_request": request // 4,
        "stride_head": head // 4,
        "value": scale.number if view is None else 1.0,
        "requests": 1 if view is None else view.shape[0],
    }


def _map(key: MHAKey, name: str, view: ArrayView) -> TensorMap | bytes:
    is_e4m3 = key.cache_dtype == E4M3
    choice = key.choice
    of_16_bits = key.form != "rows" and not is_e4m3
    loads = key.box_rows == CHUNK_TOKENS if choice.takes_few_rows else of_16_bits
    if choice.takes_single_rows or not loads:
        return bytes(128)
    shape = tuple([max(size, 1) for size in view.shape])  # without rows nothing is loaded
    tensor_map = paged_kv_map(view.ptr, key.cache_dtype, shape, view.strides, key.box_rows)
    if choice.box_heads > 1:
        tensor_map = tensor_map._replace(box=(*tensor_map.box[:2], choice.box_heads, 1))
    width = tile_bytes(COLUMNS * key.kernel_tiles[name == "v"])
    if is_e4m3 and width < tensor_map.swizzle:
        tensor_map = tensor_map._replace(box=(width, *tensor_map.box[1:]), swizzle=width)
    return tensor_map._replace(name=name)
