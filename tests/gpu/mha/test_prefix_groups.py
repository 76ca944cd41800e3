# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes on the GPU: groups as on the CPU, attention against float64, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla import PrefixGroups
from tests.gpu.tools.memory import Memory
from tests.launch.split.find_prefix_groups_mirror import expected_groups
from tests.mha.attention_cases import ROUNDING
from tests.prefix_cases import (
    LEAST,
    MOST,
    Batch,
    Group,
    Problem,
    batch_of,
    check,
    detection_cases,
    make,
    problem_of,
    samples,
)

KERNELS = (
    "find_prefix_groups",
    "prefix_requests",
    "combine_prefixes",
    "attention",
    "attention_simt",
    "ragged_schedule",
    "ragged_schedule_numbered",
)
cp: Any = pytest.importorskip("cupy")
CASES = detection_cases()


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.attention)
    cp.cuda.Device().synchronize()


def on_host(state: Any) -> Any:
    arrays = [a.view(f"u{a.dtype.itemsize}").get().view(a.dtype) for a in state]
    return cumla.AttentionState(*arrays)


def found_in(batch: Batch, least: int, memory: Memory, **outs: Any) -> PrefixGroups:
    tables = [memory.upload(array) for array in batch[:3]]
    return cumla.find_prefix_groups(*tables, page_size=batch.page_size, min_tokens=least, **outs)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    batch, least = CASES[name]
    found = found_in(batch, least, Memory(cp))
    group, prefix_len = expected_groups(batch, least)
    assert (found.group.get().tolist(), found.prefix_len.get().tolist()) == (group, prefix_len)


@pytest.mark.parametrize("sample", samples(96), ids=lambda s: str(s.seed))
def test_grid(sample: Any) -> None:
    """The call, and a plan for it, whose bits are the same twice."""
    problem, options = make(sample)
    batch, memory = problem.batch, Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    there = {name: memory.upload(value) for name, value in options.items()}
    groups = found_in(batch, 64, memory)
    got = on_host(cumla.attention(**given, groups=groups, **there))
    check(problem, got, ROUNDING[sample.dtype], **options)
    arrays = {n: given[n] for n in ("q", "k", "v", "qo_indptr")}
    more = {"prefix_groups": True, "max_pages": batch.block_table.shape[1]}
    plan = cumla.AttentionPlan.from_arrays(**arrays, **more, causal=there.pop("causal"))
    plan.update(given["kv_lens"], qo_indptr=given["qo_indptr"], groups=groups)
    rest = {n: given[n] for n in ("q", "k", "v", "block_table")}
    for _ in range(2):
        again = on_host(plan.run(**rest, **there))
        for one, other in zip(again, got, strict=True):
            assert one[: problem.tokens].tobytes() == other[: problem.tokens].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_long_prefixes(dtype: str) -> None:
    """Prefixes and rests that are split among thread blocks; into arrays of the caller."""
    groups = [Group(30, 6400, (300, 1)), Group(1, 64, (3000,)), Group(9, 2048, (700,))]
    batch = batch_of(groups, 64)
    problem, memory = problem_of(batch, (8, 2), (128, 128), np.float16, padding=5), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    out, lse = cp.full((45, 8, 128), 7, dtype), cp.full((8, 45), 7, np.float32).T
    sinks = np.linspace(-4, 9, 8).astype(np.float32)
    more = {"groups": found_in(batch, 1024, memory), "sinks": cp.asarray(sinks)}
    got = cumla.attention(**given, **more, out=out, lse=lse)
    assert got.out is out
    check(problem, on_host(got), ROUNDING["float16"], sinks=sinks)
    assert (out[40:] == 7).all()  # rows of no request
    assert (lse[40:] == 7).all()


def test_requests_of_equal_lengths() -> None:
    """q of four axes, of one token and of several, with gaps between its heads."""
    for q_len in (1, 4):
        batch = batch_of([Group(6, 640, (9, 80)), Group(2, 64)], 16, (q_len,))
        problem, memory = problem_of(batch, (8, 2), (64, 64), np.float16), Memory(cp)
        given = {name: memory.upload(value) for name, value in problem.given.items()}
        wide = cp.zeros((8, q_len, 8, 128), np.float16)
        wide[..., 64:] = np.nan
        wide[..., :64] = given.pop("q").reshape(8, q_len, 8, 64)
        del given["qo_indptr"]
        groups = found_in(batch, 64, memory)
        got = cumla.attention(wide[..., :64], **given, groups=groups)
        check(problem, on_host(got), ROUNDING["float16"])


