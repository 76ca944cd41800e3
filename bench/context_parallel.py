# SPDX-License-Identifier: Apache-2.0
"""Records what a cache that is cut among GPUs takes: one GPU, its share, the exchange, all of it.

    python -m bench.context_parallel records/NAME.json [--ranks 2]

Starts a process for each rank, which exchange by NCCL through PyTorch. Each case is compared with
one GPU before it is timed. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import cumla
from bench.files import say, write
from bench.frameworks import laid_out
from cumla.bench.gpu import Gpu
from cumla.bench.run import environment, refuse_slow_kernels
from cumla.bench.section import Column, Row, columns
from cumla.distributed import ContextParallel

__all__ = ["CASES", "main", "measured", "to_markdown"]

PROTOCOL = (
    "us: of one layer, a CUDA graph of 8 layers divided by 8, median of 30 replays, each after 512 "
    "MiB that empty the L2 cache and a barrier of the ranks, the slowest rank's; layers go round "
    "caches of at least 1 GiB in all. MLA, bfloat16, q_len 1, pages of 64 tokens in any order, "
    "schedules made before. one GPU: attention over the whole cache; share: over that of a rank; "
    "exchange: the all-to-all over heads alone; merge: the merge alone; all: share, exchange and "
    "merge, compared with one GPU first (out 2e-2, lse 1e-3); mapped: all, through PyTorch's "
    "symmetric memory, compared as well. maps: pages and slots of a step. "
    "links: so many bytes from each rank to each other one, by an all-to-all and by an all-gather"
)
_LAYERS = 8
_REPEATS, _WARMUP = 30, 5
_POOL_BYTES = 1 << 30  # of caches that the layers go round
_FLUSHED_BYTES = 512 << 20
_LINKS = (1 << 12, 1 << 16, 1 << 17, 1 << 20, 1 << 24, 1 << 28)
_PAGE = 64


class Case(NamedTuple):
    """Requests of one length."""

    batch: int
    heads: int
    kv_len: int


CASES = (
    Case(1, 128, 1 << 20),
    Case(1, 128, 1 << 17),
    Case(16, 128, 1 << 17),
    Case(1, 128, 1 << 15),
    Case(1, 128, 1 << 13),
    Case(1, 16, 1 << 20),
    Case(32, 128, 1 << 13),
)

_SHOWN = (
    *columns("batch", "heads", "kv_len"),
    *(Column(name, f"{name}_us", "us") for name in ("one", "share", "exchange", "merge", "all")),
    Column("x one GPU", "ratio", ".2f"),
    Column("mapped", "mapped_us", "us"),
    Column("x one GPU", "mapped_ratio", ".2f"),
    Column("maps", "maps_us", "us"),
    *columns("failed"),
)
_LINKED = (
    *columns("bytes"),
    Column("all-to-all us", "us", "us"),
    Column("GB/s", "gbps", ".1f"),
    Column("all-gather us", "gather_us", "us"),
)


class Ranks:
    """This rank, and what times its work beside the others'; gloo without a GPU, for tests."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self.torch = torch = import_module("torch")
        self.dist = torch.distributed
        self.rank, self.world = rank, world
        self._on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self._on_gpu else torch.device("cpu")
        backend, flushed, self._stream = "gloo", 1, None
        if self._on_gpu:
            torch.cuda.set_device(rank)
            backend, flushed, self._stream = "nccl", _FLUSHED_BYTES // 4, torch.cuda.Stream()
        store = self.dist.FileStore(f"{folder}/store", world)
        self.dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        self._flushed = torch.zeros(flushed, device=self.device)
        self._one = torch.zeros(1, device=self.device)
        self.dist.all_reduce(self._one)

    def on_stream(self) -> AbstractContextManager[object]:
        """Work inside ``with`` on the stream that is timed."""
        if self._stream is None:
            return nullcontext()
        stream: AbstractContextManager[object] = self.torch.cuda.stream(self._stream)
        return stream

    def worst(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""
        all_of_them = self.torch.tensor(number, device=self.device)
        self.dist.all_reduce(all_of_them, self.dist.ReduceOp.MAX)
        return float(all_of_them)

    def time(self, work: Callable[[int], object]) -> float:
        """Time one layer of `_LAYERS` in microseconds, on the slowest rank."""
        with self.on_stream():
            begin = perf_counter()
            for layer in range(_LAYERS):
                work(layer)
            seconds = perf_counter() - begin
        ms = self._replayed(work) if self._on_gpu else 1e3 * seconds
        return self.worst(1e3 * ms / _LAYERS)

    def _replayed(self, work: Callable[[int], object]) -> float:
        """Capture all layers, and time replays in milliseconds."""
        cuda = self.torch.cuda
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        # NCCL's watchdog asks for its events from a thread of its own.
        with cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for layer in range(_LAYERS):
                work(layer)
        pairs = []
        with self.on_stream():
            for _ in range(_WARMUP + _REPEATS):
                self._flushed.add_(1)
                self.dist.all_reduce(self._one)
                pair = [cuda.Event(enable_timing=True) for _ in range(2)]
                pair[0].record()
                graph.replay()
                pair[1].record()
                pairs.append(pair)
        cuda.synchronize()
        return float(median(begin.elapsed_time(end) for begin, end in pairs[_WARMUP:]))


def is_near(ranks: Ranks, found: Any, whole: Any) -> bool:
    """Compare the heads of all ranks with one GPU."""
    each = found.out.shape[2]
    heads = slice(ranks.rank * each, (ranks.rank + 1) * each)
    out = found.out.float() - whole.out[:, :, heads].float()
    lse = found.lse - whole.lse[..., heads]
    return not ranks.worst(float(out.abs().max() > 2e-2 or lse.abs().max() > 1e-3))


def measure(ranks: Ranks, case: Case) -> Row:
    """Compare a case with one GPU, then time it and its parts."""
    torch = ranks.torch
    group = ranks.dist.group.WORLD
    parallel = ContextParallel(group, page_size=_PAGE)
    generator = torch.Generator(ranks.device).manual_seed(0)
    on: Row = {"device": ranks.device, "generator": generator}
    entries = -(-case.kv_len // _PAGE)
    pages = case.batch * entries
    copies = min(_LAYERS, max(1, _POOL_BYTES // (pages * _PAGE * 1152)))
    shape = (pages, _PAGE, 576)
    caches = [torch.randn(shape, dtype=torch.bfloat16, **on) for _ in range(copies)]
    table = torch.randperm(pages, **on).to(torch.int32).view(case.batch, entries)
    q = torch.randn(case.batch, 1, case.heads, 576, dtype=torch.bfloat16, **on)
    kv_lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=ranks.device)
    options = {"softmax_scale": 192**-0.5}

    # Every rank has all pages, so that it can compare; entries of its table are its own ones.
    own = parallel.pages(kv_lens, table)
    plans = {}
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what is drawn above is another stream's
    with ranks.on_stream():
        for name, lengths in (("one", kv_lens), ("share", own.kv_lens)):
            plans[name] = cumla.MLADecodePlan.from_arrays(q, caches[0])
            plans[name].update(lengths)
            plans[name].prepare()

    def one(layer: int) -> Any:
        return plans["one"].run(q, caches[layer % copies], block_table=table, **options)

    def share(layer: int) -> Any:
        return plans["share"].run(q, caches[layer % copies], block_table=own.block_table, **options)

    def both(layer: int, parallel: ContextParallel = parallel) -> Any:
        cache = caches[layer % copies]
        return parallel.attend(plans["share"].run, q, cache, block_table=own.block_table, **options)

    works: dict[str, Callable[[int], Any]] = {"one": one, "share": share, "all": both}
    if ranks.device.type == "cuda":
        reading = ContextParallel(group, page_size=_PAGE, symmetric_memory=True)
        works["mapped"] = partial(both, parallel=reading)
    each = case.heads // ranks.world
    with ranks.on_stream():
        wanted, parts = one(0), [share(0)] * ranks.world
        differing = [
            name
            for name in ("all", "mapped")
            if name in works and not is_near(ranks, works[name](0), wanted)
        ]
    if differing:
        return {**case._asdict(), "failed": f"differs from one GPU: {', '.join(differing)}"}

    nbytes = case.batch * case.heads * (512 * 2 + 16)
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    requests = torch.arange(case.batch, device=ranks.device)
    of_own = [(p.out[:, :, :each], p.lse[..., :each]) for p in parts]

    def exchange(_: int) -> Any:
        ranks.dist.all_to_all_single(received, sent)

    def merge(_: int) -> Any:
        return cumla.merge_attention_states(*zip(*of_own, strict=True))

    def maps(_: int) -> Any:
        return parallel.pages(kv_lens, table), parallel.slots(table, requests, kv_lens - 1)

    works |= {"exchange": exchange, "merge": merge, "maps": maps}
    times = {f"{name}_us": ranks.time(work) for name, work in works.items()}
    mapped = times.get("mapped_us")
    return {
        **case._asdict(),
        **times,
        "ratio": times["one_us"] / times["all_us"],
        "mapped_ratio": mapped and times["one_us"] / mapped,
        "exchanged_bytes": nbytes * (ranks.world - 1) // ranks.world,
    }


def links(ranks: Ranks) -> list[Row]:
    """Time all-to-alls of several sizes, and all-gathers of what one rank sends to another."""
    torch, dist = ranks.torch, ranks.dist
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    rows = []
    for nbytes in _LINKS:
        sent = torch.zeros(ranks.world * nbytes, dtype=torch.uint8, device=ranks.device)
        received = torch.empty_like(sent)

        def to_all(_: int, to: Any = received, what: Any = sent) -> None:
            dist.all_to_all_single(to, what)

        def from_all(_: int, to: Any = received, what: Any = sent[:nbytes]) -> None:
            gather(to, what)

        us = ranks.time(to_all)
        gbps = nbytes * (ranks.world - 1) / us / 1e3
        rows.append({"bytes": nbytes, "us": us, "gbps": gbps, "gather_us": ranks.time(from_all)})
    return rows


def measured(rank: int, world: int, folder: str, path: str) -> None:
    """Run one rank; the first writes the record, fuller after each case."""
    ranks = Ranks(rank, world, folder)
    results: Row = {}
    if rank == 0:
        results = environment(Gpu()) | {"protocol": PROTOCOL, "ranks": world}
        results["machine"]["nccl"] = ".".join(map(str, ranks.torch.cuda.nccl.version()))
    results |= {"links": links(ranks), "rows": []}
    for case in CASES:
        results["rows"].append(measure(ranks, case))
        ranks.torch.cuda.empty_cache()
        if rank == 0:
            write(Path(path), results)
            say(str(results["rows"][-1]))
    os._exit(0)  # without a farewell, which could wait for the other ranks


def to_markdown(results: Row) -> str:
    """Lay the cases and the links out."""
    parts = [laid_out(_SHOWN, results["rows"]), laid_out(_LINKED, results["links"])]
    return "\n\n".join([*parts, f"{results['protocol']}."]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Record into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to cut the cache among (2)")
    args = parser.parse_args(arguments)
    refuse_slow_kernels()
    # Multicast objects of NCCL are not to be had on every host.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    multiprocessing = import_module("torch.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, folder, str(args.file))
        multiprocessing.spawn(measured, given, nprocs=args.ranks)
    sys.stdout.write(to_markdown(json.loads(args.file.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
