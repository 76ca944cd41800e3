# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_fp8.cu: MLA attention to lists of rows of e4m3 caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.mla.mla_decode_fp8 import launch_with, smem_bytes
from cumla.launch.mla.shape import HEAD_DIM, NARROW_ROWS, VALUE_DIM
from cumla.launch.source import KernelSpec, in_cuda
from cumla.launch.sparse.shape import WHOLE_ROWS
from cumla.mla.shape import E4M3_512, PACKED

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = [
    "SPECS",
    "columns_of",
    "sparse_fp8_launch",
    "sparse_fp8_packed_launch",
    "sparse_fp8_specs",
    "with_zeros",
]


def _spec(rows: int, grouped: bool, columns: int) -> KernelSpec:
    narrow = columns == VALUE_DIM
    return KernelSpec.of(
        *("sparse", "mla_sparse_fp8", "MlaDecodeFp8Params", rows, grouped),
        *([f"ValueTile<SelectedTile<{rows}>>"] if narrow else []),
        tags=[str(rows), *(["grouped"] if grouped else []), *(["512"] if narrow else [])],
        threads=384,
        smem_bytes=smem_bytes(rows, grouped, "kRows"),
    )


def _packed(columns: int) -> KernelSpec:
    has_rope = columns == HEAD_DIM
    return KernelSpec(
        stem="mla_sparse_fp8",
        package="cumla.cuda.sparse",
        entry=f"mla_sparse_fp8_16_packed{'' if has_rope else '_512'}",
        function=f"mla_sparse_fp8_packed<16, {in_cuda(has_rope)}>",
        params="MlaSparseFp8Params",
        threads=384,
        smem_bytes=smem_bytes(16, True, "kPackedRows"),
    )


# Rows of 512 columns have one factor, or scales that follow their columns. With more than 16 heads
# those of one factor are for another kernel (mla_sparse_packed.py).
_SPECS = {
    (rows, grouped, HEAD_DIM): _spec(rows, grouped, HEAD_DIM)
    for rows in NARROW_ROWS
    for grouped in (False, True)
}
_SPECS[16, False, VALUE_DIM] = _spec(16, False, VALUE_DIM)
_PACKED = {columns: _packed(columns) for columns in (HEAD_DIM, VALUE_DIM)}
SPECS = (*_SPECS.values(), *_PACKED.values())


def sparse_fp8_specs(key: MLASparseKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape: of one factor, and of scales."""
    if key.cache == E4M3_512:
        return (_SPECS[key.row_tile, False, VALUE_DIM],)
    if key.cache in WHOLE_ROWS:
        return (_PACKED[columns_of(key)],)
    return tuple([_SPECS[key.row_tile, grouped, HEAD_DIM] for grouped in (False, True)])


def columns_of(key: MLASparseKey) -> int:
    """Tell the columns of whole rows."""
    return HEAD_DIM if key.cache == PACKED else VALUE_DIM


def sparse_fp8_launch(
    key: MLASparseKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the lists in a plan's buffer.

    Parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a page.
    """
    columns = VALUE_DIM if key.cache == E4M3_512 else HEAD_DIM
    spec = _SPECS[key.row_tile, arguments.kv_scales is not None, columns]
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
    return launch_with(_PACKED[columns_of(key)], key, buffer, arguments, out, lse, lists=lists)


def with_zeros(key: MLASparseKey, buffer: int, arguments: DecodeArguments) -> DecodeArguments:
    """Put what stands for rows that are not there in place of packed rows' RoPE columns."""
    return arguments._replace(kv_rope=arguments.kv_rope._replace(ptr=buffer + key.zeros))
