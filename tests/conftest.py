# SPDX-License-Identifier: Apache-2.0
"""Which tests run, and a GPU that is not there, for tests of what comes before a launch."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from zlib import crc32

if "PYTEST_XDIST_WORKER" in os.environ:  # or each worker's BLAS takes all cores, and spins on them
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # XLA compiles in half of the time; what it calls is cumla's.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import numpy as np
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from cumla.core import _cupy, _lifetime, arrays, frameworks, operation, plan
from cumla.core.operation import Ready
from cumla.launch import device as launch_device
from cumla.launch import kernel, source, tensor_map
from cumla.launch import module as launch_module
from cumla.launch.source import KernelSpec
from tests import selection
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

GPU_TESTS = Path(__file__).parent / "gpu"
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

sys.modules["cumla_cubins"] = None  # type: ignore[assignment] - as if it were not installed

_sources, _body = source._sources, source._body


@functools.cache
def _body_of(package: str, stem: str, debug: bool) -> str:
    return _body(KernelSpec(stem, "", "", "", 0, package=package), debug)


def _known_body(spec: KernelSpec, debug: bool) -> str:
    """Read the files of a kernel once a process: thousands of tests load it, to fakes."""
    if source._sources is not _sources:  # another folder, which a test may change
        return _body(spec, debug)
    return _body_of(spec.package, spec.stem, debug)


source._body = _known_body

# Collections of all objects, of which PyTorch and JAX have a million, are a tenth as frequent.
gc.set_threshold(*gc.get_threshold()[:2], 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("cumla").addoption(
        "--exhaustive",
        action="store_true",
        help="run the tests marked exhaustive, too: with each change of a kernel and before a "
        "benchmark is recorded",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say what --exhaustive is, and how many examples hypothesis tries where a test does not."""
    selection.exhaustive = config.getoption("exhaustive")
    if WORKER % 2:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401 - others begin with JAX: none compiles what another one does
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        count = 300 if config.getoption("exhaustive") else 30
        settings.register_profile("cumla", max_examples=count)
        settings.load_profile("cumla")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the modules from the last one on, in every other process.

    Where nothing is compiled yet, each then compiles and rewrites half of them, not all.
    """
    folders = [Path(argument) for argument in session.config.args if WORKER % 2]
    for folder in folders:
        for path in sorted(folder.rglob("test_*.py"), reverse=True):
            if GPU_TESTS not in path.resolve().parents:
                with contextlib.suppress(Exception, pytest.skip.Exception):  # told of later
                    importlib.import_module(module_name(path))


def pytest_collection_finish() -> None:
    """Let PyTorch's loggers, some fifty, hand their records on, as others do.

    Else pytest adds a handler to each of them, and takes it away, in each phase of each test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def module_name(path: Path) -> str:
    """Name a module of tests as pytest does."""
    return ".".join(path.resolve().relative_to(GPU_TESTS.parents[1]).with_suffix("").parts)


class GpuTests(pytest.Module):
    """A module of which several processes run nothing: one of them imports it.

    One skipped test says so, in place of its tests.
    """

    def collect(self) -> list[pytest.Item]:
        if crc32(self.name.encode()) % PROCESSES == WORKER:
            with contextlib.suppress(pytest.skip.Exception):
                self._import_as_it_is()
                super().collect()
        return [GpuTest.from_parent(self, name="gpu")]

    def _import_as_it_is(self) -> None:
        """Its assertions are not rewritten, which takes longer than to import it."""
        hook = [finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook)]
        with mock.patch("sys.meta_path", [f for f in sys.meta_path if f not in hook]):
            importlib.import_module(module_name(self.path))


class GpuTest(pytest.Item):
    def runtest(self) -> None:
        pytest.skip("one process tests a GPU: pass -n 0")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if PROCESSES == 1 or GPU_TESTS not in module_path.parents:
        return None
    return GpuTests.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no cases that `pytest_collection_modifyitems` leaves out, but for one of a test."""
    definition = metafunc.definition
    if metafunc.config.getoption("exhaustive"):
        return
    is_one = (
        isinstance(definition.getparent(pytest.Module), GpuTests)
        or definition.get_closest_marker("exhaustive") is not None
    )
    for i, mark in enumerate(definition.own_markers):
        if mark.name != "parametrize" or not isinstance(mark.args[1], list | tuple):
            continue
        names, values, *more = mark.args
        kept = [k for k, value in enumerate(values) if not _is_exhaustive(value)]
        kept = kept[:1] if is_one else kept
        if not kept or len(kept) == len(values):
            continue
        options = dict(mark.kwargs)
        if isinstance(options.get("ids"), list | tuple):
            options["ids"] = [options["ids"][k] for k in kept]
        fewer = pytest.mark.parametrize(names, [values[k] for k in kept], *more, **options)
        definition.own_markers[i] = fewer.mark


def _is_exhaustive(value: object) -> bool:
    return any(mark.name == "exhaustive" for mark in getattr(value, "marks", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out that would be skipped, which takes time, too."""
    if config.getoption("exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        kept = [item for item in items if not item.get_closest_marker("exhaustive")]
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
    for module in (_cupy, launch_device):  # metadata of packages are not looked for each time
        monkeypatch.setattr(module, "installed_cupy", lambda: ("cupy-cuda12x 14.2.0",))
    monkeypatch.setattr(launch_module, "_loaded", {})
    monkeypatch.setattr(operation, "forms", Ready())
    monkeypatch.delenv("CUMLA_CUBIN_DIR", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", os.path.join(os.devnull, "none"))  # whoever may write ours
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")  # to be what it was after the test
    return fake


@pytest.fixture
def bindings(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBindings]:
    """Return what kernels are launched through; it lists them."""
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
