# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode.cu: split-KV MLA attention."""

from __future__ import annotations

from itertools import product
from math import e, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.mla.mla_decode_halves import halves_spec
from cumla.launch.mla.mla_decode_wide import wide_spec
from cumla.launch.mla.mla_decode_wide_few import wide_few_spec
from cumla.launch.mla.shape import TREE, VARIANTS, Window
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import MOST_TOKENS, PAGE_FORMS
from cumla.launch.tensor_map import TensorMap, paged_kv_map
from cumla.mla.shape import WIDE, WIDTH

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.shape import LatentKey


class DecodeArguments(NamedTuple):
    """Checked views of one call: latent and RoPE columns apart, those of the cache with heads."""

    # (batch, q_len, num_heads, 512); of ragged queries without the first axis. Of 16 bits, or of
    # float8_e4m3fn beside a cache that is it throughout.
    q: ArrayView
    q_rope: ArrayView  # the same with 64 columns
    # (num_pages, page_size, num_kv_heads, 512) and 64, of the query's dtype or of float8_e4m3fn;
    # beside e4m3 latent columns the RoPE ones may be of the query's dtype.
    kv_cache: ArrayView
    kv_rope: ArrayView
    block_table: ArrayView  # (batch, max_pages) int32; of ragged queries maybe a list, (pages,)
    # (num_pages, page_size, num_kv_heads, 4) float32: factors of 128 latent columns each.
    kv_scales: ArrayView | None
    kv_scale: ArrayView | float  # factor of all other e4m3 columns
    softmax_scale: float  # factor of the scores
    causal: bool  # bottom-right causal mask
    empty_lse: float = -inf  # log-sum-exp of a row that sees nothing: an infinity
    sinks: ArrayView | None = None  # (num_heads,) float32
    sink_in_lse: bool = True
    window: Window = None  # TREE beside a tree
    fp8_products: bool = False  # whether products of e4m3 columns may be computed in e4m3
    tree: ArrayView | None = None  # (query tokens, words), bits of each, contiguous
    q_scale: ArrayView | float = 1.0  # factor of e4m3 queries


SMEM_BYTES = constant("mla/mla_decode", "SharedLayout(0).pacer(2 * kWarpgroup)")
"""Shared memory of a thread block."""
FORM_TAGS = {"pages": "kPages", "boxes": "kBoxes", "rows": "kRows"}


_RAGGED = "ragged"  # the variant for queries of different lengths
_WINDOW = "window"  # for queries of any lengths that see windows, or with sinks
_TREE = "tree"  # for queries of any lengths that are trees of drafts
_TILES = {
    _RAGGED: ("mla_attention", ["RaggedTile"]),
    _WINDOW: ("mla_attention_window", ["WithSinks<WindowTile>"]),
    _TREE: ("mla_attention_tree", ["WithSinks<TreeTile>"]),
}
_PARAMS = {_WINDOW: "MlaWindowParams", _TREE: "MlaTreeParams"}


def _spec(dtype: str, variant: str, form: str, sinks: bool = False) -> KernelSpec:
    name, tile = _TILES.get(variant, ("mla_decode", []))
    if sinks:
        name, tile = "mla_decode_sinks", ["WithSinks<Tile>"]
    suffixes = [tag for tag in (variant, form) if tag not in (*_TILES, "one_tile", "pages")]
    return KernelSpec.of(
        *("mla", "mla_decode", _PARAMS.get(variant, "MlaDecodeParams")),
        *(dtype, variant != "one_tile", FORM_TAGS[form], *tile),
        name=name,
        tags=[dtype, *suffixes],
        threads=384,
        smem_bytes=SMEM_BYTES,
    )


_SPECS = {
    names: _spec(*names)
    for variants, sinks in (
        (VARIANTS[1:], (False, True)),
        ((_RAGGED, _WINDOW, _TREE), (False,)),
    )
    for names in product(HALVES, variants, PAGE_FORMS, sinks)
}

_WIDTH_FORMS = PAGE_FORMS[1:]  # of other widths: boxes may be whole blocks
_WIDTH_SMEM = {
    256: constant("mla/mla_decode", "SharedLayoutOf<4>(0).pacer(2 * kWarpgroup)"),
    512: SMEM_BYTES,
}
LATENT_COLUMNS = (*_WIDTH_SMEM, WIDE[0])
"""Latent columns of the kernels for other widths than 512 + 64."""


def width_tile(latent: int, base: str) -> str:
    """Name the type of row tiles of another width than 512 + 64."""
    rope = "false" if latent == WIDTH[0] else "true"
    return f"WithSinks<WidthTile<{base}, {latent // 64}, {rope}>>"


