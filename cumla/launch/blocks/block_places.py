# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_places.cu: query tokens become row tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.launch.blocks.key import BlockKey
    from cumla.launch.kernel import Launch

_THREADS = constant("blocks/block_places", "kScheduleThreads")
SPECS = (KernelSpec.of("blocks", "block_places", "BlockPlacesParams", threads=_THREADS),)


def block_places_launch(key: BlockKey, buffer: int) -> Launch:
    """Describe how to divide the query tokens of the plan's rows into row tiles."""
    tile = key.tile
    assert tile is not None
    schedule = key.schedule_at(buffer)
    places, parts, tickets = tile.layout.schedule_at(schedule)
    values = {
        "rows": key.rows_at(buffer),
        "places": places,
        "parts_out": parts,
        "tickets": tickets,
        "count_out": tile.count_at(schedule),
        "total_tokens": tile.total_tokens,
        "max_places": tile.num_places,
        "tile_tokens": tile.tile_tokens,
        "parts": tile.parts,
    }
    return launch_of(SPECS[0], (1, 1, 1), values)
