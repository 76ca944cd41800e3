# SPDX-License-Identifier: Apache-2.0
"""Clusters that share the keys of short windows, on the CPU: who has them, and results."""

from __future__ import annotations

import numpy as np
import pytest

from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_decode_wide_few import SPECS, wide_few_spec
from cumla.launch.mla.shape import FEW_KEYS, FEW_ROWS
from cumla.mla.shape import WIDE
from tests.emulator import emulated_gpu
from tests.gpu.tools import sanitize
from tests.launch.mla.test_mla_decode_wide import decode_key
from tests.launch.split.ragged_schedule_mirror import schedule
from tests.launch.structs import compile_checks
from tests.mla.masked_cases import Sample

_BLOCKS = 132  # multiprocessors


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "form", "keys"),
    [
        (1, 1, 64, (8, 8), 513),
        (2, 1, 64, (16, 8), 513),
        (4, 1, 64, (16, 4), 513),
        (16, 1, 64, (16, 2), 513),
        (33, 1, 64, (16, 1), 513),
        (34, 1, 64, (0, 0), 513),
        (1, 4, 64, (16, 4), 513),
        (16, 4, 64, (0, 0), 513),
        (1, 1, 8, (8, 8), 513),
        (128, 1, 8, (8, 1), 513),
        (300, 1, 12, (16, 1), 513),
        (65536, 1, 8, (0, 0), 513),  # more places than an axis of a grid has
        (128, 1, 32, (0, 0), 513),
        (4, 1, 64, (16, 4), FEW_KEYS),
        (16, 1, 64, (0, 0), FEW_KEYS),
        (128, 1, 8, (8, 1), FEW_KEYS),
    ],
)
def test_forms(batch: int, q_len: int, heads: int, form: tuple[int, int], keys: int) -> None:
    """Clusters of four and more take half of the multiprocessors; few rows any number of turns."""
    key = decode_key(batch, q_len, heads, window=(keys - q_len, 0))
    rows = key.by_tiles
    assert rows is not None
    assert rows.few_form == form
    if form == (0, 0):
        return
    tile, pieces = form
    assert decode_spec(key) == wide_few_spec("bfloat16")
    assert (rows.row_tile, rows.row_groups * 8, rows.parts) == (tile, tile, 1)
    made = schedule(np.arange(batch + 1) * q_len, np.full(batch, 700), None, rows)
    assert len(made.places) == rows.place_count <= rows.num_places
    assert set(made.places[:, 1].tolist()) == set(range(0, q_len * heads, tile))
    if pieces > 1:
        share = 2 if pieces > 2 else 1
        assert len(made.places) * pieces * share <= _BLOCKS


@pytest.mark.parametrize("window", [None, (FEW_KEYS, 0), (-1, 0), (512, -1)])
def test_long_windows_have_other_kernels(window: tuple[int, int] | None) -> None:
    rows = decode_key(1, 1, 8, window=window).by_tiles
    assert rows is not None
    assert rows.cluster_pieces == 0
    short = decode_key(1, 1, 8, window=(FEW_KEYS - 1, 0)).by_tiles
    assert short is not None
    assert short.cluster_pieces > 0


def test_constants() -> None:
    compile_checks(SPECS[0], {"kFewRows": FEW_ROWS})


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        Sample((1,) * 3, (513, 64, 0), heads=(64, 1), window=512, sinks="extreme", width=WIDE),
        Sample((4,) * 2, (600, 3), heads=(40, 1), window=0, page_size=128, width=WIDE),
        Sample((3,), (700,), heads=(16, 1), window=512, sinks="normal", width=WIDE),
        Sample(
            (1,) * 2, (700, 70), "decode", (10, 2), 1, "float16", "pair", window=300, width=WIDE
        ),
        Sample((3,) * 2, (130, 9), heads=(5, 1), causal=False, window=(9, 3), width=WIDE),
        Sample((1,) * 10, (99, 513) * 5, heads=(64, 1), window=98, page_size=48, width=WIDE),
        Sample((1,) * 140, (50, 5) * 70, heads=(9, 1), window=48, page_size=16, width=WIDE),
    ],
    ids=lambda sample: sample.name[:60],
)
def test_windows(sample: Sample) -> None:
    with emulated_gpu() as cupy:
        sanitize.attend_latent_masked(cupy, sample)
