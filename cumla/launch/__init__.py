# SPDX-License-Identifier: Apache-2.0
"""Between a checked argument and the GPU: sources, modules, descriptors, schedules, launches."""

from __future__ import annotations

from cumla.launch.source import KernelSpec

__all__ = ["KernelSpec", "all_specs"]


def all_specs() -> tuple[KernelSpec, ...]:
    """List every kernel that cumla compiles.

    Returns
    -------
    tuple[KernelSpec, ...]
        In the order of the launchers' modules.
    """
    from cumla.launch import append_cache, merge_states, mla_decode, mla_schedule

    return mla_schedule.SPECS + mla_decode.SPECS + merge_states.SPECS + append_cache.SPECS