def _width_spec(dtype: str, latent: int, variant: str, form: str) -> KernelSpec:
    params = "MlaTreeParams" if variant == _TREE else "MlaWidthParams"
    tile = {_WINDOW: "WindowTile", _TREE: "TreeTile"}.get(variant, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode", params, dtype, variant != "one_tile", FORM_TAGS[form]),
        width_tile(latent, tile),
        name=f"mla_{'decode' if tile == 'Tile' else 'attention'}_{latent}",
        tags=[dtype, *([] if variant in (_WINDOW, "one_tile") else [variant]), form],
        threads=384,
        smem_bytes=_WIDTH_SMEM[latent],
    )


_WIDTH_VARIANTS = {
    256: (VARIANTS[2], _WINDOW, _TREE),
    512: (*VARIANTS[1:], _WINDOW, _TREE),
}
_WIDTH_SPECS = {
    names: _width_spec(*names)
    for latent, variants in _WIDTH_VARIANTS.items()
    for names in product(HALVES, (latent,), variants, _WIDTH_FORMS)
}
SPECS = (*_SPECS.values(), *_WIDTH_SPECS.values())


def variant_spec(dtype: str, variant: str, form: str, sinks: bool = False) -> KernelSpec:
    """Look up the kernel of a variant, one of the last two of VARIANTS, with sinks or without."""
    return _SPECS[dtype, variant, form, sinks]


def ragged_spec(dtype: str, form: str) -> KernelSpec:
    """Look up the kernel for queries of different lengths."""
    return _SPECS[dtype, _RAGGED, form, False]


def window_spec(key: LatentKey, form: str, window: Window = None) -> KernelSpec:
    """Look up the kernel for windows or trees, and for sinks where query lengths differ."""
    variant = _TREE if window == TREE else _WINDOW
    if key.width != WIDTH:
        return width_spec(key, form, variant)
    return _SPECS[key.dtype, variant, form, False]


def width_spec(key: LatentKey, form: str, variant: str) -> KernelSpec:
    """Look up the kernel for rows of another width."""
    if key.cluster_pieces:
        return wide_few_spec(key.dtype)
    if key.width == WIDE:
        return (halves_spec if key.cluster > 1 else wide_spec)(key.dtype, form)
    return _WIDTH_SPECS[key.dtype, key.width[0], variant, form]


def form_of(key: LatentKey, arguments: DecodeArguments | None = None) -> str:
    """Tell which of PAGE_FORMS serves a cache; by default one of all columns in one array.

    Whole pages need that, and rows of 512 + 64 columns.
    """
    apart = arguments is not None and _rope_is_apart(arguments.kv_cache, arguments.kv_rope)
    return "boxes" if key.form == "pages" and (apart or key.width != WIDTH) else key.form


def _rope_is_apart(latent: ArrayView, rope: ArrayView) -> bool:
    """Tell whether a row's RoPE columns are elsewhere than behind its latent ones."""
    return rope.ptr != latent.ptr + latent.shape[3] * 2 or rope.strides[:3] != latent.strides[:3]


NO_MAP = bytes(128)  # where nothing comes by one
_LOG2_E = log2(e)


def decode_launch(
    spec: KernelSpec,
    key: LatentKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
    **more: Any,
) -> Launch:
    """Describe how to attend to the blocks of every part; split requests go to the plan's buffer.

    `spec` is the kernel for the key and for the form of these arrays; the rest is as for
    :func:`cumla.launch.mla.choice.attend_launch`. A kernel may take `more` than others do.
    """
    maps = _maps(key, form_of(key, arguments), arguments.kv_cache, arguments.kv_rope)
    values = decode_values(key, buffer, arguments, out, lse, maps)
    if key.cluster_pieces:
        grid = key.cluster_pieces, key.place_count, key.num_kv_heads
        return launch_of(spec, grid, values | more, key.cluster_pieces)
    grid = key.row_tiles, key.parts, key.num_kv_heads
    return launch_of(spec, grid, values | more, key.cluster)


