# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, for tests of what comes before a launch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from cumla.core import _lifetime, arrays, frameworks, plan
from cumla.launch import device as launch_device
from cumla.launch import kernel, tensor_map
from cumla.launch import module as launch_module
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    for module in (_lifetime, arrays, launch_module, plan):
        monkeypatch.setattr(module, "driver", lambda: fake)
    known = {np.ndarray: frameworks.NUMPY}
    with mock.patch.dict(frameworks.framework_of_type, known, clear=True):
        yield fake
        gc.collect()  # plans of the test, while the fakes are there
        fake.passed = True
        _lifetime.release_finished()


@pytest.fixture
def no_cupy_yet() -> Iterator[None]:
    """Forget which CuPy is installed, and which GPU is there, before and after a test."""
    caches = (frameworks.cupy_framework, launch_device.import_cupy, launch_device.properties)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def cupy(no_cupy_yet: None, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(launch_device, "installed_cupy", lambda: ("cupy-cuda12x 14.2.0",))
    monkeypatch.setattr(launch_module, "_loaded", {})
    monkeypatch.delenv("CUMLA_CUBIN_DIR", raising=False)
    return fake


@pytest.fixture
def bindings(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBindings]:
    """What kernels are launched through; it lists them."""
    fake = FakeBindings(cupy)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    caches = (launch_device.import_driver, kernel._config, tensor_map._encoded)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()
