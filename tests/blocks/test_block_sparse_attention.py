# SPDX-License-Identifier: Apache-2.0
"""`cumla.block_sparse_attention` and its plan on the CPU, against a loop over tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.blocks.block_cases import check, make, samples
from tests.selection import some


@pytest.mark.parametrize("sample", some(samples(168), 3), ids=str)
def test_grid(sample: Any) -> None:
    problem = make(sample)
    check(problem, cumla.block_sparse_attention(**problem.given), sample.dtype)


@pytest.mark.parametrize("sample", samples(168)[::7], ids=str)
def test_plans(sample: Any) -> None:
    """The bits of a call."""
    problem = make(sample)
    given = dict(problem.given)
    expected = [np.array(array) for array in cumla.block_sparse_attention(**given)]
    names = ("q", "k", "v", "block_indices", "block_size", "qo_indptr", "kv_layout", "causal")
    fixed = ("block_size", "causal", "batch_invariant", "kv_lens", "qo_indptr")
    plan = cumla.BlockSparsePlan.from_arrays(
        **{n: given[n] for n in (*names, "batch_invariant") if n in given}
    )
    plan.update(**problem.lengths)
    got = plan.run(**{n: value for n, value in given.items() if n not in fixed})
    for one, other in zip(got, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "sample", samples(6, cache="e4m3", scales="rows", columns=(64, 64)), ids=str
)
def test_factors_of_rows(sample: Any) -> None:
    """Each kv head and row of an e4m3 cache has its own; those that no query sees are NaN."""
    problem = make(sample)
    check(problem, cumla.block_sparse_attention(**problem.given), sample.dtype)


def test_tables_of_more_tokens_than_the_kernels_number_are_refused() -> None:
    """They look at 65,536 blocks at once, and would go beyond the largest number."""
    k = np.zeros((1, 65536, 1, 64), np.float16)
    q, lens = np.zeros((1, 1, 4, 64), np.float16), np.array([5], np.int32)
    table = np.zeros((1, 32768), np.int32)
    message = (
        r"^block_table: needs max_pages \* page_size up to 2147418112, got 32768 pages of 65536"
    )
    with pytest.raises(ValueError, match=message):
        cumla.block_sparse_attention(
            q, k, k, np.zeros((1, 1, 1), np.int32), block_size=64, kv_lens=lens, block_table=table
        )
    with pytest.raises(ValueError, match=message):
        cumla.block_scores(q, k[:, :, 0], block_size=64, kv_lens=lens, block_table=table)


@pytest.mark.parametrize("columns", [(272, 272), (512, 512), (256, 512)])
def test_a_buffer_for_columns_that_are_not_e4m3(columns: tuple[int, int]) -> None:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "sm_count": 132, "head_dim_v": columns[1]}
    assert cumla.BlockSparsePlan.workspace_bytes(1, 1, 4, columns[0], 16, 64, **sizes) > 0
