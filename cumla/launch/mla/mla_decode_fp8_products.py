# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_products.cu: MLA attention with products in e4m3.

The kernel takes what mla_decode_fp8_64 takes.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey


def _spec(ragged: bool, fp8_rope: bool, sinks: bool) -> KernelSpec:
    tags = [tag for tag, is_on in {"sinks": sinks, "fp8_rope": fp8_rope}.items() if is_on]
    name, tile = ("mla_attention_fp8_products", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_products", "MlaDecodeFp8Params"),
        *(fp8_rope, f"WithSinks<{tile}>" if sinks else tile),
        name=name,
        tags=tags,
        threads=384,
        smem_bytes=constant("mla/mla_decode_fp8_products", "Heads64Layout<true, false>::kBytes"),
    )


_SPECS = {flags: _spec(*flags) for flags in product((False, True), repeat=3)}
ONE_TEXT = tuple(
    KernelSpec.of(
        *("mla", "mla_decode_fp8_products", "MlaDecodeFp8Params", True, "Tile", text),
        name=f"mla_decode_fp8_products_text{text}",
        threads=384,
        smem_bytes=constant("mla/mla_decode_fp8_products", "Heads64Layout<true, false>::kBytes"),
    )
    for text in (1, 2)
)
SPECS = (*_SPECS.values(), *ONE_TEXT)


def fp8_products_spec(key: LatentKey, fp8_rope: bool, sinks: bool = False) -> KernelSpec:
    """Look up the kernel for a cache under one factor, whose RoPE columns may be e4m3, too."""
    return _SPECS[not isinstance(key, MLADecodeKey), fp8_rope, sinks]
