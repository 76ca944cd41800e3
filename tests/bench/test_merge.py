# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark of merging, on a GPU made of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.bench import merge
from cumla.bench.cases import Ceilings
from cumla.bench.merge import MERGE, MergeCase, merge_rows
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

CEILINGS = Ceilings(read_gbps=4000.0, copy_gbps=100.0, matmul_tflops=700.0, empty_us=3.0)
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


def test_cases_are_of_the_sizes_that_they_should_be() -> None:
    assert len(MERGE) == 6
    for case, nbytes in zip(MERGE, [64 << 20] * 3 + [1 << 30] * 3, strict=True):
        assert case.nbytes == pytest.approx(nbytes, rel=0.02)
    one = MergeCase(2, 7, "float32")
    assert one.nbytes == 7 * 128 * (3 * 512 * 4 + 3 * 4)


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch)
    rows = merge_rows(gpu, CEILINGS, CASES)
    for row, case in zip(rows, CASES, strict=True):
        assert MergeCase(row["count"], row["tokens"], row["dtype"]) == case
        assert row["us"] == row["us_low"] == row["us_high"] == LAUNCH_US
        assert row["gbps"] == pytest.approx(case.nbytes / (LAUNCH_US * 1e3))
        assert row["efficiency"] == pytest.approx(row["gbps"] / 100)
        assert 0 < row["row_error"] < 4e-3


@pytest.mark.parametrize("spoil", [0.0, 1.02, float("nan")])
def test_a_wrong_result_has_no_times(spoil: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    Merging(gpu, monkeypatch).spoil = spoil
    for row in merge_rows(gpu, CEILINGS, CASES):
        assert "a row of token 0 is off" in row["failed"]
        assert "us" not in row
