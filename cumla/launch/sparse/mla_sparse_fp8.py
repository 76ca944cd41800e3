# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_fp8.cu: MLA attention to lists of rows of e4m3 caches."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.mla.mla_decode_fp8 import PACKED_SMEM_BYTES, PARAMS, SMEM_BYTES, launch_with
from cumla.launch.mla.shape import NARROW_ROWS
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.select_rows import LISTS_FORMAT
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
        smem_bytes=SMEM_BYTES[rows][grouped],
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
    smem_bytes=PACKED_SMEM_BYTES + 4 * 8,
)
SPECS = (*_SPECS.values(), _PACKED)


_PACKED_PARAMS = struct.Struct(f"{PARAMS.format}{LISTS_FORMAT}32x")


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
    lists: tuple[int, ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe the same for packed rows and lists whose fields are those of LISTS_FORMAT."""
    arguments = with_zeros(key, buffer, arguments)
    launch = launch_with(_PACKED, key, buffer, arguments, out, lse)
    return launch._replace(layout=_PACKED_PARAMS, values=(*launch.values, *lists))


def with_zeros(key: MLASparseKey, buffer: int, arguments: DecodeArguments) -> DecodeArguments:
    """Put what stands for rows that are not there in place of packed rows' RoPE columns."""
    return arguments._replace(kv_rope=arguments.kv_rope._replace(ptr=buffer + key.zeros))
