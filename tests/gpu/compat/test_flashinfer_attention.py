# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decoding and prefill on torch's CUDA tensors, in the shapes of its own tests.

Attention in float32 is the oracle, and its tolerance of 16-bit results. What no request has is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import cumla
from cumla.compat import flashinfer
from tests.compat.oracle import naive, turned
from tests.gpu.tools.waiting import no_waiting

KERNELS = ("append_kv_cache", "attention", "ragged_schedule")
MAY_SKIP = ()
torch = pytest.importorskip("torch")

DEVICE = "cuda"
NAN = math.nan
TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2}
Report = Callable[..., None]


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.attention, cumla.append_kv_cache, cumla.apply_rope)


def int32(numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def offsets_of(lengths: Any) -> Any:
    return int32([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def workspace() -> Any:
    return torch.empty(16, dtype=torch.uint8, device=DEVICE)


class Batch:
    """A batch in FlashInfer's terms."""

    def __init__(
        self,
        q_lens: Any,
        kv_lens: Any,
        *,
        heads: tuple[int, int] = (32, 4),
        columns: tuple[int, int] = (128, 128),
        page_size: int = 16,
        layout: str = "NHD",
        pair: bool = False,
        dtype: str = "float16",
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.dtype, self.layout = getattr(torch, dtype), layout
        self.q_lens, self.kv_lens = list(q_lens), list(kv_lens)
        self.sizes = (*heads, columns[0], page_size)
        counts = [-(-n // page_size) for n in self.kv_lens]
        total = sum(counts) + 3
        order = torch.randperm(total, device=DEVICE).int()
        self.lists = (
            offsets_of(counts),
            order[: total - 3].contiguous(),
            int32([(n - 1) % page_size + 1 if n else 0 for n in self.kv_lens]),
        )
        self.qo_indptr = offsets_of(self.q_lens)
        self.q = self.random(sum(self.q_lens), heads[0], columns[0])
        parts = [self.random(total, page_size, heads[1], c) for c in columns]
        ends = torch.cumsum(torch.tensor(counts), 0).tolist()
        for part in parts:
            part[order[total - 3 :].long()] = NAN
            for end, count, last in zip(ends, counts, self.lists[2].tolist(), strict=True):
                if count:
                    part[order[end - 1].long(), last:] = NAN
        self.parts = parts
        caches = [p.transpose(1, 2).contiguous() if layout == "HND" else p for p in parts]
        self.cache = tuple(caches) if pair else torch.stack(caches, dim=1)

    def random(self, *shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(self.dtype)

    def rows(self, request: int) -> Any:
        """Keys and values of a request."""
        begin, end = self.lists[0][request : request + 2].tolist()
        pages = self.lists[1][begin:end].long()
        return [part[pages].flatten(0, 1)[: self.kv_lens[request]] for part in self.parts]

    def check(self, found: Any, report: Report, scale_of_out: float = 1.0, **options: Any) -> None:
        """Hold out, and lse to base 2, against attention in float32, request by request."""
        out, lse = found
        assert (out.dtype, lse.dtype) == (self.dtype, torch.float32)
        begin = 0
        bound = TOLERANCE[str(self.dtype).removeprefix("torch.")]
        for r, n in enumerate(self.q_lens):
            own = slice(begin, begin + n)
            begin += n
            wanted, natural = naive(self.q[own], *self.rows(r), **options)
            wanted, base_2 = wanted * scale_of_out, natural.T / math.log(2)
            torch.testing.assert_close(out[own].float(), wanted, rtol=bound, atol=bound)
            torch.testing.assert_close(lse[own], base_2, rtol=1e-3, atol=1e-3)
            if n:
                seen = torch.isfinite(base_2)
                errors = (out[own].float() - wanted).abs().max(), (lse[own] - base_2)[seen].abs()
                worst = float(errors[1].max()) if errors[1].numel() else 0.0
                report({"out": float(errors[0]), "lse": worst})


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("heads", "columns"), [((4, 4), 128), ((32, 4), 128), ((32, 4), 256)])
@pytest.mark.parametrize(
    ("batch", "kv_len"), [(12, 54), (17, 97), (128, 512), (17, 2048), (12, 16384)]
)
@pytest.mark.parametrize(("layout", "pair"), [("NHD", False), ("HND", True)])
def test_decoding(
    batch: int,
    kv_len: int,
    heads: tuple[int, int],
    columns: int,
    page_size: int,
    layout: str,
    pair: bool,
    record_figures: Report,
) -> None:
    problem = Batch(
        (1,) * batch,
        (kv_len,) * batch,
        heads=heads,
        columns=(columns, columns),
        page_size=page_size,
        layout=layout,
        pair=pair,
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    out = torch.full_like(problem.q, NAN)
    with no_waiting():
        wrapper.plan(*problem.lists, *problem.sizes, q_data_type=torch.float16)
        found = wrapper.run(problem.q, problem.cache, return_lse=True)
        wrapper.run(problem.q, problem.cache, out=out)
    problem.check(found, record_figures)
    assert torch.equal(out, found[0])


@pytest.mark.parametrize("window_left", [-1, 3, 128, 533])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("q_len", [1, 4])
def test_windows_caps_sinks_and_scales(
    q_len: int, dtype: str, softcap: float, window_left: int, record_figures: Report
) -> None:
    lens = (700, 4, 54, 2048, 130)
    problem = Batch((q_len,) * 5, lens, heads=(32, 8), columns=(64, 64), dtype=dtype)
    sinks = torch.linspace(-3, 6, 32, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    options = {"window_left": window_left, "logits_soft_cap": softcap, "sm_scale": 0.2}
    with no_waiting():
        wrapper.plan(
            *problem.lists, *problem.sizes, q_len_per_req=q_len, q_data_type=dtype, **options
        )
        found = wrapper.run(
            problem.q, problem.cache, sinks=sinks, k_scale=0.5, v_scale=2.0, return_lse=True
        )
    mask = {"causal": True, "window": (window_left, -1), "softcap": softcap}
    problem.check(found, record_figures, scale_of_out=2.0, scale=0.1, sinks=sinks, **mask)


# --- prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("heads", "columns"), [((4, 4), 128), ((32, 4), 256), ((32, 4), 64)])
@pytest.mark.parametrize(
    ("batch", "kv_len", "qo_len"), [(12, 54, 37), (17, 97, 17), (12, 512, 127), (3, 2048, 577)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(
    batch: int,
    kv_len: int,
    qo_len: int,
    heads: tuple[int, int],
    columns: int,
    page_size: int,
    causal: bool,
    record_figures: Report,
) -> None:
    problem = Batch(
        (qo_len,) * batch,
        (kv_len,) * batch,
        heads=heads,
        columns=(columns, columns),
        page_size=page_size,
    )
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    with no_waiting():
        wrapper.plan(problem.qo_indptr, *problem.lists, *problem.sizes, causal=causal)
        found = wrapper.run(problem.q, problem.cache, return_lse=True)
    problem.check(found, record_figures, causal=causal)


MIXES = (
    ((1, 5, 0, 300, 2), (700, 5, 33, 2000, 1)),
    ((100, 1, 1, 1, 205), (4000, 900, 0, 64, 205)),
    ((0, 0, 8, 0, 300), (96, 7, 514, 1, 290)),
)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 13, 533])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_mixes(
    layout: str, window_left: int, causal: bool, on_host: bool, record_figures: Report
) -> None:
    """Of values with other columns than keys; lengths may come from the host."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
    for lengths in MIXES:
        shape = {"heads": (16, 4), "columns": (192, 128), "dtype": "bfloat16"}
        problem = Batch(*lengths, layout=layout, pair=True, **shape)
        lists = problem.qo_indptr, *problem.lists
        lists = tuple(array.cpu() for array in lists) if on_host else lists
        options = {"causal": causal, "window_left": window_left, "logits_soft_cap": 30.0}
        dtypes = {"q_data_type": torch.bfloat16, "head_dim_vo": 128}
        torch.cuda.synchronize()
        with no_waiting():
            wrapper.plan(*lists, *problem.sizes, **options, **dtypes)
            found = wrapper.run(problem.q, problem.cache, return_lse=True)
        mask = {"causal": causal, "window": (window_left, -1), "softcap": 30.0}
        problem.check(found, record_figures, **mask)


@pytest.mark.parametrize("seq_len", [11, 99, 1763])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "columns", "softcap"),
    [((32, 32), (192, 128), 0.0), ((4, 4), (64, 64), 30.0), ((32, 8), (256, 256), 0.0)],
)
def test_rows_without_pages(
    heads: tuple[int, int],
    columns: tuple[int, int],
    softcap: float,
    causal: bool,
    seq_len: int,
    record_figures: Report,
) -> None:
    lens = seq_len, 1, seq_len + 40
    problem = Batch((seq_len, 1, 3), lens, heads=heads, columns=columns, pair=True)
    k, v = (torch.cat(x) for x in zip(*map(problem.rows, range(3)), strict=True))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    offsets = problem.qo_indptr, offsets_of(lens)
    with no_waiting():
        wrapper.plan(*offsets, *heads, *columns, causal=causal, logits_soft_cap=softcap)
        found = wrapper.run(problem.q, k, v, return_lse=True)
    problem.check(found, record_figures, causal=causal, softcap=softcap)
    one = Batch((seq_len,), (seq_len,), heads=heads, columns=columns, pair=True)
    options = {"causal": causal, "logits_soft_cap": softcap}
    rows = one.rows(0)
    with no_waiting():
        single = flashinfer.single_prefill_with_kv_cache_return_lse(one.q, *rows, **options)
        last = flashinfer.single_decode_with_kv_cache(one.q[-1], *rows, logits_soft_cap=softcap)
    one.check(single, record_figures, causal=causal, softcap=softcap)
    bound = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(last, single[0][-1], **bound)


# --- e4m3 caches ---------------------------------------------------------------------------------


def make_e4m3(problem: Batch, factors: Any) -> Any:
    """Give the cache in e4m3; the problem's rows become what it stands for."""
    small = [(part.float() / 2).to(torch.float8_e4m3fn) for part in problem.parts]
    problem.parts = [
        part.float() * torch.as_tensor(factor, device=DEVICE).reshape(-1, 1)
        for part, factor in zip(small, factors, strict=True)
    ]
    bits = [part.view(torch.uint8) for part in small]
    if problem.layout == "HND":
        bits = [part.transpose(1, 2).contiguous() for part in bits]
    return torch.stack(bits, dim=1).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 16), ("HND", 64), ("NHD", 1)])
@pytest.mark.parametrize("kind", ["numbers", "device"])
def test_e4m3_caches(
    kind: str, layout: str, page_size: int, columns: int, dtype: str, record_figures: Report
) -> None:
    """What has no token is NaN, in e4m3 too."""
    shape = {"heads": (32, 4), "columns": (columns, columns), "dtype": dtype, "layout": layout}
    factors: Any = 1.5, 0.5
    if kind == "device":
        factors = [torch.linspace(*ends, 4, device=DEVICE) for ends in ((0.5, 2.0), (2.0, 0.2))]
    options = {"q_data_type": dtype, "kv_data_type": torch.float8_e4m3fn}
    scales = {"k_scale": factors[0], "v_scale": factors[1], "return_lse": True}
    for q_lens, kv_lens in (((2,) * 4, (700, 2, 54, 2048)), *MIXES):
        problem = Batch(q_lens, kv_lens, page_size=page_size, **shape)
        cache = make_e4m3(problem, factors)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
        with no_waiting():
            lists = problem.qo_indptr, *problem.lists
            prefill.plan(*lists, *problem.sizes, causal=True, **options)
            found = prefill.run(problem.q, cache, **scales)
        problem.check(found, record_figures, causal=True)
        if (q_lens, kv_lens) in MIXES:
            continue
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
        with no_waiting():
            decode.plan(*problem.lists, *problem.sizes, q_len_per_req=2, **options)
            found = decode.run(problem.q, cache, **scales)
        problem.check(found, record_figures, causal=True)


def test_a_graph_reads_the_scales_of_the_replay(record_figures: Report) -> None:
    problem = Batch((1,) * 3, (700, 5, 54), heads=(32, 4), page_size=16)
    parts = problem.parts
    cache = make_e4m3(problem, (1.0, 1.0))
    factors = [torch.ones(4, device=DEVICE) for _ in "kv"]
    buffers = [int32([-9] * size) for size in (4, 60, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    wrapper.plan(*problem.lists, *problem.sizes, kv_data_type=torch.float8_e4m3fn)
    torch.ones(2, device=DEVICE).mul_(2.0)  # torch loads its kernels when they are first called
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    scales = {"k_scale": factors[0], "v_scale": factors[1]}
    with torch.cuda.graph(graph):
        found = wrapper.run(problem.q, cache, **scales, return_lse=True)
    for _ in range(3):
        for factor in factors:
            factor.uniform_(0.25, 2.0)
        for tensor in found:
            tensor.fill_(NAN)
        graph.replay()
        problem.parts = parts
        make_e4m3(problem, factors)
        problem.check(found, record_figures)


def test_a_side_stream(record_figures: Report) -> None:
    """Work that went to another stream would overtake the copies behind the sleep."""
    problem = Batch(*MIXES[0], page_size=8)
    late = [torch.zeros_like(array) for array in (problem.qo_indptr, *problem.lists)]
    cache = torch.zeros_like(problem.cache)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())

    def attend() -> Any:
        wrapper.plan(*late, *problem.sizes, causal=True)
        return wrapper.run(problem.q, cache, return_lse=True)

    attend()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for old, new in zip(
            (*late, cache), (problem.qo_indptr, *problem.lists, problem.cache), strict=True
        ):
            old.copy_(new)
        found = attend()
    assert not stream.query(), "a call waited for the device"
    stream.synchronize()
    problem.check(found, record_figures, causal=True)


# --- a server ------------------------------------------------------------------------------------


class Server:
    """Decoding of two layers: rotate, append, attend; all in the tensors of a graph."""

    BATCH, PAGES, PAGE_SIZE, HEADS, COLUMNS, LAYERS = 6, 200, 16, (32, 8), 128, 2

    def __init__(self, dtype: str) -> None:
        torch.manual_seed(7)
        heads, kv_heads = self.HEADS
        self.dtype = getattr(torch, dtype)
        self.bound = TOLERANCE[dtype]
        self.lens = [1, 15, 16, 500, 33, 0]
        self.pages: list[list[int]] = [[] for _ in self.lens]
        self.free = torch.randperm(self.PAGES).tolist()
        angles = torch.outer(torch.arange(1024), 10000.0 ** (torch.arange(0, 128, 2) / -128))
        self.angles = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        self.table = torch.cat(self.angles, dim=-1)
        shape = (self.PAGES, 2, self.PAGE_SIZE, kv_heads, self.COLUMNS)
        self.caches = [torch.full(shape, NAN, device=DEVICE, dtype=self.dtype) for _ in range(2)]
        rows = (self.BATCH, (heads + 2 * kv_heads) * self.COLUMNS)
        self.projections = [torch.zeros(rows, device=DEVICE, dtype=self.dtype) for _ in range(2)]
        self.lists = int32([0] * (self.BATCH + 1)), int32([0] * 100), int32([1] * self.BATCH)
        self.positions = int32([0] * self.BATCH)
        self.whose = int32(range(self.BATCH))
        # What the caches have to hold: rotated keys, and values, of each layer and request.
        self.history: list[list[Any]] = [[None] * self.BATCH for _ in range(self.LAYERS)]
        for request, length in enumerate(self.lens):
            self.grow(request, length)
            for layer, cache in enumerate(self.caches):
                new = torch.randn(2, length, kv_heads, self.COLUMNS, device=DEVICE).to(self.dtype)
                self.history[layer][request] = new
                for position in range(length):
                    page = self.pages[request][position // self.PAGE_SIZE]
                    cache[page, :, position % self.PAGE_SIZE] = new[:, position]

    def grow(self, request: int, length: int) -> None:
        while len(self.pages[request]) * self.PAGE_SIZE < length:
            self.pages[request].append(self.free.pop())

    def next_step(self) -> None:
        """Give each request a token: its lists and rows go where graphs read them."""
        for request in range(self.BATCH):
            self.lens[request] += 1
            self.grow(request, self.lens[request])
        counts = [len(pages) for pages in self.pages]
        flat = [page for pages in self.pages for page in pages]
        self.lists[0].copy_(offsets_of(counts))
        self.lists[1][: len(flat)].copy_(int32(flat))
        self.lists[2].copy_(int32([(n - 1) % self.PAGE_SIZE + 1 for n in self.lens]))
        self.positions.copy_(int32([n - 1 for n in self.lens]))
        for rows in self.projections:
            rows.copy_(torch.randn(rows.shape, device=DEVICE))
        self.fresh = [rows.clone() for rows in self.projections]

    def split(self, rows: Any) -> Any:
        heads, kv_heads = self.HEADS
        sizes = [n * self.COLUMNS for n in (heads, kv_heads, kv_heads)]
        return rows.split(sizes, dim=-1)

    def forward(self, wrapper: Any) -> list[Any]:
        """Both layers, as a model calls FlashInfer."""
        results = []
        for rows, cache in zip(self.projections, self.caches, strict=True):
            q, k, v = self.split(rows)
            flashinfer.apply_rope_with_cos_sin_cache_inplace(
                self.positions, q, k, self.COLUMNS, self.table
            )
            q, k, v = (x.unflatten(1, (-1, self.COLUMNS)) for x in (q, k, v))
            indptr, indices, last = self.lists
            flashinfer.append_paged_kv_cache(
                k, v, self.whose, self.positions, cache, indices, indptr, last
            )
            results.append(wrapper.run(q, cache, return_lse=True))
        return results

    def check(self, results: Any, report: Report) -> None:
        """Hold this step's results, and what the caches have got, against the history."""
        bound = {"rtol": self.bound, "atol": self.bound}
        for layer, (fresh, found) in enumerate(zip(self.fresh, results, strict=True)):
            q, k, v = (x.unflatten(1, (-1, self.COLUMNS)) for x in self.split(fresh))
            at = self.positions.long()
            q, k = (turned(x, *self.angles, at, False) for x in (q, k))
            for request in range(self.BATCH):
                new = torch.stack([k[request], v[request]])[:, None]
                whole = torch.cat([self.history[layer][request], new], dim=1)
                self.history[layer][request] = whole
                out, lse = naive(q[request : request + 1], *whole)
                torch.testing.assert_close(found[0][request].float(), out[0], **bound)
                base_2 = lse[:, 0] / math.log(2)
                torch.testing.assert_close(found[1][request], base_2, rtol=2e-3, atol=2e-3)
                report({"out": float((found[0][request].float() - out[0]).abs().max())})
                pages = torch.tensor(self.pages[request], device=DEVICE)
                cached = self.caches[layer][pages].transpose(1, 2).flatten(0, 1)
                held = cached[: self.lens[request]].transpose(0, 1)
                assert torch.equal(held[1], whole[1])
                torch.testing.assert_close(held[0].float(), whole[0].float(), rtol=8e-3, atol=1e-3)
                assert bool(cached[self.lens[request] :].isnan().all())

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.HEADS, self.COLUMNS, self.PAGE_SIZE)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_server_loop_of_decoding(dtype: str, record_figures: Report) -> None:
    server = Server(dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    for _ in range(20):
        server.next_step()
        with no_waiting():
            wrapper.plan(*server.lists, *server.sizes, q_data_type=dtype)
            results = server.forward(wrapper)
        server.check(results, record_figures)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_server_loop_under_a_graph(dtype: str, record_figures: Report) -> None:
    """Captured after the first plan; each step is loads, a plan and a replay."""
    server = Server(dtype)
    sizes = (Server.BATCH + 1, 120, Server.BATCH)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(), *(int32([-9] * size) for size in sizes)
    )
    server.next_step()
    torch.ones(2, device=DEVICE).mul_(2.0)  # torch loads its kernels when they are first called
    with no_waiting():
        wrapper.plan(*server.lists, *server.sizes, q_data_type=dtype)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = server.forward(wrapper)
    for step in range(20):
        if step:
            server.next_step()
            with no_waiting():
                wrapper.plan(*server.lists, *server.sizes, q_data_type=dtype)
        for out, lse in results:
            out.fill_(NAN)
            lse.fill_(NAN)
        graph.replay()
        server.check(results, record_figures)


@pytest.mark.parametrize("eager_first", [False, True])
def test_prefill_under_a_graph(eager_first: bool, record_figures: Report) -> None:
    """One graph of one row count for all mixes; an eager run between replays disturbs nothing."""
    problems = [Batch(*lengths, heads=(16, 4), page_size=8) for lengths in MIXES]
    assert {sum(problem.q_lens) for problem in problems} == {308}
    largest = max(problem.cache.shape[0] for problem in problems)
    buffers = [int32([-9] * size) for size in (6, 6, largest, 5)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    q = torch.empty_like(problems[0].q)
    cache = problems[0].cache.new_full((largest, *problems[0].cache.shape[1:]), NAN)

    def load(problem: Batch) -> None:
        q.copy_(problem.q)
        cache[: len(problem.cache)].copy_(problem.cache)
        with no_waiting():
            wrapper.plan(problem.qo_indptr, *problem.lists, *problem.sizes, causal=True)

    load(problems[0])
    torch.ones(2, device=DEVICE).mul_(2.0)  # torch loads its kernels when they are first called
    if eager_first:
        problems[0].check(wrapper.run(q, cache, return_lse=True), record_figures, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = wrapper.run(q, cache, return_lse=True)
    for problem in (*problems, *reversed(problems)):
        load(problem)
        for tensor in results:
            tensor.fill_(NAN)
        graph.replay()
        problem.check(results, record_figures, causal=True)
        problem.check(wrapper.run(q, cache, return_lse=True), record_figures, causal=True)


# --- rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("columns", "rotary_dim"), [(64, 64), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation_by_positions(dtype: str, columns: int, rotary_dim: int, interleave: bool) -> None:
    torch.manual_seed(columns)
    q, k = (torch.randn(700, h, columns, device=DEVICE).to(getattr(torch, dtype)) for h in (8, 2))
    positions = torch.randint(0, 4096, (700,), device=DEVICE)
    angles = torch.outer(
        torch.arange(4096, device=DEVICE, dtype=torch.float64),
        1 / 10000.0 ** (torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim),
    )
    expected = [turned(x, angles.cos(), angles.sin(), positions, interleave) for x in (q, k)]
    with no_waiting():
        found = flashinfer.apply_rope_pos_ids(q, k, positions, rotary_dim, interleave)
        flashinfer.apply_rope_pos_ids_inplace(q, k, positions.int(), rotary_dim, interleave)
    for new, rows, wanted in zip(found, (q, k), expected, strict=True):
        torch.testing.assert_close(new, wanted, rtol=8e-3, atol=1e-3)
        assert torch.equal(new, rows)
