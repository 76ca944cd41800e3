# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a gloo group compute, each in a process of its own.

    python -m tests.distributed.ranks FOLDER [--exhaustive] [--eight]

imports PyTorch once, forks four ranks, and leaves in FOLDER what each of them found: a file of JSON
a rank, the name of a case -> "" or what went wrong. Groups of two ranks are halves of the four.
With --eight there are eight ranks, which run the cases of lists. The cases run on a GPU as well,
with another `setting` (tests/gpu/tools/ranks.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cumla
from cumla.distributed import ContextParallel
from tests.distributed.mapped import mapped

WORLD = 4


@dataclass
class Setting:
    """Where the cases run, and on how much; lengths include empty ranks and hostile numbers."""

    device: str = "cpu"
    page: int = 4
    columns: int = 12  # of the block table of one rank
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    lengths: tuple[int, ...] = (45, 3, 0, 17, 32, -4, 10_000, 1)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block sizes: a page, more and less."""
        return self.page, 2 * self.page, self.page // 4


setting = Setting()
SYMMETRIC = (
    "one after the other",
    "same bits",
    "odd heads",
    "no tokens",
    "decode, q_len 3, gather",
    "attention, q_len 1",
)
LISTS = ("lists", "largest", "chosen blocks", "blocks")
# For other blocks than pages, and for two of the ranks:
FEW = (*LISTS, "decode, q_len 3", "attention, q_len 3, gather", "masked")


def there(*arrays: torch.Tensor) -> Any:
    """Bring arrays where the cases run."""
    moved = tuple(array.to(setting.device) for array in arrays)
    return moved if len(moved) > 1 else moved[0]


def sinks() -> torch.Tensor:
    return torch.linspace(-1, 2, setting.heads, device=setting.device)


def lengths() -> torch.Tensor:
    return torch.tensor(setting.lengths, dtype=torch.int32, device=setting.device)


class Cache(NamedTuple):
    """A whole cache, and what each rank has of it after it was written through `slots`."""

    whole: tuple[torch.Tensor, ...]  # pages of one rank
    own: tuple[torch.Tensor, ...]
    table: torch.Tensor  # of one rank
    own_table: torch.Tensor  # of the group
    kv_lens: torch.Tensor


@cache
def made(parallel: ContextParallel, family: str) -> Cache:
    """Write the same tokens into a whole cache and into that of the rank; other slots are NaN."""
    generator = torch.Generator().manual_seed(7)
    page, columns, batch = setting.page, setting.columns, len(setting.lengths)
    value_dim = setting.head_dim // 2
    shapes = [(576,)]
    if family == "mha":
        shapes = [(setting.kv_heads, width) for width in (setting.head_dim, value_dim)]
    # An entry of the group's table stands for pages of all ranks where blocks are smaller.
    shared = parallel.block_size < page
    own_columns = -(-columns // parallel.world) if shared else columns
    tokens = own_columns * page * (parallel.world if shared else 1)
    pages = batch * tokens // page
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(batch, -1)
    own_table = torch.randperm(batch * own_columns, generator=generator).to(torch.int32)
    table, own_table = there(table, own_table.view(batch, -1))
    rows = [
        there(torch.randn(batch * tokens, *shape, generator=generator).bfloat16())
        for shape in shapes
    ]
    whole, own = (
        tuple(row.new_full((count, page, *row.shape[1:]), torch.nan) for row in rows)
        for count in (pages, batch * own_columns)
    )
    requests = there(torch.arange(batch).repeat_interleave(tokens))
    positions = there(torch.arange(tokens).repeat(batch))
    alone = {"batch_indices": requests, "positions": positions, "block_table": table}
    append = cumla.append_mla_cache if family == "mla" else cumla.append_kv_cache
    append(*rows, *whole, **alone)
    append(*rows, *own, parallel.slots(own_table, requests, positions))
    return Cache(whole, own, table, own_table, lengths())


def queries(family: str, *axes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    columns = 576 if family == "mla" else setting.head_dim
    q: torch.Tensor = there(
        torch.randn(*axes, setting.heads, columns, generator=generator).bfloat16()
    )
    return q


def own_heads(parallel: ContextParallel) -> slice:
    each = setting.heads // parallel.world
    return slice(parallel.rank * each, (parallel.rank + 1) * each)


def compare(parallel: ContextParallel, found: Any, whole: Any, gather: bool) -> None:
    """Hold a result against that of one rank: heads of the rank, or all of them."""
    own = slice(None) if gather else own_heads(parallel)
    lse = whole.lse[..., own]
    torch.testing.assert_close(found.lse, lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.lse.isinf(), lse.isinf())
    torch.testing.assert_close(found.out, whole.out[..., own, :], atol=2e-2, rtol=2e-2)
    assert found.out.isfinite().all()


def decode(parallel: ContextParallel, q_len: int, gather: bool) -> None:
    kv, q = made(parallel, "mla"), queries("mla", len(setting.lengths), q_len)
    whole = cumla.mla_decode(q, *kv.whole, kv.table, kv.kv_lens)
    pages = parallel.pages(kv.kv_lens, kv.own_table, q_len=q_len)
    found = parallel.attend(cumla.mla_decode, q, *kv.own, *pages, gather=gather)
    compare(parallel, found, whole, gather)
    plan = cumla.MLADecodePlan(
        len(setting.lengths) * q_len, 1, setting.heads, page_size=setting.page, like=q
    )
    plan.update(pages.kv_lens)
    q_parts = q[..., :512], q[..., 512:]
    planned = parallel.attend(
        plan.run, q_parts, *kv.own, block_table=pages.block_table, gather=gather
    )
    assert torch.equal(planned.out, found.out) and torch.equal(planned.lse, found.lse)
    given = queries("mla", len(setting.lengths) * q_len, 1)
    partial = cumla.mla_decode(q.reshape(given.shape), *kv.own, *pages)
    axes = len(setting.lengths), q_len, setting.heads
    lse = partial.lse.view(*axes)
    merged = parallel.merge(partial.out.view(*axes, 512), lse, gather=gather)
    assert torch.equal(merged.out, found.out) and torch.equal(merged.lse, found.lse)


def other_widths(parallel: ContextParallel) -> None:
    """Rows of 512 and of 320 columns, of which the caches of 576 are slices."""
    kv, wide = made(parallel, "mla"), queries("mla", len(setting.lengths), 1)
    pages = parallel.pages(kv.kv_lens, kv.own_table, q_len=1)
    for latent, rope in ((512, 0), (256, 64)):
        q, whole, own = (x[..., : latent + rope] for x in (wide, *kv.whole, *kv.own))
        alone = cumla.mla_decode(q, whole, kv.table, kv.kv_lens)
        for given in (q, (q[..., :latent], q[..., latent:])) if rope else (q,):
            found = parallel.attend(cumla.mla_decode, given, own, *pages)
            assert found.out.shape[-1] == latent
            compare(parallel, found, alone, False)


def attention(parallel: ContextParallel, q_len: int, gather: bool) -> None:
    kv, q = made(parallel, "mha"), queries("mha", len(setting.lengths), q_len)
    options: dict[str, Any] = {"sinks": sinks(), "softcap": 20.0}
    places = {"kv_lens": kv.kv_lens, "block_table": kv.table}
    whole = cumla.attention(q, *kv.whole, **places, **options)
    table, kv_lens = parallel.pages(kv.kv_lens, kv.own_table, q_len=q_len)
    places = {"kv_lens": kv_lens, "block_table": table}
    found = parallel.attend(cumla.attention, q, *kv.own, **places, **options, gather=gather)
    compare(parallel, found, whole, gather)
    bound = functools.partial(functools.partial(cumla.attention, sinks=sinks()), softcap=20.0)
    again = parallel.attend(bound, q, *kv.own, **places, gather=gather)
    assert torch.equal(again.out, found.out) and torch.equal(again.lse, found.lse)


OFFSETS = (0, 3, 4, 4, 9, 10, 10, 12, 13)


def ragged(parallel: ContextParallel, family: str) -> None:
    """Causal queries of different lengths, each of which becomes a request."""
    kv, q = made(parallel, family), queries(family, OFFSETS[-1])
    qo_indptr = there(torch.tensor(OFFSETS, dtype=torch.int32))
    pages = parallel.pages(kv.kv_lens, kv.own_table, qo_indptr=qo_indptr, total_tokens=OFFSETS[-1])
    if family == "mla":
        places = {"block_table": kv.table, "kv_lens": kv.kv_lens}
        whole = cumla.mla_attention(q, *kv.whole, **places, qo_indptr=qo_indptr)
        found = parallel.attend(cumla.mla_decode, q, *kv.own, *pages)
    else:
        given = {"kv_lens": kv.kv_lens, "block_table": kv.table, "qo_indptr": qo_indptr}
        whole = cumla.attention(q, *kv.whole, **given)
        k, v = kv.own
        found = parallel.attend(cumla.attention, q, k=k, v=v, **pages._asdict())
    compare(parallel, found, whole, False)


def history(parallel: ContextParallel, family: str) -> None:
    """Queries that see all cached tokens of a request, as a chunk of a prefill does."""
    kv, q = made(parallel, family), queries(family, OFFSETS[-1])
    qo_indptr = there(torch.tensor(OFFSETS, dtype=torch.int32))
    options: dict[str, Any] = {"qo_indptr": qo_indptr, "causal": False}
    pages = parallel.pages(kv.kv_lens, kv.own_table)
    if family == "mla":
        lengths = {"block_table": kv.table, "kv_lens": kv.kv_lens}
        whole = cumla.mla_attention(q, *kv.whole, **lengths, **options)
        own = pages._asdict() | options
        found = parallel.attend(cumla.mla_attention, q, *kv.own, **own)
        plan = cumla.MLAAttentionPlan(
            len(setting.lengths),
            OFFSETS[-1],
            setting.heads,
            page_size=setting.page,
            causal=False,
            like=q,
        )
        plan.update(pages.kv_lens, qo_indptr=qo_indptr)
        planned = parallel.attend(plan.run, q, *kv.own, block_table=pages.block_table)
        assert torch.equal(planned.out, found.out)
    else:
        places = {"kv_lens": kv.kv_lens, "block_table": kv.table}
        whole = cumla.attention(q, *kv.whole, **places, **options)
        found = parallel.attend(cumla.attention, q, *kv.own, **pages._asdict(), **options)
    compare(parallel, found, whole, False)


def lists(parallel: ContextParallel) -> None:
    """Sparse attention to positions, some of which do not exist; those of other ranks come last."""
    kv, batch = made(parallel, "mla"), len(setting.lengths)
    q, shape = queries("mla", batch, 2), (batch, 2, 40)
    generator = torch.Generator().manual_seed(19)
    most = setting.page * setting.columns + 5
    positions = torch.randint(-5, most, shape, generator=generator, dtype=torch.int32)
    positions[0] = -1
    positions = there(positions)
    whole = cumla.mla_sparse_decode(q, *kv.whole, positions, block_table=kv.table)
    slots, held = parallel.lists(positions, kv.own_table)
    partial = cumla.mla_sparse_decode(q, *kv.own, slots, topk_lens=held)
    compare(parallel, parallel.merge(*partial), whole, False)
    requests = there(torch.arange(batch, dtype=torch.int32).repeat_interleave(2))
    by_rows = parallel.lists(positions.view(-1, 40), kv.own_table, requests)
    assert torch.equal(by_rows.indices.view(shape), slots)
    assert torch.equal(by_rows.topk_lens.view(batch, 2), held)


def masked(parallel: ContextParallel, gather: bool) -> None:
    """Windows, chunks, prefixes and causal queries, which stay together."""
    kv, batch = made(parallel, "mha"), len(setting.lengths)
    lens = kv.kv_lens.clip(0, setting.page * setting.columns)
    local, own_lens = parallel.pages(lens, kv.own_table)
    whole_pages = {"kv_lens": lens, "block_table": kv.table}
    pages = {"kv_lens": own_lens, "block_table": local}
    options: dict[str, Any] = {"sinks": sinks(), "softcap": 20.0}
    starts = OFFSETS[: batch + 1]
    offsets = there(torch.tensor(starts, dtype=torch.int32))
    together = {"kv_lens": lens, "q_len": 3}
    ragged = {"kv_lens": lens, "qo_indptr": offsets, "total_tokens": starts[-1]}
    prefix_len = there(torch.arange(batch, dtype=torch.int32) * 2 - 1)
    windows = cumla.AttentionMask.windows
    for mask, q, more in (
        (windows(None, **together), queries("mha", batch, 3), {}),
        (windows(6, **together), queries("mha", batch, 3), {}),
        (windows(setting.page, **ragged), queries("mha", starts[-1]), {"qo_indptr": offsets}),
        (
            cumla.AttentionMask.chunks(7, **ragged),
            queries("mha", starts[-1]),
            {"qo_indptr": offsets},
        ),
        (
            replace(windows(2, **together), prefix_len=prefix_len),
            queries("mha", batch, 3),
            {},
        ),
    ):
        whole = cumla.attention(q, *kv.whole, **whole_pages, mask=mask, **more, **options)
        own = parallel.mask(mask)
        found = parallel.attend(
            cumla.attention, q, *kv.own, **pages, mask=own, **more, **options, gather=gather
        )
        compare(parallel, found, whole, gather)
    tree = there(torch.zeros(batch, 1, dtype=torch.int32))
    for bad, said in ((cumla.AttentionMask(tree=tree), "no tree"), (cumla.AttentionMask(), "end")):
        with pytest.raises(ValueError, match=f"^mask: needs {said}"):
            parallel.mask(bad)
    with pytest.raises(ValueError, match=r"^mask: needs end over"):
        parallel.attend(
            cumla.attention, queries("mha", batch, 1), *kv.own, **pages, mask=cumla.AttentionMask()
        )


def largest(parallel: ContextParallel) -> None:
    """The list of one rank with all scores: equal scores, NaN, infinite ones, few tokens."""
    kv, batch = made(parallel, "mla"), len(setting.lengths)
    generator = torch.Generator().manual_seed(23)
    width = setting.page * setting.columns
    scores = torch.randint(-3, 3, (batch, width), generator=generator).float()
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    scores[1:5, ::7] = torch.nan
    scores = there(scores)
    lens = kv.kv_lens.clip(0, width)
    local, kv_lens = parallel.pages(lens, kv.own_table)
    own = local.shape[1] * setting.page
    places = parallel._position(torch.arange(own, device=setting.device))
    held = scores.new_full((batch, own), 5.0)  # behind the ends: larger than any
    seen = places < width
    held[:, seen] = scores[:, places[seen]]
    for dtype in (torch.float32, torch.bfloat16):
        for topk in (1, 9, width // 2, width + 3):
            whole = cumla.top_k(scores.to(dtype), topk, row_lens=lens)
            found = parallel.top_k(held.to(dtype), topk, row_lens=kv_lens)
            assert torch.equal(found, whole.indices), (dtype, topk)
    with pytest.raises(TypeError, match=r"^scores: needs a torch\.Tensor"):
        parallel.top_k(np.zeros((2, 3), np.float32), 2)
    with pytest.raises(ValueError, match=r"^positions: needs shape .batch, topk. or"):
        parallel.lists(there(torch.zeros(3, 2, dtype=torch.int32)), kv.own_table)


@contextlib.contextmanager
def pages_of_64(parallel: ContextParallel) -> Iterator[ContextParallel]:
    """The setting with pages of at least 64 tokens, and the group for them."""
    factor = max(64 // setting.page, 1)
    wide = copy(parallel)
    wide.page_size, wide.block_size = parallel.page_size * factor, parallel.block_size * factor
    lens = tuple(factor * length - length % 3 for length in setting.lengths)
    changed = replace(setting, page=setting.page * factor, lengths=lens)
    with mock.patch(f"{__name__}.setting", changed):
        yield wide


def tokens_of_a_block(parallel: ContextParallel) -> int:
    """Fewer than a page, if no block lies on two ranks then."""
    return 16 if setting.page >= 64 else max(1, min(parallel.block_size, setting.page) // 2)


def seen_blocks(parallel: ContextParallel, q_len: int) -> torch.Tensor:
    """Return how many blocks each query token of `lengths` sees."""
    lens = lengths().clip(0, setting.page * setting.columns)
    tokens = lens[:, None] - torch.arange(q_len - 1, -1, -1, device=setting.device)
    seen: torch.Tensor = -(-tokens.reshape(-1) // tokens_of_a_block(parallel))
    return seen.int()


def chosen_blocks(parallel: ContextParallel) -> None:
    """The lists of one rank with all scores: forced blocks, equal scores, NaN, few blocks."""
    block, visible = tokens_of_a_block(parallel), seen_blocks(parallel, 2)
    kv = made(parallel, "mha")
    generator = torch.Generator().manual_seed(29)
    width = setting.page * setting.columns // block
    scores = torch.randint(-3, 3, (len(visible), 2, width), generator=generator).float()
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    scores[1:5, :, ::7] = torch.nan
    scores = there(scores)
    own = parallel.pages(kv.kv_lens, kv.own_table).block_table.shape[1] * setting.page // block
    places = torch.arange(own, device=setting.device)
    places = parallel._of_blocks(block)._position(places)
    held = scores.new_full((*scores.shape[:2], own), torch.nan)  # behind the ends: larger than any
    held[..., places < width] = scores[..., places[places < width]]
    for dtype in (torch.float32, torch.bfloat16):
        for topk, init, local in ((1, 0, 0), (1, 0, 1), (9, 2, 3), (9, 4, 5), (width + 3, 1, 1)):
            forced = {"visible": visible, "init_blocks": init, "local_blocks": local}
            whole = cumla.select_blocks(scores.to(dtype), topk, **forced)
            found = parallel.select_blocks(held.to(dtype), topk, block_size=block, **forced)
            assert found.dtype == torch.int32
            assert torch.equal(found, whole), (dtype, topk, init, local)
    group_major = held.transpose(0, 1).contiguous().transpose(0, 1)
    again = parallel.select_blocks(group_major.bfloat16(), topk, block_size=block, **forced)
    assert torch.equal(again, whole)
    given: dict[str, Any] = {"visible": visible, "block_size": block}
    for start, bad in (
        ("block_size: needs a divisor of", {"block_size": parallel.block_size + 1}),
        ("topk: needs at least the 5 forced blocks, got 4", {"local_blocks": 5}),
        ("visible: needs shape .tokens,. = ", {"visible": visible[:-1]}),
    ):
        with pytest.raises(ValueError, match=f"^{start}"):
            parallel.select_blocks(held, 4, **given | bad)
    with pytest.raises(ValueError, match=r"^scores: needs shape .tokens, groups, width., got"):
        parallel.select_blocks(held[0], 4, **given)
    with pytest.raises(TypeError, match=r"^scores: needs a torch\.Tensor"):
        parallel.select_blocks(np.zeros((2, 1, 3), np.float32), 2, **given)


def blocks(parallel: ContextParallel, gather: bool) -> None:
    """From the scores of the ranks' own keys to attention to blocks, some of which do not exist."""
    with pages_of_64(parallel) as parallel:
        compare_blocks(parallel, gather)


def compare_blocks(parallel: ContextParallel, gather: bool) -> None:
    kv, batch = made(parallel, "mha"), len(setting.lengths)
    block, visible = tokens_of_a_block(parallel), seen_blocks(parallel, 2)
    q = queries("mha", batch, 2)
    index_q = q[:, :, : setting.kv_heads]
    whole_pages = {"kv_lens": kv.kv_lens, "block_table": kv.table}
    pages = parallel.pages(kv.kv_lens, kv.own_table, q_len=2)._asdict()
    scores = cumla.block_scores(index_q, kv.whole[0][:, :, 0], block_size=block, **whole_pages)
    held = cumla.block_scores(
        index_q.reshape(2 * batch, 1, *index_q.shape[2:]),
        kv.own[0][:, :, 0],
        block_size=block,
        **pages,
    )
    forced: dict[str, Any] = {"visible": visible, "local_blocks": 1}
    whole_lists = cumla.select_blocks(scores, 5, **forced)
    lists = parallel.select_blocks(held, 5, block_size=block, **forced)
    assert torch.equal(lists, whole_lists)
    lists = lists.clone()
    lists[:2, :, 0] = there(torch.tensor(2**31 - 1, dtype=torch.int32))
    lists[2:4, :, 1] = -(2**31)
    options: dict[str, Any] = {"sinks": sinks(), "softcap": 20.0, "block_size": block}
    attention = cumla.block_sparse_attention
    whole = attention(q, *kv.whole, lists, **whole_pages, **options)
    own = parallel.blocks(lists, block)
    found = parallel.attend(attention, q, *kv.own, own, **pages, **options, gather=gather)
    compare(parallel, found, whole, gather)
    each = q.reshape(2 * batch, 1, *q.shape[2:])
    plan = cumla.BlockSparsePlan.from_arrays(each, *kv.own, own, block_size=block)
    plan.update(pages["kv_lens"])
    options = {"sinks": sinks(), "softcap": 20.0, "block_table": pages["block_table"]}
    planned = parallel.attend(plan.run, q, *kv.own, own, **options, gather=gather)
    assert torch.equal(planned.out, found.out) and torch.equal(planned.lse, found.lse)


def same_bits(parallel: ContextParallel) -> None:
    """The shares are parts of what all heads on each rank give, and each call gives the same."""
    kv, q = made(parallel, "mla"), queries("mla", len(setting.lengths), 1)
    pages = parallel.pages(kv.kv_lens, kv.own_table)
    of_all, *again = (
        parallel.attend(cumla.mla_decode, q, *kv.own, *pages, gather=gather)
        for gather in (True, False, False)
    )
    own = own_heads(parallel)
    for state in again:
        assert torch.equal(state.out, of_all.out[:, :, own])
        assert torch.equal(state.lse, of_all.lse[..., own])
    assert torch.equal(parallel.gather_heads(again[0].out), of_all.out)
    strided = queries("mla", len(setting.lengths), 1)[:, :, own]
    assert torch.equal(parallel.gather_heads(strided), queries("mla", len(setting.lengths), 1))


def invariant(parallel: ContextParallel) -> None:
    """With batch_invariant a token has the same bits in a batch, alone, and as one of several."""
    for family, function in (("mla", cumla.mla_decode), ("mha", cumla.attention)):
        kv, q = made(parallel, family), queries(family, len(setting.lengths), 3)

        def of(requests: slice, some: torch.Tensor) -> Any:
            places = kv.kv_lens[requests], kv.own_table[requests]  # noqa: B023
            own = parallel.pages(*places, q_len=some.shape[1])._asdict()
            return parallel.attend(function, some, *kv.own, **own, batch_invariant=True)  # noqa: B023

        whole = of(slice(None), q)
        last = of(slice(None), q[:, 2:].contiguous())
        assert torch.equal(last.out[:, 0], whole.out[:, 2])
        assert torch.equal(last.lse[:, 0], whole.lse[:, 2])
        for r in range(len(setting.lengths)):
            alone = of(slice(r, r + 1), q[r : r + 1])
            assert torch.equal(alone.out[0], whole.out[r])
            assert torch.equal(alone.lse[0], whole.lse[r])


def one_after_the_other(parallel: ContextParallel) -> None:
    """Different results, of which none is overwritten before all ranks have read it."""
    generator = torch.Generator().manual_seed(13)
    shape = parallel.world, 5, setting.heads
    outs = there(torch.randn(*shape, 64, generator=generator).bfloat16())
    lses = there(torch.randn(*shape, generator=generator))
    found = []
    for factor in (1, -1, 2, 3, -2, 1):
        if factor == 3:  # a call that is refused takes no turn
            with pytest.raises((TypeError, ValueError)):
                parallel.merge(outs[parallel.rank], lses[parallel.rank, :1])
        found.append(parallel.merge(factor * outs[parallel.rank], lses[parallel.rank]))
    for factor, state in zip((1, -1, 2, 3, -2, 1), found, strict=True):
        whole = cumla.merge_attention_states(list(factor * outs), list(lses))
        own = own_heads(parallel)
        assert torch.equal(state.out, whole.out[:, own])
        assert torch.equal(state.lse, whole.lse[..., own])


def odd_heads(parallel: ContextParallel) -> None:
    """Any number of heads, where each rank gets all of them."""
    kv, q = made(parallel, "mla"), queries("mla", len(setting.lengths), 1)[:, :, :5]
    whole = cumla.mla_decode(q, *kv.whole, kv.table, kv.kv_lens)
    pages = parallel.pages(kv.kv_lens, kv.own_table)
    found = parallel.attend(cumla.mla_decode, q, *kv.own, *pages, gather=True)
    torch.testing.assert_close(found.out, whole.out, atol=2e-2, rtol=2e-2)


def no_tokens(parallel: ContextParallel) -> None:
    for gather in (False, True):
        q = there(torch.zeros(0, 1, setting.heads, 576, dtype=torch.bfloat16))
        none, table = there(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32))
        pages = parallel.pages(none, table)
        pool = there(torch.zeros(4, setting.page, 576, dtype=torch.bfloat16))
        out, _ = parallel.attend(cumla.mla_decode, q, pool, *pages, gather=gather)
        assert out.shape == (
            0,
            1,
            setting.heads if gather else setting.heads // parallel.world,
            512,
        )


