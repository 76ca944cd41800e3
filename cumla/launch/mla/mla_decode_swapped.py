# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_swapped.cu: split-KV MLA attention of few query rows.

The kernel takes what mla_decode takes: :func:`cumla.launch.mla.mla_decode.decode_launch` describes
the launches of both.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode import FORM_TAGS, width_tile
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.plan import PAGE_FORMS

if TYPE_CHECKING:
    from cumla.launch.mla.shape import LatentKey


def _spec(dtype: str, form: str, sinks: bool) -> KernelSpec:
    return KernelSpec.of(
        *("mla", "mla_decode_swapped", "MlaDecodeParams", dtype, FORM_TAGS[form]),
        *(["WithSinks<Tile>"] if sinks else []),
        name="mla_decode_sinks" if sinks else "mla_decode",
        tags=[dtype, "swapped", *([] if form == "pages" else [form])],
        threads=384,
        smem_bytes=constant("mla/mla_decode_swapped", "SwappedLayout(0).query_free() + 8"),
    )


def _width_spec(dtype: str, latent: int, form: str) -> KernelSpec:
    """Describe a kernel for rows of another width, with sinks or without."""
    return KernelSpec.of(
        *("mla", "mla_decode_swapped", "MlaWidthParams", dtype, FORM_TAGS[form]),
        width_tile(latent, "Tile"),
        name=f"mla_decode_{latent}",
        tags=[dtype, "swapped", form],
        threads=384,
        smem_bytes=_WIDTH_SMEM[latent],
    )


_FILE = "mla/mla_decode_swapped"
_WIDTH_SMEM = {
    256: constant(_FILE, "SwappedLayoutOf<4>(0).query_free() + 8"),
    512: constant(_FILE, "SwappedLayoutOf<8, false>(0).query_free() + 8"),
}
_SPECS = {names: _spec(*names) for names in product(HALVES, FORM_TAGS, (False, True))}
_WIDTH_SPECS = {
    names: _width_spec(*names) for names in product(HALVES, _WIDTH_SMEM, PAGE_FORMS[1:])
}
SPECS = (*_SPECS.values(), *_WIDTH_SPECS.values())


def swapped_width_spec(key: LatentKey, form: str) -> KernelSpec:
    """Look up the kernel for rows of another width than 512 + 64."""
    return _WIDTH_SPECS[key.dtype, key.width[0], form]


def swapped_spec(dtype: str, form: str, sinks: bool = False) -> KernelSpec:
    """Look up the kernel of a dtype and form, with sinks or without."""
    return _SPECS[dtype, form, sinks]
