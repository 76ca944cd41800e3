# SPDX-License-Identifier: Apache-2.0
"""The widths of latent rows and of their caches."""

VALUE_DIM = 512  # latent columns: the value, and the first columns of the key
ROPE_DIM = 64
HEAD_DIM = VALUE_DIM + ROPE_DIM
SCALED_COLUMNS = 128  # latent columns of an e4m3 cache that share a scale
SCALES = VALUE_DIM // SCALED_COLUMNS
PACKED_BYTES = VALUE_DIM + 4 * SCALES + 2 * ROPE_DIM  # e4m3, float32 scales, bfloat16

# DeepSeek-V4's rows: VALUE_DIM columns, all of which are key and value.
V4_SCALED_COLUMNS = 64  # e4m3 columns that share a scale
V4_FP8_DIM = VALUE_DIM - ROPE_DIM  # the first columns; RoPE ones are bfloat16
V4_SCALES = V4_FP8_DIM // V4_SCALED_COLUMNS
V4_ROW_BYTES = V4_FP8_DIM + 2 * ROPE_DIM  # all rows of a page lie before all of its scales
V4_SCALE_BYTES = V4_SCALES + 1  # the last one is nothing
V4_BYTES = V4_ROW_BYTES + V4_SCALE_BYTES