def refused(parallel: ContextParallel) -> None:
    """Before anything is sent, on every rank alike."""
    kv, q = made(parallel, "mla"), queries("mla", len(setting.lengths), 2)
    pages = parallel.pages(kv.kv_lens, kv.own_table, q_len=2)
    plan = cumla.MLADecodePlan(
        len(setting.lengths), 2, setting.heads, page_size=setting.page, like=q
    )
    plan.update(kv.kv_lens)
    decoding = (cumla.mla_decode, q, *kv.own, *pages)
    numpy = (cumla.mla_decode, np.zeros((4, 1, 8, 576)), *kv.own, *pages)
    offsets = there(torch.tensor(OFFSETS, dtype=torch.int32))
    ragged = (cumla.mla_attention, queries("mla", OFFSETS[-1]), *kv.own)
    offsets_and_pages = {"qo_indptr": offsets, **pages._asdict()}
    for kind, start, arguments, options in (
        (
            ValueError,
            "q: needs a number of heads that is a multiple of the",
            (cumla.mla_decode, q[:, :, :5], *decoding[2:]),
            {},
        ),
        (ValueError, "out: needs None over a cache that is cut", decoding, {"out": q}),
        (ValueError, "window: needs None .*; call attention with", decoding, {"window": 4}),
        (
            ValueError,
            "window: needs None .*; call attention with",
            (functools.partial(cumla.mla_decode, window=4), *decoding[1:]),
            {},
        ),
        (
            TypeError,
            "attention: needs a functools.partial without positional .*, got 1 of them",
            (functools.partial(cumla.mla_decode, q), *decoding[1:]),
            {},
        ),
        (ValueError, "stream: needs None over a cache that is cut", decoding, {"stream": 0}),
        (ValueError, "causal: needs False for requests of several", ragged, offsets_and_pages),
        (
            ValueError,
            "causal: needs False for requests of several",
            (plan.run, q, *kv.own),
            {"block_table": pages.block_table},
        ),
        (
            TypeError,
            "q: needs a torch.Tensor, as the group moves them, got numpy.ndarray",
            numpy,
            {},
        ),
        (TypeError, "gather: needs True or False", decoding, {"gather": 1}),
        (
            TypeError,
            "attention: needs mla_decode, .* ContextParallel.slots finds",
            (cumla.mla_sparse_decode, *decoding[1:]),
            {},
        ),
        (
            ValueError,
            "page_size: needs that of the cache, whose shape is",
            (cumla.mla_decode, q, kv.own[0][:, :1], *pages),
            {},
        ),
        (
            ValueError,
            "page_size: needs that of the cache, whose shape is",  # which is another axis's
            (cumla.attention, q, *(kv.own[0][:, :1, None].expand(-1, -1, setting.page, -1),) * 2),
            {},
        ),
        (
            ValueError,
            "sinks: needs shape .num_heads,. = ",
            (cumla.attention, *decoding[1:]),
            {"sinks": sinks()[:2]},
        ),
        (ValueError, "causal: needs False for requests of several", ragged, {}),
    ):
        with pytest.raises(kind, match=f"^{start}"):
            parallel.attend(*arguments, **options)


