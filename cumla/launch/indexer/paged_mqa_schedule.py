# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/indexer/paged_mqa_schedule.cu: deals the blocks of all requests out to parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.indexer.choice import RULES, schedule_threads
from cumla.launch.indexer.shape import MOST_TOKENS
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_NAMES = "indexer", "paged_mqa_schedule", "PagedMqaScheduleParams"
_SPECS = {n: KernelSpec.of(*_NAMES, n, tags=[str(n)], threads=n) for n in RULES.schedule_threads}
SPECS = tuple(_SPECS.values())
_PLACE_BYTES = constant("indexer/paged_mqa_schedule", "sizeof(Place)")


class PagedMQAKey(NamedTuple):
    """The shape for which a plan is made."""

    batch: int  # q is (batch, q_len, num_heads, head_dim)
    q_len: int
    num_heads: int
    head_dim: int
    page_size: int  # tokens of a cache page
    max_blocks: int  # columns of the block table
    per_row_lens: bool  # whether each row has a length of its own
    num_sms: int  # parts to make: thread blocks that score
    mxfp4: bool = False  # keys are e2m1 numbers with a power of two per 32 columns

    @property
    def most_tokens(self) -> int:
        """Tokens that the pages of a request can hold, at most."""
        return min(self.max_blocks * self.page_size, MOST_TOKENS)


def schedule_bytes(key: PagedMQAKey) -> int:
    """Return the size of a schedule: where each part begins, and the end."""
    return _PLACE_BYTES * (key.num_sms + 1)


def plan_bytes(key: PagedMQAKey) -> int:
    """Return the size of a plan's buffer: the schedule, and the lengths that it was made of."""
    lens = key.batch * (key.q_len if key.per_row_lens else 1)
    return schedule_bytes(key) + 4 * lens


def kept_lens(key: PagedMQAKey, like: ArrayView, buffer: int) -> ArrayView:
    """Return the address of the lengths in a plan's buffer, on the device of another array."""
    per_row = key.per_row_lens
    shape = (key.batch, key.q_len) if per_row else (key.batch,)
    strides = (4 * key.q_len, 4) if per_row else (4,)
    at = buffer + schedule_bytes(key)
    return like._replace(ptr=at, shape=shape, strides=strides, dtype="int32")


def lengths_values(key: PagedMQAKey, kv_lens: ArrayView, most_tokens: int) -> dict[str, int]:
    """Name the values of struct KvLens."""
    strides = kv_lens.strides
    return {
        "data": kv_lens.ptr,
        "stride_request": strides[0],
        "stride_row": strides[1] if key.per_row_lens else 0,
        "batch": key.batch,
        "q_len": key.q_len,
        "per_row": key.per_row_lens,
        "most_tokens": most_tokens,
    }


def paged_mqa_schedule_spec(key: PagedMQAKey) -> KernelSpec:
    """Look up the kernel of a shape."""
    return _SPECS[schedule_threads(key.batch)]


def paged_mqa_schedule_launch(
    key: PagedMQAKey, kv_lens: ArrayView, buffer: int, *, keeps_lens: bool
) -> Launch:
    """Describe how to compute the schedule for these lengths into the plan's buffer.

    `kv_lens` are ``(batch,)`` or ``(batch, q_len)`` int32. `buffer` is the address of
    ``plan_bytes(key)`` bytes, a multiple of 8. Where `keeps_lens`, the lengths are copied there,
    after the schedule; else ``schedule_bytes`` are enough.
    """
    kept = kept_lens(key, kv_lens, buffer).ptr if keeps_lens else 0
    lengths = lengths_values(key, kv_lens, key.most_tokens)
    values = {"kv_lens": lengths, "bounds": buffer, "kept": kept, "parts": key.num_sms}
    return launch_of(paged_mqa_schedule_spec(key), (1, 1, 1), values)
