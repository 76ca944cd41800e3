# SPDX-License-Identifier: Apache-2.0
"""The comparison of two states, on the CPU: every operation and its check, turns, verdicts."""

from __future__ import annotations

import inspect
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.bench.cases import DENSE
from tests.gpu.tools import compare, compare_worker
from tests.gpu.tools.compare import Case, Limits, measure, verdict
from tests.gpu.tools.compare_worker import NumPy, Worker, bind

LATER = monotonic() + 1e6
TINY = [
    Case("decode", (2, 2, 4, 130)),
    Case("decode", (2, 1, 4, 130), {"page": 16}),
    Case("decode", (3, 1, 4, 100), {"ragged": True}),
    Case("decode", (2, 1, 4, 100), {"invariant": True}),
    Case("decode", (2, 1, 4, 100), {"kv_heads": 2}),
    Case("decode", (2, 1, 4, 100), {"dtype": "float16"}),
    *(
        Case("decode", (2, 1, 4, 100), {"cache": of})
        for of in ("split", "e4m3", "scales", "packed")
    ),
    Case("attention", (3, 2, 5, 90)),
    Case("attention", (3, 2, 5, 90), {"causal": False, "decodes": 2}),
    Case("paged_logits", (2, 2, 70)),
    Case("logits", (5, 70)),
    Case("quantize", (200,)),
    Case("quantize", (200,), {"cache": True}),
    Case("merge", (3, 5)),
    Case("merge", (2, 5), {"dtype": "float32"}),
    Case("append", (200, 1)),
    Case("append", (200, 64), {"rotated": True}),
    *(Case("append", (200, 64), {"cache": of}) for of in ("e4m3", "packed")),
]
SCHEDULES = [
    Case("decode_schedule", (3, 4, 100)),
    Case("attention", (3, 2, 5, 90), {"schedule": True}),
    Case("paged_logits", (2, 2, 70), {"schedule": True}),
]


def prepared(worker: Worker, case: Case) -> dict[str, Any]:
    return worker.prepare(case.op, case.numbers, case.options)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_operation_is_checked(case: Case) -> None:
    """What is right passes; NaN, and one wrong row, do not."""
    worker = Worker(cumla, NumPy())
    bits = prepared(worker, case)["bits"]
    work = worker.work
    assert work is not None and work.outputs
    assert prepared(worker, case)["bits"] == bits
    assert worker.time(2, 1, 0.0)["us"] > 0
    for output in work.outputs[:1]:
        for value in (0xFF, 0x35):
            kept = output.copy()
            output.reshape(-1).view(np.uint8)[:] = value
            with pytest.raises(compare_worker.Wrong):
                work.check()
            output[...] = kept
    work.check()


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case.name)
def test_schedules_are_timed(case: Case) -> None:
    worker = Worker(cumla, NumPy())
    prepared(worker, case)
    assert worker.time(2, 1, 0.0)["us"] > 0


def test_names_and_orders_of_both_versions() -> None:
    def former(q: Any, cache_seqlens: Any, *, scale: Any = 1, max_seqlen: int = 0) -> Any:
        return q, cache_seqlens, scale, max_seqlen

    def present(q: Any, kv_lens: Any, *, kv_scale: Any = 1, max_kv_len: int = 0) -> Any:
        return q, kv_lens, kv_scale, max_kv_len

    def without(q: Any, *, kv_scale: Any, max_kv_len: int) -> Any:
        return q, kv_scale, max_kv_len

    given = {"max_kv_len": 4, "kv_scale": 3, "kv_lens": 2, "q": 1}
    assert bind(former, **given)() == bind(present, **given)() == (1, 2, 3, 4)
    assert bind(without, **given)() == (1, 3, 4)
    with pytest.raises(TypeError, match="without takes no page"):
        bind(without, **given, page=5)


def test_cases_are_the_table_and_more_and_fit_the_worker() -> None:
    cases = compare.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    dense = {case.numbers for case in cases if case.op == "decode" and not case.options}
    assert dense == {(case.batch, case.q_len, case.heads, case.kv_len) for case in DENSE}
    assert {case.op for case in cases} == {case.op for case in TINY + SCHEDULES}
    for case in cases:
        inspect.signature(getattr(Worker, case.op)).bind(None, *case.numbers, **case.options)


# --- turns and verdicts ---------------------------------------------------------------------------


class FakeState:
    """Answers with times from a list, and notes what it was asked."""

    def __init__(self, name: str, asked: list[str], times: Callable[[int], float]) -> None:
        self.name, self.asked, self.times, self.count = name, asked, times, 0
        self.prepared: dict[str, Any] = {"bits": "same"}

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        if do == "prepare":
            return self.prepared
        self.asked.append(self.name)
        self.count += 1
        return {"us": self.times(self.count)}


