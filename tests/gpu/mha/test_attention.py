# SPDX-License-Identifier: Apache-2.0
"""attention over its samples, against float64, with poisoned memory around all that is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import to_torch
from tests.gpu.tools.memory import Memory
from tests.gpu.tools.sanitize import multiprocessors
from tests.mha import extreme_cases
from tests.mha.attention_cases import (
    FEW_ROWS,
    NO_KEYS,
    PAIRED_COUNTS,
    PAIRS,
    Sample,
    check,
    has_few_rows,
    make,
    reads_pairs,
    samples,
    without_keys,
)

KERNELS = (
    "attention",
    "attention_decode",
    "attention_prefill",
    "attention_simt",
    "invariant_parts",
    "ragged_schedule",
)
cp: Any = pytest.importorskip("cupy")

Array = Any
Report = Callable[..., None]
BF16 = np.dtype(ml_dtypes.bfloat16)
SAMPLES = (
    *samples(200),
    *samples(30, columns=(512, 512), cache="same"),
    *samples(10, columns=(320, 264), cache="same"),
)
every_sample = pytest.mark.parametrize("s", SAMPLES, ids=lambda s: f"{s.columns[0]}-{s.seed}")


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


def bits(array: Array) -> Array:
    """The same memory, as unsigned numbers."""
    return array.view(f"u{array.dtype.itemsize}")


def on_host(array: Array) -> np.ndarray:
    return bits(array).get().view(array.dtype)


def run_on_gpu(given: dict[str, Any]) -> list[np.ndarray]:
    """Call with copies; outputs that are allocated get memory that held NaN."""
    blocks = [cp.full(1 << 22, 0xFF, dtype=cp.uint8) for _ in range(2)]
    del blocks
    memory = Memory(cp)
    results = cumla.attention(**{name: memory.upload(value) for name, value in given.items()})
    return [on_host(array) for array in results]


@every_sample
def test_grid(s: Sample, record_figures: Report) -> None:
    got, expected = run_on_gpu(make(s)), cumla.reference.attention(**make(s))
    record_figures(check(s, got, expected))


@pytest.mark.parametrize("s", SAMPLES[::8], ids=lambda s: str(s.seed))
def test_repeats_are_the_same_to_the_bit(s: Sample) -> None:
    given = make(s) | {"out": None, "lse": None}
    memory = Memory(cp)
    there = {name: memory.upload(value) for name, value in given.items()}
    rows = slice(0, int(given["qo_indptr"][-1])) if "qo_indptr" in given else slice(None)
    runs = [[bits(a)[rows] for a in cumla.attention(**there)] for _ in range(20)]
    for run in runs[1:]:
        for one, other in zip(run, runs[0], strict=True):
            assert bool((one == other).all())


@pytest.mark.parametrize(
    "s",
    [s for fixed in PAIRS for s in samples(8, **fixed)],
    ids=lambda s: f"{s.columns[1]}-{s.dtype}-{s.seed}",
)
def test_two_kv_heads_of_a_thread_block(s: Sample, record_figures: Report) -> None:
    """Twice each, to the same bits."""
    given, expected = make(s), cumla.reference.attention(**make(s))
    rows = slice(0, int(given["qo_indptr"][-1])) if "qo_indptr" in given else slice(None)
    for count in PAIRED_COUNTS:
        with multiprocessors(count):
            memory = Memory(cp)
            assert s.dtype == "float32" or reads_pairs(
                {n: memory.upload(a) for n, a in given.items()}
            )
            got, again = run_on_gpu(make(s)), run_on_gpu(make(s))
        record_figures(check(s, got, expected))
        for one, other in zip(got, again, strict=True):
            assert (bits(one)[rows] == bits(other)[rows]).all()


@pytest.mark.parametrize(
    "s",
    [s for fixed in FEW_ROWS for s in samples(8, **fixed)],
    ids=lambda s: f"{s.columns[0]}-{s.dtype}-{s.outputs}-{s.seed}",
)
@pytest.mark.parametrize("count", [13, 132])
def test_few_rows(s: Sample, count: int, record_figures: Report) -> None:
    """Twice each, to the same bits."""
    given, expected = make(s), cumla.reference.attention(**make(s))
    with multiprocessors(count):
        memory = Memory(cp)
        assert has_few_rows({n: memory.upload(a) for n, a in given.items()})
        got, again = run_on_gpu(make(s)), run_on_gpu(make(s))
    record_figures(check(s, got, expected))
    for one, other in zip(got, again, strict=True):
        assert (bits(one) == bits(other)).all()


@pytest.mark.parametrize("s", samples(60, dtype="float32"), ids=lambda s: str(s.seed))
def test_without_tensor_cores(s: Sample, record_figures: Report) -> None:
    got, expected = run_on_gpu(make(s)), cumla.reference.attention(**make(s))
    record_figures(check(s, got, expected))


@pytest.mark.parametrize("s", samples(40, cache="e4m3"), ids=lambda s: str(s.seed))
def test_cuts_at_fixed_positions(s: Sample, record_figures: Report) -> None:
    got = run_on_gpu(make(s) | {"batch_invariant": True})
    record_figures(check(s, got, cumla.reference.attention(**make(s))))


# --- e4m3 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_e4m3_number(dtype: str, columns: int) -> None:
    """Each of the 254 codes that are numbers is the only value of a request; NaN nobody sees."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    v = np.full((len(codes), 4, 2, columns), 0x7F, np.uint8)  # pages of 4 tokens, one of which is
    v[:, 0] = codes[:, None, None]
    k = np.full_like(v, 0xFF)
    k[:, 0] = codes[::-1, None, None]
    given = {
        "q": np.ones((len(codes), 1, 8, columns), {"bfloat16": BF16}.get(dtype, np.float16)),
        "k": k,
        "v": v,
        "kv_lens": np.ones(len(codes), np.int32),
        "block_table": np.arange(len(codes), dtype=np.int32)[:, None],
        "k_scale": 2.0**-9,
        "v_scale": np.float32([[1, 2]]).repeat(len(codes), axis=0),
    }
    out, lse = run_on_gpu(given)
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = numbers[:, None] * np.repeat([1.0, 2.0], 4)
    assert (out[:, 0, :, 0].astype(np.float64) == values).all()
    assert (out == out[..., :1]).all()
    scores = numbers[::-1] * 2.0**-9 * columns**0.5
    np.testing.assert_allclose(lse[:, 0], np.repeat(scores[:, None], 8, 1), rtol=1e-5, atol=1e-6)


