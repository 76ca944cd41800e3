# SPDX-License-Identifier: Apache-2.0
"""The schedule of calls with masks has the number of the request at each place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cumla
from cumla.launch.split import ragged_schedule, ragged_schedule_numbered
from tests.emulator import emulated_gpu
from tests.gpu.tools.parts import PART, TILE_PLACE, tile_parts_table, tile_places_table
from tests.launch.split.ragged_schedule_mirror import schedule
from tests.launch.split.ragged_schedule_numbered_mirror import numbers

LENGTHS = {
    "few": ([9000, 100, 0, 3000, 64], [1, 5, 0, 3, 64]),
    "one long": ([6000, *[64] * 40], [1] * 41),
    "hostile": ([-5, 2**31 - 1, -(2**31), 0, 7000], [2, 1, 0, 4, 3]),
}


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_places_have_the_numbers_of_their_requests(name: str, is_list: bool) -> None:
    kv_lens, counts = (np.array(part, np.int32) for part in LENGTHS[name])
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    pages = np.cumsum([0, *(kv_lens.astype(np.int64).clip(0, 9000) // 64 + 1)]).astype(np.int32)
    with emulated_gpu(33) as cupy:
        cache = cupy.asarray(np.zeros((1, 64, 1, 64), bfloat16))
        q = cupy.asarray(np.zeros((int(indptr[-1]), 4, 64), bfloat16))
        lengths: dict[str, Any] = {"kv_lens": kv_lens, "qo_indptr": indptr}
        if is_list:
            lengths["kv_indptr"] = pages
        given = {key: cupy.asarray(array) for key, array in lengths.items()}
        buffer = cupy.asarray(np.full(8 << 20, 0x77, np.uint8))
        plan = cumla.AttentionPlan.from_arrays(
            *(q, cache, cache), qo_indptr=given["qo_indptr"], mask_form="rows", workspace=buffer
        )
        plan.update(**given)
        made = schedule(indptr, kv_lens, pages if is_list else None, plan.key)
        layout = plan.key.layout
        tables = (
            (layout.places, TILE_PLACE, tile_places_table(made)),
            (layout.parts, PART, tile_parts_table(made)),
        )
        for at, kind, table in tables:
            memory = np.asarray(buffer)[at : at + table.nbytes]
            for field in table.dtype.names or ():
                np.testing.assert_array_equal(memory.view(kind)[field], table[field], field)
            if kind == TILE_PLACE:
                last = memory.view(np.int64).reshape(len(table), -1)[:, -1]
                np.testing.assert_array_equal(last, numbers(made, indptr))


def test_which_keys_take_it() -> None:
    for form in (None, "rows", "tree"):
        with emulated_gpu(4) as cupy:
            q, cache = (cupy.asarray(np.zeros((2, 1, n, 64), bfloat16)) for n in (4, 1))
            key = cumla.AttentionPlan.from_arrays(q, cache, cache, mask_form=form).key
        chosen = ragged_schedule.schedule_spec(key)
        assert chosen is (ragged_schedule_numbered.SPEC if form else ragged_schedule.SPEC)
