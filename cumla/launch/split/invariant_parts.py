# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/invariant_parts.cu: cuts requests at fixed positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.split.plan import RaggedKey

_THREADS = constant("split/invariant_parts", "kScheduleThreads")
SPECS = (KernelSpec.of("split", "invariant_parts", "InvariantPartsParams", threads=_THREADS),)


def invariant_parts_launch(key: RaggedKey, buffer: int) -> Launch:
    """Describe how to cut the row tiles that a schedule of one part has put into the buffer."""
    values = {
        **key.schedule_values(buffer),
        "heads_per_group": key.heads_per_group,
        "most_rows": key.most_cut_rows,
        "piece_blocks": key.piece_blocks,
        "max_pieces": key.max_pieces,
    }
    return launch_of(SPECS[0], (1, 1, 1), values)
