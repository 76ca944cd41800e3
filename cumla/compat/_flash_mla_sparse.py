# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse prefill, and checks that both functions of sparse attention share."""

from __future__ import annotations

from math import e, inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import check_axes, check_tensors, refuse_gradients
from cumla.compat._table import Interface
from cumla.compat._torch import import_torch, is_traced, plainly
from cumla.core.arguments import as_number, check_dtype, checked_scale
from cumla.mla.arguments import DTYPES
from cumla.mla.shape import FORMATS, HEAD_DIM, NO_ROPE, PACKED, V4, V41, V41_FP4
from cumla.sparse.arguments import BESIDE
from cumla.sparse.mla_sparse import attend_as_flash_mla, mla_sparse_attention

if TYPE_CHECKING:
    import torch

__all__ = [
    "KV_FORMATS",
    "SecondCache",
    "check_dtypes",
    "check_sink",
    "flash_mla_sparse_fwd",
    "packed_rows",
    "with_sink",
    "written",
]

_BYTES = {"uint8", "int8", "float8_e4m3fn"}  # what FlashMLA calls the bytes of an FP8 cache
_VALUE_DIM = 512
KV_FORMATS = {"V32": PACKED, "V4": V4, "V32_NO_ROPE": NO_ROPE, "V41": V41, "V41_FP4": V41_FP4}
"""Formats by FlashMLA's names."""
_OF_COLUMNS = {HEAD_DIM: (PACKED,), _VALUE_DIM: (V4, NO_ROPE, V41, V41_FP4)}
"""FlashMLA's formats, by the columns of q."""
_SPARSE = Interface(
    {
        "kv_cache": "kv",
        "softmax_scale": "sm_scale",
        "total_tokens": "s_q",
        "sinks": "attn_sink",
        "topk_lens": "topk_length",
    }
)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_dtypes(name: str, rows: Any, q: Any, way_out: str) -> None:
    """Refuse rows of another dtype than q's; the message is about q if that is no 16-bit dtype."""
    if rows.dtype != q.dtype:
        check_dtype("q", _dtype(q), DTYPES)
        raise TypeError(f"{name}: needs q's dtype {_dtype(q)}, got {_dtype(rows)}; {way_out}")


def packed_rows(
    name: str, cache: Any, columns: int, form: str | None, beside: str | None = None
) -> tuple[Any, str]:
    """Check a cache of bytes for queries of this number of columns; return it as uint8.

    Return its format, too: `form`, if that is stated, or what its width tells, of those that go
    with a first cache in the format `beside`.
    """
    dtype = _dtype(cache)
    forms = _OF_COLUMNS.get(columns, (PACKED,))
    if form is None and beside in BESIDE:
        forms = BESIDE[beside]
    check_axes(name, cache, f"num_blocks, page_size, 1, {FORMATS[form or forms[0]]}")
    if dtype not in _BYTES:
        raise TypeError(
            f"{name}: needs {', '.join(sorted(_BYTES))} with is_fp8_kvcache, got {dtype}; pass the "
            f"packed cache"
        )
    width = cache.shape[-1]
    found = [form] if form else [one for one in forms if FORMATS[one] == width]
    if len(found) > 1:
        names = [known for known, one in KV_FORMATS.items() if one in found]
        raise ValueError(
            f"kv_format: needed to tell the format of {name}, whose rows have {width} bytes, got "
            f"None; pass {' or '.join(map(repr, names))}"
        )
    if not found or FORMATS[found[0]] != width:
        if width not in FORMATS.values():
            raise NotImplementedError(
                f"{name}: needs rows of {FORMATS[PACKED]} bytes, the format of DeepSeek-V3.2, or "
                f"of {FORMATS[V4]}, {FORMATS[V41]} or {FORMATS[V41_FP4]}, those of V4 and V4.1, "
                f"got shape {tuple(cache.shape)}; cumla has no other packed format"
            )
        needed = [FORMATS[form]] if form else sorted({FORMATS[one] for one in forms})
        raise ValueError(
            f"{name}: needs rows of {' or '.join(map(str, needed))} bytes beside q of {columns} "
            f"columns, got shape {tuple(cache.shape)}; pass the queries of the model that has the "
            f"cache"
        )
    return cache if dtype == "uint8" else cache.view(import_torch().uint8), found[0]


