# SPDX-License-Identifier: Apache-2.0
"""Lists of rows of e4m3 caches, of up to 32 heads a thread block, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.launch.sparse.mla_sparse import attend_launches
from tests.emulator import emulated_gpu
from tests.gpu.tools.sanitize import attend_sparse
from tests.gpu.tools.sparse_problem import SparseCase
from tests.launch.sparse.keys import arguments_of, key_of, outputs_of, strided
from tests.launch.structs import parameters
from tests.selection import some

BUFFER = 9 << 40


def told(key: Any, **changes: Any) -> dict[str, Any]:
    """Return what the kernel that attends is told."""
    attend = attend_launches(key, BUFFER, arguments_of(key, **changes), *outputs_of(key))[-1]
    assert attend.grid == (key.row_tiles, key.parts, 1)
    return parameters(attend)


@pytest.mark.parametrize("factor", [0.25, strided(12, (1,), (4,), "float32")])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_parameters_by_name(grouped: bool, factor: Any) -> None:
    """Each part of the cache has rows of its own length."""
    key = key_of(40, "e4m3")
    scales = strided(6, (90, 16, 1, 4), (16 * 32, 32, 32, 4), "float32") if grouped else None
    got = told(key, kv_scales=scales, kv_scale=factor)
    wanted = {
        "decode.latent.base": 3 << 40,
        "decode.latent.stride_page": 576,
        "decode.rope.base": 4 << 40,
        "decode.rope.stride_page": 144,
        "decode.block_table": BUFFER + key.selected,
        "decode.num_pages": 90 * 16,
        "decode.page_size": 1,
        "decode.row_groups": 2,
        "scales.base": 6 << 40 if grouped else 0,
        "scales.stride_page": 32 if grouped else 0,
        "kv_scale": 0 if factor == 0.25 else 12 << 40,
        "kv_scale_value": 0.25 if factor == 0.25 else 0.0,
        "rope_is_fp8": 0,
    }
    assert {name: got[name] for name in wanted} == wanted


# --- results --------------------------------------------------------------------------------------

LISTS: dict[str, Any] = {"lists": "mixed", "lengths": "tokens"}
FEW = (
    SparseCase(batch=2, q_len=2, heads=9, topk=200, form="one", **LISTS),
    SparseCase(heads=40, topk=100, form="16-bit rope", places="rows", page_size=53, **LISTS),
    SparseCase(heads=16, topk=130, form="scales", scales="wild", gaps=True, **LISTS),
    SparseCase(batch=2, heads=33, topk=130, form="scales, e4m3 rope", places="requests", **LISTS),
)


@pytest.mark.parametrize("case", some(FEW, 3), ids=lambda case: case.name)
def test_attention_to_lists(case: SparseCase) -> None:
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["one", "pair", "16-bit rope", "scales"])
@pytest.mark.parametrize("lists", ["sorted", "same", "absent", "first"])
def test_every_form(form: str, lists: str) -> None:
    for heads in (16, 24):
        case = SparseCase(heads=heads, topk=300, form=form, lists=lists, lengths="requests")
        with emulated_gpu() as cupy:
            attend_sparse(cupy, case)
