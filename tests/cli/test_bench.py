# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: what its options choose, read, refuse and write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from cumla import cli
from cumla.bench import explain, gpu, plot, run
from cumla.bench.cases import DENSE, Case, grid
from cumla.bench.report import to_csv, to_markdown, to_text
from cumla.cli import bench
from cumla.errors import CumlaError, MissingDependencyError, UnsupportedDeviceError

RECORDED = Path(str(resources.files("cumla.bench").joinpath("results", "h200.json")))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Measures nothing: each run gives the recorded results, and leaves here what it was given."""
    given: dict[str, Any] = {}

    def fake(cases: tuple[Case, ...], note: Any, **options: Any) -> Iterator[dict[str, Any]]:
        given.update(options, cases=cases)
        results = json.loads(RECORDED.read_text())
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
        ("", DENSE),
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
    assert asked["cases"] == cases
    assert (asked["peers"], asked["warm"], asked["only"]) == (None, False, None)


def test_dtype_alone_is_the_table_in_that_dtype(asked: dict[str, Any]) -> None:
    assert cumla_bench("--dtype", "float16") == 0
    assert [case.name for case in asked["cases"]] == [f"{case.name}-float16" for case in DENSE]


@pytest.mark.parametrize(
    ("names", "peers"),
    [
        (("all",), ("sdpa", "triton", "flashinfer", "flashmla", "fa3", "deepgemm")),
        (("none",), ()),
        (("triton", "sdpa"), ("triton", "sdpa")),
    ],
)
def test_peers(asked: dict[str, Any], names: tuple[str, ...], peers: tuple[str, ...]) -> None:
    assert cumla_bench("--peers", *names, "--warm") == 0
    assert (asked["cases"], asked["peers"], asked["warm"]) == (DENSE, peers, True)


def test_sections_of_the_command_are_those_of_the_benchmark() -> None:
    assert bench._SECTIONS == run.SECTIONS


@pytest.mark.parametrize("section", run.SECTIONS)
def test_only(asked: dict[str, Any], section: str) -> None:
    assert cumla_bench("--only", section, "--warm") == 0
    assert asked == {"cases": (), "peers": None, "warm": True, "only": section}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows b5-*", "rows: 'b5-*' matches none of b128-"),
        ("--rows b1-* --batch 3", "--rows chooses from the table: leave it out"),
        ("--heads 16 --kv-heads 3", "kv heads: 3 does not divide 16 heads"),
        ("--lengths ragged", "lengths: needs 'equal' or 'lognormal:SEED', got 'ragged'"),
        ("--peers none sdpa", "--peers: all and none stand alone, got none sdpa"),
        ("--from none.json", "none.json: "),
        ("--markdown none.json", "none.json: "),
        ("--from a.json --markdown b.json", "--from and --markdown both name a file"),
        (
            "--from a.json --q-len 2 --warm --json b.json",
            "--q-len, --warm, --json: nothing is measured where a file is read",
        ),
        (
            "--variants --warm --csv a.csv --from b.json",
            "--warm, --from, --csv: --variants has no use for it; leave it out",
        ),
        (
            "--explain --json a.json --plot a",
            "--json, --plot: --explain has no use for it; leave it out",
        ),
        ("--explain --only forms", "--only: --explain has no use for it; leave it out"),
        ("--variants --only forms", "--only: --variants has no use for it; leave it out"),
        ("--only forms --from a.json", "--only: nothing is measured where a file is read"),
        ("--only forms --markdown a.json", "--only: nothing is measured where a file is read"),
        (
            "--only forms --q-len 2 --kv-heads 1 --peers all --csv a.csv --plot a",
            "--q-len, --kv-heads, --peers, --csv, --plot: --only has no use for it; leave it out",
        ),
        ("--only fp8 --rows b1-*", "--rows: --only has no use for it; leave it out"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 0", "--batch: needs a whole number from 1, got '0'"),
        ("--kv-len 64 x", "--kv-len: needs a whole number from 1, got 'x'"),
        ("--dtype fp8", "--dtype: invalid choice: 'fp8'"),
        ("--peers cuda", "--peers: invalid choice: 'cuda'"),
        ("--only dense", "--only: invalid choice: 'dense'"),
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
@pytest.mark.parametrize("arguments", [[], ["--only", "forms"], ["--variants"]])
def test_without_a_gpu_what_else_there_is_to_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: CumlaError,
    arguments: list[str],
) -> None:
    def none() -> Any:
        raise error

    monkeypatch.setattr(run, "current_device", none)
    monkeypatch.setattr(run, "measure_start", pytest.fail)  # nothing takes time before that
    monkeypatch.setattr(gpu, "import_cupy", none)
    assert cumla_bench(*arguments) == 1
    said = capsys.readouterr()
    first, way_out, *commands = said.err[said.err.index("cumla bench: ") :].splitlines()
    assert (said.out, first) == ("", f"cumla bench: {error}")
    assert "needs a Hopper GPU" in way_out
    assert "cumla[cu12] or cumla[cu13]; `python -m cumla info`" in way_out
    lines = [line.partition("#")[0].split() for line in commands]
    assert [line[:3] for line in lines] == [["python", "-m", "cumla"]] * 3
    (_, explained), (_, read, recorded), demo = (line[3:] for line in lines)
    assert (explained, read, demo) == ("--explain", "--from", ["demo"])
    assert Path(recorded) == RECORDED
    assert cumla_bench(explained) == cumla_bench(read, recorded, "--markdown") == 0


@pytest.mark.parametrize("content", ['{"variants": [], "machine": {}, "ceilings": {}}', "[]"])
@pytest.mark.parametrize("option", ["--from", "--markdown"])
def test_a_file_without_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, content: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    assert cumla_bench(option, file) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"cumla bench: {file}: needs results of a benchmark, with rows and ceilings, got another "
        f"file, such as --variants writes; name one that --json wrote without it\n"
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [("h200-peers.json", ", in this run,"), ("h200.json", ","), ("h100.json", ",")],
)
def test_where_peers_ran(capsys: pytest.CaptureFixture[str], name: str, where: str) -> None:
    assert cumla_bench("--markdown", RECORDED.with_name(name)) == 0
    assert f"; x peer: the peer's time{where} divided by ours." in capsys.readouterr().out


def test_everything_is_written(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "a" / "results.json", tmp_path / "b" / "results.csv"
    assert cumla_bench("--json", files[0], "--csv", files[1], "--plot", tmp_path / "c") == 0
    said = capsys.readouterr()
    assert " s  a step\n" in said.err
    written = json.loads(files[0].read_text())
    assert written == json.loads(RECORDED.read_text())
    assert said.out == to_text(written) + "\n"
    assert files[1].read_text() == to_csv(written)
    assert (tmp_path / "c" / "roofline.svg").exists()


def test_missing_matplotlib_is_said_before_anything_is_measured(
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert cumla_bench("--plot", tmp_path) == 1
    assert 'pip install "cumla[bench]"' in capsys.readouterr().err
    assert asked == {}


@pytest.mark.parametrize(
    "arguments", [("--markdown", RECORDED), ("--from", RECORDED, "--markdown")]
)
def test_markdown_of_a_file(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: tuple[str | Path, ...]
) -> None:
    assert cumla_bench(*arguments) == 0
    assert capsys.readouterr().out == to_markdown(json.loads(RECORDED.read_text()))
    assert asked == {}


def test_file_is_reported_like_a_measurement(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.csv"
    assert cumla_bench("--from", RECORDED, "--plot", tmp_path / "plots", "--csv", file) == 0
    recorded = json.loads(RECORDED.read_text())
    assert capsys.readouterr().out == to_text(recorded) + "\n"
    assert file.read_text() == to_csv(recorded)
    assert len(list((tmp_path / "plots").iterdir())) == 6
    assert asked == {}


def test_markdown_of_a_measurement(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cumla_bench("--markdown", "--batch", "3") == 0
    assert asked["cases"] == (Case(3, 1, 128, 4096),)
    assert capsys.readouterr().out == to_markdown(json.loads(RECORDED.read_text()))


def test_explain_measures_nothing(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cumla_bench("--explain", "--batch", "1", "2", "--heads", "16", "--sm-count", "60") == 0
    cases = grid((1, 2), (1,), (16,), (4096,))
    expected = [explain.explain(case, 60) for case in cases]
    assert capsys.readouterr().out.splitlines() == "\n".join(expected).splitlines()
    assert asked == {}


def test_explain_says_where_the_multiprocessors_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "find_sm_count", lambda: (78, "NVIDIA H20"))
    assert cumla_bench("--explain") == 0
    out = capsys.readouterr().out
    assert out.startswith("78 multiprocessors (NVIDIA H20)\n\nb128-s1-h128-kv1024: ")
    assert all(f"{case.name}: " in out for case in DENSE)
