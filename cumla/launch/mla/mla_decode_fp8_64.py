# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_64.cu: MLA attention of many heads to e4m3 caches."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey

SMEM_BYTES = 230968
"""Shared memory of a thread block (kBytes of Heads64Layout<false>)."""

_E4M3_SMEM_BYTES = 229272  # the same of Heads64Layout<true>


def _spec(ragged: bool, grouped: bool, fp8_rope: bool, fp8_products: bool) -> KernelSpec:
    flags = {"grouped": grouped, "fp8_rope": fp8_rope, "fp8_products": fp8_products}
    name, tile = ("mla_attention_fp8_64", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_64", "MlaDecodeFp8Params"),
        *(*flags.values(), tile),
        name=name,
        tags=[tag for tag, flag in flags.items() if flag],
        threads=384,
        smem_bytes=_E4M3_SMEM_BYTES if fp8_products else SMEM_BYTES,
    )


_SPECS = {
    (ragged, *kind): _spec(ragged, *kind)
    for ragged in (False, True)
    for kind in product((False, True), repeat=3)
    if kind[::2] != (True, True)
}
SPECS = tuple(_SPECS.values())


def fp8_64_spec(
    key: LatentKey, grouped: bool, fp8_rope: bool, fp8_products: bool = False
) -> KernelSpec:
    """Look up the kernel for a cache with scales of each token, or with RoPE columns in e4m3.

    With `fp8_products` the one that multiplies in e4m3, which caches with such scales do not have.
    """
    kind = (grouped, fp8_rope, fp8_products and not grouped)
    return _SPECS[not isinstance(key, MLADecodeKey), *kind]
