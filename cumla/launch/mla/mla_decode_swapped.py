# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_swapped.cu: split-KV MLA attention of few query rows.

The kernel takes what mla_decode takes: :func:`cumla.launch.mla.mla_decode.decode_launch` describes
the launches of both.
"""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.mla.mla_decode import FORM_TAGS
from cumla.launch.source import HALVES, KernelSpec


def _spec(dtype: str, form: str, sinks: bool) -> KernelSpec:
    return KernelSpec.of(
        *("mla", "mla_decode_swapped", "MlaDecodeParams", dtype, FORM_TAGS[form]),
        *(["WithSinks<Tile>"] if sinks else []),
        name="mla_decode_sinks" if sinks else "mla_decode",
        tags=[dtype, "swapped", *([] if form == "pages" else [form])],
        threads=384,
        smem_bytes=constant("mla/mla_decode_swapped", "SwappedLayout(0).query_free() + 8"),
    )


_SPECS = {names: _spec(*names) for names in product(HALVES, FORM_TAGS, (False, True))}
SPECS = tuple(_SPECS.values())


def swapped_spec(dtype: str, form: str, sinks: bool = False) -> KernelSpec:
    """Look up the kernel of a dtype and form, with sinks or without."""
    return _SPECS[dtype, form, sinks]
