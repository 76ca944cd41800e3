# SPDX-License-Identifier: Apache-2.0
"""Windows, trees and sinks of mla_decode and mla_attention: against float64, with NaN wherever no
query looks, and against the same calls without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.sanitize import there
from tests.mla import masked_cases as cases
from tests.mla.fp8_arrays import FORMS, SCALED
from tests.mla.masked_cases import Problem, Sample

KERNELS = (
    "ragged_schedule",
    "schedule",
    "mla_decode",
    "mla_decode_fp8",
    "mla_decode_fp8_64",
    "mla_decode_fp8_products",
)
cp: Any = pytest.importorskip("cupy")

LONG = (
    Sample((1,) * 40, (16_384, 9_000, 5, 700) * 10, heads=(128, 1), window=1023, sinks="normal"),
    Sample((2,) * 3, (16_384, 511, 12_345), heads=(16, 1), page_size=16, window=4096),
    Sample((1,) * 6, (9_000,) * 6, heads=(64, 1), dtype="float16", sinks="extreme"),
    Sample((1,) * 2, (16_384,) * 2, heads=(16, 1), sinks="normal"),
    Sample((700, 1, 33), (9_000, 16_384, 33), "list", (16, 1), 1, window=300, sinks="normal"),
    Sample((300, 500), (300, 700), "table", (24, 2), 48, window=(40, 7), causal=False),
)


def uploaded(problem: Problem) -> dict[str, Any]:
    return {name: there(cp, value) for name, value in problem.given.items()}


LONG_TREES = (
    Sample((16,) * 16, (8_192, 4_000, 17, 700) * 4, heads=(128, 1), words=1),
    Sample((64,) * 3, (16_384, 64, 12_345), heads=(16, 1), page_size=16, words=2, sinks="normal"),
    Sample((256, 1, 33), (9_000, 16_384, 33), "list", (16, 1), 1, words=8),
    Sample((40, 7), (3_000, 700), "table", (24, 2), 48, dtype="float16", words=2),
    Sample((8,) * 5, (3_000, 700, 8, 0, 5), heads=(64, 1), words=1, width=(512, 0)),
    Sample((8, 3), (3_000, 700), "table", heads=(16, 1), words=1, width=(256, 32), page_size=1),
    Sample((9, 3), (2_000, 70), "table", (16, 1), dtype="float16", words=1, width=(512, 0)),
)


def poisoned(problem: Problem, dtype: Any = None) -> dict[str, Any]:
    """Outputs that are NaN before the call."""
    shape, own = problem.given["q"].shape[:-1], problem.given["q"].dtype
    out = cp.empty((*shape, problem.sample.width[0]), dtype=dtype or own)
    out.view(cp.uint8)[...] = 0xFF
    return {"out": out, "lse": cp.full(shape, cp.nan, dtype=cp.float32)}


def on_host(state: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = state
    return out.view(f"u{out.dtype.itemsize}").get().view(out.dtype), lse.get()


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert bool((bits_of(a) == bits_of(b)).all())


SAMPLES = [*cases.samples(90), *LONG, *cases.trees(60), *LONG_TREES]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples(sample: Sample, record_figures: Any) -> None:
    problem = cases.make(sample)
    given = uploaded(problem)
    state = problem.call(**given, **poisoned(problem))
    record_figures(cases.check(problem, *on_host(state)))
    for _ in range(3):
        kernels.noise(sample.seed)
        assert_same_bits(state, problem.call(**given, **poisoned(problem)))


@pytest.mark.parametrize("sample", cases.samples(8, operation="decode"), ids=lambda s: s.name)
def test_plans_replays_and_both_functions(sample: Sample) -> None:
    """A plan's graph with other lengths and sinks; the ragged function gives the same bits."""
    q_lens = (2,) * len(sample.kv_lens)
    sample = sample._replace(q_lens=q_lens, window=70, sinks="normal")
    problem = cases.make(sample)
    given = uploaded(problem)
    state = problem.call(**given)
    fixed = {"causal": sample.causal, "window": given.pop("window")}
    given.pop("causal")
    lens = given.pop("kv_lens")
    plan = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"], **fixed)
    cumla.prepare(plan)
    now, sinks = cp.zeros_like(lens), given["sinks"]
    given["sinks"] = cp.full_like(sinks, 9.0)
    plan.update(now)
    first = plan.run(**given, **poisoned(problem))
    np.testing.assert_allclose(first.lse.get(), 9.0, rtol=1e-6)
    assert not bool(bits_of(first.out).any())
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(now)
        later = plan.run(**given, out=first.out, lse=first.lse)
        graph = stream.end_capture()
        now[...] = lens
        given["sinks"][...] = sinks
        graph.launch()
    stream.synchronize()
    assert_same_bits(later, state)
    shape = given["q"].shape
    ragged = {"q": given["q"].reshape(-1, *shape[2:]), "kv_cache": given["kv_cache"]}
    indptr = cp.asarray(np.int32([0, *np.cumsum(q_lens)]))
    pages = {"block_table": given["block_table"], "kv_lens": lens, "qo_indptr": indptr}
    same = cumla.mla_attention(**ragged, **pages, sinks=sinks, **fixed)
    assert_same_bits([x.reshape(y.shape) for x, y in zip(same, state, strict=True)], state)


