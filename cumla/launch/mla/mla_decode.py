# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode.cu: split-KV MLA attention."""

from __future__ import annotations

import struct
from itertools import product
from math import e, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.kernel import Launch
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM, VARIANTS
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import MOST_TOKENS, PAGE_FORMS
from cumla.launch.tensor_map import TensorMap, paged_kv_map

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.shape import LatentKey


class DecodeArguments(NamedTuple):
    """Checked views of one call: latent and RoPE columns apart, those of the cache with heads."""

    q: ArrayView  # (batch, q_len, num_heads, 512); of ragged queries without the first axis
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
    sinks: ArrayView | None = None  # (num_heads,) float32; of lists alone
    sink_in_lse: bool = True
    fp8_products: bool = False  # whether products of e4m3 columns may be computed in e4m3


FORM_TAGS = {"pages": "kPages", "boxes": "kBoxes", "rows": "kRows"}


_RAGGED = "ragged"  # the variant for queries of different lengths


def _spec(dtype: str, variant: str, form: str) -> KernelSpec:
    name, tile = ("mla_attention", ["RaggedTile"]) if variant == _RAGGED else ("mla_decode", [])
    suffixes = [tag for tag in (variant, form) if tag not in (_RAGGED, "one_tile", "pages")]
    return KernelSpec.of(
        *("mla", "mla_decode", "MlaDecodeParams"),
        *(dtype, variant != "one_tile", FORM_TAGS[form], *tile),
        name=name,
        tags=[dtype, *suffixes],
        threads=384,
        smem_bytes=232160,
    )


_SPECS = {
    names: _spec(*names)
    for variants in (VARIANTS[1:], (_RAGGED,))
    for names in product(HALVES, variants, PAGE_FORMS)
}
SPECS = tuple(_SPECS.values())


def variant_spec(dtype: str, variant: str, form: str) -> KernelSpec:
    """Look up the kernel of a variant, one of the last two of VARIANTS."""
    return _SPECS[dtype, variant, form]


def ragged_spec(dtype: str, form: str) -> KernelSpec:
    """Look up the kernel for queries of different lengths."""
    return _SPECS[dtype, _RAGGED, form]


def form_of(key: LatentKey, arguments: DecodeArguments) -> str:
    """Tell which of PAGE_FORMS serves a cache: whole pages need all columns in one array."""
    apart = _rope_is_apart(arguments.kv_cache, arguments.kv_rope)
    return "boxes" if key.form == "pages" and apart else key.form


def _rope_is_apart(latent: ArrayView, rope: ArrayView) -> bool:
    """Tell whether a row's RoPE columns are elsewhere than behind its latent ones."""
    return rope.ptr != latent.ptr + VALUE_DIM * 2 or rope.strides[:3] != latent.strides[:3]


PARAMS_FORMAT = "<128s128s128s33q14if8Iifi2q"
_PARAMS = struct.Struct(PARAMS_FORMAT)
NO_MAP = bytes(128)  # where nothing comes by one
_LOG2_E = log2(e)


def decode_launch(
    spec: KernelSpec,
    key: LatentKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the blocks of every part; split requests go to the plan's buffer.

    `spec` is the kernel for the key and for the form of these arrays; the rest is as for
    :func:`cumla.launch.mla.choice.attend_launch`.
    """
    maps = _maps(key, form_of(key, arguments), arguments.kv_cache, arguments.kv_rope)
    values = (*maps, *decode_values(key, buffer, arguments, out, lse))
    grid = key.row_tiles, key.parts, key.num_kv_heads
    return Launch(spec, grid, _PARAMS, values)


def decode_values(
    key: LatentKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> tuple[Any, ...]:
    """List what the kernel is told behind the tensor maps; parameters as for decode_launch.

    The order is that of ``MlaDecodeParams``, with which ``MlaDecodeFp8Params`` begins, too.
    """
    block_table, sinks = arguments.block_table, arguments.sinks
    columns = (arguments.kv_cache, arguments.kv_rope, arguments.q, arguments.q_rope)
    return (
        *(value for view in columns for value in (view.ptr, *view.strides[:3])),
        out.ptr,
        *out.strides[:3],
        lse.ptr,
        *(stride // 4 for stride in lse.strides),
        block_table.ptr,
        block_table.strides[0] // 4,
        *key.layout.schedule_at(buffer),
        *key.layout.partials_at(buffer),
        min(block_table.shape[1] * key.page_size, MOST_TOKENS),
        (block_table.shape[0] - 1) * (block_table.strides[0] // 4) + block_table.shape[1],
        key.num_places,
        key.parts,
        block_table.shape[1],
        arguments.kv_cache.shape[0],
        key.page_size,
        key.box_rows,
        key.wide_rows,
        _rope_is_apart(arguments.kv_cache, arguments.kv_rope),
        key.q_len,
        key.heads_per_group,
        key.row_groups,
        key.may_wait,
        key.causal,
        out.dtype == "float32",
        arguments.softmax_scale * _LOG2_E,
        *divisor_of(key.heads_per_group),
        *divisor_of(key.page_size),
        *divisor_of(key.num_heads),
        *divisor_of(key.q_len),
        key.batch_invariant,
        arguments.empty_lse,
        arguments.sink_in_lse,
        *((0, 0) if sinks is None else (sinks.ptr, sinks.strides[0] // 4)),
    )


def _maps(
    key: LatentKey, form: str, latent: ArrayView, rope: ArrayView
) -> tuple[TensorMap | bytes, ...]:
    """Describe the cache to the copy engine: whole pages by one map of all columns.

    The third map is of rows that L2 fetches ahead.
    """
    if form == "rows":
        return NO_MAP, NO_MAP, NO_MAP
    apart = _rope_is_apart(latent, rope)
    rows = latent if apart else latent._replace(shape=(*latent.shape[:3], HEAD_DIM))
    wide: TensorMap | bytes = NO_MAP
    if key.fetches_ahead:
        words = rows._replace(shape=(*rows.shape[:3], rows.shape[3] // 4))
        wide = _map(words, "uint64", key.wide_rows)
    if form == "pages":
        return _map(rows, key.dtype, key.box_rows), NO_MAP, wide
    return _map(latent, key.dtype, key.box_rows), _map(rope, key.dtype, key.box_rows), wide


def _map(cache: ArrayView, dtype: str, rows: int) -> TensorMap:
    """Describe columns of the cache to the copy engine, which brings boxes of so many rows."""
    return paged_kv_map(cache.ptr, dtype, cache.shape, cache.strides, rows)
