# SPDX-License-Identifier: Apache-2.0
"""Entry point of cuda/mha/attention_simt.cu: a warp for each row, without tensor cores."""

from __future__ import annotations

from cumla.launch.layouts import constant
from cumla.launch.source import KernelSpec

ROWS = constant("mha/attention_simt", "kWarps")  # of a thread block

_NAMES = "mha", "attention_simt"
SPEC = KernelSpec.of(*_NAMES, "AttentionParams", tags=["float32"], threads=32 * ROWS)
MASKED_SPEC = KernelSpec.of(
    *_NAMES, "MaskedParams", name="attention_simt_masked", tags=["float32"], threads=32 * ROWS
)
SPECS = (SPEC, MASKED_SPEC)
