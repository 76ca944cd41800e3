# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/append_indexer_cache.cu: indexer keys quantised into a paged cache."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.kernel import Launch
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

_THREADS = 128
_COLUMNS = 16  # that a lane holds


def _spec(dtype: str) -> KernelSpec:
    names = "indexer", "append_indexer_cache", "AppendIndexerCacheParams"
    blocks = 8 if dtype == "float32" else 16
    return KernelSpec.of(*names, dtype, tags=[dtype], threads=_THREADS, min_blocks=blocks)


_SPECS = {dtype: _spec(dtype) for dtype in FLOATS}
SPECS = tuple(_SPECS.values())


class AppendIndexerArguments(NamedTuple):
    """Checked views of one call."""

    k: ArrayView  # (tokens, head_dim), bfloat16, float16 or float32
    values: ArrayView  # (num_pages, page_size, head_dim) of one byte, page_size a power of two
    scales: ArrayView  # (num_pages, page_size) float32; may lie in the pages of `values`
    slot_mapping: ArrayView  # (tokens,) int32 or int64


_PARAMS = struct.Struct("<12q4i")


def append_indexer_launch(arguments: AppendIndexerArguments, power_of_two_scales: bool) -> Launch:
    """Describe how to quantise and write the keys, at least one, of 32, 64 or 128 columns.

    Where `power_of_two_scales`, scales are rounded up to powers of two.
    """
    k, cache, scales, slots = arguments
    tokens, head_dim = k.shape
    num_pages, page_size, _ = cache.shape
    team = head_dim // _COLUMNS
    fields = (
        k.ptr,
        k.strides[0],
        slots.ptr,
        slots.strides[0],
        cache.ptr,
        *cache.strides[:2],
        scales.ptr,
        *scales.strides,
        tokens,
        num_pages * page_size,
        slots.dtype == "int64",
        page_size.bit_length() - 1,
        team.bit_length() - 1,
        power_of_two_scales,
    )
    blocks = -(-tokens // (_THREADS // team))
    return Launch(_SPECS[k.dtype], (blocks, 1, 1), _PARAMS, fields)
