# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_v4.cu: lists of rows in DeepSeek-V4's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.mla.mla_decode import decode_values
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.shape import MLASparseKey

__all__ = ["SPECS", "sparse_v4_launch"]

_NAMES = "sparse", "mla_sparse_v4", "MlaSparseV4Params"
_SMEM_BYTES = constant("sparse/mla_sparse_v4", "V4Layout(0).pacer(2 * kWarpgroup)")
SPECS = (KernelSpec.of(*_NAMES, threads=512, smem_bytes=_SMEM_BYTES),)


def sparse_v4_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    caches: tuple[tuple[ArrayView, dict[str, Any]], ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the lists of one or two caches, of which those of the second go on.

    A cache is ``(num_pages, page_size, 1, 584)``, and its lists are the values of struct Lists.
    Other parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`; its cache is a
    row of zeros, and its block table the length of each list of the first cache.
    """
    named = [
        strided(cache, "base", "stride_page") | {"lists": lists, "entries": entries}
        for (cache, lists), entries in zip(caches, key.topks, strict=False)
    ]
    values = {"decode": decode_values(key, buffer, arguments, out, lse), "caches": named}
    return launch_of(SPECS[0], (key.row_tiles, key.parts, 1), values)
