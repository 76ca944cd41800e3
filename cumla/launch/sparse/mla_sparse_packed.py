# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_packed.cu: attention to lists of packed FP8 rows, many heads."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import NO_MAP, PARAMS_FORMAT, decode_values
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.mla_sparse_fp8 import with_zeros

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_packed_launch"]

SPECS = (
    KernelSpec(
        stem="mla_sparse_packed",
        package="cumla.cuda.sparse",
        entry="mla_sparse_packed",
        function="mla_sparse_packed",
        params="MlaDecodeParams",
        threads=384,
        smem_bytes=230912,
    ),
)

_PARAMS = struct.Struct(PARAMS_FORMAT)


def sparse_packed_launch(
    key: MLASparseKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the lists in a plan's buffer.

    Parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a page.
    """
    arguments = with_zeros(key, buffer, arguments)
    values = decode_values(key, buffer, arguments, out, lse)
    grid = key.row_tiles, key.parts, 1
    values = (NO_MAP, NO_MAP, NO_MAP, *values)
    return Launch(SPECS[0], grid, _PARAMS, values)
