# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import pytest

import cumla.launch
from cumla.cli import compile as command
from cumla.errors import CompilationError, MissingDependencyError
from cumla.launch import module
from cumla.launch.module import CompiledKernel
from cumla.launch.source import KernelSpec, cubin_name

SPECS = (
    KernelSpec("mla_schedule", "first", "f", "P", 128),
    KernelSpec("mla_schedule", "second", "g", "P", 384),
)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["compile", *words])
    code: int = args.func(args)
    return code


@pytest.fixture(autouse=True)
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
    assert "first                        FAILED" in shown.out
    assert "1 of 2 kernels clean" in shown.out
    assert "kernel first compiles, but it spills 8 bytes\nthe log" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == [cubin_name(SPECS[1])]


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


def test_debug_build(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUMLA_DEBUG", "1")
    assert run("--output", str(tmp_path)) == 0
    assert "sm_90a, debug build" in capsys.readouterr().out
    assert (tmp_path / cubin_name(SPECS[0], debug=True)).read_bytes() == b"debug"


def test_no_nvrtc(capsys, monkeypatch):
    def missing() -> None:
        raise MissingDependencyError("cuda.bindings found no NVRTC")

    monkeypatch.setattr(module, "bindings_nvrtc_version", missing)
    assert run() == 1
    assert 'pip install "cumla[cu12]"' in capsys.readouterr().err
