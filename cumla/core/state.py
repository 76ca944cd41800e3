# SPDX-License-Identifier: Apache-2.0
"""The result of attention, whole or in part."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["AttentionState"]


class AttentionState(NamedTuple):
    """Attention over some tokens, and how much weight they have.

    Attributes
    ----------
    out : array
        The weighted mean of the values; 0 where nothing is visible.
    lse : array
        float32: natural logarithm of the sum of ``exp(softmax_scale * q.k)``; -inf where nothing is
        visible.
    """

    out: Any
    lse: Any
