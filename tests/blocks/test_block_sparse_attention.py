# SPDX-License-Identifier: Apache-2.0
"""`cumla.block_sparse_attention` and its plan on the CPU, against a loop over tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.blocks.block_cases import check, make, samples


@pytest.mark.parametrize("sample", samples(168), ids=str)
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
