# SPDX-License-Identifier: Apache-2.0
"""Attention with shared prefixes on the CPU: kernels as they are, a call and a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.emulator import emulated_gpu
from tests.mha.attention_cases import ROUNDING
from tests.prefix_cases import check, make, samples

SMALL = [s for s in samples(200) if max(s.columns) <= 64 and s.dtype != "bfloat16"]


@pytest.mark.parametrize("sample", SMALL[:8], ids=lambda s: str(s.seed))
def test_call_and_plan(sample: Any) -> None:
    problem, options = make(sample)
    batch = problem.batch
    with emulated_gpu() as cupy:
        given = {name: cupy.like(value) for name, value in problem.given.items()}
        there = {name: cupy.like(value) for name, value in options.items()}
        tables = [given[name] for name in ("block_table", "kv_lens", "qo_indptr")]
        groups = cumla.find_prefix_groups(*tables, page_size=batch.page_size, min_tokens=64)
        got = cumla.attention(**given, groups=groups, **there)
        check(problem, got, ROUNDING[sample.dtype], **options)
        rest = {n: given[n] for n in ("q", "k", "v", "block_table")}
        arrays = {n: given[n] for n in ("q", "k", "v", "qo_indptr")}
        more = {"prefix_groups": True, "max_pages": batch.block_table.shape[1]}
        causal = options.pop("causal")
        plan = cumla.AttentionPlan.from_arrays(**arrays, **more, causal=causal)
        plan.update(given["kv_lens"], qo_indptr=given["qo_indptr"], groups=groups)
        there.pop("causal")
        again = plan.run(**rest, **there)
        for one, other in zip(again, got, strict=True):
            rows = slice(0, problem.tokens)
            assert np.asarray(one[rows]).tobytes() == np.asarray(other[rows]).tobytes()
