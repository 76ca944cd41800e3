# SPDX-License-Identifier: Apache-2.0
"""How a kernel gets onto a GPU, with a CuPy that only records: no GPU is needed."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cumla.core._driver import Driver
from cumla.errors import (
    CompilationError,
    CumlaError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)
from cumla.launch import module
from cumla.launch.module import cupy_nvrtc_version, load, write_whole
from cumla.launch.source import ADDED_BY_CUPY, OPTIONS, cubin_name, translation_unit
from tests.fake_cuda import FakeDriver, FakeLibrary


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
        self.can_write = True  # to its cache
        self.local_bytes = 0
        self.images: list[bytes] = []  # of cubins that were loaded
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
        if "path" in how:
            if not Path(str(how["path"])).is_file():
                raise CUDADriverError("CUDA_ERROR_FILE_NOT_FOUND")
            image = Path(str(how["path"])).read_bytes()
            if self.refused in image:
                raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE")
            self.images.append(image)
        if "code" in how and self.failure is not None:
            raise CompileException(self.failure)
        if "code" in how and not (self.can_write or os.environ.get("CUPY_CACHE_IN_MEMORY")):
            raise PermissionError("[Errno 13] Permission denied: 'kernel_cache'")
        self.made.append({**how, "entry": entry})
        handle = SimpleNamespace(ptr=1000 + len(self.made))
        return SimpleNamespace(kernel=handle, local_size_bytes=self.local_bytes)


@pytest.fixture
def cupy(sources, monkeypatch) -> FakeCuPy:
    fake = FakeCuPy()
    monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(module, "driver", FakeDriver)
    monkeypatch.setattr(module, "require_hopper", lambda device: None)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setenv("CUPY_CACHE_DIR", os.path.join(os.devnull, "none"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")  # to be what it was afterwards
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


def test_cache_that_cannot_be_written_to(cupy, small, monkeypatch, caplog):
    """Kernels are compiled in memory, and it is said once."""
    cupy.can_write = False
    for entry in ("first", "second"):
        load(replace(small, entry=entry), 0, capturing=never)
    assert [made["entry"] for made in cupy.made] == ["first", "second"]
    (record,) = caplog.records
    assert "kept in CuPy's cache folder ([Errno 13] Permission denied" in record.getMessage()
    assert "let CUPY_CACHE_DIR name a folder" in record.getMessage()


def test_cold_kernel_under_capture_is_named(cupy, small):
    with pytest.raises(
        NotPreparedError, match=r"small_f32 is not loaded on device 3.*cumla\.prepare"
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


def test_loading_leaves_captures_of_other_threads_alone(cupy, small, monkeypatch):
    """The driver forbids it under a global-mode capture, except to a thread in relaxed mode."""
    mode = []

    @contextmanager
    def relaxed_capture():
        mode.append("relaxed")
        yield
        mode.pop()

    fake = FakeDriver()
    monkeypatch.setattr(fake, "relaxed_capture", relaxed_capture)
    monkeypatch.setattr(module, "driver", lambda: fake)
    get_function = cupy.get_function

    def in_mode(how, entry):
        assert mode == ["relaxed"]
        return get_function(how, entry)

    cupy.get_function = in_mode
    load(small, 0, capturing=never)
    assert len(cupy.made) == 1
    assert mode == []


@pytest.mark.parametrize("current", [None, 100, 103, 203])
def test_loading_keeps_the_context_of_the_caller(cupy, small, monkeypatch, current):
    """Even a green one of the same device, 203: the kernel is the primary context's, 103."""
    library = FakeLibrary(current)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    cuda = Driver()
    monkeypatch.setattr(module, "driver", lambda: cuda)

    @contextmanager
    def use(device: int):
        before = library.context % 100
        library.context = 100 + device  # cudaSetDevice replaces the current context
        yield
        library.context = 100 + before

    contexts = []
    cupy.cuda.Device = use
    cupy.RawModule = lambda **how: (
        contexts.append(library.context) or FakeCuPy.RawModule(cupy, **how)
    )
    load(small, 3, capturing=never)
    assert contexts == [103]
    assert (library.context, library.pushed) == (current, [])
    cupy.failure = "cumla/cuda/scale.cuh(5): error: something"
    with pytest.raises(CompilationError):
        load(replace(small, entry="other"), 3, capturing=never)
    assert (library.context, library.pushed) == (current, [])


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
    assert "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'" in caplog.text


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

    @pytest.mark.parametrize("of_file", [False, True])
    @pytest.mark.parametrize(("mode", "refused"), [(0o775, True), (0o757, True), (0o755, False)])
    def test_that_others_may_write(self, cupy, small, folder, of_file, mode, refused):
        write_whole(folder / cubin_name(small), b"image")
        at = folder / cubin_name(small) if of_file else folder
        at.chmod(mode)
        if not refused:
            load(small, 0, capturing=never)
            return
        message = (
            rf"^CUMLA_CUBIN_DIR: needs .*, got {at} of user \d+ with mode {mode:o}: whoever may "
            rf"write there chooses the code .*; .*`chmod go-w {at}`$"
        )
        with pytest.raises(CumlaError, match=message):
            load(small, 0, capturing=never)
        assert not cupy.made

    @pytest.mark.parametrize(("owner", "refused"), [(0, False), (1000, False), (1001, True)])
    def test_of_another_user(self, folder, monkeypatch, owner, refused):
        folder.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        stat = SimpleNamespace(st_uid=owner, st_mode=0o40755)
        monkeypatch.setattr(os, "stat", lambda path: stat)
        if refused:
            with pytest.raises(CumlaError, match=f"of user {owner} with mode 755"):
                module.cubin_dir()
        else:
            assert module.cubin_dir() == folder

    def test_written_under_a_loose_umask(self, cupy, small, folder):
        before = os.umask(0o002)
        try:
            write_whole(folder / cubin_name(small), b"image")
        finally:
            os.umask(before)
        load(small, 0, capturing=never)
        assert "path" in cupy.made[0]


