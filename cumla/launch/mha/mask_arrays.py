# SPDX-License-Identifier: Apache-2.0
"""Addresses and form of the arrays of a mask, for the launches of attention."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FORMS", "NO_MASK", "MaskArrays"]

FORMS = ("none", "rows", "tree")


class MaskArrays(NamedTuple):
    """Addresses of the arrays of a mask, 0 for one that is not given; all are contiguous.

    Query row t of a call, counted over all requests, has element t of `start`, `end` and `tree`.
    Key j, from 0 to kv_len - 1, is visible to it if ``start <= j <= end`` or ``j < prefix_len``;
    with a tree from `tree_start` on by its bit alone. Numbers are compared as they are, whatever
    they are: a key below 0 or from kv_len on does not exist, nor does one with a negative number of
    a bit. Causality holds only where `end` is not given.
    """

    start: int = 0  # (total_tokens,) int32: first visible key; 0: key 0
    # (total_tokens,) int32: last visible key, inclusive. 0: kv_len - q_len + i for query i of a
    # causal call, else kv_len - 1.
    end: int = 0
    prefix_len: int = 0  # (batch,) int32: keys before it are visible besides; 0: no such keys
    tree: int = 0  # (total_tokens, words) uint32: bit i of word w is key tree_start + 32 w + i
    # (batch,) int32: the key of bit 0; 0: kv_len - q_len, which may be negative.
    tree_start: int = 0
    words: int = 0  # of a row of `tree`
    form: str = "none"  # of FORMS: "rows" has no tree, "tree" has one, "none" has no array
    batch: int = 0  # requests of `prefix_len` and `tree_start`; 0: neither is given

    @property
    def is_empty(self) -> bool:
        """Return whether there is no mask."""
        return self.form == "none"


NO_MASK = MaskArrays()
