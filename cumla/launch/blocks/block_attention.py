# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/blocks/block_attention.cu: attention to short lists of blocks, in one launch."""

from __future__ import annotations

from itertools import product
from math import e, log2
from typing import TYPE_CHECKING, Any

from cumla.launch.blocks.choice import RULES, list_ctas
from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.source import HALVES, KernelSpec, in_cuda
from cumla.launch.split.division import divisor_of
from cumla.launch.tensor_map import paged_kv_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView
    from cumla.launch.blocks.key import BlockKey
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.append_kv_cache import Scale
    from cumla.launch.mha.launch import MHAArguments
    from cumla.launch.tensor_map import TensorMap

_FILE = "blocks/block_attention"
_LOG2_E = log2(e)


_CACHES = {"same": [], "e4m3": ["e4m3"], "factors": ["e4m3", "factors"]}  # tags


def _spec(dtype: str, cache: str, warps: int) -> KernelSpec:
    e4m3, factors = in_cuda(cache != "same"), in_cuda(cache == "factors")
    params = "Factors" if cache == "factors" else "Cluster"
    return KernelSpec.of(
        *("blocks", "block_attention", f"BlockAttention{params}Params", dtype, e4m3, warps),
        tags=[dtype, *_CACHES[cache], str(warps)],
        threads=32 * warps,
        min_blocks=list_ctas(warps),
        smem_bytes=constant(_FILE, f"DecodeLayout<{e4m3}, {warps}, {factors}>::kBytes"),
    )


_WARPS = dict.fromkeys(form.warps for form in (*RULES.lists, RULES.invariant_lists))
_SPECS = {key: _spec(*key) for key in product(HALVES, _CACHES, _WARPS)}
SPECS = tuple(_SPECS.values())
_CHUNKS = {
    e4m3: constant(_FILE, f"DecodeLayout<{in_cuda(e4m3)}, 4>::kChunk") for e4m3 in (False, True)
}


def block_attention_spec(key: BlockKey) -> KernelSpec:
    """Find the kernel of a shape that this file serves."""
    e4m3 = "factors" if key.rows_have_factors else "e4m3"
    return _SPECS[key.dtype, e4m3 if key.cache_dtype != key.dtype else "same", key.list_form.warps]


def block_attention_launch(
    key: BlockKey,
    arguments: MHAArguments,
    lists: Mapping[str, Any],
    out: ArrayView,
    lse: ArrayView,
    factors: tuple[ArrayView, ArrayView] | None = None,
) -> Launch:
    """Describe attention to lists; out and lse have the axes of q.

    `arguments` has keys and values as virtual pages, and the block table of the call; `lists` has
    the values of struct ListsParams but for where pages are written. `factors` are those of keys
    and of values, (kv heads, rows of the cache).
    """
    values = block_attention_values(key, arguments, lists, out, lse) | block_maps(key, arguments)
    for name, view in zip(("key_factors", "value_factors"), factors or (), strict=False):
        head, row = (stride // 4 for stride in view.strides)
        values[name] = {"data": view.ptr, "stride_head": head, "stride_row": row}
    values |= {"cluster": key.cluster, "by_cluster": divisor_of(key.cluster)}
    grid = key.cluster * key.num_places, 1, 1
    return launch_of(block_attention_spec(key), grid, values, key.cluster)


def block_attention_values(
    key: BlockKey,
    arguments: MHAArguments,
    lists: Mapping[str, Any],
    out: ArrayView,
    lse: ArrayView,
) -> dict[str, Any]:
    """Name the values of struct BlockAttentionParams, without tensor maps.

    See :func:`block_attention_launch`.
    """
    a, table = arguments, arguments.pages
    assert table is not None
    has_requests = len(a.q.shape) == 4
    apart = a.q.shape[1] if has_requests else 0
    return {
        **lists,
        "pages_out": 0,
        **dict.fromkeys(("key_map", "value_map"), bytes(128)),
        **_rows("q", a.q, has_requests),
        **_rows("out", out, has_requests),
        **{
            name: n if name == "lse" else n // 4
            for name, n in _rows("lse", lse, has_requests).items()
        },
        "sinks": 0 if a.sinks is None else a.sinks.ptr,
        "key_scale": _scales(a.k_scale),
        "value_scale": _scales(a.v_scale),
        "table_entries": (table.shape[0] - 1) * (table.strides[0] // 4) + table.shape[1],
        "key_columns": key.head_dim,
        "value_columns": key.head_dim_v,
        "heads_per_group": key.num_heads,
        "tokens_apart": apart,
        "out_is_float": out.dtype == "float32",
        "cluster_log2": key.cluster.bit_length() - 1,
        "scale_log2": (a.softcap or a.softmax_scale) * _LOG2_E,
        "to_softcap": 2 * a.softmax_scale / a.softcap * _LOG2_E if a.softcap else 0.0,
        "by_tokens_apart": divisor_of(apart or 1 << 31),
    }


def block_maps(key: BlockKey, arguments: MHAArguments) -> dict[str, TensorMap]:
    """Name the tensor maps of struct BlockAttentionParams."""
    k, v = arguments.k, arguments.v
    if 0 in k.shape:  # of which nothing is read, but maps need an address that exists
        k, v = (view._replace(ptr=arguments.q.ptr) for view in (k, v))
    rows = _CHUNKS[key.cache_dtype != key.dtype]
    return {
        f"{name}_map": paged_kv_map(
            view.ptr, key.cache_dtype, tuple([max(n, 1) for n in view.shape]), view.strides, rows
        )._replace(name=name[0])
        for name, view in (("key", k), ("value", v))
    }


def _rows(name: str, view: ArrayView, has_requests: bool) -> dict[str, int]:
    """Name where rows begin, and their strides in bytes; those without requests are of one."""
    if not has_requests:
        view = view._replace(strides=(0, *view.strides))
    return strided(view, name, *(f"{name}_stride_{axis}" for axis in ("batch", "token", "head")))


def _scales(scale: Scale) -> dict[str, Any]:
    """Name the values of struct Scales."""
    view = scale.view
    if view is None:
        return {
            "data": 0, "stride_request": 0, "stride_head": 0, "value": scale.number, "requests": 1
        }  # fmt: skip
    request, head = (
        stride // 4 if size > 1 else 0
        for size, stride in zip(view.shape, view.strides, strict=True)
    )
    return {
        "data": view.ptr,
        "stride_request": request,
        "stride_head": head,
        "value": 1.0,
        "requests": view.shape[0],
    }
