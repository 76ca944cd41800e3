# SPDX-License-Identifier: Apache-2.0
"""A whole benchmark on a fake GPU, and what becomes of its results."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cumla import cli
from cumla.bench import ceilings, dense, host, run, start
from cumla.bench.cases import Case
from cumla.bench.dense import CheckError, Workbench, check
from cumla.bench.report import to_csv, to_markdown, to_text
from cumla.errors import CumlaError
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

CASES = (Case(17, 1, 3, 64), Case(2, 2, 3, 128))  # the first is no small batch
START = {"import_s": 0.21, "first_call_cold_s": 3.4, "first_call_warm_s": 0.1}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU on which a benchmark of `CASES` runs, as the whole table; a call takes 5 us."""
    gpu = FakeGpu()
    monkeypatch.setattr(run, "Gpu", lambda: gpu)
    monkeypatch.setattr(run, "DENSE", CASES)
    monkeypatch.setattr("cumla.bench.cases.DENSE", CASES)
    for module in (run, host):
        monkeypatch.setattr(module, "HOST_CASE", Case(2, 1, 2, 64))
    monkeypatch.setattr(host, "SCHEDULES", (Case(1, 1, 2, 64), Case(3, 1, 2, 64)))
    monkeypatch.setattr(run, "SCHEDULES", host.SCHEDULES)
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    monkeypatch.setattr(dense, "_ROTATED_BYTES", 3 * CASES[1].cache_bytes)
    monkeypatch.setattr(ceilings, "paged_kv_map", lambda *arguments: bytes(128))
    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: (_ticks(gpu), nullcontext()))
    monkeypatch.setattr(run, "cupy_nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(run, "measure_start", lambda: START)
    for name in ("CUMLA_CHECK", "CUMLA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    original = dense.MLADecodePlan.run

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpu.now += LAUNCH_US
        return original(self, *args, **kwargs)

    monkeypatch.setattr(dense.MLADecodePlan, "run", timed)
    return gpu


def _ticks(gpu: FakeGpu) -> Any:
    def work() -> None:
        gpu.now += 1400.0

    return work


@pytest.fixture
def results(fake: FakeGpu) -> dict[str, Any]:
    """What a benchmark of `CASES` gives, through JSON."""
    *_, last = run.run(CASES, lambda line: None)
    return json.loads(json.dumps(last))


def test_rows_are_checked_and_timed(results):
    first, second = results["rows"]
    assert [first["batch"], first["q_len"], first["heads"], first["kv_len"]] == [17, 1, 3, 64]
    for row in (first, second):
        assert row["us"] == row["us_low"] == row["us_high"] == row["stream_only_us"] == LAUNCH_US
        assert 0 < row["row_error"] <= 4e-3
        assert 0 <= row["lse_error"] <= 1e-5
        assert row["efficiency"] == pytest.approx(row["floor_us"] / LAUNCH_US)
        assert row["peers"] == {}
        assert row["best_peer"] is None
    assert second["tflops"] == pytest.approx(CASES[1].flops / LAUNCH_US / 1e6)
    assert second["gbps"] == pytest.approx(CASES[1].nbytes / LAUNCH_US / 1e3)
    assert first["graph_us"] is None
    assert second["graph_us"] == pytest.approx(LAUNCH_US)


def test_everything_else_is_recorded(results):
    assert results["machine"]["gpu"] == "Fake GPU"
    assert set(results["digests"]) >= {"mla_schedule", "mla_decode_bfloat16", "mla_merge_bfloat16"}
    assert results["ceilings"]["bf16_matmul_TFLOPs"] == pytest.approx(2 * 8192**3 / 1400.0 / 1e6)
    assert results["ceilings"]["empty_kernel_us"] == LAUNCH_US
    shapes = [(row["batch"], row["lengths"]) for row in results["schedule"]]
    assert shapes == [(1, "equal"), (3, "equal"), (3, "ragged")]
    assert results["host"]["CuPy"]["us"] > 0
    assert results["start"] == START


def test_steps_are_counted_and_results_grow(fake):
    told: list[str] = []
    seen = [(len(results["rows"]), "start" in results) for results in run.run(CASES, told.append)]
    assert seen[0] == (1, False)
    assert seen[-1] == (2, True)
    assert len(told) == run.steps(CASES) == 5
    told.clear()
    *_, results = run.run(CASES[:1], told.append)
    assert len(told) == run.steps(CASES[:1]) == 2
    assert "start" not in results
    assert "schedule" not in results


@pytest.mark.parametrize("what", ["out", "lse"])
def test_wrong_result_fails_the_row_and_no_other(fake, monkeypatch, what):
    original = dense.MLADecodePlan.run

    def wrong(self: Any, *args: Any, out: Any, lse: Any, **others: Any) -> None:
        original(self, *args, out=out, lse=lse, **others)
        if out.shape[1] == 2 and what == "out":
            out[1, 1, 2] *= 1.01
        if out.shape[1] == 2 and what == "lse":
            lse[1, 2, 1] *= 1.001

    monkeypatch.setattr(dense.MLADecodePlan, "run", wrong)
    *_, results = run.run(CASES, lambda line: None)
    first, second = results["rows"]
    assert "failed" not in first
    assert "us" not in second
    assert second["failed"].startswith(f"b2-s2-h3-kv128: {what} is wrong in 1 of 12 rows, most at ")
    assert "(1, 1, 2)" in second["failed"]
    assert "wrong result" in to_text(results)
    assert second["failed"] in to_text(results)
    assert "wrong result" in to_markdown(results)
    assert len(to_csv(results).splitlines()) == 3


def test_unwritten_output_is_wrong(fake):
    bench = Workbench(fake, CASES)
    inputs = bench.inputs(CASES[1])
    with pytest.raises(CheckError, match="out is wrong in 12 of 12 rows"):
        check(fake, inputs, CASES[1])


def test_graph_goes_round_caches_of_their_own(fake):
    case = CASES[1]
    inputs = Workbench(fake, CASES).inputs(case, dense.caches_of(case))
    pages = np.concatenate([table.ravel() for table in inputs.tables])
    assert len(inputs.tables) == 3
    assert sorted(pages.tolist()) == list(range(3 * case.pages))
    assert sorted(pages.tolist()) != pages.tolist()
    tables = [call.args[2] for call in inputs.calls(5)]
    assert [next(i for i, t in enumerate(inputs.tables) if t is table) for table in tables] == [
        *(0, 1, 2, 0, 1)
    ]


def test_sampled_rows_hold_the_corners():
    rows = dense._sample(Case(128, 2, 128, 1024))
    assert 510 <= len(rows) <= 512
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert rows[0].tolist() == [0, 0, 0]
    assert rows[-1].tolist() == [127, 1, 127]
    assert dense._sample(Case(1, 1, 1, 64)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", ["CUMLA_CHECK", "CUMLA_DEBUG"])
def test_slow_kernels_are_refused(fake, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(CumlaError, match=f"{name}=1: unset it"):
        next(run.run(CASES, lambda line: None))


def with_peers(results: dict[str, Any]) -> dict[str, Any]:
    """The same results, one row with peers, times as if from a GPU."""
    row = results["rows"][0]
    row |= {
        "us": 200.0,
        "tflops": 600.4,
        "gbps": 3000.4,
        "efficiency": 0.914,
        "best_peer": "FlashInfer",
        "peers": {
            "FlashMLA": {"us": 240.0, "scaled_us": 250.0, "x": 1.25},
            "FlashInfer": {"us": 200.0, "scaled_us": 210.0, "x": 1.05, "clock": "graph"},
        },
    }
    return results


def test_text(results):
    text = to_text(with_peers(results))
    lines = text.splitlines()
    (row,) = [line for line in lines if line.split()[:4] == ["17", "1", "3", "64"]]
    assert row.split()[4:] == [
        *("200", "600", "3000", "0.91", "1.25", "1.05", "(FlashInfer+)", "5.0", "-")
    ]
    assert lines[0].startswith("Fake GPU (4 SMs), driver ")
    assert "import cumla 0.21 s; first call of a process 3.40 s with a cold kernel cache" in text
    assert "*scaled: peers were measured on NVIDIA H200" in text
    assert "+: timed as the mean of back-to-back graph replays" in text


def test_markdown(results):
    lines = to_markdown(with_peers(results)).splitlines()
    (row,) = [line for line in lines if line.startswith("| 17 | 1 | 3 | 64 |")]
    assert row.endswith("| 200 | 600 | 3000 | 0.91 | 1.25 | 1.05 (FlashInfer+) | 5.0 | - |")
    at = lines.index(row)
    assert "x FlashMLA\\*" in lines[at - 2]
    assert lines[at - 1].count("---:") == lines[at - 2].count(" | ") + 1
    for table_line in (line for line in lines if line.startswith("|")):
        assert table_line.endswith("|")
    assert any("\\*scaled: peers were measured on NVIDIA H200" in line for line in lines)


def test_csv(results):
    first, second = csv.DictReader(io.StringIO(to_csv(with_peers(results))))
    assert first["us"] == "200.0"
    assert first["FlashMLA_scaled_us"] == "250.0"
    assert second["FlashMLA_scaled_us"] == ""
    assert second["kv_len"] == "128"
    assert "peers" not in first


def test_command_writes_files(fake, tmp_path, capsys):
    files = (tmp_path / "results.json", tmp_path / "results.csv")
    assert cli.main(["bench", "--json", str(files[0]), "--csv", str(files[1])]) == 0
    said = capsys.readouterr()
    assert "b2-s2-h3-kv128: " in said.err
    written = json.loads(files[0].read_text())
    assert said.out == to_text(written) + "\n"
    assert files[1].read_text() == to_csv(written)
    assert cli.main(["bench", "--markdown", str(files[0])]) == 0
    assert capsys.readouterr().out == to_markdown(written)


def test_command_keeps_what_was_measured_before_a_failure(fake, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(run, "host_times", fail)
    file = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        cli.main(["bench", "--json", str(file)])
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 2
    assert "schedule" in written


def test_command_runs_chosen_rows_only(fake, capsys):
    assert cli.main(["bench", "--rows", "b2-*"]) == 0
    assert "b17" not in capsys.readouterr().err
    assert cli.main(["bench", "--rows", "b5-*"]) == 1
    assert "rows: 'b5-*' matches none of" in capsys.readouterr().err


def test_command_fails_when_a_result_is_wrong(fake, monkeypatch, capsys):
    monkeypatch.setattr(dense.MLADecodePlan, "run", lambda self, *args, **kwargs: None)
    assert cli.main(["bench"]) == 1
    assert "out is wrong in" in capsys.readouterr().out


def test_unreadable_results_are_named(tmp_path, capsys):
    file = tmp_path / "none.json"
    assert cli.main(["bench", "--markdown", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_start_times_come_from_processes_of_their_own(monkeypatch):
    monkeypatch.setenv("CUMLA_CUBIN_DIR", "/somewhere")
    ran: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def fake_run(command: list[str], *, env: dict[str, str], **options: object) -> Any:
        ran.append((tuple(command[1:]), env))
        return SimpleNamespace(stdout=f"{len(ran)}.0\n")

    monkeypatch.setattr(start.subprocess, "run", fake_run)
    assert start.measure() == {
        "first_call_cold_s": 1.0,
        "first_call_warm_s": 3.0,
        "import_s": 7.0,
    }
    assert len({env["CUPY_CACHE_DIR"] for _, env in ran}) == 1
    assert all("CUMLA_CUBIN_DIR" not in env for _, env in ran)


def test_import_is_timed(tmp_path):
    assert 0 < start._seconds(("-c", start._IMPORT), str(tmp_path)) < 60


def test_failing_process_is_told(tmp_path):
    with pytest.raises(start.StartError, match="no such luck"):
        start._seconds(("-c", "raise RuntimeError('no such luck')"), str(tmp_path))


def test_failing_process_leaves_the_other_results(fake, monkeypatch):
    def fail() -> None:
        raise start.StartError("no such luck")

    monkeypatch.setattr(run, "measure_start", fail)
    *_, results = run.run(CASES, lambda line: None)
    assert "Start times: not measured (no such luck)" in to_text(results)
