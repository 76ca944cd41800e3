# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's custom masks as `cumla.AttentionMask`, or as lists of keys."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat._arguments import check_tensors
from cumla.core.frameworks import eager_only
from cumla.core.names import arg
from cumla.core.tree import MOST_DRAFTS, WORD
from cumla.mha.mask import AttentionMask

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Lists", "is_masked", "keep_mask", "mask_of"]

_PLAIN, _PACKED = "custom_mask", "packed_custom_mask"


class Lists(NamedTuple):
    """The keys of each query token: what `cumla.attention` takes for a request of one token.

    Keys count from the first one of the first request, with gaps where pages are not full.
    """

    kv_indptr: Any
    kv_lens: Any
    kv_indices: Any


def is_masked(given: Mapping[str, Any]) -> bool:
    """Return whether a mask is among the arguments of a call."""
    return given.get(_PACKED) is not None or given.get(_PLAIN) is not None


@eager_only
def mask_of(
    given: Mapping[str, Any],
    q_lens: list[int],
    kv_lens: list[int],
    window_left: int,
    firsts: list[int],
    as_tree: bool = False,
) -> AttentionMask | Lists:
    """Return the mask among the arguments of a call, as far as the window goes.

    `firsts` are the numbers of the first keys of requests, for lists.

    Of each request, the keys before tree_start are one interval in each row. tree_start is the
    first key that begins a second one. Where that is too far from the end, the keys that all rows
    see from the first one on are its prefix, and what follows them has the interval. The host waits
    once, to see where that is; with `as_tree` the mask has a prefix, and all words of a tree. A
    mask of another form becomes lists, and with `as_tree` is refused.
    """
    torch = sys.modules["torch"]
    name = _PLAIN if given.get(_PACKED) is None else _PACKED  # as in FlashInfer, if both are there
    mask, lens = given[name], list(zip(q_lens, kv_lens, strict=True))
    check_tensors(**{name: mask})
    dtypes = (torch.uint8,) if name == _PACKED else (torch.bool, torch.uint8)
    if mask.dtype not in dtypes:
        need = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{arg(name)}: needs {need}, got {mask.dtype}; convert it")
    unit = 8 if name == _PACKED else 1  # elements of an entry
    sizes = [-(-q_len * kv_len // unit) for q_len, kv_len in lens]
    if mask.numel() != sum(sizes):
        what = "bytes, those of each request from a whole one on" if unit > 1 else "entries"
        raise ValueError(
            f"{arg(name)}: needs {sum(sizes)} {what}: the q_len * kv_len of each request, got "
            f"{mask.numel()}; describe the same requests"
        )
    found, seen_by = [], []
    for part, (q_len, kv_len) in zip(mask.flatten().split(sizes), lens, strict=True):
        bits = part if unit == 1 else _unpacked(torch, part)[: q_len * kv_len]
        seen = bits.view(q_len, kv_len) != 0
        if window_left >= 0:
            queries = torch.arange(kv_len - q_len, kv_len, device=seen.device)
            keys = torch.arange(kv_len, device=seen.device)
            seen &= keys >= queries[:, None] - window_left
        seen_by.append(seen)
        found.append(_rows_of(torch, seen))
    if not found:
        found.append(_rows_of(torch, mask.new_zeros((0, 0), dtype=torch.bool)))
        lens = [(0, 0)]
    begins = torch.stack([rows[3] for rows in found]).tolist()
    lasts = [kv_len - begin for (_, kv_len), begin in zip(lens, begins, strict=True)]
    prefixes = [0] * len(lens)
    for request, last in enumerate(lasts):
        if last > MOST_DRAFTS:
            seen, kv_len = seen_by[request].clone(), lens[request][1]
            prefix = prefixes[request] = int(seen.all(0).cumprod(0).sum())
            seen[:, :prefix] = False
            found[request] = _rows_of(torch, seen)
            lasts[request] = kv_len - int(found[request][3])
        if lasts[request] > MOST_DRAFTS and not as_tree:
            return _lists_of(torch, seen_by, firsts)
        if lasts[request] > MOST_DRAFTS:
            raise ValueError(
                f"{arg(name)}: needs, with use_cuda_graph, rows of one interval of keys beside a "
                f"prefix that all of them see, and of any keys among the last {MOST_DRAFTS} of a "
                f"request, got request {request} with a second interval that begins {last} keys "
                f"before its end; make a wrapper without use_cuda_graph for such masks"
            )
    starts, ends, words, trees = ([rows[i] for rows in found] for i in range(4))
    batch = len(q_lens)
    fields = {"start": torch.cat(starts).int(), "end": torch.cat(ends).int()}
    if as_tree or any(prefixes):
        fields["prefix_len"] = starts[0].new_tensor(prefixes[:batch]).int()
    if as_tree or any(lasts):
        count = MOST_DRAFTS // WORD if as_tree else -(-max(lasts) // WORD)
        fields["tree"] = torch.cat(words)[:, :count].contiguous()
        fields["tree_start"] = torch.stack(trees)[:batch].int()
    return AttentionMask(**fields)


def _lists_of(torch: Any, seen_by: list[Any], firsts: list[int]) -> Lists:
    """List the keys that each query token sees."""
    kv_lens = torch.cat([seen.sum(1) for seen in seen_by]).int()
    keys = [seen.nonzero()[:, 1] + first for seen, first in zip(seen_by, firsts, strict=True)]
    kv_indptr = torch.nn.functional.pad(kv_lens.cumsum(0), (1, 0)).int()
    return Lists(kv_indptr, kv_lens, torch.cat(keys).int())


def keep_mask(kept: AttentionMask, mask: AttentionMask) -> None:
    """Copy a mask to where graphs read it; rows of no request see nothing."""
    for name, array in mask.given.items():
        there = getattr(kept, name)
        there[: len(array)].copy_(array)
        there[len(array) :].fill_(-1 if name == "end" else 0)


def _unpacked(torch: Any, part: Any) -> Any:
    """Return the bits of bytes, the lowest of each first."""
    numbers = torch.arange(8, dtype=torch.uint8, device=part.device)
    return (part[:, None] >> numbers & 1).flatten()


def _rows_of(torch: Any, seen: Any) -> tuple[Any, Any, Any, Any]:
    """Return start, end, words and tree_start of one request; `seen` is ``(q_len, kv_len)``."""
    (q_len, kv_len), device = seen.shape, seen.device
    numbers = torch.arange(q_len, device=device)
    if not kv_len:
        words = numbers.new_zeros((q_len, MOST_DRAFTS // WORD), dtype=torch.int32)
        return numbers * 0, numbers * 0 - 1, words, numbers.new_zeros(())
    begins = seen.clone()  # of intervals
    begins[:, 1:] &= ~seen[:, :-1]
    begins[numbers, seen.byte().argmax(1)] = False  # but the first one
    in_any = torch.cat([begins.any(0), begins.new_ones(1)])
    begin = in_any.byte().argmax()
    keys = torch.arange(kv_len, device=device)
    before = seen & (keys < begin)
    start, back = before.byte().argmax(1), before.flip(1).byte().argmax(1)
    end = (kv_len - 1 - back).masked_fill(~before.any(1), -1)
    at = begin + torch.arange(MOST_DRAFTS, device=device)
    bits = seen[:, at.clamp(max=kv_len - 1)] & (at < kv_len)
    shifts = torch.arange(WORD, dtype=torch.int32, device=device)
    weights = torch.ones_like(shifts) << shifts
    words = (bits.unflatten(1, (MOST_DRAFTS // WORD, WORD)) * weights).sum(-1, dtype=torch.int32)
    return start, end, words, begin
