# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/attention.cu: attention to keys and values in pages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from math import e, gcd, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.mha.append_kv_cache import Scale
from cumla.launch.mha.attention_decode import CHUNK_TOKENS, decode_spec, tile_bytes
from cumla.launch.mha.attention_prefill import FULL_ROWS, block_tokens, prefill_spec, tile_rows
from cumla.launch.source import HALVES, KernelSpec, in_cuda
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    MOST_TOKENS,
    ROW_GROUP,
    ROW_TILE,
    RaggedKey,
    filling_parts,
    page_form,
)
from cumla.launch.tensor_map import TensorMap, paged_kv_map

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "mha/attention"
_COLUMNS = 64  # of a tile
MOST_E4M3_COLUMNS = 256
_TILES = ((1, 1), (2, 2), (3, 2), (4, 4), (8, 8))  # of keys and of values
_FORMS = {"boxes": "false", "rows": "true", "e4m3": "true, true"}  # how tiles are loaded
PIECE_BLOCKS = 16
"""Where batch-invariant requests are cut: at multiples of so many KV blocks."""
_E4M3 = "float8_e4m3fn"
_MOST_DRAFTS = 4  # query tokens of a decoding request, on average
_MOST_TILES = 1 << 30  # that a counter of 32 bits numbers
_LOG2_E = log2(e)


def _spec(dtype: str, tiles: tuple[int, int], form: str) -> KernelSpec:
    names = (str(64 * tiles[0]), str(64 * tiles[1]))
    layout = f"SharedLayout<{tiles[0]}, {tiles[1]}, {in_cuda(form == 'e4m3')}>"
    return KernelSpec.of(
        *("mha", "attention", "AttentionParams", dtype, *tiles, _FORMS[form]),
        tags=[dtype, *names, *([form] if form != "boxes" else [])],
        threads=constant(_FILE, f"(2 + {layout}::kLoaders) * kWarpgroup"),
        smem_bytes=constant(_FILE, f"{layout}::kBytes"),
    )


_SPECS = {
    names: _spec(*names)
    for names in product(HALVES, _TILES, _FORMS)
    if names[2] != "e4m3" or max(names[1]) * _COLUMNS <= MOST_E4M3_COLUMNS
}
SPECS = tuple(_SPECS.values())


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


