# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/select_blocks.cu, and of top_k between two of its launches."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.blocks.choice import RULES, select_threads
from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.source import FLOATS, KernelSpec
from cumla.launch.sparse.top_k import TopKViews, top_k_launch
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = ["SPECS", "SelectArguments", "select_launches", "workspace_of"]

_FILE = "blocks/select_blocks"
_THREADS, _WARPS = (constant(_FILE, name) for name in ("kSelectThreads", "kSelectWarps"))
_AROUND = KernelSpec.of("blocks", "select_blocks", "SelectBlocksParams", threads=_THREADS)
_KEYS = constant(_FILE, "kKeysOfThread")


def _spec(dtype: str, threads: int) -> KernelSpec:
    return KernelSpec.of(
        *("blocks", "select_blocks", "ChooseBlocksParams"),
        *(dtype, threads),
        tags=[dtype, str(_KEYS * threads)],
        threads=threads,
    )


_AT_ONCE = {key: _spec(*key) for key in product(FLOATS, RULES.select_threads)}
SPECS = (_AROUND, *_AT_ONCE.values())
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
        """True if rows follow each other by group, False if by token, None if by neither."""
        (tokens, groups, _), (of_token, of_group, _) = self.scores.shape, self.scores.strides
        if tokens == 1 or groups == 1 or of_token == groups * of_group:
            return False
        return True if of_group == tokens * of_token else None


def workspace_of(arguments: SelectArguments) -> tuple[int, int, int, int]:
    """Tell where lengths, counts and selected blocks lie behind the starts, and where all ends."""
    if select_threads(arguments.scores.shape[2], _KEYS) is not None:
        return 0, 0, 0, 0
    row = _aligned(4 * arguments.rows)
    return row, 2 * row, 3 * row, 3 * row + _aligned(4 * arguments.rows * arguments.most)


def select_launches(
    arguments: SelectArguments, out: ArrayView, buffer: int, sm_count: int
) -> Sequence[Launch]:
    """Describe how to select, for at least one row."""
    a = arguments
    grid, rows = (-(-a.rows // _WARPS), 1, 1), _rows_of(a, out)
    threads = select_threads(a.scores.shape[2], _KEYS)
    if threads is not None:
        scores = strided(a.scores, "scores", "scores_stride_token", "scores_stride_group")
        spec = _AT_ONCE[a.scores.dtype, threads]
        return (launch_of(spec, (a.rows, 1, 1), {"of": rows, **scores}),)
    lengths, counts, selected, _ = workspace_of(a)
    around = {
        "of": rows,
        "starts": buffer,
        "lengths": buffer + lengths,
        "selected": buffer + selected if a.most else 0,
        "counts": buffer + counts,
    }
    after = launch_of(_AROUND, grid, {**around, "is_before": False})
    if not a.most:
        return (after,)
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
        launch_of(_AROUND, grid, {**around, "is_before": True}),
        top_k_launch(views, a.most, 1, False, sm_count),
        after,
    )


def _rows_of(a: SelectArguments, out: ArrayView) -> dict[str, Any]:
    """Name the values of struct RowsOfBlocks."""
    tokens, groups, width = a.scores.shape
    minor = tokens if a.is_group_major else groups
    return {
        "visible": a.visible.ptr,
        "visible_stride": a.visible.strides[0] // 4,
        "out": out.ptr,
        "out_stride_token": out.strides[0] // 4,
        "out_stride_group": out.strides[1] // 4,
        "rows": a.rows,
        "width": width,
        "k": a.k,
        "most": a.most,
        "init_blocks": a.init_blocks,
        "local_blocks": a.local_blocks,
        "minor": minor,
        "is_group_major": bool(a.is_group_major),
        "by_minor": divisor_of(minor),
    }


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