def test_factors_may_change_between_replays() -> None:
    """They are read by the kernel: a graph has the address."""
    rng = np.random.default_rng(4)
    cache = rng.standard_normal((2, 20, 16, 2, 64), np.float32).astype(ml_dtypes.float8_e4m3fn)
    host = {
        "q": rng.standard_normal((2, 1, 8, 64), np.float32).astype(BF16),
        "k": cache[0],
        "v": cache[1],
        "block_table": rng.permutation(20).reshape(2, 10).astype(np.int32),
        "k_scale": np.ones(1, np.float32),
        "v_scale": np.ones(1, np.float32),
    }
    there = {name: Memory(cp).upload(value) for name, value in host.items()}
    kv_lens = cp.asarray(np.array([150, 7], np.int32))
    plan = cumla.AttentionPlan.from_arrays(there["q"], there["k"], there["v"])
    plan.prepare()
    outputs = {
        "out": cp.zeros((2, 1, 8, 64), dtype=cp.uint16).view(BF16),
        "lse": cp.zeros((2, 1, 8), dtype=cp.float32),
    }
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(kv_lens)
        plan.run(**there, **outputs)
        graph = stream.end_capture()
    for factor in (0.5, 3.0):
        for name in ("k_scale", "v_scale"):
            there[name].set(np.full(1, factor, np.float32))
        cp.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        expected = cumla.attention(**there, kv_lens=kv_lens)
        for name, other in zip(("out", "lse"), expected, strict=True):
            assert bool((bits(outputs[name]) == bits(other)).all())


