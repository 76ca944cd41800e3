# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over FP8 caches in NumPy, as coarse as an honest kernel's may be: what errors it has.

Scores and sums in float32, a group of columns after the other, each times its scale. Weights are
relative to a reference that lags behind the maximum; times the scale of a group they are rounded to
bfloat16, and where there is one scale for all of the cache to float16, without it. What is summed
up is divided by the sum of the weights before they are rounded; one rounding of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.gpu.tools.emulation import Drop
from tests.gpu.tools.fp8_problem import FACTOR, Fp8Problem, e4m3_numbers
from tests.gpu.tools.problem import HEAD_DIM, VALUE_DIM

BLOCK = 64
LOWEST = np.float32(-3e38)
BELOW, SLACK = np.float32(7), np.float32(15)  # of a new reference below the maximum, at most above
SCALE_LOG2 = np.float32(HEAD_DIM**-0.5 * np.log2(np.e))
LN_2 = np.float32(np.log(2))

Weights = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


def rounded(weights: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Weights (rows, tokens) for each group of columns: (4, rows, tokens)."""
    if scales is None:
        return np.broadcast_to(weights.astype(np.float16).astype(np.float32), (4, *weights.shape))
    scaled = weights * scales.T[:, None]
    values: np.ndarray = scaled.astype(ml_dtypes.bfloat16).astype(np.float32)
    return values


def attend(
    problem: Fp8Problem, drop: Drop | None = None, weigh: Weights = rounded
) -> tuple[np.ndarray, np.ndarray]:
    """Results of a problem of mla_decode: bfloat16 (batch, q_len, heads, 512) and float32.

    Parameters
    ----------
    problem : Fp8Problem
        Of NumPy arrays.
    drop : Drop, optional
        A token that one query row leaves out.
    weigh : callable
        How weights and scales become the factors of V.
    """
    case = problem.case
    out = np.zeros((case.batch, case.q_len, case.heads, VALUE_DIM), ml_dtypes.bfloat16)
    lse = np.full((case.batch, case.q_len, case.heads), -np.inf, np.float32)
    group = case.heads // case.kv_heads
    numbers = e4m3_numbers().astype(np.float32)
    q = problem.q_bits.view(ml_dtypes.bfloat16).astype(np.float32)
    for b, length in enumerate(problem.lengths.tolist()):
        own = slice(int(problem.begins[b]), int(problem.begins[b]) + length)
        for kv_head in range(case.kv_heads if length else 0):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            values = numbers[problem.latent[own, kv_head]]
            scales = None if problem.scales is None else problem.scales[own, kv_head]
            scores = _scores(problem, q[b, :, heads], values, scales, own, kv_head)
            if drop and drop.request == b and drop.head // group == kv_head:
                scores[drop.query, drop.head % group, drop.token] = -np.inf
            o, s = _sum_up(scores.reshape(-1, length), values, scales, weigh)
            out[b, :, heads] = o.reshape(case.q_len, group, VALUE_DIM).astype(out.dtype)
            lse[b, :, heads] = s.reshape(case.q_len, group)
    return out, lse


def _scores(
    problem: Fp8Problem,
    q: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray | None,
    own: slice,
    kv_head: int,
) -> np.ndarray:
    """Masked scores in base 2, (q_len, heads, length)."""
    case, rope = problem.case, problem.rope[own, kv_head]
    if case.has_e4m3_rope:
        keys, factor = e4m3_numbers().astype(np.float32)[rope], np.float32(FACTOR)
    else:
        keys = rope.view(ml_dtypes.bfloat16).astype(np.float32)
        factor = np.float32(1)
    scores: np.ndarray = (q[..., VALUE_DIM:] @ keys.T) * (SCALE_LOG2 * factor)
    if scales is None:
        scores += (q[..., :VALUE_DIM] @ values.T) * (SCALE_LOG2 * np.float32(FACTOR))
    else:
        for g, columns in enumerate(np.split(np.arange(VALUE_DIM), 4)):
            scores += (q[..., columns] @ values[:, columns].T) * (SCALE_LOG2 * scales[:, g])
    if case.causal:
        limits = len(values) - (case.q_len - 1) + np.arange(case.q_len)
        hidden = np.arange(len(values)) >= limits[:, None, None]
        scores = np.where(hidden, np.float32(-np.inf), scores)
    return scores


def _sum_up(
    scores: np.ndarray, values: np.ndarray, scales: np.ndarray | None, weigh: Weights
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised output and natural log-sum-exp of rows, a block of tokens after the other."""
    rows = len(scores)
    output, total = np.zeros((4, rows, VALUE_DIM // 4), np.float32), np.zeros(rows, np.float32)
    reference = np.full(rows, LOWEST)
    for begin in range(0, scores.shape[1], BLOCK):
        some = slice(begin, begin + BLOCK)
        highest = scores[:, some].max(axis=1)
        new = np.where(highest > reference + SLACK, highest - BELOW, reference)
        shrink = np.exp2(reference - new)
        weights = np.exp2(scores[:, some] - new[:, None])
        factors = weigh(weights, None if scales is None else scales[some])
        columns = values[some].reshape(-1, 4, VALUE_DIM // 4).transpose(1, 0, 2)
        output = output * shrink[:, None] + factors @ columns
        total = total * shrink + weights.sum(axis=1)
        reference = new
    seen = total > 0
    safe = np.where(seen, total, np.float32(1))
    whole = output.transpose(1, 0, 2).reshape(rows, VALUE_DIM) / safe[:, None]
    if scales is None:
        whole = whole * np.float32(FACTOR)
    lse = np.where(seen, (reference + np.log2(safe)) * LN_2, -np.float32(np.inf))
    return np.where(seen[:, None], whole, np.float32(0)), lse


def checked(problem: Fp8Problem, **options: Any) -> dict[str, float]:
    """The figures of an emulated result."""
    return problem.check(*attend(problem, **options))
