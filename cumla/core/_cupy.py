# SPDX-License-Identifier: Apache-2.0
"""CuPy, through which the GPU is reached: imported once, and with errors that say what to do."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from cumla.errors import MissingDependencyError, UnsupportedDeviceError

NEEDED = (
    "the kernels need an NVIDIA Hopper GPU of compute capability 9.0 (H100, H200, H800, H20, GH200)"
)
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
        return import_module("cupy")
    except ImportError as error:
        problem = "cannot be imported" if found else "is not installed"
        raise MissingDependencyError(
            f"CuPy, which runs the kernels on a GPU, {problem} ({error})"
        ) from error


def current_device() -> int:
    """Ordinal of CuPy's current GPU; `UnsupportedDeviceError` if there is no GPU, or no driver."""
    runtime = import_cupy().cuda.runtime
    try:
        return int(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise UnsupportedDeviceError(
            f"{NEEDED}, but no GPU can be used ({error}); without one leave prepare out, "
            f"pass sm_count= to workspace_bytes, or like= an array on the CPU to a plan"
        ) from error
