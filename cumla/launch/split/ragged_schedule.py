# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/ragged_schedule.cu: deals out KV blocks where query lengths differ."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of
from cumla.launch.split.schedule import FIXED_COST

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.split.plan import RaggedKey

_NAMES = "split", "ragged_schedule", "RaggedScheduleParams"
SPECS = (KernelSpec.of(*_NAMES, name="mla_attention_schedule", threads=1024),)

_SCHEDULE_OF = "QQQ4i4I"
_PARAMS = struct.Struct(f"<{_SCHEDULE_OF}QqQqQq10i2Ii4x{_SCHEDULE_OF}q")


def ragged_schedule_launch(
    key: RaggedKey,
    buffer: int,
    qo_indptr: ArrayView | None,
    kv_lens: ArrayView | None,
    kv_indptr: ArrayView | None,
) -> Launch:
    """Describe how to compute the schedule for these int32 lengths into the plan's buffer.

    `qo_indptr` is ``(batch + 1,)``, or None where all requests have as many tokens; `kv_lens` is
    ``(batch,)``, or None where `kv_indptr` tells it. That is ``(batch + 1,)`` where pages come as a
    list, and None where they come as a block table.
    """
    beside = key.beside
    values = (
        *_schedule_of(key, buffer),
        *_int32s(qo_indptr),
        *_int32s(kv_lens),
        *_int32s(kv_indptr),
        key.batch,
        key.total_tokens,
        key.heads_per_group,
        key.schedule_page_size,
        key.causal,
        FIXED_COST,
        key.piece_cost,
        key.min_blocks,
        key.min_share,
        key.total_tokens // key.batch if qo_indptr is None else 0,
        *divisor_of(key.heads_per_group),
        key.shares,
        *(_schedule_of(beside, key.beside_at(buffer)) if beside else (0,) * 11),
        0,
    )
    return Launch(SPECS[0], (2 if beside else 1, 1, 1), _PARAMS, values)


def _schedule_of(key: RaggedKey, buffer: int) -> tuple[int, ...]:
    return (
        *key.layout.schedule_at(buffer),
        *(key.num_places, key.parts, key.num_tickets, key.row_tile),
        *divisor_of(key.parts),
        *divisor_of(key.row_tile),
    )


def _int32s(view: ArrayView | None) -> tuple[int, int]:
    return (0, 0) if view is None else (view.ptr, view.strides[0] // 4)
