# SPDX-License-Identifier: Apache-2.0
"""Launchers of cuda/blocks: attention to lists of blocks, scores of blocks, their choice."""
