# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_v4.cu: lists of rows in DeepSeek-V4's format."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import NO_MAP, PARAMS_FORMAT, decode_values
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_v4_launch"]

_NAMES = "sparse", "mla_sparse_v4", "MlaSparseV4Params"
SPECS = (KernelSpec.of(*_NAMES, threads=512, smem_bytes=232160),)

_PARAMS = struct.Struct(f"{PARAMS_FORMAT}{2 * '2q2i2I'}")
_NO_CACHE = (0, 0, 0, 1, *divisor_of(1))


def sparse_v4_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    caches: tuple[ArrayView, ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the lists in a plan's buffer, which number the slots of `caches`.

    These are one or two, ``(num_pages, page_size, 1, 584)``. Other parameters are as for
    :func:`cumla.launch.mla.mla_decode.decode_launch`; its cache is a row of zeros. Nothing may
    come between select_rows and this kernel, which reads the schedule before it waits: select_rows
    lets it begin when the schedule is done.
    """
    fields = [_fields(cache) for cache in caches] + [_NO_CACHE] * (2 - len(caches))
    values = decode_values(key, buffer, arguments, out, lse)
    grid = key.row_tiles, key.parts, 1
    return Launch(SPECS[0], grid, _PARAMS, (NO_MAP, NO_MAP, NO_MAP, *values, *sum(fields, ())))


def _fields(cache: ArrayView) -> tuple[int, ...]:
    num_pages, page_size = cache.shape[:2]
    return cache.ptr, cache.strides[0], num_pages * page_size, page_size, *divisor_of(page_size)
