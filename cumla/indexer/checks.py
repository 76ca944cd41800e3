# SPDX-License-Identifier: Apache-2.0
"""What the arguments of the indexer's logits must look like; all of it before anything is launched.

What the pages of a cache must look like stands in `cumla.indexer.pages`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla.indexer.pages import (
    E4M3,
    HEAD_DIMS,
    PAGE_SIZES,
    check_page_size,
    check_page_stride,
    check_shape,
    fused_pages,
    one_of,
    pair_of_pages,
)
from cumla.launch.indexer.mqa_logits import mqa_logits_spec
from cumla.launch.indexer.paged_mqa_logits import paged_mqa_logits_spec
from cumla.mla.checks import (
    check_block_table,
    check_elements,
    check_int32,
    check_layout,
    check_number,
    check_own_memory,
    copy_to_host,
    may_look,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView, Call
    from cumla.launch.source import KernelSpec

__all__ = [
    "PagedShape",
    "PagedViews",
    "check_context_lens",
    "check_paged_data",
    "check_paged_values",
    "check_planned_lens",
    "check_range_data",
    "check_range_values",
    "check_shape_numbers",
    "checked_logits_dtype",
    "checked_logits_specs",
    "checked_number",
    "checked_out",
    "checked_paged",
    "checked_paged_shape",
    "checked_parts",
    "checked_prefill",
]

HEADS = (8, 16, 32, 64)
MOST_NEXT_N = 8
LOGITS_DTYPES = ("float32", "bfloat16")


class PagedShape(NamedTuple):
    """What a plan of paged logits is made for.

    Attributes
    ----------
    batch, next_n, num_heads, head_dim : int
        Shape of the queries.
    page_size : int
        Tokens of a page.
    max_pages : int
        Columns of the block table.
    per_row_lens : bool
        Whether each query has a length of its own, and not each request.
    """

    batch: int
    next_n: int
    num_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    per_row_lens: bool


class PrefillViews(NamedTuple):
    """Checked inputs of `mqa_logits`, in the order of the call."""

    q: ArrayView
    k: ArrayView
    k_scale: ArrayView
    weights: ArrayView
    ks: ArrayView
    ke: ArrayView


class PagedViews(NamedTuple):
    """Checked inputs of `paged_mqa_logits`; the cache as keys and scales."""

    q: ArrayView
    k_cache: ArrayView
    scale_cache: ArrayView
    weights: ArrayView
    context_lens: ArrayView
    block_table: ArrayView

    @property
    def shape(self) -> PagedShape:
        """What a plan for this call is made for."""
        return _shape_of(self.q, self.k_cache, self.context_lens, self.block_table)


# --- numbers and dtypes ---------------------------------------------------------------------------


def checked_logits_dtype(logits_dtype: Any) -> str | None:
    """Return the name of a dtype of any framework, or None."""
    if logits_dtype is None:
        return None
    try:
        hash(logits_dtype)
    except TypeError:
        raise TypeError(
            f"logits_dtype: needs {' or '.join(LOGITS_DTYPES)}, got "
            f"{type(logits_dtype).__qualname__}; pass its name"
        ) from None
    return _logits_dtype(logits_dtype)


@lru_cache(maxsize=64)
def _logits_dtype(logits_dtype: Any) -> str:
    got = str(logits_dtype)
    if got.startswith("torch."):
        name = got.removeprefix("torch.")
    else:
        try:
            name = got = np.dtype(logits_dtype).name
        except TypeError:  # names of types that NumPy does not know until ml_dtypes is loaded, too
            name = got
    if name not in LOGITS_DTYPES:
        raise TypeError(
            f"logits_dtype: needs {' or '.join(LOGITS_DTYPES)}, got {got}; convert the result"
        )
    return name


def checked_number(name: str, value: Any, way_out: str, least: int = 1) -> int:
    """Return an int, Python's or NumPy's, that is at least `least`."""
    if isinstance(value, np.integer):  # such as the maximum of lengths
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: needs an int, got {type(value).__qualname__}; convert it")
    if value < least:
        raise ValueError(f"{name}: needs a number from {least}, got {value}; {way_out}")
    return value


def check_shape_numbers(shape: PagedShape) -> None:
    """Check a shape that was given in numbers, to make a plan for it."""
    for name in ("batch", "next_n", "num_heads", "head_dim", "page_size", "max_pages"):
        check_number(name, getattr(shape, name), "nothing to plan for")
    _check_sizes("num_heads", shape.num_heads, "head_dim", shape.head_dim)
    _check_next_n("next_n", shape.next_n)
    check_page_size("page_size", shape.page_size)


def checked_logits_specs(num_heads: int, head_dim: int) -> tuple[KernelSpec, ...]:
    """Return the kernels of an indexer: of a prefill, and of each number of new tokens."""
    shape = PagedShape(1, MOST_NEXT_N, num_heads, head_dim, PAGE_SIZES[0], 1, False)
    check_shape_numbers(shape)
    paged = [
        paged_mqa_logits_spec(num_heads, head_dim, next_n) for next_n in range(1, MOST_NEXT_N + 1)
    ]
    return tuple(dict.fromkeys((mqa_logits_spec(num_heads, head_dim), *paged)))


def _check_sizes(heads_name: str, num_heads: int, dim_name: str, head_dim: int) -> None:
    if num_heads not in HEADS:
        raise ValueError(
            f"{heads_name}: needs {one_of(HEADS)} heads, got {num_heads}; pad them with heads of "
            f"weight 0"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"{dim_name}: needs a head_dim of {one_of(HEAD_DIMS)}, got {head_dim}; pad queries "
            f"and keys with zeros"
        )


def _check_next_n(name: str, next_n: int) -> None:
    if next_n > MOST_NEXT_N:
        raise ValueError(
            f"{name}: needs at most {MOST_NEXT_N} queries of a request, got next_n {next_n}; pass "
            f"them in several calls, or as requests of their own"
        )


# --- inputs ---------------------------------------------------------------------------------------


def checked_prefill(views: Sequence[ArrayView]) -> PrefillViews:
    """Check the inputs of `mqa_logits` against each other."""
    q, k, k_scale, weights, ks, ke = views
    _check_e4m3("q", q, "(seq_len, num_heads, head_dim)", 3)
    _check_e4m3("kv[0]", k, "(seq_len_kv, head_dim)", 2)
    seq_len, num_heads, head_dim = q.shape
    _check_sizes("q", num_heads, "q", head_dim)
    _check_head_dim("kv[0]", k, head_dim)
    check_layout("q", q)
    check_layout("kv[0]", k)
    _check_float32("kv[1]", k_scale, "(seq_len_kv,)", (k.shape[0],))
    _check_float32("weights", weights, "(seq_len, num_heads)", (seq_len, num_heads))
    for name, bounds in (("ks", ks), ("ke", ke)):
        if bounds.dtype != "int32":
            raise TypeError(f"{name}: needs int32, got {bounds.dtype}; convert it first")
        check_shape(name, bounds, "(seq_len,)", (seq_len,))
        check_elements(name, bounds)
    return PrefillViews(q, k, k_scale, weights, ks, ke)


def checked_paged(views: Sequence[ArrayView]) -> PagedViews:
    """Check the inputs of `paged_mqa_logits` against each other."""
    q, *cache, weights, context_lens, block_table = views
    k_cache, scale_cache = _checked_cache(q, cache)
    batch, next_n, num_heads, _ = q.shape
    rows = (batch * next_n, num_heads)
    _check_float32("weights", weights, "(batch * next_n, num_heads)", rows)
    _check_tables(q, context_lens, block_table)
    return PagedViews(q, k_cache, scale_cache, weights, context_lens, block_table)


def checked_paged_shape(views: Sequence[ArrayView]) -> PagedShape:
    """Check what a plan is made for: the inputs of `paged_mqa_logits` without the weights."""
    q, *cache, context_lens, block_table = views
    k_cache, _ = _checked_cache(q, cache)
    _check_tables(q, context_lens, block_table)
    return _shape_of(q, k_cache, context_lens, block_table)


def _checked_cache(q: ArrayView, cache: Sequence[ArrayView]) -> tuple[ArrayView, ArrayView]:
    """Check queries and cache; the latter comes back as keys and scales."""
    _check_e4m3("q", q, "(batch, next_n, num_heads, head_dim)", 4)
    _, next_n, num_heads, head_dim = q.shape
    _check_sizes("q", num_heads, "q", head_dim)
    _check_next_n("q", next_n)
    check_layout("q", q)
    if len(cache) == 1:
        return fused_pages(cache[0], head_dim)
    k_cache, scale_cache = cache
    return _checked_pair(k_cache, scale_cache, head_dim)


def checked_parts(name: str, view: ArrayView) -> int:
    """Check memory for a schedule that the caller keeps, and return the number of its parts."""
    if view.dtype != "int32":
        raise TypeError(f"{name}: needs int32, got {view.dtype}; pass what was computed for it")
    if len(view.shape) != 2 or view.shape[0] < 2 or view.shape[1] != 2:
        raise ValueError(
            f"{name}: needs shape (parts + 1, 2), got {view.shape}; pass what was computed for it"
        )
    if view.strides != (8, 4) or view.ptr % 8:
        raise ValueError(
            f"{name}: needs contiguous memory at a multiple of 8 bytes, got address {view.ptr:#x} "
            f"and strides {view.strides}; copy it"
        )
    return view.shape[0] - 1


def _check_tables(q: ArrayView, context_lens: ArrayView, block_table: ArrayView) -> None:
    batch, next_n, _, _ = q.shape
    check_context_lens(context_lens, batch, next_n, len(context_lens.shape) == 2)
    check_block_table(block_table, batch)
    if block_table.shape[1] == 0:
        raise ValueError(
            f"block_table: needs at least one column, got shape {block_table.shape}; skip the call "
            f"where there is no cache"
        )


def _shape_of(
    q: ArrayView, k_cache: ArrayView, context_lens: ArrayView, block_table: ArrayView
) -> PagedShape:
    batch, next_n, num_heads, head_dim = q.shape
    per_row = len(context_lens.shape) == 2
    page_size, max_pages = k_cache.shape[1], block_table.shape[1]
    return PagedShape(batch, next_n, num_heads, head_dim, page_size, max_pages, per_row)


def check_context_lens(view: ArrayView, batch: int, next_n: int, per_row: bool) -> None:
    """Check the lengths: one for each request, or one for each query."""
    if not per_row:
        check_int32("context_lens", view, "(batch,)", (batch,))
        return
    if view.dtype != "int32":
        raise TypeError(f"context_lens: needs int32, got {view.dtype}; convert it first")
    if view.shape != (batch, next_n):
        raise ValueError(
            f"context_lens: needs shape (batch, next_n) = {(batch, next_n)}, got {view.shape}; "
            f"give each query its length"
        )
    check_elements("context_lens", view)


def _checked_pair(
    k_cache: ArrayView, scale_cache: ArrayView, head_dim: int
) -> tuple[ArrayView, ArrayView]:
    """Check a cache whose keys and scales are arrays of their own."""
    keys, scales = pair_of_pages(k_cache, scale_cache, head_dim)
    if keys.strides[1:] != (head_dim, 1):
        raise ValueError(
            f"kv_cache[0]: needs pages whose keys are contiguous, got strides {k_cache.strides}; "
            f"only the pages may lie apart"
        )
    check_page_stride("kv_cache[0]", keys)
    check_layout("kv_cache[1]", scales)
    return keys, scales


def _check_e4m3(name: str, view: ArrayView, axes: str, count: int) -> None:
    if view.dtype not in E4M3:
        raise TypeError(
            f"{name}: needs float8_e4m3fn, or uint8 with its bits, got {view.dtype}; quantise it, "
            f"e.g. with cumla.quantize_fp8"
        )
    if len(view.shape) != count:
        raise ValueError(f"{name}: needs axes {axes}, got shape {view.shape}; reshape it")
    if 0 in view.shape:
        raise ValueError(
            f"{name}: needs at least one element on every axis, got shape {view.shape}; skip the "
            f"call where there is nothing to score"
        )


def _check_head_dim(name: str, view: ArrayView, head_dim: int) -> None:
    if view.shape[-1] != head_dim:
        raise ValueError(
            f"{name}: needs q's head_dim {head_dim} as its last axis, got shape {view.shape}; pass "
            f"keys and queries of one model"
        )


def _check_float32(name: str, view: ArrayView, axes: str, shape: tuple[int, ...]) -> None:
    if view.dtype != "float32":
        raise TypeError(f"{name}: needs float32, got {view.dtype}; convert it first")
    check_shape(name, view, axes, shape)
    check_elements(name, view)


# --- the result -----------------------------------------------------------------------------------


def checked_out(out: ArrayView | None, shape: tuple[int, int], dtype: str | None) -> str:
    """Check where the logits go, if the caller gave it, and return their dtype."""
    if out is None:
        return dtype or LOGITS_DTYPES[0]
    if out.dtype not in (LOGITS_DTYPES if dtype is None else (dtype,)):
        raise TypeError(
            f"out: needs {dtype or ' or '.join(LOGITS_DTYPES)}, got {out.dtype}; allocate it so, "
            f"or change logits_dtype"
        )
    if out.shape != shape:
        raise ValueError(
            f"out: needs shape {shape}, got {out.shape}; allocate it so or leave it out"
        )
    check_own_memory("out", out)
    itemsize = 4 if out.dtype == "float32" else 2
    row_stride, stride = out.strides
    if shape[1] > 1 and stride != itemsize:
        raise ValueError(
            f"out: needs contiguous rows, got a stride of {stride} bytes for {itemsize}-byte "
            f"elements; allocate it so or leave it out"
        )
    if out.ptr % itemsize or (shape[0] > 1 and row_stride % itemsize):
        raise ValueError(
            f"out: needs an address and rows at multiples of {itemsize} bytes, got address "
            f"{out.ptr:#x} and strides {out.strides}; allocate it so or leave it out"
        )
    if shape[0] > 1 and row_stride < shape[1] * itemsize:
        raise ValueError(
            f"out: needs rows behind each other that do not overlap, got a stride of {row_stride} "
            f"bytes for rows of {shape[1] * itemsize}; allocate it so or leave it out"
        )
    return out.dtype


# --- check mode -----------------------------------------------------------------------------------


def check_range_data(call: Call, views: PrefillViews) -> None:
    """Look at the ranges on the device, if CUMLA_CHECK asks for it: it waits for the stream."""
    if may_look(call):
        bounds = {name: copy_to_host(getattr(views, name), call.stream) for name in ("ks", "ke")}
        check_range_values(bounds, views.k.shape[0])


def check_range_values(bounds: dict[str, np.ndarray[Any, Any]], seq_len_kv: int) -> None:
    """Raise for the first bound that is no place among the keys."""
    for name, values in bounds.items():
        wrong = np.flatnonzero((values < 0) | (values > seq_len_kv))
        if wrong.size:
            i = wrong[0]
            raise ValueError(
                f"{name}[{i}]: needs a number from 0 to seq_len_kv = {seq_len_kv}, got "
                f"{values[i]}; the kernel would clamp it"
            )


def check_paged_data(call: Call, views: PagedViews, max_context_len: int) -> None:
    """Look at lengths and page numbers, as `check_range_data` does at ranges."""
    if may_look(call):
        lengths = copy_to_host(views.context_lens, call.stream)
        table = copy_to_host(views.block_table, call.stream)
        check_paged_values(lengths, table, views.k_cache.shape, max_context_len)


def check_paged_values(
    lengths: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any],
    cache_shape: tuple[int, ...],
    max_context_len: int,
) -> None:
    """Raise for the first length or used page number that is out of range."""
    num_pages, page_size = cache_shape[:2]
    longest = table.shape[1] * page_size
    place = _first((lengths < 0) | (lengths > longest))
    if place is not None:
        raise ValueError(
            f"context_lens[{', '.join(map(str, place))}]: needs a length from 0 to max_pages * "
            f"page_size = {longest}, got {lengths[place]}; the kernels would clamp it"
        )
    place = _first(lengths > max_context_len)
    if place is not None:
        raise ValueError(
            f"context_lens[{', '.join(map(str, place))}]: needs a length up to max_context_len = "
            f"{max_context_len}, got {lengths[place]}; the logits behind it would be left out, ask "
            f"for more columns"
        )
    most = lengths.reshape(len(lengths), -1).max(axis=1)
    used = np.arange(table.shape[1]) * page_size < most[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= num_pages)))
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"block_table[{i}, {j}]: needs a page number from 0 to {num_pages - 1}, got "
            f"{table[i, j]}; the kernels would take the nearest that there is"
        )


def check_planned_lens(lengths: np.ndarray[Any, Any], planned: np.ndarray[Any, Any]) -> None:
    """Raise for the first length that is not the one a plan was updated with."""
    place = _first(lengths != planned)
    if place is not None:
        raise ValueError(
            f"context_lens[{', '.join(map(str, place))}]: needs the length that the plan was "
            f"updated with, {planned[place]}, got {lengths[place]}; call plan.update(context_lens) "
            f"after each change of the lengths"
        )


def _first(wrong: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Where the first of these is."""
    places = np.argwhere(wrong)
    return tuple(places[0].tolist()) if places.size else None
