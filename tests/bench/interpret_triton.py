# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported:
prints the worst error of a row, relative to its size, for each case. In float16: the interpreter
multiplies bfloat16 numbers as if their bits were integers."""

from __future__ import annotations

import numpy as np
import torch

from bench import triton_decode
from cumla import reference

CASES: tuple[tuple[int, int, list[int], int], ...] = (
    (1, 3, [70, 1, 300], 1),  # one share
    (1, 3, [70, 1, 300], 6),  # two, of which a short request leaves one empty
    (2, 9, [260, 1], 4),  # rows of two tokens in one tile of 64; the first sees nothing in the end
)
_SCALE = 0.3  # scores of normal(0, 7): the largest may stand in any share


def worst_error(q_len: int, heads: int, lengths: list[int], sm_count: int) -> float:
    rng, dtype = np.random.default_rng(5), np.float16
    batch, width = len(lengths), 5
    q = rng.normal(size=(batch, q_len, heads, 576)).astype(dtype)
    kv = rng.normal(size=(batch * width, 64, 1, 576)).astype(dtype)
    table = rng.permutation(batch * width).astype(np.int32).reshape(batch, width)
    seqlens = np.array(lengths, np.int32)
    for request, length in enumerate(lengths):
        table[request, -(-length // 64) :] = 1 << 20  # no page
    out = np.full((batch, q_len, heads, 512), np.nan, dtype)
    decode = triton_decode.prepare(
        *(torch.from_numpy(array) for array in (q, kv, table, seqlens, out)),
        softmax_scale=_SCALE,
        longest=max(lengths),
        sm_count=sm_count,
    )
    decode()
    wanted = np.empty(out.shape, np.float32)
    reference.mla_decode(q, kv, table, seqlens, softmax_scale=_SCALE, out=wanted)
    sizes = np.linalg.norm(wanted, axis=-1)
    errors = np.linalg.norm(out.astype(np.float64) - wanted, axis=-1)
    return float((errors / np.where(sizes > 0, sizes, 1.0)).max())


if __name__ == "__main__":
    for case in CASES:
        print(worst_error(*case))
