# SPDX-License-Identifier: Apache-2.0
"""The backend for sparse MLA under decode context parallelism, on a stub of vLLM.

    python -m tests.vllm.ranks FOLDER WORLD

forks the ranks of a gloo group, and compares what they select and attend to with one rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

import cumla
from tests.vllm import stub
from tests.vllm.layers import PAGE, TOPK, SparseMLA, int32, queries, tables

WORLD = int(sys.argv[2]) if len(sys.argv) > 2 else 2
HEADS = 8
LENS, STARTS = (90, 5, 33), (0, 1, 3, 7)
STEPS = {  # query tokens of each request, and whether vLLM would pad them
    "decoding": ((0, 1, 2, 3), False),
    "drafts": ((0, 2, 4, 6), False),
    "unequal decoding": ((0, 1, 3, 4), True),
}


def held(lens: Any, rank: int) -> Any:
    """Tokens of a rank among the first ones of a request."""
    return (lens + WORLD - 1 - rank) // WORLD


def cut(one: SparseMLA, own: SparseMLA, table: Any, rank: int) -> None:
    """Copy a rank's tokens of every request to where vLLM has them."""
    for row, length in zip(table, LENS, strict=True):
        for token in range(rank, length, WORLD):
            source = row[token // PAGE], token % PAGE
            local = token // WORLD
            target = row[local // PAGE], local % PAGE
            own.cache.view(torch.uint8)[target] = one.cache.view(torch.uint8)[source]
            keys, found = (each.view(each.shape[0], -1) for each in (one.keys, own.keys))
            for size, first in ((128, 0), (4, PAGE * 128)):  # keys of a page, then its scales
                begins = [first + place[1] * size for place in (source, target)]
                part = keys[source[0], begins[0] : begins[0] + size]
                found[target[0], begins[1] : begins[1] + size] = part


def counts(starts: tuple[int, ...]) -> list[int]:
    """Return what each query token sees."""
    spans = zip(LENS, starts, starts[1:], strict=False)
    return [n - (end - 1 - i) for n, first, end in spans for i in range(first, end)]


def indexed(sparse: SparseMLA, rank: int | None, starts: tuple[int, ...], padded: bool) -> Any:
    """Metadata of the indexer for decoding: of a rank, or of all."""
    table, offsets = tables(int32(*LENS)), torch.tensor(starts)
    longest = max(offsets.diff().tolist())
    lens = torch.tensor([[n - longest + 1 + i for i in range(longest)] for n in LENS]).int()
    own = lens if rank is None else held(lens, rank).int()
    step = sparse.decoding(own, table, offsets, padded=padded)
    step.decode.global_seq_lens = int32(*LENS)
    return step


def prefilled(sparse: SparseMLA, rank: int | None) -> Any:
    """Metadata of the indexer for prefills: of a rank, or of all."""
    table, lens = tables(int32(*LENS)), int32(*LENS)
    step = sparse.prefilling(lens, STARTS, table)
    if rank is not None:
        (chunk,) = step.prefill.chunks
        own = held(lens, rank)
        starts = torch.cat([torch.zeros(1), own.cumsum(0)]).int()
        requests = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(STARTS).diff())
        chunk.cu_seqlen_ks = starts[requests]
        chunk.cu_seqlen_ke = starts[requests] + held(int32(*counts(STARTS)), rank)
        chunk.local_cu_seq_lens, chunk.local_total_seq_lens = starts, int(starts[-1])
    return step


def attended(sparse: SparseMLA, starts: tuple[int, ...]) -> Any:
    """Return what the heads of all ranks get of this one's tokens."""
    sparse.impl.need_to_return_lse_for_decode = True
    step = sparse.step(int32(*LENS), int32(*starts), starts[-1])
    return sparse.attend(step, torch.cat(queries(starts[-1], heads=HEADS), -1))


def compare(rank: int, cache_dtype: str) -> None:
    with stub.stubbed(index_topk=TOPK):
        one = SparseMLA(cache_dtype, HEADS)
        wanted = {}
        for name, (starts, padded) in STEPS.items():
            one.index(indexed(one, None, starts, padded), *one.index_inputs(starts[-1]))
            wanted[name] = one.buffer.clone(), *attended(one, starts)
        one.index(prefilled(one, None), *one.index_inputs(STARTS[-1]))
        wanted["prefills"] = one.buffer.clone(), *attended(one, STARTS)
    with stub.stubbed(index_topk=TOPK, dcp=WORLD):
        stub.dcp_group = dist.group.WORLD
        own = SparseMLA(cache_dtype, HEADS, dcp=WORLD)
        for each in (own.cache, own.keys):  # tokens of others may be anything
            each.view(torch.uint8).fill_(0x7F)
        cut(one, own, tables(int32(*LENS)), rank)
        for name, (buffer, out, lse) in wanted.items():
            starts, padded = STEPS.get(name, (STARTS, False))
            step = prefilled(own, rank) if name == "prefills" else None
            step = step or indexed(own, rank, starts, padded)
            for _ in range(2):  # layers
                own.buffer.fill_(7)
                own.index(step, *own.index_inputs(starts[-1]))
                tokens = starts[-1]
                assert torch.equal(own.buffer[:tokens], buffer[:tokens]), name
                found = attended(own, starts)
                parts = [[torch.empty_like(part) for _ in range(WORLD)] for part in found]
                for part, gathered in zip(found, parts, strict=True):
                    dist.all_gather(gathered, part.contiguous())
                assert all(bool(part.isfinite().all()) for part in parts[0]), name
                merged = cumla.merge_attention_states(*parts)
                torch.testing.assert_close(merged.out, out, msg=name, atol=2e-2, rtol=2e-2)
                torch.testing.assert_close(merged.lse, lse, msg=name, atol=1e-3, rtol=1e-3)


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    for cache_dtype in ("auto", "fp8", "fp8_ds_mla"):
        compare(rank, cache_dtype)


def main() -> None:
    torch.set_num_threads(1)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports much: once for all
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(rank, sys.argv[1])
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    raise SystemExit(max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children))


if __name__ == "__main__":
    main()
