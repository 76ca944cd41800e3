# SPDX-License-Identifier: Apache-2.0
"""A run into a record, on the CPU with a clock of its own: order, checks, what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from bench import __main__ as command
from bench import kernels, measure, record
from bench.case import Case, Section, Variant
from bench.lab import Lab
from bench.measure import Lost, Stopwatch
from bench.sections import SECTIONS, mla
from cumla.bench.cases import Ceilings
from cumla.bench.section import CheckError
from cumla.launch import all_specs
from cumla.launch.source import digest
from tests.bench.fake_libraries import FakeFlashAttention, FakeFlashMLA, FakeLibraries

CEILINGS = Ceilings(4000.0, 3800.0, 800.0, 3.0, fp8_tflops=1500.0, sustained_tflops=650.0)
SPECS = all_specs()


class FakeWatch(Stopwatch):
    """Runs each call once, and takes 100 us for cumla's and 10 more for each that follows."""

    def __init__(self, gpu: Any = None, torch: Any = None) -> None:
        self.gpu, self.torch = gpu, torch or SimpleNamespace(cuda=SimpleNamespace())
        self.turns: list[tuple[int, int]] = []

    def host_us(self, call: Any) -> float:
        call()
        return 20.0

    def in_turns(
        self, calls: Sequence[Any], rounds: int, hold_us: float
    ) -> list[tuple[float, float]]:
        self.turns.append((len(calls), rounds))
        for call in calls:
            call()
        return [(100.0 + 10 * place, 99.0) for place in range(len(calls))]

    def capture(self, call: Any) -> tuple[Any, Any]:
        out = call()
        return SimpleNamespace(replay=call), out


class FakeGpu:
    properties = SimpleNamespace(name="Fake GPU")

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *of: object) -> None:
        pass

    def torch_stream(self, torch: Any) -> Any:
        return nullcontext()


@pytest.fixture
def machine() -> dict[str, Any]:
    return {"gpu": "Fake GPU", "nvrtc": "13.0"}


@pytest.fixture(autouse=True)
def fake_run(one_thread: None, monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]) -> None:
    def lab() -> Lab:
        made = Lab(tiny=True)
        made.libraries = FakeLibraries()  # type: ignore[assignment]
        return made

    def environment(gpu: Any) -> dict[str, Any]:
        return {"date": "2026-11-29T15:00:00+00:00", "machine": dict(machine), "digests": {}}

    monkeypatch.setattr(record, "Lab", lab)
    monkeypatch.setattr(record, "Gpu", FakeGpu)
    monkeypatch.setattr(record, "Stopwatch", FakeWatch)
    monkeypatch.setattr(record, "environment", environment)
    monkeypatch.setattr(record.ceilings, "measure", lambda gpu: CEILINGS)
    monkeypatch.setattr(record.module, "_loaded", {(SPECS[0], 0): object()})


def first_rows(section: Section, count: int) -> Section:
    return replace(section, shapes=section.shapes[:count])


def small(lab: Lab, batch: int, queries: int, heads: int, kv_len: int) -> Case:
    """Return what the row of a shape is made of here: the sizes do not matter."""
    return mla.dense(lab, 2, 1, 2, 70)


TWO = (replace(first_rows(mla.DENSE, 2), build=small), first_rows(mla.SCHEDULES, 1))


def run(path: Path, sections: tuple[Section, ...] = TWO, **options: Any) -> dict[str, Any]:
    told: list[str] = []
    record.record(path, told.append, sections=sections, **options)
    content = json.loads(path.read_text("utf-8"))
    assert isinstance(content, dict)
    return content | {"told": told}


def raising(error: Exception) -> Any:
    def build(lab: Lab, **shape: Any) -> Case:
        raise error

    return build


# --- one case -------------------------------------------------------------------------------------


def case_of(lab: Lab, **peers: list[Variant]) -> Case:
    return replace(mla.dense(lab, 2, 1, 2, 70), peers=peers)


def test_the_fastest_right_variant_counts_and_the_others_are_noted() -> None:
    lab, notes = Lab(tiny=True), list[str]()
    right, wrong = mla.dense(lab, 2, 1, 2, 70), mla.dense(lab, 2, 1, 2, 70)
    case = replace(
        right,
        peers={
            "A": [Variant("off", lambda: wrong.run() + 1), Variant("fine", right.run)],
            "B": [Variant("", lambda: wrong.run() * float("nan"))],
        },
    )
    watch = FakeWatch()
    row = measure.measure(watch, case, notes.append)
    assert row["us"] == row["graph_us"] == 100.0
    assert list(row["peers"]) == ["A"]
    assert row["peers"]["A"]["variant"] == "fine"
    assert row["peers"]["A"]["us"] == 110.0
    assert [note.split(" is off")[0] for note in notes] == ["A (off)", "B"]
    assert watch.turns == [(1, 5), (1, 3), (2, measure.ROUNDS), (2, measure.ROUNDS)]


