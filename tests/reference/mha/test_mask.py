# SPDX-License-Identifier: Apache-2.0
"""Attention with a mask against loops over queries, heads and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cumla import reference
from cumla.mha.mask import AttentionMask
from tests.mha.mask_cases import LEAST, MOST, Batch, Query, interval_cases, shown, tree_cases

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
HEADS, KV_HEADS, COLUMNS, VALUES = 4, 2, 8, 6
SINKS = np.array([0.3, -1.0, 2.0, -np.inf])


class Problem(NamedTuple):
    """Requests whose keys and values are stored apart, in rows without pages."""

    batch: Batch
    arguments: dict[str, Any]

    def rows_of(self, name: str, request: int) -> Any:
        begin, end = self.arguments["kv_indptr"][request : request + 2]
        return self.arguments[name][begin:end]


def make(batch: Batch) -> Problem:
    rng = np.random.default_rng(1)
    total = sum(batch.kv_lens)
    arguments = {
        "q": rng.standard_normal((batch.total, HEADS, COLUMNS)),
        "k": rng.standard_normal((total, KV_HEADS, COLUMNS)),
        "v": rng.standard_normal((total, KV_HEADS, VALUES)),
        "kv_indptr": np.cumsum([0, *batch.kv_lens]).astype(np.int32),
        "qo_indptr": batch.places["qo_indptr"],
        "out": np.full((batch.total, HEADS, VALUES), 7.0),
        "lse": np.full((batch.total, HEADS), 7.0, np.float32),
    }
    return Problem(batch, arguments)


def expected_of(
    problem: Problem, query: Query, head: int, keys: list[int], **options: Any
) -> tuple[Any, float]:
    """Attend from one row to some keys, by the formula."""
    q = problem.arguments["q"][query.row, head].astype(np.float64)
    kv_head, cap = head // (HEADS // KV_HEADS), options.get("softcap")
    k, v = (problem.rows_of(name, query.request)[:, kv_head].astype(np.float64) for name in "kv")
    scores = [float(q @ k[j]) * options.get("k_scale", 1.0) * COLUMNS**-0.5 for j in keys]
    if cap:
        scores = [cap * math.tanh(score / cap) for score in scores]
    weights = [math.exp(score) for score in scores]
    total = sum(weights)
    if options.get("sinks") is not None:
        total += math.exp(options["sinks"][head])
    out = sum((w * v[j] for w, j in zip(weights, keys, strict=True)), np.zeros(VALUES))
    out = out * options.get("v_scale", 1.0)
    return (out / total, math.log(total)) if total else (out, -math.inf)


def check(problem: Problem, mask: AttentionMask, causal: bool = True, **options: Any) -> None:
    out, lse = reference.attention(**problem.arguments, mask=mask, causal=causal, **options)
    arrays, found = mask.given, set()
    if not causal and mask.end is None:
        arrays["end"] = np.full(problem.batch.total, MOST)
    for query in problem.batch.queries():
        keys = [j for j in range(query.kv_len) if shown(arrays, query, j)]
        found.add(query.row)
        for head in range(HEADS):
            expected = expected_of(problem, query, head, keys, **options)
            np.testing.assert_allclose(out[query.row, head], expected[0], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse[query.row, head], expected[1], rtol=1e-6, atol=1e-6)
    for row in {*range(problem.batch.total)} - found:
        assert (out[row] == 7).all()


CASES = [
    case for case in (*interval_cases()[::11], *tree_cases()[1::4]) if sum(case.batch.q_lens) < 250
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_masks_of_the_builders(case: Any) -> None:
    check(make(case.batch), case.build())


RAGGED = Batch((1, 0, 5, 20), (9, 4, 5, 70), lead=2, tail=3)


def any_masks() -> Iterator[AttentionMask]:
    """Arrays of any integers, each left out in some."""
    rng, total = np.random.default_rng(2), RAGGED.total
    extremes = np.array([LEAST, -1, 0, 1, 70, MOST])

    def some(*shape: int) -> Any:
        near = rng.integers(-9, 80, shape)
        chosen = np.where(rng.random(shape) < 0.2, rng.choice(extremes, shape), near)
        return chosen.astype(np.int32)

    for i in range(24):
        words = int(rng.integers(1, 9))
        tree = rng.integers(0, 1 << 32, (total, words), np.uint32)
        starts = some(4) if i % 4 < 2 else None
        yield AttentionMask(
            start=some(total) if i % 3 else None,
            end=some(total) if i % 5 else None,
            prefix_len=some(4) if i % 2 else None,
            tree=tree if i % 3 != 1 else None,
            tree_start=starts if i % 3 != 1 else None,
        )


@pytest.mark.parametrize("causal", [True, False])
def test_any_integers(causal: bool) -> None:
    for mask in any_masks():
        check(make(RAGGED), mask, causal)


@pytest.mark.parametrize(
    "options",
    [{"sinks": SINKS}, {"softcap": 2.0}, {"sinks": SINKS, "softcap": 0.5}],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    for mask in [*any_masks()][::4]:
        check(make(RAGGED), mask, **options)


def test_e4m3() -> None:
    problem = make(RAGGED)
    given = problem.arguments
    given |= {name: given[name].astype(E4M3) for name in "kv"}
    for mask in [*any_masks()][::4]:
        check(problem, mask, k_scale=0.5, v_scale=2.0)


def test_rows_that_see_nothing() -> None:
    """out 0 and lse -inf or, with sinks, the sink."""
    problem, total = make(RAGGED), RAGGED.total
    nothing = AttentionMask(end=np.full(total, -1, np.int32))
    for sinks in (None, SINKS):
        out, lse = reference.attention(**problem.arguments, mask=nothing, sinks=sinks)
        rows = [query.row for query in RAGGED.queries()]
        assert not out[rows].any()
        expected = -np.inf if sinks is None else sinks.astype(np.float32)
        assert (lse[rows] == expected).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_invisible_rows_do_not_show(poison: float) -> None:
    """Each key is poison for all queries that do not see it, in the middle of others as well."""
    rng = np.random.default_rng(4)
    batch = Batch((6,), (40,))
    tree = rng.integers(0, 256, (6, 1), np.uint32)
    masks = [
        AttentionMask(np.int32([5] * 6), np.int32([9, 9, 20, 20, 30, 30]), np.int32([2])),
        AttentionMask(tree=tree, tree_start=np.int32([30])),
    ]
    for mask in masks:
        problem = make(batch)
        clean = reference.attention(**problem.arguments, mask=mask)
        clean = clean.out.copy(), clean.lse.copy()
        for key in range(40):
            problem = make(batch)
            for name in "kv":
                problem.arguments[name][key] = poison
            out, lse = reference.attention(**problem.arguments, mask=mask)
            for query in batch.queries():
                if not shown(mask.given, query, key):
                    np.testing.assert_allclose(out[query.row], clean[0][query.row], rtol=1e-12)
                    assert (lse[query.row] == clean[1][query.row]).all()
                elif np.isnan(poison):
                    assert np.isnan(out[query.row]).all()


def test_causality_and_windows_as_masks() -> None:
    """The same bits as without a mask."""
    problem = make(RAGGED)
    places = RAGGED.places | {"kv_lens": np.array(RAGGED.kv_lens, np.int32)}
    for window in (None, 3, (4, 2)):
        causal = not isinstance(window, tuple)
        left, right = window if isinstance(window, tuple) else (window, 0)
        given = {"causal": causal, "window": window}
        plain = [a.copy() for a in reference.attention(**problem.arguments, **given)]
        mask = AttentionMask.windows(left, right, **places)
        for one, other in zip(
            reference.attention(**problem.arguments, mask=mask), plain, strict=True
        ):
            assert one.tobytes() == other.tobytes()


def test_a_chain_of_drafts_is_causal() -> None:
    batch = Batch((8, 8), (30, 9))
    problem = make(batch)
    plain = [a.copy() for a in reference.attention(**problem.arguments)]
    chain = np.tril(np.ones((2, 8, 8), bool))
    mask = AttentionMask.from_tree(chain)
    for one, other in zip(reference.attention(**problem.arguments, mask=mask), plain, strict=True):
        assert one.tobytes() == other.tobytes()


def test_queries_with_an_axis_of_requests() -> None:
    """Rows of a mask are counted over all requests."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((3, 4, HEADS, COLUMNS))
    k, v = (
        rng.standard_normal((3, 20, KV_HEADS, COLUMNS)),
        rng.standard_normal((3, 20, KV_HEADS, 8)),
    )
    lens, table = np.int32([20, 4, 11]), np.int32([[2], [0], [1]])
    paged: dict[str, Any] = {"kv_lens": lens, "block_table": table}
    start = rng.integers(0, 8, 12).astype(np.int32)
    mask = AttentionMask(start=start)
    apart = reference.attention(q, k, v, **paged, mask=mask)
    bounds = np.arange(0, 13, 4, dtype=np.int32)
    flat = reference.attention(
        q.reshape(12, HEADS, COLUMNS), k, v, **paged, qo_indptr=bounds, mask=mask
    )
    assert apart.out.tobytes() == flat.out.tobytes()
    assert apart.lse.tobytes() == flat.lse.tobytes()
