# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the cache writer, from end to end on a GPU made of NumPy."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.bench import append
from cumla.bench.append import CASES, AppendCase, run_append
from cumla.bench.dense import CheckError
from tests.bench.fake_gpu import FakeGpu

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


def test_sizes() -> None:
    assert {case.mbytes for case in CASES} == {64, 1000}
    assert {(case.page_size, case.rotated) for case in CASES} == {
        (64, False),
        (1, False),
        (64, True),
    }
    for case in CASES:
        assert case.tokens % case.page_size == 0
        assert 0 <= case.mbytes * 10**6 - case.tokens * 1152 < 1152 * case.page_size


def test_rows_of_the_result(gpu: FakeGpu) -> None:
    results = run_append(gpu, COPY_GBPS, SMALL)  # type: ignore[arg-type]
    assert [(row["mbytes"], row["page_size"], row["rotated"]) for row in results] == [
        (1, 64, False),
        (1, 1, False),
        (2, 16, True),
    ]
    for row, case in zip(results, SMALL, strict=True):
        assert row["us"] == row["us_low"] == row["us_high"] == CALL_US
        assert row["gbps"] == pytest.approx(2 * case.tokens * 1152 / CALL_US / 1e3)
        assert row["efficiency"] == pytest.approx(row["gbps"] / COPY_GBPS)


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
    with pytest.raises(CheckError, match=f"row {case.tokens - 1} was not written"):
        run_append(gpu, COPY_GBPS, [case])  # type: ignore[arg-type]
