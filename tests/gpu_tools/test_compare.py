# SPDX-License-Identifier: Apache-2.0
"""The comparison of two states of the package, but for the GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.tools import compare

CASES = [[128, 1, 16, 4096], [1, 1, 128, 8192, 0]]


def test_cases_and_defaults() -> None:
    args = compare.parsed(["old", "--cases", "128,1,16,4096", "1,1,128,8192,0"])
    assert args.cases == CASES
    assert args.after == compare.ROOT


def test_the_two_take_turns_and_medians_are_compared() -> None:
    asked: list[tuple[str, int]] = []

    def state(name: str, times: list[float]) -> compare.Ask:
        def ask(job: dict[str, Any]) -> dict[str, Any]:
            asked.append((name, len(job["case"])))
            return {"us": times.pop(0)}

        return ask

    before = state("before", [10.0, 1.0, 30.0, 2.0, 20.0, 3.0])
    after = state("after", [9.0, 1.0, 8.0, 1.0, 100.0, 1.0])
    times = compare.compare(before, after, CASES, 3, 5)
    assert times == [(20.0, 9.0), (2.0, 1.0)]
    first = ["before", "after"]
    assert [name for name, _ in asked] == 2 * first + 2 * first[::-1] + 2 * first
    text = compare.table(CASES, times)
    assert text.splitlines()[1].split() == ["128,1,16,4096", "20.0", "9.0", "0.450"]


def test_a_process_times_the_package_of_its_folder(tmp_path: Path) -> None:
    """Without a GPU it ends, and what it said of its package stands in the message."""
    shutil.copytree(compare.ROOT / "cumla", tmp_path / "cumla")
    state = compare.State(tmp_path, [[1, 1, 16, 64]])
    with pytest.raises(RuntimeError, match="the process ended") as raised:
        state.ask({"case": [1, 1, 16, 64], "repeats": 1})
    assert json.dumps([[1, 1, 16, 64]])[1:-1] in str(raised.value)
    assert state.process.wait(30) != 0
