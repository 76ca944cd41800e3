# SPDX-License-Identifier: Apache-2.0
"""The kernels' own text, run by the CPU, against the references: calls of every family, and with
--exhaustive all that compute-sanitizer is shown. Results agree within the tests' tolerances; what
no CPU can tell is races, speed and what the hardware rounds otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
import tests.emulator
from cumla.distributed.merge import MergeOfRanks
from cumla.launch.kernel import Launch
from cumla.launch.merge_states import MOST_BLOCKS, Meeting
from cumla.launch.tensor_map import TensorMap
from cumla.mla.shape import WRITTEN
from tests.emulator import Array, CuPy, emulate, emulated_gpu
from tests.emulator.fenced import Fenced
from tests.gpu.tools import pages, sanitize
from tests.gpu.tools.cases import Case
from tests.gpu.tools.fp8_problem import make_fp8
from tests.gpu.tools.problem import make_problem
from tests.gpu.tools.sparse_problem import SparseCase
from tests.gpu.tools.v4_problem import V4Case
from tests.mha import attention_cases, extreme_cases
from tests.mla import extreme_cases as mla_cases

MULTIPROCESSORS = 4


@pytest.fixture
def cupy() -> Iterator[CuPy]:
    with emulated_gpu(MULTIPROCESSORS) as cupy:
        yield cupy


def decode(cupy: CuPy, case: Case, lengths: list[int], page_size: int = 64) -> None:
    problem = pages.moved(make_problem(np, case, np.array(lengths)), page_size)
    for out, lse in sanitize.decode(cupy, problem):
        problem.check(out, lse)


def few_queries(cupy: CuPy) -> None:
    """Cut requests, joined by blocks that wait for one another."""
    decode(cupy, Case(batch=2, heads=16), [700, 0])


def many_heads(cupy: CuPy) -> None:
    decode(cupy, Case(batch=1, heads=96, dtype="float16"), [140])


def small_pages(cupy: CuPy) -> None:
    decode(cupy, Case(batch=2, heads=8, q_len=2), [130, 65], page_size=16)


def ragged_queries(cupy: CuPy) -> None:
    sanitize.attend_ragged(cupy, sanitize.RAGGED[1])


def fp8_cache(cupy: CuPy) -> None:
    case, lengths = sanitize.FP8_CACHES[0]
    sanitize.attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))


def windows_and_sinks(cupy: CuPy) -> None:
    """A cut window, pages of single rows in a list, and sinks of decoding and of an FP8 cache."""
    for sample in (sanitize.MLA_MASKS[0], *sanitize.MLA_MASKS[3:5]):
        sanitize.attend_latent_masked(cupy, sample)
    sanitize.attend_with_sinks(cupy, sanitize.MLA_SINKS[1])


def rows_of_1024(cupy: CuPy) -> None:
    """Masks, cut requests, boxes and single rows, few rows and several tiles."""
    for sample in sanitize.MLA_WIDE:
        sanitize.attend_latent_masked(cupy, sample)


def trees_of_drafts(cupy: CuPy) -> None:
    """Whole blocks, single rows in a list, and rows of another width; some requests are cut."""
    for sample in (sanitize.MLA_TREES[0], *sanitize.MLA_TREES[2::2]):
        sanitize.attend_latent_masked(cupy, sample)


def lists_of_rows(cupy: CuPy) -> None:
    """One case for each kernel: rows of 16 bits, of e4m3, and packed ones of few and many heads."""
    for i in (0, 2, 6, 7):
        sanitize.attend_sparse(cupy, sanitize.SPARSE[i])
    sanitize.attend_with_max_logits(cupy, sanitize.MAX_LOGITS[1])


def few_rows(cupy: CuPy) -> None:
    """Eight query rows of a kv head and 16: cut requests, whose pieces are joined row by row."""
    for heads in ((8, 2), (16, 1)):
        few = {"lens": (2000, 70), "columns": (64, 64), "queries": "uniform", "heads": heads}
        for sample in attention_cases.samples(2, **few, cache="e4m3"):
            sanitize.attend_mha(cupy, sample)


def merges(cupy: CuPy) -> None:
    sanitize.merge_states(cupy, 2, "bfloat16", in_place=False)
    sanitize.merge_of_ranks(cupy)


def test_a_rank_that_does_not_come(cupy: CuPy) -> None:
    """The kernel waits, and has written nothing but that it is there."""
    states = cupy.asarray(np.ones((2, 1, 1, 8), np.float32)), cupy.zeros((2, 1, 1))
    counters = cupy.zeros((2, MOST_BLOCKS, 2), np.uint32)
    tables = tuple(sanitize.address_of(table) for table in counters)
    with pytest.raises(AssertionError, match=r"merge_states_float32: .*wait"):
        MergeOfRanks(Meeting(1, tables, 0))(*map(list, states))
    assert np.argwhere(counters).tolist() == [[0, 0, 1]]


def rows_into_caches(cupy: CuPy) -> None:
    for form in ("slots", "requests, rotated"):
        sanitize.append_rows(cupy, form)
    sanitize.quantize_rows(cupy, "bfloat16")


@pytest.mark.parametrize("width", WRITTEN)
def test_rows_of_every_width(cupy: CuPy, width: tuple[int, int]) -> None:
    """Bits of rows in every dtype and of every cache, with rotations by quarter turns."""
    forms = "slots", "requests, rotated", "requests, rotated by halves"
    for _, *dtypes in sanitize.WRITTEN_ROWS:
        for form in forms[: 3 if width[1] else 1]:
            sanitize.append_rows(cupy, form, width, *dtypes)


def rows_into_v4(cupy: CuPy) -> None:
    """Special numbers, parts that end where memory does, gaps, slots that do not exist, and a
    rotation by quarter turns."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((21, 512), dtype=np.float32)
    rows *= rng.choice(np.float32([1e-6, 1, 1e4]), (21, 8)).repeat(64, axis=1)
    for i, number in enumerate([np.nan, np.inf, -np.inf, 3e38, -0.0, 2.0**-127, 448.0]):
        rows[i, 64 * i + i] = number
    rows[3::5, 64:256] = 0
    slots = rng.permutation(26)[:21] - 2
    quarter_turns = np.repeat(np.float32([[0, 1]]), 32, axis=1).repeat(21, axis=0)
    rotated = {"positions": np.arange(21), "cos_sin": quarter_turns}
    for dtype, options in ((np.float32, {}), (ml_dtypes.bfloat16, {}), (np.float32, rotated)):
        parts = [np.ascontiguousarray(part.astype(dtype)) for part in np.split(rows, [448], axis=1)]
        host = np.full((3, 7 * 584 + 24), 0xFF, np.uint8)
        device = cupy.asarray(host)
        there = {name: cupy.asarray(array) for name, array in options.items()}
        caches = [m[:, : 7 * 584].reshape(3, 7, 1, 584) for m in (host, device)]
        cumla.reference.append_mla_cache(parts, caches[0], slots, **options)
        fenced = Fenced(at_end=True)
        given = [fenced.copy(part).view(Array) for part in parts]
        cumla.append_mla_cache(given, caches[1], cupy.asarray(slots), **there)
        np.testing.assert_array_equal(device.get(), host)


