# SPDX-License-Identifier: Apache-2.0
"""All kernels ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cumla.core.arguments import check_device_number
from cumla.core.plan import Single
from cumla.core.spec import SPECS
from cumla.launch import all_specs
from cumla.launch.device import current_device, require_hopper
from cumla.launch.module import load

__all__ = ["prepare"]

_SUCH_AS = "such as cumla.append_mla_cache"


def prepare(*plans_or_functions: Single | Callable[..., Any], device: int | None = None) -> None:
    """Compile and load kernels, so that later calls do not wait for that or fail during a capture.

    Parameters
    ----------
    *plans_or_functions : plan or function
        Plans, whose kernels are loaded on their GPU; and functions of cumla, such as
        ``cumla.append_mla_cache``, whose kernels are loaded for every dtype, page size and cache
        format. A function that has a plan has many kernels, so prefer the plan.
    device : int, optional
        CUDA ordinal for functions; CuPy's current device by default.

    Raises
    ------
    TypeError
        An argument is neither a plan nor a function with kernels, or there is none.
    UnsupportedDeviceError, CompilationError, MissingDependencyError
        The kernels cannot be compiled or loaded here.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> cumla.prepare(cumla.MLADecodePlan(4, 1, 16, like=np.zeros(1)))
    """
    check_device_number(device)
    if not plans_or_functions:
        raise TypeError(
            f"prepare: needs plans or functions, got nothing; pass plans, or functions of cumla, "
            f"{_SUCH_AS}"
        )
    begins: list[str] = []
    for i, given in enumerate(plans_or_functions):
        if isinstance(given, Single):
            continue
        # By the public function itself: others have its name, such as that of cumla.reference.
        spec = SPECS.get(getattr(given, "__name__", ""))
        if spec is None or spec.function is not given:
            raise TypeError(
                f"plans_or_functions[{i}]: needs a plan or a function that has kernels, got "
                f"{_name_of(given)}; pass a plan, or a function of cumla, {_SUCH_AS}"
            )
        begins += spec.kernels
    if begins:
        device = current_device() if device is None else device
        require_hopper(device)
    for given in plans_or_functions:
        if isinstance(given, Single):
            given.prepare()
    for kernel in all_specs() if begins else ():
        if kernel.entry.startswith(tuple(begins)):
            assert device is not None
            load(kernel, device, capturing=lambda: False)


def _name_of(given: object) -> str:
    """Name a function or a class with its module, and show what has no name."""
    if hasattr(given, "__qualname__") and hasattr(given, "__module__"):
        return f"{given.__module__}.{given.__qualname__}"
    return repr(given)