def test_a_wrong_result_of_cumla_has_no_time() -> None:
    lab = Lab(tiny=True)
    case = mla.dense(lab, 2, 1, 2, 70)
    with pytest.raises(CheckError, match="cumla is off"):
        measure.measure(FakeWatch(), replace(case, run=lambda: case.run() + 1), print)


def test_what_is_wrong_after_the_timing_is_noted_or_fails() -> None:
    lab, runs, notes = Lab(tiny=True), list[int](), list[str]()
    case = mla.dense(lab, 2, 1, 2, 70)

    def later() -> Any:
        runs.append(1)
        return case.run() + (len(runs) > 4)

    row = measure.measure(
        FakeWatch(), replace(case, peers={"A": [Variant("", later)]}), notes.append
    )
    assert row["peers"] == {}
    assert "after the timing" in notes[0]
    runs.clear()
    with pytest.raises(CheckError, match="after the timing"):
        measure.measure(FakeWatch(), replace(case, run=later), print)


def test_a_lost_context_ends_everything() -> None:
    lab = Lab(tiny=True)

    def lose() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    case = replace(mla.dense(lab, 2, 1, 2, 70), peers={"A": [Variant("", lose)]})
    with pytest.raises(Lost, match="A: RuntimeError"):
        measure.measure(FakeWatch(), case, print)


def test_turns_begin_with_another_call_each_round() -> None:
    order: list[str] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.007)
    cuda = SimpleNamespace(
        Event=lambda enable_timing: event,
        _sleep=lambda cycles: order.append(f"hold {cycles}"),
        synchronize=lambda: None,
    )
    gpu: Any = SimpleNamespace(flush_l2=lambda: order.append("flush"))
    watch = Stopwatch(gpu, SimpleNamespace(cuda=cuda))
    found = watch.in_turns([lambda: order.append("a"), lambda: order.append("b")], 1, 2.0)
    assert found == [(7.0, 7.0), (7.0, 7.0)]
    assert [step for step in order if len(step) == 1] == ["a", "b", "b", "a", "a", "b"]
    assert order[:3] == ["flush", "hold 3960", "a"]


# --- a record -------------------------------------------------------------------------------------


def test_a_record_says_what_ran(tmp_path: Path) -> None:
    content = run(tmp_path / "made.json")
    assert content["machine"]["gpu"] == "Fake GPU"
    assert content["ceilings"]["read_GBps"] == 4000.0
    assert content["kernels"] == {SPECS[0].entry: {"source": digest(SPECS[0])}}
    assert content["libraries"] == {"fake": "1"}
    assert "none is real" in content["notes"]
    assert "running" not in content
    rows = content["sections"]["dense"]
    assert [row["kv_len"] for row in rows] == [1024, 4096]
    assert rows[0]["bound"] == "bytes"
    assert rows[0]["floor_us"] == pytest.approx(
        max(rows[0]["nbytes"] / 4e6, rows[0]["flops"] / 8e8)
    )
    assert set(rows[0]["peers"]) == {"FlashMLA", "FlashAttention-3"}
    assert content["told"][0].startswith("dense b128 h128 kv1024: 100.0 us, FlashMLA 110.0 (1.10)")


def test_a_file_gets_the_rows_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    run(path, rows=lambda name: "kv4096" in name)
    content = run(path)
    assert [row["kv_len"] for row in content["sections"]["dense"]] == [4096, 1024]
    assert not any("kv4096" in line for line in content["told"])
    assert run(path)["told"] == []


def test_no_row_begins_after_the_time(tmp_path: Path) -> None:
    content = run(tmp_path / "made.json", seconds=-1.0)
    assert content["sections"] == {}
    assert content["told"][-1].startswith("left out for time: dense b128 h128 kv1024, ")


def test_a_row_that_goes_wrong_leaves_the_others(tmp_path: Path) -> None:
    bad = replace(TWO[1], build=raising(ValueError("no such\nthing")))
    content = run(tmp_path / "made.json", (bad, TWO[0]))
    assert content["sections"]["schedules"][0]["failed"] == "ValueError: no such"
    assert len(content["sections"]["dense"]) == 2


