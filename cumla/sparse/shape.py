# SPDX-License-Identifier: Apache-2.0
"""The widths of DeepSeek-V4's rows: 512 columns, all of which are key and value."""

from cumla.mla.shape import ROPE_DIM, VALUE_DIM

V4_SCALED_COLUMNS = 64  # e4m3 columns that share a scale
V4_FP8_DIM = VALUE_DIM - ROPE_DIM  # the first columns; RoPE ones are bfloat16
V4_SCALES = V4_FP8_DIM // V4_SCALED_COLUMNS
V4_ROW_BYTES = V4_FP8_DIM + 2 * ROPE_DIM  # all rows of a page lie before all of its scales
V4_SCALE_BYTES = V4_SCALES + 1  # the last one is nothing
V4_BYTES = V4_ROW_BYTES + V4_SCALE_BYTES
