# SPDX-License-Identifier: Apache-2.0
"""Entries of cuda/blocks/block_scores_each.cu; block_scores_few.py launches them."""

from __future__ import annotations

from cumla.launch.blocks.block_scores import FORMS
from cumla.launch.blocks.choice import RULES
from cumla.launch.source import KernelSpec


def _spec(dtype: str, warps: int, ctas: int) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    return KernelSpec.of(
        *("blocks", "block_scores_each", "BlockScoresEachParams", kind, is_e4m3, warps),
        tags=["e4m3" if is_e4m3 else kind, str(warps)],
        threads=32 * warps,
        min_blocks=ctas,
    )


EACH = {(dtype, form[0]): _spec(dtype, *form) for dtype in FORMS for form in RULES.each_forms}
SPECS = tuple(EACH.values())