class SecondCache(NamedTuple):
    """The second cache of FlashMLA's decoding, by the names of its arguments."""

    extra_k_cache: Any
    extra_indices_in_kvcache: Any
    extra_topk_length: Any

    def checked(self, columns: int, form: str) -> tuple[dict[str, Any], int | None]:
        """Check all but the lengths, for queries of this number of columns.

        `form` is the format of the first cache. Return cumla's arguments of the second, none if
        there is none, and how long its lists are.
        """
        cache, lists, _ = self
        if cache is None:
            for name, tensor in zip(self._fields, self, strict=True):
                if tensor is not None:
                    raise ValueError(
                        f"{name}: needs an extra_k_cache, whose slots it is about, got None; pass "
                        f"it"
                    )
            return {}, None
        if lists is None:
            raise ValueError(
                "extra_indices_in_kvcache: needed with extra_k_cache, got None; pass a list for "
                "each query token"
            )
        check_tensors(extra_k_cache=cache, extra_indices_in_kvcache=lists)
        check_axes("extra_indices_in_kvcache", lists, "batch, seq_q, extra_topk")
        whole, found = packed_rows("extra_k_cache", cache, columns, None, form)
        named = {} if found == form else {"extra_cache_format": found}
        return {"extra_kv_cache": whole, "extra_indices": lists, **named}, lists.shape[2]


def check_sink(q: Any, attn_sink: Any) -> None:
    """Check the sinks: ``(heads_q,)`` float32 beside q."""
    if attn_sink is None:
        return
    check_tensors(attn_sink=attn_sink)
    check_dtype("attn_sink", _dtype(attn_sink), ("float32",))
    heads, shape = q.shape[-2], tuple(attn_sink.shape)
    if shape != (heads,):
        raise ValueError(
            f"attn_sink: needs shape (heads_q,) with heads_q {heads}, got {shape}; reshape it"
        )
    if attn_sink.device != q.device:
        raise ValueError(
            f"attn_sink: needs a tensor on {q.device}, as q, got one on {attn_sink.device}; move "
            f"it there"
        )


def with_sink(out: Any, lse: Any, attn_sink: Any) -> tuple[Any, Any]:
    """Return results in graphs as FlashMLA does: sinks scale out alone, an lse of -inf is +inf.

    `out` is ``(..., tokens, heads, 512)`` and `lse` ``(..., tokens, heads)``; both are changed.
    """
    if attn_sink is not None:
        # 1 - sink's share of the weights, of which an empty list has none
        share = (lse - attn_sink).sigmoid().masked_fill_(lse == -inf, 0.0)
        out.mul_(share.unsqueeze(-1))
    return out, lse.masked_fill_(lse == -inf, inf)


@plainly
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attend to listed rows from the tokens of a prefill.

    Differences from FlashMLA:

    * q and kv are bfloat16 or float16, with any number of heads and any topk.
    * Indices below 0 and from s_kv on count as absent; those beyond topk_length may name rows of
      NaN. A score that is NaN does not count in max_logits, which is None in graphs of
      torch.compile.
    * out, of vLLM, is written to and returned; use_legacy, of SGLang, is ignored. With
      return_log2_lse max_logits and lse are to base 2; if it is False, both are None.
    """
    check_tensors(q=q, kv=kv, indices=indices)
    refuse_gradients(q=q, kv=kv, attn_sink=attn_sink)
    check_axes("q", q, "s_q, h_q, d_qk")
    check_axes("kv", kv, "s_kv, 1, d_qk")
    check_axes("indices", indices, "s_q, 1, topk")
    if d_v != _VALUE_DIM:
        raise ValueError(f"d_v: needs {_VALUE_DIM}, the width of the values, got {d_v}; pass that")
    if kv.shape[1] != 1:
        raise ValueError(
            f"kv: needs one kv head, got shape {tuple(kv.shape)}; pass the heads one by one"
        )
    check_dtypes("kv", kv, q, "convert it; flash_mla_with_kvcache reads packed caches")
    check_sink(q, attn_sink)
    with _SPARSE():
        scale = checked_scale(as_number("softmax_scale", sm_scale), 1.0)
        if is_traced():  # graphs take public functions
            state = mla_sparse_attention(q, kv, indices, topk_lens=topk_length, softmax_scale=scale)
            found, lse = with_sink(*state, attn_sink)
            max_logits = None
        else:
            attended = attend_as_flash_mla(q, kv, indices, topk_length, attn_sink, scale)
            found, lse, max_logits = attended
    if return_log2_lse is False:
        max_logits = lse = None
    elif return_log2_lse:
        max_logits, lse = (x if x is None else x * log2(e) for x in (max_logits, lse))
    return written(out, found), max_logits, lse


def written(out: Any, found: Any) -> Any:
    """Copy a result to where it was asked for."""
    if out is None:
        return found
    check_tensors(out=out)
    if (out.shape, out.dtype) != (found.shape, found.dtype):
        raise ValueError(
            f"out: needs shape {tuple(found.shape)} and {found.dtype}, got {tuple(out.shape)} and "
            f"{out.dtype}; pass another"
        )
    return out.copy_(found)
