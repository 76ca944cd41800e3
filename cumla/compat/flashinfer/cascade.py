# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging of attention states over `cumla.merge_attention_states`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cumla.compat._arguments import check_axes, check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.merge import merge_attention_states

if TYPE_CHECKING:
    import torch

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]
__getattr__ = missing_from(__name__, "flashinfer.cascade")

_V, _S = "seq_len, num_heads, head_dim", "seq_len, num_heads"
_TWO = Interface(
    {
        "outs[0]": "v_a",
        "outs[1]": "v_b",
        "lses[0]": "s_a",
        "lses[1]": "s_b",
        "all of outs": "v_a and v_b",
    },
    RuntimeError,
)
_IN_PLACE = Interface(
    {
        "outs[0]": "v",
        "outs[1]": "v_other",
        "out": "v",
        "lses[0]": "s",
        "lses[1]": "s_other",
        "lse": "s",
        "all of outs": "v and v_other",
    },
    RuntimeError,
)
_MANY = Interface({"outs[0]": "v", "outs": "v", "all of outs": "v", "lses": "s"}, RuntimeError)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of two sets of keys into that of their union.

    Differences from FlashInfer: v_a and v_b are both bfloat16, float16 or float32, with a multiple
    of 8 columns. Where both states are empty v is 0 and s -inf.
    """
    check_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    with _TWO():
        check_axes("v_a", v_a, _V)
        return tuple(merge_attention_states((v_a, v_b), (s_a.float(), s_b.float()), lse_base=2))


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another attention state into ``(v, s)``, which is overwritten.

    Differences from FlashInfer: s is float32. Where mask is 0 the other state counts as empty: v
    and s keep their values, but a state that is empty itself becomes v = 0 and s = -inf, and one
    with s = NaN gets v = NaN. A mask costs a copy of s_other.
    """
    check_tensors(v=v, s=s, v_other=v_other, s_other=s_other)
    with _IN_PLACE():
        check_axes("v", v, _V)
        other = s_other.float()
        if mask is not None:
            check_tensors(mask=mask)
            check_axes("mask", mask, "seq_len")
            check_axes("s_other", other, _S)
            if mask.shape[0] != other.shape[0]:
                raise ValueError(
                    f"mask: needs an entry for each of the {other.shape[0]} rows of s_other, got "
                    f"{mask.shape[0]}; say of each whether to merge it"
                )
            other = other.masked_fill(mask.logical_not()[:, None], -inf)
        merge_attention_states((v, v_other), (s, other), out=v, lse=s, lse_base=2)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of any number of sets of keys into that of their union.

    Differences from FlashInfer: there is at least one state. Shapes in messages have num_states in
    front.
    """
    check_tensors(v=v, s=s)
    with _MANY():
        check_axes("v", v, "seq_len, num_states, num_heads, head_dim")
        check_axes("s", s, "seq_len, num_states, num_heads")
        return tuple(merge_attention_states(v.swapaxes(0, 1), s.float().swapaxes(0, 1), lse_base=2))
