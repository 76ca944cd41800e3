# SPDX-License-Identifier: Apache-2.0
"""What query tokens see of their requests: the rows that an update writes."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from cumla.reference.blocks.rows import tokens_seen
from tests.emulator import emulated_gpu


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_lens", "first"), [((1, 0, 4, 2), 1), ((0, 0, 0, 0), 0), ((200, 0, 1, 90), 3)], ids=str
)
def test_rows(q_lens: tuple[int, ...], first: int, causal: bool) -> None:
    bounds = (first + np.concatenate([[0], np.cumsum(q_lens)])).astype(np.int32)
    lens, total = np.array([9, 2**31 - 1, -5, 3], np.int32), int(bounds[-1]) + 2
    with emulated_gpu() as cupy:
        nbytes = cumla.BlockSparsePlan.workspace_bytes(4, total, 2, 64, 1, 16, sm_count=132)
        buffer = cupy.empty(nbytes, np.uint8)
        plan = cumla.BlockSparsePlan(4, total, 2, 64, 1, 16, causal=causal, workspace=buffer)
        plan.update(cupy.asarray(lens), qo_indptr=cupy.asarray(bounds))
    found = buffer[: 16 * total].view(np.int32).reshape(-1, 4)
    most = 1 << 20
    seen = np.maximum(np.clip(found[:, 1], 0, most) - found[:, 2], 0)
    want = tokens_seen(total, lens, bounds, most, causal)
    assert [
        (int(r), int(s) if r >= 0 else 0) for r, s in zip(found[:, 0], seen, strict=True)
    ] == want
