# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's selection of the largest scores over `cumla.top_k`."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from cumla.compat._arguments import check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.launch.sparse.top_k import MOST_SORTED
from cumla.sparse.top_k import top_k as select

if TYPE_CHECKING:
    import torch

__all__ = [
    "TopKTieBreak",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
]
__getattr__ = missing_from(__name__, "flashinfer.topk")

_TOP_K = Interface(
    {
        "scores": "input",
        "block_table": "src_page_table",
        "row_to_request": "row_to_batch",
        "out_positions": "out_raw_indices",
        "topk": "k",
        "row_lens": "lengths",
    },
    RuntimeError,
)


class TopKTieBreak(IntEnum):
    """The rule that selects among equal scores."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the k largest scores of each row.

    Differences from FlashInfer: the result is always deterministic. Of equal scores those at the
    smallest indices are selected, and a tie_break of LARGE is refused with `NotImplementedError`.
    Indices ascend unless the values are sorted.
    """
    check_tensors(input=input)
    _check_tie_break(tie_break)
    with _TOP_K():
        if k > input.shape[-1]:
            raise ValueError(
                f"k: needs at most the {input.shape[-1]} columns of input, got {k}; pass "
                f"min(k, input.shape[-1]), or call cumla.top_k, which puts -1 after the last one"
            )
        too_many = sorted and k > MOST_SORTED
        found = select(input, k, values=True, sorted=sorted and not too_many)
    values, indices = found.values, found.indices.long()
    if too_many:
        values, order = values.sort(dim=-1, descending=True, stable=True)
        indices = indices.gather(-1, order)
    return values, indices


topk = top_k


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the k largest scores of each row and translate their indices by a page table.

    Differences from FlashInfer: the order is that of the indices, and ties are as in `top_k`. Rows
    may have any stride. Page numbers below 0 give -1. page_table_row_starts is row_starts by
    default only with pages of one score.
    """
    check_tensors(input=input, src_page_table=src_page_table, row_lens=lengths)
    _check_tie_break(tie_break)
    offsets = page_table_row_starts
    if offsets is None and row_starts is not None:
        if page_size != 1:
            raise ValueError(
                "page_table_row_starts: needed with row_starts and a page_size above 1, got none; "
                "pass the entries of src_page_table where the rows begin"
            )
        offsets = row_starts
    elif offsets is not None and page_size != 1:
        offsets = offsets * page_size
    with _TOP_K():
        found = select(
            input,
            k,
            row_lens=lengths,
            row_starts=row_starts,
            block_table=src_page_table,
            page_size=page_size,
            row_to_request=row_to_batch,
            offsets=offsets,
            out=out,
            out_positions=out_raw_indices,
        )
    return found.indices


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the k largest scores of each row and add the row's offset to their indices.

    Differences from FlashInfer are those of `top_k_page_table_transform`.
    """
    check_tensors(input=input, offsets=offsets, row_lens=lengths)
    _check_tie_break(tie_break)
    with _TOP_K():
        found = select(input, k, row_lens=lengths, row_starts=row_starts, offsets=offsets)
    return found.indices


def _check_tie_break(tie_break: int) -> None:
    if tie_break not in (TopKTieBreak.NONE, TopKTieBreak.SMALL):
        raise NotImplementedError(
            f"tie_break: needs NONE or SMALL, got {tie_break!r}; of equal scores cumla selects "
            f"those at the smallest indices"
        )
