# SPDX-License-Identifier: Apache-2.0
"""Attention with masks against float64: all that no query of a request sees holds NaN."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import AttentionMask
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.memory import Memory
from tests.gpu.tools.sanitize import multiprocessors
from tests.mha.test_attention_mask import (
    FACTORS,
    PAIRS,
    check,
    make,
    of_pairs,
    reads_pairs,
    samples,
)

KERNELS = ("attention", "attention_prefill", "attention_simt", "ragged_schedule_numbered")
cp: Any = pytest.importorskip("cupy")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = (BF16, np.dtype(np.float16), BF16, np.dtype(np.float32))
LEAST, MOST = -(2**31), 2**31 - 1
COLUMNS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (72, 40))
MASKS = ("window", "random", "extreme", "chunks", "prefix", "tree", "any tree", "causal")


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


def on_gpu(memory: Memory, mask: AttentionMask) -> AttentionMask:
    given = {field.name: getattr(mask, field.name) for field in fields(mask)}
    return AttentionMask(**{n: None if a is None else memory.upload(a) for n, a in given.items()})


def on_host(array: Any) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}").get().view(array.dtype)


@pytest.mark.parametrize("sample", samples(252), ids=lambda s: f"{s.mask}-{s.seed}")
def test_grid(sample: Any) -> None:
    problem, memory = make(sample), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    got = cumla.attention(**given, mask=on_gpu(memory, problem.mask))
    out, lse = (on_host(array) for array in got)
    check(problem, cumla.AttentionState(out, lse), sample.dtype)


@pytest.mark.parametrize("sample", samples(84), ids=lambda s: f"{s.mask}-{s.seed}")
def test_split_keys(sample: Any) -> None:
    """Drafts of one request, in row tiles whose keys are split."""
    fixed = {"q_lens": (40 + sample.seed % 50,), "heads": (16, 1), "cache": "same"}
    problem, memory = make(sample._replace(**fixed)), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    with multiprocessors(12 + sample.seed % 4):
        got = cumla.attention(**given, mask=on_gpu(memory, problem.mask))
    out, lse = (on_host(array) for array in got)
    check(problem, cumla.AttentionState(out, lse), sample.dtype)


@pytest.mark.parametrize("which", range(len(PAIRS)))
@pytest.mark.parametrize("mask", FACTORS["mask"])
def test_two_kv_heads_of_a_thread_block(mask: str, which: int) -> None:
    problem, memory = of_pairs(mask, which), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    with multiprocessors(PAIRS[which][-1]):
        assert reads_pairs(problem, memory.upload)
        got = cumla.attention(**given, mask=on_gpu(memory, problem.mask))
    out, lse = (on_host(array) for array in got)
    check(problem, cumla.AttentionState(out, lse), "bfloat16")


# --- long requests --------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A call with long requests, its mask, and what each request's queries see."""

    given: dict[str, Any]
    keys: list[tuple[Any, Any]]
    mask: AttentionMask
    visible: list[np.ndarray]
    begins: np.ndarray


