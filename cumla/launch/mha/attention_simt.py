# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/attention_simt.cu: attention without tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.mha.attention import MHAArguments, MHAKey, attention_values
from cumla.launch.source import KernelSpec
from cumla.launch.split.plan import ROW_TILE

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_ROWS = constant("mha/attention_simt", "kWarps")  # of a thread block

_NAMES = "mha", "attention_simt", "AttentionParams"
SPEC = KernelSpec.of(*_NAMES, tags=["float32"], threads=32 * _ROWS)
SPECS = (SPEC,)


def attention_simt_launch(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend for every row, as `attention_launch` does with tensor cores."""
    values = attention_values(key, buffer, arguments, out, lse)
    grid = (key.num_places * (ROW_TILE // _ROWS), 1, key.num_kv_heads)
    return launch_of(SPEC, grid, values)
