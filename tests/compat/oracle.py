# SPDX-License-Identifier: Apache-2.0
"""Attention of one request written out in float32, on tensors, for the faces' tests."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NO_WINDOW = (-1, -1)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def offsets_of(lengths: list[int]) -> Any:
    return int32(0, *torch.tensor(lengths).cumsum(0).tolist())


def split(rows: Any, lengths: list[int]) -> list[Any]:
    return list(rows.split([*lengths, len(rows) - sum(lengths)]))[: len(lengths)]


def naive(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Any = None,
    chunk: int = 0,
    mask: Any = None,
    slopes: Any = None,
) -> tuple[Any, Any]:
    """Attention of one request: q (n, h, d), k and v (t, kvh, d); lse is (h, n)."""
    n, heads, columns = q.shape
    k, v = (rows.float().repeat_interleave(heads // rows.shape[1], dim=1) for rows in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.float(), k) * (scale or columns**-0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    left, right = window
    p, j = (torch.arange(count, device=q.device) for count in (n, len(k)))
    p = p[:, None] + len(k) - n
    if slopes is not None:  # ALiBi
        scores = scores - slopes.float()[:, None, None] * (p - j).abs()
    hidden = torch.zeros(n, len(k), dtype=torch.bool, device=q.device)
    if causal:
        right = 0
    if left >= 0:
        hidden |= j < p - left
    if right >= 0:
        hidden |= j > p + right
    if chunk:
        hidden |= j.div(chunk, rounding_mode="floor") != p.div(chunk, rounding_mode="floor")
    if mask is not None:
        hidden |= ~mask
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:  # a key of its own, whose value is 0
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(heads, n, 1)], dim=-1)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnt,thd->nhd", weights, v), scores.logsumexp(-1)


def turned(rows: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rotate rows (n, h, d), and round."""
    half = cos.shape[1]
    c, s = cos[positions].float()[:, None], sin[positions].float()[:, None]
    out = rows.float().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = c * x - s * y, s * x + c * y
    return out.to(rows.dtype)


def assert_state(found: Any, expected: Any) -> None:
    """Compare out, rounded to 16 bits, and lse; the rotated inputs may differ by a rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
