# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/append_indexer_cache.cu: indexer keys quantised into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.source import FLOATS, KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "indexer/append_indexer_cache"
_THREADS = constant(_FILE, "kAppendIndexerThreads")
_COLUMNS = constant(_FILE, "kHeld * kOctet")  # that a lane holds


def _spec(dtype: str, mxfp4: bool) -> KernelSpec:
    names = "indexer", "append_indexer_cache", "AppendIndexerCacheParams"
    flags: list[object] = [True] if mxfp4 else []
    tags, blocks = ["mxfp4"] if mxfp4 else [], 8 if mxfp4 or dtype == "float32" else 16
    all_tags = [dtype, *tags]
    return KernelSpec.of(*names, dtype, *flags, tags=all_tags, threads=_THREADS, min_blocks=blocks)


_SPECS = {(dtype, mxfp4): _spec(dtype, mxfp4) for mxfp4 in (False, True) for dtype in FLOATS}
SPECS = tuple(_SPECS.values())


class AppendIndexerArguments(NamedTuple):
    """Checked views of one call."""

    k: ArrayView  # (tokens, head_dim), bfloat16, float16 or float32
    values: ArrayView  # (num_pages, page_size, head_dim) of one byte, page_size a power of two
    scales: ArrayView  # (num_pages, page_size) float32; may be in the pages of `values`
    slot_mapping: ArrayView  # (tokens,) int32 or int64


def append_indexer_launch(
    arguments: AppendIndexerArguments, power_of_two_scales: bool, *, mxfp4: bool = False
) -> Launch:
    """Describe how to quantise and write the keys, at least one, of 32, 64 or 128 columns.

    Where `power_of_two_scales`, scales are rounded up to powers of two. With `mxfp4` `values` have
    head_dim / 2 bytes.
    """
    k, cache, scales, slots = arguments
    tokens, head_dim = k.shape
    num_pages, page_size, _ = cache.shape
    team = head_dim // _COLUMNS
    of_page = "data", "stride_page", "stride_row"
    params = {
        **strided(k, "rows", "rows_stride"),
        **strided(slots, "slots", "slots_stride"),
        "values": strided(cache, *of_page),
        "scales": strided(scales, *of_page),
        "tokens": tokens,
        "num_slots": num_pages * page_size,
        "slots_are_wide": slots.dtype == "int64",
        "page_size_log2": page_size.bit_length() - 1,
        "team_log2": team.bit_length() - 1,
        "power_of_two": power_of_two_scales,
    }
    blocks = -(-tokens // (_THREADS // team))
    return launch_of(_SPECS[k.dtype, mxfp4], (blocks, 1, 1), params)