def a_failed_merge(parallel: ContextParallel) -> None:
    """It leaves ranks that have merged more often than others: nothing goes on."""
    kv, q = made(parallel, "mla"), queries("mla", len(setting.lengths), 1)
    call = (cumla.mla_decode, q, *kv.own, *parallel.pages(kv.kv_lens, kv.own_table))
    place = "cumla.distributed.groups.merge_attention_states"
    with mock.patch(place, side_effect=MemoryError), pytest.raises(MemoryError):
        parallel.attend(*call)
    with pytest.raises(RuntimeError, match="make a new ContextParallel on every rank"):
        parallel.attend(*call)


def cases(exhaustive: bool) -> dict[str, Callable[[ContextParallel], None]]:
    found: dict[str, Callable[[ContextParallel], None]] = {
        "same bits": same_bits,
        "invariant": invariant,
        "one after the other": one_after_the_other,
        "lists": lists,
        "largest": largest,
        "chosen blocks": chosen_blocks,
        "blocks": lambda p: blocks(p, False),
        "blocks, gather": lambda p: blocks(p, True),
        "masked": lambda p: masked(p, False),
        "masked, gather": lambda p: masked(p, True),
        "odd heads": odd_heads,
        "no tokens": no_tokens,
        "other widths": other_widths,
        "refused": refused,
    }
    for family in ("mla", "mha"):
        found[f"ragged, {family}"] = lambda p, f=family: ragged(p, f)
        found[f"history, {family}"] = lambda p, f=family: history(p, f)
    for function in (decode, attention):
        for q_len in (1, 2, 8) if exhaustive else (1, 3):
            for gather in (False, True):
                name = f"{function.__name__}, q_len {q_len}{', gather' * gather}"
                found[name] = lambda p, f=function, n=q_len, g=gather: f(p, n, g)
    return found


