# SPDX-License-Identifier: Apache-2.0
"""What the arguments of sparse MLA attention must look like; checked before anything is allocated.

Query and cache are those of dense MLA attention, with one kv head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cumla.core.arguments import INT32, Array, Views, bind, check_dtype, check_lies
from cumla.core.paged import BLOCK_TABLE, Host, refuse_value
from cumla.launch.sparse.mla_sparse import SparseArguments
from cumla.launch.sparse.shape import PACKED
from cumla.mla.arguments import (
    QUERY_AXES,
    Columns,
    cache_of,
    checked_cache_dtype,
    checked_kv_scale,
    checked_query_and_cache,
)
from cumla.mla.fp8_caches import FP8, PACKED_BYTES, is_packed

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

__all__ = [
    "TOKEN_AXES",
    "Attended",
    "Rows",
    "as_batch",
    "check_cache",
    "check_lengths",
    "check_places",
    "checked_arguments",
    "checked_cache",
    "on_rows",
    "spread",
]

TOKEN_AXES = ("total_tokens", "num_heads")  # of q without a batch, before its columns
Rows = tuple[int, ...]
"""Axes of the query tokens: (batch, q_len), or (total_tokens,)."""

_LISTS = {
    2: {"indices": Array("batch q_len topk", INT32, "row", "pass a list for each query token")},
    1: {"indices": Array("total_tokens topk", INT32, "row", "pass a list for each query token")},
}
_SINKS = {"sinks": Array("num_heads", ("float32",), "row", "pass a score for each query head")}
_ANY_TABLE = {"block_table": Array("requests max_pages", INT32, "row")}


class Attended(NamedTuple):
    """Checked arguments: the query as it came, and everything as the launches take it."""

    # Latent columns, (batch, q_len, num_heads, 512) or (total_tokens, num_heads, 512).
    q: ArrayView
    launched: SparseArguments
    cache: str  # as a key names it: that of dense attention, or PACKED

    @property
    def rows(self) -> Rows:
        """Axes of the query tokens, as they came."""
        return self.q.shape[:-2]


def checked_arguments(
    given: Views, axes: tuple[str, ...] | None, softmax_scale: float, factor: float | None
) -> Attended:
    """Check all but the lengths of the lists.

    `axes` are those of q before its columns, None for either; `factor` is the argument kv_scale if
    that is a number.
    """
    views = {name: _in_pages(name, view) for name, view in given.items()}
    columns = _checked_columns(views, axes)
    kv_scale = checked_kv_scale(columns, views, factor)
    rows, num_heads = columns.q.shape[:-2], columns.q.shape[-2]
    sizes = dict(zip(QUERY_AXES if len(rows) == 2 else TOKEN_AXES, columns.q.shape, strict=False))
    views["indices"] = _one_list(views["indices"], rows)
    bind(_LISTS[len(rows)], views, sizes)
    table, requests = _checked_places(views, rows)
    bind(_SINKS, views, {"num_heads": num_heads})
    launched = SparseArguments(
        q=as_batch(columns.q, 4),
        q_rope=as_batch(columns.q_rope, 4),
        kv_cache=columns.kv_cache,
        kv_rope=columns.kv_rope,
        kv_scales=columns.kv_scales,
        kv_scale=kv_scale,
        indices=as_batch(cast("ArrayView", views["indices"]), 3),
        block_table=table,
        row_to_request=requests,
        sinks=views.get("sinks"),
        softmax_scale=softmax_scale,
    )
    whole = views.get("kv_cache")
    packed = whole is not None and is_packed(whole)
    return Attended(columns.q, launched, PACKED if packed else cache_of(columns.kv_cache))


def checked_cache(cache_dtype: Any, dtype: Any = None) -> str:
    """Check what a plan's caches are to be, and name it as a key does."""
    if not isinstance(cache_dtype, str) or cache_dtype != PACKED:
        return checked_cache_dtype(cache_dtype, dtype)
    checked_cache_dtype(FP8, dtype)
    return PACKED


def check_cache(arguments: Attended, made: str) -> None:
    """Refuse a cache that a plan is not made for."""
    names = {
        "same": arguments.q.dtype,
        "e4m3": FP8,
        PACKED: f"packed rows of {PACKED_BYTES} bytes",
    }
    if arguments.cache != made:
        raise ValueError(
            f"plan: made for a cache of {names[made]}, got one of {names[arguments.cache]}; make a "
            f"plan with the cache_dtype of each"
        )


def _checked_columns(views: Views, axes: tuple[str, ...] | None) -> Columns:
    """Check query and cache."""
    if axes is None:
        query = cast("ArrayView", views["q"] if "q" in views else views["q[0]"])
        axes = TOKEN_AXES if len(query.shape) == 3 else QUERY_AXES
    columns = checked_query_and_cache(views, axes)
    if columns.kv_cache.shape[2] != 1:
        raise ValueError(
            f"kv_cache: needs one kv head, whose rows the indices name, got "
            f"{columns.kv_cache.shape[2]}; pass the heads one by one"
        )
    return columns


