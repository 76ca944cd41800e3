# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the cache writer, from end to end on a GPU made of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.bench import append, operations
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
    monkeypatch.setattr(operations, "_REPLAY_BYTES", 3 * SMALL[0].nbytes + 1)
    monkeypatch.setattr(operations, "_ROTATED_BYTES", 2 * SMALL[0].nbytes + 1)
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
        for of, us in (("graph", CALL_US), ("graph_copy", LAUNCH_US)):
            assert row[f"{of}_us"] == pytest.approx(us)
            assert row[f"{of}_gbps"] == pytest.approx(row["nbytes"] / us / 1e3)
            assert row[f"{of}_efficiency"] == pytest.approx(row[f"{of}_gbps"] / COPY_GBPS)


def test_a_graph_goes_round_inputs_and_outputs(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[np.ndarray]] = []
    public = append.append_mla_cache

    def recorded(*arguments: Any, **options: Any) -> None:
        calls.append([*arguments, *options.values()])
        public(*arguments, **options)

    monkeypatch.setattr(append, "append_mla_cache", recorded)
    row_of(gpu, AppendCase(1, 64, rotated=True))
    *_, first, second, third, again = calls  # of the last replay
    for a, b in ((first, second), (second, third), (first, third)):
        assert not any(np.shares_memory(x, y) for x, y in zip(a, b, strict=True))
        assert not any(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert all(x is y for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_graph_left_is_checked(
    gpu: FakeGpu, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, capture = append.append_mla_cache, gpu.capture

    def captured(work: Any) -> Any:
        seen: list[int] = []

        def forgetful(rows: Any, kv_cache: Any, slots: Any) -> None:
            if id(rows) not in seen:
                seen.append(id(rows))
            few = len(slots) - (seen.index(id(rows)) == place)
            public(rows[:few], kv_cache, slots[:few])

        monkeypatch.setattr(append, "append_mla_cache", forgetful)
        return capture(work)

    gpu.capture = captured
    row = row_of(gpu, SMALL[0])
    assert f"row {SMALL[0].tokens - 1} was not written" in row["failed"]
    assert "us" not in row


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
