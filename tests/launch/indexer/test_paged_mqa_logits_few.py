# SPDX-License-Identifier: Apache-2.0
"""Logits of one request on the CPU: which shapes the kernel serves, and results around the turns of
its rings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.indexer.paged_mqa_logits import paged_mqa_logits_spec
from cumla.launch.indexer.paged_mqa_schedule import PagedMQAKey
from tests.emulator import emulated_gpu
from tests.gpu.tools.indexer_problem import Paged, Rows


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "head_dim", "mxfp4", "entry"),
    [
        (1, 1, 64, 128, False, "paged_mqa_logits_few_h64"),
        (1, 1, 32, 128, False, "paged_mqa_logits_few_h32"),
        (1, 2, 8, 128, False, "paged_mqa_logits_few_h32"),
        (1, 2, 64, 128, False, "paged_mqa_logits_h64_d128_n128"),
        (1, 3, 8, 128, False, "paged_mqa_logits_h32_d128_n128"),
        (1, 1, 64, 64, False, "paged_mqa_logits_h64_d64_n64"),
        (1, 1, 64, 128, True, "paged_mqa_logits_h64_d128_n64_mxfp4"),
        (2, 1, 64, 128, False, "paged_mqa_logits_h64_d128_n64"),
    ],
)
def test_one_request_of_few_columns_has_a_kernel(
    batch: int, q_len: int, heads: int, head_dim: int, mxfp4: bool, entry: str
) -> None:
    key = PagedMQAKey(batch, q_len, heads, head_dim, 64, 10, False, 132, mxfp4)
    assert paged_mqa_logits_spec(key).entry == entry


def logits(cupy: Any, problem: Paged, columns: int, *, clean: bool) -> np.ndarray:
    out = Rows(np, problem.q_len, columns, "float32")
    there = cupy.asarray(out.array)
    arrays = [
        tuple(map(cupy.asarray, a)) if isinstance(a, tuple) else cupy.asarray(a)
        for a in problem.arrays
    ]
    cumla.paged_mqa_logits(*arrays, max_kv_len=columns, clean=clean, out=there)
    return np.array(there.get())


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_lengths_around_turns_of_the_rings(page_size: int, heads: int) -> None:
    """Two thread blocks, and three: the same bits. Some lengths fill all slots, and one more."""
    q_len = 1 if heads == 64 else 2
    for i, length in enumerate((0, 1, 64, 129, 1023, 1025, 4200)):
        lengths, clean = np.array([length]), i % 2 == 0
        problem = Paged(
            np,
            1,
            q_len,
            length,
            heads,
            page_size=page_size,
            seed=i,
            lengths=lengths,
            per_row=i == 4,
        )
        found = []
        for count in (2, 3):
            with emulated_gpu(count) as cupy:
                found.append(logits(cupy, problem, length + 5, clean=clean))
        problem.check(found[0], clean=clean)
        np.testing.assert_array_equal(found[0], found[1])
