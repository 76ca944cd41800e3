# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of GQA by blocks of tokens: attention, scores and choice of blocks."""
