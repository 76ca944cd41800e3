# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's Python interface over `cumla.attention` and `cumla.append_kv_cache`.

Names, order and defaults of the arguments are those of FlashAttention-3. FlashAttention-2 has
another order, with ``dropout_p`` before ``softmax_scale``: pass arguments by name. No call waits
for the GPU, and calls can be captured into a CUDA graph after `cumla.prepare`.

Differences from FlashAttention-3:

* Inference only. A tensor that requires a gradient is refused while gradients are recorded.
* Speed hints are ignored. Each call computes its schedule; all results are deterministic.
* Heads have any multiple of 8 columns up to 512, of 16 up to 256 for float8_e4m3fn; values may have
  another number than keys. All arrays may be float32, which is far slower.
* Queries have 16 bits beside float8_e4m3fn keys and values.
* Functions that may return the log-sum-exp return the pair ``(out, softmax_lse)``, without the
  partial results that FlashAttention-3 appends.
* qv, cache_leftpad and q_descale are refused with `NotImplementedError`.
* attention_chunk costs one to three more kernels in each call. `torch.compile` does not trace it.
* Where nothing is visible out is 0 and lse -inf, but +inf in a call whose keys have no rows.
* New rows may have been written when a `RuntimeError` is raised; the corrected call writes them
  again.
