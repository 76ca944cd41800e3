# SPDX-License-Identifier: Apache-2.0
"""The ragged schedule's kernel on the CPU writes what its mirror says into a plan's buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import cumla
from tests.emulator import Array, emulated_gpu
from tests.gpu.tools.parts import PART, TILE_PLACE, tile_parts_table, tile_places_table
from tests.launch.split.ragged_schedule_mirror import schedule
from tests.selection import some

LENGTHS = {
    "one": [70_000],
    "as many pieces each": [4096] * 4,
    "few": [9000, 100, 0, 30_000, 64],
    "pieces in which one part is too dear": [60_000, *[64] * 60],
    "as many as parts": [2000] * 33,
    "more than parts": list(range(0, 8000, 60)),
    "hostile": [-5, 2**31 - 1, -(2**31), 0, 70_000],
}


def check(
    key: Any,
    buffer: Array,
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    is_whole: bool | None = None,
) -> None:
    made = schedule(qo_indptr, kv_lens, None, key, is_whole)
    if is_whole:
        buffer, key = buffer[key.beside_at(0) :], key.beside
    layout = key.layout
    for at, kind, table in (
        (layout.places, TILE_PLACE, tile_places_table(made)),
        (layout.parts, PART, tile_parts_table(made)),
    ):
        found = np.asarray(buffer)[at : at + table.nbytes].view(kind)
        for field in table.dtype.names or ():
            np.testing.assert_array_equal(found[field], table[field], err_msg=field)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", some(list(LENGTHS), 3))
def test_the_schedule_equals_its_mirror(name: str, heads: int) -> None:
    kv_lens = np.array(LENGTHS[name], np.int32)
    batch = len(kv_lens)
    with emulated_gpu(33) as cupy:
        for q_len in (1, 5):
            indptr = (q_len * np.arange(batch + 1)).astype(np.int32)
            total = q_len * batch
            size = cumla.MLAAttentionPlan.workspace_bytes(batch, total, heads, sm_count=33)
            buffer = cupy.asarray(np.full(size, 0x77, np.uint8))
            plan = cumla.MLAAttentionPlan.from_arrays(
                cupy.asarray(np.zeros((total, heads, 576), bfloat16)),
                cupy.asarray(np.zeros((1, 64, 1, 576), bfloat16)),
                qo_indptr=cupy.asarray(indptr),
                workspace=buffer,
            )
            plan.update(cupy.asarray(kv_lens), qo_indptr=cupy.asarray(indptr))
            check(plan.key, buffer, indptr, kv_lens)


@pytest.mark.parametrize("name", some(list(LENGTHS), 3))
def test_few_rows(name: str) -> None:
    """The same of attention_decode, whose tiles have eight rows."""
    kv_lens = np.array(LENGTHS[name], np.int32)
    batch = len(kv_lens)
    with emulated_gpu(132) as cupy:
        cache = cupy.asarray(np.zeros((1, 64, 8, 128), float8_e4m3fn))
        q = cupy.asarray(np.zeros((batch, 1, 32, 128), bfloat16))
        buffer = cupy.asarray(np.full(32 << 20, 0x77, np.uint8))
        plan = cumla.AttentionPlan.from_arrays(q, cache, cache, workspace=buffer)
        assert plan.key.choice.takes_few_rows and plan.key.row_tile == 8
        plan.update(kv_lens=cupy.asarray(kv_lens))
        check(plan.key, buffer, np.arange(batch + 1), kv_lens)


@pytest.mark.parametrize("window", [0, 127, 1023, 100_000])
@pytest.mark.parametrize("name", some(list(LENGTHS), 3))
def test_blocks_before_a_window_are_not_dealt_out(name: str, window: int) -> None:
    """With one query a request, and with several; tiles of a mixed batch as well."""
    kv_lens = np.array(LENGTHS[name], np.int32)
    batch = len(kv_lens)
    for q_len, dims in ((1, 256), (9, 128), (300, 64)):
        with emulated_gpu(132) as cupy:
            cache = cupy.asarray(np.zeros((1, 64, 8, dims), bfloat16))
            q = cupy.asarray(np.zeros((batch * q_len, 32, dims), bfloat16))
            indptr = (q_len * np.arange(batch + 1)).astype(np.int32)
            offsets = cupy.asarray(indptr)
            buffer = cupy.asarray(np.full(64 << 20, 0x77, np.uint8))
            plan = cumla.AttentionPlan.from_arrays(
                *(q, cache, cache), qo_indptr=offsets, window=window, workspace=buffer
            )
            plan.update(kv_lens=cupy.asarray(kv_lens), qo_indptr=offsets)
            for is_whole in (False, True) if plan.key.beside else (None,):
                check(plan.key, buffer, indptr, kv_lens, is_whole)


SMALL = {
    "one": [70_000],
    "one, short": [50],
    "one, empty": [0],
    "equal": [4096] * 4,
    "unequal": [9000, 100, 0, 30_000, 64],
    "one is long": [60_000, *[64] * 15],
    "16": list(range(100, 16 * 777, 777)),
    "32": list(range(100, 32 * 777, 777)),
    "33": [2000] * 33,
    "hostile": [-5, 2**31 - 1, -(2**31), 0, 70_000],
}


@pytest.mark.parametrize("window", [None, 127, 1023])
@pytest.mark.parametrize("name", list(SMALL))
def test_a_warp_computes_the_same_schedule(name: str, window: int | None) -> None:
    """Small batches, one query a request but for two: none, and two, or two tiles of them."""
    kv_lens = np.array(SMALL[name], np.int32)
    batch = len(kv_lens)
    for heads, dims, kv_heads, dtype in (
        (16, 256, 8, bfloat16),
        (32, 128, 8, bfloat16),
        (32, 128, 8, float8_e4m3fn),
        (8, 64, 1, bfloat16),
        (64, 64, 1, bfloat16),  # two queries are two row tiles
    ):
        with emulated_gpu(132) as cupy:
            cache = cupy.asarray(np.zeros((1, 64, kv_heads, dims), dtype))
            q = cupy.asarray(np.zeros((batch, heads, dims), bfloat16))
            rows = np.arange(batch + 1)
            rows[batch // 2 + 1 :] -= 1
            rows[-1] = batch
            buffer = cupy.asarray(np.full(64 << 20, 0x77, np.uint8))
            offsets = cupy.asarray(rows.astype(np.int32))
            plan = cumla.AttentionPlan.from_arrays(
                *(q, cache, cache), qo_indptr=offsets, window=window, workspace=buffer
            )
            assert plan.key.has_small_batch == (batch <= min(32, plan.key.parts))
            plan.update(kv_lens=cupy.asarray(kv_lens), qo_indptr=offsets)
            check(plan.key, buffer, rows, kv_lens)
            tickets = np.asarray(buffer)[plan.key.layout.tickets :]
            assert not tickets[: 16 * plan.key.num_tickets].any()


@pytest.mark.parametrize("batch", [1019, 1020])
def test_as_many_whole_tiles_as_threads_are_sorted(batch: int) -> None:
    """Tiles of 192 rows, five of them a chunk's: 1,024 in order of cost, 1,025 as they come."""
    rng = np.random.default_rng(batch)
    q_lens = np.ones(batch + 1, np.int64)
    q_lens[rng.integers(batch)] = 110
    kv_lens = rng.integers(110, 700, batch + 1).astype(np.int32)
    indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    with emulated_gpu(33) as cupy:
        cache = cupy.asarray(np.zeros((1, 64, 1, 64), bfloat16))
        q = cupy.asarray(np.zeros((5 * batch, 8, 64), bfloat16))
        offsets = cupy.asarray(indptr)
        buffer = cupy.asarray(np.full(4 << 20, 0x77, np.uint8))
        plan = cumla.AttentionPlan.from_arrays(
            *(q, cache, cache), qo_indptr=offsets, workspace=buffer
        )
        plan.update(kv_lens=cupy.asarray(kv_lens), qo_indptr=offsets)
        for is_whole in (False, True):
            check(plan.key, buffer, indptr, kv_lens, is_whole)
    order = schedule(indptr, kv_lens, None, plan.key, True).places[:, 0]
    assert len(order) == batch + 5
    assert ((np.diff(order[:1000]) >= -63).all()) == (batch + 5 <= 1024)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("chunks", [{}, {0: 700}, {1: 17, 3: 16, 4: 300}], ids=str)
