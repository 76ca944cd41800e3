# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention_simt.cu: a warp for each row, without tensor cores."""

from __future__ import annotations

from cumla.launch.layouts import constant
from cumla.launch.mha.attention import VARIANTS, named
from cumla.launch.source import KernelSpec

ROWS = constant("mha/attention_simt", "kWarps")  # of a thread block

_STEM = "attention_simt"
BY_VARIANT = {
    variant: KernelSpec.of(
        *("mha", _STEM, params),
        name=named(_STEM, variant),
        tags=["float32"],
        threads=32 * ROWS,
    )
    for variant, params in VARIANTS.items()
}
SPECS = tuple(BY_VARIANT.values())
