# SPDX-License-Identifier: Apache-2.0
"""Lists of packed rows, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from cumla.launch.sparse.mla_sparse import attend_launches
from tests.emulator import emulated_gpu
from tests.gpu.tools.sanitize import attend_sparse, there, typed
from tests.gpu.tools.sparse_problem import SparseCase, make_sparse
from tests.launch.sparse.keys import arguments_of, key_of, outputs_of, strided
from tests.launch.structs import parameters
from tests.selection import some

BUFFER = 9 << 40


def test_the_parameters_by_name() -> None:
    key = key_of(100, "v32")
    (launch,) = attend_launches(key, BUFFER, arguments_of(key), *outputs_of(key))
    assert launch.grid == (2, key.parts, 1)
    got = parameters(launch)
    wanted = {
        "decode.latent.base": 3 << 40,
        "decode.latent.stride_page": 672,
        "decode.partial_out": BUFFER + key.layout.partial_out,
        "decode.batch": 15,
        "decode.q_len": 3,
        "decode.heads_per_group": 100,
        "decode.row_groups": 4,
        "decode.out_is_float": 1,
        "lists.indices": 5 << 40,
        "lists.indices_stride_batch": 3000,
        "lists.indices_stride_token": 800,
        "lists.block_table": 0,
        "lists.requests": 0,
        "lists.num_pages": 90,
        "lists.page_step": 16,
        "lists.row_step": 1,
        "lists.by_page_size.shift": 4,
    }
    assert {name: got[name] for name in wanted} == wanted


def test_lists_of_positions_by_name() -> None:
    key = key_of(16, "v32")
    table = strided(10, (7, 11), (52, 4), "int32")
    requests = strided(11, (5, 3), (32, 8), "int32")
    arguments = arguments_of(key, block_table=table, row_to_request=requests)
    (launch,) = attend_launches(key, BUFFER, arguments, *outputs_of(key))
    got = parameters(launch)
    wanted = {
        "lists.indices": 5 << 40,
        "lists.block_table": 10 << 40,
        "lists.block_table_stride": 13,
        "lists.requests": 11 << 40,
        "lists.requests_stride_batch": 8,
        "lists.requests_stride_token": 2,
        "lists.num_requests": 7,
        "lists.max_pages": 11,
        "lists.num_pages": 90,
        "lists.page_size": 16,
    }
    assert {name: got[name] for name in wanted} == wanted


# --- results --------------------------------------------------------------------------------------

FEW = (
    SparseCase(batch=1, q_len=2, heads=17, topk=700, scales="powers", lists="mixed"),
    SparseCase(heads=64, topk=130, lists="blocks", lengths="tokens", gaps=True, page_size=53),
    SparseCase(batch=2, heads=72, topk=200, places="rows", sinks="finite", lists="first"),
    SparseCase(batch=4, heads=24, topk=150, scales="wild", lists="mixed", lengths="requests"),
    SparseCase(batch=2, heads=24, topk=150, scales="zero", lists="sorted"),
    SparseCase(heads=16, topk=400, scales="wild", gaps=True, lists="mixed", lengths="tokens"),
    SparseCase(batch=2, q_len=2, heads=5, topk=130, scales="zero", places="rows", lists="blocks"),
)


@pytest.mark.parametrize("case", some(FEW, 3), ids=lambda case: case.name)
def test_attention_to_lists(case: SparseCase) -> None:
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


def test_few_lists_are_cut_by_heads() -> None:
    """Into three tiles, of four pieces each."""
    case = SparseCase(batch=1, heads=40, topk=500, scales="powers", sinks="finite", lists="mixed")
    key = key_of(40, "v32", batch=1, q_len=1, topk=500, sm_count=12)
    assert (key.row_tile, key.parts) == (16, 4)
    with emulated_gpu(12) as cupy:
        attend_sparse(cupy, case)


def test_log_sum_exps_of_single_rows() -> None:
    """They are scores, of which powers of two must take no bits."""
    case = SparseCase(batch=20, heads=17, topk=1, scales="zero")
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scales", ["powers", "any", "wild", "zero"])
@pytest.mark.parametrize("lists", ["random", "same", "absent", "mixed", "blocks"])
@pytest.mark.parametrize("heads", [24, 128])
def test_every_kind_of_scales(scales: str, lists: str, heads: int) -> None:
    case = SparseCase(heads=heads, topk=400, scales=scales, lists=lists, lengths="requests")
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


@pytest.mark.parametrize("heads", some([24, 8], 2))
def test_scores_that_grow_along_a_list(heads: int) -> None:
    """References are raised again and again, by both consumers."""
    case = SparseCase(batch=1, heads=heads, topk=600, scales="powers", steep=20.0)
    problem = make_sparse(np, case)
    rows = problem.seen(rounded=False).keys[problem.named()[0]]
    q = (problem.q_bits[0, 0].astype(np.uint32) << 16).view(np.float32)
    order = (rows @ q).argsort()
    for places in (order, order[::-1]):
        problem.lists["indices"] = problem.lists["indices"][..., places]
        problem.arguments["indices"] = np.ascontiguousarray(problem.lists["indices"])
        with emulated_gpu() as cupy:
            given = {name: there(cupy, array) for name, array in problem.arguments.items()}
            out, lse = cumla.mla_sparse_decode(**given)
        problem.check(typed(out.view(np.uint16).get(), "bfloat16"), lse.get())
