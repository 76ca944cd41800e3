# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's rotary position embedding over `cumla.apply_rope`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import (
    CallersNames,
    check_axes,
    check_integers,
    check_tensors,
    missing_from,
)
from cumla.mha.rope import apply_rope

if TYPE_CHECKING:
    import torch

__all__ = [
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]
__getattr__ = missing_from(__name__, "flashinfer.rope")

_FROM_CACHE = CallersNames(
    {"q": "query", "k": "key", "cos_sin": "cos_sin_cache", "q_out": "query", "k_out": "key"},
    RuntimeError,
)
_FROM_POSITIONS = CallersNames(
    {"positions": "pos_ids", "cos_sin": "rotary_dim", "q_out": "q", "k_out": "k"}, RuntimeError
)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by a table of cosines and sines.

    Parameters
    ----------
    positions : torch.Tensor
        ``(tokens,)``, int32 or int64. Rows whose position is not in the table are copied.
    query, key : torch.Tensor
        ``(tokens, heads * head_size)``, bfloat16, float16 or float32, rows of any stride that is a
        multiple of 16 bytes.
    head_size : int
        Columns of a head, a multiple of 8.
    cos_sin_cache : torch.Tensor
        ``(max_position, rotary_dim)``: cosines, then sines, of which float32, bfloat16 and float16
        are taken. rotary_dim is a multiple of 16; the columns after it are copied.
    is_neox : bool
        Whether columns j and ``j + rotary_dim / 2`` are a pair, or 2 j and 2 j + 1.
    backend : str
        Accepted and ignored.

    Returns
    -------
    query, key : torch.Tensor
        Rotated, as new tensors of the same shapes.

    Raises
    ------
    TypeError, RuntimeError, CumlaError
        An argument is no tensor, shapes or dtypes do not fit, or as `cumla.apply_rope`.
    """
    check_tensors(query=query, key=key)
    outputs = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate_from_cache(positions, query, key, head_size, cos_sin_cache, is_neox, outputs)
    return outputs


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
    backend: str = "cuda",
) -> None:
    """Rotate queries and keys in place, as `apply_rope_with_cos_sin_cache` does."""
    check_tensors(query=query, key=key)
    _rotate_from_cache(positions, query, key, head_size, cos_sin_cache, is_neox, (query, key))


def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by ``pos_ids / (rope_scale * rope_theta ** (2 j / rotary_dim))``.

    The angles of pair j are computed for each call, in float64, by PyTorch. With a table for all
    layers, `apply_rope_with_cos_sin_cache` takes less.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(tokens, heads, head_dim)``, bfloat16, float16 or float32.
    pos_ids : torch.Tensor
        ``(tokens,)``, int32 or int64.
    rotary_dim : int, optional
        Columns that are rotated, a multiple of 16; head_dim by default.
    interleave : bool
        Whether columns 2 j and 2 j + 1 are a pair, or j and ``j + rotary_dim / 2``.
    rope_scale, rope_theta : float
        As in the formula.

    Returns
    -------
    q, k : torch.Tensor
        Rotated, as new tensors.

    Raises
    ------
    TypeError, RuntimeError, CumlaError
        As `apply_rope_with_cos_sin_cache`.
    """
    check_tensors(q=q, k=k)
    outputs = q.new_empty(q.shape), k.new_empty(k.shape)
    _rotate_by_positions(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, outputs)
    return outputs


def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate queries and keys in place, as `apply_rope_pos_ids` does."""
    check_tensors(q=q, k=k)
    _rotate_by_positions(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, (q, k))


def _rotate_from_cache(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    cos_sin_cache: Any,
    is_neox: bool,
    outputs: tuple[Any, Any],
) -> None:
    """Rotate rows of all heads into outputs of their shapes."""
    check_tensors(positions=positions, cos_sin_cache=cos_sin_cache)
    with _FROM_CACHE():
        for name, rows in (("query", query), ("key", key)):
            check_axes(name, rows, "tokens, heads * head_size")
            if head_size < 1 or rows.shape[1] % head_size:
                raise ValueError(
                    f"{name}: needs a multiple of head_size {head_size} columns, got shape "
                    f"{tuple(rows.shape)}; pass the columns of a head"
                )
        q, k, q_out, k_out = (x.unflatten(1, (-1, head_size)) for x in (query, key, *outputs))
        options = {"interleaved": not is_neox, "q_out": q_out, "k_out": k_out}
        apply_rope(q, k, positions, cos_sin_cache, **options)


def _rotate_by_positions(
    q: Any,
    k: Any,
    pos_ids: Any,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    outputs: tuple[Any, Any],
) -> None:
    """Rotate by a table with a row for each token."""
    check_tensors(pos_ids=pos_ids)
    torch: Any = sys.modules["torch"]
    with _FROM_POSITIONS():
        check_axes("pos_ids", pos_ids, "tokens")
        check_integers(pos_ids=pos_ids)
        check_axes("q", q, "tokens, num_qo_heads, head_dim")
        columns = q.shape[-1] if rotary_dim is None else rotary_dim
        if not 0 < columns <= q.shape[-1] or columns % 2:
            raise ValueError(
                f"rotary_dim: needs an even number up to the {q.shape[-1]} columns of q, got "
                f"{columns}; leave it out for all of them"
            )
        exponents = torch.arange(0, columns, 2, dtype=torch.float64, device=q.device) / columns
        angles = pos_ids[:, None] / (rope_scale * float(rope_theta) ** exponents)
        rows = torch.arange(pos_ids.shape[0], device=q.device)
        table = angles.cos().float(), angles.sin().float()
        options = {"interleaved": bool(interleave), "q_out": outputs[0], "k_out": outputs[1]}
        apply_rope(q, k, rows, table, **options)
