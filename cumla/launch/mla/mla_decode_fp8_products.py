# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_products.cu: MLA attention with products in e4m3.

The kernel takes what mla_decode_fp8_64 takes.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode_fp8_64 import fp8_params, masked_tile
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey


def _spec(ragged: bool, fp8_rope: bool, sinks: bool, query: bool = False) -> KernelSpec:
    named = {"sinks": sinks, "fp8_rope": fp8_rope, "query": query}
    tags = [tag for tag, is_on in named.items() if is_on]
    name, tile = ("mla_attention_fp8_products", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_products", fp8_params(query)),
        *(fp8_rope, masked_tile(tile, sinks, query)),
        name=name,
        tags=tags,
        threads=384,
        smem_bytes=constant("mla/mla_decode_fp8_products", "Heads64Layout<true, false>::kBytes"),
    )


_SPECS = {flags: _spec(*flags) for flags in product((False, True), repeat=3)}
_QUERY_SPECS = {ragged: _spec(ragged, True, False, True) for ragged in (False, True)}
SPECS = (*_SPECS.values(), *_QUERY_SPECS.values())


def fp8_products_spec(
    key: LatentKey, fp8_rope: bool, sinks: bool = False, query: bool = False
) -> KernelSpec:
    """Look up the kernel for a cache under one factor, whose RoPE columns may be e4m3, too.

    `query`: so are the queries, and all columns of the cache.
    """
    ragged = not isinstance(key, MLADecodeKey)
    return _QUERY_SPECS[ragged] if query else _SPECS[ragged, fp8_rope, sinks]
