# SPDX-License-Identifier: Apache-2.0
"""The kernels' arithmetic in NumPy: which errors an honest result has, and how large they get.

Scores and sums in float32, a running maximum that lags by up to a factor of 2^8, probabilities
rounded to 16 bits: the output is divided by the sum of the rounded ones, the log-sum-exp is that of
the others. Where the schedule cuts a request its pieces are normalised (in float32 here, to 24 bits
in the kernels: 2^-15 more), and are joined in the order of the parts, weighted by powers of 2; one
rounding of the output. The kernel for few rows sums up every second block of a piece apart,
relative to a running maximum of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cumla.launch.mla.shape import MLADecodeKey
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import HEAD_DIM, NUMPY_DTYPES, PAGE_SIZE, VALUE_DIM, Problem
from tests.launch.split.schedule_mirror import schedule

SLACK = np.float32(8)
LOWEST = np.float32(-3e38)
LOG2_E = np.log2(np.e)


class Drop(NamedTuple):
    """A token that one query row leaves out."""

    request: int
    query: int
    head: int
    token: int


def key_of(case: Case, sm_count: int = 132) -> MLADecodeKey:
    """Shape of a case's plan on a GPU with that many multiprocessors."""
    shape = (case.batch, case.q_len, case.heads, case.kv_heads, PAGE_SIZE, case.dtype)
    return MLADecodeKey(*shape, case.causal, device=0, sm_count=sm_count)


def decode(
    problem: Problem, parts: int = 1, drop: Drop | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Results of a NumPy problem as the kernels would give them for that many parts."""
    case = problem.case
    out = np.zeros(problem.out_shape, NUMPY_DTYPES[case.dtype])
    lse = np.full(problem.lse_shape, -np.inf, np.float32)
    group = case.heads // case.kv_heads
    key = key_of(case)
    sums = 2 if key.variant == "swapped" else 1
    made = schedule(problem.lengths, parts, key.row_groups, key.tiles)
    bounds, places = made.bounds, np.argsort(made.order)
    for b, length in enumerate(problem.lengths.tolist()):
        if length == 0:
            continue
        cuts = bounds[(bounds[:, 0] == places[b]) & (bounds[:, 1] > 0), 1].tolist()
        edges = [0, *cuts, -(-length // PAGE_SIZE)]
        for kv_head in range(case.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys = rows_of(problem, b, length, kv_head)
            scores = _scores(problem, b, heads, keys)
            if drop and drop.request == b and drop.head // group == kv_head:
                scores[drop.query, drop.head % group, drop.token] = -np.inf
            flat = scores.reshape(-1, length)
            pieces = [
                _attend(problem, flat, keys, range(*edges[i : i + 2]), sums)
                for i in range(len(edges) - 1)
            ]
            o, s = pieces[0] if len(pieces) == 1 else _join(pieces)
            s = s * np.float32(np.log(2))
            out[b, :, heads] = o.reshape(case.q_len, group, VALUE_DIM).astype(out.dtype)
            lse[b, :, heads] = s.reshape(case.q_len, group)
    return out, lse


def rows_of(problem: Problem, b: int, length: int, kv_head: int) -> np.ndarray:
    """Cached rows of a request, (length, 576) float32."""
    pages = problem.table[b, : -(-length // PAGE_SIZE)]
    bits = problem.kv_bits[pages, :, kv_head].reshape(-1, HEAD_DIM)[:length]
    values: np.ndarray = bits.view(NUMPY_DTYPES[problem.case.dtype]).astype(np.float32)
    return values


def _scores(problem: Problem, b: int, heads: slice, keys: np.ndarray) -> np.ndarray:
    """Masked products (q_len, heads of the group, length), not yet scaled."""
    case = problem.case
    q = np.ascontiguousarray(problem.q_bits[b, :, heads])
    queries = q.view(NUMPY_DTYPES[case.dtype]).astype(np.float32)
    scores: np.ndarray = queries @ keys.T
    if case.causal:
        limits = len(keys) - (case.q_len - 1) + np.arange(case.q_len)
        hidden = np.arange(len(keys)) >= limits[:, None, None]
        scores = np.where(hidden, np.float32(-np.inf), scores)
    return scores


class _Sums(NamedTuple):
    """Of some blocks: output, exponentials and rounded ones, relative to a base-2 maximum."""

    output: np.ndarray
    total: np.ndarray
    rounded_total: np.ndarray
    top: np.ndarray


def _attend(
    problem: Problem, scores: np.ndarray, keys: np.ndarray, blocks: range, sums: int
) -> tuple[np.ndarray, np.ndarray]:
    """Some blocks, in that many sums: normalised output, and log-sum-exp in base 2."""
    each = [_sum_up(problem, scores, keys, blocks[i::sums]) for i in range(sums)]
    top = np.max([s.top for s in each], axis=0)
    factors = [np.exp2(s.top - top) for s in each]
    total = sum(f * s.total for f, s in zip(factors, each, strict=True))
    rounded_total = sum(f * s.rounded_total for f, s in zip(factors, each, strict=True))
    shares = [(f * _inverse(rounded_total))[:, None] for f in factors]
    output = sum(share * s.output for share, s in zip(shares, each, strict=True))
    return output, _base2(top, total)


def _sum_up(problem: Problem, scores: np.ndarray, keys: np.ndarray, blocks: range) -> _Sums:
    scale = HEAD_DIM**-0.5 if problem.softmax_scale is None else problem.softmax_scale
    scale_log2 = np.float32(scale * LOG2_E)
    dtype = NUMPY_DTYPES[problem.case.dtype]
    rows = len(scores)
    output = np.zeros((rows, VALUE_DIM), np.float32)
    total, rounded_total = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    top = np.full(rows, LOWEST)
    for block in blocks:
        some = slice(block * PAGE_SIZE, min((block + 1) * PAGE_SIZE, scores.shape[1]))
        highest = scores[:, some].max(axis=1) * scale_log2
        new_top = np.where(highest > top + SLACK, highest, top)
        shrink = np.exp2(top - new_top)
        # one rounding of product and difference, as a fused multiply-add has it
        exponents = scores[:, some].astype(np.float64) * scale_log2 - new_top[:, None]
        weights = np.exp2(exponents.astype(np.float32))
        rounded = weights.astype(dtype).astype(np.float32)
        total = total * shrink + weights.sum(axis=1)
        rounded_total = rounded_total * shrink + rounded.sum(axis=1)
        output = output * shrink[:, None] + rounded @ keys[some, :VALUE_DIM]
        top = new_top
    return _Sums(output, total, rounded_total, top)


def _inverse(total: np.ndarray) -> np.ndarray:
    inverse: np.ndarray = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    return inverse


def _base2(top: np.ndarray, total: np.ndarray) -> np.ndarray:
    some = total > 0
    lse = np.where(some, top + np.log2(np.where(some, total, 1)), -np.inf)
    return lse.astype(np.float32)


def _join(pieces: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Join normalised float32 pieces by their log-sum-exp."""
    each = np.stack([lse for _, lse in pieces])
    top = each.max(axis=0)
    weights = np.exp2(each - np.where(np.isneginf(top), 0, top)).astype(np.float32)
    output = np.zeros_like(pieces[0][0])
    total = np.zeros_like(top)
    for weight, (part, _) in zip(weights, pieces, strict=True):
        output += weight[:, None] * part
        total += weight
    return output * _inverse(total)[:, None], _base2(top, total)
