# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from cumla.errors import MissingDependencyError, UnsupportedDeviceError
from cumla.launch import device
from cumla.launch.device import DeviceProperties, import_cupy, properties, require_hopper


@pytest.fixture(autouse=True)
def forget():
    """Forget after each test what a process remembers."""
    import_cupy.cache_clear()
    properties.cache_clear()
    yield
    import_cupy.cache_clear()
    properties.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Set which distributions are installed."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


class CUDARuntimeError(RuntimeError):
    pass


def fake_gpu(major: int, minor: int, asked: list[int] | None = None) -> SimpleNamespace:
    def get(ordinal: int) -> dict[str, object]:
        if asked is not None:
            asked.append(ordinal)
        if ordinal > 0:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        return {
            "name": b"NVIDIA Something",
            "major": major,
            "minor": minor,
            "multiProcessorCount": 114,
            "sharedMemPerBlockOptin": 232448,
            "l2CacheSize": 50 << 20,
        }

    runtime = SimpleNamespace(getDeviceProperties=get, CUDARuntimeError=CUDARuntimeError)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


def test_properties_are_asked_once(monkeypatch):
    asked: list[int] = []
    gpu = fake_gpu(9, 0, asked)
    monkeypatch.setattr(device, "import_cupy", lambda: gpu)
    expected = DeviceProperties("NVIDIA Something", (9, 0), 114, 232448, 50 << 20)
    assert properties(0) == expected
    assert require_hopper(0) == expected
    assert asked == [0]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused_by_name(monkeypatch, capability):
    gpu = fake_gpu(*capability)
    monkeypatch.setattr(device, "import_cupy", lambda: gpu)
    found = "{}.{}".format(*capability)
    with pytest.raises(UnsupportedDeviceError) as refused:
        require_hopper(0)
    message = str(refused.value)
    assert f"device 0 is NVIDIA Something of compute capability {found}" in message
    assert "need an NVIDIA Hopper GPU of compute capability 9.0" in message
    assert "cumla.reference" in message


def test_no_such_gpu(monkeypatch):
    gpu = fake_gpu(9, 0)
    monkeypatch.setattr(device, "import_cupy", lambda: gpu)
    with pytest.raises(UnsupportedDeviceError, match=r"device 1: .*cudaErrorInvalidDevice"):
        require_hopper(1)


def test_cupy_is_imported(installed, monkeypatch):
    stand_in = SimpleNamespace()
    installed["cupy-cuda13x"] = "14.2.0"
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    assert import_cupy() is stand_in


def test_missing_cupy_names_both_extras(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError) as missing:
        import_cupy()
    message = str(missing.value)
    assert "CuPy, which runs the kernels on a GPU, is not installed" in message
    assert 'pip install "cumla[cu12]"' in message
    assert 'pip install "cumla[cu13]"' in message
    assert isinstance(missing.value, ImportError)
    (note,) = missing.value.__notes__
    assert "like= an array on the CPU to a plan" in note


def test_broken_cupy_is_told_from_a_missing_one(installed, monkeypatch):
    installed["cupy-cuda12x"] = "14.2.0"
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match="cannot be imported"):
        import_cupy()


def test_cupy_installed_twice_is_refused(installed, monkeypatch):
    installed.update({"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.1.0"})
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    with pytest.raises(MissingDependencyError) as twice:
        import_cupy()
    message = str(twice.value)
    assert "installed 2 times (cupy-cuda12x 14.2.0, cupy-cuda13x 14.1.0)" in message
    assert "uninstall all of them" in message
    assert 'pip install "cumla[cu13]"' in message
