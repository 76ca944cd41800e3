# SPDX-License-Identifier: Apache-2.0
"""Rows, pages and attention of the interfaces of FlashAttention and of vLLM's fork."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import (
    check_axes,
    check_given,
    check_integers,
    check_tensors,
    refuse_gradients,
)
from cumla.compat._torch import import_torch, positions_of
from cumla.core.arguments import checked_flag, checked_int
from cumla.mha.attention import attention
from cumla.mha.mask import AttentionMask

if TYPE_CHECKING:
    from cumla.compat._table import Interface

__all__ = [
    "Q_AXES",
    "Rows",
    "attend",
    "attend_to_rows",
    "check_lists",
    "check_order",
    "check_rows",
    "contiguous",
    "factors_of",
    "no_metadata",
    "options_of",
    "places_of",
    "rows_of",
]

_MOST_COLUMNS = 512
Q_AXES, _Q_ROWS = "batch_size, seqlen_q, num_heads, head_dim", "total_q, num_heads, head_dim"
_K_AXES, _K_ROWS = "batch_size, seqlen, num_heads_k, head_dim", "total, num_heads_k, head_dim"


class Rows(NamedTuple):
    """Rows of the tokens of all requests."""

    rows: Any  # (batch, tokens, heads, columns), or (tokens, heads, columns) with offsets
    offsets: Any

    @property
    def batch(self) -> int:
        """Count the requests."""
        count: int = self.rows.shape[0] if self.offsets is None else self.offsets.shape[0] - 1
        return count

    def lengths(self) -> Any:
        """Count the tokens of each request, or of all."""
        return self.rows.shape[1] if self.offsets is None else self.offsets[1:] - self.offsets[:-1]

    def is_cut_as(self, other: Rows) -> bool:
        """Return whether each request is known to have as many tokens as the other's."""
        return self.offsets is other.offsets and self.rows.shape[:-2] == other.rows.shape[:-2]

    def positions(self, first: Any, is_ordered: bool) -> Any:
        """Count on from `first` of each request, or give it to all its tokens; on one axis."""
        torch, device = import_torch(), self.rows.device
        if self.offsets is None:
            numbers = torch.arange(self.rows.shape[1], device=device) * int(is_ordered)
            return (first[:, None] + numbers).flatten()
        return positions_of(self.offsets, first, self.rows.shape[0], int(is_ordered))


def check_order(**tensors: Any) -> None:
    """Refuse the numbers that FlashAttention-2 has in the places of these tensors."""
    for name, value in tensors.items():
        if isinstance(value, (bool, float)):
            raise TypeError(
                f"{name}: needs a tensor, got {value}; the order is FlashAttention-3's, without "
                f"FlashAttention-2's dropout_p before softmax_scale: pass softmax_scale and causal "
                f"by name"
            )