# --- numbers at the ends of 16 and 32 bits --------------------------------------------------------


def check_extremes(given: dict[str, Any]) -> None:
    """On few multiprocessors, where requests are cut or row tiles whole, and on all."""
    with multiprocessors(4):
        extreme_cases.check(given, run_on_gpu(given))
    extreme_cases.check(given, run_on_gpu(given))


@pytest.mark.parametrize("sinks", extreme_cases.SINKS.values(), ids=[*extreme_cases.SINKS])
@pytest.mark.parametrize("form", extreme_cases.FORMS)
def test_high_sinks(form: str, sinks: tuple[float, ...]) -> None:
    """They take all of the weight, or nearly all: what is left is as exact as without them."""
    check_extremes(extreme_cases.make(form) | {"sinks": np.array(sinks, np.float32)})


@pytest.mark.parametrize("softcap", extreme_cases.CAPS)
@pytest.mark.parametrize("form", extreme_cases.FORMS)
def test_high_caps(form: str, softcap: float) -> None:
    """Of scores near 0, and of some as high as the lowest cap."""
    for scale in (1.0, 8.0):
        check_extremes(extreme_cases.make(form, scale=scale) | {"softcap": softcap})


@pytest.mark.parametrize("factor", extreme_cases.FACTORS)
@pytest.mark.parametrize("form", extreme_cases.E4M3_FORMS)
def test_factors_at_the_ends_of_float32(form: str, factor: float) -> None:
    for options in ({}, {"softcap": 1e-3}):
        for scale in (0.1, 1e3):
            check_extremes(extreme_cases.make_factors(form, factor, scale) | options)


# --- batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_bits_of_a_request_do_not_depend_on_its_neighbours(cache: str) -> None:
    arguments = mixed(128, 16, (32, 8))
    if cache == "e4m3":
        arguments |= {n: arguments[n].astype(ml_dtypes.float8_e4m3fn) for n in "kv"}
    bounds = arguments["qo_indptr"]
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    outputs = poisoned(arguments)
    whole = cumla.attention(**there, **outputs, batch_invariant=True)
    agree(whole, cumla.reference.attention(**arguments), bounds)
    for batch in ([1], [7, 11], [10, 1, 6]):
        rows = np.concatenate([np.arange(bounds[r], bounds[r + 1]) for r in batch])
        ends = np.cumsum([0, *(MIXED_Q[r] for r in batch)]).astype(np.int32)
        some = there | {
            "q": there["q"][cp.asarray(rows)],
            "kv_lens": there["kv_lens"][cp.asarray(batch)],
            "qo_indptr": cp.asarray(ends),
            "block_table": there["block_table"][cp.asarray(batch)],
        }
        alone = cumla.attention(**some, batch_invariant=True)
        for one, other in zip(alone, whole, strict=True):
            assert bool((bits(one) == bits(other)[cp.asarray(rows)]).all())


