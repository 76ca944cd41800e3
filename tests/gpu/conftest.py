# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests share: the rule that skips them, memory hygiene, and the evidence writer."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.gpu.tools import record

# Before anything imports these: JAX would take three quarters of the GPU's memory for itself, and
# CuPy would compile CUB for every kind of sum and maximum, seconds each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUPY_ACCELERATORS", "")

HERE = Path(__file__).resolve().parent
FIGURES = "error_figures"


@functools.cache
def no_hopper() -> str:
    """Why the tests cannot run here; empty if they can."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if count and cupy.cuda.Device(0).compute_capability == "90":
            return ""
    except Exception as error:  # no CuPy, no driver, no GPU: each has an error type of its own
        return f"needs a GPU of compute capability 9.0: {type(error).__name__}"
    return "needs a GPU of compute capability 9.0"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cumla")
    group.addoption(
        "--write-evidence",
        action="store_true",
        help="write what this run proved to tests/gpu/evidence (a whole run of tests/gpu only)",
    )
    group.addoption(
        "--evidence-dir",
        type=Path,
        default=record.FOLDER,
        help="where --write-evidence writes instead",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_evidence", False):
        config.pluginmanager.register(EvidenceWriter(config), "cumla-evidence")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and (reason := no_hopper()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def record_figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Report the error figures of a test; of several reports the worst of each figure counts."""
    worst: dict[str, float] = {}

    def report(figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            worst[name] = max(value, worst.get(name, 0.0))
        record_property(FIGURES, dict(worst))

    return report


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Return CuPy's cached memory once it grows large, so that other frameworks find some."""
    yield
    import cupy

    pool = cupy.get_default_memory_pool()
    if pool.total_bytes() > 30 << 30:
        pool.free_all_blocks()


class EvidenceWriter:
    """Collects outcomes and figures, and writes them when all of tests/gpu was run."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder: Path = config.getoption("evidence_dir")
        self.summary = record.Summary()
        self.start = time.monotonic()
        self.deselected = 0
        self.modules: set[str] = set()
        self.note = ""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.modules = {item.path.name for item in session.items if HERE in item.path.parents}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu/" not in report.nodeid.replace("\\", "/"):
            return
        if report.when == "call" or report.outcome != "passed":
            figures = dict(report.user_properties).get(FIGURES)
            self.summary.add(report.nodeid, report.outcome, figures)  # type: ignore[arg-type]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.note = self._reason_not_to_write(session)
        if self.note:
            return
        run = self.summary.run(time.monotonic() - self.start)
        paths = record.write(self.folder, runs={_package(run["cupy"]): run})
        self.note = f"evidence written to {', '.join(path.name for path in paths)}"

    def _reason_not_to_write(self, session: pytest.Session) -> str:
        missing = {path.name for path in HERE.rglob("test_*.py")} - self.modules
        if no_hopper():
            return f"no evidence written: {no_hopper()}"
        if self.deselected or missing or session.shouldstop or session.shouldfail:
            return (
                f"no evidence written: {self.deselected} tests were deselected, "
                f"{', '.join(sorted(missing)) or 'no module'} left out"
            )
        return ""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self.note)


def _package(cupy: str) -> str:
    """The distribution's name of "cupy-cuda13x 14.2.0"."""
    return cupy.split(" ")[0]
