# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's rotary position embedding over `cumla.apply_rope`."""

from __future__ import annotations

import sys
from math import pi
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import check_axes, check_integers, check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.compat._torch import positions_of
from cumla.core.names import arg
from cumla.mha.rope import apply_rope as rotate

if TYPE_CHECKING:
    import torch

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]
__getattr__ = missing_from(__name__, "flashinfer.rope")

_FROM_CACHE = Interface(
    {"q": "query", "k": "key", "cos_sin": "cos_sin_cache", "q_out": "query", "k_out": "key"},
    RuntimeError,
)
_FROM_POSITIONS = Interface(
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

    Differences from FlashInfer: rows whose position is not in the table are copied. Rows and the
    table are bfloat16, float16 or float32; head_size is a multiple of 8, rotary_dim of 16. backend,
    of earlier versions, is ignored.
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
    rope_theta: float = 10000.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by ``pos_ids / (rope_scale * rope_theta ** (2 j / rotary_dim))``.

    Differences from FlashInfer: PyTorch computes the angles of each call in float64;
    `apply_rope_with_cos_sin_cache` with one table for all layers is faster. Rows are bfloat16,
    float16 or float32, rotary_dim is a multiple of 16.
    """
    frequencies = Frequencies(rope_scale, rope_theta)
    return _rotated(q, k, pos_ids, rotary_dim, interleave, frequencies)


def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 10000.0,
) -> None:
    """Rotate queries and keys in place, as `apply_rope_pos_ids` does."""
    _rotated(q, k, pos_ids, rotary_dim, interleave, Frequencies(rope_scale, rope_theta), (q, k))


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 10000.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as `apply_rope_pos_ids`, by positions that count from the offset of each request.

    Differences from FlashInfer: rows of no request are copied.
    """
    frequencies = Frequencies(rope_scale, rope_theta)
    return _rotated(q, k, (indptr, offsets), rotary_dim, interleave, frequencies)


def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 10000.0,
) -> None:
    """Rotate queries and keys in place, as `apply_rope` does."""
    frequencies = Frequencies(rope_scale, rope_theta)
    _rotated(q, k, (indptr, offsets), rotary_dim, interleave, frequencies, (q, k))


def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 500000.0,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as `apply_rope_pos_ids`, with the frequencies of Llama 3.1."""
    bounds = low_freq_factor, high_freq_factor, old_context_len
    frequencies = Frequencies(rope_scale, rope_theta, bounds)
    return _rotated(q, k, pos_ids, rotary_dim, interleave, frequencies)


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 500000.0,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate queries and keys in place, as `apply_llama31_rope_pos_ids` does."""
    bounds = low_freq_factor, high_freq_factor, old_context_len
    frequencies = Frequencies(rope_scale, rope_theta, bounds)
    _rotated(q, k, pos_ids, rotary_dim, interleave, frequencies, (q, k))


def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 500000.0,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as `apply_rope`, with the frequencies of `apply_llama31_rope_pos_ids`."""
    bounds = low_freq_factor, high_freq_factor, old_context_len
    frequencies = Frequencies(rope_scale, rope_theta, bounds)
    return _rotated(q, k, (indptr, offsets), rotary_dim, interleave, frequencies)


def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 500000.0,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate queries and keys in place, as `apply_llama31_rope` does."""
    bounds = low_freq_factor, high_freq_factor, old_context_len
    frequencies = Frequencies(rope_scale, rope_theta, bounds)
    _rotated(q, k, (indptr, offsets), rotary_dim, interleave, frequencies, (q, k))


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
                    f"{arg(name)}: needs a multiple of head_size {head_size} columns, got shape "
                    f"{tuple(rows.shape)}; pass the columns of a head"
                )
        q, k, q_out, k_out = (x.unflatten(1, (-1, head_size)) for x in (query, key, *outputs))
        options = {"interleaved": not is_neox, "q_out": q_out, "k_out": k_out}
        rotate(q, k, positions, cos_sin_cache, **options)


class Frequencies(NamedTuple):
    """The frequencies of the rotation."""

    rope_scale: float
    rope_theta: float
    llama31: tuple[float, float, float] | None = None  # low and high factor, former context

    def table(self, positions: Any, columns: int) -> tuple[Any, Any]:
        """Compute cosines and sines of each position, in float64, for this number of columns."""
        torch: Any = sys.modules["torch"]
        exponents = torch.arange(0, columns, 2, dtype=torch.float64, device=positions.device)
        turns = float(self.rope_theta) ** (-exponents / columns)
        slow = turns / self.rope_scale
        if self.llama31 is not None:
            low, high, context = self.llama31
            kept = ((context / (2 * pi) * turns - low) / (high - low)).clamp(0, 1)
            slow = slow + (turns - slow) * kept
        angles = positions[:, None] * slow
        return angles.cos().float(), angles.sin().float()

    def turn(self, rows: Any, positions: Any) -> Any:
        """Rotate all columns of rows ``(tokens, heads, head_dim)``, whose halves are pairs."""
        numbers = sys.modules["torch"].arange(rows.shape[0], device=rows.device)
        table = self.table(positions, rows.shape[-1])
        turned: Any = rotate(rows, None, numbers, table, interleaved=False)[0]
        return turned


def _rotated(
    q: Any,
    k: Any,
    places: Any,
    rotary_dim: int | None,
    interleave: bool,
    frequencies: Frequencies,
    outputs: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Rotate by a table with a row for each token; `places` are pos_ids, or indptr and offsets."""
    names = ("indptr", "offsets") if isinstance(places, tuple) else ("pos_ids",)
    lists = dict(zip(names, places if len(names) > 1 else (places,), strict=True))
    check_tensors(q=q, k=k, **lists)
    torch: Any = sys.modules["torch"]
    with _FROM_POSITIONS():
        check_axes("q", q, "tokens, num_qo_heads, head_dim")
        check_integers(**lists)
        rows = torch.arange(q.shape[0], device=q.device)
        if isinstance(places, tuple):
            indptr, offsets = places
            check_axes("indptr", indptr, "batch + 1")
            if tuple(offsets.shape) != (indptr.shape[0] - 1,):
                raise ValueError(
                    f"offsets: needs an entry for each of the {indptr.shape[0] - 1} requests of "
                    f"indptr, got shape {tuple(offsets.shape)}; describe the same requests"
                )
            indptr = indptr.contiguous()
            places = positions_of(indptr, offsets, q.shape[0])
            is_outside = (rows < indptr[0]) | (rows >= indptr[-1])
            rows = rows.masked_fill(is_outside, -1)  # of no row of the table: copied
        else:
            check_axes("pos_ids", places, "tokens")
            rows = rows[: places.shape[0]]
        columns = q.shape[-1] if rotary_dim is None else rotary_dim
        if not 0 < columns <= q.shape[-1] or columns % 2:
            raise ValueError(
                f"rotary_dim: needs an even number up to the {q.shape[-1]} columns of q, got "
                f"{columns}; leave it out for all of them"
            )
        if outputs is None:
            outputs = q.new_empty(q.shape), k.new_empty(k.shape)
        table = frequencies.table(places, columns)
        options = {"interleaved": bool(interleave), "q_out": outputs[0], "k_out": outputs[1]}
        rotate(q, k, rows, table, **options)
        return outputs
