# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of functions that write MLA caches, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.core.arguments import (
    INT32,
    WIDE,
    Array,
    Views,
    bind,
    check_dtype,
    check_layout,
    check_output,
    check_own_memory,
    check_written,
)
from cumla.core.names import arg
from cumla.launch.mla.append_cache import AppendArguments
from cumla.mla.arguments import (
    DTYPES,
    check_rows,
    checked_v4,
    columns_apart,
    heads_problem,
    named_width,
    with_head_axis,
)
from cumla.mla.fp8_caches import (
    E4M3,
    check_factor,
    format_of,
    scales_apart,
    unnamed_format,
    unpacked,
    v4_apart,
)
from cumla.mla.shape import (
    E4M3_288,
    E4M3_512,
    FORMATS,
    NO_ROPE,
    PACKED,
    PACKED_BYTES,
    ROPE_DIM,
    SCALES,
    V4,
    VALUE_DIM,
    WIDTH,
    WRITTEN,
    WRITTEN_FORMATS,
    width_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView
    from cumla.mla.shape import Width

NUMBERS = {
    **{name: Array("tokens", WIDE) for name in ("slot_mapping", "batch_indices", "positions")},
    "block_table": Array("batch max_pages", INT32),
    "kv_indices": Array("entries", INT32),
    "kv_indptr": Array("batch+1", INT32, way_out="pass where each request's list ends"),
}


def checked_append_arguments(
    given: Views, scale_number: float | None, interleaved: bool, form: str | None = None
) -> AppendArguments:
    """Check the views of one call, by name, against each other.

    `scale_number` is the argument kv_scale if that is a number; `interleaved` tells which columns
    a rotation pairs; `form` is the argument cache_format.
    """
    views = {name: view for name, view in given.items() if view is not None}
    _check_combination(views)
    cache = _checked_cache(views, form)
    if cache.form == NO_ROPE and "cos_sin" in views:
        raise ValueError(
            f"{arg('cos_sin')}: needs a cache with RoPE columns, got {arg('cache_format')} "
            f"{NO_ROPE!r}; leave it out"
        )
    dtype = DTYPES[0] if cache.form else _dtype_of_16_bits(cache.rope, views)
    latent_rows, rope_rows = _checked_rows(views, dtype, cache)
    slices, joins = "reshape it, or slice the RoPE columns", "join the two tables"
    columns = rope_rows.shape[-1] if cache.form is None else ROPE_DIM
    if not columns and "cos_sin" in views:
        raise ValueError(
            f"{arg('cos_sin')}: needs rows with RoPE columns, got those of "
            f"{latent_rows.shape[-1]} columns, which have none; leave it out"
        )
    rotating = {
        "q_pe": Array(f"tokens num_heads {columns}", (dtype,), "rows", slices),
        "cos_sin": Array(f"max_position {columns}", ("float32", dtype), "rows", joins),
    }
    bind(NUMBERS | rotating, views, {"tokens": latent_rows.shape[0]})
    q_pe, q_pe_out = _checked_queries(views, dtype)
    _check_scale(views.get("kv_scale"), scale_number, cache)
    return AppendArguments(
        latent_rows,
        rope_rows,
        cache.latent,
        cache.rope,
        q_pe=q_pe,
        q_pe_out=q_pe_out,
        dtype=dtype,
        scales=cache.scales,
        power_of_two_scales=cache.is_whole,
        scale_number=1.0 if scale_number is None else scale_number,
        interleaved=interleaved,
        form=cache.form,
        **{name: views.get(name) for name in (*NUMBERS, "cos_sin", "kv_scale")},
    )


def _check_scale(view: ArrayView | None, number: float | None, cache: _Cache) -> None:
    if view is None and number is None:
        return
    if cache.latent.dtype not in E4M3 or cache.scales is not None:
        raise ValueError(
            f"{arg('kv_scale')}: needs an e4m3 cache with one scale for all of it, got "
            f"{'scales for each row' if cache.scales else cache.latent.dtype}; leave it out"
        )
    if view is not None:
        check_factor("kv_scale", view)


def _check_combination(views: Mapping[str, ArrayView]) -> None:
    """Check that one way, and one only, tells where the rows go, and that nothing is in vain."""
    by_request = ("batch_indices", "block_table", "kv_indices", "kv_indptr")
    if "slot_mapping" in views:
        for name in by_request:
            if name in views:
                raise ValueError(
                    f"{arg(name)}: needs a call without {arg('slot_mapping')}, which tells where "
                    f"the rows go, got both; leave one of them out"
                )
    else:
        for name in ("batch_indices", "positions"):
            if name not in views:
                raise ValueError(
                    f"{arg(name)}: needed where there is no {arg('slot_mapping')}, to tell where "
                    f"the rows go, got None; pass it, or {arg('slot_mapping')}"
                )
        pages = {name for name in by_request[1:] if name in views}
        if pages not in ({"block_table"}, {"kv_indices", "kv_indptr"}):
            raise ValueError(
                f"{arg('block_table')}: needs either {arg('block_table')} or both "
                f"{arg('kv_indices')} and {arg('kv_indptr')} beside {arg('batch_indices')}, got "
                f"{' and '.join(sorted(pages)) or 'none of them'}; pass one form"
            )
    for name, needed in (("cos_sin", "positions"), ("q_pe", "cos_sin"), ("q_pe_out", "q_pe")):
        if name in views and needed not in views:
            raise ValueError(
                f"{arg(needed)}: needed with {arg(name)}, got None; pass it, or no {arg(name)}"
            )
    if "positions" in views and not {"batch_indices", "cos_sin"} & set(views):
        raise ValueError(
            f"{arg('positions')}: needs {arg('batch_indices')} to tell where the rows go, or "
            f"{arg('cos_sin')} to rotate them, got neither; leave it out, or pass one of them"
        )


class _Cache(NamedTuple):
    """The parts of a cache, all with a head axis; scales of e4m3 latent columns may be None."""

    latent: ArrayView
    rope: ArrayView
    scales: ArrayView | None
    is_whole: bool  # whether one array holds scales, too: they are powers of two then
    form: str | None = None  # of FORMATS, but of PACKED, whose parts are numbers


def _checked_cache(views: Mapping[str, ArrayView], form: str | None) -> _Cache:
    whole = views.get("kv_cache")
    if whole is None and form is not None:
        raise ValueError(
            f"{arg('cache_format')}: needs a {arg('kv_cache')} in one array, got several; leave it "
            f"out"
        )
    if whole is not None:
        form = format_of("kv_cache", whole, "cache_format", form)
        named = "kv_cache", whole, "cache_format"
        if form is None and (problem := unnamed_format(*named, WRITTEN_FORMATS)):
            raise problem
    form = None if form in (E4M3_512, E4M3_288) else form  # rows of numbers
    if whole is not None and form == PACKED:
        return _Cache(*unpacked(_checked_part("kv_cache", whole, PACKED_BYTES)), True)
    if whole is not None and form is not None:
        view = with_head_axis(whole, 4)
        is_v4 = form == V4
        pages = (
            checked_v4("kv_cache", view) if is_v4 else check_rows("kv_cache", view, FORMATS[form])
        )
        check_written("kv_cache", pages)
        return _Cache(*(v4_apart(pages) if is_v4 else scales_apart(pages, form)), True, form)
    checked, width = {}, _width_of_cache(views)
    for name, (given, columns) in _columns_of("kv_cache", views, width).items():
        check_dtype(name, given.dtype, DTYPES + E4M3)
        _check_columns(name, given, columns, width)
        checked[name] = _checked_part(name, given, columns)
    latent, rope = _as_pair(checked, width)
    scales = views.get("kv_cache[2]")
    if width != WIDTH:
        _check_one_factor(latent, rope, scales, width)
    if scales is not None:
        scales = _checked_scales(scales, latent, rope)
    return _Cache(latent, rope, scales, False)


def _check_one_factor(
    latent: ArrayView, rope: ArrayView, scales: ArrayView | None, width: Width
) -> None:
    """Refuse what only rows of 512 + 64 columns have."""
    what = f"{arg('kv_cache[0]')} of {named_width(width)} columns"
    if rope.dtype != latent.dtype:
        raise TypeError(
            f"{arg('kv_cache[1]')}: needs the dtype {latent.dtype} of {what}, got {rope.dtype}; "
            f"convert it"
        )
    if scales is not None:
        raise ValueError(
            f"{arg('kv_cache[2]')}: needs rows of {named_width(WIDTH)} columns, got {what}; pass "
            f"one {arg('kv_scale')} for all rows"
        )


def _width_of_cache(views: Mapping[str, ArrayView]) -> Width:
    """Tell the width of a cache's rows, or, of a cache that has none, that of most models."""
    names = ("kv_cache",) if "kv_cache" in views else ("kv_cache[0]", "kv_cache[1]")
    found = tuple(views[name].shape[-1] if views[name].shape else 0 for name in names)
    if len(found) == 1:
        return width_of(found[0], WRITTEN) or WIDTH
    return next((width for width in WRITTEN if width == found), WIDTH)


def _checked_part(name: str, given: ArrayView, columns: int) -> ArrayView:
    """Check what is written to, and give it its head axis."""
    view = with_head_axis(given, 4)
    if len(view.shape) != 4:
        raise ValueError(heads_problem(name, "num_pages, page_size", columns, given))
    if 0 in view.shape:
        raise ValueError(
            f"{arg(name)}: needs at least one element on every axis, got shape {given.shape}; skip "
            f"the call where there is no cache"
        )
    check_written(name, view)
    check_layout(name, view)
    return view


def _checked_scales(given: ArrayView, latent: ArrayView, rope: ArrayView) -> ArrayView:
    name = "kv_cache[2]"
    if latent.dtype not in E4M3 or rope.dtype not in DTYPES:
        raise TypeError(
            f"{arg(name)}: needs {arg('kv_cache[0]')} of {' or '.join(E4M3)} and "
            f"{arg('kv_cache[1]')} of {' or '.join(DTYPES)}, got {latent.dtype} and {rope.dtype}; "
            f"leave it out where one {arg('kv_scale')} serves all rows, or pass parts of these "
            f"dtypes"
        )
    check_dtype(name, given.dtype, ("float32",))
    if with_head_axis(given, 4).shape != (*latent.shape[:3], SCALES):
        raise ValueError(
            f"{arg(name)}: needs the axes of {arg('kv_cache[0]')}, {latent.shape[:3]}, and "
            f"{SCALES} scales, got shape {given.shape}; pass three parts of the same rows"
        )
    return _checked_part(name, given, SCALES)


def _dtype_of_16_bits(rope_cache: ArrayView, views: Mapping[str, ArrayView]) -> str:
    """Tell the dtype that queries, tables and rows have: the cache's, unless it is e4m3."""
    names = ("rows", "rows[0]", "q_pe", "cos_sin")
    found = [rope_cache.dtype, *(views[name].dtype for name in names if name in views)]
    return next((dtype for dtype in found if dtype in DTYPES), DTYPES[0])


def _checked_rows(
    views: Mapping[str, ArrayView], dtype: str, cache: _Cache
) -> tuple[ArrayView, ArrayView]:
    """Check the new rows, and give their latent and their RoPE columns."""
    dtypes: tuple[str, ...]
    width = cache.latent.shape[-1], cache.rope.shape[-1]
    num_kv_heads = cache.latent.shape[2]
    if cache.form is not None:
        width = (VALUE_DIM, 0) if cache.form == NO_ROPE else (VALUE_DIM - ROPE_DIM, ROPE_DIM)
    if cache.form is None and cache.rope.dtype in E4M3:  # throughout: any of the others
        dtypes, need = DTYPES, f"{', '.join(DTYPES)} or float32 for an e4m3 cache"
    else:
        dtypes, need = (dtype,), f"{arg('kv_cache')}'s dtype {dtype}, or float32"
    checked = {}
    if cache.form == NO_ROPE and "rows" not in views:
        raise ValueError(
            f"{arg('rows')}: needs one array of {VALUE_DIM} columns with {arg('cache_format')} "
            f"{NO_ROPE!r}, got a pair; pass the latent columns"
        )
    for name, (given, columns) in _columns_of("rows", views, width).items():
        if given.dtype not in (*dtypes, "float32"):
            raise TypeError(f"{arg(name)}: needs {need}, got {given.dtype}; convert it first")
        _check_columns(name, given, columns, width)
        view = with_head_axis(given, 3)
        if len(view.shape) != 3:
            raise ValueError(heads_problem(name, "tokens", columns, given))
        if view.shape[1] != num_kv_heads:
            raise ValueError(
                f"{arg(name)}: needs the {num_kv_heads} kv heads of {arg('kv_cache')}, got shape "
                f"{given.shape}; pass a row for each, or check the axes of {arg('kv_cache')}: "
                f"tokens come before heads"
            )
        check_layout(name, view)
        checked[name] = view
    if cache.form == NO_ROPE:
        return checked["rows"], checked["rows"]
    return _as_pair(checked, width)


def _columns_of(
    name: str, views: Mapping[str, ArrayView], width: Width
) -> dict[str, tuple[ArrayView, int]]:
    """Give the array, or the pair, of an argument, and how many columns each must have."""
    if name in views:
        return {name: (views[name], sum(width))}
    first, second = f"{name}[0]", f"{name}[1]"
    return {first: (views[first], width[0]), second: (views[second], width[1])}


def _as_pair(parts: Mapping[str, ArrayView], width: Width) -> tuple[ArrayView, ArrayView]:
    """Cut one array into latent and RoPE columns, or check two against each other."""
    (first, latent), *others = parts.items()
    if not others:
        return columns_apart(latent, width[1])
    lead = latent.shape[:-1]
    ((name, rope),) = others
    if rope.dtype != latent.dtype and not (latent.dtype in E4M3 and rope.dtype in DTYPES):
        raise TypeError(
            f"{arg(name)}: needs the dtype of {arg(first)}, {latent.dtype}, got {rope.dtype}; "
            f"convert it"
        )
    if rope.shape[:-1] != lead:
        raise ValueError(
            f"{arg(name)}: needs the axes of {arg(first)}, {lead}, and {width[1]} columns, got "
            f"shape {rope.shape}; pass two parts of the same rows"
        )
    return latent, rope


def _check_columns(name: str, view: ArrayView, columns: int, width: Width) -> None:
    if view.shape[-1:] != (columns,):
        latent, rope = width
        form = (
            f"{latent} latent + {rope} RoPE, or a pair that holds them apart"
            if columns == latent + rope
            else f"of a pair of {latent} latent and {rope} RoPE columns"
        )
        way_out = "join or slice the columns"
        if not rope:
            form, way_out = "latent ones, without RoPE columns", "slice the columns"
        if columns == latent and view.shape[-1:] == (rope,):
            way_out = "these look swapped: pass the latent ones first"
        raise ValueError(
            f"{arg(name)}: needs a last axis of {columns} ({form}), got shape {view.shape}; "
            f"{way_out}"
        )


def _checked_queries(
    views: Mapping[str, ArrayView], dtype: str
) -> tuple[ArrayView | None, ArrayView | None]:
    """Check where to write the rotated queries; both, or neither."""
    q_pe, out = views.get("q_pe"), views.get("q_pe_out", views.get("q_pe"))
    if q_pe is None or out is None:
        return None, None
    if out is q_pe:
        check_own_memory("q_pe", q_pe)
    else:
        check_output("q_pe_out", out, q_pe.shape, (dtype,), "rows")
    return q_pe, out
