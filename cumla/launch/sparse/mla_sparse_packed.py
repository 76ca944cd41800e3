# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_packed.cu: lists of packed FP8 rows, many heads."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import NO_MAP, PARAMS_FORMAT, decode_values
from cumla.launch.mla.mla_decode_fp8_64 import SMEM_BYTES
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.select_rows import LISTS_FORMAT

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_packed_launch"]

_NAMES = "sparse", "mla_sparse_packed", "MlaSparsePackedParams"
SPECS = (KernelSpec.of(*_NAMES, threads=384, smem_bytes=SMEM_BYTES),)

_PARAMS = struct.Struct(f"{PARAMS_FORMAT}{LISTS_FORMAT}32x")


def sparse_packed_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    lists: tuple[int, ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to lists, whose fields are those of LISTS_FORMAT.

    Other parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a
    page.
    """
    values = decode_values(key, buffer, arguments, out, lse)
    grid = key.row_tiles, key.parts, 1
    return Launch(SPECS[0], grid, _PARAMS, (NO_MAP, NO_MAP, NO_MAP, *values, *lists))
