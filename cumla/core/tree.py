# SPDX-License-Identifier: Apache-2.0
"""Bits that say which of a request's last keys a query token sees: those of a tree of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.core.names import arg

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

__all__ = ["MOST_DRAFTS", "MOST_WORDS", "TREE_DTYPES", "WORD", "check_words"]

WORD = 32  # keys of a word
MOST_WORDS = 8  # of a query token's bits
MOST_DRAFTS = MOST_WORDS * WORD
TREE_DTYPES = ("uint32", "int32")


def check_words(name: str, view: ArrayView) -> None:
    """Check the rows of bits of a tree."""
    tokens, words = view.shape
    if not 1 <= words <= MOST_WORDS:
        raise ValueError(
            f"{arg(name)}: needs 1 to {MOST_WORDS} words a row, got shape {view.shape}; a tree "
            f"has at most {MOST_DRAFTS} keys"
        )
    if tokens > 1 and view.strides[0] != 4 * words:
        raise ValueError(
            f"{arg(name)}: needs rows without gaps, got a stride of {view.strides[0]} bytes; make "
            f"a contiguous copy"
        )
