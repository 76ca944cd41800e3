# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla_decode_fp8.cu: split-KV MLA attention over caches of e4m3 numbers."""

from __future__ import annotations

import struct
from math import e, log2
from typing import TYPE_CHECKING

from cumla.launch.kernel import PreparedLaunch
from cumla.launch.mla_plan import MOST_TOKENS, NARROW_ROWS, MLADecodeKey
from cumla.launch.source import KernelSpec
from cumla.launch.tensor_map import paged_kv_map

if TYPE_CHECKING:
    from cumla.arrays import ArrayView
    from cumla.checks import Arguments
    from cumla.launch.mla_attention import MLAAttentionKey
    from cumla.launch.module import LoadedKernel

__all__ = ["SPECS", "fp8_spec", "fp8_specs", "prepare_decode_fp8"]

_RAGGED = "ragged"
# Query rows of a tile; halves of the tiles of ragged queries.
_SHAPES: tuple[int | str, ...] = (*NARROW_ROWS, _RAGGED)
_FORM_TAGS = {"pages": "kPages", "rows": "kRows"}  # the latter serves whatever is no whole block
# Of a thread block, without scales of each token and with them (kBytes of Fp8Layout).
_SMEM_BYTES = {16: (198080, 222144), 32: (219904, 227072)}


def _spec(shape: int | str, grouped: bool, form: str) -> KernelSpec:
    rows = NARROW_ROWS[-1] if isinstance(shape, str) else shape
    name = "mla_attention_fp8" if shape == _RAGGED else f"mla_decode_fp8_{shape}"
    tile = ", HalfTile" if shape == _RAGGED else ""
    return KernelSpec(
        stem="mla_decode_fp8",
        entry="_".join(
            (name, *(["grouped"] if grouped else []), *([form] if form == "rows" else []))
        ),
        function=f"mla_decode_fp8<{rows}, {str(grouped).lower()}, {_FORM_TAGS[form]}{tile}>",
        params="MlaDecodeFp8Params",
        threads=384,
        smem_bytes=_SMEM_BYTES[rows][grouped],
    )


# Of ragged queries with scales only the form for any pages: the other one runs out of registers.
_SPECS = {
    (shape, grouped, form): _spec(shape, grouped, form)
    for shape in _SHAPES
    for grouped in (False, True)
    for form in _FORM_TAGS
    if (shape, grouped, form) != (_RAGGED, True, "pages")
}
SPECS = tuple(_SPECS.values())


def fp8_spec(key: MLADecodeKey | MLAAttentionKey, grouped: bool) -> KernelSpec:
    """Look up the kernel of a shape.

    Parameters
    ----------
    key : MLADecodeKey or MLAAttentionKey
        Of a cache of e4m3 numbers.
    grouped : bool
        Each token has a scale for each 128 of its latent columns.

    Returns
    -------
    KernelSpec
    """
    shape = key.row_tile if isinstance(key, MLADecodeKey) else _RAGGED
    return _SPECS[shape, grouped, _form_of(key, grouped)]


def _form_of(key: MLADecodeKey | MLAAttentionKey, grouped: bool) -> str:
    """Tell in which form blocks come from the pages of a key."""
    ragged = not isinstance(key, MLADecodeKey)
    return "pages" if key.form == "pages" and not (ragged and grouped) else "rows"


def fp8_specs(key: MLADecodeKey | MLAAttentionKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape, for every format of the cache."""
    return fp8_spec(key, grouped=False), fp8_spec(key, grouped=True)


_PARAMS = struct.Struct("<128s128s33q12if4x5qfi16x128s")
_LOG2_E = log2(e)
_NO_MAP = bytes(128)  # each row is copied for itself, or there are no scales


def prepare_decode_fp8(
    kernel: LoadedKernel,
    key: MLADecodeKey | MLAAttentionKey,
    buffer: int,
    arguments: Arguments,
    out: ArrayView,
    lse: ArrayView,
    softmax_scale: float,
    stream: int,
) -> PreparedLaunch:
    """Prepare to attend to the blocks of every part; split requests go to the plan's buffer.

    Parameters
    ----------
    kernel : LoadedKernel
        Of :func:`fp8_spec`, grouped where the arguments have kv_scales.
    key : MLADecodeKey or MLAAttentionKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer, which holds a schedule.
    arguments : Arguments
        Checked. Of ragged queries as :func:`cumla.launch.mla_attention.prepare_attention` turns
        them into those of one request.
    out, lse : ArrayView
        As :func:`cumla.mla_decode` describes them.
    softmax_scale : float
        Factor of the scores.
    stream : int
        CUstream handle.

    Returns
    -------
    PreparedLaunch
        To be called.
    """
    block_table, layout, scales = arguments.block_table, key.layout, arguments.kv_scales
    columns = (arguments.kv_cache, arguments.kv_rope, arguments.q, arguments.q_rope)
    factor = arguments.kv_scale
    pointer, value = (0, factor) if isinstance(factor, (int, float)) else (factor.ptr, 0.0)
    caches = (arguments.kv_cache, arguments.kv_rope, scales)
    maps = (
        [_map(key, cache) for cache in caches]
        if _form_of(key, scales is not None) == "pages"
        else [_NO_MAP] * 3
    )
    values = (
        *maps[:2],
        *(value for view in columns for value in (view.ptr, *view.strides[:3])),
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
        min(block_table.shape[1] * key.page_size, MOST_TOKENS),
        (block_table.shape[0] - 1) * (block_table.strides[0] // 4) + block_table.shape[1],
        key.num_places,
        key.parts,
        block_table.shape[1],
        arguments.kv_cache.shape[0],
        key.page_size,
        key.box_rows,
        key.q_len,
        key.heads_per_group,
        key.row_groups,
        key.may_wait,
        key.causal,
        out.dtype == "float32",
        softmax_scale * _LOG2_E,
        *((0, 0, 0, 0) if scales is None else (scales.ptr, *scales.strides[:3])),
        pointer,
        value,
        arguments.kv_rope.dtype != "bfloat16",
        maps[2],
    )
    grid = key.row_tiles, key.parts, key.num_kv_heads
    return PreparedLaunch(kernel, grid, _PARAMS, values, stream)


def _map(key: MLADecodeKey | MLAAttentionKey, cache: ArrayView | None) -> bytes:
    """Describe columns of the cache, or its scales, to the copy engine."""
    if cache is None:
        return _NO_MAP
    num_pages, page_size, num_kv_heads, columns = cache.shape
    page_stride, row_stride, head_stride, _ = cache.strides
    return paged_kv_map(
        cache.ptr,
        cache.dtype,
        num_pages,
        page_size,
        num_kv_heads,
        columns,
        page_stride,
        row_stride,
        head_stride,
        key.box_rows,
    )
