# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the cache writer, from end to end on a GPU made of NumPy."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.bench import append
from cumla.bench.append import APPEND, AppendCase, measure_append
from cumla.bench.operations import operation_row
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

COPY_GBPS = 4000.0
CALL_US = 8.0
SMALL = (AppendCase(1, 64), AppendCase(1, 1), AppendCase(2, 16, rotated=True))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Calls take CALL_US on it."""
    gpu = FakeGpu()
    public = append.append_mla_cache

    def timed(*arguments: Any, **options: Any) -> None:
        public(*arguments, **options)
        gpu.now += CALL_US

    monkeypatch.setattr(append, "append_mla_cache", timed)
    return gpu


def row_of(gpu: Any, case: AppendCase) -> dict[str, Any]:
    return operation_row(case, COPY_GBPS, lambda: measure_append(gpu, case))


def test_sizes() -> None:
    assert {case.mbytes for case in APPEND} == {64, 1000}
    assert {(case.page_size, case.rotated) for case in APPEND} == {
        (64, False),
        (1, False),
        (64, True),
    }
    for case in APPEND:
        assert case.tokens % case.page_size == 0
        assert 0 <= case.mbytes * 10**6 - case.tokens * 1152 < 1152 * case.page_size


def test_rows_of_the_result(gpu: FakeGpu) -> None:
    results = [row_of(gpu, case) for case in SMALL]
    assert [(row["mbytes"], row["page_size"], row["rotated"]) for row in results] == [
        (1, 64, False),
        (1, 1, False),
        (2, 16, True),
    ]
    for row, case in zip(results, SMALL, strict=True):
        assert row["us"] == row["us_low"] == row["us_high"] == CALL_US
        assert (row["tokens"], row["nbytes"]) == (case.tokens, 2 * case.tokens * 1152)
        assert row["gbps"] == pytest.approx(2 * case.tokens * 1152 / CALL_US / 1e3)
        assert row["efficiency"] == pytest.approx(row["gbps"] / COPY_GBPS)
        assert row["copy_us"] == LAUNCH_US


@pytest.mark.parametrize("column", [0, 511, 512, 575])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_wrong_rows_are_not_timed(
    gpu: FakeGpu, case: AppendCase, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = append.append_mla_cache

    def wrong(rows: Any, kv_cache: Any, slots: Any, **options: Any) -> None:
        public(rows, kv_cache, slots, **options)
        kv_cache.reshape(-1, 576)[slots[-1], column] += 1

    monkeypatch.setattr(append, "append_mla_cache", wrong)
    row = row_of(gpu, case)
    assert f"row {case.tokens - 1} was not written" in row["failed"]
    assert "us" not in row