def logits(cupy: CuPy) -> None:
    sanitize.score_sequence(cupy)
    sanitize.score_pages(cupy, 1)
    sanitize.score_one_request(cupy, 2000)


def selection(cupy: CuPy) -> None:
    """By a block, by a cluster of two, and by blocks that read the rows again."""
    for name, cluster in (("short", 1), ("cluster", 2), ("streamed", 1)):
        sanitize.select_rows(cupy, name, cluster)
    sanitize.select_rows(cupy, "short", 1, "bfloat16")


CALLS = (
    few_queries,
    many_heads,
    small_pages,
    ragged_queries,
    fp8_cache,
    windows_and_sinks,
    rows_of_1024,
    trees_of_drafts,
    lists_of_rows,
    few_rows,
    merges,
    rows_into_caches,
    rows_into_v4,
    logits,
    selection,
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_kernels_on_the_cpu(call: Callable[[CuPy], None], cupy: CuPy) -> None:
    call(cupy)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_windows_by_a_schedule_of_garbage(cupy: CuPy, seed: int, tree: bool) -> None:
    """No row tile that a plan's buffer names leads out of the arrays: they lie between fences."""
    random, fenced = np.random.default_rng(seed), Fenced(at_end=seed % 2 == 0)
    q = random.standard_normal((5, 3, 24, 576)).astype(np.float16)
    pages = random.standard_normal((6, 64, 576)).astype(np.float16)
    table = random.integers(-2, 8, (5, 3)).astype(np.int32)
    q, pages, table = (fenced.copy(array).view(Array) for array in (q, pages, table))
    out, lse = fenced.empty((5, 3, 24, 512), np.float16), fenced.empty((5, 3, 24), np.float32)
    form: dict[str, Any] = {"mask_form": "tree"} if tree else {"window": 70}
    bits = fenced.copy(random.integers(0, 1 << 32, (15, 2), np.uint64).astype(np.uint32))
    more = {"tree": bits.view(Array)} if tree else {}
    plan = cumla.MLADecodePlan.from_arrays(q, pages, **form)
    plan.update(cupy.asarray(np.int32([190, 1, 70, 64, 150])))
    assert plan._memory is not None
    layout, numbers = plan.key.layout, plan._memory.owner.view(np.int32)
    places = numbers[layout.places // 4 : layout.parts // 4]
    near = random.integers(-3, 20, len(places))
    far = random.integers(-(2**31), 2**31, len(places))
    places[:] = np.where(random.random(len(places)) < 0.7, near, far)
    plan.run(q, pages, block_table=table, out=out.view(Array), lse=lse.view(Array), **more)


def test_logits_of_the_last_keys_that_int32_can_name(cupy: CuPy) -> None:
    """All keys and scales are the same; each query sees so many of the last ones."""
    count, seen = 2**31 - 1, np.array([100, 64, 63, 1, 0], np.int32)
    ke = np.full(5, count, np.int32)
    q = cupy.asarray(np.ones((5, 64, 128), ml_dtypes.float8_e4m3fn))
    weights = cupy.asarray(np.ones((5, 64), np.float32))
    keys = np.broadcast_to(q[0, :1], (count, 128), subok=True)
    scales = np.broadcast_to(weights[0, :1], count, subok=True)
    ranges = map(cupy.asarray, (ke - seen, ke))
    logits = cumla.mqa_logits(q, (keys, scales), weights, *ranges, max_kv_len=128)
    visible = np.arange(128) < seen[:, None]
    np.testing.assert_array_equal(logits.get(), np.where(visible, 64 * 128, -np.inf))


@pytest.mark.parametrize(
    "indptr", [[0, 5, -(2**31), 9, 12], [7, -(2**31) + 7, -(2**31) + 6, 12, 2**31 - 1]]
)
def test_offsets_that_fall_to_the_smallest_number(cupy: CuPy, indptr: list[int]) -> None:
    """Where they fall a request has no queries, and rows of no request stay as they are."""
    random = np.random.default_rng(0)
    q, pages = (
        random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((12, 4, 576), (4, 64, 576))
    )
    table, lens = np.arange(4, dtype=np.int32)[:, None], np.array([64, 9, 30, 50], np.int32)
    given = (q, pages, table, lens, np.array(indptr, np.int32))
    blank = np.full((12, 4, 512), 7, ml_dtypes.bfloat16), np.full((12, 4), 7, np.float32)
    names = ("q", "kv_cache", "block_table", "kv_lens", "qo_indptr", "out", "lse")
    expected = cumla.mla_attention(
        **dict(zip(names, (*given, *(b.copy() for b in blank)), strict=True))
    )
    there = map(cupy.asarray, (*given, *blank))
    out, lse = cumla.mla_attention(**dict(zip(names, there, strict=True)))
    np.testing.assert_array_equal((out == 7).all((1, 2)), (expected.out == 7).all((1, 2)))
    np.testing.assert_allclose(lse.get(), expected.lse, rtol=1e-5)
    np.testing.assert_allclose(out.astype(np.float32), expected.out.astype(np.float32), atol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "e4m3", "float32"])
@pytest.mark.parametrize("form", attention_cases.NO_KEYS)
def test_keys_of_zero_bytes(
    cupy: CuPy, monkeypatch: pytest.MonkeyPatch, form: str, dtype: str
) -> None:
    """No launch is told where they lie: frameworks say address 0, which no copy may name."""
    told: list[Any] = []

    def noted(launch: Launch) -> None:
        told.extend(v.ptr if isinstance(v, TensorMap) else v for v in launch.values)
        emulate(launch)

    monkeypatch.setattr(tests.emulator, "emulate", noted)
    for queries, page_size in ((1, 16), (1, 64), (40, 16)):
        given = attention_cases.without_keys(form, queries, dtype, page_size)
        there = {name: cupy.asarray(array) for name, array in given.items()}
        told.clear()
        got = cumla.attention(**there)
        expected = cumla.reference.attention(**given)
        np.testing.assert_allclose(got.lse.get(), expected[1], rtol=1e-5)
        assert not got.out.get().astype(np.float32).any()
        assert told
        assert not {there[name].ctypes.data for name in "kv"} & {v for v in told if v}


@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("page_size", [0, 3, 16, 64])
@pytest.mark.parametrize("queries", ["one", "many"])
def test_what_lies_before_all_windows(cupy: CuPy, queries: str, page_size: int, cache: str) -> None:
    """It is NaN, in the first block that a window touches, too."""
    fixed = {"queries": queries, "page_size": page_size, "cache": cache, "columns": (64, 64)}
    for window in (0, 17, (40, 9)):
        fixed |= {"window": window, "lens": (200, 70, 0), "dtype": "bfloat16", "heads": (8, 2)}
        (sample,) = attention_cases.samples(1, **fixed)
        given = attention_cases.make(sample)
        for invariant in (False, True):
            there = {name: cupy.like(array) for name, array in attention_cases.make(sample).items()}
            got = cumla.attention(**there, batch_invariant=invariant)
            expected = cumla.reference.attention(**given)
            attention_cases.check(sample, [array.get() for array in got], expected)


@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("queries", ["one", "many"])
def test_visible_blocks_alone_are_divided(queries: str, columns: int, cache: str) -> None:
    """Windows of long requests, of which thread blocks have pieces."""
    for window, lens in ((127, (700, 70, 0)), (300, (1500,)), ((40, 9), (200, 3))):
        fixed = {"queries": queries, "page_size": 64, "cache": cache, "dtype": "bfloat16"}
        fixed |= {"window": window, "lens": lens, "heads": (4, 2), "columns": (columns, columns)}
        (sample,) = attention_cases.samples(1, **fixed)
        given = attention_cases.make(sample)
        with emulated_gpu(33) as cupy:
            there = {name: cupy.like(array) for name, array in attention_cases.make(sample).items()}
            got = [array.get() for array in cumla.attention(**there)]
        attention_cases.check(sample, got, cumla.reference.attention(**given))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", sanitize.PARTS)
def test_all_that_compute_sanitizer_is_shown(cupy: CuPy, part: str) -> None:
    sanitize.run_calls(cupy, part, sanitize.grid(MULTIPROCESSORS), edits=False)


@pytest.mark.parametrize("queries", [0, 5])
def test_whole_tiles_of_fewer_queries_than_rows(cupy: CuPy, queries: int) -> None:
    """As in a padded graph: of none, no tile is there, and rows of nobody stay as they are."""
    q = np.full((128, 8, 128), 0.5, np.float16)
    k = np.random.default_rng(0).standard_normal((2, 64, 1, 128)).astype(np.float16)
    lens, indptr = np.int32([100]), np.int32([0, queries])
    pages = {"block_table": np.int32([[1, 0]])}
    given = {"kv_lens": lens, "qo_indptr": indptr, **pages}
    expected = cumla.attention(q, k, k, **given).out[:queries]
    on_gpu = {name: cupy.asarray(array) for name, array in given.items()}
    arrays = [cupy.asarray(array) for array in (q, k, k)]
    out = cupy.asarray(np.full(q.shape, 7, np.float16))
    cumla.attention(*arrays, **on_gpu, out=out)
    assert np.array_equal(out.get()[queries:], np.full_like(q, 7)[queries:])
    np.testing.assert_allclose(out.get()[:queries], expected, atol=4e-3)


def attend_on(cupy: CuPy, monkeypatch: pytest.MonkeyPatch, form: str, given: Any) -> list[Array]:
    """By the kernel that the form is of."""
    ran: list[str] = []

    def noted(launch: Launch) -> None:
        ran.append(launch.spec.stem)
        emulate(launch)

    monkeypatch.setattr(tests.emulator, "emulate", noted)
    there = {n: cupy.like(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
    got = [array.get() for array in cumla.attention(**there)]
    assert form.split(",")[0].split()[0] in ran
    return got


@pytest.mark.parametrize("sinks", extreme_cases.SINKS.values(), ids=[*extreme_cases.SINKS])
@pytest.mark.parametrize("form", extreme_cases.FORMS)
def test_high_sinks(
    cupy: CuPy, monkeypatch: pytest.MonkeyPatch, form: str, sinks: tuple[float, ...]
) -> None:
    """They take all of the weight, or nearly all: what is left is as exact as without them."""
    given = extreme_cases.make(form) | {"sinks": np.array(sinks, np.float32)}
    extreme_cases.check(given, attend_on(cupy, monkeypatch, form, given))


@pytest.mark.parametrize(
    ("form", "heads"),
    [
        *(("bfloat16", 16), ("one", 16), ("packed", 16), ("packed", 40), ("v4", 16)),
        *(("e4m3", 24), ("e4m3", 40)),
    ],
)
def test_high_sinks_of_lists(cupy: CuPy, form: str, heads: int) -> None:
    """Whole ones, cut ones and empty ones, as sanitize.attend_sparse calls them."""
    options: dict[str, Any] = {"topk": 300, "lengths": "tokens", "q_len": 2, "sinks": "mixed"}
    if form in ("v4", "e4m3"):
        sanitize.attend_v4(cupy, V4Case(form=form, heads=heads, **options))
    else:
        sanitize.attend_sparse(cupy, SparseCase(heads=heads, form=form, **options))


def test_a_list_of_e4m3_rows_by_tiles_of_16_heads() -> None:
    """Many multiprocessors cut it by heads: each tile multiplies all values of a block."""
    with emulated_gpu(32) as cupy:
        case = V4Case(form="e4m3", batch=1, heads=40, topk=700, sinks="finite")
        sanitize.attend_v4(cupy, case)


@pytest.mark.parametrize("form", extreme_cases.FORMS)
def test_high_caps(cupy: CuPy, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    given = extreme_cases.make(form) | {"softcap": 1e6}
    extreme_cases.check(given, attend_on(cupy, monkeypatch, form, given))


@pytest.mark.parametrize("form", extreme_cases.E4M3_FORMS)
def test_factors_at_the_ends_of_float32(
    cupy: CuPy, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    for options in ({}, {"softcap": 1e-3}):
        for factor, scale in ((2.0**126, 0.1), (2.0**126, 1e3), (2.0**-126, 0.1)):
            given = extreme_cases.make_factors(form, factor, scale) | options
            extreme_cases.check(given, attend_on(cupy, monkeypatch, form, given))


@pytest.mark.parametrize(("form", "heads", "operation"), mla_cases.KERNELS)
def test_factors_of_latent_rows(cupy: CuPy, form: str, heads: int, operation: str) -> None:
    mla_cases.attend_to_zeros(cupy, form, heads, operation)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize(
    ("kernel", "tokens", "dtype"),
    [
        ("attention", 5, "bfloat16"),
        ("attention_prefill", 300, "bfloat16"),
        ("attention_prefill split", 40, "float16"),
        ("attention_simt", 9, "float32"),
    ],
)
def test_keys_that_are_not_finite_reach_those_who_see_them(
    cupy: CuPy, monkeypatch: pytest.MonkeyPatch, kernel: str, tokens: int, dtype: str, masked: bool
) -> None:
    """Of a value, queries of the same request that do not see it may be NaN instead; in float32
    they are not."""
    ran: list[str] = []
    monkeypatch.setattr(
        tests.emulator, "emulate", lambda launch: (ran.append(launch.spec.entry), emulate(launch))
    )
    type_, before, pages = np.dtype(getattr(ml_dtypes, dtype, dtype)), 30, 6
    random, own = np.random.default_rng(tokens), np.arange(tokens)
    draw = lambda *shape: random.standard_normal(shape, np.float32).astype(type_)  # noqa: E731
    arrays = {"q": draw(2, tokens, 8, 64)} | {x: draw(2, pages * 64, 2, 64) for x in ("k", "v")}
    given: dict[str, Any] = {"kv_lens": np.full(2, before + tokens, np.int32)}
    given["block_table"] = np.arange(2 * pages, dtype=np.int32).reshape(2, pages)
    at = 10 if masked else before + tokens // 2
    sees = own % 2 == 1 if masked else own >= tokens // 2
    start = np.tile(np.where(sees, 0, at + 1), 2).astype(np.int32)

    def attend(run: Any, of: dict[str, Any], to: Any) -> np.ndarray[Any, Any]:
        in_pages = {x: a if x == "q" else a.reshape(-1, 64, 2, 64) for x, a in of.items()}
        there = {x: to(a) for x, a in (in_pages | given).items()}
        mask = {"mask": cumla.AttentionMask(start=to(start))} if masked else {}
        return np.array(run(**there, **mask).out, np.float32)

    expected = attend(cumla.reference.attention, arrays, np.asarray)
    for name in ("k", "v"):
        changed = arrays | {name: arrays[name].copy()}
        changed[name][0, at] = np.nan
        out = attend(cumla.attention, changed, cupy.like)
        assert np.isnan(out[0, sees]).all()
        off = np.abs(out - expected)
        off[0, sees] = 0
        assert np.isfinite(off[1]).all()
        assert np.isfinite(off).all() or (name == "v" and dtype != "float32")
        assert np.nanmax(off) < 2e-2
    assert all(word in ran[-1] for word in (*kernel.split(), *(["masked"] if masked else [])))
