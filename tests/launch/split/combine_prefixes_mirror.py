# SPDX-License-Identifier: Apache-2.0
"""What combine_prefixes computes, in float64."""

from __future__ import annotations

import numpy as np


def combine_prefixes(
    outs: np.ndarray, lses: np.ndarray, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Combine (2, tokens, heads, columns) and (2, tokens, heads), and add a sink for each head."""
    scores = lses.astype(np.float64)
    if sinks is not None:
        sink = np.broadcast_to(sinks.astype(np.float64), lses.shape[1:])
        scores = np.concatenate([scores, sink[None]])
    most = scores.max(axis=0)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(most), most, 0)
    shares = weights[:2] / np.where(total == 0, 1, total)
    return (shares[..., None] * outs.astype(np.float64)).sum(axis=0), lse
