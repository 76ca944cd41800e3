# SPDX-License-Identifier: Apache-2.0
"""What the launchers of the indexer's logits share: sizes, parameters, how keys are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.tensor_map import TensorMap

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

BLOCK_TOKENS = 64  # kBlockTokens: tokens of one product, and of one load
MOST_TOKENS = 0x7FFFFFC0  # kMaxTokens: of a request
_SMEM_LIMIT = 227 * 1024
_MOST_STAGES = 32
_ANNOUNCEMENT_BYTES = 16 + 8
# Of a ring. What is under way to a multiprocessor hides the way from memory with less; asking for
# more at first only makes the earliest blocks wait (docs/history/indexer.md).
_RING_BYTES = 100 * 1024


class LogitsShape(NamedTuple):
    """One instantiation of struct LogitsShape of the kernels."""

    heads: int  # columns of a query row: its heads, or more
    head_dim: int  # 32, 64 or 128
    tile: int  # columns of one product: 64, 128 or 256
    # Tiles of an item: one, and the two consumers take turns at blocks; or 2 or 4, half of them a
    # consumer's.
    tiles: int

    @property
    def columns(self) -> int:
        """Columns of an item."""
        return self.tiles * self.tile

    @property
    def stages(self) -> int:
        """Blocks of the ring: as many as it takes and shared memory holds, an even number."""
        room = min(_SMEM_LIMIT - self._smem_beside_ring, _RING_BYTES)
        fit = room // self._stage_bytes
        return min(fit, _MOST_STAGES) // 2 * 2

    @property
    def smem_bytes(self) -> int:
        """LogitsLayout::kBytes."""
        return self._smem_beside_ring + self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        """Tokens of a block, their scales and two barriers; an announcement and its barrier."""
        return BLOCK_TOKENS * (self.head_dim + 4) + 16 + _ANNOUNCEMENT_BYTES

    @property
    def _smem_beside_ring(self) -> int:
        """Two segments of query rows, weights, targets, a segment and two barriers; scratch.

        There is one announcement more than blocks of the ring.
        """
        rows = self.columns // self.heads
        segment = self.columns * (self.head_dim + 4) + 16 * rows + 16 + 16
        return 2 * segment + 128 + _ANNOUNCEMENT_BYTES


LOGITS_FIELDS = "8q4i"  # struct LogitsParams


def logits_values(q: ArrayView, weights: ArrayView, out: ArrayView, clean: bool) -> tuple[int, ...]:
    """Pack struct LogitsParams: the values for `LOGITS_FIELDS`.

    The axes of `q` end with (num_heads, head_dim). Where `clean`, -inf is written where nothing is
    visible.
    """
    return (
        weights.ptr,
        *weights.strides,
        out.ptr,
        out.strides[0],
        *out.shape,
        q.strides[-2],
        q.shape[-2],
        out.dtype == "bfloat16",
        clean,
        0,
    )


def keys_map(name: str, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """Describe rows of e4m3 keys; one load brings up to 64 whole rows.

    The swizzle is as wide as a row. Rows after the last one bring zeros. Errors call the argument
    `name`; `ptr` is a multiple of 16; `shape` is ``(rows, head_dim)`` or ``(num_pages, page_size,
    head_dim)``; `strides` are in bytes, multiples of 16 but for the last one, which is 1.
    """
    head_dim, rows, *pages = sizes = shape[::-1]
    box = (head_dim, min(rows, BLOCK_TOKENS) if pages else BLOCK_TOKENS, *(1 for _ in pages))
    return TensorMap(name, ptr, "UINT8", sizes, strides[-2::-1], box, head_dim)
