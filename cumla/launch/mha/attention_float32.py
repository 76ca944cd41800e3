# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/attention_float32.cu: attention of float32 queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.mha.attention import PARAMS, MHAArguments, MHAKey, attention_values
from cumla.launch.source import KernelSpec
from cumla.launch.split.plan import ROW_TILE

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

__all__ = ["SPECS", "attention_float32_launch"]

_ROWS = 8  # of a thread block

SPECS = (
    KernelSpec(
        stem="attention_float32",
        package="cumla.cuda.mha",
        entry="attention_float32",
        function="attention_float32",
        params="AttentionParams",
        threads=32 * _ROWS,
    ),
)


def attention_float32_launch(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend for every row, as `attention_launch` does for 16-bit queries."""
    values = attention_values(key, buffer, arguments, out, lse)
    grid = (key.num_places * (ROW_TILE // _ROWS), 1, key.num_kv_heads)
    return Launch(SPECS[0], grid, PARAMS, values)
