# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark of merging, on a GPU made of NumPy."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from cumla.bench import merge, operations
from cumla.bench.merge import MERGE, MergeCase, measure_merge
from cumla.bench.operations import operation_row
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

CASES = (MergeCase(2, 5), MergeCase(3, 4, "float16"), MergeCase(2, 3, "float32"))


class Merging:
    """The operation, which takes the fake GPU's clock forward."""

    def __init__(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.spoil = gpu, 1.0
        self.calls: list[tuple[np.ndarray, ...]] = []
        self.operation = merge.merge_attention_states
        monkeypatch.setattr(merge, "merge_attention_states", self)
        monkeypatch.setattr(operations, "_REPLAY_BYTES", 3 * CASES[0].nbytes + 1)
        monkeypatch.setattr(operations, "_ROTATED_BYTES", 2 * CASES[0].nbytes + 1)

    def __call__(self, *arguments: Any, **outputs: Any) -> None:
        self.calls.append((*arguments, *outputs.values()))
        self.operation(*arguments, **outputs)
        outputs["out"][...] *= np.asarray(self.spoil, outputs["out"].dtype)
        self.gpu.now += LAUNCH_US


def rows_of(gpu: Any) -> list[dict[str, Any]]:
    return [operation_row(case, 100.0, partial(measure_merge, gpu, case)) for case in CASES]


def test_cases_are_of_the_sizes_that_they_should_be() -> None:
    assert len(MERGE) == 6
    for case, nbytes in zip(MERGE, [64 << 20] * 3 + [1 << 30] * 3, strict=True):
        assert case.nbytes == pytest.approx(nbytes, rel=0.02)
    one = MergeCase(2, 7, "float32")
    assert one.nbytes == 7 * 128 * (3 * 512 * 4 + 3 * 4)


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch)
    for row, case in zip(rows_of(gpu), CASES, strict=True):
        assert MergeCase(row["count"], row["tokens"], row["dtype"]) == case
        assert row["us"] == row["us_low"] == row["us_high"] == LAUNCH_US
        assert row["gbps"] == pytest.approx(case.nbytes / (LAUNCH_US * 1e3))
        assert row["efficiency"] == pytest.approx(row["gbps"] / 100)
        assert 0 < row["row_error"] < 4e-3
        assert row["copy_us"] == LAUNCH_US


def test_the_copy_beside_a_row_moves_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch)
    copied: list[int] = []
    copy = gpu.copy

    def counted(destination: np.ndarray, source: np.ndarray) -> None:
        assert not np.shares_memory(destination, source)
        copied.append(destination.nbytes + source.nbytes)
        copy(destination, source)

    gpu.copy = counted
    rows_of(gpu)
    of_cases = [(nbytes, len(list(equal))) for nbytes, equal in groupby(copied)]
    # 35 single ones, and 12 replays
    assert of_cases == [
        (case.nbytes // 8 * 8, 35 + 12 * calls)
        for case, calls in zip(CASES, (4, 3, 3), strict=True)
    ]


def test_a_graph_goes_round_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    merging = Merging(gpu, monkeypatch)
    row = operation_row(CASES[0], 100.0, partial(measure_merge, gpu, CASES[0]))
    *_, first, second, third, again = merging.calls  # of the last replay
    for a, b in ((first, second), (second, third), (first, third)):
        for x, y in zip(a, b, strict=True):
            assert not np.shares_memory(x, y)
            assert not np.array_equal(x, y)
    assert all(x is y for x, y in zip(first, again, strict=True))
    for of in ("graph", "graph_copy"):
        assert row[f"{of}_us"] == pytest.approx(LAUNCH_US)
        assert row[f"{of}_gbps"] == pytest.approx(CASES[0].nbytes / (LAUNCH_US * 1e3))
        assert row[f"{of}_efficiency"] == pytest.approx(row[f"{of}_gbps"] / 100)


def test_large_cases_are_not_timed_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch)
    gpu.capture = pytest.fail
    monkeypatch.setattr(operations, "_GRAPH_BYTES", CASES[0].nbytes - 1)
    row = operation_row(CASES[0], 100.0, partial(measure_merge, gpu, CASES[0]))
    assert row["graph_us"] is row["graph_copy_us"] is None
    assert row["us"] == LAUNCH_US
    assert not any(key.endswith(("gbps", "efficiency")) for key in row if "graph" in key)
    assert [case.nbytes <= 256 * 10**6 for case in MERGE] == [True] * 3 + [False] * 3


def test_a_graph_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch)
    gpu.capture = lambda work: lambda: None
    row = operation_row(CASES[0], 100.0, partial(measure_merge, gpu, CASES[0]))
    assert "a row of token 0 is off by inf" in row["failed"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("output", ["out", "lse"])
def test_what_a_graph_left_is_checked(
    output: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = FakeGpu()
    merging = Merging(gpu, monkeypatch)
    operation = merging.operation
    capture = gpu.capture

    def captured(work: Any) -> Any:
        seen: list[int] = []

        def spoiled(*arguments: Any, **outputs: Any) -> None:
            operation(*arguments, **outputs)
            if id(outputs["out"]) not in seen:
                seen.append(id(outputs["out"]))
            if seen.index(id(outputs["out"])) == place:
                outputs[output][-1, -1] *= np.asarray(1.02, outputs[output].dtype)

        merging.operation = spoiled
        return capture(work)

    gpu.capture = captured
    row = operation_row(CASES[0], 100.0, partial(measure_merge, gpu, CASES[0]))
    what = "a row" if output == "out" else "the logarithms"
    assert f"{what} of token 4" in row["failed"]
    assert "us" not in row


@pytest.mark.parametrize("spoil", [0.0, 1.02, float("nan")])
def test_a_wrong_result_has_no_times(spoil: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch).spoil = spoil
    for row in rows_of(gpu):
        assert "a row of token 0 is off" in row["failed"]
        assert "us" not in row
