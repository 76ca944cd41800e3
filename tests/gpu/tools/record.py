# SPDX-License-Identifier: Apache-2.0
"""Evidence: what GPU runs proved, of which sources.

evidence/runs.json holds each run once, with its parts: a module of tests, or a tool of
compute-sanitizer. evidence/<stem>.json names the parts that prove a kernel, with digests of its
entry points, of their machine code and of their launches; evidence/runtime.json those that prove
the code around a launch. `pytest tests/gpu --write-evidence` and sanitize.py write them, and
`problems` judges. Where sources differ, and their machine code does not, cubins.py says so.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.tools import digests

ROOT = next(path for path in Path(__file__).resolve().parents if (path / "pyproject.toml").exists())
GPU = ROOT / "tests" / "gpu"
FOLDER = GPU / "evidence"
RUNS = "runs"  # the file that holds them
RUNTIME = "runtime"  # and that of the code around a launch; none of a kernel
PINNED = ("12.9", "13.0")  # NVRTCs whose machine code is compared
SANITIZER = "compute-sanitizer"  # a kind of run, as "cupy-cuda13x" is
TOOLS = {  # the tools, and why one may run an edited kernel
    "memcheck": "",
    "synccheck": "",
    "racecheck": "it follows no order that goes through another lane or a proxy fence",
    "initcheck": "",
}


class Module(NamedTuple):
    """What a module of tests says of itself."""

    kernels: tuple[str, ...] = ()
    may_skip: tuple[str, ...] = ()  # reasons for which a test may be skipped


def modules_in(folder: Path) -> dict[str, Module]:
    """The modules of GPU tests in a folder, by file name, with their KERNELS and MAY_SKIP."""
    found: dict[str, Module] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if path.name in found:
            raise ValueError(f"two modules of GPU tests are called {path.name}")
        said = dict(_said(path.read_text("utf-8")))
        if "KERNELS" not in said:
            raise ValueError(f"{path.name} does not say KERNELS = (...)")
        found[path.name] = Module(said["KERNELS"], said.get("MAY_SKIP", ()))
    return found


def _said(text: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            if name in ("KERNELS", "MAY_SKIP"):
                yield name, ast.literal_eval(node.value)


class Sources(NamedTuple):
    """What a run is about: digests of the sources, and whose tests are where."""

    runtime: str
    kernels: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Module]
    of_runtime: tuple[str, ...]  # of the modules

    @classmethod
    def now(cls) -> Sources:
        kernels = {stem: digests.subject(stem) for stem in digests.launchers()}
        core = sorted(path.name for path in (GPU / "core").glob("test_*.py"))
        return cls(digests.runtime_digest(), kernels, modules_in(GPU), (*core, "test_dsa.py"))

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Sources:
        """Return what `_asdict` of one became in a file."""
        modules = {name: Module(*said) for name, said in written["modules"].items()}
        core = tuple(written["of_runtime"])
        return cls(written["runtime"], written["kernels"], modules, core)

    def modules_of(self, stem: str) -> set[str]:
        """The modules that must have passed."""
        return {name for name, module in self.modules.items() if stem in module.kernels}


# --- judging -------------------------------------------------------------------------------------


def problems(stem: str, folder: Path, sources: Sources) -> list[str]:
    """Why a kernel, or RUNTIME, is not proven; empty if it is."""
    if stem == RUNTIME:
        return runtime_problems(folder, sources)
    kernel, runs = read(folder, stem), read(folder, RUNS)
    if not kernel:
        return ["it has no evidence"]
    needed = sources.modules_of(stem)
    found = [*_changes(stem, kernel, sources, folder)]
    if not needed:
        found.append("no module of tests/gpu has it among its KERNELS")
    proven: defaultdict[str, set[str]] = defaultdict(set)
    for name, parts in kernel["runs"].items():
        run = runs.get(name)
        if run is None or run["kernels"].get(stem) != kernel["proven"]:
            found.append(f"{RUNS}.json holds no run '{name}' of these sources")
        else:
            for part in parts:
                wrong = _part_problems(stem, run, part, sources)
                found += [f"{part}, {name}: {problem}" for problem in wrong]
                proven[run["kind"]] |= set() if wrong else {part}
    if absent := set(TOOLS) - proven.pop(SANITIZER, set()):
        found.append(f"without {', '.join(sorted(absent))} of {SANITIZER}")
    if needed not in [parts & needed for parts in proven.values()]:
        most = max(proven, key=lambda kind: len(proven[kind] & needed), default="no run")
        absent = needed - proven.get(most, set())
        found.append(f"without {', '.join(sorted(absent))}, in {most}")
    return found


def _changes(stem: str, kernel: Mapping[str, Any], sources: Sources, folder: Path) -> Iterator[str]:
    """Return what of a kernel is no longer as it was proven.

    A call that its evidence does not know may launch an entry that has not changed, if the
    evidence of another kernel knows that call: whoever proved that kernel ran both.
    """
    now = sources.kernels[stem]
    for entry, source in now["entries"].items():
        if kernel["entries"].get(entry, {}).get("source") != source:
            yield f"{entry} has changed since (if its machine code has not: tests/gpu/README.md)"
        recorded, launched = kernel["launches"].get(entry, {}), now["launches"][entry]
        for group in sorted(launched):  # a call that no longer launches it takes nothing back
            if recorded.get(group) != launched[group]:
                if group not in recorded and group in _known_elsewhere(stem, sources, folder):
                    continue
                yield f"{entry} is launched otherwise than it was: {group}"
        if not launched:
            yield f"no call of tests/gpu/tools/launches.py launches {entry}"


def _known_elsewhere(stem: str, sources: Sources, folder: Path) -> set[str]:
    """Calls that the evidence of other kernels knows, as they are now."""
    return {
        group
        for other, now in sources.kernels.items()
        if other != stem
        for entry, groups in read(folder, other).get("launches", {}).items()
        for group, launch in groups.items()
        if now["launches"].get(entry, {}).get(group) == launch
    }


def runtime_problems(folder: Path, sources: Sources) -> list[str]:
    """Why the code around a launch is not proven; empty if it is."""
    recorded, runs = read(folder, RUNTIME), read(folder, RUNS)
    if recorded.get("runtime") != sources.runtime:
        return ["it has changed since"]
    found, proven = [], set()
    for name, parts in recorded["runs"].items():
        run = runs.get(name, {"parts": {}})
        if run.get("runtime") != sources.runtime:
            found.append(f"{RUNS}.json holds no run '{name}' of it")
            continue
        for part in parts:
            wrong = _part_problems(RUNTIME, run, part, sources)
            found += [f"{part}, {name}: {problem}" for problem in wrong]
            proven |= set() if wrong else {part}
    if absent := set(sources.of_runtime) - proven:
        found.append(f"without {', '.join(sorted(absent))}")
    return found


def identity(stem: str, sources: Sources) -> str:
    """What runs call a kernel: by the digests that were first proven, of the same machine code."""
    kernel = read(FOLDER, stem)
    if kernel and not list(_changes(stem, kernel, sources, FOLDER)):
        return str(kernel["proven"])
    return digests.of(sources.kernels[stem])


def _part_problems(stem: str, run: Mapping[str, Any], name: str, sources: Sources) -> list[str]:
    part = run["parts"].get(name)
    if part is None:
        return ["it is not among the run's parts"]
    if run["kind"] == SANITIZER:
        return list(tool_problems(stem, name, part, sources))
    return list(module_problems(part, sources.modules.get(name, Module())))


def module_problems(part: Mapping[str, Any], module: Module) -> Iterator[str]:
    """Why a module's results prove nothing."""
    if part["failed"]:
        yield f"{len(part['failed'])} tests failed, {part['failed'][0]} for one"
    skipped = sum(len(tests) for tests in part["skipped"].values())
    ran = part["passed"] + len(part["failed"]) + skipped
    if ran < part["tests"]:
        yield f"{part['tests'] - ran} of {part['tests']} tests did not run"
    for reason in part["skipped"]:
        if reason not in module.may_skip:
            yield f"skipped, and not among its MAY_SKIP: {reason}"


