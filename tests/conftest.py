# SPDX-License-Identifier: Apache-2.0
"""Which tests run, and a GPU that is not there, for tests of what comes before a launch."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

if "PYTEST_XDIST_WORKER" in os.environ:  # or each worker's BLAS takes all cores, and spins on them
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import numpy as np
import pytest

from cumla.core import _lifetime, arrays, frameworks, plan
from cumla.launch import device as launch_device
from cumla.launch import kernel, tensor_map
from cumla.launch import module as launch_module
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("cumla").addoption(
        "--exhaustive",
        action="store_true",
        help="run the tests marked exhaustive, too: with each change of a kernel and before a "
        "benchmark is recorded",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say how many examples hypothesis tries where a test does not."""
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        count = 300 if config.getoption("exhaustive") else 50
        settings.register_profile("cumla", max_examples=count)
        settings.load_profile("cumla")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thousands of tests that would be skipped, which takes time, too.

    Several processes run no GPU tests: the first one of each module stays and says so.
    """
    is_one_of_several = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    seen, kept, left_out = set(), [], []
    for item in items:
        is_skipped = not config.getoption("exhaustive") and item.get_closest_marker("exhaustive")
        if is_one_of_several and GPU_TESTS in item.path.parents:
            is_skipped = is_skipped or item.path in seen
            seen.add(item.path)
        (left_out if is_skipped else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    for module in (_lifetime, arrays, launch_module, plan):
        monkeypatch.setattr(module, "driver", lambda: fake)
    known = {np.ndarray: frameworks.NUMPY}
    with mock.patch.dict(frameworks.framework_of_type, known, clear=True):
        gc.freeze()  # the collection below need not look at what was there before the test
        yield fake
        gc.collect()  # plans of the test, while the fakes are there
        gc.unfreeze()
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
    caches = (
        launch_device.import_driver,
        kernel._config,
        tensor_map._encoded,
        tensor_map._around_address,
    )
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()
