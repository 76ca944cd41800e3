# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/find_prefix_groups.cu: neighbours whose pages begin alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.ragged_schedule import int32s

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "split/find_prefix_groups"
WINDOW = constant(_FILE, "kPrefixWindow")  # requests; no group extends over two windows
SPECS = (KernelSpec.of("split", "find_prefix_groups", "FindPrefixGroupsParams", threads=WINDOW),)


class FindArguments(NamedTuple):
    """Checked arguments of one call."""

    block_table: ArrayView  # (batch, max_pages) int32, rows contiguous
    kv_lens: ArrayView  # (batch,) int32
    qo_indptr: ArrayView | None  # (batch + 1,) int32; None: each request has q_len query tokens
    page_size: int
    min_pages: int  # at least 1
    q_len: int


def find_prefix_groups_launch(
    arguments: FindArguments, group: ArrayView, prefix_len: ArrayView
) -> Launch:
    """Describe how to find the groups of at least one request; outputs are contiguous."""
    a = arguments
    batch, max_pages = a.block_table.shape
    values = {
        "block_table": a.block_table.ptr,
        "block_table_stride": a.block_table.strides[0] // 4,
        **int32s("kv_lens", a.kv_lens),
        **int32s("qo_indptr", a.qo_indptr),
        "group": group.ptr,
        "prefix_len": prefix_len.ptr,
        "batch": batch,
        "max_pages": max_pages,
        "page_size": a.page_size,
        "min_pages": a.min_pages,
        "q_len": a.q_len,
    }
    return launch_of(SPECS[0], (-(-batch // WINDOW), 1, 1), values)
