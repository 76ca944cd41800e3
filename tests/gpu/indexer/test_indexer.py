# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits against their float64 reference, with all that no query sees poisoned."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.indexer.paged_mqa_schedule import (
    PagedMQAKey,
)
from tests.compat.deep_gemm_example import load_example
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import from_jax
from tests.gpu.tools.indexer_cases import (
    DIMS,
    DTYPES,
    FORMS,
    HEADS,
    KV_LENS,
    PAGE_SIZES,
    SEQ_LENS,
    Sample,
    Step,
    samples,
    steps,
)
from tests.gpu.tools.indexer_problem import (
    E4M3,
    Expected,
    Figures,
    Paged,
    Prefill,
    Rows,
    check_logits,
    check_unquantised,
    ragged,
    typed,
    unquantised,
    widen,
)
from tests.gpu.tools.process import run_fresh
from tests.launch.indexer.paged_mqa_schedule_mirror import schedule_reference, visible_tokens

KERNELS = ("mqa_logits", "paged_mqa_schedule", "paged_mqa_logits", "paged_mqa_logits_few")

cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
AT_ONCE = 1 << 24  # logits that are compared whole


def same_bits(one: Any, other: Any) -> bool:
    kind = cp.uint32 if one.dtype.itemsize == 4 else cp.uint16
    one, other = (cp.ascontiguousarray(a).view(kind) for a in (one, other))
    return bool((one == other).all())


# --- prefill --------------------------------------------------------------------------------------


