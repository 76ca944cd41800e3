# SPDX-License-Identifier: Apache-2.0
"""Entries of cuda/blocks/block_scores_each.cu; block_scores_few.py launches them."""

from __future__ import annotations

from cumla.launch.blocks.block_scores import FORMS
from cumla.launch.blocks.choice import EachForm, each_forms
from cumla.launch.source import KernelSpec


def _spec(dtype: str, form: EachForm) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    return KernelSpec.of(
        *("blocks", "block_scores_each", "BlockScoresFewParams", kind, is_e4m3),
        form.warps,
        tags=["e4m3" if is_e4m3 else kind, str(form.warps)],
        threads=32 * form.warps,
        min_blocks=form.ctas,
    )


EACH = {
    (dtype, form.warps): _spec(dtype, form)
    for dtype, (_, is_e4m3) in FORMS.items()
    for form in each_forms(is_e4m3)
}
SPECS = tuple(EACH.values())
