# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla_merge.cu: joins the partial results of split requests."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import PreparedLaunch
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.arrays import ArrayView
    from cumla.launch.mla_plan import MLADecodeKey
    from cumla.launch.module import LoadedKernel

__all__ = ["SPECS", "prepare_merge"]

_WARPS = 8  # of a thread block
_BLOCKS_PER_SM = 2  # that walk over the tasks
_TASKS_PER_ROW = 4  # a task is a quarter of a row's columns

SPECS = tuple(
    KernelSpec(
        stem="mla_merge",
        entry=f"mla_merge_{dtype}",
        function=f"mla_merge<{tag}>",
        params="MlaMergeParams",
        threads=32 * _WARPS,
        min_blocks=_BLOCKS_PER_SM,
    )
    for dtype, tag in (("bfloat16", "Bf16"), ("float16", "Fp16"))
)

_PARAMS = struct.Struct("<12q10i")


def prepare_merge(
    kernel: LoadedKernel,
    key: MLADecodeKey,
    buffer: int,
    out: ArrayView,
    lse: ArrayView,
    stream: int,
) -> PreparedLaunch:
    """Prepare to merge the partial results of split requests into out and lse.

    Parameters
    ----------
    kernel : LoadedKernel
        ``mla_merge_<dtype>``.
    key : MLADecodeKey
        The plan's shape, with more than one part.
    buffer : int
        Address of the plan's buffer.
    out, lse : ArrayView
        As in :func:`cumla.mla_decode`.
    stream : int
        CUstream handle.

    Returns
    -------
    PreparedLaunch
        To be called.
    """
    layout = key.layout
    most_splits = min(key.batch, key.parts - 1)
    tasks = key.q_len * key.num_heads * _TASKS_PER_ROW
    warps_per_task = _warps_per_task(key, tasks * most_splits)
    values = (
        buffer + layout.splits,
        buffer + layout.num_splits,
        buffer + layout.partial_out,
        buffer + layout.partial_lse,
        out.ptr,
        *out.strides[:3],
        lse.ptr,
        *(stride // 4 for stride in lse.strides),
        key.batch,
        key.parts,
        key.tile_rows,
        key.row_tiles,
        key.group_rows,
        key.heads_per_group,
        key.q_len * key.num_heads,
        most_splits,
        warps_per_task,
        out.dtype == "float32",
    )
    blocks = min(-(-tasks * warps_per_task // _WARPS) * most_splits, _BLOCKS_PER_SM * key.sm_count)
    return PreparedLaunch(kernel, (blocks, 1), _PARAMS, values, stream)


def _warps_per_task(key: MLADecodeKey, tasks: int) -> int:
    """Warps that share a task: no more than the GPU holds, or than a request has partials."""
    enough = min(_BLOCKS_PER_SM * key.sm_count * _WARPS // tasks, key.parts // key.batch)
    return next(warps for warps in (8, 4, 2, 1) if warps <= max(enough, 1))
