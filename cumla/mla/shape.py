# SPDX-License-Identifier: Apache-2.0
"""The widths of latent rows and of their caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

FP8 = "float8_e4m3fn"
VALUE_DIM = 512  # latent columns: the value, and the first columns of the key
ROPE_DIM = 64
HEAD_DIM = VALUE_DIM + ROPE_DIM

Width = tuple[int, int]  # latent columns, and RoPE ones, of a row
WIDTH = VALUE_DIM, ROPE_DIM
WIDE = 1024, 64
WIDTHS = (WIDTH, (512, 0), (256, 64), (256, 32), WIDE)  # no two have as many columns
WRITTEN = tuple((latent, rope) for latent in (512, 256, 1024) for rope in (64, 32, 0))
"""Widths that are written into caches; those of WIDTHS among them, no two have as many columns."""


class Takes(NamedTuple):
    """Features of the kernels for a number of latent columns, beyond caches of q's dtype."""

    e4m3: bool = True  # caches of it under one factor
    trees: bool = True  # of drafts
    fixed_cuts: bool = True  # batch_invariant of mla_decode


TAKES = {512: Takes(), 256: Takes(), 1024: Takes(e4m3=False, trees=False, fixed_cuts=False)}
"""By the latent columns of WIDTHS."""


def width_of(columns: int, widths: Iterable[Width] = WIDTHS) -> Width | None:
    """Tell which of some widths has as many columns."""
    for width in widths:  # no table of columns: a tracer's sizes have no hash
        if width[0] + width[1] == columns:
            return width
    return None


SCALED_COLUMNS = 128  # latent columns of an e4m3 cache that share a scale
SCALES = VALUE_DIM // SCALED_COLUMNS
PACKED_BYTES = VALUE_DIM + 4 * SCALES + 2 * ROPE_DIM  # e4m3, float32 scales, bfloat16

# DeepSeek-V4's rows: VALUE_DIM columns, all of which are key and value.
V4_SCALED_COLUMNS = 64  # e4m3 columns that share a scale
V4_FP8_DIM = VALUE_DIM - ROPE_DIM  # the first columns; RoPE ones are bfloat16
V4_SCALES = V4_FP8_DIM // V4_SCALED_COLUMNS
V4_ROW_BYTES = V4_FP8_DIM + 2 * ROPE_DIM  # all rows of a page precede all of its scales
V4_SCALE_BYTES = V4_SCALES + 1  # the last one is nothing
V4_BYTES = V4_ROW_BYTES + V4_SCALE_BYTES

# DeepSeek-V4.1's rows: VALUE_DIM columns, then their scales.
V41_SCALED_COLUMNS = 32  # e4m3 columns that share a power of two, one byte
V41_BYTES = VALUE_DIM + VALUE_DIM // V41_SCALED_COLUMNS
FP4_SCALED_COLUMNS = 16  # e2m1 columns, two a byte, that share an e4m3 scale
FP4_BYTES = VALUE_DIM // 2 + VALUE_DIM // FP4_SCALED_COLUMNS

PACKED, NO_ROPE, V4, V41, V41_FP4 = "v32", "v32_no_rope", "v4", "v41", "v41_fp4"
E4M3_512, E4M3_288 = "e4m3_512", "e4m3_288"
FORMATS = {
    PACKED: PACKED_BYTES,
    NO_ROPE: VALUE_DIM + 4 * SCALES,
    V4: V4_BYTES,
    V41: V41_BYTES,
    V41_FP4: FP4_BYTES,
    E4M3_512: VALUE_DIM,  # under one factor
}
"""Bytes of a row, or slot, of each format of bytes, by its name."""
WRITTEN_FORMATS = FORMATS | {E4M3_288: 288}
"""Those of rows that are written: 256 + 32 columns under one factor are as wide as V41_FP4."""
UNNAMED = (PACKED, V4, E4M3_512)
"""Formats that their widths tell: no other cache has these."""
