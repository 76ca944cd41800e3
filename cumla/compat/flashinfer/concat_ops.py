# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's way to put the keys of a prefill together, by PyTorch's copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.compat._arguments import check_axes, check_tensors, missing_from

if TYPE_CHECKING:
    import torch

__all__ = ["concat_mla_k"]
__getattr__ = missing_from(__name__, "flashinfer.concat_ops")


def concat_mla_k(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default"
) -> None:
    """Put the keys of a prefill together: each head's own columns, then those that all share.

    Differences from FlashInfer: PyTorch makes two copies, of any shape and dtype.
    """
    if backend != "default":
        raise ValueError(f"backend: needs 'default', got {backend!r}; leave it out")
    check_tensors(k=k, k_nope=k_nope, k_rope=k_rope)
    try:
        check_axes("k_nope", k_nope, "num_tokens, num_heads, nope_dim")
        check_axes("k_rope", k_rope, "num_tokens, 1, rope_dim")
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    tokens, heads, nope_dim = k_nope.shape
    rope_dim = k_rope.shape[2]
    shapes = {"k": (tokens, heads, nope_dim + rope_dim), "k_rope": (tokens, 1, rope_dim)}
    for name, part in (("k", k), ("k_nope", k_nope), ("k_rope", k_rope)):
        wanted = shapes.get(name, part.shape)
        if part.shape != wanted:
            raise RuntimeError(
                f"{name}: needs shape {wanted}, to fit k_nope of {tuple(k_nope.shape)} and k_rope "
                f"of {rope_dim} columns, got {tuple(part.shape)}; all heads share k_rope"
            )
        if part.dtype != k.dtype:
            raise RuntimeError(
                f"{name}: needs the dtype of k, {k.dtype}, got {part.dtype}; convert it first"
            )
    k[..., :nope_dim] = k_nope
    k[..., nope_dim:] = k_rope