@pytest.mark.parametrize("q_lens", [(1,), (4,), (1, 3, 90)])
def test_batch_invariant_bits(q_lens: tuple[int, ...]) -> None:
    """With groups as without them: of the call, and of plans."""
    batch = batch_of([Group(6, 6400, (300, 1)), Group(1, 64, (3000,)), Group(4, 128)], 64, q_lens)
    problem, memory = problem_of(batch, (8, 2), (128, 128), np.float16), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    groups = found_in(batch, 64, memory)
    assert int(groups.prefix_len.get().max()) > 6000  # a prefix ends before the queries
    got = [
        on_host(cumla.attention(**given, batch_invariant=True, groups=one))
        for one in (None, groups)
    ]
    check(problem, got[0], ROUNDING["float16"])
    arrays = {n: given[n] for n in ("q", "k", "v", "qo_indptr")}
    rest = {n: given[n] for n in ("q", "k", "v", "block_table")}
    columns = batch.block_table.shape[1]
    invariant = {"batch_invariant": True, "max_kv_len": 64 * columns}
    for more in ({}, {"prefix_groups": True, "max_pages": columns}):
        plan = cumla.AttentionPlan.from_arrays(**arrays, **more, **invariant)
        plan.update(given["kv_lens"], qo_indptr=given["qo_indptr"], groups=groups if more else None)
        got.append(on_host(plan.run(**rest)))
    for state in got[1:]:
        for one, other in zip(state, got[0], strict=True):
            assert one[: problem.tokens].tobytes() == other[: problem.tokens].tobytes()


def test_the_largest_sinks() -> None:
    batch = batch_of([Group(3, 64), Group(1, 64)], 16)
    problem, memory = problem_of(batch, (4, 2), (64, 64), np.float16), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    sinks = np.float32([np.inf, -np.inf, 1e38, -3e38])
    more = {"sinks": cp.asarray(sinks)}
    plain = on_host(cumla.attention(**given, **more))
    got = on_host(cumla.attention(**given, **more, groups=found_in(batch, 16, memory)))
    np.testing.assert_allclose(got.lse, plain.lse, rtol=1e-6)
    np.testing.assert_allclose(got.out.astype(float), plain.out.astype(float), atol=2e-3)


def test_numbers_that_mean_nothing() -> None:
    """Groups of any numbers: prefixes are cut to what exists, and nothing hangs."""
    batch = batch_of([Group(8, 256, (40,))], 16)
    problem, memory = problem_of(batch, (4, 2), (64, 64), np.float16), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    for group, prefix in (
        ([7] * 8, [MOST] * 4 + [256] * 4),
        ([MOST] * 4 + [LEAST] * 4, [255, 999, 256, 300, 17, 16, 33, 64]),
        ([1, 1, 2, 2, 1, 1, 3, 3], [64, LEAST, -1, 64, 32, 16, 64, 15]),
    ):
        arrays = [cp.asarray(np.array(values, np.int32)) for values in (group, prefix)]
        got = cumla.attention(**given, groups=PrefixGroups(*arrays))
        check(problem, on_host(got), ROUNDING["float16"])
    rng = np.random.default_rng(0)
    for _ in range(20):  # lengths and offsets as well: results mean nothing
        wild = [cp.asarray(rng.integers(LEAST, MOST, n).astype(np.int32)) for n in (8, 9, 8, 8)]
        given |= {"kv_lens": wild[0], "qo_indptr": wild[1]}
        cumla.attention(**given, groups=PrefixGroups(*wild[2:]))
    cp.cuda.Device().synchronize()


def test_nothing_to_attend() -> None:
    empty = cp.zeros((0, 4), np.int32)
    groups = cumla.find_prefix_groups(empty, empty[:, 0], page_size=16)
    assert groups.group.shape == (0,)
    pages = cp.ones((2, 16, 2, 64), np.float16)
    q = cp.ones((0, 4, 64), np.float16)
    lengths = {"kv_lens": empty[:, 0], "qo_indptr": cp.zeros(1, np.int32)}
    got = cumla.attention(q, pages, pages, **lengths, block_table=empty, groups=groups)
    assert got.out.shape == (0, 4, 64)


