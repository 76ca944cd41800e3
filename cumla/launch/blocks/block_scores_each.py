# SPDX-License-Identifier: Apache-2.0
"""Entries of cuda/blocks/block_scores_each.cu; block_scores_few.py launches them."""

from __future__ import annotations

from cumla.launch.blocks.block_scores import FORMS
from cumla.launch.blocks.choice import RULES
from cumla.launch.source import KernelSpec


def _spec(dtype: str) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    return KernelSpec.of(
        *("blocks", "block_scores_each", "BlockScoresFewParams", kind, is_e4m3, RULES.each_warps),
        tags=["e4m3" if is_e4m3 else kind],
        threads=32 * RULES.each_warps,
    )


EACH = {dtype: _spec(dtype) for dtype in FORMS}
SPECS = tuple(EACH.values())
