# SPDX-License-Identifier: Apache-2.0
"""Attention to rows of 1024 latent columns, on the CPU: its schedule, its launches, its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.mla.choice import decode_schedule_spec, decode_spec
from cumla.launch.mla.mla_attention import attention_spec
from cumla.launch.mla.mla_decode_halves import SPECS as SPECS_OF_HALVES
from cumla.launch.mla.mla_decode_halves import halves_spec
from cumla.launch.mla.mla_decode_wide import SPECS, wide_spec
from cumla.launch.mla.shape import WIDE_ROWS, MLAAttentionKey, MLADecodeKey
from cumla.launch.split.ragged_schedule import SPEC as SCHEDULE
from cumla.launch.split.ragged_schedule import ragged_schedule_launch
from cumla.mla.shape import WIDE
from tests.emulator import emulated_gpu
from tests.gpu.tools import sanitize
from tests.launch.split.ragged_schedule_mirror import schedule
from tests.launch.structs import compile_checks
from tests.mla.masked_cases import Sample


def decode_key(batch: int, q_len: int, heads: int, **changes: Any) -> MLADecodeKey:
    numbers = (1, 64, "bfloat16", q_len > 1, 0, 132)
    return MLADecodeKey(batch, q_len, heads, *numbers, width=WIDE, **changes)


@pytest.mark.parametrize("window", [None, (2000, 0)])
@pytest.mark.parametrize(("heads", "tiles"), [(8, 1), (32, 1), (64, 1), (128, 2)])
def test_tiles(heads: int, tiles: int, window: tuple[int, int] | None) -> None:
    """32 query rows, or 64 of a cluster; of decoding, with windows and without: one schedule."""
    key = decode_key(30, 1, heads, window=window)
    rows = key.by_tiles
    assert rows is not None
    assert key.layout == rows.layout
    cluster = 2 if heads > 32 else 1
    assert (rows.row_tile, rows.row_tiles, rows.cluster) == (32 * cluster, cluster, cluster)
    assert rows.parts == 132 // cluster
    assert rows.row_groups == min(2 * cluster, -(-heads // 16))
    assert rows.piece_row_bytes * cluster == 3 * WIDE[0]
    assert rows.num_places >= 30 * tiles
    made = schedule(np.arange(31), np.full(30, 700), None, rows)
    assert len(made.places) == 30 * tiles
    assert set(made.places[:, 1].tolist()) == {64 * i for i in range(tiles)}
    assert decode_schedule_spec(key) == SCHEDULE
    spec = halves_spec if cluster > 1 else wide_spec
    assert decode_spec(key) == spec("bfloat16", "boxes")
    launch = ragged_schedule_launch(rows, 0, None, None, None)
    assert rows.row_tile in launch.values


@pytest.mark.parametrize(("batch", "least"), [(1, 1), (8, 1), (16, 2), (128, 2)])
def test_few_requests_are_cut_into_single_blocks(batch: int, least: int) -> None:
    rows = decode_key(batch, 1, 64, window=(2000, 0)).by_tiles
    assert rows is not None
    assert rows.min_blocks == least
    lengths = np.arange(batch + 1), np.full(batch, 513), None
    made = schedule(*lengths, rows)
    if batch == 1:  # a tile of nine blocks
        assert len(np.unique(made.bounds[:-1], axis=0)) >= 9


def test_every_form_has_one_kernel() -> None:
    found = set()
    for dtype in ("bfloat16", "float16"):
        for page in (64, 16, 128, 1, 20):
            for heads in (8, 64):
                shape = (3, 9, heads, 1, page, dtype, True, 0, 132)
                found.add(attention_spec(MLAAttentionKey(*shape, width=WIDE)))
    assert found == {*SPECS, *SPECS_OF_HALVES}
    compile_checks(SPECS[0], {"kWideRows": WIDE_ROWS, "kWideLatentTiles * 64": WIDE[0]})


def test_fixed_cuts_have_room() -> None:
    """A batch-invariant request of drafts has twice as many tiles as of 64 rows."""
    plan = cumla.MLAAttentionPlan(
        2, 16, 32, head_dim=sum(WIDE), batch_invariant=True, max_kv_len=9000, like=np.zeros(1)
    )
    key = plan.key
    assert key.max_pieces == 5
    tiles = 2 * -(-8 * 32 // 64)
    assert key.parts >= key.num_places + tiles * (key.max_pieces - 1)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        Sample((1,) * 3, (513, 64, 0), heads=(20, 1), sinks="extreme", width=WIDE),
        Sample((4,) * 3, (1300, 3, 64), heads=(8, 1), window=1100, page_size=128, width=WIDE),
        Sample((2, 9), (300, 70), "list", (24, 2), 8, "float16", window=(100, 3), width=WIDE),
    ],
    ids=lambda sample: sample.name,
)
def test_windows(sample: Sample) -> None:
    with emulated_gpu() as cupy:
        sanitize.attend_latent_masked(cupy, sample)


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    """Cut at fixed positions, whichever tiles of other requests there are."""
    rng = np.random.default_rng(3)
    q, cache = (
        rng.standard_normal(shape).astype(np.float16) for shape in ((5, 3, 1088), (60, 64, 1088))
    )
    table, lens = rng.permutation(60).reshape(2, 30).astype(np.int32), np.int32([1800, 70])
    fixed = {"batch_invariant": True}
    with emulated_gpu() as cupy:
        of = {name: cupy.asarray(x) for name, x in {"q": q, "kv_cache": cache}.items()}
        both = cumla.mla_attention(
            **of,
            block_table=cupy.asarray(table),
            kv_lens=cupy.asarray(lens),
            qo_indptr=cupy.asarray(np.int32([0, 1, 5])),
            **fixed,
        )
        alone = cumla.mla_attention(
            of["q"][:1],
            of["kv_cache"],
            block_table=cupy.asarray(table[:1]),
            kv_lens=cupy.asarray(lens[:1]),
            qo_indptr=cupy.asarray(np.int32([0, 1])),
            **fixed,
        )
        assert np.array_equal(alone.out.get(), both.out.get()[:1])
        assert np.array_equal(alone.lse.get(), both.lse.get()[:1])