def test_a_graph_replayed_with_other_groups() -> None:
    """Find, update and run in one graph."""
    kinds = [
        [Group(12, 640)],
        [Group(1, 640)] * 12,
        [Group(5, 320), Group(3, 960), Group(4, 64)],
        [Group(2, 320), Group(10, 640)],
    ]
    batches = [batch_of(groups, 16, (1, 2), seed=i) for i, groups in enumerate(kinds)]
    columns, pages = (max(b.block_table.shape[1] for b in batches), 1200)
    problems = []
    for batch in batches:
        table = np.zeros((12, columns), np.int32)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        wide = batch._replace(block_table=table, num_pages=pages)
        problems.append(problem_of(wide, (4, 2), (64, 64), np.float16))
    memory = Memory(cp)
    there = {n: memory.upload(value).copy() for n, value in problems[0].given.items()}
    arrays = {n: there[n] for n in ("q", "k", "v", "qo_indptr")}
    plan = cumla.AttentionPlan.from_arrays(**arrays, prefix_groups=True, max_pages=columns)
    plan.prepare()
    group, prefix_len = cp.zeros(12, np.int32), cp.zeros(12, np.int32)
    out, lse = cp.zeros((18, 4, 64), np.float16), cp.zeros((18, 4), np.float32)
    rest = {n: there[n] for n in ("q", "k", "v", "block_table")}

    def step() -> None:
        tables = [there[n] for n in ("block_table", "kv_lens", "qo_indptr")]
        more: dict[str, Any] = {"group": group, "prefix_len": prefix_len}
        groups = cumla.find_prefix_groups(*tables, page_size=16, min_tokens=64, **more)
        plan.update(there["kv_lens"], qo_indptr=there["qo_indptr"], groups=groups)
        plan.run(**rest, out=out, lse=lse)

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for problem in (*problems[::-1], *problems):
            for name, value in problem.given.items():
                there[name][...] = cp.asarray(value)
            out.fill(-1)
            graph.launch(stream)
            stream.synchronize()
            check(problem, on_host((out, lse)), ROUNDING["float16"])


def test_pytorch_and_jax() -> None:
    """The same bits from tensors."""
    torch = pytest.importorskip("torch")
    batch = batch_of([Group(6, 640)], 16)
    problem, memory = problem_of(batch, (8, 2), (64, 64), np.float16), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    expected = cumla.attention(**given, groups=found_in(batch, 64, memory))
    tensors = {name: torch.from_dlpack(value) for name, value in given.items()}
    names = ("block_table", "kv_lens", "qo_indptr")
    groups = cumla.find_prefix_groups(*[tensors[n] for n in names], page_size=16, min_tokens=64)
    got = cumla.attention(**tensors, groups=groups)
    assert (cp.asarray(got.out) == expected.out).all()
    assert (cp.asarray(got.lse) == expected.lse).all()


def test_what_no_query_sees_never_shows() -> None:
    """Poisoned pages of others, and the same call a hundred times."""
    batch = batch_of([Group(20, 1280, (33, 64, 1))], 64)
    problem, memory = problem_of(batch, (8, 1), (128, 128), np.float16), Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    groups = found_in(batch, 64, memory)
    first = on_host(cumla.attention(**given, groups=groups))
    assert np.isfinite(first.out).all()
    for _ in range(100):
        again = on_host(cumla.attention(**given, groups=groups))
        assert again.out.tobytes() == first.out.tobytes()
        assert again.lse.tobytes() == first.lse.tobytes()


def test_a_key_more_or_less_shows() -> None:
    """The oracle sees a prefix that is a page too short or too long."""
    batch = batch_of([Group(4, 128, (20,))], 16)
    problem: Problem = problem_of(batch, (4, 2), (64, 64), np.float16)
    memory = Memory(cp)
    given = {name: memory.upload(value) for name, value in problem.given.items()}
    groups = PrefixGroups(cp.zeros(4, np.int32), cp.full(4, 144, np.int32))  # not shared whole
    with pytest.raises(AssertionError):
        check(problem, on_host(cumla.attention(**given, groups=groups)), ROUNDING["float16"])
