# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_fp8.cu: MLA attention to lists of rows of e4m3 caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.mla.mla_decode_fp8 import launch_with, smem_bytes
from cumla.launch.mla.shape import NARROW_ROWS
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.shape import PACKED

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = [
    "SPECS",
    "sparse_fp8_launch",
    "sparse_fp8_packed_launch",
    "sparse_fp8_specs",
    "with_zeros",
]

_SPECS = {
    (rows, grouped): KernelSpec.of(
        *("sparse", "mla_sparse_fp8", "MlaDecodeFp8Params", rows, grouped),
        tags=[str(rows), *(["grouped"] if grouped else [])],
        threads=384,
        smem_bytes=smem_bytes(rows, grouped, "kRows"),
    )
    for rows in NARROW_ROWS
    for grouped in (False, True)
}
_PACKED = KernelSpec(
    stem="mla_sparse_fp8",
    package="cumla.cuda.sparse",
    entry="mla_sparse_fp8_16_packed",
    function="mla_sparse_fp8_packed<16>",
    params="MlaSparseFp8Params",
    threads=384,
    smem_bytes=smem_bytes(16, True, "kPackedRows"),
)
SPECS = (*_SPECS.values(), _PACKED)


def sparse_fp8_specs(key: MLASparseKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape: of one factor, and of scales."""
    if key.cache == PACKED:
        return (_PACKED,)
    return _SPECS[key.row_tile, False], _SPECS[key.row_tile, True]


def sparse_fp8_launch(
    key: MLASparseKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the lists in a plan's buffer.

    Parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a page.
    """
    spec = _SPECS[key.row_tile, arguments.kv_scales is not None]
    return launch_with(spec, key, buffer, arguments, out, lse)


def sparse_fp8_packed_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    lists: dict[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe the same for packed rows and lists, the values of struct Lists."""
    arguments = with_zeros(key, buffer, arguments)
    return launch_with(_PACKED, key, buffer, arguments, out, lse, lists=lists)


def with_zeros(key: MLASparseKey, buffer: int, arguments: DecodeArguments) -> DecodeArguments:
    """Put what stands for rows that are not there in place of packed rows' RoPE columns."""
    return arguments._replace(kv_rope=arguments.kv_rope._replace(ptr=buffer + key.zeros))
