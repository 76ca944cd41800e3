# SPDX-License-Identifier: Apache-2.0
"""Checks of rows, caches and tables of multi-head attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.core.arguments import (
    INT32,
    WIDE,
    Array,
    bind,
    check_dtype,
    check_layout,
    check_lies,
    check_written,
)
from cumla.core.names import arg
from cumla.core.spec import Option, in_parts, integer
from cumla.core.tree import TREE_DTYPES, check_words
from cumla.launch.mha.append_kv_cache import Scale
from cumla.launch.mha.mask_arrays import NO_MASK, MaskArrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

DTYPES = ("bfloat16", "float16", "float32")
E4M3 = ("float8_e4m3fn", "uint8")
TABLES = ("float32", "bfloat16", "float16")
LAYOUTS = ("NHD", "HND")
MAX_HEAD_DIM = 512
_OCTET = 8  # columns that a thread holds at once

PLACES = {  # which say where the rows of tokens go
    **{name: Array("tokens", WIDE) for name in ("slot_mapping", "batch_indices", "positions")},
    "kv_lens": Array("batch", INT32),
    "qo_indptr": Array("batch+1", INT32, way_out="pass where each request's tokens end"),
    "block_table": Array("batch max_pages", INT32),
    "kv_indices": Array("entries", INT32),
    "kv_indptr": Array("batch+1", INT32, way_out="pass where each request's list ends"),
}


def checked_layout(value: object, name: str = "kv_layout") -> str:
    """Return the order of axes of caches."""
    if value not in LAYOUTS:
        raise ValueError(
            f"{arg(name)}: needs {' or '.join(map(repr, LAYOUTS))}, got {value!r}; pass one of them"
        )
    return LAYOUTS[LAYOUTS.index(value)]  # str() of an enumeration's member is another one


KV_LAYOUT = Option("kv_layout", LAYOUTS[0], lambda name, value: checked_layout(value, name), "str")
ROTARY_OFFSET = integer("rotary_offset", "pass the first column", 0, 0)
ANGLES = in_parts("cosines", "sines")


def batched(view: ArrayView) -> ArrayView:
    """Give rows of heads four axes: ragged rows (tokens, heads, columns) are one batch."""
    if len(view.shape) == 4:
        return view
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))


def checked_rows(
    name: str,
    view: ArrayView,
    dtypes: tuple[str, ...],
    lead: str,
    way_out: str = "convert it first",
) -> ArrayView:
    """Check rows of heads, and give them four axes."""
    check_dtype(name, view.dtype, dtypes, way_out)
    columns = view.shape[-1] if len(view.shape) in (3, 4) else 0
    if not columns or columns % _OCTET or columns > MAX_HEAD_DIM or not view.shape[-2]:
        raise ValueError(
            f"{arg(name)}: needs shape {lead} with at least one head and a multiple of {_OCTET} "
            f"columns up to {MAX_HEAD_DIM}, got {view.shape}; reshape it, or pad the columns with "
            f"zeros"
        )
    check_layout(name, view)
    return batched(view)


def checked_written_cache(name: str, view: ArrayView, rows: ArrayView, layout: str) -> ArrayView:
    """Check a cache that rows are written to; give it the axes of kv_layout="NHD"."""
    heads, columns = rows.shape[2:]
    way_out = "convert it, or the new rows"
    check_dtype(name, view.dtype, (rows.dtype, *E4M3), way_out)
    pages = swapped(view) if layout == "HND" and len(view.shape) == 4 else view
    if len(pages.shape) != 4 or pages.shape[2:] != (heads, columns) or 0 in pages.shape:
        axes = ("page_size", heads) if layout == "NHD" else (heads, "page_size")
        raise ValueError(
            f"{arg(name)}: needs shape (num_pages, {axes[0]}, {axes[1]}, {columns}) for "
            f"{arg('kv_layout')} {layout!r} and these rows, got {view.shape}; pass the cache of "
            f"this layer, and its {arg('kv_layout')}"
        )
    check_written(name, view)
    check_layout(name, view)
    return pages


def checked_scales(
    name: str,
    view: ArrayView | None,
    number: float | None,
    cache: ArrayView,
    batch: int | None,
    told: str,
) -> Scale:
    """Check the factor of an e4m3 cache, and give it the axes (batch, num_kv_heads).

    `batch` is None where the requests of rows are not told, and `told` says in a message when they
    are.
    """
    if view is None and number is None:
        return Scale()
    if cache.dtype not in E4M3:
        raise ValueError(f"{arg(name)}: needs an e4m3 cache, got {cache.dtype}; leave it out")
    if view is None:
        return Scale(1.0 if number is None else number)
    heads = cache.shape[2]
    check_dtype(name, view.dtype, ("float32",))
    check_lies(name, view, "elements")
    if view.shape == (batch, heads):
        return Scale(view=view)
    if view.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"{arg(name)}: needs shape (1,), ({heads},), or (batch, {heads}) "
            f"{told if batch is None else f'with batch {batch}'}, got {view.shape}; pass as many "
            f"factors"
        )
    stride = view.strides[0] if view.shape == (heads,) and heads > 1 else 0
    return Scale(view=view._replace(shape=(1, heads), strides=(0, stride)))


_MASK_ROW = "give each row of q its number"
_MASK_REQUEST = "give each request its number"
_MASK = {
    "mask.start": Array("total_tokens", INT32, "row", _MASK_ROW),
    "mask.end": Array("total_tokens", INT32, "row", _MASK_ROW),
    "mask.prefix_len": Array("batch", INT32, "row", _MASK_REQUEST),
    "mask.tree": Array(
        "total_tokens words",
        TREE_DTYPES,
        "row",
        "give each row of q its bits",
        "build the mask with cumla.AttentionMask.from_tree",
    ),
    "mask.tree_start": Array("batch", INT32, "row", _MASK_REQUEST),
}


def checked_mask(given: Mapping[str, ArrayView], total_tokens: int) -> MaskArrays:
    """Check the arrays of a mask, all but the number of requests."""
    arrays = {name: given[name] for name in _MASK if name in given}
    if not arrays:
        return NO_MASK
    sizes = bind(_MASK, arrays, {"total_tokens": total_tokens})
    tree = given.get("mask.tree")
    if tree is not None:
        check_words("mask.tree", tree)
    elif "mask.tree_start" in given:
        raise ValueError(
            f"{arg('mask.tree_start')}: needs {arg('mask.tree')}, got None; pass it, or no "
            f"{arg('mask.tree_start')}"
        )
    places = {name.removeprefix("mask."): view.ptr for name, view in arrays.items()}
    form, words = ("rows", 0) if tree is None else ("tree", sizes["words"])
    return MaskArrays(**places, words=words, form=form, batch=sizes.get("batch", 0))


def check_mask_batch(mask: MaskArrays, batch: int) -> None:
    """Check the number of requests of a mask."""
    if mask.batch not in (0, batch) or (batch == 0 and mask.batch):
        raise ValueError(
            f"{arg('mask.prefix_len')}: needs shape (batch,) with batch {batch}, as "
            f"{arg('mask.tree_start')} does, got ({mask.batch},); {_MASK_REQUEST}"
        )


def swapped(view: ArrayView) -> ArrayView:
    """Put the axis of tokens before that of heads."""
    (pages, heads, tokens, columns), (page, head, token, column) = view.shape, view.strides
    return view._replace(shape=(pages, tokens, heads, columns), strides=(page, token, head, column))


def tables_of(views: Mapping[str, ArrayView]) -> tuple[ArrayView, ArrayView] | tuple[None, None]:
    """Give cosines and sines apart, each (max_position, rotary_dim / 2)."""
    whole = views.get("cos_sin")
    if whole is None:
        cos, sin = views.get("cos_sin[0]"), views.get("cos_sin[1]")
        if cos is None or sin is None:
            return None, None
        for name, view in (("cos_sin[0]", cos), ("cos_sin[1]", sin)):
            _check_table(name, view, "(max_position, rotary_dim / 2)")
        if sin.shape != cos.shape or sin.dtype != cos.dtype:
            raise ValueError(
                f"{arg('cos_sin[1]')}: needs shape and dtype of {arg('cos_sin[0]')}, {cos.shape} "
                f"{cos.dtype}, got {sin.shape} {sin.dtype}; pass cosines and sines of the same "
                f"table"
            )
        return cos, sin
    _check_table("cos_sin", whole, "(max_position, rotary_dim)")
    positions, columns = whole.shape
    if columns % 2:
        raise ValueError(
            f"{arg('cos_sin')}: needs as many sines as cosines in a row, got shape {whole.shape}; "
            f"join the two tables along the last axis"
        )
    half = whole._replace(shape=(positions, columns // 2))
    return half, half._replace(ptr=whole.ptr + columns // 2 * whole.strides[1])


def _check_table(name: str, view: ArrayView, shape: str) -> None:
    is_complex = view.dtype.startswith("complex")
    way_out = "pass the pair (table.real, table.imag)" if is_complex else "convert it first"
    check_dtype(name, view.dtype, TABLES, way_out)
    if len(view.shape) != 2 or 0 in view.shape:
        is_cis = len(view.shape) == 3 and view.shape[2] == 2  # a reshape would mix the angles
        way_out = "pass the pair (table[..., 0], table[..., 1])" if is_cis else "reshape it"
        raise ValueError(
            f"{arg(name)}: needs shape {shape}, a row for each position, got {view.shape}; "
            f"{way_out}"
        )
    check_lies(name, view, "elements")


def check_rotation(cos: ArrayView, columns: int, rotary_offset: int) -> None:
    """Check that the columns to rotate are inside the head, in whole octets."""
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim % (2 * _OCTET) or rotary_offset % _OCTET or rotary_offset + rotary_dim > columns:
        raise ValueError(
            f"{arg('cos_sin')}: needs rotary_dim a multiple of {2 * _OCTET} and "
            f"{arg('rotary_offset')} one of {_OCTET}, together at most the {columns} columns of a "
            f"head, got rotary_dim {rotary_dim} and {arg('rotary_offset')} {rotary_offset}; pass "
            f"the table of this model, with each angle once"
        )
