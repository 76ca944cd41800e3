# SPDX-License-Identifier: Apache-2.0
"""The reference of attention over keys and values against plain loops, and its contracts."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cumla.reference import merge_attention_states
from cumla.reference.mha.attention import attention

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
HOSTILE = [-(2**31), 1 - 2**31, -1, 0, 1, 2, 3, 5, 2**31 - 2, 2**31 - 1]
SINKS = np.array([0.3, -1.0, 2.0, -np.inf], np.float32)

# More queries than keys, no queries, a decode, a prefill of all keys, and no keys.
Q_LENS, KV_LENS = (3, 0, 1, 9, 2), (12, 7, 6, 5, 0)


class Problem(NamedTuple):
    """The tokens of each request, (tokens, heads, columns), however they are stored."""

    queries: list[Array]
    keys: list[Array]
    values: list[Array]


def make(
    q_lens: tuple[int, ...] = Q_LENS,
    kv_lens: tuple[int, ...] = KV_LENS,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    head_dim_v: int = 6,
) -> Problem:
    rng = np.random.default_rng(0)
    return Problem(
        [rng.standard_normal((n, heads, head_dim)) for n in q_lens],
        [rng.standard_normal((n, kv_heads, head_dim)) for n in kv_lens],
        [rng.standard_normal((n, kv_heads, head_dim_v)) for n in kv_lens],
    )


def packed(rows: list[Array], before: int = 2, after: int = 1) -> tuple[Array, Array]:
    """The rows of all requests between NaN, and the offsets."""
    indptr = before + np.cumsum([0, *map(len, rows)])
    whole = np.full((indptr[-1] + after, *rows[0].shape[1:]), np.nan)
    whole[before : indptr[-1]] = np.concatenate(rows)
    return whole, indptr.astype(np.int32)


def in_pages(problem: Problem, page_size: int = 4) -> dict[str, Any]:
    """Shuffled pages and a table; everything unused is poison."""
    queries, keys, values = problem
    counts = [-(-len(rows) // page_size) for rows in keys]
    table = np.full((len(counts), max(counts) + 1), 2147480000, np.int32)
    numbers = np.random.default_rng(1).permutation(sum(counts) + 2)
    k, v = (
        np.full((len(numbers), page_size, *rows[0].shape[1:]), np.nan) for rows in (keys, values)
    )
    for r, pages in enumerate(np.split(numbers, np.cumsum(counts))[: len(counts)]):
        table[r, : len(pages)] = pages
        for t in range(len(keys[r])):
            place = pages[t // page_size], t % page_size
            k[place], v[place] = keys[r][t], values[r][t]
    q, qo_indptr = packed(queries)
    kv_lens = np.array([*map(len, keys)], np.int32)
    arguments = {"q": q, "k": k, "v": v, "qo_indptr": qo_indptr}
    return arguments | {"kv_lens": kv_lens, "block_table": table}


def in_list(problem: Problem, page_size: int = 4) -> dict[str, Any]:
    """The same pages in a list that begins and ends with poison."""
    arguments = in_pages(problem, page_size)
    counts = -(-arguments["kv_lens"] // page_size)
    table = arguments["block_table"]
    pages = [row[:count] for row, count in zip(table, counts, strict=True)]
    return arguments | {
        "block_table": None,
        "kv_indptr": (1 + np.cumsum([0, *counts])).astype(np.int32),
        "kv_indices": np.concatenate([[-1], *pages, [-1]]).astype(np.int32),
    }


def in_rows(problem: Problem) -> dict[str, Any]:
    (q, qo_indptr), (k, kv_indptr) = packed(problem.queries), packed(problem.keys, 3)
    v, _ = packed(problem.values, 3)
    return {"q": q, "k": k, "v": v, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr}


def in_slots(problem: Problem) -> dict[str, Any]:
    """Contiguous caches: a slot per request is a page, and its number a table of one column."""
    arguments = in_pages(problem, max(map(len, problem.keys)))
    return arguments | {"block_table": arguments["block_table"][:, :1]}


def in_flat_pool(problem: Problem) -> dict[str, Any]:
    arguments = in_pages(problem, 1)
    pools = {name: arguments[name][:, 0] for name in "kv"}  # (slots, num_kv_heads, columns)
    return arguments | {name: pool[:, None] for name, pool in pools.items()}


def in_packed_pages(problem: Problem, stacked_axis: int, hnd: bool) -> dict[str, Any]:
    """One array of keys and values, (pages, 2, ...) or (2, pages, ...)."""
    arguments = in_pages(problem)
    parts = [arguments[name].swapaxes(1, 2) if hnd else arguments[name] for name in "kv"]
    both = np.moveaxis(np.stack(parts, stacked_axis).copy(), stacked_axis, 0)
    return arguments | {"k": both[0], "v": both[1], "kv_layout": "HND" if hnd else "NHD"}


def in_hnd(problem: Problem) -> dict[str, Any]:
    arguments = in_pages(problem)
    pages = {name: arguments[name].swapaxes(1, 2).copy() for name in "kv"}
    return arguments | pages | {"kv_layout": "HND"}


def in_hnd_views(problem: Problem) -> dict[str, Any]:
    """Pages in HND memory as NHD views."""
    arguments = in_hnd(problem) | {"kv_layout": "NHD"}
    return arguments | {name: arguments[name].swapaxes(1, 2) for name in "kv"}


def attend_by_loops(
    problem: Problem,
    *,
    causal: bool = True,
    window: Any = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
) -> tuple[Array, Array]:
    """The definition, one score at a time."""
    left, right = window if isinstance(window, tuple) else (window, None)
    right = 0 if causal else right
    outs, lses = [], []
    for queries, keys, values in zip(*problem, strict=True):
        n, heads, head_dim = queries.shape
        group = heads // keys.shape[1]
        scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        out, lse = np.zeros((n, heads, values.shape[2])), np.full((n, heads), -np.inf)
        for i, head in np.ndindex(n, heads):
            p = len(keys) - n + i
            total = 0.0 if sinks is None else math.exp(sinks[head])
            sums = np.zeros(values.shape[2])
            for j in range(len(keys)):
                too_old = left not in (None, -1) and j < p - left
                too_new = right not in (None, -1) and j > p + right
                if too_old or too_new:
                    continue
                score = scale * float(np.dot(queries[i, head], keys[j, head // group]))
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                total += math.exp(score)
                sums += math.exp(score) * values[j, head // group]
            if total:
                out[i, head], lse[i, head] = sums / total, math.log(total)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def check(arguments: dict[str, Any], expected: tuple[Array, Array], rtol: float = 1e-10) -> None:
    """Compare the rows of all requests, and see that those of none stay as they are."""
    q = arguments["q"]
    out = np.full((*q.shape[:2], expected[0].shape[-1]), 7.0)
    lse = np.full(q.shape[:2], 7, np.float32)
    result = attention(**arguments, out=out, lse=lse)
    assert result.out is out
    assert result.lse is lse
    begin, end = arguments["qo_indptr"][[0, -1]]
    np.testing.assert_allclose(out[begin:end], expected[0], rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(lse[begin:end], expected[1], rtol=1e-6, atol=1e-7)
    for array in (out, lse):
        assert (array[:begin] == 7).all()
        assert (array[end:] == 7).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "left": {"window": 3},
    "left, causal makes right 0": {"window": (3, 2)},
    "left only, full": {"window": 3, "causal": False},
    "left and right": {"window": (2, 1), "causal": False},
    "right only": {"window": (-1, 2), "causal": False},
    "right only, None": {"window": (None, 0), "causal": False},
    "itself": {"window": 0},
    "unbounded": {"window": -1},
    "unbounded pair": {"window": (-1, -1), "causal": False},
    "wider than int32": {"window": (2**31 - 1, 2**31 - 1), "causal": False},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS},
    "sinks, full": {"sinks": SINKS, "causal": False},
    "scale": {"softmax_scale": 1.3},
    "all": {"window": 4, "softcap": 1.5, "sinks": SINKS, "softmax_scale": 0.9},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_definition(name: str) -> None:
    problem = make()
    expected = attend_by_loops(problem, **OPTIONS[name])
    for arguments in (in_pages(problem), in_list(problem), in_rows(problem)):
        check(arguments | OPTIONS[name], expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (7, 1)])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(5, 5), (3, 7)])
def test_groups_and_head_dims(heads: int, kv_heads: int, head_dim: int, head_dim_v: int) -> None:
    problem = make(heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v)
    check(in_pages(problem), attend_by_loops(problem))


@pytest.mark.parametrize("options", [{}, {"window": (2, 1), "causal": False, "sinks": SINKS}])
def test_layouts_are_the_same_call(options: dict[str, Any]) -> None:
    problem = make(head_dim_v=8)
    expected = attend_by_loops(problem, **options)
    layouts = [in_pages(problem, page_size) for page_size in (1, 3, 5, 16)]
    layouts += [in_list(problem, page_size) for page_size in (1, 5)]
    layouts += [in_packed_pages(problem, axis, hnd) for axis in (0, 1) for hnd in (False, True)]
    layouts += [form(problem) for form in (in_rows, in_slots, in_flat_pool, in_hnd, in_hnd_views)]
    first = None
    for arguments in layouts:
        check(arguments | options, expected)
        begin, end = arguments["qo_indptr"][[0, -1]]
        bits = [x[begin:end].tobytes() for x in attention(**arguments | options)]
        first = first or bits
        assert bits == first


@pytest.mark.parametrize("form", [in_pages, in_list, in_rows, in_hnd])
def test_equal_numbers_of_queries_need_no_offsets(form: Any) -> None:
    problem = make((3, 3, 3), (7, 2, 0))
    expected_out, expected_lse = attend_by_loops(problem, sinks=SINKS)
    arguments = form(problem) | {"q": np.stack(problem.queries), "qo_indptr": None}
    out, lse = attention(**arguments, sinks=SINKS)
    assert (out.shape, lse.shape) == ((3, 3, 4, 6), (3, 3, 4))
    np.testing.assert_allclose(out.reshape(9, 4, 6), expected_out, rtol=1e-10)
    np.testing.assert_allclose(lse.reshape(9, 4), expected_lse, rtol=1e-6)
    given = np.full(out.shape, 7, np.float32), np.full(lse.shape, 7, np.float32)
    result = attention(**arguments, sinks=SINKS, out=given[0], lse=given[1])
    np.testing.assert_array_equal(result.out, out.astype(np.float32))
    np.testing.assert_array_equal(given[1], lse)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"), [(5, 5, True), (5, 5, False), (3, 9, True), (1, 9, False)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_torch_agrees(q_len: int, kv_len: int, causal: bool, heads: int, kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    problem = make((q_len, q_len), (kv_len, kv_len), heads=heads, kv_heads=kv_heads)
    q, k, v = (torch.from_numpy(np.stack(rows)).transpose(1, 2) for rows in problem)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    mask = mask.tril(kv_len - q_len) if causal else mask  # bottom-right
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    arguments = in_pages(problem) | {"q": np.stack(problem.queries), "qo_indptr": None}
    got = attention(**arguments, causal=causal)
    np.testing.assert_allclose(got.out, expected.transpose(1, 2).numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_rows_that_see_nothing(sinks: Array | None) -> None:
    """More queries than keys, and no keys at all."""
    problem = make((5, 2), (2, 0))
    blind = np.array([True, True, True, False, False, True, True])
    arguments = in_rows(problem) | {"q": np.concatenate(problem.queries)}
    arguments["qo_indptr"] = np.array([0, 5, 7], np.int32)
    out, lse = attention(**arguments, sinks=sinks)
    assert (~out.any(axis=(1, 2)) == blind).all()
    expected = np.full(4, -np.inf) if sinks is None else sinks
    assert (lse[blind] == expected).all()
    assert np.isfinite(lse[~blind]).all()


@pytest.mark.parametrize("q_dtype", [BF16, np.float16, np.float32])
def test_dtypes(q_dtype: Any) -> None:
    """New outputs have q's dtype; a float32 one is rounded once from float64."""
    problem = make()
    arguments = in_rows(problem)
    for name in "qkv":
        arguments[name] = arguments[name].astype(q_dtype)
    exact = attention(**arguments | {n: arguments[n].astype(np.float64) for n in "qkv"})
    tokens = slice(*arguments["qo_indptr"][[0, -1]])
    got = attention(**arguments)
    assert (got.out.dtype, got.lse.dtype) == (q_dtype, np.float32)
    np.testing.assert_array_equal(got.out[tokens], exact.out[tokens].astype(q_dtype))
    out = np.zeros(exact.out.shape, np.float32)
    attention(**arguments, out=out)
    np.testing.assert_array_equal(out[tokens], exact.out[tokens].astype(np.float32))


