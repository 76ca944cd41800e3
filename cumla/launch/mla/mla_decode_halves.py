# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_halves.cu: rows of 1024 latent columns, halved by a cluster.

The kernel takes what mla_decode takes of rows of other widths:
:func:`cumla.launch.mla.mla_decode.width_launch` describes the launches of both.
"""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.plan import PAGE_FORMS


def _spec(dtype: str, form: str) -> KernelSpec:
    return KernelSpec.of(
        *("mla", "mla_decode_halves", "MlaWidthParams", dtype, f"k{form.capitalize()}"),
        tags=[dtype, form],
        threads=384,
        smem_bytes=constant(
            "mla/mla_decode_halves", "SharedLayoutOf<8, true>(0).pacer(2 * kWarpgroup)"
        ),
    )


_SPECS = {names: _spec(*names) for names in product(HALVES, PAGE_FORMS[1:])}
SPECS = tuple(_SPECS.values())


def halves_spec(dtype: str, form: str) -> KernelSpec:
    """Look up the kernel of a dtype and form, with windows and sinks or without."""
    return _SPECS[dtype, form]