class TestInstalledCubins:
    """Those of the wheel cumla-cubins."""

    @pytest.fixture(autouse=True)
    def folder(self, sources, tmp_path, monkeypatch):
        folder = tmp_path / "cumla_cubins"
        write_whole(folder / "__init__.py", b"raise AssertionError('imported')")
        monkeypatch.delitem(sys.modules, "cumla_cubins")
        monkeypatch.syspath_prepend(tmp_path)
        return folder

    def test_found_without_a_variable(self, cupy, small, folder, caplog):
        write_whole(folder / cubin_name(small), b"image")
        folder.chmod(0o775)  # as the folder of cumla itself may be
        cupy.cuda.nvrtc.getVersion = lambda: pytest.fail("NVRTC was looked for")
        load(small, 0, capturing=never)
        assert cupy.made == [{"path": str(folder / cubin_name(small)), "entry": "small_f32"}]
        assert not caplog.records

    @pytest.mark.parametrize("change", ["text", "threads", "refused by the driver"])
    def test_what_is_not_of_these_sources_is_compiled(
        self, cupy, small, folder, edit, caplog, change
    ):
        refused = change == "refused by the driver"
        write_whole(folder / cubin_name(small), b"refused" if refused else b"image")
        if change == "text":
            edit("scale.cuh", "x * y", "x + y")
        elif change == "threads":
            small = replace(small, threads=2 * small.threads)
        load(small, 0, capturing=never)
        assert "code" in cupy.made[0]
        (record,) = caplog.records
        assert f"kernel small_f32 of these sources is not in {folder}" in record.getMessage()

    def test_variable_comes_first(self, cupy, small, folder, tmp_path, monkeypatch):
        for place in (folder, tmp_path / "ahead"):
            write_whole(place / cubin_name(small), b"image")
        monkeypatch.setenv("CUMLA_CUBIN_DIR", str(tmp_path / "ahead"))
        load(small, 0, capturing=never)
        assert cupy.made[0]["path"] == str(tmp_path / "ahead" / cubin_name(small))

    def test_debug_builds_are_compiled(self, cupy, small, folder, monkeypatch, caplog):
        write_whole(folder / cubin_name(small), b"image")
        monkeypatch.setenv("CUMLA_DEBUG", "1")
        load(small, 0, capturing=never)
        assert "code" in cupy.made[0]
        assert not caplog.records

    def test_folder_that_is_no_package(self, cupy, small, folder):
        (folder / "__init__.py").unlink()
        write_whole(folder / cubin_name(small), b"image")
        load(small, 0, capturing=never)
        assert "code" in cupy.made[0]


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

    @pytest.mark.parametrize("obstacle", ["file", "folder"])
    def test_folder_that_cannot_be_written_to(
        self, cupy, small, compiled, tmp_path, obstacle, caplog
    ):
        """The kernel goes through a temporary file, which is there until the driver has read it."""
        if obstacle == "file":
            (tmp_path / "cache").write_bytes(b"")
        else:
            name = f"cumla-nvrtc12.8-{cubin_name(small)}"
            (tmp_path / "cache" / name / "in the way").mkdir(parents=True)
        assert load(small, 0, capturing=never).handle == 1001
        (made,) = cupy.made
        assert cupy.images == [b"image"]
        assert not Path(str(made["path"])).exists()
        (record,) = caplog.records
        assert "kernels are not kept in CuPy's cache folder (" in record.getMessage()
        assert "let CUPY_CACHE_DIR name a folder" in record.getMessage()

    def test_compiles_in_memory_if_asked_to(self, cupy, small, compiled, tmp_path, monkeypatch):
        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
        for _ in range(2):
            monkeypatch.setattr(module, "_loaded", {})
            load(small, 0, capturing=never)
        assert len(compiled) == 2
        assert not (tmp_path / "cache").exists()


