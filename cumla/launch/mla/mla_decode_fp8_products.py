# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_products.cu: MLA attention with products in e4m3.

The kernel takes what mla_decode_fp8_64 takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey


def _spec(ragged: bool, fp8_rope: bool) -> KernelSpec:
    name, tile = ("mla_attention_fp8_products", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_products", "MlaDecodeFp8Params"),
        *(fp8_rope, tile),
        name=name,
        tags=["fp8_rope"] if fp8_rope else [],
        threads=384,
        smem_bytes=constant("mla/mla_decode_fp8_products", "Heads64Layout<true>::kBytes"),
    )


_SPECS = {(ragged, rope): _spec(ragged, rope) for ragged in (False, True) for rope in (False, True)}
SPECS = tuple(_SPECS.values())


def fp8_products_spec(key: LatentKey, fp8_rope: bool) -> KernelSpec:
    """Look up the kernel for a cache under one factor, whose RoPE columns may be e4m3, too."""
    return _SPECS[not isinstance(key, MLADecodeKey), fp8_rope]
