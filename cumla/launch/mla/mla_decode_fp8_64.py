# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_64.cu: MLA attention of many heads to e4m3 caches."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode import width_tile
from cumla.launch.mla.shape import VALUE_DIM, MLADecodeKey
from cumla.launch.source import KernelSpec
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey

_FILE = "mla/mla_decode_fp8_64"
SMEM_BYTES = constant(_FILE, "Heads64Layout<false, true>::kBytes")
"""Shared memory of a thread block, with scales of each token."""
ONE_FACTOR_SMEM_BYTES = constant(_FILE, "Heads64Layout<false, false>::kBytes")
"""The same under one factor."""


def fp8_params(query: bool) -> str:
    """Name the struct of parameters of a kernel, whose queries may be e4m3."""
    return "MlaQueryFp8Params" if query else "MlaDecodeFp8Params"


def masked_tile(tile: str, sinks: bool, query: bool) -> str:
    """Name the type of row tiles that may have sinks, or e4m3 queries."""
    tile = f"WithSinks<{tile}>" if sinks else tile
    return f"WithFp8Query<{tile}>" if query else tile


def _spec(
    ragged: bool, grouped: bool, fp8_rope: bool, sinks: bool, query: bool = False
) -> KernelSpec:
    named = {"sinks": sinks, "grouped": grouped, "fp8_rope": fp8_rope, "query": query}
    tags = [tag for tag, is_on in named.items() if is_on]
    name, tile = ("mla_attention_fp8_64", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_64", fp8_params(query)),
        *(grouped, fp8_rope, masked_tile(tile, sinks, query)),
        name=name,
        tags=tags,
        threads=384,
        smem_bytes=SMEM_BYTES if grouped else ONE_FACTOR_SMEM_BYTES,
    )


def _width_spec(ragged: bool) -> KernelSpec:
    """Describe a kernel for rows of latent columns alone, under one factor."""
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_64", "MlaDecodeFp8Params", False, False),
        width_tile(VALUE_DIM, "RaggedTile" if ragged else "Tile"),
        name=f"mla_{'attention' if ragged else 'decode'}_fp8_64_{VALUE_DIM}",
        threads=384,
        smem_bytes=ONE_FACTOR_SMEM_BYTES,
    )


_SPECS = {flags: _spec(*flags) for flags in product((False, True), repeat=4)}
_WIDTH_SPECS = {ragged: _width_spec(ragged) for ragged in (False, True)}
_QUERY_SPECS = {ragged: _spec(ragged, False, True, False, True) for ragged in (False, True)}
SPECS = (*_SPECS.values(), *_WIDTH_SPECS.values(), *_QUERY_SPECS.values())


def fp8_64_spec(
    key: LatentKey, grouped: bool, fp8_rope: bool, sinks: bool = False, query: bool = False
) -> KernelSpec:
    """Look up the kernel for a cache with scales of each token, or with RoPE columns in e4m3.

    `query`: the queries are e4m3, and all columns of the cache, under one factor.
    """
    ragged = not isinstance(key, MLADecodeKey)
    if query:
        return _QUERY_SPECS[ragged]
    return _SPECS[ragged, grouped, fp8_rope, sinks] if key.width == WIDTH else _WIDTH_SPECS[ragged]