def fake_states(before: float, after: Callable[[int], float]) -> tuple[Any, list[str]]:
    asked: list[str] = []
    return (FakeState("b", asked, lambda i: before), FakeState("a", asked, after)), asked


def test_the_two_take_turns() -> None:
    states, asked = fake_states(10.0, lambda i: 9.0 + i)
    row = measure(states, Case("decode", (1,)), Limits(rounds=3, row=2.0), LATER)
    assert "".join(asked) == "ba" + "ab" + "ba"
    assert (row["before_us"], row["after_us"], row["ratio"]) == (10.0, 11.0, 1.1)
    assert row["same_bits"]


def test_what_seems_slower_is_timed_again() -> None:
    states, asked = fake_states(10.0, lambda i: 12.0 if i <= 2 else 10.0)
    row = measure(states, Case("decode", (1,)), Limits(rounds=2), LATER)
    assert len(asked) == 2 * (2 + 4)
    assert row["ratio"] == 1.0


def test_a_result_that_is_wrong_is_not_timed() -> None:
    states, asked = fake_states(10.0, lambda i: 10.0)
    states[1].prepared = {"error": "Wrong: a row is off"}
    row = measure(states, Case("decode", (1,)), Limits(), LATER)
    assert (row["failed"], asked) == ("after: Wrong: a row is off", [])


def test_nothing_is_begun_without_time() -> None:
    states, asked = fake_states(10.0, lambda i: 10.0)
    rows = list(compare.compare(states, [Case("decode", (1,))], Limits(), monotonic() - 1.0))
    assert ([row["failed"] for row in rows], asked) == (["no time was left"], [])
    assert verdict(rows, Limits())[1] == 2


def rows_of(*ratios: float, op: str = "decode") -> list[dict[str, Any]]:
    return [{"name": f"{op}-{i}", "op": op, "ratio": ratio} for i, ratio in enumerate(ratios)]


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        (rows_of(1.004, 0.99, 1.012), 0, "slower than the limits: none"),
        (rows_of(0.9, 1.016), 1, "slower than the limits: decode-1"),
        (rows_of(1.006, 1.006), 1, "geometric mean after / before: 1.0060 (at most 1.005)"),
        (rows_of(1.0) + rows_of(1.04, op="host"), 0, "decode: 1.0000"),
        (rows_of(1.0) + rows_of(1.06, op="host"), 1, "slower than the limits: host-0"),
        ([*rows_of(1.1), {"name": "x", "op": "merge", "failed": "off"}], 2, "measured: x"),
    ],
)
def test_verdicts(rows: list[dict[str, Any]], code: int, said: str) -> None:
    text, got = verdict(rows, Limits())
    assert got == code
    assert said in text


def test_an_archive_is_as_good_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "cumla").mkdir()
    (tmp_path / "cumla" / "mark").write_text("here")
    with tarfile.open(tmp_path / "before.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cumla", "cumla")
    for path in (tmp_path, tmp_path / "before.tar.gz"):
        with compare.folder_of(path) as folder:
            assert (folder / "cumla" / "mark").read_text() == "here"


def test_processes_compare_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with this state; a case that cannot be made leaves the others."""
    broken = Case("merge", (2, 5), {"dtype": "int7"})
    monkeypatch.setattr(compare, "all_cases", lambda: [TINY[0], broken])
    monkeypatch.setattr(compare, "FRAMEWORKS", ("CuPy",))
    small = {"rest": 0.0, "host_shape": (2, 2, 70), "host_repeats": 2, "host_warmup": 1}
    monkeypatch.setattr(compare, "Limits", lambda **given: Limits(**given, **small))
    states = compare.State(compare.ROOT, "numpy"), compare.State(compare.ROOT, "numpy")
    file, said = tmp_path / "rows.json", []
    args = SimpleNamespace(
        rounds=1, row=1e6, mean=1e6, host=1e6, seconds=100.0, only=["*"], json=file
    )
    try:
        assert compare.run(states, args, said.append) == 2  # type: ignore[arg-type]
    finally:
        for state in states:
            state.end()
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert rows[TINY[0].name]["same_bits"]
    assert rows["host: CuPy, plan.run"]["after_us"] > 0
    assert "KeyError" in rows[broken.name]["failed"]
    assert said[-1].endswith(f"wrong or not measured: {broken.name}")
    assert [state.process.poll() for state in states] == [0, 0]


def test_a_process_that_ends_is_told(tmp_path: Path) -> None:
    state = compare.State(tmp_path, "numpy")  # there is no cumla in that folder
    assert state.ask("time", repeats=1) == {"error": "the process ended"}
    state.end()


def test_defaults() -> None:
    args = compare.parsed(["old.tar.gz"])
    assert (args.after, args.only, args.seconds) == (compare.ROOT, ["*"], 240.0)
