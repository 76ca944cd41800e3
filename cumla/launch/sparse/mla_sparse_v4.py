# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_v4.cu and mla_sparse_v41.cu: rows of DeepSeek-V4 and V4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.mla.mla_decode import decode_values
from cumla.launch.source import KernelSpec
from cumla.mla.shape import V4, V41_FP4

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.key import MLASparseKey

__all__ = ["SPECS", "sparse_v4_launch", "sparse_v4_spec"]

_SMEM_BYTES = constant("sparse/mla_sparse_v4", "V4Layout(0).pacer(2 * kWarpgroup)")


def _spec(stem: str, *arguments: object, tags: Sequence[str] = ()) -> KernelSpec:
    names = "sparse", stem, "MlaSparseV4Params"
    return KernelSpec.of(*names, *arguments, tags=tags, threads=512, smem_bytes=_SMEM_BYTES)


_V4 = _spec("mla_sparse_v4")
_V41 = _spec("mla_sparse_v41", False)
_V41_FP4 = _spec("mla_sparse_v41", True, tags=["fp4"])
SPECS = _V4, _V41, _V41_FP4


def sparse_v4_spec(key: MLASparseKey) -> KernelSpec:
    """Look up the kernel of a shape."""
    if key.cache == V4:
        return _V4
    return _V41_FP4 if V41_FP4 in (key.cache, key.extra_cache) else _V41


def sparse_v4_launch(
    key: MLASparseKey,
    buffer: int,
    arguments: DecodeArguments,
    caches: tuple[tuple[ArrayView, dict[str, Any]], ...],
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the lists of one or two caches, of which those of the second go on.

    A cache is ``(num_pages, page_size, 1, bytes)``, and its lists are the values of struct Lists.
    Other parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`; its cache is a
    row of zeros, and its block table the length of each list of the first cache.
    """
    formats = key.cache, key.extra_cache
    named = [
        strided(cache, "base", "stride_page")
        | {"lists": lists, "entries": entries, "is_fp4": form == V41_FP4}
        for (cache, lists), entries, form in zip(caches, key.topks, formats, strict=False)
    ]
    values = {"decode": decode_values(key, buffer, arguments, out, lse), "caches": named}
    return launch_of(sparse_v4_spec(key), (key.row_tiles, key.parts, 1), values)
