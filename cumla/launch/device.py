# SPDX-License-Identifier: Apache-2.0
"""The GPU's properties, whether the kernels run on it, and the modules that drive it.

What concerns CuPy alone is in `cumla.core._cupy`, because `cumla.core.arrays` stands on it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from cumla.core._cupy import NEEDED, current_device, import_cupy, installed_cupy
from cumla.core.arguments import checked_int
from cumla.errors import MissingDependencyError, UnsupportedDeviceError

__all__ = [
    "DeviceProperties",
    "checked_sm_count",
    "current_device",
    "import_cupy",
    "import_driver",
    "installed_cupy",
    "properties",
    "require_hopper",
    "sm_count_of",
]


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The GPU's properties that launchers use; sizes are in bytes."""

    name: str  # as the driver calls it
    compute_capability: tuple[int, int]  # major and minor number
    sm_count: int  # streaming multiprocessors
    smem_optin: int  # most shared memory that a block can ask for
    l2_bytes: int  # size of the L2 cache


@cache
def import_driver() -> Any:
    """Import ``cuda.bindings.driver``, which makes tensor maps and launches kernels.

    Raise `MissingDependencyError` if cuda.bindings is missing.
    """
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda.bindings, which launches the kernels, cannot be imported ({error})"
        ) from error


@cache
def properties(ordinal: int) -> DeviceProperties:
    """Ask the driver what GPU `ordinal` is, once a process.

    Raise `UnsupportedDeviceError` if there is no such GPU, or no driver, and
    `MissingDependencyError` if CuPy is missing.
    """
    runtime = import_cupy().cuda.runtime
    try:
        found = runtime.getDeviceProperties(ordinal)
    except runtime.CUDARuntimeError as error:
        raise UnsupportedDeviceError(
            f"device {ordinal}: {NEEDED}, but no GPU of that number can be used ({error})"
        ) from error
    return DeviceProperties(
        name=found["name"].decode(),
        compute_capability=(found["major"], found["minor"]),
        sm_count=found["multiProcessorCount"],
        smem_optin=found["sharedMemPerBlockOptin"],
        l2_bytes=found["l2CacheSize"],
    )


def require_hopper(ordinal: int) -> DeviceProperties:
    """Return what `properties` says of a GPU; refuse one on which the kernels cannot run.

    Code for sm_90a, with wgmma, is code for compute capability 9.0 and for no later one:
    `UnsupportedDeviceError` for others.
    """
    found = properties(ordinal)
    if found.compute_capability != (9, 0):
        major, minor = found.compute_capability
        raise UnsupportedDeviceError(
            f"device {ordinal} is {found.name} of compute capability {major}.{minor}: {NEEDED}; "
            f"arrays in CPU memory are computed by cumla.reference on any machine"
        )
    return found


def sm_count_of(ordinal: int | None) -> int:
    """Count the multiprocessors of a GPU that can run the kernels; 0 for the CPU."""
    return 0 if ordinal is None else require_hopper(ordinal).sm_count


def checked_sm_count(sm_count: int | None) -> int:
    """Check a number of multiprocessors; None asks the current GPU."""
    if sm_count is None:
        sm_count = properties(current_device()).sm_count
    return checked_int("sm_count", sm_count, "leave it out to ask the current GPU")
