# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/invariant_parts.cu: cuts requests at fixed positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.mha.choice import RULES
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.key import MHAKey

_THREADS = constant("mha/invariant_parts", "kScheduleThreads")
SPECS = (KernelSpec.of("mha", "invariant_parts", "InvariantPartsParams", threads=_THREADS),)


def invariant_parts_launch(key: MHAKey, buffer: int) -> Launch:
    """Describe how to cut the row tiles that a schedule of one part has put into the buffer."""
    values = {
        **key.schedule_values(buffer),
        "heads_per_group": key.heads_per_group,
        "piece_blocks": RULES.piece_blocks,
        "max_pieces": key.max_pieces,
    }
    return launch_of(SPECS[0], (1, 1, 1), values)