def test_a_lost_context_is_taken_up_behind_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made.json"
    bad = replace(TWO[1], build=raising(RuntimeError("CUDA error: unspecified")))
    with pytest.raises(Lost):
        run(path, (bad, TWO[0]))
    monkeypatch.setattr(command, "SECTIONS", (bad, TWO[0]))
    assert command.main([str(path)]) == 1  # one row failed
    content = json.loads(path.read_text("utf-8"))
    assert len(content["sections"]["dense"]) == 2
    path.unlink()
    assert command.main([str(path)]) == command.LOST


def test_a_row_in_which_a_process_ended_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    content = run(path, (TWO[1],))
    shape = dict(TWO[0].shapes[0])
    path.write_text(json.dumps(content | {"running": {"section": "dense", "shape": shape}}))
    rows = run(path)["sections"]["dense"]
    assert "ended" in rows[0]["failed"]
    assert "us" in rows[1]


def test_other_kernels_and_machines_are_refused(tmp_path: Path, machine: dict[str, Any]) -> None:
    path = tmp_path / "made.json"
    content = run(path, (TWO[1],))
    entry = SPECS[0].entry
    path.write_text(json.dumps(content | {"kernels": {entry: {"source": "other"}}}))
    with pytest.raises(ValueError, match=f"about another {entry}; name a new file"):
        run(path)
    path.write_text(json.dumps(content))
    machine["nvrtc"] = "12.9"
    with pytest.raises(ValueError, match="of another machine"):
        run(path)


def test_the_command_names_rows_and_sections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made.json"
    assert (
        command.main([str(path), "--only", "merges", "dense", "--rows", "merges 2 of t170 *"]) == 0
    )
    assert list(json.loads(path.read_text("utf-8"))["sections"]) == ["merges"]
    rest = [section.name for section in SECTIONS if section.name != "merges"]
    assert command.main(["--tiny", "--except", *rest, "--rows", "*bfloat16"]) == 0
    assert "merges 8 of t57 bfloat16: error" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([])


# --- kernels --------------------------------------------------------------------------------------


def evidence(tmp_path: Path, source: str, **cubins: str) -> Path:
    spec = SPECS[0]
    entries = {spec.entry: {"source": source, "cubins": {"13.0": cubins["code"]}}}
    (tmp_path / f"{spec.stem}.json").write_text(json.dumps({"entries": entries}))
    return tmp_path


def test_equal_machine_code_is_the_same_kernel(tmp_path: Path) -> None:
    spec = SPECS[0]
    now, entry = digest(spec), spec.entry
    then = {entry: {"source": "before", "cubins": {"13.0": "code"}}}
    assert kernels.changed({entry: {"source": now}}, tmp_path) == []
    assert kernels.changed(then, tmp_path) == [entry]  # nothing is known
    assert kernels.changed(then, evidence(tmp_path, now, code="code")) == []
    assert kernels.changed(then, evidence(tmp_path, now, code="other")) == [entry]
    assert kernels.changed(then, evidence(tmp_path, "yet another", code="code")) == [entry]
    assert kernels.changed({"gone": {"source": now}}, tmp_path) == ["gone"]


def test_the_machine_code_in_a_folder_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[0]
    monkeypatch.setattr("tests.gpu.tools.cubins.digest_of", lambda code: code.decode())
    tmp_path.chmod(0o755)
    monkeypatch.setenv("CUMLA_CUBIN_DIR", str(tmp_path))
    assert kernels.known_of(spec, "13.0") == {"source": digest(spec)}
    (tmp_path / kernels.cubin_name(spec)).write_bytes(b"code")
    assert kernels.known_of(spec, "13.0")["cubins"] == {"13.0": "code"}


def test_the_fakes_can_be_wrong() -> None:
    lab = Lab(tiny=True)
    lab.libraries = FakeLibraries()  # type: ignore[assignment]
    lab.libraries.flash_mla = {"vLLM": FakeFlashMLA(True, off=1.0)}  # type: ignore[misc]
    lab.libraries.flash_attention = FakeFlashAttention(wrong=1)  # type: ignore[misc]
    notes: list[str] = []
    row = measure.measure(FakeWatch(), mla.dense(lab, 2, 1, 2, 70), notes.append)
    assert list(row["peers"]) == ["FlashAttention-3"]
    assert {note.split(" is off")[0] for note in notes} == {
        "FlashMLA (vLLM)", "FlashAttention-3 (splits 1)",
    }  # fmt: skip
