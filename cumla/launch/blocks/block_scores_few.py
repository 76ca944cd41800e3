# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_scores_few.cu: scores of blocks for few query rows a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.blocks.block_scores import FORMS, known_dtype
from cumla.launch.blocks.block_scores_each import EACH
from cumla.launch.blocks.choice import RULES, EachForm, each_form, each_forms
from cumla.launch.device import sm_count_of
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec, in_cuda
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.block_scores import BlockScoresArguments
    from cumla.launch.kernel import Launch

_FILE = "blocks/block_scores_few"
_ROWS, _COLUMNS, _REQUESTS, _MOST_TOKENS = (
    constant(_FILE, name)
    for name in ("kFewScoreRows", "kFewScoreColumns", "kFewScoreRequests", "kMaxTokens")
)
_FORMS = {  # of a dtype: what is multiplied, whether it is e4m3 in memory, and the rings
    "bfloat16": ("bfloat16", False, RULES.scores_rings),
    "float16": ("float16", False, RULES.scores_rings),
    "float8_e4m3fn": ("float16", True, RULES.e4m3_scores_rings),
}


def _spec(dtype: str) -> KernelSpec:
    kind, is_e4m3, rings = _FORMS[dtype]
    of_rings = ", ".join(map(in_cuda, (is_e4m3, *rings)))
    return KernelSpec.of(
        *("blocks", "block_scores_few", "BlockScoresFewParams", kind, is_e4m3, *rings),
        tags=["e4m3" if is_e4m3 else kind],
        threads=32 * rings[0],
        smem_bytes=constant(_FILE, f"ScoresFewLayout<{of_rings}>::kBytes"),
    )


_SPECS = {dtype: _spec(dtype) for dtype in _FORMS}
SPECS = tuple(_SPECS.values())


def scores_few_specs(dtype: str, columns: int) -> tuple[KernelSpec, ...]:
    """Find the kernels of a dtype of keys, and their columns, if there are any."""
    if columns != _COLUMNS:
        return ()
    forms = each_forms(FORMS[known_dtype(dtype)][1])
    return tuple(_few_spec(dtype, form) for form in (None, *forms))


def _few_spec(dtype: str, each: EachForm | None) -> KernelSpec:
    known = known_dtype(dtype)
    return _SPECS[known] if each is None else EACH[known, each.warps]


def has_few_rows(arguments: BlockScoresArguments) -> bool:
    """Whether block_scores_few serves a call."""
    shape = arguments.q.shape
    return (
        len(shape) == 4
        and shape[1] * shape[2] <= _ROWS
        and shape[3] == _COLUMNS
        and shape[0] <= _REQUESTS
        and shape[0] * arguments.width < _MOST_TOKENS
    )


def block_scores_few_launch(
    kv_lens: tuple[int, int], arguments: BlockScoresArguments, out: ArrayView
) -> Launch:
    """Describe how to score all blocks; `kv_lens` are the address of lengths, and their stride."""
    a = arguments
    batch, q_len, heads, _ = a.q.shape
    in_page, steps = a.keys.shape[1] // a.block_size, -(-a.width // 32)
    blocks, sm_count = batch * a.width, sm_count_of(out.device)
    is_e4m3 = FORMS[known_dtype(a.q.dtype)][1]
    each = each_form(is_e4m3, blocks, a.block_size, sm_count)
    spec = _few_spec(a.q.dtype, each)
    grid = min(sm_count, blocks) if each is None else blocks
    warps = grid * spec.threads // 32
    values = {
        "kv_lens": kv_lens[0],
        "kv_lens_stride": kv_lens[1] // 4,
        "q": a.q.ptr,
        "q_stride_request": a.q.strides[0],
        "q_stride_token": a.q.strides[1],
        "q_stride_head": a.q.strides[2],
        "keys": a.keys.ptr,
        "keys_stride_page": a.keys.strides[0],
        "keys_stride_row": a.keys.strides[1],
        "block_table": a.block_table.ptr,
        "block_table_stride": a.block_table.strides[0] // 4,
        "table_entries": (batch - 1) * (a.block_table.strides[0] // 4) + a.block_table.shape[1],
        "out": out.ptr,
        "out_stride_request": out.strides[0] // 4 * q_len,
        "out_stride_token": out.strides[0] // 4,
        "out_stride_head": out.strides[1] // 4,
        "batch": batch,
        "q_len": q_len,
        "heads": heads,
        "rows": q_len * heads,
        "width": a.width,
        "steps": steps,
        "most": min(a.block_table.shape[1] * a.keys.shape[1], _MOST_TOKENS),
        "num_pages": a.keys.shape[0],
        "block_size": a.block_size,
        "blocks_per_page": in_page,
        "causal": a.causal,
        "by_warps": divisor_of(warps),
        "by_steps": divisor_of(max(steps, 1)),
        "by_heads": divisor_of(heads),
        "by_block_size": divisor_of(a.block_size),
        "by_blocks_per_page": divisor_of(in_page),
        "by_width": divisor_of(max(a.width, 1)),
        "many": RULES.many_blocks,
        "is_single": blocks <= warps,
    }
    return launch_of(spec, (grid, 1, 1), values)