def mask_of(kind: str, rng: Any, lens: Any, counts: Any, total: int) -> tuple[dict[str, Any], bool]:
    """Choose the arrays of a mask, and whether the call is causal."""
    padding = np.zeros(total - counts.sum(), np.int64)
    of_rows = np.append(np.repeat(lens, counts), padding)
    positions = [np.arange(length - n, length) for length, n in zip(lens, counts, strict=True)]
    at = np.concatenate([*positions, padding]).astype(np.int64)
    some = rng.integers(1, 300)
    arrays: dict[str, Any] = {"start": at * 0}
    if kind == "window":
        arrays = {"start": at - some}
        if rng.integers(2):
            arrays["end"] = np.minimum(at + rng.integers(50), of_rows - 1)
    elif kind == "random":
        arrays = {"start": rng.integers(-5, of_rows + 3)}
        arrays["end"] = arrays["start"] + rng.integers(-3, of_rows + 5)
    elif kind == "extreme":
        numbers = np.array([LEAST, MOST, -1, 0, 1, 7])
        arrays = {name: numbers[rng.integers(6, size=total)] for name in ("start", "end")}
    elif kind == "chunks":
        arrays = {"start": at // some * some}
    elif kind == "prefix":
        arrays = {"start": at - some // 8, "prefix_len": rng.integers(-3, lens + 5)}
    elif "tree" in kind:
        words = rng.integers(1, 9)
        arrays = {"tree": rng.integers(0, 2**32, (total, words))}
        if kind == "any tree":
            arrays["tree"] &= rng.integers(0, 2**32, (total, words))
            arrays["tree_start"] = rng.integers(-300, lens + 300)
            arrays["start"] = at - some
            arrays["prefix_len"] = rng.integers(-3, lens + 5)
    return {
        name: np.asarray(array).astype(np.uint32 if name == "tree" else np.int32)
        for name, array in arrays.items()
    }, bool(kind == "causal" or rng.integers(2))


def visible_to(
    arrays: dict[str, Any], causal: bool, request: int, row: int, at: int, length: int, first: int
) -> np.ndarray:
    """Tell which keys a query row of a request sees; `first` is the position of its first one."""
    key = np.arange(length)
    end = arrays["end"][row] if "end" in arrays else at if causal else length - 1
    seen = (key >= (arrays["start"][row] if "start" in arrays else 0)) & (key <= end)
    if "prefix_len" in arrays:
        seen |= key < arrays["prefix_len"][request]
    if "tree" in arrays:
        bits = arrays["tree"][row]
        begin = int(arrays["tree_start"][request]) if "tree_start" in arrays else first
        bit = key - begin
        is_set = bits[(bit // 32).clip(0, len(bits) - 1)] >> (bit % 32).astype(np.uint32) & 1
        in_tree = (bit >= 0) & (bit < 32 * len(bits)) & (is_set != 0)
        seen = np.where(key >= begin, in_tree, seen)
    return seen


def make_long(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    columns = COLUMNS[seed % 6]
    dtype = DTYPES[rng.integers(4)]
    fits = dtype.itemsize == 2 and max(columns) <= 256 and columns[1] % 16 == 0
    cache = E4M3 if fits and columns[0] % 16 == 0 and rng.integers(4) == 0 else dtype
    page = int(rng.choice([1, 5, 8, 16, 64, 256]))
    kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4, 7, 16]))
    batch = int(rng.integers(1, 5))
    if dtype.itemsize == 4:
        kv_heads, group = 1, min(group, 4)
    is_prefill = rng.integers(3) == 0
    lens = rng.integers(0, 2500 if is_prefill else 1500, batch)
    if is_prefill:
        kv_heads = 4 if group < 16 else 2
        counts = np.minimum(rng.integers(200, 1400, batch), lens)
    else:
        counts = np.minimum(rng.integers(0, rng.choice([1, 5, 80]) + 1, batch), lens)
    if rng.integers(3) == 0:
        counts = np.full(batch, min(lens.min(), counts.max()))
    is_uniform = counts.min() == counts.max() > 0 and rng.integers(2)
    total = int(counts.sum()) + (0 if is_uniform else int(rng.integers(3)))
    begins = np.cumsum([0, *counts])
    arrays, causal = mask_of(MASKS[seed // 6 % len(MASKS)], rng, lens, counts, total)

    per = max(1, -(-int(lens.max()) // page))
    table = rng.permutation(batch * per + 3)[: batch * per].reshape(batch, per).astype(np.int32)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    pools = [np.full((batch * per + 3, page, kv_heads, n), np.nan, cache) for n in columns]
    keys, seen = [], []
    for r in range(batch):
        rows = range(begins[r], begins[r + 1])
        at = [int(lens[r]) - len(rows) + i for i in range(len(rows))]
        see = [
            visible_to(arrays, causal, r, row, p, int(lens[r]), at[0])
            for row, p in zip(rows, at, strict=True)
        ]
        see_all = np.array(see).reshape(len(rows), int(lens[r]))
        own = [numbers(int(lens[r]), kv_heads, n).astype(cache) for n in columns]
        for pool, part in zip(pools, own, strict=True):
            hidden = np.where(see_all.any(axis=0)[:, None, None], part, np.full_like(part, np.nan))
            token = np.arange(len(part))
            pool[table[r][token // page], token % page] = hidden
        keys.append((own[0], own[1]))
        seen.append(see_all)
    q = numbers(total, kv_heads * group, columns[0]).astype(dtype)
    given: dict[str, Any] = {"q": q, "k": pools[0], "v": pools[1], "kv_lens": lens.astype(np.int32)}
    if is_uniform:
        given["q"] = q.reshape(batch, -1, *q.shape[1:])
    else:
        given["qo_indptr"] = begins.astype(np.int32)
    if rng.integers(3) == 0:
        given["kv_indptr"] = (np.arange(batch + 1) * per).astype(np.int32)
        given["kv_indices"] = table.reshape(-1)
    else:
        given["block_table"] = table
    given |= {"causal": causal, **options(rng, kv_heads * group)}
    return Problem(given, keys, AttentionMask(**arrays), seen, begins)


def options(rng: Any, heads: int) -> dict[str, Any]:
    return {
        "batch_invariant": bool(rng.integers(6) == 0),
        "softcap": 20.0 if rng.integers(4) == 0 else None,
        "sinks": rng.standard_normal(heads, np.float32) if rng.integers(3) == 0 else None,
    }


def expected_of(problem: Problem, request: int) -> tuple[Any, Any]:
    """Attend in float64 on the GPU."""
    given, (k, v), visible = problem.given, problem.keys[request], problem.visible[request]
    rows = slice(problem.begins[request], problem.begins[request + 1])
    q = given["q"].reshape(-1, *given["q"].shape[-2:])[rows]
    seen = visible.any(axis=0)[:, None, None]
    q, k, v = (
        cp.asarray(a.astype(np.float64)) for a in (q, np.where(seen, k, 0), np.where(seen, v, 0))
    )
    q = q.reshape(len(q), k.shape[1], -1, k.shape[2])
    scores = cp.einsum("nhgd,lhd->hgnl", q, k) * k.shape[2] ** -0.5
    if given["softcap"]:
        scores = given["softcap"] * cp.tanh(scores / given["softcap"])
    weights = cp.exp(scores) * cp.asarray(visible)
    total = weights.sum(axis=-1)
    if given["sinks"] is not None:
        sinks = cp.asarray(given["sinks"].astype(np.float64))
        total = total + cp.exp(sinks).reshape(*total.shape[:2], 1)
    out = cp.einsum("hgnl,lhd->nhgd", weights / cp.where(total, total, 1)[..., None], v)
    lse = cp.log(total).transpose(2, 0, 1)
    return out.reshape(len(q), -1, v.shape[2]).get(), lse.reshape(len(q), -1).get()


@pytest.mark.parametrize("seed", range(192))
def test_long_requests(seed: int) -> None:
    problem, memory = make_long(seed), Memory(cp)
    given = {
        name: memory.upload(value) if isinstance(value, np.ndarray) else value
        for name, value in problem.given.items()
    }
    mask, q = on_gpu(memory, problem.mask), problem.given["q"]
    if not q.size:
        return
    runs = []
    for _ in range(3):
        result = cumla.attention(**given, mask=mask)
        out, lse = on_host(result.out), on_host(result.lse)
        assert lse.shape == out.shape[:-1]
        runs.append((out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])))
    out, lse = runs[0]
    rows = slice(0, problem.begins[-1])
    for other in runs[1:]:
        assert other[0][rows].tobytes() == out[rows].tobytes()
        assert other[1][rows].tobytes() == lse[rows].tobytes()
    kind = "e4m3" if problem.given["k"].dtype == E4M3 else str(q.dtype)
    close = {"float32": 1e-5, "float16": 4e-3}.get(kind, 1.6e-2)
    for r in range(len(problem.keys)):
        own = slice(problem.begins[r], problem.begins[r + 1])
        if own.start == own.stop:
            continue
        wanted, of_lse = expected_of(problem, r)
        np.testing.assert_allclose(out[own].astype(np.float64), wanted, rtol=close, atol=close)
        np.testing.assert_allclose(lse[own], of_lse, rtol=1e-4, atol=2e-3)


def test_graphs_see_other_arrays() -> None:
    """A captured run reads the arrays of a mask as they are at each replay."""
    problem, memory = make_long(1), Memory(cp)
    given = {
        name: memory.upload(value) if isinstance(value, np.ndarray) else value
        for name, value in problem.given.items()
    }
    lens = {n: given.pop(n) for n in ("kv_lens", "qo_indptr", "kv_indptr") if n in given}
    rest = {n: given[n] for n in ("q", "k", "v", "block_table", "kv_indices") if n in given}
    fixed = {"causal": given["causal"]}
    like = {n: rest[n] for n in ("q", "k", "v")}
    offsets = {n: lens[n] for n in ("qo_indptr",) if n in lens}
    plan = cumla.AttentionPlan.from_arrays(**like, **offsets, **fixed, mask_form="rows")
    total = int(np.prod(problem.given["q"].shape[:-2]))
    start, end = (cp.zeros(total, cp.int32) for _ in range(2))
    mask = AttentionMask(start=start, end=end)
    plan.update(**lens)
    out, lse = plan.run(**rest, mask=mask)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(**lens, stream=stream.ptr)
        got = plan.run(**rest, mask=mask, out=out, lse=lse, stream=stream.ptr)
        graph = stream.end_capture()
    for some in (0, 3, 40):
        start[...] = cp.arange(total) % (some + 1)
        end[...] = cp.arange(total) % 97 + some
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = cumla.attention(**rest, **lens, **fixed, mask=mask)
        rows = slice(0, problem.begins[-1])
        if problem.given["q"].ndim == 3:
            assert on_host(got.out)[rows].tobytes() == on_host(eager.out)[rows].tobytes()
        else:
            assert on_host(got.out).tobytes() == on_host(eager.out).tobytes()


_RACE = r"""
extern "C" __global__ void race(volatile int* a, int n, int rounds) {
  for (int r = 0; r < rounds; ++r)
    for (int i = threadIdx.x; i < n; i += 32) a[i] = (r * 2654435761u >> 7) % 9000;
}
"""


@pytest.mark.parametrize("page", [64, 1], ids=["boxes", "rows"])
@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
def test_arrays_that_change_during_a_call_hang_nothing(cache: Any, page: int) -> None:
    """The warps of a thread block agree on the blocks of a tile, whatever the arrays hold."""
    race = cp.RawKernel(_RACE, "race")
    batch, per, longest = 40, 8000 // page, 7999
    k = cp.zeros((batch * per, page, 2, 128), f"u{cache.itemsize}").view(cache)
    q = cp.zeros((batch, 1, 8, 128), cp.uint16).view(BF16)
    start, end = cp.zeros(batch, cp.int32), cp.full(batch, 9000, cp.int32)
    lens = cp.full(batch, longest, cp.int32)
    table = cp.arange(batch * per, dtype=cp.int32).reshape(batch, per)
    mask = AttentionMask(start=start, end=end)
    cumla.attention(q, k, k, kv_lens=lens, block_table=table, mask=mask)
    cp.cuda.Device().synchronize()
    other = cp.cuda.Stream(non_blocking=True)
    race((1,), (32,), (start, batch, 100000), stream=other)
    for _ in range(100):
        out, lse = cumla.attention(q, k, k, kv_lens=lens, block_table=table, mask=mask)
    cp.cuda.Device().synchronize()
    assert not on_host(out).astype(np.float32).any()
    assert not np.isnan(on_host(lse)).any()


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (16, 1, 128)], ids=str)
@pytest.mark.parametrize("form", ["end", "tree"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 8), (64, 64, 2), (200, 50, 250)], ids=str)
def test_masks_that_show_what_causal_shows_have_its_bits(
    counts: tuple[int, ...], form: str, heads: tuple[int, int, int]
) -> None:
    """The last key of each query given, and drafts as chains of trees, with batch_invariant."""
    rng, (num_heads, kv_heads, columns) = np.random.default_rng(sum(counts)), heads
    lens = np.array([700, 2500, 260], np.int32)
    q_lens, pages = np.array(counts), 40
    shape = (3 * pages, 64, kv_heads, columns)
    k, v = (cp.asarray(rng.standard_normal(shape).astype(BF16).view(np.uint16)) for _ in "kv")
    q = rng.standard_normal((q_lens.sum(), num_heads, columns)).astype(BF16).view(np.uint16)
    table = rng.permutation(3 * pages).astype(np.int32).reshape(3, pages)
    given = {
        "kv_lens": cp.asarray(lens),
        "qo_indptr": cp.asarray(np.cumsum([0, *q_lens]).astype(np.int32)),
        "block_table": cp.asarray(table),
    }
    drafts = np.concatenate([np.arange(count) for count in q_lens])
    if form == "end":
        last = np.repeat(lens - q_lens, q_lens) + drafts
        mask = AttentionMask(end=cp.asarray(last.astype(np.int32)))
    else:
        bits = np.arange(256) <= drafts[:, None]
        mask = AttentionMask(tree=cp.asarray(np.packbits(bits, 1, "little").view(np.uint32)))
    arrays = [array.view(BF16) for array in (cp.asarray(q), k, v)]
    causal, masked = (
        cumla.attention(*arrays, **given, **more, batch_invariant=True)
        for more in ({}, {"mask": mask})
    )
    for one, other in zip(causal, masked, strict=True):
        assert bits_of(one).tobytes() == bits_of(other).tobytes()
