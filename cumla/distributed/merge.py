# SPDX-License-Identifier: Apache-2.0
"""Merging partial results that ranks have in memory which all of them map."""

from __future__ import annotations

from math import e
from typing import TYPE_CHECKING, Any

from cumla.core.operation import run
from cumla.merge import MERGE, AttentionState, Merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.launch.merge_states import Meeting

__all__ = ["MergeOfRanks"]


class MergeOfRanks(Merge):
    """Merges partial results of at most `MOST_RANKS` ranks, which wait for one another first.

    Each of them merges as many, in the blocks of one launch that holds at most `MOST_BLOCKS`.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.meeting = meeting

    def __call__(self, outs: Sequence[Any], lses: Sequence[Any]) -> AttentionState:
        """Merge what all ranks have written before in the order of their streams."""
        new = dict.fromkeys(("out", "lse", "stream"))
        call = MERGE.sorted({"outs": outs, "lses": lses, "lse_base": e, **new})
        return AttentionState(*run(self, *call))
