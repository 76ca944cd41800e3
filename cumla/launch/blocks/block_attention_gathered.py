# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_attention_gathered.cu: attention to lists of small blocks."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from cumla.launch.blocks.block_attention import block_attention_values
from cumla.launch.blocks.block_attention_few import wide_launch
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import HALVES, KernelSpec, in_cuda
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import BlockKey
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.launch import MHAArguments

_FILE = "blocks/block_attention_gathered"


def _spec(dtype: str, e4m3: bool, columns: int, ctas: int) -> KernelSpec:
    layout = f"GatherLayout<{in_cuda(e4m3)}, {columns}, {ctas}>"
    return KernelSpec.of(
        *("blocks", "block_attention_gathered", "BlockAttentionGatheredParams"),
        *(dtype, e4m3, columns, ctas),
        tags=[dtype, *(["e4m3"] if e4m3 else []), f"{columns}x{ctas}"],
        threads=128,
        min_blocks=ctas,
        smem_bytes=constant(_FILE, f"{layout}::kBytes"),
    )


_FORMS = (128, 2), (192, 2), (256, 1), (256, 2)  # columns, thread blocks on a multiprocessor
_SPECS = {
    (dtype, e4m3, *form): _spec(dtype, e4m3, *form)
    for dtype, e4m3, form in product(HALVES, (False, True), _FORMS)
}
SPECS = tuple(_SPECS.values())


def block_attention_gathered_spec(key: BlockKey) -> KernelSpec:
    """Find the kernel of a shape that this file serves."""
    form = key.gathered_columns, key.gathered_ctas
    return _SPECS[key.dtype, key.cache_dtype != key.dtype, *form]


def block_attention_gathered_launch(
    key: BlockKey,
    arguments: MHAArguments,
    lists: Mapping[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe attention to lists, as `block_attention_launch` does."""
    values = block_attention_values(key, arguments, lists, out, lse)
    values |= {"cluster": key.cluster, "by_cluster": divisor_of(key.cluster)}
    for name, view in (("keys", arguments.k), ("values", arguments.v)):
        page, row = view.strides[:2]
        values[name] = {"data": view.ptr, "stride_page": page, "stride_row": row}
    grid = key.cluster * key.num_places, 1, 1
    return wide_launch(launch_of(block_attention_gathered_spec(key), grid, values, key.cluster))
