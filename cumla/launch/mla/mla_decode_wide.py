# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_wide.cu: MLA attention to rows of 1024 latent columns.

The kernel takes what mla_decode takes of rows of other widths:
:func:`cumla.launch.mla.mla_decode.width_launch` describes the launches of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.plan import PAGE_FORMS
from cumla.mla.shape import WIDE


@dataclass(frozen=True)
class Rules:
    """The numbers by which row tiles of this kernel are cut."""

    # Parts for each row tile, up to which a piece has two KV blocks at least. One request of 513
    # tokens takes 21.7 us by pieces of one block, and 30.3 by two or three; 16 requests, of four
    # parts a tile, 33.9 by three pieces each, 31.0 by four (records/mla-wide.json).
    few_parts: int = 4


RULES = Rules()


def _spec(dtype: str, form: str) -> KernelSpec:
    return KernelSpec.of(
        *("mla", "mla_decode_wide", "MlaWidthParams", dtype, f"k{form.capitalize()}"),
        f"WithSinks<WidthTile<WideTile, {WIDE[0] // 64}, true>>",
        name=f"mla_attention_{WIDE[0]}",
        tags=[dtype, form],
        threads=384,
        smem_bytes=constant("mla/mla_decode_wide", "WideLayout(0).query_free() + 8"),
    )


_SPECS = {names: _spec(*names) for names in product(HALVES, PAGE_FORMS[1:])}
SPECS = tuple(_SPECS.values())


def wide_spec(dtype: str, form: str) -> KernelSpec:
    """Look up the kernel of a dtype and form, with windows and sinks or without."""
    return _SPECS[dtype, form]
