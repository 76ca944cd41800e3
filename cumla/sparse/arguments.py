# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of sparse MLA, before anything is allocated.

Query and cache are those of dense MLA attention, with one kv head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cumla.core.arguments import (
    INT32,
    SINKS,
    Array,
    Views,
    bind,
    check_dtype,
    check_layout,
    check_lies,
    dtype_name,
)
from cumla.core.names import arg
from cumla.core.paged import BLOCK_TABLE, Host, refuse_value
from cumla.core.spec import Option
from cumla.launch.sparse.mla_sparse import SparseArguments
from cumla.mla.arguments import (
    DTYPES,
    QUERY_AXES,
    cache_of,
    check_one_head,
    check_rows,
    checked_cache_dtype,
    checked_kv_scale,
    checked_query_and_cache,
    checked_v4,
    heads_problem,
    with_head_axis,
)
from cumla.mla.fp8_caches import (
    E4M3,
    check_factor,
    checked_format,
    format_of,
    relabelled,
    scales_apart,
    unnamed_format,
)
from cumla.mla.shape import (
    E4M3_512,
    FORMATS,
    FP8,
    HEAD_DIM,
    NO_ROPE,
    PACKED,
    V4,
    V41,
    V41_FP4,
    VALUE_DIM,
)

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.sparse.key import MLASparseKey

TOKEN_AXES = ("total_tokens", "num_heads")  # of q without a batch, before its columns
Rows = tuple[int, ...]
"""Axes of the query tokens: (batch, q_len), or (total_tokens,)."""

_KINDS = ("slots", "positions")


def _checked_kind(name: str, value: object) -> str | None:
    if value is not None and value not in _KINDS:
        raise ValueError(
            f"{arg(name)}: needs 'slots' or 'positions', got {value!r}; pass one, or leave it out"
        )
    return None if value is None else _KINDS[_KINDS.index(value)]


INDICES_ARE = Option("indices_are", None, _checked_kind, "str?")
CACHE_FORMATS = (
    Option("cache_format", None, checked_format, "str?"),
    Option("extra_cache_format", None, checked_format, "str?"),
)
BESIDE = {V4: (V4,), V41: (V41, V41_FP4), V41_FP4: (V41, V41_FP4)}
"""Formats of a second cache, by that of the first one; its own is the default."""
_EACH = "pass a list for each query token"
_LISTS = {
    2: {
        "indices": Array("batch q_len topk", INT32, "row", _EACH),
        "extra_indices": Array("batch q_len extra_topk", INT32, "row", _EACH),
    },
    1: {
        "indices": Array("total_tokens topk", INT32, "row", _EACH),
        "extra_indices": Array("total_tokens extra_topk", INT32, "row", _EACH),
    },
}
_ANY_TABLE = {"block_table": Array("requests max_pages", INT32, "row")}


class Attended(NamedTuple):
    """Checked arguments: the query as it came, and everything as the launches take it."""

    # Latent columns, (batch, q_len, num_heads, 512) or (total_tokens, num_heads, 512).
    q: ArrayView
    launched: SparseArguments
    cache: str  # as a key names it: that of dense attention, or one of FORMATS
    extra_cache: str  # one of FORMATS; "" without a second cache

    @property
    def rows(self) -> Rows:
        """Axes of the query tokens, as they came."""
        return self.q.shape[:-2]


class _Columns(NamedTuple):
    """Query and cache, and which cache it is; RoPE columns if they are apart."""

    q: ArrayView
    q_rope: ArrayView | None
    kv_cache: ArrayView
    kv_rope: ArrayView | None
    kv_scales: ArrayView | None
    kv_scale: ArrayView | float
    cache: str