def width_of(problem: Prefill, sample: Sample) -> int:
    """Columns of a compressed result: those of the longest range, or fewer, or more."""
    if "compressed" not in sample.mode:
        return 0
    longest = int((problem.end - problem.begin).max())
    return max(1, (longest, longest // 2 + 1, longest + 37)[sample.heads // 8 % 3])


def check_prefill(problem: Prefill, got: Any, width: int, clean: bool) -> dict[str, float]:
    """All rows, or of many the first, some of the middle and the last; every -inf if clean."""
    rows, columns = got.shape
    if rows * columns <= AT_ONCE:
        return check_logits(cp, got, problem.expected(width), clean=clean)
    worst: dict[str, float] = {}
    for begin in (0, rows // 2 - 21, rows - 64):
        some = slice(begin, begin + 64)
        figures = check_logits(cp, got[some], problem.expected(width, some), clean=clean)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in figures.items()}
    if clean:
        check_infinities(problem, got, width)
    return worst


def check_infinities(problem: Prefill, got: Any, width: int) -> None:
    column = cp.arange(got.shape[1])[None, :]
    for begin in range(0, len(got), 1024):
        some = slice(begin, begin + 1024)
        first, last = (cp.asarray(bound[some])[:, None] for bound in (problem.begin, problem.end))
        if width:
            first, last = 0, last - first
        visible = (column >= first) & (column < last)
        assert bool((cp.isneginf(widen(cp, got[some])) == ~visible).all())


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_prefill(sample: Sample, record_figures: Report) -> None:
    problem = Prefill(cp, *sample[:5], seed=sample.heads + sample.dim, padded=sample.padded)
    width, clean = width_of(problem, sample), "unclean" not in sample.mode
    out = Rows(cp, sample.seq_len, width or sample.seq_len_kv, sample.dtype)
    result = cumla.mqa_logits(*problem.arrays, max_kv_len=width or None, clean=clean, out=out.array)
    assert result is out.array
    record_figures(check_prefill(problem, result, width, clean))
    out.check_guards()
    if not clean:
        column = cp.arange(result.shape[1])[None, :]
        first, last = (cp.asarray(bound)[:, None] for bound in (problem.begin, problem.end))
        if width:
            first, last = 0, last - first
        assert bool((out.written == ((column >= first) & (column < last))).all())


@pytest.mark.parametrize(("heads", "dim"), list(itertools.product(HEADS, DIMS)))
@pytest.mark.parametrize("seq_len_kv", KV_LENS)
@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_prefill_of_the_whole_grid(
    seq_len: int, seq_len_kv: int, heads: int, dim: int, record_figures: Report
) -> None:
    """All logits, and compressed ones, of both dtypes, of a causal and a cut sequence.

    Of many rows some are compared, and all of the -inf.
    """
    figures = {dtype: Figures() for dtype in DTYPES}
    for ranges in ("causal", "context parallel"):
        problem = Prefill(cp, seq_len, seq_len_kv, heads, dim, ranges, seed=heads + dim)
        longest = int((problem.end - problem.begin).max())
        for width in (0, max(1, longest)):
            logits = {
                dtype: cumla.mqa_logits(
                    *problem.arrays, max_kv_len=width or None, logits_dtype=dtype
                )
                for dtype in DTYPES
            }
            for dtype, got in logits.items():
                assert got.shape == (seq_len, width or seq_len_kv)
                assert got.dtype.name == dtype
                check_infinities(problem, got, width)
            for begin in (0, seq_len // 2 - 21, seq_len - 64) if seq_len > 192 else (0,):
                some = slice(begin, begin + (64 if seq_len > 192 else seq_len))
                expected = problem.expected(width, some)
                for dtype, got in logits.items():
                    figures[dtype].add(cp, got[some], expected, clean=True)
    for dtype, found in figures.items():
        record_figures(found.check(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), list(itertools.product(HEADS, DIMS)))
def test_prefill_of_every_shape(heads: int, dim: int, dtype: str, record_figures: Report) -> None:
    problem = Prefill(cp, 130, 1500, heads, dim, "packed")
    logits = cumla.mqa_logits(*problem.arrays, logits_dtype=dtype)
    record_figures(check_logits(cp, logits, problem.expected()))


def test_prefill_with_strided_weights_scales_and_bounds() -> None:
    problem = Prefill(cp, 77, 900, 16, 64, "packed")
    q, (k, scale), weights, ks, ke = problem.arrays
    wanted = cumla.mqa_logits(*problem.arrays)
    strided = (
        q,
        (k, cp.repeat(scale, 3)[1::3]),
        cp.ascontiguousarray(weights.T).T,
        cp.repeat(ks, 2)[::2],
        ke[::-1].copy()[::-1],
    )
    assert same_bits(cumla.mqa_logits(*strided), wanted)
    assert same_bits(cumla.mqa_logits(q.view(cp.uint8), (k, scale), weights, ks, ke), wanted)


@pytest.mark.parametrize(("heads", "dim"), list(itertools.product(HEADS, DIMS)))
def test_prefill_against_what_was_quantised(heads: int, dim: int, record_figures: Report) -> None:
    """Keys and queries of real numbers, quantised by the library's own kernel."""
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal(shape, np.float32) for shape in ((128, heads, dim), (2048, dim)))
    weights = rng.standard_normal((128, heads), np.float32)
    quantised_q, q_scale = cumla.quantize_fp8(cp.asarray(q))
    ends = cp.arange(128, dtype=cp.int32) + 1921
    logits = cumla.mqa_logits(
        quantised_q,
        cumla.quantize_fp8(cp.asarray(k)),
        cp.asarray(weights) * q_scale,
        cp.zeros_like(ends),
        ends,
    )
    wanted = unquantised(q, k, weights)
    record_figures(check_unquantised(logits.get(), wanted, ends.get()))


@pytest.mark.parametrize(("dtype", "clean"), [("bfloat16", True), ("float32", False)])
def test_prefill_beyond_32_bits(dtype: str, clean: bool, record_figures: Report) -> None:
    seq_len, seq_len_kv = 33_000, 65_600
    assert seq_len * seq_len_kv > 1 << 31
    nbytes = seq_len * seq_len_kv * (4 if dtype == "float32" else 2)
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < nbytes + (6 << 30):
        pytest.skip("needs 15 GB of free memory")
    problem = Prefill(cp, seq_len, seq_len_kv, 8, 32, "causal")
    out = cp.empty((seq_len, seq_len_kv), dtype=np.float32 if dtype == "float32" else "bfloat16")
    cumla.mqa_logits(*problem.arrays, clean=clean, out=out)
    for begin in (0, 16_350, 32_760, seq_len - 16):
        some = slice(begin, begin + 16)
        record_figures(check_logits(cp, out[some], problem.expected(0, some), clean=clean))
    if clean:
        check_infinities(problem, out, 0)


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.name)
def test_paged(step: Step, record_figures: Report) -> None:
    problem = Paged(cp, *step[:8], seed=step.batch + step.q_len)
    columns = int(problem.lengths.max()) + 11
    out = Rows(cp, step.batch * step.q_len, columns, step.dtype)
    options = {"max_kv_len": columns, "clean": step.clean}
    assert cumla.paged_mqa_logits(*problem.arrays, **options, out=out.array) is out.array
    most = 24 if step.mean < 65536 else 4
    record_figures(problem.check(out.array, clean=step.clean, most=most))
    out.check_guards()
    if not step.clean:
        seen = cp.asarray(problem.seen.reshape(-1))[:, None]
        assert bool((out.written == (cp.arange(columns)[None, :] < seen)).all())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_paged_of_every_shape(
    heads: int, dim: int, q_len: int, page_size: int, record_figures: Report
) -> None:
    problem = Paged(cp, 7, q_len, 600, heads, dim, page_size)
    logits = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=1000)
    record_figures(problem.check(logits))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_paged_of_every_form(form: str, page_size: int) -> None:
    problem = Paged(cp, 9, 2, 900, 64, 128, page_size, False, form)
    problem.check(cumla.paged_mqa_logits(*problem.arrays, max_kv_len=1300))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_keys_of_68_bytes(heads: int, q_len: int, page_size: int, record_figures: Report) -> None:
    """By a call, twice, and by a plan: the same bits."""
    problem = Paged(cp, 9, q_len, 700, heads, 128, page_size, False, "mxfp4")
    logits = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=1300, **problem.options)
    record_figures(problem.check(logits))
    again = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=1300, **problem.options)
    *inputs, table = problem.inputs
    named = {"block_table": table, "kv_lens": problem.kv_lens}
    plan = cumla.PagedMQALogitsPlan.from_arrays(*inputs[:2], **named, **problem.options)
    plan.update(problem.kv_lens)
    planned = plan.run(*inputs, block_table=table, max_kv_len=1300)
    for other in (again, planned):
        assert bool((other.view(cp.uint32) == logits.view(cp.uint32)).all())