@dataclass(frozen=True)
class MHAKey(RaggedKey):
    """The shape for which a plan of :func:`cumla.attention` is made."""

    batch: int
    total_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: rows without pages
    dtype: str
    cache_dtype: str  # of keys and values: dtype, or float8_e4m3fn
    causal: bool
    q_len: int  # of each request, where q has an axis of requests; else 0
    device: int | None
    sm_count: int
    window_left: int = -1  # visible keys before a query's own; -1: all
    batch_invariant: bool = False
    max_pieces: int = 1  # of a batch-invariant request
    more_pieces: int = 0  # of all batch-invariant requests, beyond one for each row tile

    @property
    def has_window(self) -> bool:
        """Whether a query sees only some of the keys before its own."""
        return self.window_left >= 0

    @property
    def schedule_window(self) -> int:
        """Visible keys before a query's own; whole row tiles are scheduled without a window."""
        return -1 if self.takes_whole_tiles or self.batch_invariant else self.window_left

    @property
    def is_uncut(self) -> bool:
        """Whether no row tile is dealt out to several parts."""
        return self.takes_single_rows or self.takes_whole_tiles

    @property
    def takes_single_rows(self) -> bool:
        """Whether a warp attends for each row, without tensor cores."""
        return self.dtype == "float32"

    @property
    def is_of_chunks(self) -> bool:
        """Whether it has the chunks of a mixed batch, which may have none."""
        return False

    @property
    def without_cuts(self) -> UncutKey:
        """The key of a schedule that lists the row tiles in the same places, in one part."""
        return UncutKey(**self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def schedule_page_size(self) -> int:
        """Tokens for each entry that kv_indptr counts: of rows without pages one."""
        return self.page_size or 1

    @cached_property
    def form(self) -> str:
        """Which of PAGE_FORMS serves these pages, of 16-bit numbers."""
        return page_form(self.page_size) if self.page_size else "pages"

    @cached_property
    def whole_tiles_spec(self) -> KernelSpec | None:
        """The kernel of whole row tiles that serves these pages."""
        if self.cache_dtype != self.dtype:
            return None
        return prefill_spec(self.dtype, self.kernel_tiles, self.form == "rows")

    @cached_property
    def _has_whole_tiles(self) -> bool:
        """Whether row tiles can fill the multiprocessors without being cut."""
        rows = self.total_tokens * self.heads_per_group
        return (
            rows * self.num_kv_heads >= FULL_ROWS * self.sm_count
            and (rows // ROW_TILE + self.batch) * self.num_kv_heads <= _MOST_TILES
            and self.whole_tiles_spec is not None
            and not self.batch_invariant
        )

    @property
    def _is_uniform(self) -> bool:
        return self.q_len > 0 or self.batch == 1

    @property
    def _has_full_rows(self) -> bool:
        return self.total_tokens * self.heads_per_group >= FULL_ROWS * self.batch

    @cached_property
    def takes_whole_tiles(self) -> bool:
        """Whether all row tiles are full, or nearly so."""
        return self._is_uniform and self._has_whole_tiles and self._has_full_rows

    @cached_property
    def beside(self) -> MHAKey | None:
        """The key of the whole tiles of a batch that may have chunks (docs/kernels/mha.md)."""
        has_chunks = self.total_tokens > _MOST_DRAFTS * self.batch and not self.has_window
        if self._is_uniform or self.few_rows or not self._has_whole_tiles:
            return None
        if not (has_chunks or self._has_full_rows):
            return None
        return WholeTilesKey(**self._fields)

    @property
    def shares(self) -> int:
        """Few rows beside many may take three quarters of a thread block's share, or are cut."""
        return 2**31 - 1 if self.has_window else 4 * self.sm_count // (3 * self.num_kv_heads) + 1

    @cached_property
    def few_rows(self) -> tuple[int, KernelSpec] | None:
        """Rows and kernel of small row tiles, where they are faster (docs/kernels/mha.md)."""
        is_e4m3 = self.cache_dtype == _E4M3
        more = 0 if self.q_len else (self.total_tokens - self.batch) * self.heads_per_group
        gains = not self.has_window and self._comes_in_pieces and more <= ROW_TILE
        if self.batch_invariant or self.takes_single_rows or not (is_e4m3 or gains):
            return None
        tokens = self.q_len or -(-self.total_tokens // max(self.batch, 1))
        return decode_spec(self.dtype, self.kernel_tiles, tokens * self.heads_per_group, is_e4m3)

    @property
    def _comes_in_pieces(self) -> bool:
        """Whether a load brings little: pages are short, or rows are, and thread blocks wait."""
        waits = self.batch * self.num_kv_heads >= self.sm_count // 2
        return self.form != "pages" or (self.kernel_tiles == (1, 1) and waits)

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head that all requests may have together, however long each is."""
        if self.beside:  # has those of many rows
            return self.batch
        rows = self.few_rows[0] if self.few_rows else ROW_TILE
        return self.total_tokens * self.heads_per_group // rows + self.batch

    @cached_property
    def box_rows(self) -> int:
        """Rows of a KV block that one load brings."""
        if self.takes_whole_tiles:
            return gcd(self.page_size, block_tokens(self.kernel_tiles))
        return gcd(self.page_size, CHUNK_TOKENS if self.few_rows else BLOCK_TOKENS)

    @property
    def row_tiles(self) -> int:
        """Thread blocks that share the row tile at each place of the schedule."""
        return 1

    @property
    def value_dim(self) -> int:
        """Columns of a partial result: those of the kernel's tiles."""
        return _COLUMNS * self.kernel_tiles[1]

    @property
    def fetches_ahead(self) -> bool:
        """Whether the kernel has L2 fetch blocks before it loads them."""
        return False

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile that a request may fill.

        All of them with `batch_invariant`: joining adds in an order that depends on their number,
        and that must not depend on other requests.
        """
        if self.batch_invariant:
            return ROW_TILE // ROW_GROUP
        if self.few_rows:
            return 1
        rows = (self.q_len or self.total_tokens) * self.heads_per_group
        return -(-min(max(rows, 1), ROW_TILE) // ROW_GROUP)

    @cached_property
    def row_tile(self) -> int:
        """Query rows at a place of the schedule: those of a thread block."""
        if self.few_rows:
            return self.few_rows[0]
        return tile_rows(self.kernel_tiles, self.form) if self.takes_whole_tiles else ROW_TILE

    @property
    def piece_cost(self) -> int:
        """KV blocks that a piece costs: about a microsecond, in which two blocks are read."""
        return 2 + self.row_groups

    @property
    def min_blocks(self) -> int:
        """KV blocks between a cut and the ends of its row tile, at least."""
        return 2

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks are dealt."""
        if self.is_uncut:
            return 1
        if self.batch_invariant:
            return self.num_places + self.more_pieces
        return filling_parts(self.tiles, self.sm_count)

    @cached_property
    def num_tickets(self) -> int:
        """Places where thread blocks meet; of whole tiles the counter from which they are taken."""
        return 1 if self.takes_whole_tiles else super().num_tickets

    @cached_property
    def kernel_tiles(self) -> tuple[int, int]:
        """Tiles of 64 columns, of keys and of values, in the kernel that serves these widths."""
        keys, values = -(-self.head_dim // _COLUMNS), -(-self.head_dim_v // _COLUMNS)
        fitting = (tiles for tiles in _TILES if tiles[0] >= keys and tiles[1] >= values)
        return next(fitting, (keys, values))


@dataclass(frozen=True)
class UncutKey(MHAKey):
    """A shape whose schedule has one part."""

    @property
    def is_uncut(self) -> bool:
        """Whether each row tile is computed by one thread block."""
        return True


@dataclass(frozen=True)
class WholeTilesKey(MHAKey):
    """The key of whole tiles of a mixed batch."""

    takes_whole_tiles = is_of_chunks = True
    beside = few_rows = None


def attention_spec(key: MHAKey) -> KernelSpec:
    """Look up the kernel of a shape."""
    if key.takes_whole_tiles and key.whole_tiles_spec:
        return key.whole_tiles_spec
    if key.few_rows:
        return key.few_rows[1]
    form = "e4m3" if key.cache_dtype == _E4M3 else "rows" if key.form == "rows" else "boxes"
    return _SPECS[key.dtype, key.kernel_tiles, form]


def attention_launch(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the blocks of every part.

    `buffer` is the address of the plan's buffer, which holds a schedule; out has the axes of q, lse
    is (tokens, num_heads) or (batch, num_heads, q_len).
    """
    values = attention_values(key, buffer, arguments, out, lse)
    # Neighbours are kv heads that read the same pages where parts mostly have whole requests, and
    # elsewhere parts that join pieces. With windows the former took 1 % more.
    if key.takes_whole_tiles:
        grid = (key.sm_count, 1, 1)
    elif key.few_rows or (key.batch > key.parts and not key.has_window):
        grid = (key.num_kv_heads, key.parts, 1)
    else:
        grid = (1, key.parts, key.num_kv_heads)
    return launch_of(attention_spec(key), grid, values)


def attention_values(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> dict[str, Any]:
    """Name the values of struct AttentionParams."""
    a = arguments
    if 0 in a.k.shape:  # of which nothing is read, but copies of zeros need an address that exists
        a = a._replace(k=a.k._replace(ptr=a.q.ptr), v=a.v._replace(ptr=a.q.ptr))
    pages = a.pages
    if pages is not None and len(pages.shape) == 1:  # a table whose rows are a page apart
        pages = pages._replace(shape=(1, *pages.shape), strides=(4, 4))
    if len(lse.shape) == 3:
        lse_batch, lse_head, lse_token = lse.strides
    else:
        lse_batch, lse_head, lse_token = 0, lse.strides[1], lse.strides[0]
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
        "parts": key.parts,
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
        "window_left": a.window[0],
        "window_right": a.window[1],
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
    is_e4m3 = key.cache_dtype == _E4M3
    loads = key.box_rows == CHUNK_TOKENS if key.few_rows else key.form != "rows" and not is_e4m3
    if key.takes_single_rows or not loads:
        return bytes(128)
    shape = tuple([max(size, 1) for size in view.shape])  # without rows nothing is loaded
    tensor_map = paged_kv_map(view.ptr, key.cache_dtype, shape, view.strides, key.box_rows)
    width = tile_bytes(_COLUMNS * key.kernel_tiles[name == "v"])
    if is_e4m3 and width < tensor_map.swizzle:
        tensor_map = tensor_map._replace(box=(width, *tensor_map.box[1:]), swizzle=width)
    return tensor_map._replace(name=name)
