# SPDX-License-Identifier: Apache-2.0
"""Calls of block_scores and select_blocks, drawn at random; NumPy arrays.

Keys that no query sees hold NaN.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.blocks.block_cases import E4M3, LEAST, MOST

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), E4M3)


class Scores(NamedTuple):
    """A call of block_scores, and the request and the visible tokens of each query token."""

    given: dict[str, Any]
    seen: list[tuple[int, int]]


class _Drawn(NamedTuple):
    """What an array of keys, and the queries, look like."""

    block: int
    in_page: int  # blocks
    columns: int
    heads: int
    dtype: np.dtype[Any]
    queries: int | str  # tokens of a request, or "ragged"
    lens: tuple[int, ...]
    apart: int = 0  # columns between rows of keys


def scores_case(seed: int) -> Scores:
    """Draw the arrays of a call."""
    draw = random.Random(seed)
    block, in_page = draw.choice([(16, 1), (16, 8), (64, 1), (64, 4), (128, 1), (128, 2), (48, 2)])
    columns, heads = draw.choice([64, 128, 128, 256]), draw.choice([1, 2, 4, 4, 16, 32, 5])
    lens = draw.choice([(900,), (5, 0, 130, 257), (1, 2, 3, 4, 5, 600), (4100,)])
    queries = draw.choice([1, 1, 2, 4, "ragged", "ragged"])
    return _made(
        _Drawn(block, in_page, columns, heads, DTYPES[seed % 3], queries, lens), seed, draw
    )


def few_case(seed: int) -> Scores:
    """Draw the arrays of a call with few query rows of each request."""
    draw = random.Random(seed)
    block, in_page = draw.choice([(16, 1), (16, 8), (64, 2), (128, 1), (128, 2), (48, 2), (80, 1)])
    heads, queries = draw.choice([(4, 1), (4, 2), (1, 1), (8, 1), (3, 2), (2, 4), (1, 8)])
    some = [draw.choice([0, 0, 1, 15, 16, 17, 100, 128, 129, 300]) for _ in range(70)]
    lens = draw.choice([(900,), (5, 0, 130, 257), tuple(some), (0, 0, 0), (4100, 1), (0, 600)])
    apart = draw.choice([0, 0, 16, 128])
    return _made(
        _Drawn(block, in_page, 128, heads, DTYPES[seed % 3], queries, lens, apart), seed, draw
    )


def long_case(dtype: np.dtype[Any]) -> Scores:
    """Make a call of one query row, whose blocks of 128 keys fill a warp's ring again and again."""
    lens = (17, 129, 0, 128, 15, 100, 300, 1000)
    return _made(_Drawn(128, 2, 128, 1, dtype, 1, lens), 5, random.Random(5))


