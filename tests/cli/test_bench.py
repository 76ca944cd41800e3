# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: what its options choose, read, refuse and write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cumla import cli
from cumla.bench import dense, explain, run
from cumla.bench.cases import DENSE, Case, Ceilings, grid
from cumla.bench.report import parts, to_csv, to_text
from cumla.bench.section import Section
from cumla.errors import CumlaError, MissingDependencyError, UnsupportedDeviceError

FIGURES = {
    "us": 100.0,
    "us_low": 99.0,
    "us_high": 101.0,
    "tflops": 500.0,
    "gbps": 3000.0,
    "floor_us": 80.0,
    "efficiency": 0.8,
    "stream_only_us": 60.0,
    "graph_us": None,
    "row_error": 1e-3,
    "lse_error": 1e-6,
}
RESULTS: dict[str, Any] = {
    "format": 1,
    "date": "2026-11-29T15:00:00+00:00",
    "machine": dict.fromkeys(("gpu", "sm_count", "driver", "cupy", "nvrtc", "cumla"), "some"),
    "ceilings": Ceilings(4500.0, 4300.0, 800.0, 3.1, sustained_tflops=660.0).to_json(),
    "l2": "cold",
    "notes": [],
    "rows": [case.to_json() | FIGURES for case in DENSE],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return what --json wrote."""
    path = tmp_path / "results of a run.json"
    path.write_text(json.dumps(RESULTS))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Measures nothing: each run gives the same results, and leaves here what it was given."""
    given: dict[str, Any] = {}

    def fake(sections: tuple[Section, ...], note: Any, **options: Any) -> Iterator[dict[str, Any]]:
        given.update(options, sections=sections)
        results = RESULTS
        note("a step")
        yield results | {"rows": results["rows"][:1]}
        yield results

    monkeypatch.setattr(run, "run", fake)
    return given


def cumla_bench(*arguments: str | Path) -> int:
    return cli.main(["bench", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        ("--rows b16-* b4-*-kv8192", tuple(DENSE[i] for i in (14, 15, 16, 17, 23))),
        (
            "--batch 1 16 --q-len 1 2 --heads 16 --kv-len 1000 8192",
            grid((1, 16), (1, 2), (16,), (1000, 8192)),
        ),
        ("--batch 3", (Case(3, 1, 128, 4096),)),
        (
            "--heads 16 --dtype bfloat16 float16 --kv-heads 2 --lengths equal lognormal:4",
            (
                Case(128, 1, 16, 4096, 2, "bfloat16", None),
                Case(128, 1, 16, 4096, 2, "bfloat16", 4),
                Case(128, 1, 16, 4096, 2, "float16", None),
                Case(128, 1, 16, 4096, 2, "float16", 4),
            ),
        ),
        ("--rows b1-s1-h16-kv8192 --dtype float16", (Case(1, 1, 16, 8192, dtype="float16"),)),
    ],
)
def test_cases(asked: dict[str, Any], arguments: str, cases: tuple[Case, ...]) -> None:
    assert cumla_bench(*arguments.split()) == 0
    (section,) = asked["sections"]
    assert (section.name, section.cases) == ("rows", cases)
    assert asked["warm"] is False


def test_the_dense_table_by_default(asked: dict[str, Any]) -> None:
    assert cumla_bench("--warm") == 0
    assert asked == {"sections": (dense.SECTION,), "warm": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows b5-*", "rows: 'b5-*' matches none of b128-"),
        ("--rows b1-* --batch 3", "--rows chooses from the table: leave it out"),
        ("--heads 16 --kv-heads 3", "kv heads: 3 does not divide 16 heads"),
        ("--lengths ragged", "lengths: needs 'equal' or 'lognormal:SEED', got 'ragged'"),
        ("--from none.json", "none.json: "),
        (
            "--from a.json --q-len 2 --warm --json b.json",
            "--q-len, --warm, --json: nothing is measured where a file is read",
        ),
        (
            "--explain --json a.json --csv a.csv",
            "--json, --csv: --explain has no use for it; leave it out",
        ),
        ("--sm-count 78 --batch 1", "--sm-count: needs --explain, got none; add it"),
        ("--from a.json --sm-count 78", "--sm-count: needs --explain, got none; add it"),
    ],
)
def test_what_does_not_fit_is_said(
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cumla_bench(*arguments.split()) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"cumla bench: {message}")
    assert (said.out, asked) == ("", {})


