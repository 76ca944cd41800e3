# SPDX-License-Identifier: Apache-2.0
"""prefix_requests on the CPU, against its mirror."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.emulator import emulated_gpu
from tests.launch.split.prefix_requests_mirror import prefix_requests
from tests.prefix_cases import LEAST, MOST, Batch, Group, batch_of, detection_cases

CASES = detection_cases()


def compare(batch: Batch, group: Any, prefix_len: Any, causal: bool = True) -> None:
    """Update a plan, and look at the arrays in its buffer."""
    table, kv_lens, qo_indptr, page_size, _ = batch
    total, columns = int(qo_indptr[-1]) + 2, table.shape[1]
    numbers: dict[str, Any] = {"num_kv_heads": 1, "page_size": page_size, "dtype": "float16"}
    with emulated_gpu() as cupy:
        there = [
            cupy.asarray(np.array(a, np.int32)) for a in (kv_lens, qo_indptr, group, prefix_len)
        ]
        more: dict[str, Any] = {"prefix_groups": True, "max_pages": columns, "causal": causal}
        buffer = cupy.asarray(np.full(32 << 20, 0x77, np.uint8))
        plan = cumla.AttentionPlan(len(kv_lens), total, 2, 64, **numbers, **more, workspace=buffer)
        plan.update(there[0], qo_indptr=there[1], groups=tuple(there[2:]))
        expected = prefix_requests(
            *(np.asarray(array) for array in there), total, page_size, columns, total
        )
        layout, memory = plan.key.prefix_layout, np.asarray(buffer)
        for name in expected._fields if causal else ("tokens", "lengths", "pages", "states"):
            want, at = getattr(expected, name), getattr(layout, name)
            got = memory[at : at + want.nbytes].view(np.int32)
            np.testing.assert_array_equal(got, want, name)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("hostile", "more than a window")])
def test_groups_that_are_found(name: str) -> None:
    batch, least = CASES[name]
    found = cumla.find_prefix_groups(*batch[:3], page_size=batch.page_size, min_tokens=least)
    compare(batch, *found)
    compare(batch, *found, causal=False)


def test_numbers_that_mean_nothing() -> None:
    batch, _ = CASES["drafts"]
    rng = np.random.default_rng(0)
    for seed in range(8):
        group = rng.choice([LEAST, -1, 0, 3, MOST], 7)
        prefix_len = rng.choice([LEAST, -1, 0, 1, 15, 16, 17, 64, 100, MOST], 7)
        kv_lens = rng.choice([LEAST, -1, 0, 5, 100, 131, MOST], 7).astype(np.int32)
        compare(batch._replace(kv_lens=kv_lens), group, prefix_len, causal=seed % 2 == 0)


def test_groups_of_more_requests_than_threads() -> None:
    """As callers may make them; `find_prefix_groups` makes none over a multiple of 1,024."""
    batch = batch_of([Group(1000, 32), Group(700, 48), Group(600, 64)], 16)
    rng = np.random.default_rng(1)
    for group in (
        np.zeros(2300, np.int32),
        np.repeat([5, 3, 5, 7, 8], [1, 1022, 2, 1100, 175]).astype(np.int32),
        np.repeat(np.arange(1150) % 3, 2).astype(np.int32),
    ):
        compare(batch, group, rng.choice([16, 32, 48, 64, 0], 2300, p=[0.1, 0.4, 0.2, 0.29, 0.01]))
        compare(batch, group, np.full(2300, 32))