def checked_arguments(
    given: Views,
    axes: tuple[str, ...] | None,
    options: Any,
) -> Attended:
    """Check all but the lengths of the lists.

    `axes` are those of q before its columns, None for either; `options` are those of the function.
    """
    views = {name: _in_pages(name, view) for name, view in given.items()}
    q = views.get("q")
    if options.indices_are is not None:
        _check_kind(options.indices_are, views.get("block_table"))
    is_narrow = q is not None and q.shape[-1:] == (VALUE_DIM,)
    columns = (_checked_narrow if is_narrow else _checked_columns)(views, axes, options)
    if options.has_max_logits:
        check_dtype("kv_cache", columns.kv_cache.dtype, (columns.q.dtype,))
    rows, num_heads = columns.q.shape[:-2], columns.q.shape[-2]
    sizes = dict(zip(QUERY_AXES if len(rows) == 2 else TOKEN_AXES, columns.q.shape, strict=False))
    for name in ("indices", "extra_indices"):
        views[name] = _one_list(views.get(name), rows)
    extra, extra_cache = _checked_extra(views, columns.cache, options.extra_cache_format)
    lists = _LISTS[len(rows)]
    bind(lists if extra else {"indices": lists["indices"]}, views, sizes)
    counts = [views[name] for name in ("indices", "extra_indices")]
    check_entries(*[0 if view is None else view.shape[-1] for view in counts])
    table, requests = _checked_places(views, rows)
    bind(SINKS, views, {"num_heads": num_heads})
    scale = (VALUE_DIM if is_narrow else HEAD_DIM) ** -0.5
    launched = SparseArguments(
        q=as_batch(columns.q, 4),
        q_rope=None if columns.q_rope is None else as_batch(columns.q_rope, 4),
        kv_cache=columns.kv_cache,
        kv_rope=columns.kv_rope,
        kv_scales=columns.kv_scales,
        kv_scale=columns.kv_scale,
        indices=as_batch(cast("ArrayView", views["indices"]), 3),
        block_table=table,
        row_to_request=requests,
        sinks=views.get("sinks"),
        softmax_scale=scale if options.softmax_scale is None else options.softmax_scale,
        extra_kv_cache=extra,
        extra_indices=as_batch(cast("ArrayView", views["extra_indices"]), 3) if extra else None,
        as_flash_mla=options.as_flash_mla,
        has_max_logits=options.has_max_logits,
    )
    return Attended(columns.q, launched, columns.cache, extra_cache)


def _check_kind(kind: str, table: ArrayView | None) -> None:
    """Compare what the indices are said to be with what they are read as."""
    if kind == "positions" and table is None:
        raise ValueError(
            f"{arg('block_table')}: needed with {arg('indices_are')} {kind!r}, got None; pass the "
            f"pages of each request"
        )
    if kind == "slots" and table is not None:
        raise ValueError(
            f"{arg('block_table')}: needs None with {arg('indices_are')} {kind!r}, got shape "
            f"{table.shape}; leave it out"
        )


MOST_ENTRIES = (1 << 31) - 64  # of all lists of a query token


def check_entries(topk: int, extra_topk: int) -> None:
    """Refuse lists that 32 bits cannot count."""
    if topk + extra_topk > MOST_ENTRIES:
        raise ValueError(
            f"{arg('topk')}: needs at most {MOST_ENTRIES} entries, those of a second cache "
            f"included, got {topk} + {extra_topk}; attend in parts and merge the results"
        )


def _checked_extra(views: Views, cache: str, form: str | None) -> tuple[ArrayView | None, str]:
    """Check a second cache, and that its lists come with it; tell its format, too."""
    names = ("extra_kv_cache", "extra_indices", "extra_topk_lens")
    whole, lists, lengths = (views.get(name) for name in names)
    if whole is None:
        for name, view in zip(names[1:], (lists, lengths), strict=True):
            if view is not None:
                raise ValueError(
                    f"{arg(name)}: needs an {arg('extra_kv_cache')}, whose slots it is about, got "
                    f"None; pass it"
                )
        if form is not None:
            raise ValueError(
                f"{arg('extra_cache_format')}: needs an {arg('extra_kv_cache')}, got None; pass "
                f"it, or leave this out"
            )
        return None, ""
    if lists is None:
        raise ValueError(
            f"{arg('extra_indices')}: needed with {arg('extra_kv_cache')}, got None; pass a list "
            f"for each query token"
        )
    form = checked_beside(cache, form)
    if whole.shape[-1:] != (FORMATS[form],):
        whose = f"as {arg('kv_cache')} has" if form == cache else f"those of {form!r}"
        raise ValueError(
            f"{arg('extra_kv_cache')}: needs slots of {FORMATS[form]} bytes, {whose}, got shape "
            f"{whole.shape}; write them by cumla.append_mla_cache, or pass "
            f"{arg('extra_cache_format')} if they are of another format"
        )
    return _checked_slots("extra_kv_cache", with_head_axis(whole, 4), form), form


