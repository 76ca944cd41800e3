# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_rows.cu: what each query token sees of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.layouts import constant, launch_of
from cumla.launch.slots import indices
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

ROW_BYTES = constant("blocks/block_rows", "sizeof(BlockRow)")
_TOKENS_AT = constant("blocks/block_rows", "__INTADDR__(&((BlockRow*)0)->tokens)")
_THREADS = constant("blocks/block_rows", "kBlockRowThreads")
SPECS = (KernelSpec.of("blocks", "block_rows", "BlockRowsParams", threads=_THREADS),)


class Tokens(NamedTuple):
    """Query tokens of a call."""

    tokens: int
    requests: int
    causal: bool


class Visible(NamedTuple):
    """The destination of the number of blocks that each query token sees."""

    address: int = 0  # 0: nowhere
    most: int = 0  # tokens that the pages of a request hold, in whole blocks
    block_size: int = 1
    open_block: bool = False  # the one after the whole blocks counts, if the pages have it


_NOWHERE = Visible()


def block_rows_launch(
    of: Tokens,
    rows: int,
    qo_indptr: ArrayView | None,
    kv_lens: ArrayView,
    visible: Visible = _NOWHERE,
) -> Launch:
    """Describe how to find the request of each query token; without offsets all have as many.

    `rows` is the address of what is written.
    """
    values = {
        "bounds": indices(qo_indptr),
        "kv_lens": indices(kv_lens),
        "rows": rows,
        "visible": visible.address,
        "total_tokens": of.tokens,
        "batch": of.requests,
        "q_len": of.tokens // max(of.requests, 1) if qo_indptr is None else 0,
        "causal": of.causal,
        "most": visible.most,
        "block_size": visible.block_size,
        "rounding": visible.block_size - (not visible.open_block),
    }
    return launch_of(SPECS[0], (-(-of.tokens // _THREADS), 1, 1), values)


def lengths_in(rows: int, q_len: int) -> tuple[int, int]:
    """Tell where rows, of so many query tokens a request, hold kv_lens, and their stride."""
    return rows + (q_len - 1) * ROW_BYTES + _TOKENS_AT, q_len * ROW_BYTES