def test_many_keys_of_68_bytes(record_figures: Report) -> None:
    for batch, q_len, mean in ((1, 1, 120_000), (70, 2, 3_000), (300, 4, 600)):
        problem = Paged(cp, batch, q_len, mean, form="mxfp4")
        columns = int(problem.lengths.max())
        options = {"max_kv_len": columns, **problem.options}
        record_figures(problem.check(cumla.paged_mqa_logits(*problem.arrays, **options)))


def test_pages_of_68_bytes_a_key_beyond_32_bits(record_figures: Report) -> None:
    num_pages, page_bytes = 1_050_000, 64 * 68
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < num_pages * page_bytes + (2 << 30):
        pytest.skip("needs 7 GB of free memory")
    problem = Paged(cp, 20, 2, 900, form="mxfp4")
    run = problem.num_pages // 4
    around = [(1 << bits) // page_bytes - run // 2 for bits in (31, 32)]
    memory = cp.empty((num_pages, page_bytes), dtype=cp.uint8)
    memory.data.memset(0xFF, memory.nbytes)
    table = cp.asarray(problem.move(memory, (0, *around, num_pages - run)))
    q, _, weights, _, lengths = problem.arrays
    cache = memory.reshape(num_pages, 64, 1, 68)
    options = {"max_kv_len": 1300, **problem.options}
    record_figures(
        problem.check(cumla.paged_mqa_logits(q, cache, weights, table, lengths, **options))
    )


def test_an_exponent_that_is_nan() -> None:
    """It makes NaN of its token's logits, and changes no bit of others."""
    problem = Paged(cp, 5, 2, 300, form="mxfp4", lengths=np.full(5, 300, np.int64))
    options = {"max_kv_len": 300, **problem.options}
    before = cumla.paged_mqa_logits(*problem.arrays, **options)
    page = int(problem.table[2, 1])
    problem.memory[page, 64 * 64 + 4 * 7 + 2] = 255
    after = cumla.paged_mqa_logits(*problem.arrays, **options)
    changed = before.view(cp.uint32) != after.view(cp.uint32)
    assert cp.argwhere(changed).tolist() == [[4, 71], [5, 71]]
    assert bool(cp.isnan(after[4:6, 71]).all())


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "dim"), list(itertools.product(HEADS, DIMS)))
def test_paged_against_what_was_quantised(
    heads: int, dim: int, q_len: int, record_figures: Report
) -> None:
    """Real numbers again, the keys quantised into pages by the kernel that fills caches."""
    rng = np.random.default_rng(q_len)
    lengths = np.array([1300, 64, 0, 2047, 900], np.int32)
    q = rng.standard_normal((5, q_len, heads, dim), np.float32)
    k = rng.standard_normal((5, 2048, dim), np.float32)
    weights = rng.standard_normal((5 * q_len, heads), np.float32)
    table = rng.permutation(5 * 32).astype(np.int32).reshape(5, 32)
    slots = (table.astype(np.int64)[:, :, None] * 64 + np.arange(64)).reshape(5, 2048)
    slots[np.arange(2048) >= lengths[:, None]] = -1  # skipped
    cache = cp.full((5 * 32, 64, 1, dim + 4), 0xFF, dtype=cp.uint8)  # NaN
    cumla.append_indexer_cache(cp.asarray(k.reshape(-1, dim)), cache, cp.asarray(slots.reshape(-1)))
    quantised_q, q_scale = cumla.quantize_fp8(cp.asarray(q))
    logits = cumla.paged_mqa_logits(
        quantised_q,
        cache,
        cp.asarray(weights) * q_scale.reshape(-1, heads),
        cp.asarray(table),
        cp.asarray(lengths),
        max_kv_len=2048,
    )
    by_request = weights.reshape(5, q_len, heads)
    wanted = np.concatenate([unquantised(*one) for one in zip(q, k, by_request, strict=True)])
    seen = np.maximum(lengths[:, None] + np.arange(q_len) - q_len + 1, 0)
    record_figures(check_unquantised(logits.get(), wanted, seen.reshape(-1)))


