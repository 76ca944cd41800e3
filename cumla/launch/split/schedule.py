# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/schedule.cu: deals the KV blocks of all requests out to parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_TOKENS, RULES, piece_cost

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.split.plan import PlanKey

_THREADS = constant("split/schedule", "kScheduleThreads")


_SPEC = KernelSpec.of("split", "schedule", "ScheduleParams", name="mla_schedule", threads=_THREADS)
_INVARIANT = replace(
    _SPEC,
    entry="mla_schedule_invariant",
    function="schedule_invariant",
    params="InvariantScheduleParams",
)
SPECS = (_SPEC, _INVARIANT)


def schedule_spec(key: PlanKey) -> KernelSpec:
    """Choose the kernel for a shape: whether requests are cut at fixed positions."""
    return SPECS[key.batch_invariant]


def schedule_launch(key: PlanKey, buffer: int, kv_lens: ArrayView) -> Launch:
    """Describe how to compute the schedule for ``(batch,)`` int32 lengths into a plan's buffer."""
    places, parts, tickets = key.layout.schedule_at(buffer)
    most = key.max_blocks * BLOCK_TOKENS if key.batch_invariant else max_tokens(key.num_places)
    values = {
        "cache_seqlens": kv_lens.ptr,
        "cache_seqlens_stride": kv_lens.strides[0] // 4,
        "places": places,
        "parts_out": parts,
        "tickets": tickets,
        "batch": key.num_places,
        "parts": key.parts,
        "num_tickets": key.num_tickets,
        "fixed_cost": RULES.fixed_cost,
        "cut_cost": RULES.cut_cost,
        "piece_cost": piece_cost(key.row_groups),
        "min_blocks": RULES.min_blocks,
        "min_share": key.min_share,
        "min_saving": key.min_saving,
        "max_tokens": most,
        "piece_blocks": key.piece_blocks,
        "by_parts": divisor_of(key.parts),
    }
    if not key.batch_invariant:
        return launch_of(_SPEC, (1, 1, 1), values)
    more = {"most_pieces": key.most_pieces, "at_once": max(key.sm_count // key.tiles, 1)}
    return launch_of(_INVARIANT, (-(-key.parts // _THREADS), 1, 1), values | more)


def max_tokens(batch: int) -> int:
    """Return how long a request may be: so that the summed cost of the batch stays below 2**30.

    Longer requests count as this long: 2**31 - 64 tokens up to a batch of 31.
    """
    return min(MOST_TOKENS, ((1 << 30) // batch - RULES.fixed_cost) * BLOCK_TOKENS)
