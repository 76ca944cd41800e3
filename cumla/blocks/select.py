# SPDX-License-Identifier: Apache-2.0
"""The choice of blocks by their scores: :func:`select_blocks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla import reference
from cumla.core.arguments import INT32, Array, bind
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.paged import refuse_value
from cumla.core.spec import Out, Spec, array, integer
from cumla.launch.blocks.select_blocks import SelectArguments, select_launches, workspace_of
from cumla.launch.device import require_hopper
from cumla.launch.sparse.top_k import MOST_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results

__all__ = ["select_blocks"]

_TABLE = {
    "scores": Array("tokens groups width", ("float32", "bfloat16", "float16"), "row"),
    "visible": Array("tokens", INT32, way_out="give each query token its number of blocks"),
}

SELECT_BLOCKS = Spec(
    "select_blocks",
    (
        array("scores"),
        integer("topk", "there is nothing to select"),
        array("visible"),
        integer("init_blocks", "pass 0 for none", 0, 0),
        integer("local_blocks", "pass 0 for none", 0, 0),
        Out("out"),
    ),
    positional=2,
    kernels=("select_blocks", "top_k_"),
    returns=("out",),
)


@SELECT_BLOCKS
def select_blocks(
    scores: Any,
    topk: int,
    *,
    visible: Any,
    init_blocks: int = 0,
    local_blocks: int = 0,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Select topk blocks of each row of scores: forced ones, and those with the largest scores.

    The first init_blocks and the last local_blocks of the first ``visible`` blocks are always
    selected, whatever their scores. The largest scores among the other blocks fill the row. As in
    :func:`cumla.top_k`, the choice is exact and deterministic: ties go to the lowest block, NaN is
    larger than any number, and -0 equals 0. Devices and streams are as in :func:`cumla.attention`;
    arrays on the CPU are computed by :func:`cumla.reference.select_blocks`.

    Parameters
    ----------
    scores : array
        ``(tokens, groups, width)`` float32, bfloat16 or float16, such as the scores of
        :func:`cumla.block_scores`; up to 2 ** 30 columns. Rows contiguous; rows of all groups of
        all tokens evenly spaced, in the order of tokens or, transposed, in that of groups.
    topk : int
        How many blocks to select, forced ones included.
    visible : array
        ``(tokens,)`` int32: the number of blocks that each query token sees,
        ``ceil((position + 1) / block_size)``. Only these can be selected. Clamped to
        ``[0, width]``.
    init_blocks, local_blocks : int
        Forced blocks at the beginning, and at the end of those visible; together at most topk.
    out : array, optional
        ``(tokens, groups, topk)`` int32, rows contiguous, any other strides; written and returned.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The selected blocks, ascending, and -1 after them where fewer than topk are visible: lists
        for :func:`cumla.block_sparse_attention`.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> scores = np.float32([[[5, 1, 2, 2, 0, 9]], [[0, 7, 3, 1, 1, 1]]])
    >>> cumla.select_blocks(scores, 3, visible=np.int32([5, 2]), local_blocks=1)
    array([[[ 0,  2,  4]],
    <BLANKLINE>
           [[ 0,  1, -1]]], dtype=int32)
    """
    return _SELECT_BLOCKS.call(scores, topk, visible, init_blocks, local_blocks, out, stream)


class _SelectBlocks(Operation[SelectArguments, Any]):
    """Selects; its key is the number of multiprocessors, and the bytes of the workspace."""

    trusted = ("visible",)

    def arguments(self, views: Views, options: Any) -> SelectArguments:
        sizes = bind(_TABLE, views, {})
        forced = options.init_blocks + options.local_blocks
        if forced > options.topk:
            raise ValueError(
                f"{arg('topk')}: needs at least the {forced} forced blocks, got {options.topk}; "
                f"force fewer"
            )
        if max(sizes["width"], options.topk) > MOST_COLUMNS:
            raise ValueError(
                f"{arg('scores')}: needs at most {MOST_COLUMNS} columns, and {arg('topk')} as "
                f"well, got {sizes['width']} and {options.topk}; cut the rows"
            )
        scores, visible = views["scores"], views["visible"]
        assert scores is not None
        assert visible is not None
        found = SelectArguments(
            scores, visible, options.topk, options.init_blocks, options.local_blocks
        )
        if 0 not in scores.shape and found.is_group_major is None:
            raise ValueError(
                f"{arg('scores')}: needs rows evenly spaced over tokens and groups, got strides "
                f"{scores.strides} for shape {scores.shape}; make a contiguous copy"
            )
        return found

    def outputs(self, arguments: SelectArguments) -> tuple[Output, ...]:
        shape = (*arguments.scores.shape[:2], arguments.k)
        return (Output("out", shape, INT32, "row"),)

    def key(self, arguments: SelectArguments, device: int) -> tuple[int, int]:
        return require_hopper(device).sm_count, workspace_of(arguments)[-1]

    def workspace_bytes(self, key: tuple[int, int]) -> int:
        return key[1]

    def recipe(
        self,
        key: tuple[int, int],
        arguments: SelectArguments,
        outs: Sequence[ArrayView],
        buffer: int,
    ) -> Sequence[Launchable]:
        if not arguments.rows:
            return ()
        return select_launches(arguments, outs[0], buffer, key[0])

    def check_values(self, host: Host, arguments: SelectArguments) -> None:
        visible, width = host["visible"], arguments.scores.shape[-1]
        need = f"a number of blocks from 0 to {width}"
        wrong = (visible < 0) | (visible > width)
        refuse_value("visible", visible, wrong, need, "the kernels would clamp it")

    def reference(self, host: Host, arguments: SelectArguments) -> Results:
        a = arguments
        given: dict[str, Any] = {**host, "init_blocks": a.init_blocks}
        return (reference.select_blocks(topk=a.k, local_blocks=a.local_blocks, **given),)


_SELECT_BLOCKS = _SelectBlocks(SELECT_BLOCKS)
