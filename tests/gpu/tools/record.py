# SPDX-License-Identifier: Apache-2.0
"""Evidence files: what a GPU run proved, of which sources.

One JSON file a kernel, tests/gpu/evidence/<stem>.json: the digests of its entry points and of its
launcher with what that imports from cumla.launch, a record of each kind of test run (one a CuPy
package), and the verdicts of compute-sanitizer. `pytest tests/gpu --write-evidence` writes the
runs, tests/gpu/tools/sanitize.py adds the verdicts, and tests/gpu_tools/test_evidence.py holds the
files against the sources.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import pkgutil
import platform
import re
import subprocess
import tokenize
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from cumla import launch
from cumla.launch import all_specs
from cumla.launch.source import OPTIONS, digest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parents[1] / "evidence"
FORMAT = 1
# Compile and launch all kernels alike: no part of a launcher.
FOR_ALL = tuple(f"cumla.launch.{name}" for name in ("device", "kernel", "module", "source"))


def stems() -> tuple[str, ...]:
    """The kernels' files, each once."""
    return tuple(dict.fromkeys(spec.stem for spec in all_specs()))


def without_comments(text: str) -> str:
    """Python text without comments, blank lines and spaces at line ends.

    The tokens only tell where the comments are: their kinds differ between Python versions.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def launcher_of(stem: str) -> ModuleType:
    """The module of cumla.launch among whose SPECS a kernel is."""
    modules = (
        import_module(m.name) for m in pkgutil.walk_packages(launch.__path__, "cumla.launch.")
    )
    (found,) = (m for m in modules if stem in {spec.stem for spec in getattr(m, "SPECS", ())})
    return found


def launcher_sources(stem: str) -> dict[str, str]:
    """A kernel's launcher and what it takes from modules beside it, by name, without comments."""
    sources: dict[str, str] = {}
    names = [launcher_of(stem).__name__]
    while names:
        name = names.pop()
        if name in sources or name in FOR_ALL:
            continue
        text = inspect.getsource(import_module(name))
        sources[name] = without_comments(text)
        imports = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
        names += [m for node in imports if (m := str(node.module)).startswith("cumla.launch.")]
    return dict(sorted(sources.items()))


def launcher_digest(stem: str) -> str:
    """SHA-256 of a kernel's launcher and of what it takes from modules beside it."""
    return hashlib.sha256("\0".join(launcher_sources(stem).values()).encode()).hexdigest()


def subject(stem: str) -> dict[str, Any]:
    """What the evidence of a kernel is about: the sources as they are now."""
    entries = {spec.entry: digest(spec) for spec in all_specs() if spec.stem == stem}
    return {
        "format": FORMAT,
        "kernel": stem,
        "options": list(OPTIONS),
        "entries": entries,
        "launcher": launcher_digest(stem),
    }


def problems(evidence: Mapping[str, Any], stem: str) -> list[str]:
    """Why a file is no evidence of the present sources; empty if it is."""
    now = subject(stem)
    found = []
    for name in ("format", "kernel", "options", "launcher"):
        if evidence.get(name) != now[name]:
            found.append(f"{name} is not that of the present sources")
    recorded = evidence.get("entries", {})
    for entry, value in now["entries"].items():
        if recorded.get(entry) != value:
            found.append(f"{entry} has changed since the run")
    runs = evidence.get("runs", {})
    if not runs:
        found.append("it holds no run")
    for name, run in runs.items():
        if run["failed"]:
            found.append(f"{run['failed']} tests failed with {name}")
        if not run["passed"]:
            found.append(f"no test passed with {name}")
    return found


def unproven(changelog: str) -> set[str]:
    """Kernels that the CHANGELOG's newest "unproven" section names in backticks."""
    match = re.search(
        r"^#+[^\n]*\bunproven\b[^\n]*\n(.*?)(?=^#|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL | re.IGNORECASE,
    )
    return set(re.findall(r"`(\w+)(?:\.cu)?`", match[1])) if match else set()


def read(stem: str, folder: Path | None = None) -> dict[str, Any]:
    """The evidence of a kernel, of the repository if no folder is given; empty if there is none."""
    path = (folder or FOLDER) / f"{stem}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def merge(old: Mapping[str, Any], stem: str, **news: Mapping[str, Any]) -> dict[str, Any]:
    """The old evidence with new runs or verdicts; what older sources proved is dropped."""
    now = subject(stem)
    current = all(old.get(name) == value for name, value in now.items())
    kept = {name: dict(old.get(name, {})) if current else {} for name in ("runs", "sanitizer")}
    for name, values in news.items():
        kept[name] |= values
    return now | kept


def write(folder: Path, **news: Mapping[str, Any]) -> list[Path]:
    """Write news of every kernel into ``folder``, merged with what it, or FOLDER, holds."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem in stems():
        old = read(stem, folder) or read(stem)
        path = folder / f"{stem}.json"
        content = json.dumps(merge(old, stem, **news), indent=1, sort_keys=True)
        path.write_text(content + "\n", encoding="utf-8")
        paths.append(path)
    return paths


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
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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


class Summary:
    """Counts and worst error figures of a test run, by group."""

    def __init__(self) -> None:
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}
        self.skipped: list[str] = []
        self.groups: dict[str, dict[str, Any]] = {}

    def add(self, test: str, outcome: str, figures: Mapping[str, float] | None = None) -> None:
        """Count one test, named as pytest does; figures are what it measured."""
        self.outcomes[outcome] += 1
        if outcome == "skipped":
            self.skipped.append(test)
        name = test.rsplit("/", 1)[-1].split("[", 1)[0]
        group = self.groups.setdefault(name, {"tests": 0, "worst": {}, "worst_case": {}})
        group["tests"] += 1
        for figure, value in (figures or {}).items():
            if value >= group["worst"].get(figure, -1.0):
                group["worst"][figure] = float(f"{value:.4g}")
                group["worst_case"][figure] = test.partition("[")[2].removesuffix("]")

    def run(self, seconds: float) -> dict[str, Any]:
        """The record of the run on this machine."""
        return {
            **self.outcomes,
            "skipped_tests": sorted(self.skipped),
            "seconds": round(seconds, 1),
            "groups": dict(sorted(self.groups.items())),
            **machine(),
        }
