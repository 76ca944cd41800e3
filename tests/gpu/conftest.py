# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests share: the rule that skips them, memory hygiene, and the evidence writer."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
        help="write what the modules that run whole prove to tests/gpu/evidence",
    )
    group.addoption(
        "--evidence-dir",
        type=Path,
        default=record.FOLDER,
        help="where --write-evidence writes instead",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_evidence", False):
        if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
            raise pytest.UsageError("--write-evidence: one process tests a GPU; pass -n 0")
        config.pluginmanager.register(EvidenceWriter(config), "cumla-evidence")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and (reason := no_hopper() or several_processes()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


def several_processes() -> str:
    """Why the tests do not run in one of several processes; empty in the only one."""
    several = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    return "one process tests a GPU, whose memory these need: pass -n 0" if several else ""


@pytest.fixture
def record_figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Report the error figures of a test; of several reports the worst of each figure counts."""
    worst: dict[str, float] = {}

    def report(figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            worst[name] = max(value, worst.get(name, 0.0))
        record_property(FIGURES, dict(worst))

    return report


@pytest.fixture(scope="module")
def jax() -> Any:
    """JAX on the GPU. As it starts it leaves the last GPU current; the first one is afterwards."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")
    import cupy

    cupy.cuda.Device(0).use()
    return jax


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Return CuPy's cached memory once it grows large, so that other frameworks find some."""
    yield
    import cupy

    pool = cupy.get_default_memory_pool()
    if pool.total_bytes() > 30 << 30:
        pool.free_all_blocks()


class EvidenceWriter:
    """Writes the results of a module that ran whole, or failed, when its last test is done."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder: Path = config.getoption("evidence_dir")
        self.results: dict[str, record.Results] = {}  # by module
        self.left: Counter[str] = Counter()  # tests that are still to come
        self.notes: list[str] = []
        self.run: record.Run | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if no_hopper():
            self.notes.append(f"no evidence written: {no_hopper()}")
            return
        items = [item for item in session.items if HERE in item.path.parents]
        self.left.update(item.path.name for item in items)
        for module in {item.getparent(pytest.Module) for item in items}:
            self.results[module.path.name] = record.Results(set(every_test(module)))
        about = record.machine()
        self.sources = record.Sources.now()  # before tests that may take minutes
        self.run = record.Run(self.folder, about["cupy"].split(" ")[0], about, self.sources)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        results = self.results.get(_module_of(report.nodeid))
        if results is None:
            return
        results.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            outcome = reason_of(report) if report.outcome == "skipped" else report.outcome
            results.add(report.nodeid, outcome, dict(report.user_properties).get(FIGURES))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        module = _module_of(nodeid)
        self.left[module] -= 1
        if module in self.results and not self.left[module]:
            self._write(module)

    def pytest_sessionfinish(self) -> None:
        if self.run is None:
            return
        for module in [*self.results]:  # those that were cut
            self._write(module)
        absent = self.sources.modules.keys() - self.run.record["parts"].keys()
        if absent:
            self.notes.append(f"not a whole run, without {', '.join(sorted(absent))}")
        else:
            self.run.complete()
        stems = self.sources.kernels
        wrong = {stem: record.problems(stem, self.folder, self.sources) for stem in stems}
        self.notes += [f"{stem}: {'; '.join(found)}" for stem, found in wrong.items() if found]

    def _write(self, name: str) -> None:
        part = self.results.pop(name).part()
        wrong = list(record.module_problems(part, self.sources.modules[name]))
        self.notes += [f"{name}: {problem}" for problem in wrong]
        if part["failed"] or not wrong:
            self.run.add(name, part)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"evidence in {self.folder}")
        for note in self.notes:
            terminalreporter.write_line(note)


def every_test(module: pytest.Module) -> Iterator[str]:
    """The tests of a module, whatever the command line leaves out."""
    for node in module.collect():
        if isinstance(node, pytest.Item):
            yield node.nodeid
        else:
            yield from every_test(node)


def reason_of(report: pytest.TestReport) -> str:
    """Why a test was skipped, or failed as expected."""
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    _, _, reason = report.longrepr
    return reason.removeprefix("Skipped: ")


def _module_of(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).name
