# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/invariant_parts.cu: cuts requests at fixed positions."""

from __future__ import annotations

import struct

from cumla.launch.kernel import Launch
from cumla.launch.mha.attention import PIECE_BLOCKS, MHAKey
from cumla.launch.source import KernelSpec

SPECS = (KernelSpec.of("mha", "invariant_parts", "InvariantPartsParams", threads=1024),)

_PARAMS = struct.Struct("<QQQ6i")


def invariant_parts_launch(key: MHAKey, buffer: int) -> Launch:
    """Describe how to cut the row tiles that a schedule of one part has put into the buffer."""
    values = (
        *key.layout.schedule_at(buffer),
        key.num_places,
        key.parts,
        key.num_tickets,
        key.heads_per_group,
        PIECE_BLOCKS,
        key.max_pieces,
    )
    return Launch(SPECS[0], (1, 1, 1), _PARAMS, values)
