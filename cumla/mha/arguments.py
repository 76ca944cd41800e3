# SPDX-License-Identifier: Apache-2.0
"""What rows, caches and tables of multi-head attention must look like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.core.arguments import INT32, WIDE, Array, check_dtype, check_layout, check_written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

__all__ = [
    "DTYPES",
    "E4M3",
    "LAYOUTS",
    "MAX_HEAD_DIM",
    "PLACES",
    "TABLES",
    "batched",
    "check_rotation",
    "checked_layout",
    "checked_rows",
    "checked_written_cache",
    "tables_of",
]

DTYPES = ("bfloat16", "float16")
E4M3 = ("float8_e4m3fn", "uint8")
TABLES = ("float32", *DTYPES)
LAYOUTS = ("NHD", "HND")
MAX_HEAD_DIM = 512
_OCTET = 8  # columns that a thread holds at once

PLACES = {  # where the rows of tokens go
    **{name: Array("tokens", WIDE) for name in ("slot_mapping", "batch_indices", "positions")},
    "kv_lens": Array("batch", INT32),
    "qo_indptr": Array("batch+1", INT32, way_out="pass where each request's tokens end"),
    "block_table": Array("batch max_pages", INT32),
    "kv_indices": Array("entries", INT32),
    "kv_indptr": Array("batch+1", INT32, way_out="pass where each request's list ends"),
}


def checked_layout(kv_layout: object) -> str:
    """Return the order of axes of caches."""
    if kv_layout not in LAYOUTS:
        raise ValueError(
            f"kv_layout: needs {' or '.join(map(repr, LAYOUTS))}, got {kv_layout!r}; pass one of "
            f"them"
        )
    return str(kv_layout)


def batched(view: ArrayView) -> ArrayView:
    """Take ragged rows (tokens, heads, columns) for those of one batch."""
    if len(view.shape) == 4:
        return view
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))


def checked_rows(name: str, view: ArrayView, dtypes: tuple[str, ...], lead: str) -> ArrayView:
    """Check rows of heads, and give them four axes."""
    check_dtype(name, view.dtype, dtypes)
    columns = view.shape[-1] if len(view.shape) in (3, 4) else 0
    if not columns or columns % _OCTET or columns > MAX_HEAD_DIM or not view.shape[-2]:
        raise ValueError(
            f"{name}: needs shape {lead} with columns a multiple of {_OCTET} up to {MAX_HEAD_DIM}, "
            f"got {view.shape}; reshape it, or pad the columns with zeros"
        )
    check_layout(name, view)
    return batched(view)


def checked_written_cache(name: str, view: ArrayView, rows: ArrayView, of: str) -> ArrayView:
    """Check a cache that rows are written to, with the axes (pages, tokens, kv heads, columns)."""
    heads, columns = rows.shape[2:]
    check_dtype(name, view.dtype, (rows.dtype, *E4M3))
    if len(view.shape) != 4 or view.shape[2:] != (heads, columns) or 0 in view.shape:
        raise ValueError(
            f"{name}: needs pages of rows like those of {of}, (num_pages, page_size, {heads}, "
            f"{columns}) in the order of kv_layout='NHD', got that of {view.shape}; pass the cache "
            f"of this layer, and its kv_layout"
        )
    check_written(name, view)
    check_layout(name, view)
    return view


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
                f"cos_sin[1]: needs shape and dtype of cos_sin[0], {cos.shape} {cos.dtype}, got "
                f"{sin.shape} {sin.dtype}; pass cosines and sines of the same table"
            )
        return cos, sin
    _check_table("cos_sin", whole, "(max_position, rotary_dim)")
    positions, columns = whole.shape
    if columns % 2:
        raise ValueError(
            f"cos_sin: needs as many sines as cosines in a row, got shape {whole.shape}; join the "
            f"two tables along the last axis"
        )
    half = whole._replace(shape=(positions, columns // 2))
    return half, half._replace(ptr=whole.ptr + columns // 2 * whole.strides[1])


def _check_table(name: str, view: ArrayView, shape: str) -> None:
    check_dtype(name, view.dtype, TABLES)
    if len(view.shape) != 2 or 0 in view.shape:
        raise ValueError(
            f"{name}: needs shape {shape}, a row for each position, got {view.shape}; reshape it"
        )


def check_rotation(cos: ArrayView, columns: int, rotary_offset: int) -> None:
    """Check that the columns to rotate lie in the head, in whole octets."""
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim % (2 * _OCTET) or rotary_offset % _OCTET or rotary_offset + rotary_dim > columns:
        raise ValueError(
            f"cos_sin: needs rotary_dim a multiple of {2 * _OCTET} and rotary_offset one of "
            f"{_OCTET}, together at most the {columns} columns of k, got rotary_dim {rotary_dim} "
            f"and rotary_offset {rotary_offset}; pass the table of this head"
        )
