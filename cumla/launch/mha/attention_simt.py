# SPDX-License-Identifier: Apache-2.0
"""Entry point of cuda/mha/attention_simt.cu: a warp for each row, without tensor cores."""

from __future__ import annotations

from cumla.launch.layouts import constant
from cumla.launch.source import KernelSpec

ROWS = constant("mha/attention_simt", "kWarps")  # of a thread block

_NAMES = "mha", "attention_simt", "AttentionParams"
SPEC = KernelSpec.of(*_NAMES, tags=["float32"], threads=32 * ROWS)
SPECS = (SPEC,)
