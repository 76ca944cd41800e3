# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import pytest

from cumla.cli import info, main
from cumla.errors import MissingDependencyError
from cumla.launch import all_specs, device, module
from cumla.launch.source import cubin_name


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Run the command; return its rows."""
    parser = argparse.ArgumentParser()
    info.add_parser(parser.add_subparsers())
    args = parser.parse_args(["info"])
    assert args.func(args) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:24].strip(): line[25:] for line in lines if not line.startswith(" ")}


def test_every_row_is_there(capsys):
    rows = report(capsys)
    for title in ("cumla", "Python", "numpy", "torch", "CuPy", "CUDA driver", "GPUs"):
        assert rows[title]
    for title in ("NVRTC of CuPy", "NVRTC of cuda.bindings", "kernel cache (CuPy)"):
        assert rows[title]


def test_what_serves_models_is_listed(capsys, monkeypatch):
    versions = {"transformers": "5.24.0", "vllm": "0.26.0"}
    monkeypatch.setattr(info, "_version", lambda name: versions.get(name, "not installed"))
    rows = report(capsys)
    assert [rows[name] for name in (*versions, "sglang")] == [*versions.values(), "not installed"]


def test_the_kernels_are_named(capsys):
    number, _, names = report(capsys)["kernels"].partition(", of ")
    assert int(number) == len(all_specs())
    assert sorted(names.split(", ")) == sorted({spec.stem for spec in all_specs()})


def test_a_folder_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(info, "_version", lambda name: "not installed")
    assert report(capsys)["cumla"].startswith("not installed; runs from /")


def test_each_nvrtc_has_its_row(capsys, monkeypatch):
    monkeypatch.setattr(module, "cupy_nvrtc_version", lambda: (12, 8))
    monkeypatch.setattr(module, "bindings_nvrtc_version", lambda: (13, 1))
    rows = report(capsys)
    assert rows["NVRTC of CuPy"] == "12.8 (cuda.bindings compiles instead)"
    assert rows["NVRTC of cuda.bindings"] == "13.1"
    monkeypatch.setattr(module, "cupy_nvrtc_version", lambda: (13, 0))
    assert report(capsys)["NVRTC of CuPy"] == "13.0 (RawModule compiles)"


def test_it_never_raises(capsys, monkeypatch):
    def broken(*args: object) -> None:
        raise OSError("nothing works\nat all")

    monkeypatch.setattr(device, "import_cupy", broken)
    for name in ("cupy_nvrtc_version", "bindings_nvrtc_version", "cache_dir", "cubin_dir"):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(info, "_version", broken)
    rows = report(capsys)
    assert rows["cumla"] == "not available: OSError: nothing works"
    for title in ("torch", "CuPy", "NVRTC of CuPy", "GPUs", "kernel cache (CuPy)"):
        assert rows[title] == "not available: see cumla"


def test_a_reason_is_given_once(capsys, monkeypatch):
    def missing() -> None:
        raise MissingDependencyError("CuPy, which runs the kernels on a GPU, is not installed")

    monkeypatch.setattr(device, "import_cupy", missing)
    monkeypatch.setattr(module, "import_cupy", missing)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.count("CuPy, which runs the kernels") == 1
    assert text.count("not available: see CuPy\n") == 3


def test_it_says_that_the_cpu_serves(capsys):
    assert report(capsys)["arrays in CPU memory"].startswith("computed by cumla.reference; no GPU")


def test_an_error_without_words(capsys, monkeypatch):
    def broken() -> None:
        raise RuntimeError

    monkeypatch.setattr(module, "cache_dir", broken)
    assert report(capsys)["kernel cache (CuPy)"] == "not available: RuntimeError: no message"


def test_gpus_and_what_becomes_of_them(capsys, monkeypatch):
    found = {
        0: device.DeviceProperties("NVIDIA H200", (9, 0), 132, 232448, 50 << 20),
        1: device.DeviceProperties("NVIDIA A100", (8, 0), 108, 166912, 40 << 20),
    }
    monkeypatch.setattr(device, "properties", found.__getitem__)
    assert info._gpu(0) == (
        "0: NVIDIA H200, compute capability 9.0: the kernels run on it; 132 SMs, "
        "232448 bytes of shared memory a block, 50 MiB of L2"
    )
    assert "compute capability 8.0: the kernels need 9.0; 108 SMs" in info._gpu(1)


def test_cache_folder_and_cubins(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("CUMLA_CUBIN_DIR", raising=False)
    monkeypatch.delenv("CUMLA_DEBUG", raising=False)
    rows = report(capsys)
    assert rows["kernel cache (CuPy)"] == f"{tmp_path / 'none'} (not there yet)"
    none = "none (CUMLA_CUBIN_DIR is not set, cumla-cubins is not installed)"
    assert rows["kernels ahead of time"] == none
    assert rows["CUMLA_CUBIN_DIR"] == "not set"
    specs = all_specs()
    (tmp_path / cubin_name(specs[0])).write_bytes(b"image")
    (tmp_path / "older.cubin").write_bytes(b"image")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUMLA_CUBIN_DIR", str(tmp_path))
    rows = report(capsys)
    assert rows["kernel cache (CuPy)"] == f"{tmp_path} (2 cubins)"
    assert rows["kernels ahead of time"] == f"{tmp_path}: 1 of {len(specs)} kernels of this version"
    assert rows["CUMLA_CUBIN_DIR"] == str(tmp_path)
    tmp_path.chmod(0o777)
    rows = report(capsys)
    answer = rows["kernels ahead of time"]
    assert answer.startswith("not available: CumlaError: CUMLA_CUBIN_DIR: needs a folder")
    assert rows["kernel cache (CuPy)"].startswith(f"{tmp_path} (not used: needs a folder")
