# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/sparse/mla_sparse_fp8.cu: MLA attention to lists of rows of e4m3 caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.mla.mla_decode_fp8 import launch_with, smem_bytes
from cumla.launch.mla.shape import NARROW_ROWS
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.sparse.key import MLASparseKey

__all__ = ["SPECS", "sparse_fp8_launch", "sparse_fp8_specs"]


def _spec(rows: int, grouped: bool) -> KernelSpec:
    return KernelSpec.of(
        *("sparse", "mla_sparse_fp8", "MlaDecodeFp8Params", rows, grouped),
        tags=[str(rows), *(["grouped"] if grouped else [])],
        threads=384,
        smem_bytes=smem_bytes(rows, grouped, "kRows"),
    )


_SPECS = {
    (rows, grouped): _spec(rows, grouped) for rows in NARROW_ROWS for grouped in (False, True)
}
SPECS = tuple(_SPECS.values())


def sparse_fp8_specs(key: MLASparseKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape: of one factor, and of scales."""
    return tuple([_SPECS[key.row_tile, grouped] for grouped in (False, True)])


def sparse_fp8_launch(
    key: MLASparseKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the lists in a plan's buffer.

    Parameters are as for :func:`cumla.launch.mla.mla_decode.decode_launch`, each cache row a page.
    """
    spec = _SPECS[key.row_tile, arguments.kv_scales is not None]
    return launch_with(spec, key, buffer, arguments, out, lse)
