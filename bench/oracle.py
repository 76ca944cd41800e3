# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention in float64 on PyTorch, and the distance of a result from it."""

from __future__ import annotations

from typing import Any


def row_error(got: Any, want: Any) -> float:
    """The largest |got - want| / |want| of the rows of the last axis; inf if one is not finite."""
    got, want = got.double(), want.double()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    return float(error.max()) if bool(error.isfinite().all()) else float("inf")


def attend(q: Any, k: Any, v: Any, scale: float, sinks: Any = None) -> Any:
    """Attend over all of `k` (tokens, columns) from `q` (heads, columns); `sinks` (heads,)."""
    scores = (q.double() @ k.double().T) * scale
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        largest = largest.maximum(sinks.double()[:, None])
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double()[:, None] - largest).exp()
    return (weights @ v.double()) / total


def sampled(count: int) -> list[int]:
    """The first, the middle and the last of so many."""
    return sorted({0, count // 2, count - 1})
