# SPDX-License-Identifier: Apache-2.0
"""The demo on the CPU: what it prints, and that it notices wrong attention."""

from __future__ import annotations

import argparse
import io
import re
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.cli import demo
from cumla.cli.progress import ProgressBar

TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(40)).encode()
REAL_DECODE = cumla.mla_decode


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ordinal: int) -> None:
        raise cumla.UnsupportedDeviceError(f"device {ordinal}: not today\nmore")

    monkeypatch.setattr(demo, "require_hopper", refuse)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo", *argv])
    return int(args.func(args))


def table(output: str) -> dict[str, str]:
    """The header's and the last row's cells."""
    rows = [line for line in output.splitlines() if line.startswith("|")]
    header, _, cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return dict(zip(header, cells, strict=True))


def test_decodes_a_text_and_prints_the_table(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--file", str(text), "--steps", "3") == 0
    captured = capsys.readouterr()
    found = table(captured.out)
    assert found["steps"] == "3"
    assert float(found["tokens/s"]) > 0
    assert re.fullmatch(r"\d+\.\d{3} ms", found["kernel time"])
    assert 1e-5 < float(found["worst error"]) <= 1e-2  # it is bfloat16 after all
    assert found["backend"] == "cumla.reference on the CPU"
    assert f"{text}, {len(TEXT)} bytes" in captured.out
    assert "not today)" in captured.out
    assert "ok: every step within 0.01" in captured.out
    assert captured.err == ""  # no progress bar where nobody watches


def without_the_newest_token(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, table, lengths - 1, **options)


def pages_of_another_request(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, np.roll(table, 1, axis=0), lengths, **options)


def with_the_default_scale(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return REAL_DECODE(q, cache, table, lengths)


def with_a_nan(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> Any:
    result = REAL_DECODE(q, cache, table, lengths, **options)
    result.out[1, 0, 3, 5] = np.nan
    return result


@pytest.mark.parametrize(
    "wrong",
    [
        without_the_newest_token,
        pages_of_another_request,
        with_the_default_scale,
        with_a_nan,
    ],
)
def test_fails_when_attention_is_wrong(
    wrong: Callable[..., Any],
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cumla, "mla_decode", wrong)
    assert run("--file", str(text), "--steps", "2") == 1
    assert "WRONG: 2 of 2 steps" in capsys.readouterr().out


def test_one_wrong_step_is_enough(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def wrong_once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        decode = without_the_newest_token if len(calls) == 2 else REAL_DECODE
        return decode(*args, **options)

    monkeypatch.setattr(cumla, "mla_decode", wrong_once)
    assert run("--file", str(text), "--steps", "3") == 1
    assert "WRONG: 1 of 3 steps" in (output := capsys.readouterr().out)
    assert "the first is step 2" in output


def test_unusable_texts(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--file", str(text), "--steps", str(len(TEXT))) == 2
    assert f"needs a text of more than {len(TEXT)} bytes" in capsys.readouterr().err
    assert run("--file", str(text.parent / "nothing")) == 2
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--steps", "0")
    assert "needs at least 1, got 0" in capsys.readouterr().err


def test_the_default_text_is_the_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "cumla"
    monkeypatch.setattr(cumla, "__file__", str(package / "__init__.py"))
    installed = SimpleNamespace(json={"description": "# what pip keeps"})
    monkeypatch.setattr(metadata, "metadata", lambda name: installed)
    assert demo.load_text(None)[1] == b"# what pip keeps"

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", not_installed)
    with pytest.raises(ValueError, match="name a text with --file"):
        demo.load_text(None)
    (tmp_path / "README.md").write_bytes(b"# of the checkout")
    assert demo.load_text(None)[1] == b"# of the checkout"


@pytest.mark.parametrize("steps", [1, 100, len(TEXT) - 1])
def test_requests_are_stretches_of_the_text(steps: int) -> None:
    requests = demo.cut_requests(TEXT, steps)
    for request in requests:
        assert request.tokens.tobytes() in TEXT
        assert len(request.tokens) == request.prompt + steps
    if steps <= 100:
        assert len({request.prompt for request in requests}) == len(requests) > 1


def test_cache_keeps_rows_and_leaves_the_rest_poisoned() -> None:
    requests = demo.cut_requests(TEXT, 10)
    cache = demo.PagedCache.shuffled(requests, demo.CPUBackend(), seed=1)
    rng = np.random.default_rng(0)
    written = [rng.standard_normal((r.prompt, 576)).astype(demo.BF16) for r in requests]
    for i, rows in enumerate(written):
        cache.write(i, 0, rows[:5].astype(np.float32))
        cache.write(i, 5, rows[5:].astype(np.float32))
    for rows, read in zip(written, cache.read(np.array([len(r) for r in written])), strict=True):
        np.testing.assert_array_equal(read, rows.astype(np.float32))
    used = cache.table[cache.table >= 0]
    assert len(np.unique(used)) == len(used)
    assert np.any(np.diff(used) != 1)  # shuffled
    assert np.isnan(cache.pages.astype(np.float32)).sum() == cache.pages.size - 576 * sum(
        len(rows) for rows in written
    )


class FakeGPUArray(np.ndarray):
    """Refuses, as CuPy does, what is not a plain copy."""

    def set(self, array: Any) -> None:
        assert self.flags.c_contiguous
        assert (self.dtype, self.shape) == (array.dtype, array.shape)
        self[...] = array


def test_gpu_backend_copies_and_takes_the_time_of_events(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def record(self) -> None:
            self.time = time.perf_counter()

        def synchronize(self) -> None:
            self.waited = True

    def elapsed(start: Any, end: Any) -> float:
        assert end.waited
        assert end.time > start.time
        return 2.5  # milliseconds

    cupy = SimpleNamespace(
        asarray=lambda array: array.copy().view(FakeGPUArray),
        asnumpy=lambda array: array.view(np.ndarray).copy(),
        cuda=SimpleNamespace(Event=Event, get_elapsed_time=elapsed),
    )

    def decode(*arrays: Any, **options: Any) -> Any:
        assert all(isinstance(array, FakeGPUArray) for array in arrays)
        result = REAL_DECODE(*(array.view(np.ndarray) for array in arrays), **options)
        return result._replace(out=result.out.view(FakeGPUArray))

    prepared = []
    monkeypatch.setattr(cumla, "mla_decode", decode)
    monkeypatch.setattr(cumla, "prepare", lambda device, *, dtypes: prepared.append(device))
    monkeypatch.setattr(demo, "require_hopper", lambda ordinal: SimpleNamespace(name="Fake H200"))
    monkeypatch.setattr(demo, "import_cupy", lambda: cupy)
    assert run("--file", str(text), "--steps", "2") == 0
    found = table(capsys.readouterr().out)
    assert found["kernel time"] == "2.500 ms"
    assert found["backend"] == "CUDA kernels on Fake H200"
    assert prepared == [0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar() -> None:
    stream = Terminal()
    with ProgressBar("working", 4, stream=stream) as bar:
        for note in ("a long note", "b", "c", ""):
            bar.advance(note=note)
    shown = stream.getvalue().split("\r")[1:]
    assert shown[0] == "working [" + 30 * "." + "] 0/4"
    assert shown[1].startswith("working [" + 7 * "#" + 23 * "." + "] 1/4 a long note")
    assert shown[2].rstrip().endswith("2/4 b")
    assert len(shown[2]) == len(shown[1])  # the longer note is wiped out
    assert shown[4].rstrip() == "working [" + 30 * "#" + "] 4/4"
    assert shown[4].endswith("\n")

    silent = io.StringIO()
    with ProgressBar("working", 1, stream=silent) as bar:
        bar.advance()
    assert silent.getvalue() == ""