def check_lists(**tensors: Any) -> None:
    """Check that these have one axis, or are None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_axes(name, tensor, "batch_size + 1" if name[:3] == "cu_" else "batch_size")


def check_rows(**tensors: Any) -> None:
    """Check that these are tensors or None that cumla.attention takes."""
    check_given(**tensors)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name == "q" and "float8" in str(tensor.dtype):
            raise NotImplementedError(
                f"{name}: needs queries of 16 bits, got {tensor.dtype}; convert them"
            )
        if tensor.ndim and tensor.shape[-1] > _MOST_COLUMNS:
            raise NotImplementedError(
                f"{name}: cumla.attention takes up to {_MOST_COLUMNS} columns of a head, got "
                f"{tensor.shape[-1]}; for a latent cache call cumla.mla_decode"
            )
    refuse_gradients(**tensors)


def contiguous(*tensors: Any) -> list[Any]:
    """Copy what has gaps along its last axis, as FlashAttention does; None stays."""
    return [
        t if t is None or t.is_contiguous() or t.stride(-1) == 1 else t.contiguous()
        for t in tensors
    ]


def factors_of(k_descale: Any, v_descale: Any) -> dict[str, Any]:
    """Name the factors of e4m3 keys and values; one number for all may come expanded."""
    given = {"k_scale": k_descale, "v_scale": v_descale}
    check_given(k_descale=k_descale, v_descale=v_descale)
    found = {name: factor for name, factor in given.items() if factor is not None}
    for name, factor in found.items():
        if factor.ndim == 2 and factor.numel() and not any(factor.stride()):
            found[name] = factor[0, :1]
    return found


def rows_of(name: str, rows: Any, offsets: Any) -> Rows:
    """Check the axes of rows of tokens."""
    requests, ragged = (Q_AXES, _Q_ROWS) if name == "q" else (_K_AXES, _K_ROWS)
    check_axes(name, rows, requests if offsets is None else ragged)
    return Rows(rows, offsets)


def places_of(
    queries: Rows,
    k_cache: Any,
    cache_seqlens: Any,
    page_table: Any,
    cache_batch_idx: Any,
    name: str = "k_cache",
    table_name: str = "page_table",
) -> tuple[Any, Any]:
    """Return the pages and lengths of each request; a row of a contiguous cache is a page."""
    torch, batch, device = import_torch(), queries.batch, queries.rows.device
    check_axes(
        name, k_cache, _K_AXES if page_table is None else "num_blocks, page_block_size, heads, _"
    )
    table = page_table
    if cache_batch_idx is not None:
        table = cache_batch_idx[:, None] if table is None else _rows_at(table, cache_batch_idx)
    if table is None:
        if k_cache.shape[0] != batch:
            way_out = "pass the keys of the same requests"
            if name == "k_cache":
                way_out = "pass cache_batch_idx or page_table, or other rows"
            raise ValueError(
                f"{name}: needs a row for each of the {batch} requests of q, got shape "
                f"{tuple(k_cache.shape)}; {way_out}"
            )
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    check_axes(table_name, table, "batch_size, max_num_blocks_per_seq")
    room = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = room
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= room:
            raise ValueError(
                f"cache_seqlens: needs a number from 0 to {room}, the tokens that a request has "
                f"room for, got {cache_seqlens}; pass the tokens in the cache"
            )
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    return table, cache_seqlens


def _rows_at(page_table: Any, index: Any) -> Any:
    """Gather rows of a table; an index of no row gives pages of no cache."""
    check_axes("page_table", page_table, "batch_size, max_num_blocks_per_seq")
    check_integers(("int32",), cache_batch_idx=index)
    rows = page_table.shape[0]
    if not rows:
        raise ValueError("page_table: needs a row for cache_batch_idx, got none; pass one")
    is_outside = (index < 0) | (index >= rows)
    return page_table[index.clamp(0, rows - 1).long()].masked_fill(is_outside[:, None], -1)


def no_metadata(cache_seqlens: Any) -> Any:
    """Return the tensor that stands for metadata: each call computes its own schedule."""
    check_tensors(cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=import_torch().int32)


def options_of(
    scale: Any, causal: Any, window_size: Any, softcap: Any, attention_chunk: Any = 0
) -> dict[str, Any]:
    """Return the options that are no tensors by the names of `cumla.attention`.

    Chunks, which `attend` makes a mask of, are `attention_chunk`.
    """
    window = window_size
    if not isinstance(window, (tuple, list)):
        if getattr(window, "is_cuda", False):
            raise TypeError(
                "window_size: needs numbers on the host, got a tensor on a GPU, which would have "
                "to be waited for; pass window_size.tolist()"
            )
        window = window.tolist() if hasattr(window, "tolist") else window
    if not isinstance(window, (tuple, list)):
        raise TypeError(
            f"window_size: needs a pair of numbers, got {window_size!r}; pass (left, right), where "
            f"-1 is unbounded"
        )
    flag, cap = checked_flag("causal", causal), softcap or None
    options = {"softmax_scale": scale, "causal": flag, "window": tuple(window), "softcap": cap}
    if attention_chunk != 0:
        options["attention_chunk"] = checked_int("attention_chunk", attention_chunk, "pass 0", 0)
    return options


def _of_no_key(q: Any, v: Any, out: Any = None) -> tuple[Any, Any]:
    """Return the results for keys without rows, lse with the heads before the tokens."""
    *tokens, num_heads, _ = q.shape
    shape, lse_shape = (*tokens, num_heads, v.shape[-1]), (*tokens[:-1], num_heads, tokens[-1])
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out: needs shape {shape}, got {tuple(out.shape)}; pass another")
    lse = q.new_full(lse_shape, float("inf"), dtype=import_torch().float32)
    return q.new_zeros(shape) if out is None else out.zero_(), lse


def attend_to_rows(
    interface: Interface,
    q: Any,
    k: Any,
    v: Any,
    lists: tuple[Any, Any, Any, Any],
    block_table: Any,
    returns_lse: bool,
    **options: Any,
) -> Any:
    """Attend to keys in rows, of all requests or of each, or in pages.

    `lists` are cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lists
    check_rows(q=q, k=k, v=v)
    check_given(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=block_table,
    )
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, table = contiguous(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table
    )
    with interface():
        check_lists(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        check_lists(seqused_q=seqused_q, seqused_k=seqused_k)
        queries = rows_of("q", q, cu_seqlens_q)
        options["qo_indptr"] = cu_seqlens_q
        if cu_seqlens_k is None:
            table, seqused_k = places_of(queries, k, seqused_k, table, None, "k", "block_table")
            options |= {"kv_lens": seqused_k, "block_table": table}
        else:
            rows_of("k", k, cu_seqlens_k)
            options |= {"kv_lens": seqused_k, "kv_indptr": cu_seqlens_k}
        if seqused_q is not None:
            return _attend_used(queries, seqused_q, k, v, returns_lse, **options)
        return attend(q, k, v, returns_lse, **options)


def _attend_used(
    queries: Rows, used: Any, k: Any, v: Any, returns_lse: bool, **options: Any
) -> Any:
    """Attend from the first `used` queries of each request; the others get 0, and lse -inf.

    The rows of all requests are brought together, and their results back.
    """
    torch, q, cuts, batch = import_torch(), queries.rows, queries.offsets, queries.batch
    if cuts is None:
        cuts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    check_integers(("int32",), seqused_q=used)
    if used.shape[0] != batch:
        raise ValueError(
            f"seqused_q: needs the {batch} requests of q, got {used.shape[0]}; describe the same "
            f"requests"
        )
    rows = q if queries.offsets is not None else q.flatten(0, 1)
    tokens = rows.shape[0]
    used = torch.minimum(used, cuts[1:] - cuts[:-1]).clamp(min=0)
    ends = torch.cat([used.new_zeros(1), used.cumsum(0, dtype=used.dtype)])
    last = max(tokens - 1, 0)
    there = positions_of(cuts, ends[:-1], tokens).clamp(0, last)
    here = positions_of(ends, cuts[:-1], tokens).clamp(0, last)
    is_used = positions_of(cuts, used, tokens, -1) > 0
    options["qo_indptr"] = ends
    out, lse = attend(rows[here], k, v, True, **options)
    out = out[there].masked_fill(~is_used[:, None, None], 0)
    lse = lse[:, there].masked_fill(~is_used, float("-inf"))
    if queries.offsets is None:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if returns_lse else out


def _masked(q: Any, chunk: int, flags: Any, options: dict[str, Any]) -> AttentionMask:
    """Show the keys of a query's chunk, and those that its request's flag allows, in the window."""
    torch, kv_lens, cuts = import_torch(), options.get("kv_lens"), options.get("qo_indptr")
    if kv_lens is None:
        starts = options["kv_indptr"]
        kv_lens = starts[1:] - starts[:-1]
    places = {"kv_lens": kv_lens, "qo_indptr": cuts, "total_tokens": len(q)}
    if cuts is None:
        places = {"kv_lens": kv_lens, "q_len": q.shape[1]}
    parts: list[tuple[Any, Any]] = []
    if chunk:
        mask = AttentionMask.chunks(chunk, **places)
        end = mask.end if options["causal"] else AttentionMask.blocks(chunk, **places).end
        parts.append((mask.start, end))
    if flags is not None:
        mask = AttentionMask.causal_flags(flags.bool(), **places)
        parts.append((mask.start, mask.end))
    if any(side not in (-1, None) for side in options["window"]):
        mask = AttentionMask.windows(*options["window"], **places)
        parts.append((mask.start, mask.end))
    start, end = parts[0]
    for first, last in parts[1:]:
        start, end = torch.maximum(start, first), torch.minimum(end, last)
    return AttentionMask(start, end)


def attend(q: Any, k: Any, v: Any, returns_lse: bool, **options: Any) -> Any:
    """Attend, with options of `options_of`; lse has the heads before the tokens.

    `flags`, one of each request, say which are causal.
    """
    chunk, flags = options.pop("attention_chunk", 0), options.pop("flags", None)
    if chunk or flags is not None:
        options |= {"mask": _masked(q, chunk, flags, options), "window": None}
    if k.ndim == 4 and not k.shape[1]:  # pages of no key
        out, lse = _of_no_key(q, v, options.get("out"))
        return (out, lse) if returns_lse else out
    if not returns_lse:
        return attention(q, k, v, **options)[0]
    *batch, tokens, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, tokens), dtype=import_torch().float32)
    out, _ = attention(q, k, v, lse=lse.mT, **options)
    if not k.shape[0]:  # as FlashAttention, where there are no rows of keys
        lse.fill_(float("inf"))
    return out, lse