@pytest.mark.parametrize("form", ["fused", "pair"])
def test_paged_beyond_32_bits(form: str, record_figures: Report) -> None:
    """Pages at the ends of 5 GB and around the offsets 2^31 and 2^32; all between them is NaN."""
    num_pages, page_bytes = 600_000, 64 * 132
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < num_pages * page_bytes + (2 << 30):
        pytest.skip("needs 7 GB of free memory")
    problem = Paged(cp, 20, 2, 900)
    run = problem.num_pages // 4
    around = [(1 << bits) // page_bytes - run // 2 for bits in (31, 32)]
    memory = cp.empty((num_pages, page_bytes), dtype=cp.uint8)
    memory.data.memset(0xFF, memory.nbytes)
    table = problem.move(memory, (0, *around, num_pages - run))
    cache: Any = memory.reshape(num_pages, 64, 1, 132)
    if form == "pair":  # of the same bytes
        strides = (page_bytes, 128, 1)
        keys = cp.lib.stride_tricks.as_strided(memory, (num_pages, 64, 128), strides)
        cache = typed(keys), memory.view(cp.float32)[:, 64 * 32 :]
    q, _, weights, _, lengths = problem.arrays
    logits = cumla.paged_mqa_logits(q, cache, weights, cp.asarray(table), lengths, max_kv_len=1300)
    record_figures(problem.check(logits))


@pytest.mark.parametrize("clean", [True, False])
def test_paged_of_fewer_columns_than_tokens(clean: bool) -> None:
    problem = Paged(cp, 9, 2, 900)
    out = Rows(cp, 18, 333, "float32")
    logits = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=333, clean=clean, out=out.array)
    problem.check(logits, clean=clean)
    out.check_guards()


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
def test_paged_with_nothing_to_see(q_len: int, batch: int) -> None:
    for lengths in (np.zeros(batch, np.int64), np.full(batch, -7)):
        problem = Paged(cp, batch, q_len, 0, lengths=np.zeros(batch, np.int64))
        given = cp.asarray(lengths.astype(np.int32))
        logits = cumla.paged_mqa_logits(*problem.inputs, given, max_kv_len=70)
        assert bool(cp.isneginf(logits).all())


