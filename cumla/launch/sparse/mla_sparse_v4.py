# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_v4.cu: lists of rows in DeepSeek-V4's format."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import NO_MAP, PARAMS_FORMAT, decode_values
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.select_rows import LISTS_FORMAT

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_v4_launch"]

_NAMES = "sparse", "mla_sparse_v4", "MlaSparseV4Params"
SPECS = (KernelSpec.of(*_NAMES, threads=512, smem_bytes=232160),)

_PARAMS = struct.Struct(f"{PARAMS_FORMAT}{2 * f'2q{LISTS_FORMAT}2i'}16x")
_NO_CACHE = (0,) * 20


def sparse_v4_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    caches: tuple[tuple[ArrayView, tuple[int, ...]], ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the lists of one or two caches, of which those of the second go on.

    A cache is ``(num_pages, page_size, 1, 584)``, and its lists are the fields of LISTS_FORMAT.
    Other parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`; its cache is a
    row of zeros, and its block table the length of each list of the first cache.
    """
    fields = [
        (cache.ptr, cache.strides[0], *lists, entries, 0)
        for (cache, lists), entries in zip(caches, key.topks, strict=False)
    ]
    fields += [_NO_CACHE] * (2 - len(caches))
    values = decode_values(key, buffer, arguments, out, lse)
    grid = key.row_tiles, key.parts, 1
    return Launch(SPECS[0], grid, _PARAMS, (NO_MAP, NO_MAP, NO_MAP, *values, *sum(fields, ())))