@pytest.mark.parametrize("option", ["json", "csv"])
def test_no_folder_is_made_silently(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    path = tmp_path / "new" / "file"
    assert cumla_bench(f"--{option}", path) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"cumla bench: --{option}: needs a folder that exists, got {path}")
    assert (asked, list(tmp_path.iterdir())) == ({}, [])


@pytest.mark.parametrize("option", ["json", "csv"])
def test_what_cannot_be_written_is_said_first(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    assert cumla_bench(f"--{option}", tmp_path) == 1
    said = capsys.readouterr().err
    assert f"--{option}: needs a file, got {tmp_path}, which is a folder" in said
    assert asked == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 0", "--batch: needs a whole number from 1, got '0'"),
        ("--kv-len 64 x", "--kv-len: needs a whole number from 1, got 'x'"),
        ("--dtype fp8", "--dtype: invalid choice: 'fp8'"),
    ],
)
def test_what_argparse_refuses(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        cumla_bench(*arguments.split())
    assert f"argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [UnsupportedDeviceError("no GPU"), MissingDependencyError("no CuPy")],
    ids=["no GPU", "no CuPy"],
)
def test_without_a_gpu_what_else_there_is_to_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: CumlaError,
    file: Path,
) -> None:
    def none() -> Any:
        raise error

    monkeypatch.setattr(run, "current_device", none)
    assert cumla_bench() == 1
    said = capsys.readouterr()
    first, way_out, *commands = said.err[said.err.index("cumla bench: ") :].splitlines()
    assert (said.out, first) == ("", f"cumla bench: {error}")
    assert "needs a Hopper GPU" in way_out
    assert "cumla[cu12] or cumla[cu13]; `python -m cumla info`" in way_out + commands[0]
    options = [line.split()[4] for line in commands if line.startswith("  python -m cumla bench")]
    assert options == ["--explain", "--from"]
    assert cumla_bench("--explain") == cumla_bench("--from", file) == 0


@pytest.mark.parametrize("content", ['{"variants": [], "machine": {}, "ceilings": {}}', "[]"])
def test_a_file_of_something_else_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    assert cumla_bench("--from", file) == 1
    assert f"cumla bench: {file}: needs results of a benchmark" in capsys.readouterr().err


def test_everything_is_written(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = tmp_path / "results.json", tmp_path / "results.csv"
    assert cumla_bench("--json", files[0], "--csv", files[1]) == 0
    said = capsys.readouterr()
    assert " s  a step\n" in said.err
    written = json.loads(files[0].read_text())
    assert written == RESULTS
    assert said.out == to_text(parts(written)) + "\n"
    assert files[1].read_text() == to_csv(written["rows"])


def test_what_was_measured_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*arguments: Any, **options: Any) -> Iterator[dict[str, Any]]:
        yield {"rows": [1]}
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(run, "run", fails)
    file = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        cumla_bench("--json", file)
    assert json.loads(file.read_text()) == {"rows": [1]}


def test_a_wrong_result_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = RESULTS["rows"]
    wrong = RESULTS | {"rows": [first | {"failed": "out is off"}, *others]}
    monkeypatch.setattr(run, "run", lambda *of, **options: iter([wrong]))
    assert cumla_bench() == 1
    assert "out is off" in capsys.readouterr().out


def test_the_table_of_a_file(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    assert cumla_bench("--from", file) == 0
    assert capsys.readouterr().out == to_text(parts(RESULTS)) + "\n"
    assert asked == {}


def test_explain_measures_nothing(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cumla_bench("--explain", "--batch", "1", "2", "--heads", "16", "--sm-count", "60") == 0
    cases = grid((1, 2), (1,), (16,), (4096,))
    expected = [explain.explain(case, 60) for case in cases]
    assert capsys.readouterr().out.splitlines() == "\n".join(expected).splitlines()
    monkeypatch.setattr(explain, "find_sm_count", lambda: (78, "NVIDIA H20"))
    assert cumla_bench("--explain") == 0
    out = capsys.readouterr().out
    assert out.startswith("78 multiprocessors (NVIDIA H20)\n\nb128-s1-h128-kv1024: ")
    assert all(f"{case.name}: " in out for case in DENSE)
    assert asked == {}
