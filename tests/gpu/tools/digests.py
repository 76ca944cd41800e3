# SPDX-License-Identifier: Apache-2.0
"""What evidence is about: a kernel's entry points and launches, and the code that runs them.

A launch is written down as the driver gets it (`launches`), so names, modules and messages of the
host code are free to change; what module loading, streams, lifetimes and plans do around a launch
has a digest of its own, of the code of `RUNTIME`.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy

import cumla
from cumla import launch
from cumla.launch.source import KernelSpec, digest

PACKAGE = Path(cumla.__file__).resolve().parent
TESTS = Path(__file__).resolve().parents[2]

RUNTIME = (
    *(f"cumla.launch.{name}" for name in ("device", "kernel", "module", "tensor_map")),
    *(f"cumla.core.{name}" for name in ("arrays", "check_mode", "frameworks", "operation")),
    *(f"cumla.core.{name}" for name in ("overlap", "paged", "plan", "spec")),
    *(f"cumla.core._{name}" for name in ("cupy", "dlpack", "driver", "lend", "lifetime")),
    *(f"cumla.jax.{name}" for name in ("call", "execute", "fallback", "handler", "plans")),
    *("cumla.sparse.dsa", "cumla.torch"),
)
"""Modules that load, order and launch: a few test modules prove them, for all kernels at once."""


# --- kernels -------------------------------------------------------------------------------------


@functools.cache
def launchers() -> dict[str, ModuleType]:
    """The module of cumla.launch, at any depth, among whose SPECS a kernel is; by kernel."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.walk_packages(launch.__path__, "cumla.launch."):
        if info.ispkg:
            continue
        module = import_module(info.name)
        for stem in dict.fromkeys(spec.stem for spec in getattr(module, "SPECS", ())):
            if stem in found:
                raise ValueError(f"{stem} has two launchers: {found[stem].__name__}, {info.name}")
            found[stem] = module
    return dict(sorted(found.items()))


def specs(stem: str) -> tuple[KernelSpec, ...]:
    """The entry points of a kernel."""
    return tuple(spec for spec in launchers()[stem].SPECS if spec.stem == stem)


def subject(stem: str) -> dict[str, Any]:
    """Return what is known of a kernel as its sources are now: digests by entry point."""
    found = launches()
    entries = specs(stem)
    return {
        "entries": {spec.entry: digest(spec) for spec in entries},
        "launches": {spec.entry: found.get(spec.entry, {}) for spec in entries},
    }


def of(subject: Mapping[str, Any]) -> str:
    """One digest of a kernel's."""
    known = [subject["entries"], subject["launches"]]
    return _digest_of(json.dumps(known, sort_keys=True))


_SHARES = 2  # of the table


@functools.cache
def launches() -> dict[str, dict[str, str]]:
    """Digests of launches, by entry point and group of calls, found in a process without a GPU.

    Processes that follow each other read what the first one wrote about the same files; those
    beside each other begin with different shares of the table.
    """
    files = sorted(PACKAGE.rglob("*.py"))
    files += [TESTS / "fake_cuda.py", TESTS / "gpu" / "tools" / "launches.py"]
    versions = f"{sys.version} {numpy.__version__} {ml_dtypes.__version__}"
    key = _digest_of(versions, *(f"{path.name} {path.read_text('utf-8')}" for path in files))
    folder = Path(tempfile.gettempdir()) / f"cumla-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} is another user's, or others may write to it; remove it")
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    found: dict[str, dict[str, str]] = {}
    for i in range(first, first + _SHARES):
        path = folder / f"launches-{key[:24]}-{i % _SHARES}.json"
        with open(folder / f"lock-{i % _SHARES}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # while another process writes this share
            _write_launches(path, i % _SHARES)
        for entry, groups in json.loads(path.read_text("utf-8")).items():
            known = found.setdefault(entry, {})
            assert not known.keys() & groups.keys(), "calls of one group are in two shares"
            known.update(groups)
    return found


def _write_launches(path: Path, share: int) -> None:
    if not path.exists():
        command = [sys.executable, "-m", "tests.gpu.tools.launches", f"{share}/{_SHARES}"]
        where = os.pathsep.join((str(PACKAGE.parent), str(TESTS.parent)))
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": where}
        )
        if done.returncode:
            raise RuntimeError(f"tests.gpu.tools.launches failed:\n{done.stderr}")
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(done.stdout, "utf-8")
        part.replace(path)


# --- the code around a launch --------------------------------------------------------------------


def runtime_texts(package: Path = PACKAGE) -> dict[str, str]:
    """The modules of RUNTIME."""
    found = {}
    for name in RUNTIME:
        path = package.joinpath(*name.split(".")[1:]).with_suffix(".py")
        found[name] = path.read_text("utf-8")
    return found


def runtime_digest(texts: Mapping[str, str] | None = None) -> str:
    """The digest of that code, without comments, docstrings, annotations and words of errors."""
    texts = runtime_texts() if texts is None else texts
    return _digest_of(*map(_code_of, texts.values()))


@functools.cache
def _code_of(text: str) -> str:
    return code(_WithoutWords().visit(ast.parse(text)))


def code(node: Any) -> str:
    """Write what runs of a syntax tree: `ast.dump` differs between Python versions."""
    if isinstance(node, list):
        return f"[{', '.join(code(n) for n in node if not _is_text(n))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={code(value)}"
        for name, value in ast.iter_fields(node)
        if name not in ("annotation", "ctx", "kind", "returns", "type_comment")
        and value not in (None, [])
    ]
    return f"{type(node).__name__}({', '.join(fields)})"


class _WithoutWords(ast.NodeTransformer):
    """Takes out what an error says, but not what is raised with which other arguments."""

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = [a for a in node.exc.args if not _is_words(a)]
        return self.generic_visit(node)


def _is_words(node: ast.expr) -> bool:
    is_name = isinstance(node, ast.Constant) and str(node.value).startswith("cumla.")
    return isinstance(node, ast.JoinedStr | ast.Constant) and not is_name


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _digest_of(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
