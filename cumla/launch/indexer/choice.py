# SPDX-License-Identifier: Apache-2.0
"""Choice of the indexer's kernels: products and rings of its logits, threads of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cumla.launch.indexer.shape import FILE
from cumla.launch.layouts import constant

__all__ = ["RULES", "LogitsShape", "Rules", "paged_shape", "prefill_shape", "schedule_threads"]


@dataclass(frozen=True)
class Rules:
    """The numbers of all choices of the indexer, each with its reason.

    No raw figures were kept; docs/history/indexer.md has those measured in development.
    """

    # Heads that a kernel over a paged cache is made for, at least; fewer are padded, for the cache
    # bounds the time.
    fewest_heads: int = 32
    # Columns of a product over a paged cache: the fewest that hold all rows of a request.
    columns: tuple[int, ...] = (64, 128, 256)
    # Columns of a product of a prefill, and products of an item. With two sets of accumulators one
    # becomes logits while tensor cores fill the other; two of 256 columns do not fit the registers.
    prefill_columns: int = 128
    prefill_tiles: int = 4
    # Bytes of a ring. Fewer bytes in flight already hide the latency of memory; more of them at the
    # start delay the first blocks (version 6).
    ring_bytes: int = 100 * 1024
    # Threads of the schedule: few begin earlier, and each has at most one request.
    schedule_threads: tuple[int, int] = (256, 1024)


RULES = Rules()
_SMEM_LIMIT = 227 * 1024
_MOST_STAGES = 32


class LogitsShape(NamedTuple):
    """One instantiation of struct LogitsShape of the kernels."""

    heads: int  # columns of a query row: its heads, or more
    head_dim: int  # 32, 64 or 128
    tile: int  # columns of one product: 64, 128 or 256
    # Tiles of an item: one, and the two consumers take turns at blocks; or 2 or 4, half of them a
    # consumer's.
    tiles: int
    mxfp4: bool = False  # keys are e2m1 numbers with a power of two per 32 columns

    @property
    def columns(self) -> int:
        """Columns of an item."""
        return self.tiles * self.tile

    @property
    def stages(self) -> int:
        """Blocks of the ring: as many as it takes and shared memory holds, an even number.

        Of widened blocks, which alternate, a multiple of four.
        """
        beside = self._bytes(2) - self._pair
        pairs = min(min(_SMEM_LIMIT - beside, RULES.ring_bytes) // self._pair, _MOST_STAGES // 2)
        return 2 * (pairs - pairs % 2 if self.mxfp4 else pairs)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        return self._bytes(2) + (self.stages // 2 - 1) * self._pair

    @property
    def _pair(self) -> int:
        """Shared memory of two blocks of the ring, and what goes with them."""
        return self._bytes(4) - self._bytes(2)

    def _bytes(self, stages: int) -> int:
        sizes = self.heads, self.head_dim, self.tile, self.tiles, stages
        numbers = ", ".join([*map(str, sizes), *(["true"] if self.mxfp4 else [])])
        return constant(FILE, f"LogitsLayout<LogitsShape<{numbers}>>::kBytes")


def paged_shape(num_heads: int, head_dim: int, q_len: int, mxfp4: bool = False) -> LogitsShape:
    """Choose the products over a paged cache."""
    heads = max(num_heads, RULES.fewest_heads)
    columns = q_len * heads
    tile = next((n for n in RULES.columns if columns <= n), RULES.columns[-1])
    return LogitsShape(heads, head_dim, tile, 1 if columns <= tile else 2, mxfp4)


def prefill_shape(heads: int, head_dim: int) -> LogitsShape:
    """Choose the products of a prefill."""
    return LogitsShape(heads, head_dim, RULES.prefill_columns, RULES.prefill_tiles)


def schedule_threads(batch: int) -> int:
    """Choose the threads of the schedule by the number of requests."""
    few, many = RULES.schedule_threads
    return few if batch <= few else many