def _in_pages(name: str, view: ArrayView | None) -> ArrayView | None:
    """Take the rows of a cache without pages for pages of one slot."""
    if view is None or not name.startswith("kv_cache") or len(view.shape) != 2:
        return view
    (rows, columns), (step, stride) = view.shape, view.strides
    return view._replace(shape=(rows, 1, columns), strides=(step, step, stride))


def _one_list(view: ArrayView | None, rows: Rows) -> ArrayView | None:
    """Leave out the axis of one kv head, of lists without a batch."""
    if view is None or len(rows) == 2 or len(view.shape) != 3 or view.shape[1] != 1:
        return view
    return view._replace(shape=view.shape[::2], strides=view.strides[::2])


def _checked_places(views: Views, rows: Rows) -> tuple[ArrayView | None, ArrayView | None]:
    """Check the table of pages, and which row of it each query token has."""
    table, requests = views.get("block_table"), views.get("row_to_request")
    if table is None:
        if requests is not None:
            raise ValueError(
                "row_to_request: needs a block_table, whose rows it names, got None; leave it out, "
                "for the indices are slots of the cache"
            )
        return None, None
    if requests is None:
        if len(rows) == 1:
            raise ValueError(
                "row_to_request: needed with block_table, to tell the request of each query token, "
                "got None; pass it"
            )
        bind({"block_table": BLOCK_TABLE}, views, {"batch": rows[0]})
        return table, None
    bind(_ANY_TABLE, views, {})
    return table, spread("row_to_request", requests, rows)


def as_batch(view: ArrayView, axes: int) -> ArrayView:
    """Put in a batch of one where there is none."""
    if len(view.shape) == axes:
        return view
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))


def spread(name: str, view: ArrayView, rows: Rows) -> ArrayView:
    """Check numbers of query tokens or of requests, and view them as (batch, q_len)."""
    check_dtype(name, view.dtype, INT32)
    strides: tuple[int, ...]
    if view.shape == rows[:1]:
        strides = (*view.strides, 0) if len(rows) == 2 else (0, *view.strides)
    elif view.shape == rows:
        strides = view.strides
    elif rows[0] == 1 and view.shape == rows[1:]:  # of a plan without a batch
        strides = (0, *view.strides)
    else:
        axes = f"(batch,) or (batch, q_len) with batch {rows[0]} and q_len {rows[-1]}"
        if len(rows) == 1:
            axes = f"(total_tokens,) with total_tokens {rows[0]}"
        raise ValueError(
            f"{name}: needs shape {axes}, got {view.shape}; pass a number for each query token"
        )
    check_lies(name, view, "elements")
    return view._replace(shape=rows if len(rows) == 2 else (1, *rows), strides=strides)


# --- on the CPU, and in check mode ---------------------------------------------------------------


def on_rows(numbers: np.ndarray[Any, Any], rows: Rows) -> np.ndarray[Any, Any]:
    """Give each query token the number that :func:`spread` views there."""
    batch, q_len = rows if len(rows) == 2 else (1, *rows)
    if numbers.ndim == 1:
        numbers = numbers[:, None] if len(numbers) == batch else numbers[None]
    return np.broadcast_to(numbers, (batch, q_len)).reshape(rows)


def check_lengths(host: Host, topk: int) -> None:
    """Raise for the first length of a list that is out of range."""
    lengths = host.get("topk_length")
    if lengths is not None:
        need = f"a length from 0 to topk = {topk}"
        wrong = (lengths < 0) | (lengths > topk)
        refuse_value("topk_length", lengths, wrong, need, "the kernels would clamp it")


def check_places(host: Host, arguments: Attended) -> None:
    """Raise for the first request, or page number that an index leads to, that is out of range."""
    table = host.get("block_table")
    if table is None:
        return
    batch, q_len, topk = arguments.launched.indices.shape
    requests = np.broadcast_to(np.arange(batch)[:, None], (batch, q_len))
    if "row_to_request" in host:
        given, last = host["row_to_request"], len(table) - 1
        need = f"a row of block_table up to {last}, or below 0 for none"
        refuse_value("row_to_request", given, given > last, need, "its list would be empty")
        requests = on_rows(given, (batch, q_len))
    num_pages, page_size = arguments.launched.kv_cache.shape[:2]
    lengths = on_rows(host.get("topk_length", np.full(batch, topk)), (batch, q_len))
    index = host["indices"].reshape(batch, q_len, topk)
    column = index // page_size
    seen = (np.arange(topk) < lengths[..., None]) & (index >= 0) & (column < table.shape[1])
    seen &= requests[..., None] >= 0
    used = np.zeros(table.shape, bool)
    used[np.broadcast_to(requests[..., None], index.shape)[seen], column[seen]] = True
    wrong = used & ((table < 0) | (table >= num_pages))
    refuse_value("block_table", table, wrong, f"a page number from 0 to {num_pages - 1}")
