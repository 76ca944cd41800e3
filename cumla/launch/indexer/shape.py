# SPDX-License-Identifier: Apache-2.0
"""What the launchers of the indexer's logits share: sizes, parameters, how keys are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, strided
from cumla.launch.tensor_map import TensorMap

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

_FILE = "indexer/paged_mqa_logits"
BLOCK_TOKENS = constant(_FILE, "kBlockTokens")  # of one product, and of one load
MOST_TOKENS = constant(_FILE, "kMaxTokens")  # of a request
LOGITS_THREADS = constant(_FILE, "kLogitsThreads")
_SMEM_LIMIT = 227 * 1024
_MOST_STAGES = 32
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
        pairs = min(min(_SMEM_LIMIT - beside, _RING_BYTES) // self._pair, _MOST_STAGES // 2)
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
        return constant(_FILE, f"LogitsLayout<LogitsShape<{numbers}>>::kBytes")


def logits_values(q: ArrayView, weights: ArrayView, out: ArrayView, clean: bool) -> dict[str, Any]:
    """Name the values of struct LogitsParams.

    The axes of `q` end with (num_heads, head_dim). Where `clean`, -inf is written where nothing is
    visible.
    """
    rows, width = out.shape
    return {
        **strided(weights, "weights", "weights_stride_row", "weights_stride_head"),
        **strided(out, "out", "out_stride"),
        "rows": rows,
        "width": width,
        "q_stride_head": q.strides[-2],
        "num_heads": q.shape[-2],
        "out_is_bf16": out.dtype == "bfloat16",
        "clean": clean,
    }


def keys_map(name: str, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """Describe rows of e4m3 keys; one load brings up to 64 whole rows.

    The swizzle is as wide as a row. Rows after the last one bring zeros. Errors call the argument
    `name`; `ptr` is a multiple of 16; `shape` is ``(rows, head_dim)`` or ``(num_pages, page_size,
    head_dim)``; `strides` are in bytes, multiples of 16 but for the last one, which is 1.
    """
    head_dim, rows, *pages = sizes = shape[::-1]
    box = (head_dim, min(rows, BLOCK_TOKENS) if pages else BLOCK_TOKENS, *(1 for _ in pages))
    return TensorMap(name, ptr, "UINT8", sizes, strides[-2::-1], box, head_dim)
