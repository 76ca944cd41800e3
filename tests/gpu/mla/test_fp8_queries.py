# SPDX-License-Identifier: Apache-2.0
"""e4m3 queries over e4m3 caches, against float64 over the numbers that both stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.mla.test_fp8_decode import CapturedRun, arrays_of, attend_and_check, same_bits
from tests.gpu.tools.fp8_problem import (
    E4M3_LSE,
    Fp8Case,
    check_batch_invariance,
    covering_sample,
    e4m3_numbers,
    make_fp8,
    run,
)

KERNELS = ("mla_decode_fp8", "mla_decode_fp8_64", "mla_decode_fp8_products")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
WHOLE = ("one", "bytes", "pair", "pair of bytes")
every_operation = pytest.mark.parametrize("operation", ["decode", "table", "list"])
both_products = pytest.mark.parametrize("fp8_products", [False, True])


def grid() -> list[Fp8Case]:
    """The covering sample of FP8 caches, of forms that are e4m3 throughout.

    Every second case has whole tiles of heads, and half of these products in e4m3.
    """
    cases = []
    for number, case in enumerate(covering_sample()):
        changes: dict[str, Any] = {"form": WHOLE[number % 4], "fp8_query": True}
        if number % 2:
            heads = (64, 128, 192)[number % 3] * case.kv_heads
            changes |= {"heads": heads, "batch": min(case.batch, 16)}
            changes["fp8_products"] = number % 4 == 1
        cases.append(dataclasses.replace(case, **changes))
    return cases


@pytest.mark.parametrize("case", grid(), ids=lambda case: case.name)
def test_grid(case: Fp8Case, record_figures: Report) -> None:
    record_figures(attend_and_check(make_fp8(cp, case), case.outputs))


@pytest.mark.parametrize(("heads", "fp8_products"), [(16, False), (64, False), (128, True)])
@every_operation
def test_split_requests_and_every_tail(
    operation: str, heads: int, fp8_products: bool, record_figures: Report
) -> None:
    shape: dict[str, Any] = {"heads": heads, "fp8_products": fp8_products, "fp8_query": True}
    for lengths in ([20_000, 3001, 5], [100_003], [1, 63, 64, 65, 127, 129, 191, 257] * 3):
        for page_size in (1, 48, 64):
            case = Fp8Case(
                batch=len(lengths), form="one", operation=operation, page_size=page_size, **shape
            )
            record_figures(attend_and_check(make_fp8(cp, case, np.array(lengths))))


@pytest.mark.parametrize("heads", [8, 24, 64])
@both_products
@every_operation
def test_a_captured_plan(operation: str, fp8_products: bool, heads: int) -> None:
    """A graph of update and run, with lengths and factors that change, has the bits of calls."""
    options: dict[str, Any] = {"fp8_products": fp8_products, "fp8_query": True}
    case = Fp8Case(
        batch=4, heads=heads, form="one", operation=operation, kv_scale="array", **options
    )
    problem = make_fp8(cp, case)
    plan = problem.plan()
    run(problem, plan)
    captured = CapturedRun(problem, plan)
    before = None
    for lengths, factor in (([300, 200, 64, 1], 0.5), ([0, 300, 299, 5], 3.7)):
        problem.kv_lens[...] = cp.asarray(np.array(lengths, np.int32))
        problem.inputs["q_scale"].fill(case.query_factor * factor)
        got = arrays_of(captured.replay())
        assert same_bits(got, arrays_of(run(problem)))
        assert before is None or not same_bits(got, before)
        before = tuple(array.copy() for array in got)


@pytest.mark.parametrize(("heads", "fp8_products"), [(16, False), (64, False), (128, True)])
def test_batch_invariant(heads: int, fp8_products: bool, record_figures: Report) -> None:
    case = Fp8Case(heads=heads, form="one", fp8_products=fp8_products, fp8_query=True)
    record_figures(check_batch_invariance(cp, case))


@both_products
def test_every_e4m3_number_keeps_its_value(fp8_products: bool) -> None:
    """Queries with one column each, against one cached row: scores are products of two numbers."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    q = np.zeros((len(codes), 1, 64, 576), np.uint8)
    q[:, 0, :, 3] = codes[:, None]
    cache = np.zeros((1, 64, 1, 576), np.uint8)
    cache[0, 0, 0, 3] = 0x38  # 1
    table, lengths = np.zeros((len(codes), 1), np.int32), np.ones(len(codes), np.int32)
    options = {"softmax_scale": 1.0, "q_scale": 0.25, "kv_scale": 0.5, "fp8_products": fp8_products}
    _, lse = cumla.mla_decode(*map(cp.asarray, (q, cache, table, lengths)), **options)
    error = np.abs(lse.get()[:, 0, 5] - e4m3_numbers()[codes.astype(np.int32)] / 8)
    assert error.max() <= (E4M3_LSE if fp8_products else 1e-5)