@pytest.mark.parametrize("name", some(list(LENGTHS), 3))
def test_mixed_batches(name: str, chunks: dict[int, int], window: int | None) -> None:
    """Both schedules, whatever of the queries that a plan has room for is there."""
    kv_lens = np.array(LENGTHS[name], np.int32)
    batch = len(kv_lens)
    q_lens = np.ones(batch, np.int64)
    for request, q_len in chunks.items():
        q_lens[request % batch] = q_len
    indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    batch += 1
    total = max(2000, int(indptr[-1]) + 10, 32 * batch)  # 128 rows a request, for windows
    kv_lens, indptr = np.append(kv_lens, np.int32(0)), np.append(indptr, indptr[-1])
    with emulated_gpu(33) as cupy:
        cache = cupy.asarray(np.zeros((1, 64, 8, 128), bfloat16))
        q = cupy.asarray(np.zeros((total, 32, 128), bfloat16))
        offsets = cupy.asarray(indptr)
        size = cumla.AttentionPlan.workspace_bytes(
            batch, total, 32, 128, num_kv_heads=8, sm_count=33
        )
        buffer = cupy.asarray(np.full(size, 0x77, np.uint8))
        plan = cumla.AttentionPlan.from_arrays(
            *(q, cache, cache), qo_indptr=offsets, window=window, workspace=buffer
        )
        plan.update(kv_lens=cupy.asarray(kv_lens), qo_indptr=offsets)
        for is_whole in (False, True):
            check(plan.key, buffer, indptr, kv_lens, is_whole)
