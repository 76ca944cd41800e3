# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import cumla
from cumla.cli import COMMANDS, info, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in COMMANDS)
    assert "MLA, MHA and GQA" in text


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "--jobs"),
        ("demo", "--steps"),
        ("bench", "--batch"),
        ("info", "--block-size"),
        ("info", "--tensor-parallel-size"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ""])
def test_numbers_of_the_arguments(
    words: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([words[0], f"{words[1]}={value}"])
    error = capsys.readouterr().err
    assert f"error: argument {words[1]}" in error
    assert f": needs a whole number from 1, got {value!r}" in error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (cumla.UnsupportedDeviceError("found a GPU"), 1, "cumla info: found a GPU\n"),
        (FileExistsError(17, "Exists", "it"), 1, "cumla info: [Errno 17] Exists: 'it'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_that_need_no_traceback(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == code
    assert capsys.readouterr().err == message


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(info, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["info"])


def test_a_closed_pipe_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cumla", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("info >&-", 0, ""),
        ("--version >&-", 0, ""),
        ("info >/dev/full", 1, "cumla info: [Errno 28] No space left on device\n"),
    ],
)
def test_output_that_nobody_takes(command: str, code: int, message: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m cumla {command}"], capture_output=True, text=True
    )
    seen = done.stderr.replace(f"cumla {cumla.__version__}\n", "")  # argparse, instead
    assert (done.returncode, seen) == (code, message)


def test_a_reader_that_leaves_early() -> None:
    script = f"({sys.executable} -m cumla info; echo $? >&2) | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("cumla ")
    assert done.stderr in ("0\n", "1\n")
