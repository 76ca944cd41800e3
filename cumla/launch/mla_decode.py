# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla_decode.cu and cuda/mla_decode_swapped.cu: split-KV MLA attention."""

from __future__ import annotations

import struct
from math import e, log2
from typing import TYPE_CHECKING

from cumla.launch.kernel import PreparedLaunch
from cumla.launch.mla_plan import BLOCK_TOKENS, HEAD_DIM, VARIANTS
from cumla.launch.source import KernelSpec
from cumla.launch.tensor_map import paged_kv_map

if TYPE_CHECKING:
    from cumla.arrays import ArrayView
    from cumla.launch.mla_plan import MLADecodeKey
    from cumla.launch.module import LoadedKernel

__all__ = ["SPECS", "decode_spec", "decode_specs", "prepare_decode"]

_TAGS = {"bfloat16": "Bf16", "float16": "Fp16"}


def _spec(dtype: str, shared_blocks: bool) -> KernelSpec:
    return KernelSpec(
        stem="mla_decode",
        entry=f"mla_decode_{dtype}" + ("_shared_blocks" if shared_blocks else ""),
        function=f"mla_decode<{_TAGS[dtype]}, {str(shared_blocks).lower()}>",
        params="MlaDecodeParams",
        threads=384,
        smem_bytes=232160,
    )


def _swapped_spec(dtype: str) -> KernelSpec:
    return KernelSpec(
        stem="mla_decode_swapped",
        entry=f"mla_decode_{dtype}_swapped",
        function=f"mla_decode_swapped<{_TAGS[dtype]}>",
        params="MlaDecodeParams",
        threads=384,
        smem_bytes=231472,
    )


_SPECS = {
    (dtype, variant): spec
    for dtype in _TAGS
    for variant, spec in zip(
        VARIANTS, (_swapped_spec(dtype), _spec(dtype, False), _spec(dtype, True)), strict=True
    )
}
SPECS = tuple(_SPECS.values())


def decode_specs(dtype: str) -> tuple[KernelSpec, ...]:
    """List the kernels of one dtype."""
    return tuple(spec for (of, _), spec in _SPECS.items() if of == dtype)


def decode_spec(key: MLADecodeKey) -> KernelSpec:
    """Look up the kernel of a shape's variant."""
    return _SPECS[key.dtype, key.variant]


_PARAMS = struct.Struct("<128s19q9if")
_LOG2_E = log2(e)


def prepare_decode(
    kernel: LoadedKernel,
    key: MLADecodeKey,
    buffer: int,
    q: ArrayView,
    kv_cache: ArrayView,
    block_table: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    softmax_scale: float,
    stream: int,
) -> PreparedLaunch:
    """Prepare to attend to the blocks of every part; split requests go to the plan's buffer.

    Parameters
    ----------
    kernel : LoadedKernel
        Of :func:`decode_spec`.
    key : MLADecodeKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer, which holds a schedule.
    q, kv_cache, block_table, out, lse : ArrayView
        Checked arguments as :func:`cumla.mla_decode` describes them; kv_cache four-dimensional.
    softmax_scale : float
        Factor of the scores.
    stream : int
        CUstream handle.

    Returns
    -------
    PreparedLaunch
        To be called.
    """
    num_pages, page_size, num_kv_heads, _ = kv_cache.shape
    page_stride, row_stride, head_stride, _ = kv_cache.strides
    layout = key.layout
    values = (
        paged_kv_map(
            kv_cache.ptr,
            key.dtype,
            num_pages,
            page_size,
            num_kv_heads,
            HEAD_DIM,
            page_stride,
            row_stride,
            head_stride,
            BLOCK_TOKENS,
        ),
        q.ptr,
        *q.strides[:3],
        out.ptr,
        *out.strides[:3],
        lse.ptr,
        *(stride // 4 for stride in lse.strides),
        block_table.ptr,
        block_table.strides[0] // 4,
        buffer + layout.places,
        buffer + layout.parts,
        buffer + layout.tickets,
        buffer + layout.partial_out,
        buffer + layout.partial_lse,
        key.batch,
        key.parts,
        block_table.shape[1],
        key.q_len,
        key.heads_per_group,
        key.row_groups,
        key.may_wait,
        key.causal,
        out.dtype == "float32",
        softmax_scale * _LOG2_E,
    )
    return PreparedLaunch(
        kernel, (key.row_tiles, key.parts, key.num_kv_heads), _PARAMS, values, stream
    )
