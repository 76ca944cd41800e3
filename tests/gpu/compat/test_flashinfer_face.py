# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions on torch's CUDA tensors against float64; what has no place is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import reference
from cumla.compat import flashinfer
from cumla.core.arrays import to_numpy
from tests.gpu.tools.arrays import from_torch, to_torch
from tests.gpu.tools.fp8_problem import FACTOR, Fp8Case, make_fp8
from tests.gpu.tools.waiting import no_waiting
from tests.merge_tolerance import assert_merged
from tests.mla.tolerance import assert_close_lse, assert_close_out

KERNELS = ("append_cache", "merge_states", "ragged_schedule", "mla_decode", "mla_decode_fp8")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:FlashInfer deprecates:DeprecationWarning")

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda"
Report = Callable[..., None]

dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.mla_attention, cumla.append_mla_cache, cumla.merge_attention_states)


def host(tensor: Any) -> np.ndarray:
    return to_numpy("tensor", tensor.cpu())


def states(
    count: int,
    dtype: str = "bfloat16",
    *,
    tokens: int = 13,
    heads: int = 16,
    head_dim: int = 512,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Stacked states; some are empty, in rows 0 and 1 all of them, and hold NaN there."""
    random = torch.Generator().manual_seed(1000 * seed + count)
    s = 3 * torch.randn(count, tokens, heads, generator=random)
    s[torch.rand(s.shape, generator=random) < 0.2] = -INF
    s[:, 0], s[:, 1] = -INF, INF
    v = torch.randn(count, tokens, heads, head_dim, generator=random)
    v[s.isinf()] = NAN
    return v.to(getattr(torch, dtype)).to(DEVICE), s.to(DEVICE)


def stacked_inside(*tensors: Any) -> list[Any]:
    """The layout that `merge_states` takes: the states behind the tokens."""
    return [tensor.swapaxes(0, 1).contiguous() for tensor in tensors]


def check(result: tuple[Any, Any], v: np.ndarray, s: np.ndarray) -> dict[str, float]:
    """Hold a merged state against the reference."""
    merged_v, merged_s = map(host, result)
    assert (merged_v.dtype, merged_s.dtype) == (v.dtype, np.float32)
    assert np.isneginf(merged_s[:2]).all()
    return assert_merged(merged_v, merged_s, v, s, lse_base=2)


# --- merging -------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 512), (96, 128), (128, 512)])
def test_two_states(heads: int, head_dim: int, dtype: str, record_figures: Report) -> None:
    v, s = states(2, dtype, heads=heads, head_dim=head_dim)
    with no_waiting():
        result = flashinfer.merge_state(v[0], s[0], v[1], s[1])
    assert {x.device for x in result} == {v.device}
    record_figures(check(result, host(v), host(s)))


@dtypes
@pytest.mark.parametrize("count", [1, 2, 9, 70])
def test_many_states(count: int, dtype: str, record_figures: Report) -> None:
    v, s = states(count, dtype)
    arguments = stacked_inside(v, s)
    with no_waiting():
        result = flashinfer.merge_states(*arguments)
    record_figures(check(result, host(v), host(s)))


@dtypes
def test_in_place(dtype: str, record_figures: Report) -> None:
    v, s = states(2, dtype)
    before = host(v.clone()), host(s.clone())
    with no_waiting():
        assert flashinfer.merge_state_in_place(v[0], s[0], v[1], s[1]) is None
    record_figures(check((v[0], s[0]), *before))
    assert host(v[1]).tobytes() == before[0][1].tobytes()
    assert host(s[1]).tobytes() == before[1][1].tobytes()


@dtypes
@pytest.mark.parametrize("kind", ["bool", "uint8"])
def test_masked_in_place(kind: str, dtype: str, record_figures: Report) -> None:
    v, s = states(2, dtype)
    before = host(v.clone()), host(s.clone())
    merged = np.arange(v.shape[1]) % 3 != 1
    mask = torch.from_numpy(merged).to(DEVICE, getattr(torch, kind))
    with no_waiting():
        flashinfer.merge_state_in_place(v[0], s[0], v[1], s[1], mask)
    as_merged = before[1].copy()
    as_merged[1, ~merged] = -INF
    record_figures(check((v[0], s[0]), before[0], as_merged))
    kept = ~merged[:, None] & np.isfinite(before[1][0])
    assert kept.any()
    for got, wanted in ((v, before[0]), (s, before[1])):
        assert host(got[0])[kept].tobytes() == wanted[0][kept].tobytes()
        assert host(got[1]).tobytes() == wanted[1].tobytes()


def test_a_side_stream() -> None:
    """Work that went to another stream would overtake the copies behind the sleep."""
    v, s = states(2)
    expected = host(v), host(s)
    late_v, late_s = torch.zeros_like(v), torch.zeros_like(s)
    mask = torch.ones(v.shape[1], dtype=torch.bool, device=DEVICE)

    def merge() -> tuple[Any, Any]:
        result = flashinfer.merge_state(late_v[0], late_s[0], late_v[1], late_s[1])
        flashinfer.merge_state_in_place(late_v[0], late_s[0], late_v[1], late_s[1], mask)
        return result

    merge()  # torch loads its kernels when they are first called
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late_v.copy_(v)
        late_s.copy_(s)
        result = merge()
    assert not stream.query(), "a call waited for the device"
    stream.synchronize()
    check(result, *expected)
    check((late_v[0], late_s[0]), *expected)


# --- appending -----------------------------------------------------------------------------------


class Appending:
    """Rows for half of the places of three requests, one without pages, and some for nowhere."""

    def __init__(self, dtype: str, page_size: int, *, joined: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(100 * page_size + seed)
        torch_dtype = getattr(torch, dtype)
        indptr, indices = np.array([0, 4, 4, 9], np.int32), rng.permutation(11)[:9]
        counts = page_size * np.diff(indptr)
        places = [(r, p) for r, count in enumerate(counts) for p in range(count)]
        places = [places[i] for i in rng.permutation(len(places))[: len(places) // 2]]
        nowhere = [(1, 0), (0, int(counts[0])), (-1, 0), (0, -1), (3, 0)]
        rows = torch.tensor(places + nowhere, dtype=torch.int32)
        values = torch.from_numpy(rng.standard_normal((len(rows), 576))).to(torch_dtype)
        self.expected = torch.full((11, page_size, 576), NAN, dtype=torch_dtype)
        cache = self.expected.to(DEVICE, copy=True)
        for value, (request, position) in zip(values, places, strict=False):
            page = indices[indptr[request] + position // page_size]
            self.expected[page, position % page_size] = value
        ckv_cache, kpe_cache = cache[..., :512], cache[..., 512:]
        if not joined:
            ckv_cache, kpe_cache = ckv_cache.clone(), kpe_cache.clone()
        self.caches = ckv_cache, kpe_cache
        self.arguments = (
            values[:, :512].to(DEVICE),
            values[:, 512:].to(DEVICE),
            rows[:, 0].contiguous().to(DEVICE),
            rows[:, 1].contiguous().to(DEVICE),
            *self.caches,
            torch.tensor(indices, dtype=torch.int32, device=DEVICE),
            torch.tensor(indptr, device=DEVICE),
            torch.ones(3, dtype=torch.int32, device=DEVICE),
        )

    def check(self) -> None:
        """Every bit of the pages, those of rows that nobody wrote included."""
        got = torch.cat([cache.cpu() for cache in self.caches], dim=-1)
        assert torch.equal(got.view(torch.int16), self.expected.view(torch.int16))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_go_to_their_pages(dtype: str, page_size: int, joined: bool) -> None:
    case = Appending(dtype, page_size, joined=joined)
    with no_waiting():
        assert flashinfer.append_paged_mla_kv_cache(*case.arguments) is None
    case.check()


def test_wide_page_lists_are_converted() -> None:
    case = Appending("bfloat16", 16, joined=False)
    wide = [x.long() if x.dtype == torch.int32 else x for x in case.arguments]
    with no_waiting():
        flashinfer.append_paged_mla_kv_cache(*wide)
    case.check()


# --- attention -----------------------------------------------------------------------------------


class Step:
    """A step of a server, on the host; queries of nobody and what lies behind lengths are NaN."""

    TOKENS, PAGES, PAGE_SIZE, LIST, MOST = 8, 160, 16, 170, 60

    def __init__(self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int = 16) -> None:
        rng = np.random.default_rng(sum(kv_lens))
        counts = [-(-length // self.PAGE_SIZE) for length in kv_lens]
        pages = np.split(rng.permutation(self.PAGES).astype(np.int32), np.cumsum(counts))
        table = np.full((len(counts), self.MOST), -77, np.int32)
        q = np.full((self.TOKENS, heads, 576), NAN, np.float32)
        self.end = sum(q_lens)
        q[: self.end] = rng.standard_normal((self.end, heads, 576))
        cache = np.full((self.PAGES, self.PAGE_SIZE, 576), NAN, np.float32)
        for r, length in enumerate(kv_lens):
            table[r, : counts[r]] = pages[r]
            rows = np.full((counts[r] * self.PAGE_SIZE, 576), NAN, np.float32)
            rows[:length] = 0.1 * rng.standard_normal((length, 576))
            cache[pages[r]] = rows.reshape(counts[r], self.PAGE_SIZE, 576)
        self.q = torch.from_numpy(q).to(torch.bfloat16)
        self.cache = torch.from_numpy(cache).to(torch.bfloat16)
        ends = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (q_lens, counts)]
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.csr = (*ends, torch.from_numpy(np.concatenate(pages)), lens)
        self.dense = ends[0], torch.from_numpy(table), lens
        self.settings = {
            "num_heads": heads,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": self.PAGE_SIZE,
            "causal": True,
            "sm_scale": 576**-0.5,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }

    def check(self, out: Any, lse: Any, cache: Any = None) -> dict[str, float]:
        """Hold results of the queries that are somebody's against the reference; lse to base 2."""
        qo_indptr, table, lens = map(host, self.dense)
        wanted = reference.mla_attention(
            host(self.q),
            host(self.cache if cache is None else cache),
            qo_indptr=qo_indptr,
            kv_lens=lens,
            block_table=table,
            causal=True,
            out=np.zeros((*self.q.shape[:2], 512), np.float32),
        )
        mine = slice(0, self.end)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        figures = assert_close_out(host(out)[mine].astype(np.float32), wanted.out[mine])
        lse_figures = assert_close_lse(host(lse)[mine], wanted.lse[mine] / np.log(2))
        return figures | {f"lse_{name}": value for name, value in lse_figures.items()}


STEPS = (
    ((1, 5, 0, 2), (700, 5, 33, 1)),  # the first of the last two queries sees nothing
    ((1, 1, 1, 1), (17, 900, 0, 64)),
    ((0, 0, 8, 0), (96, 7, 514, 1)),
)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_attention(heads: int, on_host: bool, record_figures: Report) -> None:
    """Positional, as in version 0.6; lengths may come from the host."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, device=DEVICE))
    for q_lens, kv_lens in STEPS:
        step = Step(q_lens, kv_lens, heads)
        q_nope, q_pe = step.q.to(DEVICE).split((512, 64), dim=-1)
        ckv, kpe = (part.contiguous() for part in step.cache.to(DEVICE).split((512, 64), dim=-1))
        lengths = step.csr if on_host else [array.to(DEVICE) for array in step.csr]
        with no_waiting():
            wrapper.plan(*lengths, *step.settings.values())
            out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
        record_figures(step.check(out, lse))
        natural = torch.empty_like(lse)
        wrapper.run(q_nope, q_pe, ckv, kpe, out, natural, return_lse_base_on_e=True)
        record_figures(step.check(out, natural / np.log(2)))


def test_new_tokens_and_their_places() -> None:
    """Nothing is waited for, and a capture sees the values of its replay."""
    indptr = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=DEVICE)
    pages = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([7, 0, 1], dtype=torch.int32, device=DEVICE)

    def places() -> tuple[Any, Any]:
        seq_lens = flashinfer.get_seq_lens(pages, last, 16)
        result: tuple[Any, Any] = flashinfer.get_batch_indices_positions(indptr, seq_lens, 9)
        return result

    with no_waiting():
        places()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whose, positions = places()
    for begin in (3, 4):
        indptr[1:3] = begin
        graph.replay()
        assert whose.tolist() == [0] * begin + [2] * (7 - begin) + [-1, -1]
        assert positions.tolist()[:7] == [*range(23 - begin, 23), *range(33 - 7 + begin, 33)]


@pytest.mark.parametrize("heads", [16, 128])
def test_a_model_without_rope(heads: int, record_figures: Report) -> None:
    """FlashInfer's head_dim_kpe of 0, eagerly and in a graph; what no query sees is NaN."""
    step = Step(*STEPS[0], heads)
    step.q[..., 512:] = 0
    step.cache[..., 512:] = 0
    q, cache = step.q[..., :512].to(DEVICE), step.cache[..., :512].to(DEVICE)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, device=DEVICE))
    settings = step.settings | {"head_dim_kpe": 0}

    def attend() -> tuple[Any, Any]:
        result: tuple[Any, Any] = wrapper.run(query=q, kv_cache=cache, return_lse=True)
        return result

    lengths = [array.to(DEVICE) for array in step.csr]
    with no_waiting():
        wrapper.plan(*lengths, *settings.values())
        eager = attend()
    record_figures(step.check(*eager))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    graph.replay()
    record_figures(step.check(*captured))


