# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant requests of which one thread block has all pieces: when, and with which bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import int32
from tests.emulator import emulated_gpu
from tests.gpu.tools.parts import PART, invariant_parts_table
from tests.launch.mha.test_attention import bits

HEADS = {"one tile": 64, "two tiles": 128}
LENGTHS = {
    "equal": [4096] * 5,
    "short": [70, 0, 2048, 1],
    "one of many pieces": [40_000, *[4096] * 20],
    "of unlike lengths": list(range(0, 20_000, 700)),
    "hostile": [-5, 2**31 - 1, 5000, -(2**31), 4096],
}


def parts_of(plan: cumla.MLADecodePlan, buffer: Any) -> np.ndarray:
    layout, key = plan.key.layout, plan.key
    host = np.asarray(buffer)[layout.parts : layout.parts + key.parts * PART.itemsize]
    return host.view(PART)


@pytest.mark.parametrize("heads", [16, *HEADS.values()])
@pytest.mark.parametrize("processors", [6, 132])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_schedule_equals_its_mirror(name: str, processors: int, heads: int) -> None:
    lens = np.array(LENGTHS[name], np.int32)
    shape: tuple[Any, ...] = len(lens), 1, heads
    options = {"batch_invariant": True, "max_kv_len": 40_000}
    with emulated_gpu(processors) as cupy:
        size = cumla.MLADecodePlan.workspace_bytes(*shape, **options, sm_count=processors)
        buffer = cupy.asarray(np.full(size, 0x77, np.uint8))
        plan = cumla.MLADecodePlan(*shape, **options, workspace=buffer)
        plan.update(cupy.asarray(lens))
        found = parts_of(plan, buffer)
    key = plan.key
    rule = {"most_pieces": key.most_pieces, "at_once": processors // key.tiles}
    wanted = invariant_parts_table(lens, key.max_blocks, key.row_groups, key.tiles, **rule)
    for field in wanted.dtype.names or ():
        np.testing.assert_array_equal(found[field], wanted[field], err_msg=field)


def attend(lens: list[int], heads: int, processors: int, **more: Any) -> tuple[Any, int]:
    """The bits of a call, and how many requests have one part for all their pieces."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((len(lens), 1, heads, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((50, 64, 576)).astype(ml_dtypes.bfloat16)
    table = rng.integers(0, 50, (len(lens), -(-max(lens) // 64))).astype(np.int32)
    with emulated_gpu(processors) as cupy:
        there = [cupy.asarray(array) for array in (q, cache)]
        options = {"batch_invariant": True, "max_kv_len": max(lens)}
        shape = len(lens), 1, heads
        size = cumla.MLADecodePlan.workspace_bytes(*shape, **options, sm_count=processors)
        buffer = cupy.asarray(np.full(size, 0xFF, np.uint8))
        plan = cumla.MLADecodePlan(*shape, **options, workspace=buffer)
        plan.update(cupy.asarray(int32(*lens)))
        given = {name: cupy.asarray(value) for name, value in more.items()}
        state = plan.run(*there, block_table=cupy.asarray(table), softmax_scale=0.05, **given)
        out, lse = np.asarray(state.out), np.asarray(state.lse)
        whole = int((parts_of(plan, buffer)["piece_blocks"] > 0).sum())
    exact = cumla.reference.mla_decode(q, cache, table, int32(*lens), softmax_scale=0.05, **more)
    np.testing.assert_allclose(out.astype(np.float32), exact.out.astype(np.float32), atol=2e-2)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-3)
    return bits((out, lse)), whole


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
def test_bits_do_not_depend_on_who_has_the_pieces(heads: int, has_sinks: bool) -> None:
    sinks = {"sinks": np.linspace(-1, 2, heads, dtype=np.float32)} if has_sinks else {}
    lens, tiles = [4700, 900], -(-heads // 64)
    apart, none = attend(lens, heads, 132 * tiles, **sinks)
    together, one = attend(lens, heads, tiles, **sinks)
    assert (none, one) == (0, 1)
    assert together == apart