* Tensors on the CPU are computed by `cumla.reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import (
    check_axes,
    check_given,
    check_new_rows,
    check_tensors,
    missing_from,
)
from cumla.compat._flash_attention import (
    Q_AXES,
    Rows,
    attend,
    attend_to_rows,
    check_lists,
    check_order,
    check_rows,
    contiguous,
    factors_of,
    no_metadata,
    options_of,
    places_of,
    rows_of,
)
from cumla.compat._table import Interface
from cumla.merge import merge_attention_states
from cumla.mha.cache import append_kv_cache
from cumla.mha.rope import apply_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
__getattr__ = missing_from(__name__, "flash_attn_interface, FlashAttention-3")

_REFUSED = {
    "qv": (
        "multiplies a latent cache; call cumla.mla_decode or cumla.mla_attention with the pairs "
        "(qv, q) and (v_cache, k_cache)"
    ),
    "cache_leftpad": (
        "cumla's caches begin at position 0; write the tokens of a request from there on, or, with "
        "pages, let page_table begin at its first page, and leave it out"
    ),
    "q_descale": (
        "scales e4m3 queries, which cumla does not take; convert them to bfloat16, and leave it out"
    ),
}
_SCALES = {"k_scale": "k_descale", "v_scale": "v_descale"}
_ATTEND = Interface(
    _SCALES | {"qo_indptr": "cu_seqlens_q", "window": "window_size"},
    RuntimeError,
    refused=_REFUSED,
)
_ROWS = _ATTEND.naming(
    **{"k (kv_layout)": "k", "block_table": "k"}, kv_lens="seqused_k", kv_indptr="cu_seqlens_k"
)
_CACHE = _ATTEND.naming(
    **{"k (kv_layout)": "k_cache"}, k="k_cache", v="v_cache", kv_lens="cache_seqlens"
)
_NEW = Interface(
    {
        "kv_lens": "cache_seqlens",
        "qo_indptr": "cu_seqlens_k_new",
        "cos_sin[0]": "rotary_cos",
        "cos_sin[1]": "rotary_sin",
        "cos_sin": "rotary_cos",
        "interleaved": "rotary_interleaved",
        "positions": "rotary_seqlens",
        **_SCALES,
    },
    RuntimeError,
)
_IN_PAGES, _IN_SLOTS = (  # appending, and attending
    [interface.naming(block_table=table) for interface in (_NEW, _CACHE)]
    for table in ("page_table", "cache_batch_idx")
)
_COMBINE = Interface(
    {"outs": "out_partial", "outs[0]": "out_partial", "lses": "lse_partial"}, RuntimeError
)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to a cache of keys and values, after new ones are written into it.

    Differences from FlashAttention-3:

    * Pages have any size. rotary_dim is a multiple of 16; keys beyond the last row of rotary_cos
      are not written.
    * cache_seqlens may be one number, from 0 to the tokens that there is room for.
    * window_size may be a tensor of two numbers on the CPU.
    * k_descale and v_descale are ``(batch_size, num_heads_k)`` float32: factors of float8_e4m3fn
      caches, which k and v are divided by as they are written. 1 by default.
    * block_table is FlashAttention-2's name of page_table.
    """
    check_order(qv=qv)
    _CACHE.refuse({"qv": qv, "cache_leftpad": cache_leftpad, "q_descale": q_descale})
    if block_table is not None:
        if page_table is not None:
            raise TypeError("block_table: is another name of page_table, got both; pass one")
        page_table = block_table
    has_pages = page_table is not None or cache_batch_idx is None
    appending, attending = _IN_PAGES if has_pages else _IN_SLOTS
    check_rows(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    factors = factors_of(k_descale, v_descale)
    options = options_of(softmax_scale, causal, window_size, softcap, attention_chunk) | factors
    q, k, v = contiguous(q, k, v)
    if type(cache_seqlens) is not int:
        check_given(cache_seqlens=cache_seqlens)
        (cache_seqlens,) = contiguous(cache_seqlens)
    check_given(
        cache_batch_idx=cache_batch_idx,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
    )
    cache_batch_idx, page_table = contiguous(cache_batch_idx, page_table)
    cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens = contiguous(
        cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens
    )
    with appending():
        check_lists(cache_batch_idx=cache_batch_idx, rotary_seqlens=rotary_seqlens)
        check_lists(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
        if type(cache_seqlens) is not int:
            check_lists(cache_seqlens=cache_seqlens)
        rotation = _rotation(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
        queries = rows_of("q", q, cu_seqlens_q)
        new = _new_rows(k, v, cu_seqlens_k_new, cache_seqlens, rotation)
        table, lens = places_of(queries, k_cache, cache_seqlens, page_table, cache_batch_idx)
        if new is not None:
            if type(cache_seqlens) is int and cu_seqlens_k_new is None:
                _check_room(cache_seqlens, new.rows.shape[1], k_cache, page_table)
            sides = options["window"]
            is_local = attention_chunk > 0 or any(side not in (-1, None) for side in sides)
            is_one = cu_seqlens_q is None and q.shape[1] == 1  # at the same place either way
            is_ordered = options["causal"] or is_local or is_one
            caches = k_cache, v_cache
            q, lens = _append(queries, new, v, caches, lens, table, rotation, is_ordered, factors)
    lengths = {"kv_lens": lens, "qo_indptr": cu_seqlens_q, "block_table": table}
    with attending():
        return attend(q, k_cache, v_cache, return_softmax_lse, **lengths, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys and values that come in rows, one request after the other.

    Differences from FlashAttention-3:

    * Without offsets q, or k and v, have an axis of requests, as in `flash_attn_func`.
    * Queries after the first seqused_q of a request get 0, and lse -inf; rows are copied for that.
    * k_descale and v_descale of rows with offsets on both sides are one number, expanded, or
      ``(num_heads_k,)``.
    """
    check_order(qv=qv, seqused_q=seqused_q)
    _ROWS.refuse({"qv": qv, "q_descale": q_descale})
    return attend_to_rows(
        _ROWS,
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        None,
        return_attn_probs,
        **options_of(softmax_scale, causal, window_size, softcap, attention_chunk),
        **factors_of(k_descale, v_descale),
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys and values of requests that all have the same lengths."""
    return flash_attn_varlen_func(
        *(q, k, v, None, None, None, None, None, None),
        *(softmax_scale, causal, qv, q_descale, k_descale, v_descale),
        *(window_size, attention_chunk, softcap),
        return_attn_probs=return_attn_probs,
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results of attention over parts of the keys into that of attention over all.

    Differences from FlashAttention-3: any number of parts, in float32, bfloat16 or float16, of any
    multiple of 8 columns.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    check_given(out=out)
    with _COMBINE():
        check_axes("out_partial", out_partial, f"num_splits, {Q_AXES}")
        check_axes("lse_partial", lse_partial, "num_splits, batch_size, seqlen_q, num_heads")
        if out is None:
            out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype)
        elif out_dtype not in (None, out.dtype):
            raise ValueError(
                f"out: needs out_dtype {out_dtype}, got {out.dtype}; leave one of the two out"
            )
        _, *batch, tokens, heads = lse_partial.shape
        lse = out.new_empty((*batch, heads, tokens), dtype=lse_partial.dtype).mT
        return tuple(merge_attention_states(out_partial, lse_partial, out=out, lse=lse))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype | None = None,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return what `flash_attn_with_kvcache` takes as scheduler_metadata.

    Differences from FlashAttention-3: the tensor has no elements, and a CUDA graph needs no new one
    where lengths change. `cumla.AttentionPlan` computes one schedule for all layers of a step.
    """
    return no_metadata(cache_seqlens)


class _Rotation(NamedTuple):
    """The rotation of new keys, and of the queries."""

    cos_sin: tuple[Any, Any]
    is_interleaved: bool
    first: Any  # position of each request's first token; None: where its keys begin


def _rotation(cos: Any, sin: Any, is_interleaved: bool, first: Any) -> _Rotation | None:
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        raise ValueError(
            "rotary_cos: needs rotary_sin beside it, got one of the two; pass both or none"
        )
    return _Rotation((cos, sin), is_interleaved, first)


def _new_rows(
    k: Any, v: Any, offsets: Any, cache_seqlens: Any, rotation: _Rotation | None
) -> Rows | None:
    if k is None and v is None:
        if rotation is not None:
            raise ValueError(
                "rotary_cos: needs new keys and values, got no k and v; pass them, or rotate the "
                "queries by cumla.apply_rope"
            )
        return None
    if k is None or v is None:
        raise ValueError("k: needs v beside it, got one of the two; pass both or none")
    if cache_seqlens is None:
        raise ValueError(
            "cache_seqlens: needed with k and v, which follow that many cached tokens, got None; "
            "pass it"
        )
    if offsets is None and len(k.shape) == len(v.shape) == 3:
        raise ValueError(
            f"cu_seqlens_k_new: needed with k (total_k_new, num_heads_k, head_dim), got None and k "
            f"{tuple(k.shape)}; pass it, or k with an axis of requests"
        )
    return rows_of("k", k, offsets)


def _check_room(cached: int, new: int, k_cache: Any, page_table: Any) -> None:
    room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if cached + new > room:
        raise ValueError(
            f"cache_seqlens: needs room for the {new} new rows of k, at most {room - new}, got "
            f"{cached}; pass longer caches"
        )


def _check_requests(queries: Rows, **counts: int) -> None:
    for name, count in counts.items():
        if count != queries.batch:
            raise ValueError(
                f"{name}: needs the {queries.batch} requests of q, got {count}; describe the same "
                f"requests"
            )


def _check_heads(q: Any, k: Any, k_cache: Any) -> None:
    """Check the heads before anything is written."""
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if k_cache.shape[2] != num_kv_heads:
        raise ValueError(
            f"k_cache: needs the {num_kv_heads} heads of k on its third axis, got shape "
            f"{tuple(k_cache.shape)}; of caches with the heads before the tokens pass "
            f"k_cache.transpose(1, 2) and v_cache.transpose(1, 2)"
        )
    if num_kv_heads and num_heads % num_kv_heads:
        raise ValueError(
            f"q: needs a multiple of the {num_kv_heads} heads of k, got {num_heads}; check the "
            f"axes of both"
        )


def _append(
    queries: Rows,
    new: Rows,
    v: Any,
    caches: tuple[Any, Any],
    lens: Any,
    table: Any,
    rotation: _Rotation | None,
    is_ordered: bool,
    factors: dict[str, Any],
) -> tuple[Any, Any]:
    """Write new rows into the caches; give the queries, rotated as the keys are, and lengths."""
    q = queries.rows
    options: dict[str, Any] = {}
    _check_requests(queries, k=new.batch, cache_seqlens=len(lens))
    _check_heads(q, new.rows, caches[0])
    if rotation is not None:
        cos_sin, is_interleaved, first = rotation
        _check_requests(queries, rotary_seqlens=len(lens if first is None else first))
        turned = q.new_empty(q.shape)
        options = {"cos_sin": cos_sin, "interleaved": is_interleaved}
        if is_ordered and new.is_cut_as(queries):
            options |= {"q": q, "q_out": turned}
        else:
            positions = queries.positions(lens if first is None else first, is_ordered)
            outputs = {"interleaved": is_interleaved, "q_out": turned.flatten(0, -3)}
            apply_rope(q.flatten(0, -3), None, positions, cos_sin, **outputs)
        if first is not None:
            options["positions"] = new.positions(first, True)
        q = turned
    check_new_rows(k=(new.rows, caches[0]), v=(v, caches[1]))
    lens = lens + new.lengths()
    options |= {"kv_lens": lens, "qo_indptr": new.offsets, "block_table": table}
    append_kv_cache(new.rows, v, caches[0], caches[1], **options, **factors)
    return q, lens
