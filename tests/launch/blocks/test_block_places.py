# SPDX-License-Identifier: Apache-2.0
"""Row tiles of query tokens against the oracle, emulated: ragged prompts, gaps, many tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.emulator import emulated_gpu
from tests.launch.blocks.block_places_mirror import parts, places

CASES = (
    ([0, 40, 40, 99, 100], 100),
    ([3, 12, 20, 21, 30], 64),  # rows before and after
    ([0, 1500, 1501, 2200], 2300),  # more than the CTA has threads
    ([50, 10, 70, 60], 80),  # offsets in no order
)


@pytest.mark.parametrize("cache", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize(("bounds", "tokens"), CASES, ids=str)
def test_each_token_has_a_tile(bounds: list[int], tokens: int, cache: str) -> None:
    batch = len(bounds) - 1
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_dim_v": 128}
    with emulated_gpu(2) as cupy:
        numbers = batch, tokens, 16, 192, 2, 64
        nbytes = cumla.BlockSparsePlan.workspace_bytes(*numbers, **sizes, sm_count=2)
        sizes |= {"dtype": "float16", "cache_dtype": cache}
        plan = cumla.BlockSparsePlan(*numbers, **sizes, workspace=cupy.empty(nbytes, np.uint8))
        lens, offsets = np.full(batch, 5000, np.int32), np.array(bounds, np.int32)
        plan.update(cupy.asarray(lens), qo_indptr=cupy.asarray(offsets))
        buffer = np.asarray(plan._memory.owner)
    key, tile = plan.key, plan.key.tile
    rows = buffer[key.rows_at(0) : key.rows_at(0) + 16 * tokens].view(np.int32).reshape(-1, 4)
    wanted = places(rows[:, 0].tolist(), tile.tile_tokens)
    assert sum(count for _, count in wanted) == tokens
    at = key.schedule_at(0)
    count = int(buffer[tile.count_at(at) : tile.count_at(at) + 4].view(np.int32)[0])
    assert count == len(wanted) <= tile.num_places
    begin, ends, _ = tile.layout.schedule_at(at)
    found = buffer[begin : begin + 32 * count].view(np.int32).reshape(-1, 8)
    assert [(begin, n) for n, begin in found[:, 2:4].tolist()] == wanted
    seen = np.maximum(rows[:, 1] - rows[:, 2], 0) * (rows[:, 0] >= 0)
    assert found[:, 0].tolist() == [seen[begin + n - 1] for begin, n in wanted]
    ends_of = buffer[ends : ends + 48 * tile.parts].view(np.int32).reshape(-1, 12)[:, 4]
    assert ends_of.tolist() == parts(count, tile.parts)
