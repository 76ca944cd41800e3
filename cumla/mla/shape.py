# SPDX-License-Identifier: Apache-2.0
"""The widths of latent rows and of their caches."""

VALUE_DIM = 512  # latent columns: the value, and the first columns of the key
ROPE_DIM = 64
HEAD_DIM = VALUE_DIM + ROPE_DIM
SCALED_COLUMNS = 128  # latent columns of an e4m3 cache that share a scale
SCALES = VALUE_DIM // SCALED_COLUMNS
PACKED_BYTES = VALUE_DIM + 4 * SCALES + 2 * ROPE_DIM  # e4m3, float32 scales, bfloat16
