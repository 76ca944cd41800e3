# SPDX-License-Identifier: Apache-2.0
"""Contexts longer than one GPU: one request of a million tokens, decoded by all ranks of a group.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Each of two ranks holds every second page of 64 tokens. Without torchrun the group has one rank;
without a GPU the ranks use gloo, and the request is short.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import cumla
from cumla.distributed import ContextParallel

PAGE, HEADS, STEPS, SCALE = 64, 128, 4, 192**-0.5


def join() -> torch.device:
    """Make a group of the processes that torchrun has started, or of this one alone."""
    place = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo", **place)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step, its exchange included, into a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the arrays
    with torch.cuda.stream(stream):
        step()  # kernels are loaded, and NCCL connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def main() -> None:
    """Decode a few tokens, and compare the last one with one rank that has the whole cache."""
    device = join()
    tokens = (1 << 20) - STEPS if device.type == "cuda" else 500
    parallel = ContextParallel(dist.group.WORLD, page_size=PAGE)
    rank, world = parallel.rank, parallel.world

    # The group's table: entry j is a page number in the cache of rank j % world.
    entries = -(-(tokens + STEPS) // PAGE)
    block_table = (torch.arange(entries, device=device) // world).to(torch.int32)[None]
    torch.manual_seed(rank)
    kv_cache = torch.randn(-(-entries // world), PAGE, 576, dtype=torch.bfloat16, device=device)

    # Every rank computes the row and the queries of all heads of each new token.
    torch.manual_seed(0)
    queries = torch.randn(STEPS, 1, 1, HEADS, 576, dtype=torch.bfloat16, device=device)
    rows = torch.randn(STEPS, 1, 576, dtype=torch.bfloat16, device=device)
    q, row = queries[0].clone(), rows[0].clone()
    kv_lens = torch.tensor([tokens + 1], dtype=torch.int32, device=device)
    request = torch.zeros_like(kv_lens)
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    out = torch.empty(1, 1, HEADS // world, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(1, 1, HEADS // world, device=device)

    def step() -> None:
        slots = parallel.slots(block_table, request, kv_lens - 1)  # -1 on all ranks but one
        cumla.append_mla_cache(row, kv_cache, slots)
        own = parallel.pages(kv_lens, block_table)
        plan.update(own.kv_lens)  # once for all layers, if there were more
        state = parallel.attend(
            plan.run, q, kv_cache, block_table=own.block_table, softmax_scale=SCALE
        )
        out.copy_(state.out)
        lse.copy_(state.lse)

    run = replayed(step) if device.type == "cuda" else step
    for i in range(STEPS):
        q.copy_(queries[i])
        row.copy_(rows[i])
        kv_lens.fill_(tokens + 1 + i)
        run()

    # One rank: the caches of all, one after the other.
    caches = [torch.empty_like(kv_cache) for _ in range(world)]
    dist.all_gather(caches, kv_cache)
    entry = torch.arange(entries, device=device)
    table = (entry % world * len(kv_cache) + entry // world).to(torch.int32)[None]
    whole = cumla.mla_decode(q, torch.cat(caches), table, kv_lens, softmax_scale=SCALE)
    heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    expected = whole.out[:, :, heads].float()
    error = float((out.float() - expected).norm() / expected.norm())
    print(f"rank {rank} of {world}, {int(kv_lens)} tokens, out {tuple(out.shape)}: {error:.1e}")
    if error > 1e-2 or not torch.allclose(lse, whole.lse[..., heads], atol=1e-3):
        raise SystemExit("the results differ")
    del run  # a graph with NCCL's work in it goes before the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
