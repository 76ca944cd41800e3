# SPDX-License-Identifier: Apache-2.0
"""What the launchers of the indexer's logits share: sizes, parameters, how keys are loaded."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cumla.errors import CumlaError
from cumla.launch.device import import_driver

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

__all__ = [
    "BLOCK_TOKENS",
    "LOGITS_FIELDS",
    "MOST_TOKENS",
    "LogitsShape",
    "keys_map",
    "logits_values",
]

BLOCK_TOKENS = 64  # kBlockTokens: tokens of one product, and of one load
MOST_TOKENS = 0x7FFFFFC0  # kMaxTokens: of a request
_SMEM_LIMIT = 227 * 1024
_MOST_STAGES = 32
_ANNOUNCEMENT_BYTES = 16 + 8
# Of a ring. What is under way to a multiprocessor hides the way from memory with less; asking for
# more at first only makes the earliest blocks wait (docs/indexer.md).
_RING_BYTES = 100 * 1024


class LogitsShape(NamedTuple):
    """One instantiation of struct LogitsShape of the kernels.

    Attributes
    ----------
    heads : int
        Columns of a query row: its heads, or more.
    head_dim : int
        32, 64 or 128.
    tile : int
        Columns of one product: 64, 128 or 256.
    tiles : int
        Tiles of an item: one, and the two consumers take turns at blocks; or 2 or 4, half of them
        a consumer's.
    """

    heads: int
    head_dim: int
    tile: int
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
    """Pack struct LogitsParams.

    Parameters
    ----------
    q, weights, out : ArrayView
        Checked; axes of `q` end with (num_heads, head_dim).
    clean : bool
        Whether -inf is written where nothing is visible.

    Returns
    -------
    tuple of int
        Values for `LOGITS_FIELDS`.
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


@lru_cache(maxsize=4096)
def keys_map(name: str, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Describe rows of e4m3 keys; one load brings up to 64 whole rows.

    The swizzle is as wide as a row. Rows behind the last one bring zeros. Descriptors are cached by
    all arguments.

    Parameters
    ----------
    name : str
        Argument that an error message names.
    ptr : int
        Address of the first row, a multiple of 16.
    shape : tuple of int
        ``(rows, head_dim)`` or ``(num_pages, page_size, head_dim)``.
    strides : tuple of int
        In bytes; multiples of 16 but for the last one, which is 1.

    Returns
    -------
    bytes
        The 128-byte descriptor.
    """
    driver = import_driver()
    sizes = shape[::-1]
    head_dim, rows, *pages = sizes
    box = (head_dim, min(rows, BLOCK_TOKENS) if pages else BLOCK_TOKENS, *(1 for _ in pages))
    # The stride of an axis of length 1 means nothing and frameworks report anything there.
    usable = [s if n > 1 else head_dim for n, s in zip(sizes[1:], strides[-2::-1], strict=True)]
    swizzle = driver.CUtensorMapSwizzle
    status, descriptor = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(sizes),
        ptr,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(s) for s in usable],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B,
        }[head_dim],
        # 256-byte promotion costs 8 % of the bandwidth on an H200; none and 128 bytes are equal.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise CumlaError(
            f"{name}: the driver refused a tensor map with {status.name} (sizes {sizes}, byte "
            f"strides {usable}); make a contiguous copy"
        )
    return ctypes.string_at(descriptor.getPtr(), 128)
