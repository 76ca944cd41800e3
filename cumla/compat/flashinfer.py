# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging of attention states and its MLA cache writer, over cumla's operations.

Code written for FlashInfer runs by changing its import line::

    from cumla.compat.flashinfer import append_paged_mla_kv_cache, merge_state

What carries over from FlashInfer:

* A state is an output ``v`` and its log-sum-exp ``s``, a logarithm to base 2. Where nothing was
  attended ``s`` is -inf, and a result that is empty has ``v`` 0.
* Calls can be captured into a CUDA graph, after `cumla.prepare`.
* It is for inference: no gradients flow.

What differs: ``v`` of an empty state may hold anything, NaN included, and an ``s`` of +inf means
empty, too. `cumla.merge_attention_states` itself says +inf; what it returns is rewritten in place,
by two short elementwise kernels over ``s`` behind it on the stream.

Tensors on the CPU, and NumPy arrays, are computed by `cumla.reference`. Errors of the operation
behind a function call arguments by its names: ``outs[0]`` is the first ``v``, ``lses[0]`` its
``s``, ``rows`` and ``kv_cache`` the pairs of an append.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from cumla.cache import append_mla_cache
from cumla.merge import merge_attention_states

if TYPE_CHECKING:
    import torch

__all__ = [
    "append_paged_mla_kv_cache",
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
    _check_axes("v_a", v_a, "seq_len", "num_heads", "head_dim")
    v, s = merge_attention_states((v_a, v_b), (s_a, s_b), lse_base=2)
    _mark_empty(s)
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
    _check_axes("v", v, "seq_len", "num_heads", "head_dim")
    if mask is not None:
        _check_axes("mask", mask, "seq_len")
        _check_axes("s_other", s_other, "seq_len", "num_heads")
        if mask.shape[0] != s_other.shape[0]:
            raise ValueError(
                f"mask: needs an entry for each of the {s_other.shape[0]} rows of s_other, got "
                f"{mask.shape[0]}; say of each whether to merge it"
            )
        s_other = s_other + 0
        s_other[mask == 0] = -inf
    merge_attention_states((v, v_other), (s, s_other), out=v, lse=s, lse_base=2)
    _mark_empty(s)


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
    _check_axes("v", v, "seq_len", "num_states", "num_heads", "head_dim")
    _check_axes("s", s, "seq_len", "num_states", "num_heads")
    merged_v, merged_s = merge_attention_states(v.swapaxes(0, 1), s.swapaxes(0, 1), lse_base=2)
    _mark_empty(merged_s)
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
        kv_indices=_as_int32(kv_indices),
        kv_indptr=_as_int32(kv_indptr),
    )


def _mark_empty(s: Any) -> None:
    """Write -inf where cumla says +inf, without waiting for the GPU."""
    s[s == inf] = -inf


def _as_int32(numbers: Any) -> Any:
    """Convert a tensor, as FlashInfer does; one of int32 is returned as it is."""
    return numbers.int() if hasattr(numbers, "int") else numbers


def _check_axes(name: str, array: Any, *axes: str) -> None:
    """Check the number of axes: cumla gives others a meaning, and views need them."""
    wanted = f"({', '.join(axes)})"
    if not hasattr(array, "shape"):
        raise TypeError(
            f"{name}: needs a tensor {wanted}, got {type(array).__module__}."
            f"{type(array).__qualname__}; convert it first"
        )
    if len(array.shape) != len(axes):
        raise ValueError(f"{name}: needs axes {wanted}, got shape {tuple(array.shape)}; reshape it")
