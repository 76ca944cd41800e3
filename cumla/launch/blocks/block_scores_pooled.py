# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_scores_pooled.cu: scores of pooled keys for few query rows."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from cumla.launch.blocks.block_scores import FORMS, known_dtype
from cumla.launch.blocks.choice import pooled_units
from cumla.launch.layouts import constant, launch_of
from cumla.launch.source import KernelSpec
from cumla.launch.split.division import divisor_of

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.block_scores_sums import BlockScoresSumsArguments
    from cumla.launch.kernel import Launch

_FILE = "blocks/block_scores_pooled"
_KEYS, _WARPS, _ROWS, _MOST_TOKENS = (
    constant(_FILE, name) for name in ("kPooledKeys", "kPooledWarps", "kFewScoreRows", "kMaxTokens")
)
_ROW_BYTES = 256, 128  # of keys


def _spec(dtype: str, columns: int) -> KernelSpec:
    kind, is_e4m3 = FORMS[dtype]
    nbytes = columns if is_e4m3 else 2 * columns
    return KernelSpec.of(
        *("blocks", "block_scores_pooled", "BlockScoresPooledParams"),
        *(kind, is_e4m3, columns),
        tags=["e4m3" if is_e4m3 else kind, str(columns)],
        threads=32 * _WARPS,
        smem_bytes=constant(_FILE, f"PooledLayout<{nbytes}>::kBytes"),
    )


_SPECS = {
    (dtype, nbytes // (1 if is_e4m3 else 2)): _spec(dtype, nbytes // (1 if is_e4m3 else 2))
    for dtype, (_, is_e4m3) in FORMS.items()
    for nbytes in (_ROW_BYTES if is_e4m3 else _ROW_BYTES[:1])
}
SPECS = tuple(_SPECS.values())


def scores_pooled_specs(dtype: str, columns: int, block_rows: int) -> tuple[KernelSpec, ...]:
    """Find the kernel of a dtype of keys, their columns, and rows of keys of a block, if any."""
    spec = _SPECS.get((known_dtype(dtype), columns)) if block_rows == 1 else None
    return () if spec is None else (spec,)


def has_few_pooled(arguments: BlockScoresSumsArguments) -> bool:
    """Whether block_scores_pooled serves a call."""
    a, shape = arguments, arguments.q.shape
    group_heads = shape[-2] // a.groups
    return (
        len(shape) == 4
        and a.block_rows == 1
        and a.entries is None
        and shape[1] * shape[2] <= _ROWS
        and group_heads & (group_heads - 1) == 0
        and (known_dtype(a.q.dtype), shape[3]) in _SPECS
        and shape[0] * a.width < _MOST_TOKENS
    )


def block_scores_pooled_launch(
    kv_lens: tuple[int, int], arguments: BlockScoresSumsArguments, out: ArrayView
) -> Launch:
    """Describe how to score all keys; `kv_lens` are the address of lengths, and their stride."""
    a = arguments
    batch, q_len, heads, columns = a.q.shape
    spec = _SPECS[known_dtype(a.q.dtype), columns]
    rows, width = a.keys.shape[1], a.width
    steps = -(-width // _KEYS)
    is_dense = a.keys.strides[1] == columns * (1 if spec.entry.count("e4m3") else 2)
    run = gcd(rows, _KEYS) if is_dense else 1
    weights = a.weights
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
        "table_entries": 0,
        "out": out.ptr,
        "out_stride_request": out.strides[0] // 4 * q_len,
        "out_stride_token": out.strides[0] // 4,
        "out_stride_head": out.strides[1] // 4,
        "batch": batch,
        "q_len": q_len,
        "heads": heads,
        "rows": q_len * heads,
        "width": width,
        "steps": steps,
        "most": min(a.block_table.shape[1] * rows * a.stride, _MOST_TOKENS),
        "num_pages": a.keys.shape[0],
        "block_size": _KEYS,
        "blocks_per_page": 1,
        "causal": a.causal,
        "by_warps": divisor_of(1),
        "by_steps": divisor_of(1),
        "by_heads": divisor_of(heads),
        "by_block_size": divisor_of(_KEYS),
        "by_blocks_per_page": divisor_of(1),
        "by_width": divisor_of(1),
        "many": 0,
        "is_single": False,
        "weights": weights.ptr if weights is not None else 0,
        "weights_stride_token": weights.strides[0] // 4 if weights is not None else 0,
        "weights_stride_head": weights.strides[1] // 4 if weights is not None else 0,
        "page_rows": rows,
        "run_shift": run.bit_length() - 1,
        "group_shift": (heads // a.groups).bit_length() - 1,
        "is_relu": a.is_relu,
        "by_row_tokens": divisor_of(a.stride),
        "by_page_rows": divisor_of(rows),
        "by_batch": divisor_of(batch),
    }
    units = -(-steps // _WARPS)
    each = pooled_units(batch * units)
    return launch_of(spec, (batch * -(-units // each), 1, 1), values)
