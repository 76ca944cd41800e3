# SPDX-License-Identifier: Apache-2.0
"""The interface of vLLM's fork of FlashAttention, over `cumla.attention`.

Names, order and defaults of the arguments are those of the fork, which differ from those of
`cumla.compat.flash_attn`: ``max_seqlen_q`` comes before ``cu_seqlens_q``, and pages are
``block_table`` and ``seqused_k``.

Differences from vLLM's fork are those of `cumla.compat.flash_attn` from FlashAttention-3, and:

* One set of kernels serves every ``fa_version``. What belongs to FlashAttention-4 but
  dynamic_causal, and q_v, dropout_p, cp_world_size and cp_tot_seqused_k, is refused with
  `NotImplementedError`.
* alibi_slopes lower the scores of earlier keys alone: a call that shows later ones is refused, and
  so are softcap, dynamic_causal and more than 256 columns beside them.
* Sinks are float32, bfloat16 or float16, for any number of heads; blocks have any size, and any
  strides in multiples of 16 bytes.
* ``out`` may be float32. Where nothing is visible it is 0, and lse is -inf or the sink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import (
    check_axes,
    check_given,
    check_new_rows,
    check_tensors,
    missing_from,
)
from cumla.compat._flash_attention import attend_to_rows, factors_of, no_metadata, options_of
from cumla.compat._table import Interface
from cumla.core.names import arg
from cumla.mha.bias import AttentionBias
from cumla.mha.cache import append_kv_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata", "reshape_and_cache_flash"]
__getattr__ = missing_from(__name__, "vllm.vllm_flash_attn")

_ELSEWHERE = "belongs to kernels that cumla does not have; leave it out"
_OF_MANY_GPUS = (
    "cumla attends to the keys of one GPU; merge the partial results of several by "
    "cumla.merge_attention_states, and leave it out"
)
_REFUSED = {
    "q_v": (
        "multiplies a latent cache; call cumla.mla_attention with the pairs (q_v, q) and (v, k)"
    ),
    "dropout_p": "cumla is for inference; leave it at 0",
    **dict.fromkeys(("cp_world_size", "cp_tot_seqused_k"), _OF_MANY_GPUS),
    **dict.fromkeys(
        (
            *("output_scale", "mask_mod", "block_sparse_tensors", "aux_tensors"),
            "aux_tensor_leading_dims",
        ),
        _ELSEWHERE,
    ),
    **dict.fromkeys(
        ("gather_kv_indices", "gather_kv_valid_length"),
        "cumla attends to lists of rows in latent caches only; call cumla.mla_sparse_attention, "
        "or leave it out",
    ),
}
_16_BITS = ("auto", "bfloat16", "float16")
_FP8 = ("fp8", "fp8_e4m3")
_ATTEND = Interface(
    {
        "k (kv_layout)": "k",
        "kv_lens": "seqused_k",
        "qo_indptr": "cu_seqlens_q",
        "kv_indptr": "cu_seqlens_k",
        "window": "window_size",
        "sinks": "s_aux",
        "flags": "dynamic_causal",
        "mask": "dynamic_causal",
        "bias": "alibi_slopes",
        "bias.slopes": "alibi_slopes",
        "k_scale": "k_descale",
        "v_scale": "v_descale",
    },
    RuntimeError,
    refused=_REFUSED,
    unused={"dropout_p": 0.0, "cp_world_size": 1},
)
_WRITE = Interface(
    {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}, RuntimeError
)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int | None,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int | None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    output_scale: Any = None,
    fa_version: int = 2,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    gather_kv_valid_length: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys and values in the blocks of a cache, or in rows of all requests.

    Differences from vLLM's fork:

    * k and v without block_table are rows with cu_seqlens_k, or ``(batch_size, seqlen, num_heads_k,
      head_dim)`` with seqused_k alone. They have q's dtype, or are float8_e4m3fn, or uint8 with its
      bits.
    * k_descale and v_descale are float32, ``(1,)``, ``(num_heads_k,)`` or, without cu_seqlens_k,
      ``(batch_size, num_heads_k)``. They are ignored for keys of 16 bits, as in vLLM.
    * Rows of no request hold anything, or what out held.
    * dynamic_causal has any dtype, and takes the place of causal. It costs one or two more kernels
      in each call, and `torch.compile` does not trace it.
    """
    _ATTEND.refuse(
        {
            "q_v": q_v,
            "dropout_p": dropout_p,
            "cp_world_size": cp_world_size,
            "cp_tot_seqused_k": cp_tot_seqused_k,
            "output_scale": output_scale,
            "mask_mod": mask_mod,
            "block_sparse_tensors": block_sparse_tensors,
            "aux_tensors": aux_tensors,
            "aux_tensor_leading_dims": aux_tensor_leading_dims,
            "gather_kv_indices": gather_kv_indices,
            "gather_kv_valid_length": gather_kv_valid_length,
        }
    )
    check_tensors(cu_seqlens_q=cu_seqlens_q)
    check_given(out=out, s_aux=s_aux, dynamic_causal=dynamic_causal, alibi_slopes=alibi_slopes)
    _check_lengths(cu_seqlens_k, seqused_k, block_table)
    window = (-1, -1) if window_size is None else window_size
    if dynamic_causal is not None:
        with _ATTEND():
            check_axes("dynamic_causal", dynamic_causal, "batch_size")
    if alibi_slopes is not None and not causal and window[1] != 0:
        raise NotImplementedError(
            f"alibi_slopes: needs causal=True, or 0 as window_size[1], got causal={causal} and "
            f"{tuple(window)}; cumla's biases of later keys have the other sign"
        )
    is_scaled = getattr(k, "itemsize", 0) == 1  # keys of 16 bits have no scales
    return attend_to_rows(
        _ATTEND,
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k, None, seqused_k),
        block_table,
        return_softmax_lse,
        **options_of(softmax_scale, causal, window, softcap),
        **(factors_of(k_descale, v_descale) if is_scaled else {}),
        sinks=None if s_aux is None else s_aux.float(),
        out=out,
        flags=dynamic_causal,
        bias=None if alibi_slopes is None else AttentionBias(alibi_slopes.float()),
    )


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
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return what `flash_attn_varlen_func` takes as scheduler_metadata.

    Differences from vLLM's fork: the tensor has no elements; each call computes its schedule.
    """
    return no_metadata(cache_seqlens)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | float | None,
    v_scale: torch.Tensor | float | None,
) -> None:
    """Write new keys and values into the blocks of a cache.

    Differences from vLLM: kv_cache_dtype is "auto", "bfloat16" or "float16", or "fp8" or "fp8_e4m3"
    for caches in float8_e4m3fn, or uint8 with its bits, which hold ``row / scale``. Caches have any
    strides in multiples of 16 bytes. Scales are numbers, or ``(1,)``, ``()`` or ``(num_heads_k,)``
    float32.
    """
    if kv_cache_dtype not in _16_BITS + _FP8:
        raise NotImplementedError(
            f"kv_cache_dtype: needs one of {', '.join(_16_BITS + _FP8)}, got {kv_cache_dtype!r}; "
            f"keep the cache in one of them"
        )
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    check_tensors(**tensors, slot_mapping=slot_mapping)
    is_fp8 = kv_cache_dtype in _FP8
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale} if is_fp8 else {}
    with _WRITE():
        check_axes("slot_mapping", slot_mapping, "slots")
        slots = slot_mapping.shape[0]
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if (cache.dtype.itemsize == 1) != is_fp8:
                raise ValueError(
                    f"{arg(name)}: needs the dtype that kv_cache_dtype {kv_cache_dtype!r} says, "
                    f"got {cache.dtype}; name the one of the cache"
                )
        check_new_rows(key=(key, key_cache), value=(value, value_cache))
        append_kv_cache(key[:slots], value[:slots], key_cache, value_cache, slot_mapping, **scales)


def _check_lengths(cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> None:
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise RuntimeError(
            f"cu_seqlens_k: needs either it, for rows, or seqused_k, got "
            f"{'neither' if seqused_k is None else 'both'}; pass one of them"
        )
    if block_table is not None and seqused_k is None:
        raise RuntimeError(
            "block_table: needs seqused_k beside it, got cu_seqlens_k; pass the lengths of the "
            "requests"
        )
