# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_64.cu: MLA attention of many heads to e4m3 caches."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey

SMEM_BYTES = constant("mla/mla_decode_fp8_64", "Heads64Layout<false>::kBytes")
"""Shared memory of a thread block."""


def _spec(ragged: bool, grouped: bool, fp8_rope: bool) -> KernelSpec:
    tags = (*(["grouped"] if grouped else []), *(["fp8_rope"] if fp8_rope else []))
    name, tile = ("mla_attention_fp8_64", "RaggedTile") if ragged else (None, "Tile")
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_64", "MlaDecodeFp8Params"),
        *(grouped, fp8_rope, tile),
        name=name,
        tags=tags,
        threads=384,
        smem_bytes=SMEM_BYTES,
    )


_SPECS = {flags: _spec(*flags) for flags in product((False, True), repeat=3)}
SPECS = tuple(_SPECS.values())


def fp8_64_spec(key: LatentKey, grouped: bool, fp8_rope: bool) -> KernelSpec:
    """Look up the kernel for a cache with scales of each token, or with RoPE columns in e4m3."""
    return _SPECS[not isinstance(key, MLADecodeKey), grouped, fp8_rope]