def test_paged_of_garbage() -> None:
    """Lengths and page numbers are anything: as the reference, whose clamps are the same."""
    rng = np.random.default_rng(9)
    problem = Paged(cp, 8, 2, 300, 8, 32, 16)
    problem.memory[...] = cp.where(problem.memory == 0x7F, 0, problem.memory)
    scales = problem.memory.view(cp.float32)[:, 16 * 32 // 4 :]
    scales[...] = cp.asarray(rng.random(scales.shape, np.float32))
    wild = rng.integers(-(2**31), 2**31 - 1, (8, problem.max_pages))
    near = rng.integers(0, problem.num_pages, wild.shape)
    table = np.where(rng.random(wild.shape) < 0.4, wild, near).astype(np.int32)
    lengths = np.array([2**31 - 1, -(2**31), -1, 0, 1, 16 * problem.max_pages, 77, 10**9])
    host = (
        problem.q.get().view(E4M3),
        problem.kv_cache.get(),
        problem.weights.get(),
        table,
        lengths.astype(np.int32),
    )
    width = 16 * problem.max_pages + 5
    wanted = cumla.reference.paged_mqa_logits(*host, max_kv_len=width)
    there = (cp.asarray(array) for array in host[3:])
    got = cumla.paged_mqa_logits(*problem.inputs[:3], *there, max_kv_len=width).get()
    assert (np.isneginf(got) == np.isneginf(wanted)).all()
    visible = ~np.isneginf(wanted)
    np.testing.assert_allclose(got[visible], wanted[visible], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 2, 7, 131, 132, 133, 256, 1000, 3000])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_schedule_equals_its_mirror(batch: int, per_row: bool) -> None:
    max_pages, q_len = 200, 3
    sms = cp.cuda.Device().attributes["MultiProcessorCount"]
    shape = (batch, q_len) if per_row else (batch,)
    options = {"max_pages": max_pages, "kv_lens_shape": shape}
    nbytes = cumla.PagedMQALogitsPlan.workspace_bytes(batch, q_len, 64, 128, **options)
    buffer = cp.full(nbytes, 0xFF, dtype=cp.uint8)
    plan = cumla.PagedMQALogitsPlan(batch, q_len, 64, 128, **options, workspace=buffer)
    key = PagedMQAKey(batch, q_len, 64, 128, 64, max_pages, per_row, sms)
    rng = np.random.default_rng(batch)
    for lengths in (
        np.zeros(shape),
        rng.integers(0, 13_000, shape),
        rng.integers(0, 3, shape) // 2 * 12_000,
        np.where(rng.random(shape) < 0.01, 12_800, 3),
        rng.integers(-(2**31), 2**31 - 1, shape),
    ):
        buffer[...] = 0xFF
        lengths = lengths.astype(np.int32)
        plan.update(cp.asarray(lengths))
        words = buffer.view(cp.int32).get()
        made, kept = words[: 2 * (sms + 1)].reshape(-1, 2), words[2 * (sms + 1) :]
        np.testing.assert_array_equal(made, schedule_reference(key, lengths))
        seen = visible_tokens(key, kept.reshape(shape))
        np.testing.assert_array_equal(seen, visible_tokens(key, lengths))


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "paged", "paged q_len 4"])
def test_twenty_repeats_have_the_same_bits(kind: str) -> None:
    if kind == "prefill":
        problem = Prefill(cp, 400, 3000, 64, 128, "packed")
        call: Callable[..., Any] = functools.partial(cumla.mqa_logits, *problem.arrays)
        shape = (400, 3000)
    else:
        step = Paged(cp, 33, 4 if "4" in kind else 1, 3000)
        columns = 4000
        options = {"max_kv_len": columns}
        call = functools.partial(cumla.paged_mqa_logits, *step.arrays, **options)
        shape = (33 * step.q_len, columns)
    want, got = call(), cp.empty(shape, dtype=cp.float32)
    wrong = cp.zeros(1, dtype=cp.uint32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    for repeat in range(20):
        with stream:
            kernels.noise(repeat)
        call(out=got)
        kernels.compare_and_poison(got, want, wrong)
    cp.cuda.Device().synchronize()
    assert int(wrong[0]) == 0


@pytest.mark.parametrize(
    ("batch", "q_len", "mean", "heads", "page_size"),
    [(12, 2, 5000, 64, 64), (12, 2, 5000, 32, 16), (5, 1, 200_000, 64, 64), (5, 1, 700, 8, 128)],
)
def test_a_request_has_the_same_bits_in_every_batch(
    batch: int, q_len: int, mean: int, heads: int, page_size: int
) -> None:
    problem = Paged(cp, batch, q_len, mean, heads, page_size=page_size)
    q, cache, weights, table, lengths = problem.arrays
    whole = cumla.paged_mqa_logits(*problem.arrays, max_kv_len=2 * mean)
    for b in (0, batch // 2 - 1, batch - 1):
        rows = slice(q_len * b, q_len * (b + 1))
        one = slice(b, b + 1)
        alone = cumla.paged_mqa_logits(
            q[one], cache, weights[rows], table[one], lengths[one], max_kv_len=2 * mean
        )
        assert same_bits(alone, whole[rows])


def test_prefill_rows_do_not_depend_on_their_neighbours() -> None:
    problem = Prefill(cp, 100, 2000, 64, 128, "packed")
    q, kv, weights, ks, ke = problem.arrays
    whole = cumla.mqa_logits(*problem.arrays)
    for begin, end in ((0, 1), (3, 50), (99, 100)):
        some = slice(begin, end)
        part = cumla.mqa_logits(q[some], kv, weights[some], ks[some], ke[some])
        assert same_bits(part, whole[some])


# --- plans, graphs and streams --------------------------------------------------------------------


def plan_of(problem: Paged) -> cumla.PagedMQALogitsPlan:
    q, cache, _, *others = problem.arrays
    return cumla.PagedMQALogitsPlan.from_arrays(q, cache, *others)


def test_a_plan_for_several_layers() -> None:
    lengths = ragged(np.random.default_rng(1), 20, 3000)
    layers = [Paged(cp, 20, 2, 3000, seed=seed, lengths=lengths) for seed in range(4)]
    plan = plan_of(layers[0])
    plan.update(layers[0].kv_lens)
    for layer in layers:
        layer.check(plan.run(*layer.inputs[:3], block_table=layer.inputs[3], max_kv_len=4000))
        wanted = cumla.paged_mqa_logits(*layer.arrays, max_kv_len=4000)
        assert same_bits(
            plan.run(*layer.inputs[:3], block_table=layer.inputs[3], max_kv_len=4000), wanted
        )


def test_a_graph_serves_changing_lengths() -> None:
    problem = Paged(cp, 16, 2, 4000)
    *inputs, lengths = problem.arrays
    out = cp.empty((32, 6000), dtype=cp.float32)
    plan = plan_of(problem)
    plan.prepare()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(lengths)
        plan.run(*inputs[:3], block_table=inputs[3], max_kv_len=6000, out=out)
        graph = stream.end_capture()
    rng = np.random.default_rng(2)
    for _ in range(5):
        now = (problem.lengths * rng.random(16)).astype(np.int32)
        lengths[...] = cp.asarray(now)
        out[...] = np.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = cumla.paged_mqa_logits(*inputs, cp.asarray(now), max_kv_len=6000)
        assert same_bits(out, eager)
    problem.lengths, problem.seen = now, np.maximum(now[:, None] + np.array([-1, 0]), 0)
    problem.check(out)


def test_a_graph_of_a_prefill_serves_changing_ranges() -> None:
    problem = Prefill(cp, 90, 1500, 64, 128, "causal")
    q, kv, weights, ks, ke = problem.arrays
    out = cp.empty((90, 1500), dtype=cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cumla.mqa_logits(q, kv, weights, ks, ke, out=out)
        stream.synchronize()
        stream.begin_capture()
        cumla.mqa_logits(q, kv, weights, ks, ke, out=out)
        graph = stream.end_capture()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = rng.integers(0, 1411, 90)
        begins = (ends * rng.random(90)).astype(np.int32)
        ks[...], ke[...] = cp.asarray(begins), cp.asarray(ends.astype(np.int32))
        out[...] = np.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        problem.begin, problem.end = begins.astype(np.int64), ends
        check_logits(cp, out, problem.expected())


@pytest.mark.parametrize("how", ["current", "object", "handle"])
def test_a_side_stream(how: str) -> None:
    """Lengths that are written there, and late, are seen; the call does not wait."""
    problem = Paged(cp, 16, 1, 2000)
    *inputs, lengths = problem.arrays
    out = cp.empty((16, 3000), dtype=cp.float32)
    late = cp.zeros_like(lengths)
    arrays = (*inputs, late)
    cumla.paged_mqa_logits(*arrays, max_kv_len=3000, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        late[...] = lengths
    if how == "current":
        with stream:
            cumla.paged_mqa_logits(*arrays, max_kv_len=3000, out=out)
    else:
        given = stream if how == "object" else stream.ptr
        cumla.paged_mqa_logits(*arrays, max_kv_len=3000, out=out, stream=given)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    problem.check(out)


def test_writing_and_scoring_in_turns() -> None:
    """Each kernel may start before the one ahead of it has ended: none may read or write early."""
    problem = Paged(cp, 8, 1, 640, lengths=np.full(8, 640))
    *inputs, lengths = problem.arrays
    cache = inputs[1]
    used = problem.table[:, :10].astype(np.int64)
    slots = cp.asarray((used[:, :, None] * 64 + np.arange(64)).reshape(-1))
    rng = np.random.default_rng(4)
    contents = [cp.asarray(rng.standard_normal((5120, 128), np.float32)) for _ in range(2)]
    expected = []
    for keys in contents:
        cumla.append_indexer_cache(keys, cache, slots)
        cp.cuda.Device().synchronize()
        logits = cumla.paged_mqa_logits(*inputs, lengths, max_kv_len=700)
        cp.cuda.Device().synchronize()
        expected.append(logits)
    plan = plan_of(problem)
    outs = [cp.empty((8, 700), dtype=cp.float32) for _ in range(40)]
    for i, out in enumerate(outs):
        cumla.append_indexer_cache(contents[i % 2], cache, slots)
        plan.update(lengths)
        plan.run(*inputs[:3], block_table=inputs[3], max_kv_len=700, out=out)
    for i, out in enumerate(outs):
        assert same_bits(out, expected[i % 2]), i


RACE = """
import cupy as cp
import numpy as np
import cumla
from tests.gpu.tools.indexer_problem import Paged, Prefill
rewrite = cp.RawKernel(r'''
// One warp of few registers: there is room for it beside the kernels that read.
extern "C" __global__ __launch_bounds__(32, 1)
void rewrite(volatile int* at, int count, int few, int many, long long clocks) {
  unsigned h = threadIdx.x;
  for (const long long start = clock64(); clock64() - start < clocks;) {
    h = h * 1664525u + 1013904223u;
    for (int i = threadIdx.x; i < count; i += 32) at[i] = h >> 16 & 1 ? few : many;
  }
}''', "rewrite")

def race(problem, changing, most, call):
    side, main = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    before = changing.copy()
    wanted = call(main)
    cp.cuda.Device().synchronize()
    wanted = wanted.copy()
    arguments = changing, np.int32(changing.size), np.int32(64), np.int32(most)
    with side:
        rewrite((1,), (32,), (*arguments, np.int64(1_000_000_000)))
    for _ in range(200):
        call(main)
    main.synchronize()
    overlapped = not side.done
    side.synchronize()
    changing[...] = before
    cp.cuda.Device().synchronize()
    again = call(main)
    main.synchronize()
    print(overlapped, bool((again.view(cp.uint32) == wanted.view(cp.uint32)).all()))

prefill = Prefill(cp, 2048, 8192, 64, 128, "causal")
q, kv, weights, ks, ke = prefill.arrays
out = cp.empty((2048, 8192), dtype=cp.float32)
for bound in (ke, ks):
    race(prefill, bound, 8192, lambda stream: cumla.mqa_logits(
        q, kv, weights, ks, ke, out=out, stream=stream))
paged = Paged(cp, 264, 2, 4096, lengths=np.full(264, 4096))
*inputs, lengths = paged.arrays
logits = cp.empty((528, 4096), dtype=cp.float32)
race(paged, lengths, 4096, lambda stream: cumla.paged_mqa_logits(
    *inputs, lengths, max_kv_len=4096, out=logits, stream=stream))
"""


def test_ranges_and_lengths_that_change_meanwhile() -> None:
    """Another stream rewrites them without end: numbers may be wrong, but nothing hangs."""
    result = run_fresh(RACE, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True True"] * 3


# --- frameworks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def to_torch(torch: Any, value: Any) -> Any:
    """The same memory as tensors."""
    if isinstance(value, tuple):
        return tuple(to_torch(torch, part) for part in value)
    if value.dtype == E4M3:
        return torch.from_dlpack(value.view(cp.uint8)).view(torch.float8_e4m3fn)
    return torch.from_dlpack(value)


def to_jax(jax: Any, value: Any) -> Any:
    """Copies as JAX arrays."""
    if isinstance(value, tuple):
        return tuple(to_jax(jax, part) for part in value)
    if value.dtype == E4M3:
        host = cp.ascontiguousarray(value.view(cp.uint8)).get().view(E4M3)
        return jax.numpy.asarray(host)
    return jax.numpy.asarray(cp.ascontiguousarray(value).get())


def problems() -> dict[str, tuple[Any, Callable[..., Any], dict[str, int]]]:
    """A problem of each kind, its function and what else that needs."""
    prefill = Prefill(cp, 60, 1000, 64, 128, "packed", padded=True)
    columns = {"max_kv_len": 1400}
    return {
        "prefill": (prefill, cumla.mqa_logits, {}),
        "paged": (Paged(cp, 6, 2, 1000, form="padded"), cumla.paged_mqa_logits, columns),
        "pair": (Paged(cp, 6, 2, 1000, form="pair"), cumla.paged_mqa_logits, columns),
    }


KINDS = pytest.mark.parametrize("kind", ["prefill", "paged", "pair"])


@KINDS
def test_torch(torch: Any, kind: str) -> None:
    problem, function, options = problems()[kind]
    wanted = function(*problem.arrays, **options)
    tensors = [to_torch(torch, array) for array in problem.arrays]
    torch.cuda.synchronize()
    logits = function(*tensors, **options)
    assert isinstance(logits, torch.Tensor)
    torch.cuda.synchronize()
    assert same_bits(cp.from_dlpack(logits), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*tensors, **options, logits_dtype=torch.bfloat16)
    graph.replay()
    torch.cuda.synchronize()
    assert captured.dtype == torch.bfloat16
    assert torch.equal(captured, logits.bfloat16())


@KINDS
def test_jax(jax: Any, kind: str) -> None:
    problem, function, options = problems()[kind]
    wanted = function(*problem.arrays, **options)
    logits = function(*(to_jax(jax, array) for array in problem.arrays), **options)
    assert isinstance(logits, jax.Array)
    assert same_bits(from_jax(logits), wanted)


@KINDS
def test_frameworks_mixed(torch: Any, jax: Any, kind: str) -> None:
    """One-byte floats of each as guests of another."""
    problem, function, options = problems()[kind]
    wanted = function(*problem.arrays, **options)
    q, kv, *rest = problem.arrays
    for queries, others in (
        (to_torch(torch, q), [to_jax(jax, array) for array in (kv, *rest)]),
        (q, [to_torch(torch, kv), *(to_jax(jax, array) for array in rest)]),
        (to_jax(jax, q), [kv, *(to_torch(torch, array) for array in rest)]),
    ):
        torch.cuda.synchronize()
        logits = function(queries, *others, **options)
        torch.cuda.synchronize()
        got = from_jax(logits) if isinstance(logits, jax.Array) else cp.from_dlpack(logits)
        assert same_bits(got, wanted)


# --- DeepGEMM's face ------------------------------------------------------------------------------


def test_prefill_of_deep_gemms_example(torch: Any, record_figures: Report) -> None:
    problem = Prefill(cp, 256, 4096, 64, 128, "packed")
    tensors = [to_torch(torch, array) for array in problem.arrays]
    logits, compressed = load_example().prefill(*tensors)
    torch.cuda.synchronize()
    record_figures(check_logits(cp, cp.from_dlpack(logits), problem.expected()))
    got = cp.from_dlpack(compressed)
    check_logits(cp, got, problem.expected(got.shape[1]), clean=False)


def in_deep_gemms_order(torch: Any, problem: Paged) -> tuple[Any, ...]:
    """Tensors, the lengths a copy and ahead of the table."""
    *inputs, table, lengths = (to_torch(torch, array) for array in problem.arrays)
    return *inputs, lengths.clone(), table


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_decoding_of_deep_gemms_example(torch: Any, q_len: int, per_row: bool) -> None:
    """A schedule copied into a buffer that a graph reads, for other lengths at each replay."""
    problem = Paged(cp, 24, q_len, 3000, per_row=per_row)
    tensors = in_deep_gemms_order(torch, problem)
    lengths = tensors[3]
    step = load_example().DecodeStep("cuda")
    step.update(lengths, 64)
    eager = step.run(*tensors, 4000, True)
    torch.cuda.synchronize()
    problem.check(cp.from_dlpack(eager))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run(*tensors, 4000, True)
    for share in (0.9, 0.3, 0.0):
        lengths.copy_((lengths * share).int())
        step.update(lengths, 64)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        now = lengths.cpu().numpy().astype(np.int64)
        problem.seen = now
        if not per_row:
            problem.seen = np.maximum(now[:, None] + np.arange(q_len) - q_len + 1, 0)
        problem.check(cp.from_dlpack(captured))


def test_deep_gemms_number_of_multiprocessors(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number gives the same bits."""
    from cumla.compat import deep_gemm

    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    whole = cp.cuda.Device().attributes["MultiProcessorCount"]
    assert deep_gemm.get_num_sms() == whole
    tensors = in_deep_gemms_order(torch, Paged(cp, 24, 2, 3000))
    results = []
    for sms in (whole, whole // 2, 1):
        deep_gemm.set_num_sms(sms)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(tensors[3], 64, deep_gemm.get_num_sms())
        assert schedule.shape == (sms + 1, 2)
        results.append(deep_gemm.fp8_paged_mqa_logits(*tensors, schedule, 4000, clean_logits=True))
    torch.cuda.synchronize()
    for logits in results:
        assert same_bits(cp.from_dlpack(logits), cp.from_dlpack(results[0]))


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    problem = Paged(cp, 6, 1, 500, lengths=np.full(6, 500))
    q, cache, weights, table, lengths = problem.arrays
    problem.check(cumla.paged_mqa_logits(*problem.arrays, max_kv_len=600))
    wrong = table.copy()
    wrong[2, 3] = problem.num_pages
    with pytest.raises(ValueError, match=rf"^block_table\[2, 3\]: .*got {problem.num_pages}"):
        cumla.paged_mqa_logits(q, cache, weights, wrong, lengths, max_kv_len=600)
    prefill = Prefill(cp, 5, 100, 8, 32, "causal")
    *given, ke = prefill.arrays
    ke[3] = 101
    with pytest.raises(ValueError, match=r"^ke\[3\]: .*seq_len_kv = 100, got 101"):
        cumla.mqa_logits(*given, ke)


def test_the_checks_find_a_wrong_token() -> None:
    """Two tokens in each other's place."""
    problem = Prefill(cp, 20, 300, 64, 128, "causal")
    q, (k, scale), weights, ks, ke = problem.arrays
    bits = k.view(cp.uint8).copy()
    bits[[7, 8]] = bits[[8, 7]]
    expected: Expected = problem.expected()
    check_logits(cp, cumla.mqa_logits(*problem.arrays), expected)
    with pytest.raises(AssertionError):
        check_logits(cp, cumla.mqa_logits(q, (typed(bits), scale), weights, ks, ke), expected)
