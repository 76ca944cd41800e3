# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8_converted.cu: MLA attention of many heads to e4m3 rows.

Thread blocks with other heads of the same query token may share the rows that they convert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.shape import ROW_TILE, MLADecodeKey
from cumla.launch.source import KernelSpec
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey

_FILE = "mla/mla_decode_fp8_converted"
_SHARING = 2


def _spec(sharing: int, variant: int = 0) -> KernelSpec:
    return KernelSpec.of(
        *("mla", "mla_decode_fp8_converted", "MlaDecodeFp8Params", f"ConvertedTile<Tile, {sharing}, {variant}>"),
        tags=(["shared"] if sharing > 1 else []) + ([f"v{variant}"] if variant else []),
        threads=512 if variant & 16 else 384,
        smem_bytes=constant(_FILE, "score_factor_in(SharedLayout(0), kRowTile) + 4"),
    )


_SPECS = {sharing: _spec(sharing) for sharing in (1, _SHARING)}
VARIANTS = {
    (s, v): _spec(s, v) for s, vs in {1: (0, 16, 17), 2: (0, 1, 5, 16, 17, 20)}.items() for v in vs
}
SPECS = tuple(VARIANTS.values())


def sharing_of(spec: KernelSpec) -> int:
    """Tell how many thread blocks, neighbours in x, form a cluster."""
    return next((s for (s, _), of in VARIANTS.items() if of == spec), 1)


def converted_spec(key: LatentKey) -> KernelSpec | None:
    """Look up the kernel for rows of 576 e4m3 columns under one factor; None: it has none."""
    is_dense = isinstance(key, MLADecodeKey) and key.width == WIDTH
    if not is_dense or key.batch_invariant or not key.has_whole_tiles:
        return None
    return _SPECS[1 if key.heads_per_group % (_SHARING * ROW_TILE) else _SHARING]
