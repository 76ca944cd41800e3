# SPDX-License-Identifier: Apache-2.0
"""`cumla.top_k` on the CPU, what it refuses, and what it launches. What holds for every operation
is in tests/core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    OPERATIONS,
    Refusal,
    aligned,
    all_of,
    every_other,
    int32,
    numbers,
    refused,
    scores,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.sparse.top_k_cases import expected, scores_of, shaped, values_at

TOP_K = OPERATIONS["top_k"]
FLOATS = "float32 or bfloat16 or float16, got"
REFUSALS = [
    *(
        wrong_type("scores", aligned((3, 40), dtype), f"{FLOATS} {dtype}; convert it first")
        for dtype in ("float64", "int32", "uint8")
    ),
    wrong("scores", aligned((40,), np.float32), "shape (rows, width), got (40,); reshape it"),
    wrong(
        "scores", every_other(aligned((3, 40), np.float32)), "contiguous rows, got a stride of 8"
    ),
    wrong("scores", aligned((3, 40), np.float32, 2), "an address and strides that are multiples"),
    *(
        wrong(name, int32(1, 2), "shape (rows,) with rows 3, got (2,); give each row of scores")
        for name in ("row_lens", "row_starts", "row_to_request", "offsets")
    ),
    wrong_type("row_lens", np.zeros(3, np.int64), "int32, got int64; convert it first"),
    wrong("block_table", int32(1, 2, 3), "shape (requests, max_pages), got (3,); reshape it"),
    Refusal(
        {"row_to_request": None},
        ValueError,
        "block_table: needs a row for each of the 3 rows of scores, got shape (2, 3); pass row_to",
    ),
    Refusal(
        {"block_table": None},
        ValueError,
        "row_to_request: needs block_table, got none; pass the table, or leave it out",
    ),
    Refusal(
        {"block_table": None, "row_to_request": None},
        ValueError,
        "page_size: needs block_table, got none; pass the table, or leave it out",
    ),
    *(wrong(name, 0, "a number from 1, got 0; ") for name in ("topk", "page_size")),
    wrong_type("topk", 2.0, "an int, got float 2.0; convert it"),
    wrong("topk", (1 << 30) + 1, "at most 1073741824 columns, got 1073741825; cut the rows"),
    wrong("tie_break", "highest", "\"lowest\", got 'highest'; there is no other order"),
    wrong("out_positions", aligned((3, 9), np.int32), "shape (3, 8), got (3, 9); allocate it so"),
    Refusal(
        {"scores": aligned((3, 8193), np.float32), "topk": 8193, "sorted": True},
        ValueError,
        "sorted: needs topk, or the columns of scores, up to 8192, got topk 8193 and 8193 columns",
    ),
]


@all_of(REFUSALS)
def test_refusals(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        TOP_K(**refusal.changes)


def test_positions_share_no_memory_with_indices() -> None:
    out = aligned((3, 8), np.int32)
    with refused(ValueError, "out"):
        TOP_K(out=out, out_positions=out)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_all_that_comes_back(is_sorted: bool) -> None:
    x, positions = scores_of("two", 4, 50), np.empty((4, 12), np.int32)
    offsets = int32(0, 100, 200, 300)
    result = cumla.top_k(
        x, 12, offsets=offsets, out_positions=positions, values=True, sorted=is_sorted
    )
    want = expected(x, 12, is_sorted=is_sorted)
    assert isinstance(result, cumla.TopKResult)
    assert result.positions is positions
    np.testing.assert_array_equal(positions, want)
    np.testing.assert_array_equal(result.indices, want + offsets[:, None])
    np.testing.assert_array_equal(result.values, values_at(x, want))
    assert result.counts.tolist() == [12] * 4
    assert cumla.top_k(x, 12)[1:3] == (None, None)


def test_rows_of_no_width_and_of_fewer_than_k() -> None:
    none = cumla.top_k(np.zeros((2, 0), np.float32), 3, values=True)
    assert none.indices.tolist() == [[-1] * 3] * 2
    assert none.values.tolist() == [[-np.inf] * 3] * 2
    assert none.counts.tolist() == [0, 0]
    assert cumla.top_k(np.ones((1, 2), np.float32), 3).indices.tolist() == [[0, 1, -1]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_starts", int32(0, 41, 0), "row_starts[1]: needs a column from 0 to 40, got 41"),
        ("row_lens", int32(5, 40, 38), "row_lens[2]: needs a length from 0 to the end of the row"),
        ("row_lens", int32(-1, 0, 0), "row_lens[0]: needs a length from 0 to the end of the row"),
        ("row_to_request", int32(0, 1, 2), "row_to_request[2]: needs a row of block_table up to 1"),
    ],
)
def test_check_mode(name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TOP_K(**{name: value})  # clamped
    monkeypatch.setenv("CUMLA_CHECK", "1")
    TOP_K()
    with refused(ValueError, message):
        TOP_K(**{name: value})


def test_check_mode_lets_rows_have_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    assert (TOP_K(row_to_request=int32(0, -1, -2)).indices[1:] == -1).all()


def test_rows_at_any_address_and_stride(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Four-byte ones: the kernel loads what lies on 16 bytes at once."""
    x = aligned((3, 43), np.float32, 4)[:, 1:41]
    given = {name: cupy.like(value) for name, value in (scores() | {"scores": x}).items()}
    cumla.top_k(**given)
    assert bindings.entries == ["top_k_short_float32"]


def test_a_shape_that_is_asked_for_is_launched(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Also for arrays of a form that an earlier call had: other tests depend on it."""
    shapes = ("short", "row", "sampled", "streamed")
    cumla.top_k(cupy.like(numbers(3, 40, dtype=np.float32)), 5)
    bindings.entries.clear()
    for name in shapes:
        with shaped(name, 1):
            cumla.top_k(cupy.like(numbers(3, 40, dtype=np.float32)), 5)
    assert bindings.entries == [f"top_k_{name}_float32" for name in shapes]
