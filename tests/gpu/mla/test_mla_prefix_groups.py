# SPDX-License-Identifier: Apache-2.0
"""MLA with shared prefixes on the GPU, against float64; plans, graphs, FP8 caches."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import PrefixGroups
from tests.gpu.tools.memory import Memory
from tests.mha.attention_cases import ROUNDING
from tests.prefix_cases import Batch, Group, batch_of

KERNELS = (
    "find_prefix_groups",
    "prefix_requests",
    "combine_prefixes",
    "mla_decode",
    "mla_decode_fp8",
    "ragged_schedule",
)
cp: Any = pytest.importorskip("cupy")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.mla_attention)
    cp.cuda.Device().synchronize()


def problem_of(
    batch: Batch, heads: int, dtype: Any, *, cache: Any = None, padding: int = 0
) -> tuple[dict[str, Any], Any, np.ndarray]:
    """Arrays, the results in float64, and those with the sizes of values."""
    rng = np.random.default_rng(heads)
    tokens = int(batch.qo_indptr[-1])
    rows = rng.standard_normal((batch.num_pages, batch.page_size, 576)).clip(-3, 3)
    rows = rows.astype(cache or dtype)
    seen = np.zeros(rows.shape[:2], bool)
    for row, length in zip(batch.block_table, batch.kv_lens, strict=True):
        for token in range(0, length, batch.page_size):
            seen[row[token // batch.page_size], : max(length - token, 0)] = True
    rows[~seen] = np.nan
    q = rng.standard_normal((tokens + padding, heads, 576)).astype(dtype)
    q[tokens:] = np.nan
    lengths = {"kv_lens": batch.kv_lens, "qo_indptr": batch.qo_indptr}
    given = {"q": q, "kv_cache": rows, "block_table": batch.block_table, **lengths}
    exact = {**given, "q": q.astype(np.float64), "kv_cache": rows.astype(np.float64)}
    return given, exact, rows


def expected_of(exact: dict[str, Any], **options: Any) -> Any:
    shape = *exact["q"].shape[:-1], 512
    places = {"out": np.zeros(shape), "lse": np.zeros(shape[:-1], np.float32)}
    return cumla.reference.mla_attention(**exact, **places, **options)


def on_host(state: Any) -> Any:
    arrays = [a.view(f"u{a.dtype.itemsize}").get().view(a.dtype) for a in state]
    return cumla.AttentionState(*arrays)


def check(got: Any, exact: dict[str, Any], tokens: int, rounding: float, **options: Any) -> None:
    want, rows = expected_of(exact, **options), slice(0, tokens)
    errors = np.linalg.norm(got.out[rows].astype(np.float64) - want.out[rows], axis=-1)
    norms = 0.8 * np.sqrt(512)  # of the mean sizes of values
    assert (errors <= 3 * rounding * norms).all(), errors.max()
    np.testing.assert_allclose(got.lse[rows], want.lse[rows], rtol=3e-5, atol=3e-5)


CASES: dict[str, tuple[list[Group], int, tuple[int, ...]]] = {
    "decoding": ([Group(20, 1280, (70, 3)), Group(1, 64, (90,)), Group(5, 640)], 64, (1,)),
    "pages of 16": ([Group(9, 720, (70, 3)), Group(2, 64)], 16, (1,)),
    "pages of one token": ([Group(4, 333), Group(3, 100)], 1, (1, 2)),
    "drafts": ([Group(6, 640, (9, 80)), Group(4, 128)], 64, (4,)),
    "ragged": ([Group(6, 640, (9, 80)), Group(4, 128, (200,))], 64, (0, 3, 1, 120)),
    "nothing is shared": ([Group(1, 320)] * 6, 64, (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_batch_invariant_bits(name: str) -> None:
    """With groups as without them: of the call, and of plans."""
    groups, page_size, q_lens = CASES[name]
    batch = batch_of(groups, page_size, q_lens)
    given, exact, _ = problem_of(batch, 16, BF16)
    memory, tokens = Memory(cp), int(batch.qo_indptr[-1])
    there = {key: memory.upload(value) for key, value in given.items()}
    tables = [there[key] for key in ("block_table", "kv_lens", "qo_indptr")]
    found = cumla.find_prefix_groups(*tables, page_size=page_size, min_tokens=64)
    got = [
        on_host(cumla.mla_attention(**there, batch_invariant=True, groups=one))
        for one in (None, found)
    ]
    check(got[0], exact, tokens, ROUNDING[BF16.name])
    columns = batch.block_table.shape[1]
    invariant = {"batch_invariant": True, "max_kv_len": page_size * columns}
    for more in ({}, {"prefix_groups": True, "max_pages": columns}):
        arrays = {"q": there["q"], "kv_cache": there["kv_cache"], "qo_indptr": there["qo_indptr"]}
        plan = cumla.MLAAttentionPlan.from_arrays(**arrays, **invariant, **more)
        given_groups = {"groups": found} if more else {}
        plan.update(there["kv_lens"], qo_indptr=there["qo_indptr"], **given_groups)
        rest = {key: there[key] for key in ("q", "kv_cache", "block_table")}
        got.append(on_host(plan.run(**rest)))
    for state in got[1:]:
        for one, other in zip(state, got[0], strict=True):
            assert one[:tokens].tobytes() == other[:tokens].tobytes()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_grid(name: str, heads: int, causal: bool) -> None:
    groups, page_size, q_lens = CASES[name]
    dtype = np.dtype(np.float16) if heads == 16 else BF16
    batch = batch_of(groups, page_size, q_lens)
    given, exact, _ = problem_of(batch, heads, dtype, padding=2)
    memory, tokens = Memory(cp), int(batch.qo_indptr[-1])
    there = {key: memory.upload(value) for key, value in given.items()}
    tables = [there[key] for key in ("block_table", "kv_lens", "qo_indptr")]
    found = cumla.find_prefix_groups(*tables, page_size=page_size, min_tokens=64)
    out = cp.full((tokens + 2, heads, 512), 7, np.float32)
    got = on_host(cumla.mla_attention(**there, groups=found, causal=causal, out=out))
    check(got, exact, tokens, ROUNDING[dtype.name], causal=causal)
    assert (got.out[tokens:] == 7).all()
    plan = cumla.MLAAttentionPlan.from_arrays(
        *(there["q"], there["kv_cache"]),
        qo_indptr=there["qo_indptr"],
        causal=causal,
        prefix_groups=True,
        max_pages=batch.block_table.shape[1],
    )
    plan.update(there["kv_lens"], qo_indptr=there["qo_indptr"], groups=found)
    for _ in range(2):
        out.fill(7)
        args = there["q"], there["kv_cache"]
        again = on_host(plan.run(*args, block_table=there["block_table"], out=out))
        assert again.out.tobytes() == got.out.tobytes()
        assert again.lse[:tokens].tobytes() == got.lse[:tokens].tobytes()


@pytest.mark.parametrize("heads", [16, 64])
def test_fp8_caches(heads: int) -> None:
    batch = batch_of([Group(9, 640, (70, 3)), Group(2, 64)], 64, (1, 2))
    given, exact, _ = problem_of(batch, heads, BF16, cache=E4M3)
    memory, tokens = Memory(cp), int(batch.qo_indptr[-1])
    there = {key: memory.upload(value) for key, value in given.items()}
    tables = [there[key] for key in ("block_table", "kv_lens", "qo_indptr")]
    found = cumla.find_prefix_groups(*tables, page_size=64, min_tokens=64)
    got = on_host(cumla.mla_attention(**there, groups=found, kv_scale=0.5))
    exact["kv_cache"] = exact["kv_cache"] * 0.5
    check(got, exact, tokens, ROUNDING["bfloat16"])


def test_sinks_count_once() -> None:
    batch = batch_of([Group(9, 640, (70, 3)), Group(2, 64)], 64, (1, 2))
    given, exact, _ = problem_of(batch, 16, BF16)
    memory, tokens = Memory(cp), int(batch.qo_indptr[-1])
    there = {key: memory.upload(value) for key, value in given.items()}
    tables = [there[key] for key in ("block_table", "kv_lens", "qo_indptr")]
    found = cumla.find_prefix_groups(*tables, page_size=64, min_tokens=64)
    sinks = np.linspace(-9, 9, 16).astype(np.float32)
    got = on_host(cumla.mla_attention(**there, groups=found, sinks=cp.asarray(sinks)))
    check(got, exact, tokens, ROUNDING["bfloat16"], sinks=sinks)


def test_a_graph_replayed_with_other_groups() -> None:
    kinds = [
        [Group(12, 640)],
        [Group(1, 640)] * 12,
        [Group(5, 320), Group(3, 960), Group(4, 64)],
    ]
    batches = [batch_of(groups, 64, (1,), seed=i) for i, groups in enumerate(kinds)]
    columns = max(b.block_table.shape[1] for b in batches)
    problems = []
    for batch in batches:
        table = np.zeros((12, columns), np.int32)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        problems.append(problem_of(batch._replace(block_table=table, num_pages=150), 16, BF16))
    memory = Memory(cp)
    there = {n: memory.upload(value).copy() for n, value in problems[0][0].items()}
    plan = cumla.MLAAttentionPlan.from_arrays(
        *(there["q"], there["kv_cache"]),
        qo_indptr=there["qo_indptr"],
        prefix_groups=True,
        max_pages=columns,
    )
    plan.prepare()
    arrays = {"group": cp.zeros(12, np.int32), "prefix_len": cp.zeros(12, np.int32)}
    out = cp.zeros((12, 16, 512), there["q"].dtype)
    lse = cp.zeros((12, 16), np.float32)

    def step() -> None:
        tables = [there[n] for n in ("block_table", "kv_lens", "qo_indptr")]
        groups = cumla.find_prefix_groups(*tables, page_size=64, min_tokens=64, **arrays)
        plan.update(there["kv_lens"], qo_indptr=there["qo_indptr"], groups=groups)
        args = there["q"], there["kv_cache"]
        plan.run(*args, block_table=there["block_table"], out=out, lse=lse)

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for given, exact, _ in (*problems[::-1], *problems):
            for name, value in given.items():
                there[name][...] = cp.asarray(value.view(f"u{value.itemsize}")).view(value.dtype)
            graph.launch(stream)
            stream.synchronize()
            check(on_host((out, lse)), exact, 12, ROUNDING["bfloat16"])


def test_numbers_that_mean_nothing() -> None:
    batch = batch_of([Group(8, 256, (40,))], 64)
    given, exact, _ = problem_of(batch, 16, BF16)
    memory = Memory(cp)
    there = {key: memory.upload(value) for key, value in given.items()}
    least, most = -(2**31), 2**31 - 1
    for group, prefix in (
        ([7] * 8, [most] * 4 + [256] * 4),
        ([1, 1, 2, 2, 1, 1, 3, 3], [64, least, -1, 64, 192, 130, 64, 15]),
    ):
        arrays = [cp.asarray(np.array(values, np.int32)) for values in (group, prefix)]
        got = cumla.mla_attention(**there, groups=PrefixGroups(*arrays))
        check(on_host(got), exact, 8, ROUNDING["bfloat16"])
    rng = np.random.default_rng(0)
    for _ in range(20):
        wild = [cp.asarray(rng.integers(least, most, n).astype(np.int32)) for n in (8, 9, 8, 8)]
        there |= {"kv_lens": wild[0], "qo_indptr": wild[1]}
        cumla.mla_attention(**there, groups=PrefixGroups(*wild[2:]))
    cp.cuda.Device().synchronize()
