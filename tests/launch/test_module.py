# SPDX-License-Identifier: Apache-2.0
"""How a kernel gets onto a GPU, with a CuPy that only records: no GPU is needed."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cumla.errors import (
    CompilationError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)
from cumla.launch import module
from cumla.launch.module import cupy_nvrtc_version, load, write_whole
from cumla.launch.source import ADDED_BY_CUPY, OPTIONS, cubin_name, translation_unit


class CUDADriverError(RuntimeError):
    pass


class CompileException(Exception):
    pass


class FakeCuPy:
    """As much of CuPy as loading a kernel touches."""

    def __init__(self) -> None:
        self.version = (12, 9)
        self.made: list[dict[str, object]] = []
        self.devices: list[int] = []
        self.refused = b"refused"
        self.failure: str | None = None
        self.local_bytes = 0
        self.cuda = SimpleNamespace(
            Device=self.enter,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            compiler=SimpleNamespace(CompileException=CompileException),
            nvrtc=SimpleNamespace(getVersion=lambda: self.version),
        )

    def enter(self, device: int) -> object:
        self.devices.append(device)
        return nullcontext()

    def RawModule(self, **how: object) -> object:
        return SimpleNamespace(get_function=lambda entry: self.get_function(how, entry))

    def get_function(self, how: dict[str, object], entry: str) -> SimpleNamespace:
        time.sleep(0.01)
        if "path" in how and self.refused in Path(str(how["path"])).read_bytes():
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE")
        if "code" in how and self.failure is not None:
            raise CompileException(self.failure)
        self.made.append({**how, "entry": entry})
        handle = SimpleNamespace(ptr=1000 + len(self.made))
        return SimpleNamespace(kernel=handle, local_size_bytes=self.local_bytes)


@pytest.fixture
def cupy(sources, monkeypatch) -> FakeCuPy:
    fake = FakeCuPy()
    monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(module, "require_hopper", lambda device: None)
    monkeypatch.setattr(module, "_loaded", {})
    return fake


def never() -> bool:
    return False


def test_first_call_compiles_and_later_calls_look_up(cupy, small):
    kernel = load(small, 1, capturing=never)
    assert (kernel.handle, kernel.spec, kernel.device) == (1001, small, 1)
    assert kernel.owner.max_dynamic_shared_size_bytes == 512
    (made,) = cupy.made
    assert made["code"] == translation_unit(small)
    assert (*made["options"], *ADDED_BY_CUPY) == OPTIONS
    assert cupy.devices == [1]
    assert load(small, 1, capturing=lambda: pytest.fail("asked of a warm kernel")) is kernel
    assert len(cupy.made) == 1


def test_each_device_and_each_spec_is_loaded(cupy, small):
    other = replace(small, entry="other")
    handles = {
        load(spec, device, capturing=never).handle for spec in (small, other) for device in (0, 1)
    }
    assert len(handles) == 4
    assert cupy.devices == [0, 1, 0, 1]


def test_no_shared_memory_limit_is_set_without_dynamic_shared_memory(cupy, small):
    kernel = load(replace(small, smem_bytes=0), 0, capturing=never)
    assert not hasattr(kernel.owner, "max_dynamic_shared_size_bytes")


def test_cold_kernel_under_capture_is_named(cupy, small):
    with pytest.raises(
        NotPreparedError, match=r"small_f32 is not loaded on device 3.*cumla\.prepare\(\)"
    ):
        load(small, 3, capturing=lambda: True)
    assert not cupy.made


def test_two_threads_compile_once(cupy, small):
    start = threading.Barrier(4)
    kernels = []

    def work() -> None:
        start.wait()
        kernels.append(load(small, 0, capturing=never))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cupy.made) == 1
    assert len({id(kernel) for kernel in kernels}) == 1


def test_unsupported_gpu_is_refused_before_compiling(cupy, small, monkeypatch):
    def refuse(device: int) -> None:
        raise UnsupportedDeviceError(f"device {device}")

    monkeypatch.setattr(module, "require_hopper", refuse)
    with pytest.raises(UnsupportedDeviceError, match="device 2"):
        load(small, 2, capturing=never)
    assert not cupy.made


def test_failure_shows_the_numbered_source_and_is_not_remembered(cupy, small):
    cupy.failure = "cumla/cuda/scale.cuh(5): error: something"
    with pytest.raises(CompilationError) as failure:
        load(small, 0, capturing=never)
    assert "kernel small_f32 (cumla/cuda/small.cu) does not compile" in str(failure.value)
    assert ">    5 | __device__ __forceinline__ f32 times" in str(failure.value)
    cupy.failure = None
    assert load(small, 0, capturing=never).handle == 1001


def test_local_memory_is_warned_of(cupy, small, caplog):
    cupy.local_bytes = 24
    load(small, 0, capturing=never)
    assert "small_f32 uses 24 bytes of local memory" in caplog.text


def test_debug_build_on_demand(cupy, small, monkeypatch):
    monkeypatch.setenv("CUMLA_DEBUG", "1")
    load(small, 0, capturing=never)
    assert cupy.made[0]["code"] == translation_unit(small, debug=True)


class TestCubinsAheadOfTime:
    @pytest.fixture(autouse=True)
    def folder(self, sources, tmp_path, monkeypatch):
        folder = tmp_path / "ahead"
        monkeypatch.setenv("CUMLA_CUBIN_DIR", str(folder))
        return folder

    def test_found_by_digest(self, cupy, small, folder, caplog):
        write_whole(folder / cubin_name(small), b"image")
        load(small, 0, capturing=never)
        assert cupy.made == [{"path": str(folder / cubin_name(small)), "entry": "small_f32"}]
        assert not caplog.records

    def test_needs_no_nvrtc(self, cupy, small, folder):
        write_whole(folder / cubin_name(small), b"image")
        cupy.local_bytes = 8
        cupy.cuda.nvrtc.getVersion = lambda: pytest.fail("NVRTC was looked for")
        load(small, 0, capturing=never)

    def test_of_other_sources_is_not_taken(self, cupy, small, folder, edit, caplog):
        write_whole(folder / cubin_name(small), b"image")
        edit("scale.cuh", "x * y", "x + y")
        load(small, 0, capturing=never)
        assert "code" in cupy.made[0]
        assert "is not there, so kernel small_f32 is compiled now" in caplog.text

    def test_refused_one_is_compiled_instead(self, cupy, small, folder, caplog):
        write_whole(folder / cubin_name(small), b"refused")
        with caplog.at_level(logging.WARNING):
            assert load(small, 0, capturing=never).handle == 1001
        assert "code" in cupy.made[0]
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "was refused by the driver" in record.getMessage()
        assert "python -m cumla compile --output" in record.getMessage()


class TestOlderNvrtc:
    """NVRTC 12.8 and older: compiled through cuda.bindings, loaded from a file."""

    @pytest.fixture(autouse=True)
    def compiled(self, cupy, tmp_path, monkeypatch):
        cupy.version = (12, 8)
        compiled = []

        def compile_(spec, text, options):
            compiled.append((spec, text, options))
            return b"image", "log"

        monkeypatch.setattr(module, "_compile", compile_)
        monkeypatch.setattr(module, "bindings_nvrtc_version", lambda: (12, 8))
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
        return compiled

    def test_same_text_and_options_through_a_file(self, cupy, small, compiled, tmp_path):
        load(small, 0, capturing=never)
        assert compiled == [(small, translation_unit(small), OPTIONS)]
        (made,) = cupy.made
        assert made["path"] == str(tmp_path / "cache" / f"cumla-nvrtc12.8-{cubin_name(small)}")

    def test_the_file_serves_the_next_process(self, cupy, small, compiled, monkeypatch):
        load(small, 0, capturing=never)
        monkeypatch.setattr(module, "_loaded", {})
        load(small, 0, capturing=never)
        assert len(compiled) == 1
        assert len(cupy.made) == 2

    def test_damaged_file_is_written_anew(self, cupy, small, compiled, monkeypatch):
        load(small, 0, capturing=never)
        Path(str(cupy.made[0]["path"])).write_bytes(b"refused")
        monkeypatch.setattr(module, "_loaded", {})
        load(small, 0, capturing=never)
        assert len(compiled) == 2
        assert len(cupy.made) == 2


def test_cupy_without_nvrtc(cupy, small):
    def absent() -> None:
        raise RuntimeError("libnvrtc.so.12: no such file\nmore")

    cupy.cuda.nvrtc.getVersion = absent
    with pytest.raises(
        MissingDependencyError, match=r"CuPy found no NVRTC \(libnvrtc\.so\.12: no such file\)"
    ) as missing:
        load(small, 0, capturing=never)
    assert 'pip install "cumla[cu12]"' in str(missing.value)
    with pytest.raises(MissingDependencyError):
        cupy_nvrtc_version()


def test_write_whole_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "deep" / "file"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert [found.name for found in path.parent.iterdir()] == ["file"]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        write_whole(path, b"three")
    assert [found.name for found in path.parent.iterdir()] == ["file"]


def test_cubins_are_readable_by_all(tmp_path):
    beside = tmp_path / "beside"
    beside.write_bytes(b"")
    write_whole(tmp_path / "file", b"image")
    assert (tmp_path / "file").stat().st_mode == beside.stat().st_mode