def ran(stem: str, part: Mapping[str, Any], sources: Sources) -> bool:
    """Return whether a tool ran a kernel, as it ships or edited, or reports one."""
    entries = {stem, *sources.kernels[stem]["entries"]}
    seen = (part["shipped"], part["kernels"], *part["edited"].values())
    return not all(entries.isdisjoint(names) for names in seen)


def tool_problems(stem: str, tool: str, part: Mapping[str, Any], sources: Sources) -> Iterator[str]:
    """Why a tool's verdict does not clear a kernel."""
    entries = {stem, *sources.kernels[stem]["entries"]}
    named = set(part["kernels"])
    listed = sum(part["kinds"].values())  # a tool lists so many reports, of whichever kernels
    reports = part["errors"] + part["warnings"]
    if not part["complete"]:
        yield "the verdict is incomplete"
    elif reports and (named & entries or not named or listed < reports):
        yield f"{part['errors']} errors, {part['warnings']} warnings"
    for bug, planted in part.get("planted", {}).items():
        if not planted["found"] and not planted["blind"]:
            yield f"the planted {bug} was not found"
    if not entries & set(part["shipped"]):
        edits = {edit for edit, kernels in part["edited"].items() if entries & set(kernels)}
        if not edits:
            yield "the kernel did not run"
        elif not TOOLS[tool]:
            yield f"the kernel ran with an edit only: {', '.join(sorted(edits))}"


