# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention.cu: tiles of 64 query rows, blocks of 64 keys."""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.source import HALVES, KernelSpec, in_cuda

_FILE = "mha/attention"
COLUMNS = 64  # of a tile
MOST_E4M3_COLUMNS = 256
TILES = ((1, 1), (2, 2), (3, 2), (4, 4), (8, 8))  # of keys and of values
_FORMS = {"boxes": "false", "rows": "true", "e4m3": "true, true"}  # how tiles are loaded
_MASKED = (False, True)  # whether arrays say which keys a query sees
E4M3 = "float8_e4m3fn"


def _spec(dtype: str, tiles: tuple[int, int], form: str, masked: bool) -> KernelSpec:
    names = (str(64 * tiles[0]), str(64 * tiles[1]))
    layout = f"SharedLayout<{tiles[0]}, {tiles[1]}, {in_cuda(form == 'e4m3')}>"
    return KernelSpec.of(
        *("mha", "attention", "MaskedParams" if masked else "AttentionParams"),
        *(dtype, *tiles, _FORMS[form]),
        name="attention_masked" if masked else None,
        tags=[dtype, *names, *([form] if form != "boxes" else [])],
        threads=constant(_FILE, f"(2 + {layout}::kLoaders) * kWarpgroup"),
        smem_bytes=constant(_FILE, f"{layout}::kBytes"),
    )


_SPECS = {
    names: _spec(*names)
    for names in product(HALVES, TILES, _FORMS, _MASKED)
    if names[2] != "e4m3" or max(names[1]) * COLUMNS <= MOST_E4M3_COLUMNS
}
SPECS = tuple(_SPECS.values())


def tiles_spec(
    dtype: str, tiles: tuple[int, int], form: str, *, masked: bool = False
) -> KernelSpec:
    """Look up the kernel of these tiles of 64 columns; `form` is "boxes", "rows" or "e4m3"."""
    return _SPECS[dtype, tiles, form, masked]