def test_a_cache_without_pages() -> None:
    step = Step((2, 1), (0, 0))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, device=DEVICE))
    q, cache = step.q.to(DEVICE), step.cache[:0].to(DEVICE)
    lengths = [array.to(DEVICE) for array in step.csr]
    with no_waiting():
        wrapper.plan(*lengths, *step.settings.values())
        out, lse = wrapper.run(query=q, kv_cache=cache, return_lse=True)
    assert not out[: step.end].any()
    assert lse[: step.end].isneginf().all()


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_a_server_loop(form: str, record_figures: Report) -> None:
    """One graph of two layers for all steps: plan, replay; metadata and tensors as in 0.7."""
    steps = [Step(*lengths) for lengths in STEPS]
    sizes = (5, 5, Step.LIST, 4)
    buffers = [torch.full((size,), -9, dtype=torch.int32, device=DEVICE) for size in sizes]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(1, device=DEVICE), True, *buffers, backend="fa3"
    )
    q = torch.empty_like(steps[0].q, device=DEVICE)
    caches = [torch.empty_like(steps[0].cache, device=DEVICE) for _ in range(2)]

    def load(step: Step) -> None:
        q.copy_(step.q)
        caches[0].copy_(step.cache)
        caches[1].copy_(-step.cache)
        metadata = getattr(flashinfer.mla.MLAPlanMetadata, form)(*getattr(step, form))
        with no_waiting():
            wrapper.plan(metadata=metadata, **step.settings)

    def attend() -> list[tuple[Any, Any]]:
        return [wrapper.run(query=q, kv_cache=cache, return_lse=True) for cache in caches]

    def check(step: Step, results: list[tuple[Any, Any]]) -> None:
        for (out, lse), cache in zip(results, (step.cache, -step.cache), strict=True):
            record_figures(step.check(out, lse, cache))

    load(steps[0])
    check(steps[0], attend())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend()
    for step in (*steps, *reversed(steps)):
        load(step)
        for out, lse in results:
            out.fill_(NAN)
            lse.fill_(NAN)
        graph.replay()
        check(step, results)
        assert all(bool(out[step.end :].isnan().all()) for out, _ in results)
    load(steps[1])
    check(steps[1], attend())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scales", ["equal", "two", "array"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_fp8_caches(page_size: int, scales: str, packed: bool, record_figures: Report) -> None:
    """Scales as FlashInfer names them; eagerly and in a graph, without waiting for the GPU."""
    cp = pytest.importorskip("cupy")
    form = "scales, e4m3 rope" if scales == "array" else "pair"
    shape = {"batch": 4, "q_len": 3, "heads": 48, "page_size": page_size}
    case = Fp8Case(**shape, form=form, operation="list")
    problem = make_fp8(cp, case, np.array([700, 33, 5, 0]))
    options: dict[str, Any] = {"ckv_scale": FACTOR, "kpe_scale": FACTOR}
    ckv, kpe, *others = (to_torch(torch, part) for part in problem.kv_cache)
    if scales == "array":
        options = {"ckv_scale_arr": others[0][:, :, 0].contiguous(), "kpe_scale": FACTOR}
    elif scales == "two":  # the query makes up for it
        options["kpe_scale"] = 4 * FACTOR
        rope = problem.q.view(cp.uint16)[..., 512:]
        rope -= cp.uint16(2 << 7)  # a quarter: no number is as small as that
    caches: dict[str, Any] = {"kv_cache": (ckv[:, :, 0], kpe[:, :, 0])}
    if packed:
        both = torch.cat([part.view(torch.uint8) for part in caches["kv_cache"]], dim=-1)
        caches["kv_cache"] = both.view(torch.float8_e4m3fn)
    given = problem.lengths_of_plan | problem.inputs
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens")
    lengths = [to_torch(torch, given[name]) for name in names]
    plain = Step((1, 1, 1, 1), (17, 9, 0, 64), heads=48).settings
    settings = plain | {"page_size": page_size, "kv_data_type": torch.float8_e4m3fn}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, device=DEVICE))
    q = to_torch(torch, problem.q)

    def attend() -> tuple[Any, Any]:
        natural = {"return_lse": True, "return_lse_base_on_e": True}
        result: tuple[Any, Any] = wrapper.run(query=q, **caches, **options, **natural)
        return result

    def check(result: tuple[Any, Any]) -> None:
        record_figures(problem.check(*(from_torch(torch, tensor) for tensor in result)))

    torch.cuda.synchronize()
    with no_waiting():
        wrapper.plan(*lengths, *settings.values())
        eager = attend()
    check(eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for tensor in captured:
        tensor.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    check(captured)


# --- graphs --------------------------------------------------------------------------------------


def test_every_function_in_one_graph() -> None:
    """Replayed with other values in the same tensors; what a replay does not write is NaN."""
    v, s = states(2)
    many_v, many_s = stacked_inside(*states(70))
    case = Appending("bfloat16", 16, joined=True)
    own_v, own_s = v[0].clone(), s[0].clone()
    mask = torch.zeros(v.shape[1], dtype=torch.bool, device=DEVICE)

    def step() -> tuple[Any, Any]:
        flashinfer.merge_state_in_place(own_v, own_s, v[1], s[1], mask)
        flashinfer.append_paged_mla_kv_cache(*case.arguments)
        return flashinfer.merge_state(v[0], s[0], v[1], s[1]), flashinfer.merge_states(
            many_v, many_s
        )

    step()  # torch loads its kernels when they are first called
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two, many = step()
    for seed in (0, 1, 2, 0):
        new_v, new_s = states(2, seed=seed)
        new_many_v, new_many_s = states(70, seed=seed)
        new_case = Appending("bfloat16", 16, joined=True, seed=seed)
        merged = torch.arange(len(mask), device=DEVICE) % 4 != seed
        pairs = [
            (v, new_v),
            (s, new_s),
            (own_v, new_v[0]),
            (own_s, new_s[0]),
            (mask, merged),
            *zip((many_v, many_s), stacked_inside(new_many_v, new_many_s), strict=True),
            *zip(case.arguments, new_case.arguments, strict=True),
        ]
        for old, new in pairs:
            old.copy_(new)
        for result in (*two, *many):
            result.fill_(NAN)
        graph.replay()
        check(two, host(new_v), host(new_s))
        check(many, host(new_many_v), host(new_many_s))
        new_s[1, ~merged] = -INF
        check((own_v, own_s), host(new_v), host(new_s))
        case.expected = new_case.expected
        case.check()