def unproven(changelog: str) -> set[str]:
    """Kernels that the CHANGELOG's newest "unproven" section names in backticks."""
    match = re.search(
        r"^#+[^\n]*\bunproven\b[^\n]*\n(.*?)(?=^#|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL | re.IGNORECASE,
    )
    return set(re.findall(r"`(\w+)(?:\.cu)?`", match[1])) if match else set()


# --- writing -------------------------------------------------------------------------------------


class Run:
    """A run that goes on: each part is written as it ends, so that a cut run leaves what it did."""

    def __init__(self, folder: Path, kind: str, about: Mapping[str, Any], sources: Sources) -> None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.folder, self.sources, self.name = folder, sources, f"{kind} {date}"
        self.record: dict[str, Any] = {
            **about,
            "kind": kind,
            "date": date,
            "complete": False,
            "runtime": sources.runtime,
            "kernels": {stem: identity(stem, sources) for stem in sources.kernels},
            "parts": {},
        }

    def add(self, name: str, part: Mapping[str, Any]) -> None:
        """Write a part, and the files of kernels that it completes, or that it speaks against."""
        self.record["parts"][name] = part
        self._write()

    def complete(self) -> None:
        """Say that no part is left out."""
        self.record["complete"] = True
        self._write()

    def _write(self) -> None:
        runs = read(self.folder, RUNS) | {self.name: self.record}
        self.write_all(runs)

    def write_all(self, runs: Mapping[str, Any]) -> None:
        """Write all files, of these runs."""
        files = {stem: self._kernel(stem, runs) for stem in self.sources.kernels}
        files[RUNTIME] = self._runtime(runs)
        write(self.folder, RUNS, self._in_use(runs, files))
        for stem, file in files.items():
            if file:
                write(self.folder, stem, file)

    def _kernel(self, stem: str, runs: Mapping[str, Any]) -> dict[str, Any]:
        """A kernel's file; empty if too little of these sources is known for one."""
        needed = self.sources.modules_of(stem)
        newest: dict[str, dict[str, str]] = defaultdict(dict)  # kind, part: run
        for name, run in runs.items():
            if run["kernels"].get(stem) == self.record["kernels"][stem]:
                parts = run["parts"].keys() & (needed | TOOLS.keys())
                for part in sorted(parts):
                    earlier = newest[run["kind"]]
                    if self._counts(stem, run["parts"][part], earlier.get(part), part, runs):
                        earlier[part] = name
        whole = needed and any(needed <= parts.keys() for parts in newest.values())
        used: dict[str, list[str]] = defaultdict(list)
        worst: dict[str, tuple[float, str]] = {}
        failed = False
        for parts in newest.values():
            for part, name in parts.items():
                used[name].append(part)
                failed |= bool(runs[name]["parts"][part].get("failed"))
                for test, figures in runs[name]["parts"][part].get("figures", {}).items():
                    for figure, (value, case) in figures.items():
                        there = (value, f"{part}::{test}{case and f'[{case}]'}")
                        worst[figure] = max(worst.get(figure, (-1.0, "")), there)
        if not whole and not failed:
            return {}
        now, known = self.sources.kernels[stem], read(self.folder, stem).get("entries", {})
        entries = {
            entry: {**known.get(entry, {}), "source": source}
            if known.get(entry, {}).get("source") == source
            else {"source": source}
            for entry, source in now["entries"].items()
        }
        proven = self.record["kernels"][stem]
        about = {"kernel": stem, "entries": entries, "launches": now["launches"], "proven": proven}
        return {**about, "runs": used, "worst": worst}

    def _counts(
        self, stem: str, found: Mapping[str, Any], earlier: str | None, part: str, runs: Any
    ) -> bool:
        """Whether a part replaces that of an earlier run: some of the grid, if it says more."""
        if "grid" not in found:
            return True
        whole = earlier is not None and "grid" not in runs[earlier]["parts"][part]
        return ran(stem, found, self.sources) and (
            not whole or any(tool_problems(stem, part, found, self.sources))
        )

    def _runtime(self, runs: Mapping[str, Any]) -> dict[str, Any]:
        """The file of the code around a launch; empty if nothing is known of it."""
        newest = {
            part: name
            for name, run in runs.items()
            if run["runtime"] == self.sources.runtime and run["kind"] != SANITIZER
            for part in run["parts"].keys() & set(self.sources.of_runtime)
        }
        used: dict[str, list[str]] = defaultdict(list)
        for part, name in sorted(newest.items()):
            used[name].append(part)
        return {"runtime": self.sources.runtime, "runs": used} if used else {}

    def _in_use(
        self, runs: Mapping[str, Any], kernels: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The runs, less parts that no kernel's file names and that are replaced or outdated."""
        files = [kernel or read(self.folder, stem) for stem, kernel in kernels.items()]
        used = {
            (n, part) for f in files for n, parts in f.get("runs", {}).items() for part in parts
        }
        latest = {
            (run["kind"], part): (name, part)
            for name, run in runs.items()
            for part in run["parts"]
            if run["runtime"] == self.sources.runtime
        }
        used |= set(latest.values())
        kept = {
            name: run | {"parts": {p: r for p, r in run["parts"].items() if (name, p) in used}}
            for name, run in runs.items()
        }
        return {name: run for name, run in kept.items() if run["parts"]}


def merge(folder: Path, others: Iterable[Path], sources: Sources) -> None:
    """Add the runs of these sources that other folders hold, of processes beside each other."""
    runs = read(folder, RUNS)
    for other in others:
        for name, run in read(other, RUNS).items():
            if run["runtime"] == sources.runtime:
                parts = runs.get(name, run)["parts"]  # processes may have begun in one second
                runs[name] = run | {"parts": parts | run["parts"]}
    Run(folder, "", {}, sources).write_all(runs)


class Results:
    """The outcomes and worst figures of one module of tests."""

    def __init__(self, tests: set[str]) -> None:
        self.tests = tests  # all that the module has, whatever this run asks for
        self.outcomes: dict[str, str] = {}  # by test: "passed", "failed", or why it was skipped
        self.figures: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
        self.seconds = 0.0

    def add(self, test: str, outcome: str, figures: Mapping[str, float] | None = None) -> None:
        """Note one test, named as pytest does; a failure is the last word."""
        if self.outcomes.get(test) != "failed":
            self.outcomes[test] = outcome
        name, _, case = test.partition("::")[2].partition("[")
        worst = self.figures[name] if figures else {}
        for figure, value in (figures or {}).items():
            there = (float(f"{value:.4g}"), case.removesuffix("]"))
            worst[figure] = max(worst.get(figure, (-1.0, "")), there)

    def part(self) -> dict[str, Any]:
        """Return what runs.json says of the module."""
        skipped = defaultdict(set)
        for test, outcome in self.outcomes.items():
            if outcome not in ("passed", "failed"):
                skipped[outcome].add(test.partition("::")[2])
        return {
            "tests": len(self.tests | self.outcomes.keys()),
            "passed": list(self.outcomes.values()).count("passed"),
            "failed": sorted(t for t, outcome in self.outcomes.items() if outcome == "failed"),
            "skipped": {reason: sorted(tests) for reason, tests in skipped.items()},
            "seconds": round(self.seconds, 1),
            "figures": self.figures,
        }


# --- files ---------------------------------------------------------------------------------------


def read(folder: Path, name: str) -> dict[str, Any]:
    """A file of evidence; empty if there is none."""
    path = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def write(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a file whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.{os.getpid()}"
    part.write_text(_lines(content) + "\n", "utf-8")
    part.replace(folder / f"{name}.json")


def _lines(value: Any, indent: str = "") -> str:
    """JSON: what fits stands in one line."""
    line = json.dumps(value, sort_keys=True)
    if len(indent + line) <= 110 or not isinstance(value, dict):
        return line
    inner = indent + " "
    items = (f"{inner}{json.dumps(k)}: {_lines(v, inner)}" for k, v in sorted(value.items()))
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


# --- the machine ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """GPU, driver and versions of this process."""
    import cupy

    from cumla.launch.device import installed_cupy
    from cumla.launch.module import bindings_nvrtc_version, compiles_with_cupy, cupy_nvrtc_version

    nvrtc = cupy_nvrtc_version()
    how = "cupy.RawModule" if compiles_with_cupy(nvrtc) else "cuda.bindings"
    version = nvrtc if how == "cupy.RawModule" else bindings_nvrtc_version()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": _driver_version(),
        "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "cupy": ", ".join(installed_cupy()),
        "nvrtc": "{}.{}".format(*version),
        "compiled_by": how,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("numpy", "torch", "jax", "cuda-bindings")},
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    merge(FOLDER, map(Path, sys.argv[1:]), Sources.now())
