# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_scores_prompts.cu: sums over four heads, pooled keys, prompts."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.blocks.block_scores import FORMS, known_dtype
from cumla.launch.blocks.block_scores_sums import sums_tiles, sums_values
from cumla.launch.blocks.choice import prompts_steps
from cumla.launch.device import sm_count_of
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.block_scores_sums import BlockScoresSumsArguments
    from cumla.launch.kernel import Launch

_FILE = "blocks/block_scores_prompts"
_THREADS, _COLUMNS, _HEADS, _UNITS, _FEW_UNITS, _KEYS, _BYTES, _FEW_BYTES = (
    constant(_FILE, name)
    for name in (
        *("kPromptsThreads", "kPromptsColumns", "kPromptsHeads"),
        *("kPromptsUnits", "kPromptsFewUnits", "kPromptsKeys"),
        *("kPromptsBytes", "kPromptsFewBytes"),
    )
)
_CTAS = {_UNITS: 2, _FEW_UNITS: 4}  # on a multiprocessor


def _spec(dtype: str, units: int) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    return KernelSpec.of(
        *("blocks", "block_scores_prompts", "BlockScoresSumsParams"),
        *(kind, is_e4m3, units),
        tags=[*(["few"] if units == _FEW_UNITS else []), "e4m3" if is_e4m3 else kind],
        threads=_THREADS,
        min_blocks=_CTAS[units],
        smem_bytes=_FEW_BYTES if units == _FEW_UNITS else _BYTES,
    )


_SPECS = {key: _spec(*key) for key in product(FORMS, _CTAS)}
SPECS = tuple(_SPECS.values())


def scores_prompts_specs(dtype: str, columns: int, block_rows: int) -> tuple[KernelSpec, ...]:
    """Find the kernels of a dtype of keys, their columns, and rows of keys of a block, if any."""
    if (columns, block_rows) != (_COLUMNS, 1):
        return ()
    return tuple(_SPECS[known_dtype(dtype), units] for units in _CTAS)


def has_prompts(arguments: BlockScoresSumsArguments) -> bool:
    """Whether block_scores_prompts serves a call that is not one of few query rows.

    Not by the number of query tokens: a request has the same bits whatever else is in the batch.
    """
    a = arguments
    return (
        a.block_rows == 1 and a.entries is None and a.q.shape[-2:] == (a.groups * _HEADS, _COLUMNS)
    )


def block_scores_prompts_launch(
    rows: int, arguments: BlockScoresSumsArguments, out: ArrayView
) -> Launch:
    """Describe how to score keys; `rows` is the address of what each query token sees."""
    a = arguments
    units = _FEW_UNITS if a.each_request * a.groups <= _FEW_UNITS else _UNITS
    tiles = sums_tiles(a, units)
    steps = -(-a.width // _KEYS)
    at_once = sm_count_of(out.device) * _CTAS[units]
    each = prompts_steps(steps, tiles.of_tokens * tiles.of_groups, at_once)
    values = sums_values(rows, a, out, tiles, _KEYS, each)
    grid = (tiles.of_tokens, -(-steps // each), tiles.of_groups)
    return launch_of(_SPECS[known_dtype(a.q.dtype), units], grid, values)
