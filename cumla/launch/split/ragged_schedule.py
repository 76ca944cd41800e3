# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/split/ragged_schedule.cu: deals out KV blocks where query lengths differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split import ragged_schedule_numbered as numbered
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.split.plan import RaggedKey

_NAMES = "split", "ragged_schedule", "RaggedScheduleParams"
_THREADS = constant("split/ragged_schedule", "kScheduleThreads")
SPEC = KernelSpec.of(*_NAMES, name="mla_attention_schedule", threads=_THREADS)
SPECS = (SPEC,)


def schedule_spec(key: RaggedKey) -> KernelSpec:
    """Look up the kernel that makes the schedule of a key."""
    return numbered.SPEC if key.numbers_requests else SPEC


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
    values = {
        **_schedule_of(key, buffer),
        **int32s("qo_indptr", qo_indptr),
        **int32s("kv_lens", kv_lens),
        **int32s("kv_indptr", kv_indptr),
        "batch": key.batch,
        "total_tokens": key.total_tokens,
        "heads_per_group": key.heads_per_group,
        "page_size": key.schedule_page_size,
        "causal": key.causal,
        "fixed_cost": key.fixed_cost,
        "piece_cost": key.piece_cost,
        "min_blocks": key.min_blocks,
        "min_share": key.min_share,
        "q_len": key.total_tokens // key.batch if qo_indptr is None else 0,
        "by_heads_per_group": divisor_of(key.heads_per_group),
        "shares": key.shares,
        "window_left": key.schedule_window,
        "is_small": key.has_small_batch,
        "whole": _schedule_of(beside, key.beside_at(buffer)) if beside else None,
        "blocks": 0,
    }
    return launch_of(schedule_spec(key), (2 if beside else 1, 1, 1), values)


def _schedule_of(key: RaggedKey, buffer: int) -> dict[str, Any]:
    return {
        **key.schedule_values(buffer),
        "row_tile": key.row_tile,
        "by_parts": divisor_of(key.parts),
        "by_row_tile": divisor_of(key.row_tile),
    }


def int32s(name: str, view: ArrayView | None) -> dict[str, int]:
    """Name where an array of int32 begins, and its stride in elements; None is not given."""
    pointer, stride = (0, 0) if view is None else (view.ptr, view.strides[0] // 4)
    return {name: pointer, f"{name}_stride": stride}
