# SPDX-License-Identifier: Apache-2.0
"""find_prefix_groups on the CPU, against loops over requests and pages."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from tests.emulator import emulated_gpu
from tests.launch.split.find_prefix_groups_mirror import expected_groups
from tests.prefix_cases import detection_cases

CASES = detection_cases()


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    batch, least = CASES[name]
    with emulated_gpu() as cupy:
        tables = [cupy.asarray(array) for array in batch[:3]]
        found = cumla.find_prefix_groups(*tables, page_size=batch.page_size, min_tokens=least)
        group, prefix_len = expected_groups(batch, least)
        assert np.asarray(found.group).tolist() == group
        assert np.asarray(found.prefix_len).tolist() == prefix_len


def test_rows_and_lengths_with_gaps() -> None:
    batch, least = CASES["drafts"]
    with emulated_gpu() as cupy:
        wide = cupy.zeros((len(batch.kv_lens), 99), np.int32)
        table = wide[:, 3 : 3 + batch.block_table.shape[1]]
        table[...] = batch.block_table
        places = [cupy.like(np.repeat(array, 2)[::2]) for array in batch[1:3]]
        found = cumla.find_prefix_groups(table, *places, page_size=16, min_tokens=least)
        assert np.asarray(found.group).tolist() == expected_groups(batch, least)[0]
