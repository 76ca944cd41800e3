# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark of merging, on a GPU made of NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from cumla.bench import merge
from cumla.bench.merge import MERGE, MergeCase, measure_merge
from cumla.bench.operations import operation_row
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

CASES = (MergeCase(2, 5), MergeCase(3, 4, "float16"), MergeCase(2, 3, "float32"))


class Merging:
    """The operation, which takes the fake GPU's clock forward."""

    def __init__(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.spoil = gpu, 1.0
        self.operation = merge.merge_attention_states
        monkeypatch.setattr(merge, "merge_attention_states", self)

    def __call__(self, *arguments: Any, **outputs: Any) -> None:
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
    times = len(copied) // len(CASES)
    assert times > 1
    for i, case in enumerate(CASES):
        assert copied[i * times : (i + 1) * times] == [case.nbytes // 8 * 8] * times


@pytest.mark.parametrize("spoil", [0.0, 1.02, float("nan")])
def test_a_wrong_result_has_no_times(spoil: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch).spoil = spoil
    for row in rows_of(gpu):
        assert "a row of token 0 is off" in row["failed"]
        assert "us" not in row
