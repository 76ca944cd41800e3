# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MLA interface over cumla's operations: attention, merging, writing into caches.

Code written for FlashInfer runs by changing its import line::

    from cumla.compat.flashinfer import BatchMLAPagedAttentionWrapper, merge_state

What carries over from FlashInfer:

* `BatchMLAPagedAttentionWrapper`, whose `plan` takes lengths and pages in both its forms; see
  :mod:`cumla.compat.flashinfer.mla`.
* A state is an output ``v`` and its log-sum-exp ``s``, a logarithm to base 2. Where nothing was
  attended ``s`` is -inf, and a result that is empty has ``v`` 0.
* Calls can be captured into a CUDA graph, after `cumla.prepare`.
* It is for inference: no gradients flow.

What differs: ``v`` of an empty state may hold anything, NaN included, and an ``s`` of +inf means
empty, too. `cumla.mla_attention` and `cumla.merge_attention_states` themselves say +inf; what they
return is rewritten in place, by short elementwise kernels over ``s`` behind them on the stream.

Tensors on the CPU are computed by `cumla.reference`, and so are NumPy arrays, which the functions
take. Errors of the operation behind a function call arguments by its names: ``outs[0]`` is the
first ``v``, ``lses[0]`` its ``s``, ``rows`` and ``kv_cache`` the pairs of an append.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cumla.compat.flashinfer._tensors import as_int32, check_axes, mark_empty
from cumla.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from cumla.merge import merge_attention_states
from cumla.mla.cache import append_mla_cache

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "append_paged_mla_kv_cache",
    "concat_mla_k",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of two sets of keys into that of their union.

    Parameters
    ----------
    v_a, v_b : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, both bfloat16, float16 or float32; head_dim a multiple
        of 8.
    s_a, s_b : torch.Tensor
        ``(seq_len, num_heads)``, float32, logarithms to base 2.

    Returns
    -------
    v : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, the dtype of v_a. 0 where both states are empty.
    s : torch.Tensor
        ``(seq_len, num_heads)``, float32. -inf where both states are empty.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As `cumla.merge_attention_states`.
    """
    check_axes("v_a", v_a, "seq_len", "num_heads", "head_dim")
    v, s = merge_attention_states((v_a, v_b), (s_a, s_b), lse_base=2)
    mark_empty(s)
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another attention state into ``(v, s)``, which is overwritten.

    Parameters
    ----------
    v, v_other : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, both bfloat16, float16 or float32; head_dim a multiple
        of 8.
    s, s_other : torch.Tensor
        ``(seq_len, num_heads)``, float32, logarithms to base 2.
    mask : torch.Tensor, optional
        ``(seq_len,)``, bool or uint8: whether to merge each sequence's state. Where it is 0, the
        other state counts as empty, so that v and s keep their values; only a state that is empty
        itself is written as v = 0 and s = -inf, and one with s = NaN gets v = NaN. The other
        states' logarithms are copied for it, by three more short kernels.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As `cumla.merge_attention_states`.
    """
    check_axes("v", v, "seq_len", "num_heads", "head_dim")
    if mask is not None:
        check_axes("mask", mask, "seq_len")
        check_axes("s_other", s_other, "seq_len", "num_heads")
        if mask.shape[0] != s_other.shape[0]:
            raise ValueError(
                f"mask: needs an entry for each of the {s_other.shape[0]} rows of s_other, got "
                f"{mask.shape[0]}; say of each whether to merge it"
            )
        s_other = s_other + 0
        s_other[mask == 0] = -inf
    merge_attention_states((v, v_other), (s, s_other), out=v, lse=s, lse_base=2)
    mark_empty(s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of any number of sets of keys into that of their union.

    Parameters
    ----------
    v : torch.Tensor
        ``(seq_len, num_states, num_heads, head_dim)``, bfloat16, float16 or float32; at least one
        state, head_dim a multiple of 8. Nothing is copied.
    s : torch.Tensor
        ``(seq_len, num_states, num_heads)``, float32, logarithms to base 2.

    Returns
    -------
    v : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, the dtype of v. 0 where all states are empty.
    s : torch.Tensor
        ``(seq_len, num_heads)``, float32. -inf where all states are empty.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As `cumla.merge_attention_states`; shapes in messages have num_states in front.
    """
    check_axes("v", v, "seq_len", "num_states", "num_heads", "head_dim")
    check_axes("s", s, "seq_len", "num_states", "num_heads")
    merged_v, merged_s = merge_attention_states(v.swapaxes(0, 1), s.swapaxes(0, 1), lse_base=2)
    mark_empty(merged_s)
    return merged_v, merged_s


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write new rows into a paged MLA cache, whose page lists have room for them already.

    A row whose request or position is negative, or whose position lies behind its request's pages,
    is skipped.

    Parameters
    ----------
    append_ckv : torch.Tensor
        ``(tokens, 512)``, in the cache's dtype, or float32, which is rounded.
    append_kpe : torch.Tensor
        ``(tokens, 64)``, the dtype of append_ckv.
    batch_indices, positions : torch.Tensor
        ``(tokens,)``, int32 or int64: the request of each row, and its place there.
    ckv_cache : torch.Tensor
        ``(num_pages, page_size, 512)``, bfloat16 or float16, of any page size. Written to.
    kpe_cache : torch.Tensor
        ``(num_pages, page_size, 64)``, the dtype of ckv_cache. Written to. It may lie beside
        ckv_cache in one tensor of 576 columns.
    kv_indices : torch.Tensor
        ``(entries,)``, int32: page numbers of all requests. PyTorch's int64 is copied to int32.
    kv_indptr : torch.Tensor
        ``(batch + 1,)``, as kv_indices: where each request begins in it, and the last one ends.
    kv_last_page_len : torch.Tensor
        Not looked at: the positions say where a row goes.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As `cumla.append_mla_cache`.
    """
    append_mla_cache(
        (append_ckv, append_kpe),
        (ckv_cache, kpe_cache),
        batch_indices=batch_indices,
        positions=positions,
        kv_indices=as_int32(kv_indices),
        kv_indptr=as_int32(kv_indptr),
    )


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    """Put the keys of a prefill together: each head's own columns, then those that all share.

    Two copies by the tensors' own library.

    Parameters
    ----------
    k : torch.Tensor
        ``(num_tokens, num_heads, nope_dim + rope_dim)``. Written to.
    k_nope : torch.Tensor
        ``(num_tokens, num_heads, nope_dim)``, 128 columns in DeepSeek's models.
    k_rope : torch.Tensor
        ``(num_tokens, 1, rope_dim)``, 64 columns there.

    Raises
    ------
    TypeError, ValueError
        A shape or a dtype does not fit.
    """
    check_axes("k", k, "num_tokens", "num_heads", "nope_dim + rope_dim")
    check_axes("k_nope", k_nope, "num_tokens", "num_heads", "nope_dim")
    check_axes("k_rope", k_rope, "num_tokens", "1", "rope_dim")
    tokens, heads, nope_dim = k_nope.shape
    wanted = (tokens, heads, nope_dim + k_rope.shape[2])
    if tuple(k.shape) != wanted:
        raise ValueError(
            f"k: needs shape {wanted}, that of k_nope with the columns of k_rope behind, got "
            f"{tuple(k.shape)}; allocate it so"
        )
    if tuple(k_rope.shape[:2]) != (tokens, 1):
        raise ValueError(
            f"k_rope: needs shape {(tokens, 1, k_rope.shape[2])}, a row for each token of k_nope, "
            f"got {tuple(k_rope.shape)}; all heads share it"
        )
    for name, part in (("k_nope", k_nope), ("k_rope", k_rope)):
        if part.dtype != k.dtype:
            raise TypeError(
                f"{name}: needs the dtype of k, {k.dtype}, got {part.dtype}; convert it first"
            )
    k[..., :nope_dim] = k_nope
    k[..., nope_dim:] = k_rope