def window_launch(
    key: LatentKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe the same for windows, trees or sinks by a schedule of row tiles."""
    left, right = arguments.window or (-1, 0 if key.causal else -1)
    more = {"window_left": left, "window_right": right, "axis_q_len": key.axis_q_len}
    spec = window_spec(key, form_of(key, arguments), arguments.window)
    if arguments.tree is not None:
        more |= {"tree": arguments.tree.ptr, "tree_words": arguments.tree.shape[1]}
    elif key.width == WIDTH:
        return decode_launch(spec, key, buffer, arguments, out, lse, **more)
    return width_launch(spec, key, buffer, arguments, out, lse, **more)


def width_launch(
    spec: KernelSpec,
    key: LatentKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
    **more: Any,
) -> Launch:
    """Describe the same for rows of another width than 512 + 64, or trees over rows of any."""
    unused = dict.fromkeys(("window_left", "window_right", "axis_q_len"), 0)
    chunks = arguments.kv_rope.shape[3] // _CHUNK
    more = unused | more | {"rope_chunks": chunks}
    return decode_launch(spec, key, buffer, arguments, out, lse, **more)


_CHUNK = 8  # columns of 16 bytes
_QUERY = "base", "stride_batch", "stride_token", "stride_head"  # struct QueryColumns
CACHE = "base", "stride_page", "stride_row", "stride_head"  # struct CacheColumns
Maps = tuple["TensorMap | bytes", "TensorMap | bytes", "TensorMap | bytes"]


def decode_values(
    key: LatentKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
    maps: Maps = (NO_MAP, NO_MAP, NO_MAP),
) -> dict[str, Any]:
    """Name the values of struct MlaDecodeParams; parameters as for decode_launch.

    `maps` are of latent columns, of RoPE columns, and of rows that L2 fetches ahead.
    """
    table, sinks = arguments.block_table, arguments.sinks
    entries_apart = table.strides[0] // 4
    places, parts, tickets = key.layout.schedule_at(buffer)
    partial_out, partial_rows = key.layout.partials_at(buffer)
    return {
        "latent_map": maps[0],
        "rope_map": maps[1],
        "wide_map": maps[2],
        "latent": strided(arguments.kv_cache, *CACHE),
        "rope": strided(arguments.kv_rope, *CACHE),
        "q_latent": strided(arguments.q, *_QUERY),
        "q_rope": strided(arguments.q_rope, *_QUERY),
        **strided(out, "out", "out_stride_batch", "out_stride_token", "out_stride_head"),
        "lse": lse.ptr,
        "lse_stride_batch": lse.strides[0] // 4,
        "lse_stride_head": lse.strides[1] // 4,
        "lse_stride_token": lse.strides[2] // 4,
        "block_table": table.ptr,
        "block_table_stride": entries_apart,
        "places": places,
        "parts_in": parts,
        "tickets": tickets,
        "partial_out": partial_out,
        "partial_rows": partial_rows,
        "max_tokens": min(table.shape[1] * key.page_size, MOST_TOKENS),
        "page_entries": (table.shape[0] - 1) * entries_apart + table.shape[1],
        "batch": key.num_places,
        "parts": max(key.cut_parts, 1),  # of one, no request is split, whatever a plan holds
        "max_pages": table.shape[1],
        "num_pages": arguments.kv_cache.shape[0],
        "page_size": key.page_size,
        "box_rows": key.box_rows,
        "wide_rows": key.wide_rows,
        "rope_is_apart": _rope_is_apart(arguments.kv_cache, arguments.kv_rope),
        "q_len": key.q_len,
        "heads_per_group": key.heads_per_group,
        "row_groups": key.row_groups,
        "may_wait": key.may_wait,
        "causal": key.causal,
        "out_is_float": out.dtype == "float32",
        "scale_log2": arguments.softmax_scale * _LOG2_E,
        "by_heads_per_group": divisor_of(key.heads_per_group),
        "by_page_size": divisor_of(key.page_size),
        "by_num_heads": divisor_of(key.num_heads),
        "by_q_len": divisor_of(key.axis_q_len),
        "batch_invariant": key.batch_invariant,
        "empty_lse": arguments.empty_lse,
        "sink_in_lse": arguments.sink_in_lse,
        "sinks": 0 if sinks is None else sinks.ptr,
        "sinks_stride": 0 if sinks is None else sinks.strides[0] // 4,
    }


def _maps(key: LatentKey, form: str, latent: ArrayView, rope: ArrayView) -> Maps:
    """Describe the cache to the copy engine: whole pages by one map of all columns.

    The third map is of rows that L2 fetches ahead.
    """
    if form == "rows" or key.cluster_pieces:
        return NO_MAP, NO_MAP, NO_MAP
    apart = _rope_is_apart(latent, rope)
    columns = latent.shape[3] + (0 if apart else rope.shape[3])
    rows = latent._replace(shape=(*latent.shape[:3], columns))
    wide: TensorMap | bytes = NO_MAP
    if key.fetches_ahead:
        words = rows._replace(shape=(*rows.shape[:3], rows.shape[3] // 4))
        wide = _map(words, "uint64", key.wide_rows)
    if form == "pages":
        return _map(rows, key.dtype, key.box_rows), NO_MAP, wide
    of_rope: TensorMap | bytes = NO_MAP
    if rope.shape[3]:
        of_rope = of_share = _map(rope, key.dtype, key.box_rows)
        if key.cluster > 1:
            columns, *lengths = of_share.box
            box, swizzle = (columns // key.cluster, *lengths), of_share.swizzle // key.cluster
            of_rope = of_share._replace(box=box, swizzle=swizzle)
    return _map(latent, key.dtype, key.box_rows), of_rope, wide


def _map(cache: ArrayView, dtype: str, rows: int) -> TensorMap:
    """Describe columns of the cache to the copy engine, which brings boxes of so many rows."""
    return paged_kv_map(cache.ptr, dtype, cache.shape, cache.strides, rows)
