# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_packed.cu: lists of packed FP8 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of
from cumla.launch.mla.mla_decode import decode_values
from cumla.launch.mla.shape import NARROW_ROWS
from cumla.launch.source import KernelSpec, in_cuda
from cumla.launch.split.plan import ROW_TILE
from cumla.mla.shape import E4M3_512, NO_ROPE, PACKED

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.key import MLASparseKey

__all__ = ["SPECS", "sparse_packed_launch", "sparse_packed_spec"]

_STEM = "mla_sparse_packed"
_TAGS = {PACKED: "", NO_ROPE: "512", E4M3_512: "e4m3"}  # of entry points, by the format of rows


def _spec(tag: str, heads: int) -> KernelSpec:
    is_wide = heads == ROW_TILE
    rows = "kHeads" if is_wide else heads
    tags = [*([tag] if tag else []), *([] if is_wide else [str(heads)])]
    entry = "_".join((_STEM, *tags))
    has_scales = tag != "e4m3"
    rope = in_cuda(not tag)
    return KernelSpec(
        stem=_STEM,
        package="cumla.cuda.sparse",
        entry=entry,
        function=f"{_STEM}<{rope}, {rows}>" if has_scales else f"mla_sparse_e4m3<{rows}>",
        params="MlaSparsePackedParams" if has_scales else "MlaSparseE4m3Params",
        threads=384,
        smem_bytes=constant(
            f"sparse/{_STEM}", f"Heads64Layout<false, {in_cuda(has_scales)}, {rows}>::kBytes"
        ),
    )


_SPECS = {
    (cache, heads): _spec(tag, heads)
    for cache, tag in _TAGS.items()
    for heads in (*NARROW_ROWS, ROW_TILE)
}
SPECS = tuple(_SPECS.values())


def sparse_packed_spec(key: MLASparseKey) -> KernelSpec:
    """Look up the kernel of a shape: by the format of the rows, and by heads of a tile."""
    return _SPECS[key.cache, key.row_tile]


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
