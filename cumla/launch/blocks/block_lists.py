# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_lists.cu: lists of blocks become pages of virtual requests."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.core.paged import by_head
from cumla.launch.blocks.block_attention import block_attention_launch
from cumla.launch.blocks.block_attention_few import block_attention_few_launch
from cumla.launch.blocks.block_attention_gathered import block_attention_gathered_launch
from cumla.launch.blocks.block_attention_rest import block_attention_rest_launch
from cumla.launch.blocks.block_tiles import block_tiles_launch
from cumla.launch.blocks.widen_blocks import widen_blocks_launch, widened_pages
from cumla.launch.layouts import constant, launch_of
from cumla.launch.mha.launch import MHAArguments, attention_launch, attention_values
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import BlockKey, TileKey
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.append_kv_cache import Scale

_THREADS, _SHORT = (
    constant("blocks/block_lists", name) for name in ("kListThreads", "kShortThreads")
)
SPECS = tuple(
    KernelSpec.of(
        *("blocks", "block_lists", "BlockListsParams", threads),
        tags=[str(threads)],
        threads=threads,
    )
    for threads in (_THREADS, _SHORT)
)


def lists_spec(topk: int) -> KernelSpec:
    """Find the kernel for lists of this length."""
    return SPECS[topk <= _SHORT]


class VirtualPages(NamedTuple):
    """Numbers of blocks of kv heads: the steps from page to page, block to block, head to head."""

    steps: tuple[int, ...]
    number: int  # of virtual pages


class BlockArguments(NamedTuple):
    """Checked views of one call."""

    q: ArrayView  # (tokens, num_heads, columns), or with an axis of requests before
    k: ArrayView  # (num_pages, page_size, num_kv_heads, columns)
    v: ArrayView
    entries: ArrayView  # (tokens, num_kv_heads or 1, topk) int32 or int64
    lengths: ArrayView | None  # (tokens, num_kv_heads or 1) int32
    block_table: ArrayView  # (requests, max_pages) int32
    sinks: ArrayView | None
    block_size: int
    entries_are_tokens: bool
    softmax_scale: float
    softcap: float
    k_scale: Scale
    v_scale: Scale
    layout: str  # of the pages that were given
    causal: bool
    # Factors of keys and values, (num_kv_heads, rows of the cache) float32; then scales are 1.
    factors: tuple[ArrayView, ArrayView] | None = None

    @property
    def has_heads(self) -> bool:
        """Return whether factors of each kv head are read: they take a launch for each head."""
        given = (self.sinks, self.k_scale.view, self.v_scale.view)
        return self.k.shape[2] > 1 and any(_of_heads(view) for view in given)


def _of_heads(view: ArrayView | None) -> bool:
    return view is not None and view.shape[-1] > 1 and view.strides[-1] != 0


