# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/combine_prefixes.cu: prefixes and rests, and the sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.source import FLOATS, KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.split.prefix_requests import PrefixLayout, PrefixShape

_FILE = "split/combine_prefixes"
_ROWS = constant(_FILE, "kCombineRows")  # of a block
_TYPES = {dtype: constant(_FILE, f"kCombined{dtype.capitalize()}") for dtype in FLOATS}
SPECS = (
    KernelSpec.of(
        *("split", "combine_prefixes", "CombinePrefixesParams"),
        threads=constant(_FILE, "kCombineThreads"),
    ),
)


def combine_prefixes_launch(
    shape: PrefixShape,
    layout: PrefixLayout,
    buffer: int,
    out: ArrayView,
    lse: ArrayView,
    sinks: ArrayView | None,
) -> Launch:
    """Describe how to combine what the buffer at an address holds.

    `out` is ``(total_tokens, num_heads, value_dim)`` or has an axis of requests before; `lse` is
    ``(batch, num_heads, tokens)``, of one request if out has three axes.
    """
    apart = out.shape[1] if len(out.shape) == 4 else 0
    if not apart:
        out = out._replace(strides=(0, *out.strides))
    lse_batch, lse_head, lse_token = lse.strides
    rows = shape.total_tokens * shape.num_heads
    values = {
        "partial_out": buffer + layout.out,
        "partial_lse": buffer + layout.lse,
        "states": buffer + layout.states,
        **strided(out, "out", *(f"out_stride_{axis}" for axis in ("batch", "token", "head"))),
        "lse": lse.ptr,
        "lse_stride_batch": lse_batch // 4,
        "lse_stride_head": lse_head // 4,
        "lse_stride_token": lse_token // 4,
        "sinks": 0 if sinks is None else sinks.ptr,
        "rows": rows,
        "tokens_apart": apart,
        "columns": shape.value_dim,
        "out_type": _TYPES[out.dtype],
        "by_heads": divisor_of(shape.num_heads),
        "by_tokens_apart": divisor_of(apart or 1 << 31),
        "heads": shape.num_heads,
    }
    return launch_of(SPECS[0], (-(-rows // _ROWS), 1, 1), values)
