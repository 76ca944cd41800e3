# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_places.cu: query tokens become row tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.launch.blocks.key import BlockKey, TileKey
    from cumla.launch.kernel import Launch


def both_specs(stem: str, params: str, threads: int) -> tuple[KernelSpec, KernelSpec]:
    """Describe a kernel of row tiles, without widened blocks and with them."""
    return (
        KernelSpec.of("blocks", stem, f"Block{params}", threads=threads),
        KernelSpec.of("blocks", stem, f"Widened{params}", tags=["widened"], threads=threads),
    )


_THREADS = constant("blocks/block_places", "kScheduleThreads")
SPECS = both_specs("block_places", "PlacesParams", _THREADS)


def places_spec(key: TileKey) -> KernelSpec:
    """Find the kernel of a shape."""
    return SPECS[key.widened > 0]


def block_places_launch(key: BlockKey, buffer: int) -> Launch:
    """Describe how to divide the query tokens of the plan's rows into row tiles."""
    tile = key.tile
    assert tile is not None
    schedule = key.schedule_at(buffer)
    places, parts, tickets = tile.layout.schedule_at(schedule)
    values: dict[str, Any] = {
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
    if tile.widened:
        values |= {
            "bases_out": tile.bases_at(schedule),
            "slots_out": tile.slots_at(schedule),
            "requests": tile.batch,
            "slots": tile.widened,
            "by_block_size": divisor_of(tile.page_size),
        }
    return launch_of(places_spec(tile), (1, 1, 1), values)