def a_rank_that_fails(group: Any, dies: bool) -> str:
    """Attend with a group whose second rank does not: the error of the backend, in time."""
    parallel = ContextParallel(group, page_size=setting.page)
    if parallel.rank == 1:
        if not dies:
            time.sleep(1.5)
        return ""
    state = torch.zeros(2, setting.heads, 512), torch.zeros(2, setting.heads)
    begin = time.monotonic()
    try:
        parallel.merge(*state)
    except RuntimeError:
        return "" if time.monotonic() - begin < 1.4 else "late"
    return "no error"


def outcome(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception:
        return traceback.format_exc()
    return ""


def begin(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def work_with_lists(rank: int, folder: Path) -> None:
    """Run the cases of lists as one of eight ranks."""
    begin(rank, folder, 2 * WORLD)
    found = {}
    for block in setting.blocks[::2]:
        parallel = ContextParallel(dist.group.WORLD, page_size=setting.page, block_size=block)
        for name in LISTS:
            case = cases(exhaustive=False)[name]
            found[f"blocks of {block}: {name}"] = outcome(lambda c=case, p=parallel: c(p))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def work(rank: int, folder: Path, exhaustive: bool) -> None:
    """Run all cases as one of the ranks."""
    begin(rank, folder, WORLD)
    pairs = [dist.new_group([i, i + 1]) for i in (0, 2)]
    seconds = timedelta(seconds=0.5)
    lagging, dying = (dist.new_group([2, 3], timeout=seconds) for _ in range(2))
    found = {}
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    for world, group in groups.items():
        for block in setting.blocks:
            parallel = ContextParallel(group, page_size=setting.page, block_size=block)
            for name, case in cases(exhaustive).items():
                is_whole = block == setting.page and world == WORLD
                if is_whole or exhaustive or name in FEW:
                    key = f"{world} ranks, blocks of {block}: {name}"
                    found[key] = outcome(lambda c=case, p=parallel: c(p))
    with mapped(folder, late=0.02 * (rank % 2)):
        for world, group in groups.items():
            parallel = ContextParallel(group, page_size=setting.page, symmetric_memory=True)
            for name in SYMMETRIC:
                case = cases(exhaustive=False)[name]
                found[f"{world} ranks, symmetric memory: {name}"] = outcome(
                    lambda c=case, p=parallel: c(p)
                )
            name = f"{world} ranks, symmetric memory: a failed merge"
            found[name] = outcome(lambda p=parallel: a_failed_merge(p))
    if rank >= 2:
        found["a rank that lags"] = a_rank_that_fails(lagging, dies=False)
    if rank == 3:
        (folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    if rank == 2:
        found["a rank that dies"] = a_rank_that_fails(dying, dies=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # no farewell to a rank that is gone


def main() -> None:
    folder, *options = sys.argv[1:]
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports much: once for all ranks
    children = []
    eight = "--eight" in options
    for rank in range(2 * WORLD if eight else WORLD):
        child = os.fork()
        if not child:
            try:
                if eight:
                    work_with_lists(rank, Path(folder))
                work(rank, Path(folder), "--exhaustive" in options)
            finally:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
