# SPDX-License-Identifier: Apache-2.0
"""CuPy, through which the GPU is reached: imported once, and with errors that say what to do."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

from cumla.errors import MissingDependencyError, UnsupportedDeviceError

NEEDED = (
    "the kernels need an NVIDIA Hopper GPU of compute capability 9.0 (H100, H200, H800, H20, GH200)"
)
_WITHOUT_GPU = (
    "without a GPU leave prepare out, pass sm_count= to workspace_bytes, or like= an array on the "
    "CPU to a plan"
)
_CACHE = "CUPY_CACHE_DIR"
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_log = logging.getLogger(__name__)
# Wheels that bring a module named cupy: two of them overwrite each other's files.
_CUPY_DISTRIBUTIONS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


def installed_cupy() -> tuple[str, ...]:
    """List the installed distributions that bring CuPy, with their versions."""
    from importlib import metadata  # 20 ms that no import of cumla needs

    found = []
    for name in _CUPY_DISTRIBUTIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


@cache
def import_cupy() -> Any:
    """Import CuPy; `MissingDependencyError` if it is missing, broken or installed twice."""
    found = installed_cupy()
    if len(found) > 1:
        raise MissingDependencyError(
            f"CuPy is installed {len(found)} times ({', '.join(found)}) and the copies overwrite "
            f"each other: uninstall all of them"
        )
    try:
        return _imported()
    except ImportError as error:
        problem = "cannot be imported" if found else "is not installed"
        missing = MissingDependencyError(
            f"CuPy, which runs the kernels on a GPU, {problem} ({error})"
        )
        missing.add_note(_WITHOUT_GPU)
        raise missing from error


def _imported() -> Any:
    """Import CuPy, which fails where it cannot make the folder of its kernel cache."""
    given = os.environ.get(_CACHE)
    if "cupy" not in sys.modules:
        folder = os.path.expanduser("~/.cupy/kernel_cache") if given is None else given
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            compile_in_memory(error)
            os.environ[_CACHE] = os.sep  # it is there, which is all that CuPy asks
    try:
        return import_module("cupy")
    finally:
        os.environ.pop(_CACHE, None)
        if given is not None:
            os.environ[_CACHE] = given


def compiles_in_memory() -> bool:
    """Tell whether CuPy neither reads nor writes its cache of kernels, as it is or was asked to."""
    return os.environ.get(_IN_MEMORY) == "1"


def compile_in_memory(problem: object) -> None:
    """Let CuPy neither read nor write its cache of kernels, because of a problem: a warning."""
    os.environ[_IN_MEMORY] = "1"
    _log.warning(
        "kernels are not kept in CuPy's cache folder (%s), so every process compiles them again; "
        "let CUPY_CACHE_DIR name a folder to which you can write, and nobody else",
        problem,
    )


def current_device() -> int:
    """Ordinal of CuPy's current GPU; `UnsupportedDeviceError` if there is no GPU, or no driver."""
    runtime = import_cupy().cuda.runtime
    try:
        return int(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise UnsupportedDeviceError(
            f"{NEEDED}, but no GPU can be used ({error}); {_WITHOUT_GPU}"
        ) from error
