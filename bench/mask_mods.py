# SPDX-License-Identifier: Apache-2.0
"""Masks and biases as FlashAttention-4 takes them: functions that CuTe compiles into its kernel.

A mask tells whether query token `q` of request `b` sees key `kv`; a bias changes a score.
Indices are vectors of CuTe of one or two elements, and `aux_tensors` holds arrays.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import utils


@cute.jit
def interval(b: Any, h: Any, q: Any, kv: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """Keys from the first to the last that a query token sees: two arrays (batch, q_len)."""
    first = utils.scalar_to_ssa(aux_tensors[0][b[0], q[0]], cutlass.Int32)
    last = utils.scalar_to_ssa(aux_tensors[1][b[0], q[0]], cutlass.Int32)
    return (kv >= first) & (kv <= last)


@cute.jit
def tree(b: Any, h: Any, q: Any, kv: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """All keys before the drafts, and of those what an array (batch, drafts, drafts) shows."""
    draft = kv[0] - (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    shown = aux_tensors[0][b[0], q[0], cutlass.max(draft, 0)]
    before = utils.scalar_to_ssa(draft, cutlass.Int32) < 0
    return before | (utils.scalar_to_ssa(shown, cutlass.Int32) != 0)


def slopes(heads: int) -> Any:
    """ALiBi of `heads` heads: 2 ** (-8 / heads * (1 + head)) times the distance, by a formula."""
    step = -8.0 / heads

    @cute.jit
    def score_mod(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * step, fastmath=True)
        before = seqlen_info.seqlen_k - seqlen_info.seqlen_q
        return score + slope * (kv_idx - q_idx - before).to(cutlass.Float32)

    return score_mod


@cute.jit
def slopes_of_array(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """ALiBi of any slopes: an array (heads,) float32."""
    slope = utils.scalar_to_ssa(aux_tensors[0][h[0]], cutlass.Float32)
    before = seqlen_info.seqlen_k - seqlen_info.seqlen_q
    return score + slope * (kv_idx - q_idx - before).to(cutlass.Float32)


@cute.jit
def table(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """Elements by the distance: an array (batch, q_len, heads, distances); beyond it none."""
    away = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
    found = cutlass.Float32(0.0)
    if away >= 0 and away < aux_tensors[0].shape[3]:
        found = aux_tensors[0][b[0], q_idx[0], h[0], away].to(cutlass.Float32)
    return score + utils.scalar_to_ssa(found, cutlass.Float32)


@cute.jit
def table_of_any(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """The same, with a load for each score, whatever its distance."""
    away = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
    size = aux_tensors[0].shape[3]
    held = cutlass.max(cutlass.min(away, size - 1), 0)
    found = aux_tensors[0][b[0], q_idx[0], h[0], held].to(cutlass.Float32)
    found = found if away == held else cutlass.Float32(0.0)
    return score + utils.scalar_to_ssa(found, cutlass.Float32)
