# SPDX-License-Identifier: Apache-2.0
"""Between a checked argument and the GPU: sources, modules, descriptors, schedules, launches."""

from __future__ import annotations

from importlib import import_module

from cumla.launch.source import KernelSpec

__all__ = ["KernelSpec", "all_specs"]


def all_specs() -> tuple[KernelSpec, ...]:
    """List every kernel that cumla compiles: the `SPECS` of all launchers' modules, in order."""
    from pkgutil import walk_packages  # 3 ms that no import of cumla needs

    names = [found.name for found in walk_packages(__path__, f"{__name__}.")]
    modules = [import_module(name) for name in names]
    return tuple([spec for module in modules for spec in getattr(module, "SPECS", ())])