def test_sinks_of_16_bits() -> None:
    problem = make()
    sinks = SINKS.astype(BF16)
    check(in_pages(problem) | {"sinks": sinks}, attend_by_loops(problem, sinks=sinks))


@pytest.mark.parametrize(
    ("score", "sink", "weight", "total"),
    [(2000, 0, 1, 3), (0, 2000, 0, 1), (2000, 2000, 0.75, 4), (-2000, -2000, 0.75, 4)],
)
def test_exponents_that_do_not_fit(score: float, sink: float, weight: float, total: float) -> None:
    """Three equal scores and a sink: the larger decides alone, or all four share."""
    q, k, v = np.full((1, 1, 1, 1), score, np.float64), np.ones((3, 1, 1)), np.ones((3, 1, 1))
    sinks, kv_indptr = np.array([sink], np.float32), np.array([0, 3], np.int32)
    out, lse = attention(q, k, v, kv_indptr=kv_indptr, sinks=sinks)
    np.testing.assert_allclose(out.item(), weight, rtol=1e-12)
    np.testing.assert_allclose(lse.item(), max(score, sink) + math.log(total), rtol=1e-6)


@pytest.mark.parametrize("form", [in_pages, in_list, in_rows, in_hnd])
@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("shape", [None, (), (1,), (2,), (5, 2)], ids=str)
def test_e4m3_caches(form: Any, as_bits: bool, shape: tuple[int, ...] | None) -> None:
    """Numbers in the cache are multiplied by the scales of their head, or request and head."""
    rng = np.random.default_rng(2)
    some = {name: rng.uniform(0.3, 2, shape or ()).astype(np.float32) for name in "kv"}
    scales = {name: x if shape is not None else float(x) for name, x in some.items()}

    problem = make()
    scaled = Problem(problem.queries, [], [])
    for name, rows, numbers in zip("kv", problem[1:], scaled[1:], strict=True):
        rows[:] = [x.astype(E4M3).astype(np.float64) for x in rows]
        factors = np.broadcast_to(some[name].astype(np.float64), (5, 2))[..., None]
        numbers += [x * factor for x, factor in zip(rows, factors, strict=True)]
    arguments = form(problem)
    for name in "kv":
        cache = arguments[name].astype(E4M3)
        arguments[name] = cache.view(np.uint8) if as_bits else cache
        arguments[f"{name}_scale"] = scales[name]
    check(arguments, attend_by_loops(scaled))


