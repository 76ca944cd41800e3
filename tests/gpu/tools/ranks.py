# SPDX-License-Identifier: Apache-2.0
"""Ranks of a NCCL group, each a process with a GPU of its own.

    python -m tests.gpu.tools.ranks torch|cupy|failing|failing-mapped RANK FOLDER

runs a rank of two and leaves in FOLDER/RANK.json what it found: the name of a case -> "" or what
went wrong. `launch` starts both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["launch"]

WORLD = 2
_ROOT = Path(__file__).resolve().parents[3]
_SECONDS = 400  # kernels may have to be compiled
_REPEATS = 100
_STEPS = ((700, 64, 1, 0), (64, 128, 2, 0), (65, 0, 1300, 3), (-5, 10_000, 129, 5000))


def launch(what: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run both ranks, each no longer than `_SECONDS`."""
    # Multicast objects of NCCL are not to be had on every host.
    environment = {"NCCL_NVLS_ENABLE": "0"} | dict(os.environ)
    command = [sys.executable, "-m", "tests.gpu.tools.ranks", what]
    logs = [open(folder / f"{rank}.log", "w+") for rank in range(WORLD)]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], cwd=_ROOT, env=environment, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + _SECONDS
    done = []
    for process, log in zip(processes, logs, strict=True):
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = -999
        log.seek(0)
        done.append(subprocess.CompletedProcess(process.args, code, log.read(), ""))
        log.close()
    return done


# --- PyTorch -------------------------------------------------------------------------------------


