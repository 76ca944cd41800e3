# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of dense MLA attention, all before anything is allocated.

The arrays of a query and a cache come in many forms, so they are functions after the tables.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cumla.core._dlpack import numpy_dtype
from cumla.core.arguments import (
    Views,
    check_dtype,
    check_layout,
    checked_int,
    dtype_name,
    window_sides,
)
from cumla.core.arrays import parts
from cumla.core.names import arg
from cumla.launch.split.plan import BLOCK_TOKENS
from cumla.mla.fp8_caches import E4M3, check_factor, is_packed, is_v4, relabelled, unpacked
from cumla.mla.shape import (
    FP8,
    HEAD_DIM,
    PACKED_BYTES,
    ROPE_DIM,
    SCALES,
    TAKES,
    V4_BYTES,
    VALUE_DIM,
    WIDTH,
    WIDTHS,
    width_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cumla.core.arrays import ArrayView
    from cumla.mla.shape import Width

DTYPES = ("bfloat16", "float16")  # of q and kv_cache
ROW_PARTS = ("latent columns", "RoPE columns")
CACHE_PARTS = (*ROW_PARTS, "scales of an e4m3 cache?")
QUERY_AXES = ("batch", "q_len", "num_heads")  # of q, before its columns
_SCALES = "kv_cache[2]"
# Arrays of query and cache, latent and RoPE columns in one, or in a pair; most models' columns.
_COLUMNS = {
    f"{name}{part}": columns
    for name in ("q", "kv_cache")
    for part, columns in (("", HEAD_DIM), ("[0]", VALUE_DIM), ("[1]", ROPE_DIM))
} | {_SCALES: SCALES}


Shape = tuple[int, int, int, int, int, str]
"""First fields of a plan's key: two sizes, heads of q and of the cache, page size, dtype."""


class Columns(NamedTuple):
    """Query and cache, latent and RoPE columns apart, those of the cache with heads."""

    q: ArrayView
    q_rope: ArrayView
    kv_cache: ArrayView
    kv_rope: ArrayView
    kv_scales: ArrayView | None

    @property
    def width(self) -> Width:
        """Latent columns, and RoPE ones, of a row: one of WIDTHS."""
        return row_width(self.q, self.q_rope)


def row_width(latent: ArrayView, rope: ArrayView) -> Width:
    """Tell the width of checked rows, in numbers: a tracer's sizes are none."""
    if _is_wide(latent, rope):
        return WIDTH
    return width_of(latent.shape[-1] + rope.shape[-1]) or WIDTH


def _is_wide(latent: ArrayView, rope: ArrayView) -> bool:
    return bool(latent.shape[-1] == VALUE_DIM and rope.shape[-1] == ROPE_DIM)


def named(q: Any, kv_cache: Any, kv_scale: Any, **others: Any) -> dict[str, Any]:
    """Name the arrays of a call; a kv_scale that is a number is none."""
    arrays = {**parts("q", q, ROW_PARTS), **parts("kv_cache", kv_cache, CACHE_PARTS)}
    if kv_scale is not None and not isinstance(kv_scale, Real):
        others["kv_scale"] = kv_scale
    return arrays | others


def checked_head_dim(head_dim: Any) -> Width:
    """Check the columns of a row for which a plan is made, and tell its width."""
    checked_int("head_dim", head_dim, "pass the columns of q")
    width = width_of(int(head_dim))
    if width is None:
        need = _listed(named_width(width) for width in WIDTHS)
        raise ValueError(f"head_dim: needs {need}, got {head_dim}; pass the columns of q")
    return width


def checked_q_scale(columns: Columns, views: Views, q_scale: float | None) -> ArrayView | float:
    """Check the factor of e4m3 queries; arguments are as for `checked_kv_scale`."""
    view = views.get("q_scale")
    if q_scale is None and view is None:
        return 1.0
    if columns.q.dtype != FP8:
        raise ValueError(
            f"{arg('q_scale')}: needs {arg('q')} of {FP8}, or of its bits as uint8, got "
            f"{columns.q.dtype}; leave it out"
        )
    if q_scale is not None:
        return q_scale
    assert view is not None
    check_factor("q_scale", view)
    return view


def check_fp8_query(columns: Columns, has_sinks: bool) -> None:
    """Refuse e4m3 queries beside what their kernels do not take."""
    if columns.q.dtype != FP8:
        return
    got = f"columns in {columns.kv_rope.dtype}" if columns.kv_rope.dtype != FP8 else None
    if columns.kv_scales is not None:
        got = "one with scales of each token"
    elif columns.width != WIDTH:
        got = f"rows of {named_width(columns.width)} columns"
    if got:
        raise TypeError(
            f"{arg('q')}: needs {DTYPES[0]}, or {FP8} beside a {arg('kv_cache')} whose "
            f"{HEAD_DIM} columns are all {FP8} under one {arg('kv_scale')}, got {FP8} beside "
            f"{got}; convert it to {DTYPES[0]}"
        )
    if has_sinks:
        raise ValueError(
            f"{arg('sinks')}: needs None beside {arg('q')} of {FP8}, got an array; convert "
            f"{arg('q')} to {DTYPES[0]}"
        )


def computed_dtype(q: ArrayView) -> str:
    """Tell the dtype of a plan, and of out, for checked queries."""
    return DTYPES[0] if q.dtype == FP8 else q.dtype


def checked_kv_scale(columns: Columns, views: Views, kv_scale: float | None) -> ArrayView | float:
    """Check the factor of e4m3 columns, and that some are under it.

    `kv_scale` is the argument if that is a number; an array is among the views.
    """
    if kv_scale is None and views.get("kv_scale") is None:
        return 1.0
    scaled = columns.kv_scales is not None
    if cache_of(columns.kv_cache) == "same" or (scaled and columns.kv_rope.dtype != FP8):
        got = columns.kv_cache.dtype
        if scaled:
            got = f"scales for each row beside RoPE columns of {columns.kv_rope.dtype}"
        raise ValueError(
            f"{arg('kv_scale')}: needs a cache with e4m3 columns that have no scales of their "
            f"own, got {got}; leave it out"
        )
    if kv_scale is not None:
        return kv_scale
    view = cast("ArrayView", views["kv_scale"])
    check_factor("kv_scale", view)
    return view


def check_fp8_products(columns: Columns, fp8_products: bool) -> None:
    """Refuse products in FP8 of a cache that is not."""
    if fp8_products and cache_of(columns.kv_cache) == "same":
        raise ValueError(
            f"{arg('fp8_products')}: needs a {arg('kv_cache')} of {FP8}, or of its bits as uint8, "
            f"got {columns.kv_cache.dtype}; leave it out"
        )


def window_of(window: tuple[int, int] | None, causal: bool, cache: str) -> tuple[int, int] | None:
    """Tell the sides of a window, -1 for no bound; None where `causal` says all.

    `cache` is one of CACHES. Windows are for 16-bit caches.
    """
    left, right = window_sides(window, causal)
    if left < 0 and (causal or right < 0):
        return None
    if cache != "same":
        raise ValueError(
            f"{arg('window')}: needs a {arg('kv_cache')} of q's dtype, got one of {FP8} beside "
            f"{window}; keep the cache of this layer in 16 bits"
        )
    return left, right


def check_tree(window: tuple[int, int] | None, cache: str) -> None:
    """Refuse a tree beside a window, and over a cache that has no kernel for it.

    `cache` is one of CACHES.
    """
    if window is not None:
        raise ValueError(
            f"{arg('window')}: needs None beside {arg('tree')}, got {window}; leave one of them out"
        )
    if cache != "same":
        raise ValueError(
            f"{arg('tree')}: needs a {arg('kv_cache')} of q's dtype, got one of {FP8}; attend to "
            f"the drafts and to what is before them apart, and call merge_attention_states"
        )


def checked_mask_form(form: Any, sides: tuple[int, int] | None, cache: str) -> bool:
    """Check the form of masks that a plan is made for, and tell whether it is "tree"."""
    if form not in (None, "tree"):
        raise ValueError(f"mask_form: needs 'tree' or None, got {form!r}; pass one of them")
    if form:
        check_tree(sides, cache)
    return form is not None


NAMES_OF_PLANS = "cache_dtype", "mask_form"  # what tells a plan of a cache and of trees


def check_taken(
    width: Width, cache: str, has_tree: bool, names: tuple[str, str] = ("kv_cache", "tree")
) -> None:
    """Refuse a cache of e4m3 numbers, or a tree, that rows of a width have no kernel for.

    `cache` is one of CACHES; `names` are those of arguments that tell cache and tree.
    """
    takes = TAKES[width[0]]
    if cache != "same" and not takes.e4m3:
        raise TypeError(
            f"{arg(names[0])}: needs the dtype of q in rows of {named_width(width)} columns, got "
            f"{FP8}; keep a cache of 16 bits"
        )
    if has_tree and not takes.trees:
        most = max(latent for latent, others in TAKES.items() if others.trees)
        raise ValueError(
            f"{arg(names[1])}: needs rows of at most {most} latent columns, got "
            f"{named_width(width)}; attend to the drafts and to what is before them apart, and "
            f"call merge_attention_states"
        )


def checked_query_and_cache(
    views: Views,
    query_axes: tuple[str, ...] = QUERY_AXES,
    widths: tuple[Width, ...] = (WIDTH,),
    *,
    fp8_queries: bool = False,
) -> Columns:
    """Check query and cache, each one array or several by name, and take their columns apart.

    `query_axes` are those of the query before its columns; the last one is num_heads. Columns of
    one array are views of it. `widths` are those that rows may have; `fp8_queries` permits e4m3
    queries.
    """
    given = _columns_of(views)
    rope = _check_query_and_cache(given, query_axes, widths, fp8_queries)[1]
    query = _apart("q", given, rope)
    whole, scales = given.get("kv_cache"), given.get("kv_cache[2]")
    if whole is not None and is_packed(whole):
        latent, of_rope, scales = unpacked(whole)
    else:
        latent, of_rope = _apart("kv_cache", given, rope)
    for name, view in given.items():
        check_layout(name, view)
    _check_heads(query[0].shape[-2], latent.shape[2])
    if query[0].dtype in E4M3:
        query = relabelled(query[0]), relabelled(query[1])
    if FP8 in (query[0].dtype, latent.dtype) or latent.dtype != query[0].dtype:
        latent, of_rope = relabelled(latent), relabelled(of_rope)
    return Columns(*query, latent, of_rope, scales)


def _columns_of(views: Views) -> dict[str, ArrayView]:
    """Pick query and cache, the latter with its head axis."""
    picked = {name: cast("ArrayView", view) for name, view in views.items() if name in _COLUMNS}
    return {n: v if n.startswith("q") else with_head_axis(v, 4) for n, v in picked.items()}


def _apart(name: str, given: dict[str, ArrayView], rope: int) -> tuple[ArrayView, ArrayView]:
    """Take latent and RoPE columns apart, unless they came so."""
    if name in given:
        return columns_apart(given[name], rope)
    return given[f"{name}[0]"], given[f"{name}[1]"]


def columns_apart(view: ArrayView, rope: int) -> tuple[ArrayView, ArrayView]:
    """Cut one array into latent columns and RoPE ones, of which the number is given."""
    *lead, columns = view.shape
    latent = columns - rope
    of_rope = view._replace(shape=(*lead, rope), ptr=view.ptr + latent * view.strides[-1])
    return view._replace(shape=(*lead, latent)), of_rope


def with_head_axis(view: ArrayView, axes: int) -> ArrayView:
    """Put in the axis of one kv head, the last but one, where it is left out."""
    if len(view.shape) != axes - 1:
        return view
    *lead, columns = view.shape
    *steps, stride = view.strides
    return view._replace(shape=(*lead, 1, columns), strides=(*steps, steps[-1], stride))


def check_one_head(name: str, cache: ArrayView) -> None:
    """Refuse a cache of several kv heads."""
    if cache.shape[2] != 1:
        raise ValueError(
            f"{arg(name)}: needs one kv head, got {cache.shape[2]}; pass the heads one by one"
        )


def checked_v4(name: str, cache: ArrayView) -> ArrayView:
    """Check pages of V4's slots: rows first, then scales, nothing between them."""
    if len(cache.shape) != 4 or cache.shape[-1] != V4_BYTES:
        raise ValueError(heads_problem(name, "num_pages, page_size", V4_BYTES, cache))
    check_dtype(name, cache.dtype, E4M3)
    check_one_head(name, cache)
    pages, size = cache.shape[:2]
    if 0 in (pages, size):
        raise ValueError(f"{arg(name)}: needs at least one token, got shape {cache.shape}; skip it")
    step, row, _, column = cache.strides
    wrong = (
        column != 1
        or (size > 1 and row != V4_BYTES)
        or (pages > 1 and step < size * V4_BYTES)
        or cache.ptr % 16
        or (pages > 1 and step % 16)
    )
    if wrong:
        raise ValueError(
            f"{arg(name)}: needs contiguous pages, at multiples of 16 bytes, got address "
            f"{cache.ptr:#x} and strides {cache.strides}; allocate (num_pages, n) bytes, n a "
            f"multiple of 16, and pass a view"
        )
    return cache


def check_rows(name: str, cache: ArrayView, nbytes: int) -> ArrayView:
    """Check rows of bytes in a format without anything between the parts of a row."""
    if len(cache.shape) != 4 or cache.shape[-1] != nbytes:
        raise ValueError(heads_problem(name, "num_pages, page_size", nbytes, cache))
    check_dtype(name, cache.dtype, E4M3)
    check_one_head(name, cache)
    if 0 in cache.shape:
        raise ValueError(f"{arg(name)}: needs at least one token, got shape {cache.shape}; skip it")
    check_layout(name, cache)
    size = cache.shape[1]
    if size > 1 and not nbytes <= cache.strides[1] < 1 << 31:
        raise ValueError(
            f"{arg(name)}: needs rows {nbytes} to {(1 << 31) - 1} bytes apart, got strides "
            f"{cache.strides}; make a contiguous copy"
        )
    return (
        cache if size > 1 else cache._replace(strides=(*cache.strides[:1], 0, *cache.strides[2:]))
    )


def _check_query_and_cache(
    given: dict[str, ArrayView],
    query_axes: tuple[str, ...],
    widths: tuple[Width, ...],
    fp8_queries: bool,
) -> Width:
    """Check ranks, dtypes and sizes, and tell the width; the cache with its head axis."""
    if "kv_cache" in given and is_v4(given["kv_cache"]):  # whose queries have 512 columns
        raise ValueError(
            f"{arg('kv_cache')}: needs {HEAD_DIM} columns, or {PACKED_BYTES} bytes, got V4's "
            f"slots of {V4_BYTES}; pass them to mla_sparse_decode or mla_sparse_attention"
        )
    for name, view in given.items():
        if len(view.shape) != (len(query_axes) + 1 if name.startswith("q") else 4):
            raise ValueError(_rank_problem(name, view, query_axes))
    width = _checked_width(given, widths)
    for name, view in given.items():
        needed = view.shape[-2:] if name.startswith("q") else view.shape
        if 0 in needed:
            raise ValueError(
                f"{arg(name)}: needs at least one {'head' if name.startswith('q') else 'token'}, "
                f"got shape {view.shape}; skip the call where there is nothing to attend"
            )
    _check_dtypes(
        given, fp8_queries
    )  # after the widths: parts that are swapped may have dtypes of their own
    if width != WIDTH:
        _check_one_dtype(given, width)
    pairs = ("q[0]", "q[1]"), ("kv_cache[0]", "kv_cache[1]"), ("kv_cache[0]", "kv_cache[2]")
    for first, other in pairs:
        if other in given and given[first].shape[:-1] != given[other].shape[:-1]:
            raise ValueError(
                f"{arg(other)}: needs the first axes of {arg(first)}, {given[first].shape[:-1]}, "
                f"got {given[other].shape[:-1]}; pass both parts of the same rows"
            )
    return width


def _check_one_dtype(given: dict[str, ArrayView], width: Width) -> None:
    """Refuse what only caches of 512 + 64 columns have: RoPE columns of a dtype of their own."""
    rope = given.get("kv_cache[1]")
    if rope is not None and rope.dtype != given["kv_cache[0]"].dtype:
        raise TypeError(
            f"{arg('kv_cache[1]')}: needs {arg('kv_cache[0]')}'s dtype "
            f"{given['kv_cache[0]'].dtype} in rows of {named_width(width)} columns, got "
            f"{rope.dtype}; convert it"
        )


def _checked_width(given: dict[str, ArrayView], widths: tuple[Width, ...]) -> Width:
    """Check the columns of query and cache, and tell the width of both."""
    width = WIDTH
    q, cache = given.get("q"), given.get("kv_cache")
    wide = q.shape[-1] == HEAD_DIM if q is not None else _is_wide(given["q[0]"], given["q[1]"])
    if wide and cache is not None and cache.shape[-1] == HEAD_DIM:  # as most calls have it
        return width
    for name in ("q", "kv_cache"):
        whole, first, second = given.get(name), f"{name}[0]", f"{name}[1]"
        if whole is not None:
            columns = HEAD_DIM if is_packed(whole) else whole.shape[-1]
            found = width_of(columns, widths)
            if found is None:
                raise ValueError(_columns_problem(name, whole, widths))
            width = found
        else:
            columns, rope = given[first].shape[-1], given[second].shape[-1]
            latent = [w for w in widths if w[0] == columns and w[1]]
            if not latent:
                raise ValueError(_columns_problem(first, given[first], widths))
            found = next((w for w in latent if w[1] == rope), None)
            if found is None:
                raise ValueError(_columns_problem(second, given[second], latent))
            width = found
        widths = (width,)  # the cache's are the query's
    if _SCALES in given and (width != WIDTH or given[_SCALES].shape[-1] != SCALES):
        raise ValueError(
            f"{arg(_SCALES)}: needs a last axis of {SCALES}, a scale for 128 latent columns each, "
            f"beside {named_width(WIDTH)} columns, got shape {given[_SCALES].shape}; pass one for "
            f"each row and 128 columns"
        )
    return width


def named_width(width: Width) -> str:
    """Write a width, as in "576 (512 latent + 64 RoPE)"."""
    latent, rope = width
    return f"{latent + rope} ({latent} latent + {rope} RoPE)" if rope else f"{latent} (no RoPE)"


def _check_dtypes(given: dict[str, ArrayView], fp8_queries: bool) -> None:
    """Check that all is of the query's dtype, but for what is FP8 in a cache."""
    (first, query), *others = given.items()
    is_fp8 = fp8_queries and query.dtype in E4M3
    if not is_fp8:
        check_dtype(first, query.dtype, DTYPES)
    if {view.dtype for _, view in others} == {query.dtype} and "kv_cache[2]" not in given:
        return
    cache, cached = next((name, view) for name, view in others if name.startswith("kv_cache"))
    allowed: dict[str, tuple[str, ...]] = {name: (query.dtype,) for name, _ in others}
    if cached.dtype in E4M3:
        if query.dtype != DTYPES[0] and not is_fp8:
            raise TypeError(
                f"{arg(first)}: needs {DTYPES[0]} with {arg(cache)} of {cached.dtype}, got "
                f"{query.dtype}; convert it first"
            )
        allowed |= {
            cache: E4M3,
            "kv_cache[1]": (DTYPES[0], cached.dtype),
            "kv_cache[2]": ("float32",),
        }
    elif "kv_cache[2]" in given:
        raise TypeError(
            f"{arg('kv_cache[2]')}: needs {arg('kv_cache[0]')} of {' or '.join(E4M3)}, got "
            f"{cached.dtype}; leave it out"
        )
    for name, view in others:
        if view.dtype != query.dtype and allowed[name] == (query.dtype,):
            need, way_out = f"{arg(first)}'s dtype {query.dtype}", "convert one of them"
            if name == cache and (view.dtype == "int8" or view.dtype.startswith("float8")):
                need += f", or {' or '.join(E4M3)}"
                way_out = "convert it, or pass .view(uint8) of e4m3 bits"
            raise TypeError(f"{arg(name)}: needs {need}, got {view.dtype}; {way_out}")
        check_dtype(name, view.dtype, allowed[name])


def _rank_problem(name: str, view: ArrayView, query_axes: tuple[str, ...]) -> str:
    columns, last = _COLUMNS[name], view.shape[-1:]
    if name in ("q", "kv_cache") and last in [(sum(width),) for width in WIDTHS]:
        (columns,) = last
    if name.startswith("q"):
        hint = ", with q_len 1 where each request has one query"
        if "q_len" not in query_axes:
            hint = ", or call cumla.mla_decode, whose q has a batch" if len(view.shape) == 4 else ""
        return (
            f"{arg(name)}: needs {len(query_axes) + 1} axes ({', '.join(query_axes)}, {columns}), "
            f"got shape {view.shape}; reshape it{hint}"
        )
    return heads_problem(name, "num_pages, page_size", columns, view)


def heads_problem(name: str, lead: str, columns: int, view: ArrayView) -> str:
    """Say that an array has another number of axes than `lead`, an optional one, and columns."""
    return (
        f"{arg(name)}: needs axes ({lead}, num_kv_heads, {columns}), or the same without "
        f"num_kv_heads, got shape {view.shape}; reshape it"
    )


def _columns_problem(name: str, view: ArrayView, widths: Sequence[Width]) -> str:
    if name == "kv_cache" and view.dtype == "uint8":
        return (
            f"{arg(name)}: needs a last axis of {HEAD_DIM} e4m3 numbers ({VALUE_DIM} latent + "
            f"{ROPE_DIM} RoPE), or of the {PACKED_BYTES} bytes of a packed row, got shape "
            f"{view.shape}; pass a tuple of the parts if they are apart"
        )
    nbytes = view.shape[-1] * numpy_dtype(view.dtype).itemsize
    if name == "kv_cache" and nbytes == PACKED_BYTES:
        return f"{arg(name)}: needs packed rows as uint8, got {view.dtype}; pass a view as uint8"
    if name in ("q", "kv_cache"):
        need = _listed([named_width(width) for width in widths])
        absorb = ", or absorb W_UK into the queries" if name == "q" else ""
        return (
            f"{arg(name)}: needs a last axis of {need}, got shape {view.shape}; pass a tuple of "
            f"both if they are separate arrays, the latent one first{absorb}"
        )
    swapped = ": these look swapped" if (view.shape[-1], name[-3:]) == (ROPE_DIM, "[0]") else ""
    pairs = [width for width in widths if width[1]]
    columns = _listed(dict.fromkeys(str(pair[int(name[-2])]) for pair in pairs))
    (latent, rope), *others = pairs
    more = "".join(f", or {latent} and {rope}" for latent, rope in others)
    return (
        f"{arg(name)}: needs a last axis of {columns}, got shape {view.shape}; a pair holds "
        f"{latent} latent columns, then {rope} RoPE ones{more}{swapped}"
    )


def _listed(choices: Iterable[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


def checked_shape(
    numbers: Mapping[str, int],
    num_heads: int,
    num_kv_heads: int,
    page_size: int = BLOCK_TOKENS,
    dtype: Any = DTYPES[0],
) -> Shape:
    """Check a shape that was given in numbers, to make a plan for it; `numbers` by their names.

    It is returned as the first fields of a key.
    """
    for name, value in numbers.items():
        checked_int(name, value, "pass the size of a call", least=0)
    for name, value in {"num_heads": num_heads, "num_kv_heads": num_kv_heads}.items():
        checked_int(name, value, "pass the size of a call")
    _check_heads(num_heads, num_kv_heads)
    checked_int("page_size", page_size, "allocate the cache in pages of one token at least")
    dtype = dtype_name(dtype)
    check_dtype("dtype", dtype, DTYPES)
    return cast("Shape", (*numbers.values(), num_heads, num_kv_heads, page_size, dtype))


def cache_of(kv_cache: ArrayView) -> str:
    """Tell which of CACHES a cache is, by its latent columns as their checks have left them."""
    return "e4m3" if kv_cache.dtype == FP8 else "same"


def checked_cache_dtype(cache_dtype: Any, dtype: Any = None) -> str:
    """Check what a plan's caches are to hold; tell which of CACHES that is.

    Without a dtype of the queries any that goes with the cache's will do.
    """
    cache_dtype, dtype = dtype_name(cache_dtype), dtype_name(dtype)
    if dtype is None:
        dtype = cache_dtype if cache_dtype in DTYPES else DTYPES[0]
    if cache_dtype is None or cache_dtype == dtype:
        return "same"
    if cache_dtype != FP8:
        raise TypeError(
            f"cache_dtype: needs dtype's {dtype}, or {FP8}, got {cache_dtype}; leave it out for "
            f"caches of dtype, or pass {FP8}, for packed rows of uint8, too"
        )
    if dtype != DTYPES[0]:
        raise TypeError(
            f"dtype: needs {DTYPES[0]} with cache_dtype {FP8}, got {dtype}; convert the queries"
        )
    return "e4m3"


def other_cache(q: ArrayView, kv_cache: ArrayView) -> ValueError:
    """Say that a plan is not for the cache that came."""
    got = kv_cache.dtype
    made = q.dtype if got == FP8 else FP8
    return ValueError(
        f"plan: made for a cache of {made}, got one of {got}; make a plan with the cache_dtype of "
        f"each"
    )


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{arg('num_heads')}: needs a multiple of num_kv_heads, got {num_heads} query heads "
            f"and {num_kv_heads} kv heads; check the axes of {arg('kv_cache')}: (num_pages, "
            f"page_size, num_kv_heads, columns), one with heads before tokens as "
            f"{arg('kv_cache')}[:, 0]"
        )
