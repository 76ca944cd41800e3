# SPDX-License-Identifier: Apache-2.0
"""The result of every attention operation."""

from __future__ import annotations

from typing import Any, NamedTuple


class AttentionState(NamedTuple):
    """An attention output and its log-sum-exp, with which results over other keys can be merged.

    Attributes
    ----------
    out : array, shape (tokens, heads, head_dim) or (batch, q_len, heads, head_dim)
        Attention output; 0 where nothing is visible.
    lse : array of float32, shape (tokens, heads) or (batch, q_len, heads)
        Natural logarithm of the sum of ``exp(softmax_scale * q.k)`` over the visible tokens; -inf,
        the logarithm of an empty sum, where nothing is visible. With sinks the sum includes those.
    """

    out: Any
    lse: Any
