# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/append_cache.cu: rows into a paged cache, queries rotated beside them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.slots import indices, num_entries, num_requests, page_numbers, pages
from cumla.launch.source import HALVES, KernelSpec
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

# Rows of one thread block, and heads of a query that one warp rotates.
_TILE_ROWS = constant("mla/append_cache", "kTileRows")
_WARPS = constant("mla/append_cache", "kAppendWarps")
# Columns of an octet, and latent columns of a row that one thread block has.
_OCTET, _SLICE = (constant("mla/append_cache", f"{n}kOctet") for n in ("", "kLatentOctets * "))
THREADS = 32 * _WARPS


def _spec(dtype: str, float_rows: bool, any_width: bool) -> KernelSpec:
    rows, tags = ("float32", [dtype, "from_float32"]) if float_rows else (dtype, [dtype])
    params, tags = ("AppendWidthParams", ["widths", *tags]) if any_width else (_PARAMS, tags)
    blocks = 3 if float_rows else 4  # as many as the registers of the rows in flight allow
    names = "mla", "append_cache", params
    return KernelSpec.of(*names, dtype, rows, tags=tags, threads=THREADS, min_blocks=blocks)


_PARAMS = "AppendCacheParams"
_SPECS = {names: _spec(*names) for names in product(HALVES, (False, True), (False, True))}
SPECS = tuple(_SPECS.values())


class AppendArguments(NamedTuple):
    """Checked views of one call, as :func:`cumla.append_mla_cache` describes the arrays."""

    # (tokens, num_kv_heads, 512), or as many latent columns as WRITTEN has; 448 of V4 and V4.1.
    latent_rows: ArrayView
    rope_rows: ArrayView  # (tokens, num_kv_heads, 64) or fewer; of form NO_ROPE any
    latent_cache: ArrayView  # (num_pages, page_size, num_kv_heads, 512), or as the rows
    rope_cache: ArrayView  # the same with 64
    slot_mapping: ArrayView | None  # (tokens,), as the next two
    batch_indices: ArrayView | None
    positions: ArrayView | None
    block_table: ArrayView | None  # (batch, max_pages)
    kv_indices: ArrayView | None  # (num_entries,)
    kv_indptr: ArrayView | None  # (batch + 1,)
    cos_sin: ArrayView | None  # (max_position, 64)
    q_pe: ArrayView | None  # (tokens, num_heads, 64)
    q_pe_out: ArrayView | None  # the same; both, or neither
    dtype: str  # of all that has 16 bits
    # e4m3 with a scale per 128 columns: (num_pages, page_size, num_kv_heads, 4). V4:
    # (num_pages, page_size, 1, 8), seven exponents and a zero, bytes. V4.1: 16 or 32 bytes.
    scales: ArrayView | None
    kv_scale: ArrayView | None  # of an e4m3 cache with one scale, where it is an array: one float32
    power_of_two_scales: bool  # whether `scales` are rounded up to powers of two
    scale_number: float  # of an e4m3 cache with one scale, where that is no array
    interleaved: bool  # which columns a rotation pairs
    form: str | None = None  # of FORMATS without 656 bytes, whose parts are numbers


def append_launch(arguments: AppendArguments) -> Launch:
    """Describe how to write rows, at least one, and to rotate the queries if there are any."""
    grid, values = append_values(arguments)
    of_width = octets_of(arguments)
    floats, any_width = arguments.latent_rows.dtype == "float32", of_width is not None
    return launch_of(_SPECS[arguments.dtype, floats, any_width], grid, values | (of_width or {}))


def octets_of(arguments: AppendArguments) -> dict[str, Any] | None:
    """Name the octets of rows of numbers of another width than 512 + 64."""
    width = arguments.latent_rows.shape[-1], arguments.rope_rows.shape[-1]
    if arguments.form is not None or width == WIDTH:
        return None
    return {"octets": {"latent": width[0] // _OCTET, "rope": width[1] // _OCTET}}


def append_values(arguments: AppendArguments) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Give the grid, and name the values of struct AppendCacheParams."""
    a = arguments
    tokens, num_kv_heads, _ = a.latent_rows.shape
    num_pages, page_size, _, _ = a.latent_cache.shape
    num_heads = 0 if a.q_pe is None else a.q_pe.shape[1]
    row_tiles = _ceil(tokens, _TILE_ROWS)
    query_warps = tokens * _ceil(num_heads, _TILE_ROWS)
    query_tiles = _ceil(_ceil(query_warps, _WARPS), num_kv_heads)
    values = {
        "latent_rows": _rows(a.latent_rows),
        "rope_rows": _rows(a.rope_rows),
        "latent_cache": pages(a.latent_cache),
        "rope_cache": pages(a.rope_cache),
        "slots": indices(a.slot_mapping),
        "batch_indices": indices(a.batch_indices),
        "positions": indices(a.positions),
        **page_numbers(a.block_table, a.kv_indices),
        "page_list_bounds": indices(a.kv_indptr),
        "cos_sin": 0 if a.cos_sin is None else a.cos_sin.ptr,
        "cos_sin_stride": 0 if a.cos_sin is None else a.cos_sin.strides[0],
        "queries": _rows(a.q_pe),
        "queries_out": _rows(a.q_pe_out),
        "tokens": tokens,
        "num_pages": num_pages,
        "page_size": page_size,
        "batch": num_requests(a.block_table, a.kv_indptr),
        "num_entries": num_entries(a.block_table, a.kv_indices),
        "max_position": 0 if a.cos_sin is None else a.cos_sin.shape[0],
        "row_tiles": row_tiles,
        "num_heads": num_heads,
        "cos_sin_is_float": a.cos_sin is not None and a.cos_sin.dtype == "float32",
        "interleaved": a.interleaved,
    }
    slices = _ceil(a.latent_rows.shape[-1], _SLICE)
    return (row_tiles + query_tiles, num_kv_heads, slices), values


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _rows(view: ArrayView | None) -> dict[str, int] | None:
    return None if view is None else strided(view, "data", "stride_token", "stride_head")