def torch_group(rank: int, folder: Path, seconds: float) -> Any:
    """Make the group of both ranks."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=seconds)
    )
    return dist.group.WORLD


def torch_cases(rank: int, folder: Path) -> dict[str, Callable[[], None]]:
    """List the cases of the CPU on the GPU, with few heads and with many, and those of graphs."""
    from cumla.distributed import ContextParallel
    from tests.distributed import ranks

    group = torch_group(rank, folder, 120)
    found: dict[str, Callable[[], None]] = {}
    small = (700, 3, 0, 130, 64, -4, 100_000, 1)
    for setting in (
        ranks.Setting(f"cuda:{rank}", 64, 12, 16, 4, 128, small),
        ranks.Setting(f"cuda:{rank}", 64, 40, 128, 8, 128, (2500, 0, 1, 333)),
    ):
        big = setting.heads == 128
        for block in setting.blocks:
            parallel = ContextParallel(group, page_size=setting.page, block_size=block)
            for name, case in ranks.cases(exhaustive=False).items():
                has_offsets = name.startswith(("ragged", "history"))  # of eight requests
                if name in ranks.FEW or (block == setting.page and not (has_offsets and big)):
                    key = f"{setting.heads} heads, blocks of {block}: {name}"
                    found[key] = partial(with_setting, ranks, setting, case, parallel)
        for symmetric in (False, True):
            parallel = ContextParallel(group, page_size=setting.page, symmetric_memory=symmetric)
            own = {"graphs": graphs, "many and few": many_and_few}
            for family in ("mla", "mha"):
                for q_len in (1, 3):
                    name = f"graph, {family}, q_len {q_len}"
                    own[name] = partial(graph, family=family, q_len=q_len)
                own[f"repeats, {family}"] = partial(repeats, family=family)
            if symmetric:
                own |= {name: ranks.cases(exhaustive=False)[name] for name in ranks.SYMMETRIC}
            for name, case in own.items():
                key = f"{setting.heads} heads{', symmetric memory' * symmetric}: {name}"
                found[key] = partial(with_setting, ranks, setting, case, parallel)
    return found


def with_setting(ranks: Any, setting: Any, case: Callable[[Any], None], parallel: Any) -> None:
    """Run a case on a GPU; caches of the setting before make room."""
    import torch

    if ranks.setting is not setting:
        ranks.made.cache_clear()
        torch.cuda.empty_cache()
        ranks.setting = setting
    case(parallel)
    torch.cuda.synchronize()


def planned(parallel: Any, family: str, q_len: int) -> tuple[Any, ...]:
    """Make a step with a plan over this rank's cache, the same on one rank, and both's lengths."""
    import cumla
    from tests.distributed import ranks

    kv = ranks.made(parallel, family)
    q = ranks.queries(family, len(kv.kv_lens), q_len)
    kv_lens = kv.kv_lens.clone()
    tokens = q.reshape(-1, 1, *q.shape[2:])
    kind, whole = cumla.MLADecodePlan, cumla.mla_decode
    if family == "mha":
        kind, whole = cumla.AttentionPlan, cumla.attention
    plan = kind.from_arrays(tokens, *kv.own)
    plan.prepare()

    def step() -> Any:
        pages = parallel.pages(kv_lens, kv.own_table, q_len=q_len)
        plan.update(pages.kv_lens)
        return parallel.attend(plan.run, q, *kv.own, block_table=pages.block_table)

    def alone() -> Any:
        return whole(q, *kv.whole, block_table=kv.table, kv_lens=kv_lens)

    return step, alone, kv_lens


def graph(parallel: Any, family: str, q_len: int) -> None:
    """One graph of the index maps, the schedule, attention, exchange and merge: many lengths."""
    import torch

    from tests.distributed import ranks

    step, alone, kv_lens = planned(parallel, family, q_len)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for its events from a thread of its own.
    with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
        state = step()
    for lengths in _STEPS:
        wanted = torch.tensor(lengths, dtype=torch.int32).repeat(-(-len(kv_lens) // len(lengths)))
        kv_lens.copy_(wanted[: len(kv_lens)])
        state.out.fill_(torch.nan)
        captured.replay()
        torch.cuda.synchronize()
        ranks.compare(parallel, state, alone(), False)
        kept = state.out.clone(), state.lse.clone()
        with torch.cuda.stream(stream):
            again = step()
        torch.cuda.synchronize()
        assert torch.equal(again.out, kept[0]) and torch.equal(again.lse, kept[1])


def graphs(parallel: Any) -> None:
    """Graphs of one, two and three exchanges, and calls between them, one right after the other."""
    import torch

    import cumla
    from tests.distributed import ranks

    heads = ranks.setting.heads
    generator = torch.Generator(ranks.setting.device).manual_seed(13)
    on = {"device": ranks.setting.device, "generator": generator}
    outs = torch.randn(WORLD, 5, heads, 512, **on).bfloat16()
    lses = torch.randn(WORLD, 5, heads, **on)
    own = ranks.own_heads(parallel)
    wanted = {
        factor: cumla.merge_attention_states(list(outs * factor), list(lses)).out[:, own].clone()
        for factor in range(1, 13)
    }
    scale = torch.ones((), dtype=outs.dtype, device=outs.device)

    def merged(times: int) -> Any:
        return parallel.merge(outs[parallel.rank] * (scale * times), lses[parallel.rank])

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        merged(1)
    torch.cuda.synchronize()
    captured = []
    for count in (1, 2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            states = [merged(k + 1) for k in range(count)]
        captured.append((graph, states))
    differing = torch.zeros((), dtype=torch.int64, device=outs.device)
    with torch.cuda.stream(stream):
        for i in range(60):
            if i % 5 == parallel.rank:
                torch.cuda._sleep(100_000)  # a rank that is late
            scale.fill_(i % 4 + 1)
            graph, states = captured[i % 3]
            if i % 7:
                graph.replay()
            else:
                states = [merged(1)]
            for k, state in enumerate(states):
                differing += (state.out != wanted[(i % 4 + 1) * (k + 1)]).sum()
    torch.cuda.synchronize()
    assert int(differing) == 0


def many_and_few(parallel: Any) -> None:
    """Merges that begin with a barrier of PyTorch, and such that wait themselves, in turns."""
    import torch

    import cumla
    from tests.distributed import ranks

    tokens, heads = 2560 // ranks.setting.heads, ranks.setting.heads
    generator = torch.Generator(ranks.setting.device).manual_seed(17)
    on = {"device": ranks.setting.device, "generator": generator}
    outs = torch.randn(WORLD, tokens, heads, 512, **on).bfloat16()
    lses = torch.randn(WORLD, tokens, heads, **on)
    wanted = [cumla.merge_attention_states(list(outs * i), list(lses)).out for i in range(1, 4)]
    differing = torch.zeros((), dtype=torch.int64, device=outs.device)
    for i in range(60):
        if i % 5 == parallel.rank:
            torch.cuda._sleep(100_000)  # a rank that is late
        gather = i % 4 in (1, 2)
        own = slice(None) if gather else ranks.own_heads(parallel)
        state = parallel.merge(
            outs[parallel.rank] * (i % 3 + 1), lses[parallel.rank], gather=gather
        )
        differing += (state.out != wanted[i % 3][:, own]).sum()
    assert int(differing) == 0


def repeats(parallel: Any, family: str) -> None:
    """The same bits each time, however the ranks are timed."""
    import torch

    step, *_ = planned(parallel, family, 1)
    first = step()
    kept = first.out.clone(), first.lse.clone()
    differing = torch.zeros((), dtype=torch.int64, device=first.out.device)
    for i in range(_REPEATS):
        if i % 7 == parallel.rank:
            torch.cuda._sleep(200_000)  # a rank that is late
        out, lse = step()
        differing += (out != kept[0]).sum() + (lse != kept[1]).sum()
    assert int(differing) == 0


# --- CuPy ----------------------------------------------------------------------------------------


def cupy_communicator(rank: int, folder: Path) -> Any:
    """Make the communicator of both ranks; its id goes through a file."""
    import cupy as cp
    from cupy.cuda import nccl

    cp.cuda.Device(rank).use()
    path = folder / "id"
    if rank == 0:
        (folder / "writing").write_bytes(bytes(nccl.get_unique_id()))
        (folder / "writing").rename(path)
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return nccl.NcclCommunicator(WORLD, path.read_bytes(), rank)


def cupy_cases(rank: int, folder: Path) -> dict[str, Callable[[], None]]:
    """List MLA and GQA with CuPy's arrays."""
    import cupy as cp
    import ml_dtypes

    import cumla
    from cumla.distributed import ContextParallel, Shard

    parallel = ContextParallel(cupy_communicator(rank, folder), page_size=64)
    random = np.random.default_rng(0)
    lengths = np.array([700, 3, 0, 130, -4, 100_000], np.int32)
    batch, columns, heads = len(lengths), 12, 16
    table = random.permutation(batch * columns).reshape(batch, -1).astype(np.int32)

    def upload(shape: tuple[int, ...]) -> Any:
        values = random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        return cp.asarray(values.view(np.uint16)).view(ml_dtypes.bfloat16)

    def run(family: str, q_len: int, gather: bool) -> None:
        width = 576 if family == "mla" else 128
        shapes = [(576,)] if family == "mla" else [(4, 128), (4, 64)]
        caches = [upload((table.size, 64, *shape)) for shape in shapes]
        q = upload((batch, q_len, heads, width))
        own = [cp.full(cache.shape, 0xFFFF, np.uint16) for cache in caches]
        for entry in range(rank, columns, WORLD):
            for cache, pages in zip(caches, own, strict=True):
                pages[table[:, entry]] = cache.view(np.uint16)[table[:, entry]]
        own = [pages.view(ml_dtypes.bfloat16) for pages in own]
        kv_lens, block_table = cp.asarray(lengths), cp.asarray(table)
        function = cumla.mla_decode if family == "mla" else cumla.attention
        whole = function(q, *caches, block_table=block_table, kv_lens=kv_lens)
        pages = parallel.pages(kv_lens, block_table, q_len=q_len)
        host = Shard(rank, WORLD, page_size=64).pages(lengths, table, q_len=q_len)
        for found, wanted in zip(pages, host, strict=True):
            np.testing.assert_array_equal(found.get(), wanted)
        first = None
        for _ in range(_REPEATS):
            state = parallel.attend(function, q, *own, **pages._asdict(), gather=gather)
            bits = [state.out.view(np.uint16), state.lse.view(np.uint32)]
            first = first or [array.copy() for array in bits]
            assert all(bool((a == b).all()) for a, b in zip(bits, first, strict=True))
        each = slice(None) if gather else slice(rank * heads // 2, (rank + 1) * heads // 2)
        outs = [array.view(np.uint16).get() for array in (state.out, whole.out)]
        found, wanted = (out.view(ml_dtypes.bfloat16).astype(np.float32) for out in outs)
        np.testing.assert_allclose(found, wanted[:, :, each], atol=2e-2, rtol=2e-2)
        lse = whole.lse.get()[..., each]
        np.testing.assert_allclose(state.lse.get(), lse, atol=1e-5, rtol=1e-5)

    def write() -> None:
        requests, positions = np.repeat(np.arange(batch), 70), np.tile(np.arange(70) * 11, batch)
        slots = parallel.slots(*map(cp.asarray, (table, requests, positions)))
        host = Shard(rank, WORLD, page_size=64).slots(table, requests, positions)
        np.testing.assert_array_equal(slots.get(), host)
        offsets = np.array([0, 2, 2, 5, 6, 7, 9], np.int32)
        given = {"qo_indptr": cp.asarray(offsets), "total_tokens": 10}
        found = parallel.pages(cp.asarray(lengths), cp.asarray(table), **given)
        wanted = Shard(rank, WORLD, page_size=64).pages(
            lengths, table, qo_indptr=offsets, total_tokens=10
        )
        for there, here in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(there.get(), here)

    found = {
        f"{family}, q_len {q_len}, gather {gather}": partial(run, family, q_len, gather)
        for family in ("mla", "mha")
        for q_len in (1, 3)
        for gather in (False, True)
    }
    found |= {"index maps": write, "largest": partial(cupy_largest, parallel, lengths, table)}
    return {**found, "graph": partial(cupy_graph, parallel, upload, table)}


def cupy_largest(parallel: Any, lengths: Any, table: Any) -> None:
    """The largest scores of all ranks, and which of them the rank holds."""
    import cupy as cp

    import cumla
    from cumla.distributed import Shard

    rank, (batch, columns) = parallel.rank, table.shape
    width, random = columns * 64, np.random.default_rng(1)
    scores = random.integers(-9, 9, (batch, width)).astype(np.float32)
    scores[3, ::7] = np.nan
    own = np.full_like(scores, 99)  # behind the ends: larger than any
    entries = [scores[:, e * 64 : (e + 1) * 64] for e in range(rank, columns, WORLD)]
    own[:, : len(entries) * 64] = np.concatenate(entries, 1)
    kv_lens, block_table = cp.asarray(lengths), cp.asarray(table)
    whole = cumla.top_k(cp.asarray(scores), 200, row_lens=kv_lens.clip(0, width)).indices
    pages = parallel.pages(kv_lens, block_table)
    found = parallel.top_k(cp.asarray(own), 200, row_lens=pages.kv_lens)
    np.testing.assert_array_equal(found.get(), whole.get())
    host = Shard(rank, WORLD, page_size=64).lists(whole.get(), table)
    for here, wanted in zip(parallel.lists(found, block_table), host, strict=True):
        np.testing.assert_array_equal(here.get(), wanted)


def cupy_graph(parallel: Any, upload: Callable[[tuple[int, ...]], Any], table: Any) -> None:
    """A schedule and two layers in one graph; lengths change between replays."""
    import cupy as cp

    import cumla

    rank, (batch, columns), heads = parallel.rank, table.shape, 16
    caches = [upload((table.size, 64, 576)) for _ in range(2)]
    own = [cp.full(cache.shape, 0xFFFF, np.uint16) for cache in caches]
    for entry in range(rank, columns, WORLD):
        for cache, there in zip(caches, own, strict=True):
            there[table[:, entry]] = cache.view(np.uint16)[table[:, entry]]
    own = [there.view(caches[0].dtype) for there in own]
    q, block_table = upload((batch, 1, heads, 576)), cp.asarray(table)
    lengths = np.array([700, 3, 0, 130, 64, 768], np.int32)
    pages = parallel.pages(cp.asarray(lengths), block_table)
    plan = cumla.MLADecodePlan.from_arrays(q, own[0])
    each = slice(rank * heads // 2, (rank + 1) * heads // 2)

    def step() -> list[Any]:
        plan.update(pages.kv_lens)
        return [parallel.attend(plan.run, q, cache, block_table=pages.block_table) for cache in own]

    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        states = step()
        captured = stream.end_capture()
        for shift in range(batch):
            kv_lens = cp.asarray(np.roll(lengths, shift))
            pages.kv_lens[...] = parallel.pages(kv_lens, block_table).kv_lens
            q.view(np.uint16)[...] = upload(q.shape).view(np.uint16)
            # As large as what is exchanged: memory of the graph, if CuPy took it for free.
            others = [cp.full(batch * heads * 1040, 0xFF, np.uint8) for _ in range(8)]
            captured.launch(stream)
            assert all(bool((other == 0xFF).all()) for other in others)
            for state, found in zip(step(), states, strict=True):
                assert bool((state.out.view(np.uint16) == found.out.view(np.uint16)).all())
                assert bool((state.lse == found.lse).all())
            whole = cumla.mla_decode(q, caches[1], block_table, kv_lens).lse.get()[..., each]
            np.testing.assert_allclose(states[1].lse.get(), whole, atol=1e-5, rtol=1e-5)


# --- a rank that fails ---------------------------------------------------------------------------


def fail(rank: int, folder: Path, symmetric: bool) -> None:
    """Rank 1 leaves; the other one's exchange ends with NCCL's error, or NCCL ends the process.

    With symmetric memory its barrier ends with an error of CUDA.
    """
    import torch

    from cumla.distributed import ContextParallel

    parallel = ContextParallel(torch_group(rank, folder, 10), symmetric_memory=symmetric)
    state = torch.zeros(2, 8, 512, device="cuda"), torch.zeros(2, 8, device="cuda")
    parallel.merge(*state)
    torch.cuda.synchronize()
    (folder / f"{rank}.json").write_text("{}")  # what failed before this is another error
    if rank == 1:
        os._exit(0)
    parallel.merge(*state)
    torch.cuda.synchronize()
    os._exit(0)


def main() -> None:
    what, number, place = sys.argv[1:]
    rank, folder = int(number), Path(place)
    if what.startswith("failing"):
        fail(rank, folder, what == "failing-mapped")
    from tests.distributed.ranks import outcome

    cases = {"torch": torch_cases, "cupy": cupy_cases}[what](rank, folder)
    found = {}
    for name, case in cases.items():
        begin = time.monotonic()
        found[name] = outcome(case)
        print(f"{time.monotonic() - begin:6.2f} s {'FAILED ' * bool(found[name])}{name}")
        sys.stdout.flush()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