def test_a_scale_belongs_to_an_e4m3_cache() -> None:
    arguments = in_pages(make())
    values_only = arguments | {"v": arguments["v"].astype(E4M3)}
    attention(**values_only, v_scale=0.5)
    with pytest.raises(ValueError, match=r"^k_scale: the cache is float64"):
        attention(**values_only, k_scale=0.5)
    with pytest.raises(ValueError, match=r"^v_scale: the cache is float64"):
        attention(**arguments, v_scale=np.ones(1, np.float32))


@pytest.mark.parametrize("page", [-(2**31), -1, 7, 2**31 - 1])
def test_bad_pages_that_are_used_are_zeros(page: int) -> None:
    zeros = make((3, 2), (10, 6))
    for rows in (zeros.keys, zeros.values):
        rows[0][4:8] = 0
    table, listed = in_pages(make((3, 2), (10, 6))), in_list(make((3, 2), (10, 6)))
    assert len(table["k"]) == 7
    table["block_table"][0, 1] = page
    listed["kv_indices"][listed["kv_indptr"][0] + 1] = page
    for arguments in (table, listed):
        check(arguments, attend_by_loops(zeros))


def test_keys_before_the_window_never_show() -> None:
    """Nor do their pages: a windowed layer keeps the last ones."""
    problem = make((2, 1), (14, 9))
    expected = attend_by_loops(problem, window=3)
    arguments = in_pages(problem)
    for r, first in enumerate((14 - 2 - 3, 9 - 1 - 3)):
        table = arguments["block_table"][r]
        for t in range(first):
            arguments["k"][table[t // 4], t % 4] = np.nan
            arguments["v"][table[t // 4], t % 4] = np.nan
        table[: first // 4] = -5
    check(arguments | {"window": 3}, expected)


@pytest.mark.parametrize(
    ("form", "kv_lens", "kept"),
    [
        (in_slots, (2**31 - 1, 4), (8, 4)),
        (in_slots, (9, -1), (8, 0)),
        (in_slots, (-(2**31), 3), (0, 3)),
        (in_list, (2**31 - 1, 2), (8, 2)),
        (in_rows, (2**31 - 1, 100), (8, 4)),
        (in_rows, (5, -7), (5, 0)),
        (in_rows, None, (8, 4)),
    ],
)
def test_lengths_are_clamped(form: Any, kv_lens: Any, kept: tuple[int, int]) -> None:
    problem = make((3, 2), (8, 4))
    arguments = form(problem)
    if kv_lens is not None:
        arguments["kv_lens"] = np.array(kv_lens, np.int32)
    queries, keys, values = problem
    cut = [[x[:n] for x, n in zip(rows, kept, strict=True)] for rows in (keys, values)]
    check(arguments, attend_by_loops(Problem(queries, *cut)))


@pytest.mark.parametrize("form", [in_pages, in_list, in_rows])
@pytest.mark.parametrize("seed", range(12))
def test_any_integer_is_safe(form: Any, seed: int) -> None:
    """Hostile arrays mean what arrays mean that say the same within bounds."""
    rng = np.random.default_rng(seed)
    hostile = form(make()) | {"kv_lens": rng.choice(HOSTILE, 5).astype(np.int32)}
    for name in "qkv":
        hostile[name] = np.nan_to_num(hostile[name], nan=0.5)
    for name in ("qo_indptr", "block_table", "kv_indptr", "kv_indices"):
        if hostile.get(name) is not None:
            some = rng.random(hostile[name].shape) < 0.4
            hostile[name][some] = rng.choice(HOSTILE, some.sum())

    tame = dict(hostile)
    num_pages = len(hostile["k"])
    if form is not in_rows:
        zeros = {n: np.zeros_like(hostile[n][:1]) for n in "kv"}
        tame |= {n: np.concatenate([hostile[n], zeros[n]]) for n in "kv"}
        name = "block_table" if form is in_pages else "kv_indices"
        pages = hostile[name]
        tame[name] = np.where((pages < 0) | (pages >= num_pages), num_pages, pages)
    tame["kv_lens"] = np.clip(hostile["kv_lens"], 0, 1000)  # more than any request holds
    tame["qo_indptr"] = np.clip(hostile["qo_indptr"], 0, len(hostile["q"]))
    if form is not in_pages:
        held = len(hostile["k"] if form is in_rows else hostile["kv_indices"])
        tame["kv_indptr"] = np.clip(hostile["kv_indptr"], 0, held)

    results = []
    for arguments in (hostile, tame):
        out, lse = np.full((18, 4, 6), 7.0), np.full((18, 4), 7, np.float32)
        results.append(attention(**arguments, out=out, lse=lse))
    for got, expected in zip(*results, strict=True):
        assert not np.isnan(got).any()
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("least", [-1, 1 - 2**31, -(2**31)])
def test_offsets_are_clamped_before_they_are_subtracted(least: int) -> None:
    problem = make((2, 3), (8, 5))
    expected = attend_by_loops(problem)
    for form in (in_list, in_rows):
        arguments = form(problem)
        cut = {"q": arguments["q"][2:], "qo_indptr": arguments["qo_indptr"] - np.int32(2)}
        first = arguments["kv_indptr"][0]
        cut["kv_indptr"] = arguments["kv_indptr"] - first
        for name in ("kv_indices",) if form is in_list else ("k", "v"):
            cut[name] = arguments[name][first:]
        cut["qo_indptr"][0] = cut["kv_indptr"][0] = least
        out, lse = attention(**arguments | cut)
        np.testing.assert_allclose(out[:5], expected[0], rtol=1e-10)
        np.testing.assert_allclose(lse[:5], expected[1], rtol=1e-6, atol=1e-7)

    out, lse = np.full((8, 4, 6), 7.0), np.full((8, 4), 7, np.float32)
    for ends in ([least] * 3, [2, least, least], [8, 2**31 - 1, least]):
        indptr = np.array(ends, np.int32)
        attention(**in_pages(problem) | {"qo_indptr": indptr}, out=out, lse=lse)
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize("with_sink", [None, 0, 1])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_halves_of_the_keys_merge_to_the_whole(with_sink: int | None, softcap: Any) -> None:
    """One of the halves carries the sinks; first halves that every query sees in full."""
    q_lens, kv_lens = (3, 0, 1, 6, 2), (12, 7, 6, 4, 0)
    problem = make(q_lens, kv_lens)
    sinks = None if with_sink is None else SINKS
    expected = attend_by_loops(problem, sinks=sinks, softcap=softcap)
    cuts = [max(kv_len - q_len, 0) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    halves = []
    for part, causal in enumerate((False, True)):
        bounds = [slice(cut) if part == 0 else slice(cut, None) for cut in cuts]
        rows = [[x[some] for x, some in zip(rows, bounds, strict=True)] for rows in problem[1:]]
        arguments = in_rows(Problem(problem.queries, *rows))
        tokens = slice(*arguments["qo_indptr"][[0, -1]])
        own = SINKS if with_sink == part else None
        state = attention(**arguments, causal=causal, softcap=softcap, sinks=own)
        halves.append([x[tokens] for x in state])
    out, lse = merge_attention_states(*zip(*halves, strict=True))
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-6)


def test_keys_come_in_one_form() -> None:
    pages, listed, rows = (form(make()) for form in (in_pages, in_list, in_rows))
    both = listed | {"block_table": pages["block_table"]}
    for arguments in (both, pages | {"block_table": None}, listed | {"kv_indptr": None}):
        with pytest.raises(ValueError, match=r"^block_table: needs a table, or kv_indptr and"):
            attention(**arguments)
    with pytest.raises(ValueError, match=r"^kv_lens: needed for pages"):
        attention(**pages | {"kv_lens": None})
    tables = {"block_table": pages["block_table"]}
    for arguments in (rows | tables, rows | {"kv_indptr": None}):
        with pytest.raises(ValueError, match=r"^kv_indptr: ragged rows"):
            attention(**arguments)
    with pytest.raises(ValueError, match=r"^kv_layout: 'HND' is a layout of pages"):
        attention(**rows, kv_layout="HND")
    with pytest.raises(ValueError, match=r"^qo_indptr: needed for q with 3 axes"):
        attention(**pages | {"qo_indptr": None})


def test_no_requests_and_no_tokens() -> None:
    pages, rows = in_pages(make()), in_rows(make())
    none = {"qo_indptr": np.zeros(1, np.int32), "q": pages["q"][:0]}
    some = pages | none | {n: pages[n][:0] for n in ("kv_lens", "block_table")}
    assert attention(**some).out.shape == (0, 4, 6)
    assert attention(**rows | none | {"kv_indptr": np.zeros(1, np.int32)}).lse.shape == (0, 4)
    batched = some | {"qo_indptr": None, "q": np.zeros((0, 2, 4, 8))}
    assert attention(**batched).lse.shape == (0, 2, 4)
    no_pages = pages | {name: pages[name][:0] for name in "kv"}
    assert not attention(**no_pages | {"causal": False}).out[2:-1].any()  # pages of zeros


def test_memory_grows_with_the_tokens() -> None:
    """Of one request: not with the cache, nor with the product of queries and keys."""
    tokens, page_size = 600, 2**24
    row = np.ones((1, 1, 1, 8), BF16)
    cache = np.broadcast_to(row, (2**10, page_size, 1, 8))  # more than 2**32 rows
    q = np.ones((1, tokens, 8, 8), BF16)
    options = {
        "block_table": np.array([[2**10 - 1]], np.int32),
        "kv_lens": np.array([tokens], np.int32),
    }
    tracemalloc.start()
    try:
        out, lse = attention(q, cache, cache, **options)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # all scores are 23 MB
    finally:
        tracemalloc.stop()
    assert (out == 1).all()
    expected = 8**0.5 + np.log(np.arange(1, tokens + 1))
    np.testing.assert_allclose(lse[0], expected[:, None].repeat(8, axis=1), rtol=1e-6)
