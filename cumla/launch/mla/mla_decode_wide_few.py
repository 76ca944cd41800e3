# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_wide_few.cu: rows of 1024 latent columns, tiles of 16 query rows.

A cluster shares the keys of a tile. The kernel takes what mla_decode takes of rows of other widths:
:func:`cumla.launch.mla.mla_decode.width_launch` describes the launches of both.
"""

from __future__ import annotations

from cumla.launch.layouts import constant
from cumla.launch.source import HALVES, KernelSpec

_SPECS = {
    dtype: KernelSpec.of(
        *("mla", "mla_decode_wide_few", "MlaWidthParams", dtype),
        tags=[dtype],
        threads=384,
        smem_bytes=constant("mla/mla_decode_wide_few", "WideFewLayout{0}.sent() + 8"),
    )
    for dtype in HALVES
}
SPECS = tuple(_SPECS.values())


def wide_few_spec(dtype: str) -> KernelSpec:
    """Look up the kernel of a dtype, for pages of any size, with windows and sinks or without."""
    return _SPECS[dtype]
