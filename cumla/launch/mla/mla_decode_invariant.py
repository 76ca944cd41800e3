# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_invariant.cu: thread blocks with all pieces of a request.

The kernel takes what mla_decode takes: :func:`cumla.launch.mla.mla_decode.decode_launch` describes
the launches of both.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from cumla.launch.mla.mla_decode import FORM_TAGS, SMEM_BYTES
from cumla.launch.mla.shape import VARIANTS
from cumla.launch.source import HALVES, KernelSpec
from cumla.launch.split.plan import PAGE_FORMS


def invariant_tile(sinks: bool) -> str:
    """Name the type of row tiles of batch-invariant requests."""
    return f"Invariant<{'WithSinks<Tile>' if sinks else 'Tile'}>"


def _spec(dtype: str, variant: str, form: str, sinks: bool) -> KernelSpec:
    suffixes = [tag for tag in (variant, form) if tag not in ("one_tile", "pages")]
    spec = KernelSpec.of(
        *("mla", "mla_decode", "MlaDecodeParams"),
        *(dtype, variant != "one_tile", FORM_TAGS[form], invariant_tile(sinks)),
        name="mla_decode_invariant_sinks" if sinks else "mla_decode_invariant",
        tags=[dtype, *suffixes],
        threads=384,
        smem_bytes=SMEM_BYTES,
    )
    return replace(spec, stem="mla_decode_invariant")  # the file, whose function is the other's


_SPECS = {
    names: _spec(*names) for names in product(HALVES, VARIANTS[1:], PAGE_FORMS, (False, True))
}
SPECS = tuple(_SPECS.values())


def invariant_spec(dtype: str, variant: str, form: str, sinks: bool = False) -> KernelSpec:
    """Look up the kernel of a variant, one of the last two of VARIANTS, with sinks or without."""
    return _SPECS[dtype, variant, form, sinks]
