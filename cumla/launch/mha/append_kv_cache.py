# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mha/append_kv_cache.cu, which writes keys and values and rotates queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.slots import indices, num_entries, num_requests, page_numbers, pages
from cumla.launch.source import FLOATS, KernelSpec, in_cuda

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

_FILE = "mha/append_kv_cache"
_THREADS, _MAX_HEADS, _OCTET = (
    constant(_FILE, name) for name in ("kThreads", "kMaxHeads", "kOctet")
)
_MAX_TILES = 1 << 15  # in y of the grid

_TABLES = {
    dtype: constant(_FILE, name)
    for dtype, name in (("float32", "kFloat"), ("bfloat16", "kBfloat16"), ("float16", "kFloat16"))
}
_SPECS = {
    (dtype, to_fp8): KernelSpec.of(
        *("mha", "append_kv_cache", "AppendKvCacheParams", dtype, to_fp8),
        tags=["fp8", dtype] if to_fp8 else [dtype],
        threads=_THREADS,
        min_blocks=3 if dtype == "float32" else 7,
        smem_bytes=_THREADS * 2 * _MAX_HEADS * constant(_FILE, f"Held<{in_cuda(dtype)}>::kBytes"),
    )
    for dtype in FLOATS
    for to_fp8 in (False, True)
}
SPECS = tuple(_SPECS.values())


def append_kv_spec(dtype: str, cache_dtype: str) -> KernelSpec:
    """Choose the kernel for rows of a dtype and a cache of the same dtype or of one byte."""
    return _SPECS[dtype, cache_dtype not in FLOATS]


class Scale(NamedTuple):
    """Factors of an e4m3 cache: a number, or float32 in an array.

    An array has the axes ``(batch, num_kv_heads)``; a stride of 0 stands for one number for all.
    """

    number: float = 1.0
    view: ArrayView | None = None


class AppendKVArguments(NamedTuple):
    """Checked views of one call, as :func:`cumla.append_kv_cache` describes the arrays.

    Rows have the axes (batch, q_len, heads, columns); ragged ones are a batch of one. Caches have
    the axes (num_pages, page_size, num_kv_heads, columns). Without a cache of values `k_cache` is
    (tokens, 1, heads, columns), and gets the rotated keys of all tokens.
    """

    q: ArrayView | None = None
    q_out: ArrayView | None = None
    k: ArrayView | None = None
    v: ArrayView | None = None
    k_cache: ArrayView | None = None
    v_cache: ArrayView | None = None
    slot_mapping: ArrayView | None = None
    batch_indices: ArrayView | None = None
    positions: ArrayView | None = None
    qo_indptr: ArrayView | None = None
    kv_lens: ArrayView | None = None
    block_table: ArrayView | None = None
    kv_indices: ArrayView | None = None
    kv_indptr: ArrayView | None = None
    cos: ArrayView | None = None
    sin: ArrayView | None = None
    k_scale: Scale = Scale()
    v_scale: Scale = Scale()
    interleaved: bool = False
    rotary_offset: int = 0
    layout: str = "NHD"  # of the caches that were given

    @property
    def rows(self) -> ArrayView:
        """Keys, or queries where there are no keys."""
        rows = self.q if self.k is None else self.k
        assert rows is not None
        return rows

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return self.rows.shape[0] * self.rows.shape[1]


def append_kv_launch(arguments: AppendKVArguments) -> Launch:
    """Describe how to write and to rotate the rows of at least one token."""
    a = arguments
    q_heads, kv_heads = _heads(a.q), _heads(a.k)
    keys = _division(a.rows.shape[3], 0 if a.cos is None else 2 * a.cos.shape[1], a.rotary_offset)
    values = keys if a.v is None else _division(a.v.shape[3], 0, 0)
    in_cache = a.v_cache is not None
    team = max(keys["units"], values["units"])
    heads = _heads_of_chunk(a.tokens)
    chunks = [-(-n // heads) for n in (q_heads, kv_heads, kv_heads if in_cache else 0)]
    params = {
        "q": _rows(a.q),
        "q_out": _rows(a.q_out),
        "k": _rows(a.k),
        "v": _rows(a.v),
        "k_cache": pages(a.k_cache),
        "v_cache": pages(a.v_cache),
        "slots": indices(a.slot_mapping),
        "batch_indices": indices(a.batch_indices),
        "positions": indices(a.positions),
        "kv_lens": indices(a.kv_lens),
        "bounds": indices(a.qo_indptr),
        **page_numbers(a.block_table, a.kv_indices),
        "page_list_bounds": indices(a.kv_indptr),
        "cos": _angles(a.cos),
        "sin": _angles(a.sin),
        "k_scale": _scales(a.k_scale),
        "v_scale": _scales(a.v_scale),
        "tokens": a.tokens,
        "tokens_of_batch": a.rows.shape[1],
        "batch": _batch(a),
        "num_entries": num_entries(a.block_table, a.kv_indices),
        "num_pages": a.k_cache.shape[0] if a.k_cache is not None and in_cache else 0,
        "page_size": a.k_cache.shape[1] if a.k_cache is not None and in_cache else 0,
        "max_position": 0 if a.cos is None else a.cos.shape[0],
        "keys": keys,
        "values": values,
        "team": team,
        "inverse_team": -(-(1 << 16) // team),
        "heads": heads,
        "q_chunks": chunks[0],
        "kv_chunks": chunks[1],
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "interleaved": a.interleaved,
        "table_type": 0 if a.cos is None else _TABLES[a.cos.dtype],
    }
    cache_dtype = a.rows.dtype if a.k_cache is None else a.k_cache.dtype
    tiles = -(-a.tokens // (_THREADS // team))
    grid = (sum(chunks), min(tiles, _MAX_TILES), -(-tiles // _MAX_TILES))
    return launch_of(append_kv_spec(a.rows.dtype, cache_dtype), grid, params)


def _heads_of_chunk(tokens: int) -> int:
    """Let few tokens have more threads, each with a shorter way."""
    return 2 if tokens <= 512 else _MAX_HEADS


def _division(columns: int, rotary_dim: int, rotary_offset: int) -> dict[str, int]:
    """Return which thread of a team has which octets of a row, as struct Division does."""
    rope_units = rotary_dim // (2 * _OCTET)
    rest = columns // _OCTET - 2 * rope_units
    units = rope_units + -(-rest // 2)
    first = rotary_offset // _OCTET
    return {"units": units, "rope_units": rope_units, "rope_first": first, "rest": rest}


def _heads(view: ArrayView | None) -> int:
    return 0 if view is None else view.shape[2]


def _rows(view: ArrayView | None) -> dict[str, int] | None:
    names = "data", "stride_batch", "stride_token", "stride_head"
    return None if view is None else strided(view, *names)


def _angles(view: ArrayView | None) -> dict[str, int] | None:
    return None if view is None else strided(view, "data", "stride_position", "stride_column")


def _scales(scale: Scale) -> dict[str, Any]:
    if scale.view is None:
        return {"data": 0, "stride_request": 0, "stride_head": 0, "value": scale.number}
    return strided(scale.view, "data", "stride_request", "stride_head") | {"value": 1.0}


def _batch(a: AppendKVArguments) -> int:
    """Count the requests."""
    if a.kv_lens is not None:
        return a.kv_lens.shape[0]
    return num_requests(a.block_table, a.kv_indptr)
