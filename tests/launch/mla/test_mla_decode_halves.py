# SPDX-License-Identifier: Apache-2.0
"""Clusters that divide rows of 1024 latent columns, on the CPU: their schedule and results."""

from __future__ import annotations

import pytest

from cumla.launch.mla.shape import MLAAttentionKey
from cumla.mla.shape import WIDE
from tests.emulator import emulated_gpu
from tests.gpu.tools import sanitize
from tests.mla.masked_cases import Sample


def test_a_batch_invariant_request_has_one_kernel() -> None:
    """Whatever else is in the batch: the heads decide."""
    for heads, cluster in ((32, 1), (64, 2)):
        for batch, tokens in ((1, 1), (1, 30), (200, 300)):
            shape = (batch, tokens, heads, 1, 64, "bfloat16", True, 0, 132)
            key = MLAAttentionKey(*shape, batch_invariant=True, width=WIDE)
            assert key.cluster == cluster


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        Sample((1,) * 35, (200, 64, 0, 5, 66) * 7, heads=(64, 1), window=99, width=WIDE),
        Sample((4,) * 2, (600, 3), heads=(40, 1), page_size=128, sinks="extreme", width=WIDE),
        Sample((3,), (1700,), heads=(16, 1), window=1200, sinks="normal", width=WIDE),
        Sample((2, 9), (300, 70), "list", (80, 2), 20, "float16", window=(100, 3), width=WIDE),
        Sample((3, 1), (700, 70), "table", (40, 1), 1, form="pair", sinks="normal", width=WIDE),
        Sample((1,) * 90, (200, 300, 5) * 30, heads=(48, 1), page_size=32, width=WIDE),
    ],
    ids=lambda sample: sample.name[:60],
)
def test_windows(sample: Sample) -> None:
    with emulated_gpu() as cupy:
        sanitize.attend_latent_masked(cupy, sample)