def virtual_pages(k: ArrayView, v: ArrayView, block_size: int) -> VirtualPages | None:
    """Give numbers to the blocks of all kv heads, the same for keys and values.

    A number counts the common divisor of the strides of pages, of blocks in a page and of heads.
    None if keys and values have other layouts, or numbers exceed 32 bits.
    """
    num_pages, page_size, kv_heads, _ = k.shape
    sizes = num_pages, page_size // block_size, kv_heads
    found = []
    for view in (k, v):
        page, row, head, _ = view.strides
        strides = [
            stride if size > 1 else 0
            for stride, size in zip((page, row * block_size, head), sizes, strict=True)
        ]
        unit = gcd(*strides) or 16
        found.append(tuple([stride // unit for stride in strides]))
    steps, other = found
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True) if size)
    if steps != other or last >= 2**31 - 1:
        return None
    return VirtualPages(steps, last + 1 if num_pages else 0)


def _virtual(view: ArrayView, block_size: int, count: int, with_heads: bool) -> ArrayView:
    """View a cache as virtual pages: (count, block_size, 1 or kv heads, columns)."""
    num_pages, page_size, kv_heads, columns = view.shape
    page, row, head, column = view.strides
    strides = [
        stride
        for stride, size in zip(
            (page, row * block_size, head),
            (num_pages, page_size // block_size, 1 if with_heads else kv_heads),
            strict=True,
        )
        if size > 1
    ]
    unit = gcd(*strides) or 16
    heads, head = (kv_heads, head) if with_heads else (1, unit)
    return view._replace(
        shape=(count, block_size, heads, columns), strides=(unit, row, head, column)
    )


def block_sparse_launches(
    key: BlockKey, buffer: int, arguments: BlockArguments, out: ArrayView, lse: ArrayView
) -> Sequence[Launch]:
    """Describe how to build the lists, and to attend to them; out and lse have the axes of q."""
    if arguments.factors is not None and key.topk:
        of_rows = replace(key, rows_have_factors=True)
        return [_direct_launch(of_rows, buffer, arguments, out, lse)]
    if key.tile:
        return _tile_launches(key, key.tile, buffer, arguments, out, lse)
    if key.is_direct or key.gathered_columns:
        return [_direct_launch(key, buffer, arguments, out, lse)]
    views = (arguments.q, 1), (out, 1), (lse, 0)
    if not arguments.has_heads and _rows_are_even(key.q_len, *views):
        return _launches(key, buffer, arguments, out, lse)
    found: list[Launch] = []
    group = key.heads_per_group
    for head in range(key.q_len):
        outs = [
            _part(view, len(view.shape) - last, head * group, group)
            for view, last in ((out, 2), (lse, 1))
        ]
        found += _launches(key.one_head, buffer, _of_head(arguments, head), *outs)
    return found


def _direct_launch(
    key: BlockKey, buffer: int, a: BlockArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to short lists, which the kernel itself reads."""
    pages = virtual_pages(a.k, a.v, a.block_size)
    assert pages is not None
    attend = _attention_of(a, a.q, pages.number, a.block_table, with_heads=False)
    given = key, attend, _lists_values(key, buffer, a, pages), out, lse
    if key.gathered_columns:
        return block_attention_gathered_launch(*given)
    if key.few is not None:
        return block_attention_few_launch(*given)
    return block_attention_launch(*given, a.factors)


def _tile_launches(
    key: BlockKey, tile: TileKey, buffer: int, a: BlockArguments, out: ArrayView, lse: ArrayView
) -> list[Launch]:
    """Describe how to unite the lists of neighbours, and to attend to the blocks of all.

    Of e4m3 blocks: also how to widen them, and to attend to lists that share too little.
    """
    schedule = key.schedule_at(buffer)
    pages = virtual_pages(_part(a.k, 2, 0, 1), _part(a.v, 2, 0, 1), a.block_size)
    assert pages is not None
    columns = tile.most_blocks
    table = a.block_table._replace(
        ptr=tile.pages_at(schedule), shape=(tile.lists, columns), strides=(4 * columns, 4)
    )
    attend = _attention_of(a, a.q, pages.number, table, with_heads=True)
    if tile.widened:
        k, v = widened_pages(tile, schedule, a.k, a.v)
        attend = attend._replace(k=k, v=v)
    values = attention_values(tile, schedule, attend, out, by_head(lse))
    values["lists"] = {
        "seen": tile.seen_at(schedule),
        "units": tile.units_at(schedule),
        "units_apart": columns * tile.units,
    }
    if tile.widened:
        values["has_tiles"] = tile.counts_at(schedule)
    unite = block_tiles_launch(tile, schedule, _lists_values(key, buffer, a, pages))
    launches = [unite, launch_of(tile.choice.spec, tile.grid, values)]
    if tile.widened:
        own = virtual_pages(a.k, a.v, a.block_size)
        assert own is not None
        of_lists = _attention_of(a, a.q, own.number, a.block_table, with_heads=False)
        given = of_lists, _lists_values(key, buffer, a, own), out, lse
        widen = widen_blocks_launch(tile, schedule, a.k, a.v, a.block_table)
        launches = [widen, *launches, block_attention_rest_launch(key, schedule, *given)]
    return launches


def _attention_of(
    a: BlockArguments, q: ArrayView, number: int, pages: ArrayView, with_heads: bool
) -> MHAArguments:
    """Give the arguments of attention to virtual pages; `number` are there in all."""
    return MHAArguments(
        q=q,
        k=_virtual(a.k, a.block_size, number, with_heads),
        v=_virtual(a.v, a.block_size, number, with_heads),
        pages=pages,
        sinks=a.sinks,
        softmax_scale=a.softmax_scale,
        softcap=a.softcap,
        window=(-1, -1),
        causal=False,
        layout="NHD",
        k_scale=a.k_scale,
        v_scale=a.v_scale,
    )


def _launches(
    key: BlockKey, buffer: int, a: BlockArguments, out: ArrayView, lse: ArrayView
) -> list[Launch]:
    pages = virtual_pages(a.k, a.v, a.block_size)
    assert pages is not None
    lists = _lists_launch(key, buffer, a, pages)
    shape = (max(key.num_places, 1), max(key.topk, 1))
    table = a.block_table._replace(ptr=key.pages_at(buffer), shape=shape, strides=(4 * shape[1], 4))
    q, out, lse = rows_of(key.q_len, a.q, out, lse)
    attend = _attention_of(a, q, pages.number, table, with_heads=False)
    apart = replace(key, q_len=q.shape[1])
    request, row, head = lse.strides
    by_head = lse._replace(
        shape=(lse.shape[0], lse.shape[2], lse.shape[1]), strides=(request, head, row)
    )
    return [lists, attention_launch(apart, key.schedule_at(buffer), attend, out, by_head)]


def rows_of(
    kv_heads: int, q: ArrayView, out: ArrayView, lse: ArrayView
) -> tuple[ArrayView, ArrayView, ArrayView]:
    """Give q, out and lse the axes (n, rows, heads of a kv head, ...), where n x rows are in order.

    A row is a query token of a kv head. n are query tokens, or requests where tokens are not evenly
    spaced over requests.
    """
    views = (q, 1), (out, 1), (lse, 0)
    of = _of_tokens if all(_is_even(*view) for view in views) else _of_requests
    q, out, lse = (of(view, columns, kv_heads) for view, columns in views)
    return q, out, lse


def _rows_are_even(kv_heads: int, *views: tuple[ArrayView, int]) -> bool:
    """Tell whether :func:`rows_of` can give views, with their axes of columns, such axes."""
    if kv_heads == 1 or all(_is_even(*view) for view in views):
        return True
    return all(
        view.shape[1] == 1 or view.strides[1] == view.shape[2] * view.strides[2]
        for view, _ in views
    )


def _is_even(view: ArrayView, columns: int) -> bool:
    """Tell whether query tokens are evenly spaced over all requests."""
    if len(view.shape) == 2 + columns:
        return True
    return 1 in view.shape[:2] or view.strides[0] == view.shape[1] * view.strides[1]


def _of_tokens(view: ArrayView, columns: int, kv_heads: int) -> ArrayView:
    """Give (..., heads, ...) the axes (tokens, kv heads, heads of one, ...)."""
    if len(view.shape) == 3 + columns:
        (batch, tokens, *shape), (request, token, *strides) = view.shape, view.strides
        step = token if tokens > 1 else request
        view = view._replace(shape=(batch * tokens, *shape), strides=(step, *strides))
    tokens, heads, *rest = view.shape
    of_token, of_head, *of_rest = view.strides
    group = heads // kv_heads
    return view._replace(
        shape=(tokens, kv_heads, group, *rest),
        strides=(of_token, group * of_head, of_head, *of_rest),
    )


def _of_requests(view: ArrayView, columns: int, kv_heads: int) -> ArrayView:
    """Give (requests, tokens, heads, ...) the axes (requests, tokens x kv heads, heads, ...)."""
    batch, tokens, heads, *rest = view.shape
    of_request, of_token, of_head, *of_rest = view.strides
    group = heads // kv_heads
    row = group * of_head if kv_heads > 1 else of_token
    return view._replace(
        shape=(batch, tokens * kv_heads, group, *rest),
        strides=(of_request, row, of_head, *of_rest),
    )


def _part(view: ArrayView, axis: int, begin: int, size: int) -> ArrayView:
    """Take a range of an axis."""
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    return view._replace(ptr=view.ptr + begin * view.strides[axis], shape=shape)


def _of_head(a: BlockArguments, head: int) -> BlockArguments:
    """Take what a kv head has."""
    axis = len(a.q.shape) - 2
    group = a.q.shape[axis] // a.k.shape[2]

    def own(view: ArrayView | None, axis: int) -> ArrayView | None:
        return None if view is None else _part(view, axis, head % view.shape[axis], 1)

    def scale(of: Scale) -> Scale:
        return of._replace(view=own(of.view, 1)) if _of_heads(of.view) else of

    entries = own(a.entries, 1)
    assert entries is not None
    return a._replace(
        q=_part(a.q, axis, head * group, group),
        k=_part(a.k, 2, head, 1),
        v=_part(a.v, 2, head, 1),
        entries=entries,
        lengths=own(a.lengths, 1),
        sinks=None if a.sinks is None else _part(a.sinks, 0, head * group, group),
        k_scale=scale(a.k_scale),
        v_scale=scale(a.v_scale),
    )


def _lists_launch(key: BlockKey, buffer: int, a: BlockArguments, pages: VirtualPages) -> Launch:
    """Describe how to build the pages of virtual requests, and to deal these out."""
    places, parts, tickets = key.layout.schedule_at(key.schedule_at(buffer))
    values = {
        **_lists_values(key, buffer, a, pages),
        "pages_out": key.pages_at(buffer),
        "places": places,
        "parts_out": parts,
        "tickets": tickets,
        "cost": key.list_cost,
        "virtual_requests": key.num_places,
        "parts": key.parts,
        "num_tickets": key.num_tickets,
        "is_whole": key.is_whole,
        "piece_blocks": key.piece_blocks if key.batch_invariant else 0,
        "pieces": key.pieces,
    }
    return launch_of(lists_spec(key.topk), (key.num_places, 1, 1), values)


def _lists_values(
    key: BlockKey, buffer: int, a: BlockArguments, pages: VirtualPages
) -> dict[str, Any]:
    """Name the values of struct ListsParams, but for where pages are written."""
    num_pages, page_size = a.k.shape[:2]
    in_page = page_size // a.block_size
    table = a.block_table
    of_lengths = (0, 0, 0) if a.lengths is None else (a.lengths.ptr, *_over_heads(a.lengths))
    return {
        "rows": key.rows_at(buffer),
        "entries": a.entries.ptr,
        "entries_stride_token": a.entries.strides[0],
        "entries_stride_head": _over_heads(a.entries)[1],
        "entries_stride_entry": a.entries.strides[2],
        "lengths": of_lengths[0],
        "lengths_stride_token": of_lengths[1],
        "lengths_stride_head": of_lengths[2],
        "block_table": table.ptr,
        "block_table_stride": table.strides[0] // 4,
        "kv_heads": key.q_len,
        "topk": key.topk,
        "batch": table.shape[0],
        "max_pages": table.shape[1],
        "num_pages": num_pages,
        "page_size": page_size,
        "block_size": a.block_size,
        "blocks_per_page": in_page,
        "page_step": pages.steps[0],
        "block_step": pages.steps[1],
        "head_step": pages.steps[2],
        "entries_are_wide": a.entries.dtype == "int64",
        "by_kv_heads": divisor_of(key.q_len),
        "by_block_size": divisor_of(a.block_size),
        "by_blocks_per_page": divisor_of(in_page),
        "by_entry": divisor_of(a.block_size if a.entries_are_tokens else 1),
    }


def _over_heads(view: ArrayView) -> tuple[int, int]:
    """Give the strides of tokens and of kv heads; lists that all kv heads share have none."""
    return view.strides[0], view.strides[1] if view.shape[1] > 1 else 0