@pytest.mark.parametrize(
    ("columns", "heads", "page_size"), [(128, (32, 8), 64), (64, (8, 1), 16), (256, (4, 4), 64)]
)
def test_a_plan_that_cuts_nothing_decodes_with_the_bits_of_a_prefill(
    columns: int, heads: tuple[int, int], page_size: int
) -> None:
    """Each row of a prefill is that of a chunk, of drafts and of a single token."""
    tokens, rng = 3000, np.random.default_rng(columns)
    pages = -(-tokens // page_size)
    shape = pages, page_size, heads[1], columns
    k, v = (cp.asarray(rng.standard_normal(shape).astype(BF16)) for _ in "kv")
    q = cp.asarray(rng.standard_normal((tokens, heads[0], columns)).astype(BF16))
    table = cp.asarray(rng.permutation(pages).astype(np.int32)[None])

    def rows_to(last: int, count: int) -> list[Array]:
        """Bits of the last `count` of the first `last` tokens."""
        ends = cp.asarray(np.array([0, count], np.int32))
        some = q[last - count : last]
        plan = cumla.AttentionPlan.from_arrays(
            some, k, v, qo_indptr=ends, batch_invariant=True, max_kv_len=1
        )
        plan.update(cp.asarray(np.array([last], np.int32)), qo_indptr=ends)
        return [bits(array) for array in plan.run(some, k, v, block_table=table)]

    whole = rows_to(tokens, tokens)
    for last, count in ((1, 1), (64, 1), (1025, 1), (3000, 1), (2000, 4), (1700, 500), (3000, 65)):
        for one, other in zip(rows_to(last, count), whole, strict=True):
            assert bool((one == other[last - count : last]).all()), (last, count)


# --- a mix ----------------------------------------------------------------------------------------

MIXED_Q = (0, 1, 2, 3, 4, 5, 17, 64, 65, 114, 514, 1, 1, 0)
MIXED_KV = (50, 8736, 1, 3, 700, 0, 64, 4000, 65, 200, 3000, 30_000, 1000, 0)
"""Decoding, drafts and chunks of a prefill; some requests have fewer tokens than queries."""


def mixed(
    columns: int = 128, page_size: int = 16, heads: tuple[int, int] = (32, 8), **options: Any
) -> dict[str, Any]:
    """Rows 3 to n - 5 have a request; pages that no request has hold NaN."""
    rng = np.random.default_rng(columns)
    counts = [-(-n // page_size) for n in MIXED_KV]
    total = sum(counts) + 2
    table = np.full((len(counts), max(counts)), 2**31 - 1, np.int32)
    order = rng.permutation(total)
    for request, count in enumerate(counts):
        begin = sum(counts[:request])
        table[request, :count] = order[begin : begin + count]
    caches = {}
    for name in "kv":
        cache = rng.standard_normal((total, page_size, heads[1], columns), np.float32).astype(BF16)
        cache[order[-2:]] = np.nan
        caches[name] = cache
    tokens = sum(MIXED_Q) + 8
    return {
        "q": rng.standard_normal((tokens, heads[0], columns), np.float32).astype(BF16),
        **caches,
        "kv_lens": np.array(MIXED_KV, np.int32),
        "qo_indptr": 3 + np.cumsum([0, *MIXED_Q]).astype(np.int32),
        "block_table": table,
        **options,
    }


def poisoned(arguments: dict[str, Any]) -> dict[str, Array]:
    tokens, heads, _ = arguments["q"].shape
    columns = arguments["v"].shape[-1]
    out = cp.full((tokens, heads, columns), 0xFFFF, dtype=cp.uint16).view(BF16)
    return {"out": out, "lse": cp.full((tokens, heads), np.nan, dtype=cp.float32)}


def agree(got: Any, expected: Any, bounds: np.ndarray) -> None:
    """The rows of requests agree, all others are poison."""
    out, lse = (on_host(array) for array in got)
    some = slice(int(bounds[0]), int(bounds[-1]))
    for array in (out, lse):
        for rest in (array[: some.start], array[some.stop :]):
            assert np.isnan(rest.astype(np.float32)).all()
    want, want_lse = (np.asarray(array[some], np.float64) for array in expected)
    seen = np.isfinite(want_lse)
    assert (np.isneginf(lse[some]) == np.isneginf(want_lse)).all()
    assert (np.abs(lse[some][seen] - want_lse[seen]) <= 1e-4).all()
    errors = np.linalg.norm(out[some].astype(np.float64) - want, axis=-1)
    assert (errors <= 6e-3 * np.linalg.norm(want, axis=-1) + 1e-6).all()


@pytest.mark.parametrize(
    ("columns", "page_size", "heads", "options"),
    [
        (64, 16, (64, 8), {"window": 127, "sinks": np.linspace(-3, 9, 64, dtype=np.float32)}),
        (128, 64, (32, 8), {}),
        (128, 3, (12, 1), {"causal": False, "window": (1000, 20)}),
        (256, 16, (16, 2), {"softcap": 30.0}),
        (96, 128, (5, 5), {"softmax_scale": 0.2}),
    ],
)
def test_a_mix(
    columns: int, page_size: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    arguments = mixed(columns, page_size, heads, **options)
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    got = cumla.attention(**there, **poisoned(arguments))
    agree(got, cumla.reference.attention(**arguments), arguments["qo_indptr"])


# --- what does not exist --------------------------------------------------------------------------


def garbage(rng: np.random.Generator, shape: Any, small: int) -> np.ndarray:
    limits = np.iinfo(np.int32)
    wild = rng.integers(limits.min, limits.max, shape, np.int32, endpoint=True)
    wild = np.where(rng.random(shape) < 0.5, rng.choice([limits.min, limits.max], shape), wild)
    return np.where(rng.random(shape) < 0.7, rng.integers(-1, small, shape), wild).astype(np.int32)


def check_garbage(seed: int, page_size: int, tokens: int, cache: Any) -> None:
    """Lengths and page numbers as in the reference; offsets of any kind lead nowhere."""
    rng = np.random.default_rng(seed)
    batch, num_pages = 7, 20
    pages = rng.standard_normal((2, num_pages, page_size, 2, 64), np.float32).astype(cache)
    arguments = {
        "q": rng.standard_normal((tokens, 8, 64), np.float32).astype(BF16),
        "k": pages[0],
        "v": pages[1],
        "kv_lens": garbage(rng, batch, 12 * page_size),
        "qo_indptr": np.sort(rng.integers(0, tokens + 1, batch + 1)).astype(np.int32),
        "block_table": garbage(rng, (batch, 12), num_pages + 1),
    }
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    got = cumla.attention(**there, **poisoned(arguments))
    agree(got, cumla.reference.attention(**arguments), arguments["qo_indptr"])
    table = there.pop("block_table")
    wild = {
        "qo_indptr": cp.asarray(garbage(rng, batch + 1, tokens)),
        "kv_indices": table.reshape(-1),
        "kv_indptr": cp.asarray(garbage(rng, batch + 1, 80)),
    }
    guarded = cp.full((3, tokens, 8, 64), 0xFFFF, dtype=cp.uint16)
    cumla.attention(**there | wild, out=guarded[1].view(BF16))
    assert bool((guarded[::2] == 0xFFFF).all())


@pytest.mark.parametrize("page_size", [3, 16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_garbage_everywhere(seed: int, page_size: int) -> None:
    check_garbage(seed, page_size, 300, BF16)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "e4m3", "float32"])
@pytest.mark.parametrize("queries", [1, 300, 4096])
@pytest.mark.parametrize("form", NO_KEYS)
def test_keys_of_zero_bytes(form: str, queries: int, dtype: str, page_size: int) -> None:
    """The torch tensors have address 0; a plan in a graph gives the same."""
    torch = pytest.importorskip("torch")
    given = without_keys(form, queries, dtype, page_size)
    kinds = {"e4m3": torch.float8_e4m3fn}
    there = {
        name: torch.empty(array.shape, dtype=kinds.get(dtype) or getattr(torch, dtype)).cuda()
        if name in ("k", "v")
        else torch.empty(array.shape, dtype=torch.int32).cuda()
        if not array.size
        else to_torch(torch, cp.asarray(array))
        for name, array in given.items()
    }
    assert there["k"].data_ptr() == there["v"].data_ptr() == 0
    out, lse = cumla.attention(**there)
    expected = cumla.reference.attention(**given)[1]
    plan = cumla.AttentionPlan.from_arrays(
        there["q"], there["k"], there["v"], qo_indptr=there["qo_indptr"]
    )
    plan.prepare()
    names = [name for name in ("kv_lens", "qo_indptr", "kv_indptr") if name in there]
    rest = {name: array for name, array in there.items() if name not in names}
    again = torch.full_like(out, 7), torch.full_like(lse, 7)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.update(**{name: there[name] for name in names})
        plan.run(**rest, out=again[0], lse=again[1])
    graph.replay()
    torch.cuda.synchronize()
    for values, sums in ((out, lse), again):
        assert not bool(values.any())
        np.testing.assert_allclose(sums.cpu().numpy(), expected, rtol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    """The last pages of a cache of more than 2^32 elements, and the same pages alone."""
    num_pages, page_size, heads, columns = 270_000, 16, 8, 128
    nbytes = 2 * num_pages * page_size * heads * columns
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < nbytes + (4 << 30):
        pytest.skip("needs 13 GB of free memory")
    base = cp.zeros((num_pages, page_size, heads, columns), dtype=cp.uint16)
    assert base.size > 1 << 32
    rng = np.random.default_rng(0)
    few = rng.standard_normal((40, page_size, heads, columns), np.float32).astype(BF16)
    base[-40:] = cp.asarray(few.view(np.uint16))
    q = Memory(cp).upload(rng.standard_normal((2, 1, 32, columns), np.float32).astype(BF16))
    table = cp.arange(40, dtype=cp.int32).reshape(2, 20)
    kv_lens = cp.asarray(np.array([320, 100], np.int32))
    alone = base[-40:].copy().view(BF16)
    expected = cumla.attention(q, alone, alone, kv_lens=kv_lens, block_table=table)
    whole, table = base.view(BF16), table + num_pages - 40
    got = cumla.attention(q, whole, whole, kv_lens=kv_lens, block_table=table)
    for one, other in zip(got, expected, strict=True):
        assert bool((bits(one) == bits(other)).all())


# --- plans ----------------------------------------------------------------------------------------

LATER = (
    ((1, 1, 1, 1), (3000, 5, 64, 2999)),
    ((0, 200, 0, 24), (0, 3000, 7, 20)),
    ((0, 0, 0, 0), (3000, 3000, 3000, 3000)),
    ((64, 64, 64, 64), (64, 65, 3000, 1)),
    ((256, 0, 0, 0), (3000, 0, 0, 0)),
)


@pytest.mark.parametrize("pages", ["table", "list"])
@pytest.mark.parametrize("window", [None, 200])
def test_a_graph_serves_whatever_lengths_the_arrays_hold(window: int | None, pages: str) -> None:
    """At the same most requests and query tokens; rows of nobody stay as they are."""
    rng = np.random.default_rng(5)
    cache = rng.standard_normal((2, 800, 16, 2, 128), np.float32).astype(BF16)
    table = rng.permutation(800)[:752].reshape(4, 188).astype(np.int32)
    places: dict[str, Any] = {"block_table": table}
    if pages == "list":
        starts = np.arange(5, dtype=np.int32) * 188
        places = {"kv_indices": table.reshape(-1), "kv_indptr": starts}
    arguments = {
        "q": rng.standard_normal((256, 16, 128), np.float32).astype(BF16),
        "k": cache[0],
        "v": cache[1],
        "sinks": np.linspace(-2, 6, 16, dtype=np.float32),
        **places,
    }
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    lengths = {
        "kv_lens": cp.zeros(4, dtype=cp.int32),
        "qo_indptr": cp.zeros(5, dtype=cp.int32),
    }
    plan = cumla.AttentionPlan.from_arrays(
        there["q"], there["k"], there["v"], qo_indptr=lengths["qo_indptr"], window=window
    )
    plan.prepare()
    outputs = poisoned(arguments)
    update = lengths | {n: a for n, a in there.items() if n == "kv_indptr"}
    inputs = {n: a for n, a in there.items() if n != "kv_indptr"}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(**update)
        plan.run(**inputs, **outputs)
        graph = stream.end_capture()
    for q_lens, kv_lens in LATER:
        host = {
            "qo_indptr": np.cumsum([0, *q_lens]).astype(np.int32),
            "kv_lens": np.array(kv_lens, np.int32),
        }
        for name, array in host.items():
            lengths[name].set(array)
        for array in outputs.values():
            bits(array)[...] = 0xFFFF if array.dtype == BF16 else 0x7FC00000
        cp.cuda.Device().synchronize()
        graph.launch(stream=stream)
        stream.synchronize()
        expected = cumla.reference.attention(**arguments, **host, window=window)
        agree(outputs.values(), expected, host["qo_indptr"])


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_plan_gives_the_bits_of_a_call(columns: int) -> None:
    """Again and again, with garbage in its buffer before each update."""
    arguments = mixed(columns, heads=(16, 2))
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    expected = cumla.attention(**there, **poisoned(arguments))
    sizes = {"num_kv_heads": 2, "head_dim_v": columns}
    tokens = len(arguments["q"])
    nbytes = cumla.AttentionPlan.workspace_bytes(len(MIXED_Q), tokens, 16, columns, **sizes)
    buffer = cp.empty(nbytes + 4096, cp.uint8)
    lengths = {n: there.pop(n) for n in ("kv_lens", "qo_indptr")}
    plan = cumla.AttentionPlan.from_arrays(
        there["q"],
        there["k"],
        there["v"],
        qo_indptr=lengths["qo_indptr"],
        workspace=buffer[:nbytes],
    )
    for byte in (0xFF, 0x00, 0x7F):
        buffer[...] = byte
        plan.update(**lengths)
        for _ in range(20):
            got = plan.run(**there, **poisoned(arguments))
            for one, other in zip(got, expected, strict=True):
                assert bool((bits(one) == bits(other)).all())
        assert bool((buffer[nbytes:] == byte).all()), "memory behind the workspace was written"


# --- streams and frameworks -----------------------------------------------------------------------


def test_a_side_stream() -> None:
    """Lengths that are written there, and late, are seen; the call does not wait."""
    arguments = mixed()
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    expected = cumla.attention(**there, **poisoned(arguments))
    outputs = poisoned(arguments)
    late = cp.zeros_like(there["kv_lens"])
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        late[...] = there["kv_lens"]
        got = cumla.attention(**there | {"kv_lens": late}, **outputs)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    for one, other in zip(got, expected, strict=True):
        assert bool((bits(one) == bits(other)).all())


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    arguments = mixed(64, heads=(8, 2))
    there = {n: Memory(cp).upload(a) for n, a in arguments.items()}
    expected = cumla.attention(**there)
    cp.cuda.Device().synchronize()
    out, lse = cumla.attention(**{n: to_torch(torch, a) for n, a in there.items()})
    torch.cuda.synchronize()
    rows = slice(3, -5)
    assert out.dtype == torch.bfloat16
    theirs = to_torch(torch, expected.out).view(torch.int16)
    assert torch.equal(out.view(torch.int16)[rows], theirs[rows])
    assert torch.equal(lse[rows], to_torch(torch, expected.lse)[rows])


def test_append_and_attend() -> None:
    """What one kernel writes the next one reads, though it may start before the first one ends."""
    rng = np.random.default_rng(0)
    tokens, batch = 8, 8
    host = {n: rng.standard_normal((tokens, 4, 128), np.float32).astype(BF16) for n in "kv"}
    caches = [cp.zeros((batch, 64, 4, 128), dtype=cp.uint16).view(BF16) for _ in range(2)]
    new = {n: Memory(cp).upload(a) for n, a in host.items()}
    places = {
        "kv_lens": cp.ones(batch, dtype=cp.int32),
        "block_table": cp.arange(batch, dtype=cp.int32).reshape(batch, 1),
    }
    q = Memory(cp).upload(rng.standard_normal((batch, 1, 32, 128), np.float32).astype(BF16))
    rows = {n: a.reshape(batch, 1, 4, 128) for n, a in new.items()}
    for _ in range(20):
        for cache in caches:
            bits(cache)[...] = 0xFFFF
        cumla.append_kv_cache(**rows, k_cache=caches[0], v_cache=caches[1], **places)
        out, _ = cumla.attention(q, *caches, **places)
        values = np.repeat(host["v"], 8, axis=1)  # one key: its value
        assert (on_host(out)[:, 0].view(np.uint16) == values.view(np.uint16)).all()
