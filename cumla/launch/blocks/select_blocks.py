# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/select_blocks.cu, and of top_k between its two launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.sparse.top_k import TopKViews, top_k_launch
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = ["SPECS", "SelectArguments", "select_launches", "workspace_of"]

_FILE = "blocks/select_blocks"
_THREADS, _WARPS = (constant(_FILE, name) for name in ("kSelectThreads", "kSelectWarps"))
SPECS = (KernelSpec.of("blocks", "select_blocks", "SelectBlocksParams", threads=_THREADS),)
_ALIGNMENT = 256


class SelectArguments(NamedTuple):
    """Checked views of one call."""

    scores: ArrayView  # (tokens, groups, width)
    visible: ArrayView  # (tokens,) int32
    k: int
    init_blocks: int
    local_blocks: int

    @property
    def rows(self) -> int:
        """Rows of scores."""
        return self.scores.shape[0] * self.scores.shape[1]

    @property
    def most(self) -> int:
        """Blocks of a row that scores decide."""
        return self.k - self.init_blocks - self.local_blocks

    @property
    def is_group_major(self) -> bool | None:
        """Whether rows of a group are evenly spaced, one group after another; None: neither."""
        (tokens, groups, _), (of_token, of_group, _) = self.scores.shape, self.scores.strides
        if tokens == 1 or groups == 1 or of_token == groups * of_group:
            return False
        return True if of_group == tokens * of_token else None


def workspace_of(arguments: SelectArguments) -> tuple[int, int, int, int]:
    """Tell where lengths, counts and selected blocks lie behind the starts, and where all ends."""
    row = _aligned(4 * arguments.rows)
    return row, 2 * row, 3 * row, 3 * row + _aligned(4 * arguments.rows * arguments.most)


def select_launches(
    arguments: SelectArguments, out: ArrayView, buffer: int, sm_count: int
) -> Sequence[Launch]:
    """Describe how to select, for at least one row."""
    a = arguments
    if not a.most or not a.scores.shape[2]:
        return (_launch(a, out, buffer, finishes=True, has_selected=False),)
    lengths, counts, selected, _ = workspace_of(a)
    _, groups, width = a.scores.shape
    of_token, of_group, of_block = a.scores.strides
    step = of_token if a.is_group_major or groups == 1 else of_group

    def of_rows(at: int) -> ArrayView:
        return a.visible._replace(ptr=buffer + at, shape=(a.rows,), strides=(4,))

    views = TopKViews(
        scores=a.scores._replace(shape=(a.rows, width), strides=(step, of_block)),
        row_lens=of_rows(lengths),
        row_starts=of_rows(0),
        block_table=None,
        row_to_request=None,
        offsets=None,
        out=a.visible._replace(
            ptr=buffer + selected, shape=(a.rows, a.most), strides=(4 * a.most, 4)
        ),
        positions=None,
        values=None,
        counts=of_rows(counts),
    )
    return (
        _launch(a, None, buffer, finishes=False, has_selected=True),
        top_k_launch(views, a.most, 1, False, sm_count),
        _launch(a, out, buffer, finishes=True, has_selected=True),
    )


def _launch(
    a: SelectArguments, out: ArrayView | None, buffer: int, *, finishes: bool, has_selected: bool
) -> Launch:
    tokens, groups, width = a.scores.shape
    lengths, counts, selected, _ = workspace_of(a)
    group_major = bool(a.is_group_major)
    values: dict[str, Any] = {
        "visible": a.visible.ptr,
        "visible_stride": a.visible.strides[0] // 4,
        "starts": buffer,
        "lengths": buffer + lengths,
        "selected": buffer + selected if finishes and has_selected else 0,
        "counts": buffer + counts,
        "out": 0 if out is None else out.ptr,
        "out_stride_token": 0 if out is None else out.strides[0] // 4,
        "out_stride_group": 0 if out is None else out.strides[1] // 4,
        "rows": a.rows,
        "width": width,
        "k": a.k,
        "most": a.most,
        "init_blocks": a.init_blocks,
        "local_blocks": a.local_blocks,
        "minor": tokens if group_major else groups,
        "is_group_major": group_major,
        "by_minor": divisor_of(tokens if group_major else groups),
    }
    return launch_of(SPECS[0], (-(-a.rows // _WARPS), 1, 1), values)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