def checked_beside(cache: str, form: str | None) -> str:
    """Check the format of a second cache beside one of `cache`."""
    if cache not in BESIDE:
        raise ValueError(
            f"{arg('extra_kv_cache')}: needs a {arg('kv_cache')} in one of the formats "
            f"{', '.join(map(repr, BESIDE))} beside it, got one in another; attend to both and "
            f"merge the results by cumla.merge_attention_states"
        )
    if form is not None and form not in BESIDE[cache]:
        raise ValueError(
            f"{arg('extra_cache_format')}: needs {' or '.join(map(repr, BESIDE[cache]))} beside "
            f"{arg('cache_format')} {cache!r}, got {form!r}; attend to both and merge the results "
            f"by cumla.merge_attention_states"
        )
    return form or cache


def _checked_slots(name: str, cache: ArrayView, form: str) -> ArrayView:
    """Check the pages of a cache of WIDENED rows."""
    if form == V4:
        return checked_v4(name, cache)
    return check_rows(name, cache, FORMATS[form])


def checked_cache(cache_dtype: Any, cache_format: Any, dtype: Any = None) -> str:
    """Check what a plan's caches are to be, and name it as a key does."""
    if cache_format is None:
        if (given := dtype_name(cache_dtype)) not in (None, FP8, *DTYPES):
            raise TypeError(
                f"cache_dtype: needs {', '.join(DTYPES)} or {FP8}, got {given}; pass cache_format="
                f"{PACKED!r} or {V4!r} for rows of a byte format"
            )
        return checked_cache_dtype(cache_dtype, dtype)
    checked_format("cache_format", cache_format)
    if dtype_name(cache_dtype) not in (None, FP8):
        raise ValueError(
            f"cache_dtype: needs {FP8} with cache_format {cache_format!r}, got "
            f"{dtype_name(cache_dtype)}; leave it out"
        )
    checked_cache_dtype(FP8, dtype)
    return str(cache_format)


def check_cache(arguments: Attended, key: MLASparseKey) -> None:
    """Refuse caches that a plan is not made for."""
    names = {"same": arguments.q.dtype, "e4m3": FP8}
    names |= {name: f"{nbytes} bytes a row, {name!r}" for name, nbytes in FORMATS.items()}
    names[PACKED] = f"packed rows of {FORMATS[PACKED]} bytes"
    names[V4] = f"V4's slots of {FORMATS[V4]} bytes"
    for which, made, got in (
        ("cache", key.cache, arguments.cache),
        ("second cache", key.extra_cache, arguments.extra_cache),
    ):
        if made and got and made != got:
            raise ValueError(
                f"plan: made for a {which} of {names[made]}, got one of {names[got]}; make a plan "
                f"for each"
            )


