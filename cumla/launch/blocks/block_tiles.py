# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_tiles.cu: the lists of a row tile's query tokens become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.blocks.block_places import both_specs
from cumla.launch.blocks.choice import RULES
from cumla.launch.layouts import constant, launch_of
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.launch.blocks.key import TileKey
    from cumla.launch.kernel import Launch
    from cumla.launch.source import KernelSpec

SPECS = both_specs("block_tiles", "TilesParams", constant("blocks/block_tiles", "kListThreads"))


def tiles_spec(key: TileKey) -> KernelSpec:
    """Find the kernel of a shape."""
    return SPECS[key.widened > 0]


def block_tiles_launch(key: TileKey, buffer: int, lists: Mapping[str, Any]) -> Launch:
    """Describe how to unite the lists of row tiles.

    `buffer` is where the schedule begins; `lists` has the values of struct ListsParams but for
    where pages are written.
    """
    places, *_ = key.layout.schedule_at(buffer)
    values = {
        **lists,
        "pages_out": key.pages_at(buffer),
        "places": places,
        "count": key.count_at(buffer),
        "seen_out": key.seen_at(buffer),
        "units_out": key.units_at(buffer),
        "total_tokens": key.total_tokens,
        "max_places": key.num_places,
        "most_blocks": key.most_blocks,
        "block_units": key.units,
        "by_topk": divisor_of(key.topk),
    }
    if key.widened:
        values |= {
            "bases": key.bases_at(buffer),
            "slots": key.widened,
            "counts": key.counts_at(buffer),
            "left_out": key.left_at(buffer),
            "list_blocks": RULES.left[0],
            "tile_blocks": RULES.left[1],
        }
    return launch_of(tiles_spec(key), (key.lists, 1, 1), values)