@pytest.mark.parametrize("operation", ["decode", "table"])
def test_other_trees_in_a_graph(operation: str) -> None:
    """A replay takes the bits that are there."""
    sample = Sample((6,) * 3, (700, 6, 130), operation, heads=(16, 1), words=1)
    problem, other = (cases.make(sample._replace(seed=seed)) for seed in (1, 2))
    given, tree = uploaded(problem), cp.asarray(other.given["tree"])
    problem.given["tree"] = other.given["tree"]
    q, cache = given["q"], given["kv_cache"]
    lengths = {"qo_indptr": given["qo_indptr"]} if operation == "table" else {}
    kind: Any = cumla.MLAAttentionPlan if lengths else cumla.MLADecodePlan
    plan = kind.from_arrays(q, cache, mask_form="tree", **lengths)
    now = cp.copy(given["tree"])
    more = {"block_table": given["block_table"], "tree": now}
    plan.update(given["kv_lens"], **lengths)
    state = plan.run(q, cache, **more)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        plan.run(q, cache, **more, out=state.out, lse=state.lse)
        graph = stream.end_capture()
        now[...] = tree
        graph.launch()
    stream.synchronize()
    cases.check(problem, *on_host(state))
    assert_same_bits(state, problem.call(**given | {"tree": tree}))


@pytest.mark.parametrize("sample", cases.samples(6, operation="table"), ids=lambda s: s.name)
def test_what_changes_nothing(sample: Sample) -> None:
    """A window that is wider than the cache, and sinks of -inf."""
    problem = cases.make(sample._replace(window=None, sinks="none", causal=True))
    given = uploaded(problem)
    given.pop("window")
    plain = problem.call(**given, **poisoned(problem))
    sinks = cp.full(sample.heads[0], -cp.inf, dtype=cp.float32)
    for options in ({"window": 10**9}, {"sinks": sinks}, {"window": 5000, "sinks": sinks}):
        assert_same_bits(plain, problem.call(**given, **options, **poisoned(problem)))


@pytest.mark.parametrize("operation", ["decode", "table", "list"])
@pytest.mark.parametrize("heads", [(16, 1), (24, 1), (24, 2), (64, 1), (128, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_sinks_of_fp8_caches(form: str, heads: tuple[int, int], operation: str) -> None:
    """The same as without them, but for one more term in the sum of weights; in all pages."""
    for i, page_size in enumerate((64, 1, 48)):
        fixed: dict[str, Any] = {"operation": operation, "page_size": page_size}
        sample = Sample((3, 3, 3, 3), (1300, 64, 0, 3), sinks="normal", form=form, is_fp8=True)
        sample = sample._replace(heads=heads, sinks=cases.SINKS[1 + i % 2], **fixed)
        problem = cases.make(sample)
        for products in (False, True) if form in SCALED else (False,):
            found = [
                on_host(
                    one.call(**uploaded(one), **poisoned(one, cp.float32), fp8_products=products)
                )
                for one in (problem, cases.without_sinks(problem))
            ]
            cases.check_sinks(problem, *found)


def test_fixed_cuts() -> None:
    """With sinks a request has the same bits in any batch."""
    sample = Sample((1,) * 3, (9000, 64, 700), heads=(16, 1), sinks="normal")
    problem = cases.make(sample)
    given = uploaded(problem)
    state = problem.call(**given, batch_invariant=True)
    cases.check(problem, *on_host(state))
    for r in range(3):
        rows = {n: given[n][r : r + 1] for n in ("q", "kv_lens", "block_table")}
        alone = problem.call(**given | rows, batch_invariant=True)
        assert_same_bits(alone, [x[r : r + 1] for x in state])


@pytest.mark.parametrize("window", [None, 300, (700, 2)])
def test_fixed_cuts_of_queries_of_different_lengths(window: Any) -> None:
    """With windows a request has the same bits in any batch as well."""
    sample = Sample((1, 3, 2, 70), (9000, 64, 5000, 700), "table", (16, 1), sinks="normal")
    problem = cases.make(sample._replace(window=window))
    given = uploaded(problem)
    state = problem.call(**given, batch_invariant=True)
    cases.check(problem, *on_host(state))
    begin = 0
    for r, n in enumerate(sample.q_lens):
        rows = {n: given[n][r : r + 1] for n in ("kv_lens", "block_table")}
        own = slice(begin, begin + n)
        rows |= {"q": given["q"][own], "qo_indptr": cp.asarray(np.array([0, n], np.int32))}
        alone = problem.call(**given | rows, batch_invariant=True)
        assert_same_bits(alone, [x[own] for x in state])
        begin += n


@pytest.mark.parametrize("table_tokens", [64, 640])
def test_lengths_out_of_range(table_tokens: int) -> None:
    """Lengths that the table does not hold are clamped, and windows stand at the clamped end."""
    sample = Sample((2, 2, 2), (640, 640, 640), window=100, sinks="normal")
    problem = cases.make(sample._replace(kv_lens=(table_tokens,) * 3))
    given = uploaded(problem)
    state = problem.call(**given)
    lens = cp.asarray(np.int32([2**31 - 1, table_tokens + 1, 10**6]))
    other = problem.call(**given | {"kv_lens": lens})
    for found in (state, other):
        cases.check(problem, *on_host(found))
    negative = cp.asarray(np.int32([-(2**31), -1, 0]))
    none = problem.call(**given | {"kv_lens": negative})
    assert not bool(bits_of(none.out).any())
    np.testing.assert_allclose(none.lse.get()[0, 0], problem.given["sinks"], rtol=1e-6)
