# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_packed.cu: lists of packed FP8 rows, many heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import launch_of
from cumla.launch.mla.mla_decode import decode_values
from cumla.launch.mla.mla_decode_fp8_64 import SMEM_BYTES
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.mla_sparse_fp8 import columns_of
from cumla.mla.shape import E4M3_512

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_packed_launch", "sparse_packed_spec"]

_NAMES = "sparse", "mla_sparse_packed", "MlaSparsePackedParams"
_SPECS = {
    columns: KernelSpec.of(
        *(*_NAMES, columns == HEAD_DIM),
        tags=[] if columns == HEAD_DIM else ["512"],
        threads=384,
        smem_bytes=SMEM_BYTES,
    )
    for columns in (HEAD_DIM, VALUE_DIM)
}
_E4M3 = KernelSpec(
    stem="mla_sparse_packed",
    package="cumla.cuda.sparse",
    entry="mla_sparse_packed_e4m3",
    function="mla_sparse_e4m3",
    params="MlaSparseE4m3Params",
    threads=384,
    smem_bytes=SMEM_BYTES,
)
SPECS = (*_SPECS.values(), _E4M3)


def sparse_packed_spec(key: MLASparseKey) -> KernelSpec:
    """Look up the kernel of a shape: with RoPE columns, or without, or without scales, too."""
    return _E4M3 if key.cache == E4M3_512 else _SPECS[columns_of(key)]


def sparse_packed_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    lists: dict[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to lists, the values of struct Lists.

    Other parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a
    page.
    """
    values: dict[str, Any] = {"decode": decode_values(key, buffer, arguments, out, lse)}
    values["lists"] = lists
    if key.cache == E4M3_512:
        factor = arguments.kv_scale
        pointer, value = (0, factor) if isinstance(factor, (int, float)) else (factor.ptr, 0.0)
        values |= {"kv_scale": pointer, "kv_scale_value": value}
    return launch_of(sparse_packed_spec(key), (key.row_tiles, key.parts, 1), values)