def _axes_of(query: ArrayView, axes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes of q before its columns, by their number if they may be either.

    What takes query tokens without a batch takes them with one as well.
    """
    if axes is not None:
        return QUERY_AXES if axes is TOKEN_AXES and len(query.shape) == 4 else axes
    return TOKEN_AXES if len(query.shape) == 3 else QUERY_AXES


def _form_of(whole: ArrayView | None, options: Any) -> str | None:
    """Return the format of a cache in one array."""
    if whole is None:
        if options.cache_format is not None:
            raise ValueError(
                f"{arg('cache_format')}: needs a {arg('kv_cache')} in one array, got several; "
                f"leave it out"
            )
        return None
    return format_of("kv_cache", whole, "cache_format", options.cache_format)


def _checked_columns(views: Views, axes: tuple[str, ...] | None, options: Any) -> _Columns:
    """Check query and cache of 576 columns."""
    query = cast("ArrayView", views["q"] if "q" in views else views["q[0]"])
    form = _form_of(whole := views.get("kv_cache"), options)
    if form not in (None, PACKED):
        raise ValueError(
            f"{'q' if 'q' in views else 'q[0]'}: needs one array of {VALUE_DIM} columns with "
            f"{arg('kv_cache')} of {FORMATS[form]} bytes per slot, got shape {query.shape}; join "
            f"or slice the columns"
        )
    if form == PACKED and whole is not None and whole.dtype != "uint8":
        views = {**views, "kv_cache": whole._replace(dtype="uint8")}
    columns = checked_query_and_cache(views, _axes_of(query, axes))
    check_one_head("kv_cache", columns.kv_cache)
    kv_scale = checked_kv_scale(columns, views, options.kv_scale)
    return _Columns(*columns, kv_scale, form or cache_of(columns.kv_cache))


def _checked_narrow(views: Views, axes: tuple[str, ...] | None, options: Any) -> _Columns:
    """Check query and cache of 512 columns: numbers, or rows of a format."""
    q, whole = cast("ArrayView", views["q"]), views.get("kv_cache")
    axes = _axes_of(q, axes)
    if len(q.shape) != len(axes) + 1:
        raise ValueError(
            f"{arg('q')}: needs {len(axes) + 1} axes ({', '.join(axes)}, {VALUE_DIM}), got shape "
            f"{q.shape}; reshape it"
        )
    check_dtype("q", q.dtype, DTYPES)
    check_layout("q", q)
    if q.shape[-2] == 0:
        raise ValueError(f"{arg('q')}: needs at least one head, got shape {q.shape}; skip the call")
    if whole is None:
        raise ValueError(
            f"{arg('kv_cache')}: needs one array beside queries of {VALUE_DIM} columns, got "
            f"several; pass rows of {VALUE_DIM} columns, or queries of {HEAD_DIM}"
        )
    form = _form_of(whole, options)
    if form is None and (problem := unnamed_format("kv_cache", whole, "cache_format")):
        raise problem
    whole = with_head_axis(whole, 4)
    if len(whole.shape) != 4:
        raise ValueError(heads_problem("kv_cache", "num_pages, page_size", VALUE_DIM, whole))
    is_fp8 = form is not None or whole.dtype in E4M3
    form = None if form in (PACKED, E4M3_512) else form  # rows of numbers, or of another width
    kv_scale = _factor_of_narrow(views, options.kv_scale, is_fp8 and form is None)
    if is_fp8 and q.dtype != DTYPES[0]:
        what = f"{whole.shape[-1]} bytes per slot" if form else FP8
        raise TypeError(
            f"{arg('q')}: needs {DTYPES[0]} with {arg('kv_cache')} of {what}, got {q.dtype}; "
            f"convert it first"
        )
    if form is not None:
        rows = _checked_slots("kv_cache", whole, form)
        latent, _, scales = scales_apart(rows, form) if form == NO_ROPE else (rows, None, None)
        return _Columns(q, None, latent, None, scales, 1.0, form)
    if whole.shape[-1] == FORMATS[V4]:
        check_dtype("kv_cache", whole.dtype, E4M3)
    if whole.shape[-1] != VALUE_DIM:
        raise ValueError(
            f"{arg('kv_cache')}: needs a last axis of {VALUE_DIM}, or of the {FORMATS[V4]} bytes "
            f"of V4's slots, beside queries of {VALUE_DIM} columns, got shape {whole.shape}; pass "
            f"rows as wide as the queries"
        )
    if whole.dtype != q.dtype and not is_fp8:
        raise TypeError(
            f"{arg('kv_cache')}: needs {arg('q')}'s dtype {q.dtype}, got {whole.dtype}; convert "
            f"one of them"
        )
    if 0 in whole.shape:
        raise ValueError(
            f"{arg('kv_cache')}: needs at least one token, got shape {whole.shape}; skip it"
        )
    check_layout("kv_cache", whole)
    check_one_head("kv_cache", whole)
    cache = E4M3_512 if is_fp8 else "same"
    return _Columns(q, None, relabelled(whole), None, None, kv_scale, cache)


def _factor_of_narrow(views: Views, number: float | None, is_scaled: bool) -> ArrayView | float:
    """Check the factor of rows of 512 columns, which e4m3 numbers have."""
    view = views.get("kv_scale")
    if number is None and view is None:
        return 1.0
    if not is_scaled:
        raise ValueError(
            f"{arg('kv_scale')}: needs a cache with e4m3 columns that have no scales of their "
            f"own, got rows of {VALUE_DIM} columns; leave it out"
        )
    if view is None:
        return cast("float", number)
    check_factor("kv_scale", view)
    return view


def _in_pages(name: str, view: ArrayView | None) -> ArrayView | None:
    """Take the rows of a cache without pages for pages of one slot."""
    if view is None or "kv_cache" not in name or len(view.shape) != 2:
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
                f"{arg('row_to_request')}: needs a {arg('block_table')}, whose rows it names, got "
                f"None; leave it out, for the indices are slots of the cache"
            )
        return None, None
    if requests is None:
        if len(rows) == 1:
            raise ValueError(
                f"{arg('row_to_request')}: needed with {arg('block_table')}, to tell the request "
                f"of each query token, got None; pass it"
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
            tokens = arg("total_tokens")
            axes = f"({tokens},) with {tokens} {rows[0]}"
        raise ValueError(
            f"{arg(name)}: needs shape {axes}, got {view.shape}; pass a number for each query token"
        )
    check_lies(name, view, "elements")
    return view._replace(shape=rows if len(rows) == 2 else (1, *rows), strides=strides)


# --- on the CPU, and in check mode ---------------------------------------------------------------


def on_rows(numbers: np.ndarray[Any, Any], rows: Rows) -> np.ndarray[Any, Any]:
    """Assign each query token the number that :func:`spread` views there."""
    batch, q_len = rows if len(rows) == 2 else (1, *rows)
    if numbers.ndim == 1:
        numbers = numbers[:, None] if len(numbers) == batch else numbers[None]
    return np.broadcast_to(numbers, (batch, q_len)).reshape(rows)


def check_lengths(host: Host, topk: int, extra_topk: int) -> None:
    """Raise for the first length of a list that is out of range."""
    for name, most in (("topk_lens", topk), ("extra_topk_lens", extra_topk)):
        lengths = host.get(name)
        if lengths is not None:
            need = f"a length from 0 to {name.removesuffix('_lens')} = {most}"
            wrong = (lengths < 0) | (lengths > most)
            refuse_value(name, lengths, wrong, need, "the kernels would clamp it")


def check_places(host: Host, arguments: Attended) -> None:
    """Raise for the first request, or page number that an index leads to, that is out of range."""
    table = host.get("block_table")
    if table is None:
        return
    batch, q_len, topk = arguments.launched.indices.shape
    requests = np.broadcast_to(np.arange(batch)[:, None], (batch, q_len))
    if "row_to_request" in host:
        given, last = host["row_to_request"], len(table) - 1
        need = f"a row of {arg('block_table')} up to {last}, or below 0 for none"
        refuse_value("row_to_request", given, given > last, need, "its list would be empty")
        requests = on_rows(given, (batch, q_len))
    num_pages, page_size = arguments.launched.kv_cache.shape[:2]
    lengths = on_rows(host.get("topk_lens", np.full(batch, topk)), (batch, q_len))
    index = host["indices"].reshape(batch, q_len, topk)
    column = index // page_size
    seen = (np.arange(topk) < lengths[..., None]) & (index >= 0) & (column < table.shape[1])
    seen &= requests[..., None] >= 0
    used = np.zeros(table.shape, bool)
    used[np.broadcast_to(requests[..., None], index.shape)[seen], column[seen]] = True
    wrong = used & ((table < 0) | (table >= num_pages))
    refuse_value("block_table", table, wrong, f"a page number from 0 to {num_pages - 1}")