def _made(of: _Drawn, seed: int, draw: random.Random) -> Scores:
    rng = np.random.default_rng(seed)
    block, in_page, columns, heads, dtype, queries, lengths, apart = of
    lens, page = np.array(lengths, np.int32), block * in_page
    batch, causal = len(lens), draw.random() < 0.7
    begin = 0
    if isinstance(queries, str):
        counts = rng.integers(0, 40 // heads + 3, batch)
        begin = draw.choice([0, 1])
        bounds = (begin + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)
        lead: tuple[int, ...] = (int(bounds[-1]) + draw.choice([0, 2]),)
    else:
        counts, bounds, lead = np.full(batch, queries), None, (batch, queries)
    seen = [(-1, 0)] * int(np.prod(lead))
    for request, count in enumerate(counts):
        for i in range(count):
            behind = int(count) - 1 - i if causal else 0
            seen[begin + i] = request, max(int(lens[request]) - behind, 0)
        begin += int(count)
    most = max(1, -(-int(lens.max()) // page)) + draw.choice([0, 1])
    num_pages = batch * most + 2
    table = rng.permutation(num_pages)[: batch * most].reshape(batch, most).astype(np.int32)
    used = -(-lens // page)
    table[np.arange(most) >= used[:, None]] = draw.choice([-1, LEAST, MOST, num_pages])
    if draw.random() < 0.3:
        table[0, 0] = -7  # a page that is not there
    keys = np.full((num_pages, page, columns + apart), np.nan)
    for request, tokens in {(r, max(t for s, t in seen if s == r)) for r, _ in seen if r >= 0}:
        at = np.arange(tokens)
        at = at[table[request, at // page] >= 0]
        numbers = rng.standard_normal((len(at), columns))
        keys[table[request, at // page], at % page, :columns] = numbers
    given: dict[str, Any] = {
        "q": rng.standard_normal((*lead, heads, columns)).astype(dtype),
        "keys": keys.astype(dtype)[..., :columns],
        "block_size": block,
        "kv_lens": lens,
        "block_table": table,
        "causal": causal,
    }
    if bounds is not None:
        given["qo_indptr"] = bounds
    return Scores(given, seen)


def check_scores(case: Scores, got: Any) -> None:
    """Compare with float64, by a loop over blocks."""
    given = case.given
    q = given["q"].reshape(-1, *given["q"].shape[-2:]).astype(np.float64)
    keys, block = given["keys"], given["block_size"]
    num_pages, page = keys.shape[:2]
    assert got.shape == (*q.shape[:2], given["block_table"].shape[1] * page // block)
    want, sizes = np.full(got.shape, -np.inf), np.zeros(got.shape)
    for token, (request, seen) in enumerate(case.seen):
        for b in range(-(-seen // block)):
            number = int(given["block_table"][request, b * block // page])
            if not 0 <= number < num_pages:
                continue
            begin = b * block % page
            rows = keys[number, begin : begin + min(block, seen - b * block)].astype(np.float64)
            want[token, :, b] = (q[token] @ rows.T).max(axis=1)
            sizes[token, :, b] = (np.abs(q[token]) @ np.abs(rows).T).max(axis=1)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    there = ~np.isneginf(want)
    # Each product of two numbers is exact; a sum of n has at most n - 1 roundings.
    errors = np.abs(got[there].astype(np.float64) - want[there])
    assert (errors <= 2.0**-22 * q.shape[-1] ** 0.5 * sizes[there]).all(), errors.max()


class _Sums(NamedTuple):
    """What a call of sums over heads looks like."""

    groups: int
    heads: int  # of a group
    columns: int
    stride: int
    block_rows: int
    page_rows: int
    dtype: np.dtype[Any]
    queries: int | str
    lens: tuple[int, ...]
    lists: int | None  # of a query token
    topk: int


def sums_case(seed: int) -> Scores:
    """Draw the arrays of a call with sums over heads, pooled keys or lists of blocks."""
    draw = random.Random(seed)
    groups, heads = draw.choice(
        [(1, 4), (1, 4), (4, 4), (1, 1), (3, 1), (2, 3), (1, 16), (1, 32), (2, 9), (5, 8), (16, 2)]
    )
    stride, rows = draw.choice([(4, 1), (4, 1), (8, 1), (8, 1), (1, 1), (1, 16), (1, 128), (2, 32)])
    page_rows = draw.choice([2, 3, 8, 16, 64]) if rows == 1 else rows * draw.choice([1, 2])
    lens = draw.choice([(900,), (5, 0, 130, 257), (1, 2, 3, 4, 5, 600), (4100,), (33, 8, 7, 40)])
    return _sums(
        _Sums(
            *(groups, heads, draw.choice([64, 128, 128, 256]), stride, rows, page_rows),
            *(DTYPES[seed % 3], draw.choice([1, 1, 2, 4, "ragged"]), lens),
            *(draw.choice([None, None, 1, groups]), draw.choice([1, 5, 16, 40, 300])),
        ),
        *(seed, draw),
    )


def pooled_case(seed: int) -> Scores:
    """Draw the arrays of a call with pooled keys, and few query rows of each request."""
    draw = random.Random(seed)
    groups, heads, queries = draw.choice(
        [(1, 4, 1), (1, 4, 1), (1, 4, 2), (2, 4, 1), (1, 8, 1), (2, 2, 2), (8, 1, 1), (3, 1, 2)]
    )
    some = [draw.choice([0, 0, 1, 7, 8, 31, 100, 128, 129, 300, 700]) for _ in range(70)]
    lens = draw.choice([(900,), (5, 0, 130, 257), tuple(some), (0, 0, 0), (4100, 1), (0, 600)])
    dtype = DTYPES[seed % 3]
    columns = draw.choice([128, 256]) if dtype == E4M3 else 128
    page_rows = draw.choice([2, 3, 8, 16, 17, 32, 64, 136])
    stride = draw.choice([4, 8, 8, 1, 3])
    of = _Sums(groups, heads, columns, stride, 1, page_rows, dtype, queries, lens, None, 0)
    return _sums(of, seed, draw)


def prompts_case(seed: int) -> Scores:
    """Draw the arrays of a call with pooled keys, and many query tokens of each request."""
    draw = random.Random(seed)
    groups, heads = draw.choice([(1, 4), (1, 4), (4, 4), (17, 4), (1, 1), (2, 3), (5, 2), (17, 1)])
    lens = draw.choice([(900,), (50, 0, 130, 257), (1, 2, 3, 4, 5, 600), (1400, 33)])
    queries = draw.choice([16, 24, 70, "prompts", "prompts"])
    of = _Sums(
        *(groups, heads, draw.choice([64, 128, 128, 256]), draw.choice([4, 4, 8, 1]), 1),
        *(draw.choice([3, 8, 32]), DTYPES[seed % 3], queries, lens, None, 0),
    )
    return _sums(of, seed, draw)


def _sums(of: _Sums, seed: int, draw: random.Random) -> Scores:
    rng = np.random.default_rng(seed)
    tokens_of_page = of.page_rows * of.stride
    lens = np.array(of.lens, np.int32)
    batch, causal, heads = len(lens), draw.random() < 0.7, of.groups * of.heads
    begin, bounds = 0, None
    if isinstance(of.queries, str):
        counts = rng.integers(0, 9 if of.queries == "ragged" else 60, batch)
        begin = draw.choice([0, 1])
        bounds = (begin + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)
        lead: tuple[int, ...] = (int(bounds[-1]) + draw.choice([0, 2]),)
    else:
        counts, lead = np.full(batch, of.queries), (batch, of.queries)
    tokens = int(np.prod(lead))
    seen = [(-1, 0)] * tokens
    for request, count in enumerate(counts):
        for i in range(count):
            behind = int(count) - 1 - i if causal else 0
            seen[begin + i] = request, max(int(lens[request]) - behind, 0)
        begin += int(count)
    most = max(1, -(-int(lens.max()) // tokens_of_page)) + draw.choice([0, 1])
    num_pages = batch * most + 2
    table = rng.permutation(num_pages)[: batch * most].reshape(batch, most).astype(np.int32)
    used = -(-lens // tokens_of_page)
    table[np.arange(most) >= used[:, None]] = draw.choice([-1, LEAST, MOST, num_pages])
    if draw.random() < 0.3:
        table[0, 0] = -7  # a page that is not there
    apart = draw.choice([0, 0, 16])
    keys = np.full((num_pages, of.page_rows, of.columns + apart), np.nan)
    for request, rows in {(r, max(t for s, t in seen if s == r) // of.stride) for r, _ in seen}:
        at = np.arange(rows)
        at = at[table[request, at // of.page_rows] >= 0]
        numbers = rng.standard_normal((len(at), of.columns))
        keys[table[request, at // of.page_rows], at % of.page_rows, : of.columns] = numbers
    given: dict[str, Any] = {
        "q": rng.standard_normal((*lead, heads, of.columns)).astype(of.dtype),
        "keys": keys.astype(of.dtype)[..., : of.columns],
        "block_size": of.block_rows * of.stride,
        "kv_lens": lens,
        "block_table": table,
        "causal": causal,
        "num_groups": of.groups,
        "stride": of.stride,
        "activation": draw.choice(["relu", "relu", "none"]),
    }
    if draw.random() < 0.5:
        weights = rng.standard_normal((heads, tokens)).astype(np.float32)
        given["weights"] = weights.T if draw.random() < 0.5 else np.ascontiguousarray(weights.T)
    if bounds is not None:
        given["qo_indptr"] = bounds
    if of.lists is not None:
        blocks = -(-int(lens.max()) // given["block_size"])
        lists = rng.integers(-1, blocks + 2, (of.lists, tokens, of.topk))
        odd = rng.random(lists.shape) < 0.1
        lists[odd] = rng.choice([-1, LEAST, MOST], int(odd.sum()))
        if draw.random() < 0.5:
            lists[rng.random(lists.shape) < 0.05] += 1 << 32  # no block, whatever its low bits
        else:
            lists = lists.astype(np.int32)
        given["block_indices"] = lists.transpose(1, 0, 2)
    return Scores(given, seen)


def check_sums(case: Scores, got: Any) -> None:
    """Compare with float64, by loops over groups and blocks."""
    given = case.given
    q = given["q"].reshape(-1, *given["q"].shape[-2:]).astype(np.float64)
    keys, stride, rows = given["keys"], given["stride"], given["block_size"] // given["stride"]
    groups, lists = given["num_groups"], given.get("block_indices")
    num_pages, page_rows = keys.shape[:2]
    blocks = given["block_table"].shape[1] * page_rows // rows
    weights = given.get("weights", np.ones(q.shape[:2])).astype(np.float64)
    width = blocks if lists is None else lists.shape[2]
    assert got.shape == (len(q), groups, width)
    want, sizes = np.full(got.shape, -np.inf), np.zeros(got.shape)
    for token, (request, seen) in enumerate(case.seen):
        at = np.arange(seen // stride)
        number = given["block_table"][request, at // page_rows].astype(np.int64)
        exists = (number >= 0) & (number < num_pages)
        number[~exists] = 0
        of_keys = keys[number, at % page_rows].astype(np.float64).T
        for group in range(groups):
            some = slice(group * q.shape[1] // groups, (group + 1) * q.shape[1] // groups)
            products = q[token, some] @ of_keys
            if given["activation"] == "relu":
                products = np.maximum(products, 0)
            sums = np.where(exists, weights[token, some] @ products, -np.inf)
            bounds = np.abs(weights[token, some]) @ (np.abs(q[token, some]) @ np.abs(of_keys))
            list_of = None if lists is None else lists[token, min(group, lists.shape[1] - 1)]
            numbers = range(blocks) if list_of is None else list_of.tolist()
            for entry, b in enumerate(numbers):
                if b >= 0 and b * rows < len(sums):
                    want[token, group, entry] = sums[b * rows : (b + 1) * rows].max()
                    sizes[token, group, entry] = bounds[b * rows : (b + 1) * rows].max()
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    there = ~np.isneginf(want)
    errors = np.abs(got[there].astype(np.float64) - want[there])
    assert (errors <= 2.0**-22 * q.shape[-1] ** 0.5 * sizes[there]).all(), errors.max()


def select_case(seed: int) -> dict[str, Any]:
    """Draw the arrays of a call of select_blocks."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    width = draw.choice([1, 7, 40, 1024, 5000, 16384])
    tokens, groups = draw.choice([(1, 1), (5, 4), (3, 1), (64, 2)])
    k = draw.choice([1, 3, 16, 17, 96, 512])
    init, local = draw.choice([(0, 0), (0, 1), (1, 1), (1, 2), (1, 33), (0, 3)])
    k = max(k, init + local)
    edges = [0, 1, k - 1, k, k + 1, init, init + local, width, width + 9, -4, width // 2, LEAST]
    scores = rng.standard_normal((tokens, groups, width))
    if draw.random() < 0.5:
        scores = np.round(scores * 2)  # ties
    if draw.random() < 0.5:
        odd = rng.random(scores.shape) < 0.2
        scores[odd] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], int(odd.sum()))
    dtype = draw.choice([np.float32, np.float32, np.float16, ml_dtypes.bfloat16])
    scores = scores.astype(dtype)
    if draw.random() < 0.4:  # rows of a group together, as engines hold them
        scores = np.ascontiguousarray(scores.swapaxes(0, 1)).swapaxes(0, 1)
    visible = np.array(rng.choice(edges, tokens), np.int32)
    return {
        "scores": scores,
        "topk": k,
        "visible": visible,
        "init_blocks": init,
        "local_blocks": local,
    }


def chosen(given: dict[str, Any]) -> Any:
    """Select in Python, row by row."""
    scores, k, width = given["scores"], given["topk"], given["scores"].shape[2]
    found = np.full((*scores.shape[:2], k), -1, np.int32)
    for token, group in np.ndindex(scores.shape[:2]):
        visible = range(min(max(int(given["visible"][token]), 0), width))
        forced = set(visible[: given["init_blocks"]])
        if given["local_blocks"]:
            forced |= set(visible[-given["local_blocks"] :])
        row = scores[token, group, : len(visible)].astype(np.float64)
        is_nan = np.isnan(row)
        best = np.lexsort((np.where(is_nan, 0.0, -row), ~is_nan)).tolist()  # equal ones by number
        others = [b for b in best if b not in forced]
        free = k - given["init_blocks"] - given["local_blocks"]
        blocks = sorted(forced | set(others[:free]))
        found[token, group, : len(blocks)] = blocks
    return found
