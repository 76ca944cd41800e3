# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import cumla.launch
from cumla.cli import main
from cumla.errors import CompilationError, CumlaError, MissingDependencyError
from cumla.launch import all_specs, module
from cumla.launch.module import CompiledKernel, cubin_dir
from cumla.launch.source import cubin_name

SPECS = tuple(
    replace(all_specs()[0], entry=entry, function="f", params="P", threads=threads)
    for entry, threads in (("first", 128), ("second", 384))
)
QUICK = [spec for spec in all_specs() if spec.stem == "append_indexer_cache"][:2]


def run(*words: str) -> int:
    return main(["compile", "--jobs", "1", *words])


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that fails the kernels named in the list it returns."""
    failing: list[str] = []

    def compile_to_cubin(spec, *, debug=False):
        if spec.entry in failing:
            raise CompilationError(
                f"kernel {spec.entry} compiles, but it spills 8 bytes", "the log"
            )
        image = b"debug" if debug else spec.entry.encode() * 1000
        return CompiledKernel(image, "", 168, 232160, 0, 0, ())

    monkeypatch.setattr(cumla.launch, "all_specs", lambda: SPECS)
    monkeypatch.setattr(module, "compile_to_cubin", compile_to_cubin)
    monkeypatch.setattr(module, "bindings_nvrtc_version", lambda: (12, 9))
    monkeypatch.delenv("CUMLA_DEBUG", raising=False)
    return failing


@pytest.mark.usefixtures("compiler")
def test_table_of_clean_kernels(capsys):
    assert run() == 0
    head, titles, first, second, last = capsys.readouterr().out.splitlines()
    assert head == "NVRTC 12.9, sm_90a"
    assert titles.split()[:6] == ["kernel", "threads", "registers", "shared", "stack", "spills"]
    assert first.split()[:7] == ["first", "128", "168", "232160", "0", "0", "5.0"]
    assert second.split()[:2] == ["second", "384"]
    assert last == "2 of 2 kernels clean"


def test_failed_kernel_is_named_and_the_others_go_on(capsys, compiler, tmp_path):
    compiler.append("first")
    assert run("--output", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert re.search(r"^first +FAILED$", shown.out, re.MULTILINE)
    assert "1 of 2 kernels clean" in shown.out
    assert "kernel first compiles, but it spills 8 bytes\nthe log" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == [cubin_name(SPECS[1])]


@pytest.mark.usefixtures("compiler")
def test_output_writes_what_the_loader_looks_for(capsys, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert run("--output", str(folder)) == 0
    assert {path.name for path in folder.iterdir()} == {cubin_name(spec) for spec in SPECS}
    assert (folder / cubin_name(SPECS[0])).read_bytes() == b"first" * 1000
    assert f"set CUMLA_CUBIN_DIR={folder}" in capsys.readouterr().out


def test_nothing_written_is_not_claimed(capsys, compiler, tmp_path):
    compiler.extend(["first", "second"])
    assert run("--output", str(tmp_path)) == 1
    assert "CUMLA_CUBIN_DIR" not in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_debug_build(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUMLA_DEBUG", "1")
    assert run("--output", str(tmp_path)) == 0
    assert "sm_90a, debug build" in capsys.readouterr().out
    assert (tmp_path / cubin_name(SPECS[0], debug=True)).read_bytes() == b"debug"


@pytest.mark.usefixtures("compiler")
def test_no_nvrtc(capsys, monkeypatch):
    def missing() -> None:
        raise MissingDependencyError("cuda.bindings found no NVRTC")

    monkeypatch.setattr(module, "bindings_nvrtc_version", missing)
    assert run() == 1
    assert 'pip install "cumla[cu12]"' in capsys.readouterr().err


@pytest.mark.usefixtures("compiler")
def test_output_that_is_no_folder(capsys, tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/folder"):
        assert run("--output", str(tmp_path / name)) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(rf"cumla compile: --output \S+/{name}: .+\n", shown.err)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_output_that_others_may_write_to(capsys, monkeypatch, tmp_path, mode):
    """What the loader would refuse is not written either."""
    tmp_path.chmod(mode)
    monkeypatch.setenv("CUMLA_CUBIN_DIR", str(tmp_path))
    with pytest.raises(CumlaError) as refused:
        cubin_dir()
    monkeypatch.delenv("CUMLA_CUBIN_DIR")
    assert run("--output", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert str(refused.value).removeprefix("CUMLA_CUBIN_DIR: ") in said
    assert f"mode {mode:03o}" in said
    assert not list(tmp_path.iterdir())
    old = os.umask(0)
    try:
        assert run("--output", str(tmp_path / "made")) == 0
    finally:
        os.umask(old)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("compiler")
def test_jobs_are_at_least_one(capsys):
    with pytest.raises(SystemExit):
        run("--jobs", "0")
    assert "needs a whole number from 1, got '0'" in capsys.readouterr().err


def test_processes_compile_what_one_does(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(cumla.launch, "all_specs", lambda: QUICK)
    tables = []
    for jobs in ("1", "2"):
        assert run("--jobs", jobs, "--output", str(tmp_path / jobs)) == 0
        rows = capsys.readouterr().out.splitlines()[2 : 2 + len(QUICK)]
        tables.append([row.rsplit(maxsplit=1)[0] for row in rows])  # all but the seconds
    assert tables[0] == tables[1]
    for path in (tmp_path / "1").iterdir():
        assert (tmp_path / "2" / path.name).read_bytes() == path.read_bytes()


def test_a_kernel_that_fails_in_another_process_is_named(capsys, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(cumla.launch, "all_specs", lambda: SPECS)
    assert run("--jobs", "2") == 1
    shown = capsys.readouterr()
    assert re.findall(r"^(\w+) +FAILED$", shown.out, re.MULTILINE) == ["first", "second"]
    assert re.findall(r"^kernel (\w+) .* does not compile$", shown.err, re.MULTILINE) == [
        "first",
        "second",
    ]


@pytest.mark.parametrize("stdout", ["closed", "nobody reads"])
def test_stdout_that_takes_nothing(stdout):
    """No traceback, whichever way the table is lost."""
    script = (
        "import sys, cumla.launch as launch\n"
        "from cumla.cli import main\n"
        "launch.all_specs = lambda: ()\n"
        "sys.exit(main(['compile', '--jobs', '1']))"
    )
    command = [sys.executable, "-c", script]
    if stdout == "closed":
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, check=False, text=True, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == (0 if stdout == "closed" else 1)