class TestCacheOfOthers:
    """CuPy's cache folder, where somebody else may put kernels."""

    @pytest.fixture(autouse=True)
    def cache(self, cupy, tmp_path, monkeypatch):
        cache = tmp_path / "cache"
        cache.mkdir(mode=0o755)
        (cache / "one.cubin").write_bytes(b"image")
        monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
        return cache

    def load_two(self, small, caplog):
        """Load two kernels; whether the cache served, and the warnings."""
        for entry in ("first", "second"):
            load(replace(small, entry=entry), 0, capturing=never)
        warnings = [record.getMessage() for record in caplog.records]
        return os.environ["CUPY_CACHE_IN_MEMORY"] != "1", warnings

    @pytest.mark.parametrize("of_file", [False, True])
    @pytest.mark.parametrize(("mode", "serves"), [(0o757, False), (0o777, False), (0o775, True)])
    def test_modes(self, small, cache, caplog, of_file, mode, serves):
        at = cache / "one.cubin" if of_file else cache
        at.chmod(mode)
        found, warnings = self.load_two(small, caplog)
        assert found == serves
        assert len(warnings) == (0 if serves else 1)
        for warning in warnings:
            assert f"got {at} of user {os.geteuid()} with mode {mode:o}" in warning
            assert f"`chmod go-w {at}`" in warning
            assert "every process compiles them again; let CUPY_CACHE_DIR name" in warning

    @pytest.mark.parametrize("of_file", [False, True])
    @pytest.mark.parametrize(("owner", "serves"), [(0, True), (1000, True), (1001, False)])
    def test_owners(self, small, cache, monkeypatch, caplog, of_file, owner, serves):
        at = str(cache / "one.cubin" if of_file else cache)
        users = {str(cache): 1000, str(cache / "one.cubin"): 1000, at: owner}
        real = os.stat

        def stat(path, **how):
            found = real(path, **how)
            user = users.get(str(path))
            return found if user is None else SimpleNamespace(st_uid=user, st_mode=0o755)

        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(os, "stat", stat)
        found, warnings = self.load_two(small, caplog)
        assert found == serves
        assert len(warnings) == (0 if serves else 1)
        for warning in warnings:
            assert f"got {at} of user 1001 with mode 755" in warning
            assert "in a folder of your own" in warning

    def test_files_are_looked_at_once(self, small, cache, tmp_path, monkeypatch, caplog):
        """A folder may hold thousands; the folder itself is looked at each time."""
        looked, real = [], os.stat

        def stat(path, **how):
            looked.append(str(path))
            return real(path, **how)

        monkeypatch.setattr(os, "stat", stat)
        assert self.load_two(small, caplog) == (True, [])
        assert looked.count(str(cache / "one.cubin")) == 1
        other = tmp_path / "other"
        other.mkdir(mode=0o755)
        (other / "two.cubin").write_bytes(b"image")
        monkeypatch.setenv("CUPY_CACHE_DIR", str(other))
        assert self.load_two(replace(small, threads=64), caplog) == (True, [])
        assert looked.count(str(other / "two.cubin")) == 1
        other.chmod(0o777)
        found, (warning,) = self.load_two(replace(small, threads=96), caplog)
        assert not found
        assert f"got {other} of user" in warning

    def test_a_folder_that_appears_later(self, small, cache, monkeypatch, caplog):
        monkeypatch.setenv("CUPY_CACHE_DIR", str(cache / "later"))
        assert self.load_two(small, caplog) == (True, [])
        (cache / "later").mkdir(mode=0o755)
        at = cache / "later" / "planted.cubin"
        at.write_bytes(b"image")
        at.chmod(0o777)
        found, (warning,) = self.load_two(replace(small, threads=64), caplog)
        assert not found
        assert f"got {at} of user" in warning

    def test_a_folder_that_cannot_be_listed(self, small, cache, monkeypatch, caplog):
        def refuse(path):
            raise PermissionError(f"[Errno 13] Permission denied: {path}")

        monkeypatch.setattr(os, "listdir", refuse)
        assert self.load_two(small, caplog) == (True, [])
        cache.chmod(0o733)
        found, (warning,) = self.load_two(replace(small, threads=64), caplog)
        assert not found
        assert f"got {cache} of user" in warning

    def test_older_nvrtc_takes_no_kernel_from_there(self, cupy, small, cache, monkeypatch):
        monkeypatch.setattr(module, "_compile", lambda *_: (b"compiled", "log"))
        monkeypatch.setattr(module, "bindings_nvrtc_version", lambda: (12, 8))
        cupy.version = (12, 8)
        planted = cache / f"cumla-nvrtc12.8-{cubin_name(small)}"
        write_whole(planted, b"planted")
        cache.chmod(0o777)
        load(small, 0, capturing=never)
        assert cupy.images == [b"compiled"]
        assert planted.read_bytes() == b"planted"

    def test_cubins_of_ours_need_no_cache(self, cupy, small, cache, tmp_path, monkeypatch, caplog):
        cache.chmod(0o777)
        write_whole(tmp_path / "ahead" / cubin_name(small), b"image")
        monkeypatch.setenv("CUMLA_CUBIN_DIR", str(tmp_path / "ahead"))
        load(small, 0, capturing=never)
        assert not caplog.records
        assert os.environ["CUPY_CACHE_IN_MEMORY"] == ""


def test_cache_folder_of_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(module.os.path, "expanduser", lambda path: path)
    assert module.cache_dir() == Path("~/.cupy/kernel_cache")


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
