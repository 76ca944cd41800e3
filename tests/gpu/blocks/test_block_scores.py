# SPDX-License-Identifier: Apache-2.0
"""Scores and choice of blocks, against loops over blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.blocks.score_cases import (
    Scores,
    check_scores,
    check_sums,
    chosen,
    few_case,
    pooled_case,
    prompts_case,
    scores_case,
    select_case,
    sums_case,
)
from tests.gpu.tools.memory import Memory

KERNELS = (
    "block_scores",
    "block_scores_each",
    "block_scores_few",
    "block_scores_pooled",
    "block_scores_prompts",
    "block_scores_sums",
    "select_blocks",
)
cp: Any = pytest.importorskip("cupy")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.block_scores, cumla.select_blocks)
    cp.cuda.Device().synchronize()


CASES = (
    (scores_case, check_scores),
    (few_case, check_scores),
    (sums_case, check_sums),
    (pooled_case, check_sums),
    (prompts_case, check_sums),
)


@pytest.mark.parametrize(("draw", "check"), CASES)
@pytest.mark.parametrize("seed", range(240))
def test_scores(
    seed: int, draw: Callable[[int], Scores], check: Callable[[Scores, Any], None]
) -> None:
    case, memory = draw(seed), Memory(cp)
    there = {n: memory.upload(v) for n, v in case.given.items()}
    got = cumla.block_scores(**there)
    check(case, got.get())
    tokens, heads, width = got.shape
    out = cp.full((heads, tokens, width), cp.nan, np.float32).swapaxes(0, 1)  # as engines hold them
    assert cumla.block_scores(**there, out=out) is out
    assert out.get().tobytes() == got.get().tobytes()


@pytest.mark.parametrize("seed", range(300))
def test_selection(seed: int) -> None:
    given, memory = select_case(seed), Memory(cp)
    there = {n: memory.upload(v) for n, v in given.items()}
    got = cumla.select_blocks(**there)
    np.testing.assert_array_equal(got.get(), chosen(given))
    tokens, groups, k = got.shape
    buffer = cp.zeros((groups, tokens, k), np.int32).swapaxes(0, 1)
    assert cumla.select_blocks(**there, out=buffer) is buffer
    np.testing.assert_array_equal(buffer.get(), got.get())


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_many_pages(dtype: Any) -> None:
    """8,192 pages a request, and a key of NaN."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((50, 128, 128)).astype(dtype)
    keys[7, 3] = np.nan
    table = rng.integers(0, 50, (2, 8192)).astype(np.int32)
    table[table == 7] = 8
    table[1, 5000] = 7
    q = rng.standard_normal((2, 1, 4, 128)).astype(dtype)
    lens = np.array([8192 * 128, 8000 * 128 + 5], np.int32)
    given = {"q": q, "keys": keys, "kv_lens": lens, "block_table": table}
    there = {n: Memory(cp).upload(v) for n, v in given.items()}
    got = cumla.block_scores(**there, block_size=128).get()
    of_page = np.einsum("bhd,ptd->bhpt", q[:, 0].astype(np.float32), keys.astype(np.float32))
    want = np.take_along_axis(of_page.max(-1), table[:, None].astype(np.int64), axis=2)
    want[1, :, 8001:] = -np.inf
    last = of_page[1][:, table[1, 8000], :5].max(-1)
    want[1, :, 8000] = last
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert np.isnan(got[1, :, 5000]).all()


@pytest.mark.parametrize("draw", [scores_case, few_case, sums_case, pooled_case, prompts_case])
@pytest.mark.parametrize("seed", range(20))
def test_any_bits(seed: int, draw: Callable[[int], Scores]) -> None:
    """Lengths, offsets and tables of any values lead nowhere else, and give the same bits."""
    given, rng = draw(seed).given, np.random.default_rng(seed)
    for name in ("kv_lens", "qo_indptr", "block_table", "block_indices"):
        if name in given and rng.integers(2):
            most = 2 ** (8 * given[name].itemsize - 1)
            given[name][...] = rng.integers(-most, most, given[name].shape)
    there = {n: Memory(cp).upload(v) for n, v in given.items()}
    first, second = (cumla.block_scores(**there).get().tobytes() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_pooled_keys_of_long_requests(dtype: Any) -> None:
    """1,048,576 tokens, pages above 2 ** 31 elements, blocks listed or not, and a key of NaN."""
    rng = np.random.default_rng(0)
    some, apart = rng.standard_normal((8, 32, 128)).astype(dtype), 1 << 17  # pages between two
    some[3, 7, 5] = np.nan
    keys = cp.zeros((7 * apart + 1, 32, 128), f"u{dtype.itemsize}")
    keys[::apart] = cp.asarray(some.view(keys.dtype.name))
    table = rng.choice([0, 1, 2, 4, 5, 6, 7], (2, 8192)).astype(np.int32)
    table[1, 5000] = 3
    q = rng.standard_normal((2, 2, 4, 128)).astype(dtype)
    lens = np.array([8192 * 128, 8000 * 128 + 6], np.int32)
    given: dict[str, Any] = {"block_size": 4, "stride": 4, "num_groups": 1, "activation": "relu"}
    given |= {"kv_lens": cp.asarray(lens), "block_table": cp.asarray(table * apart)}
    query = cp.asarray(q.view(keys.dtype.name)).view(dtype)
    got = cumla.block_scores(query, keys.view(dtype), **given)
    of_page = np.einsum("bthd,pnd->btpnh", q.astype(np.float64), some.astype(np.float64))
    of_page = np.maximum(of_page, 0).sum(-1)
    want = np.stack([of_page[r][:, table[r]].reshape(2, -1) for r in range(2)])
    for token in range(2):
        want[1, token, (lens[1] - 1 + token) // 4 :] = -np.inf
    want[0, 0, -1] = -np.inf
    np.testing.assert_allclose(got.get(), want.reshape(4, 1, -1), rtol=1e-4, atol=1e-3)
    lists = rng.integers(0, 32 * 8192, (4, 1, 600))
    lists[2, 0, 0] = 5000 * 32 + 7
    listed = cumla.block_scores(
        query, keys.view(dtype), **given, block_indices=cp.asarray(lists)
    ).get()
    given["qo_indptr"] = cp.asarray(np.array([0, 2, 4], np.int32))  # by block_scores_prompts
    got = cumla.block_scores(query.reshape(4, 4, 128), keys.view(dtype), **given)
    want = want.reshape(4, 1, -1)
    np.testing.assert_allclose(got.get(), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(listed, np.take_along_axis(want, lists, 2), rtol=1e-4, atol=1e-3)
    assert np.isnan(listed[2, 0, 0])


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), E4M3], ids=str)
def test_a_request_has_the_same_bits_beside_a_prompt(dtype: Any) -> None:
    """With qo_indptr: another form of block_scores_prompts serves the call."""
    rng, given, found = np.random.default_rng(0), dict[str, Any](), []
    for name, shape in {"q": (257, 4, 128), "keys": (40, 32, 128)}.items():
        bits = rng.standard_normal(shape).astype(dtype).view(f"u{dtype.itemsize}")
        given[name] = cp.asarray(bits).view(dtype)
    given |= {"block_size": 4, "stride": 4, "num_groups": 1}
    given["kv_lens"] = cp.asarray(np.array([4001, 4999], np.int32))
    given["block_table"] = cp.asarray(rng.integers(0, 40, (2, 40), np.int32))
    q = given.pop("q")
    for tokens in (1, 257):
        bounds = cp.asarray(np.array([0, 1, tokens], np.int32))
        got = cumla.block_scores(q[:tokens], **given, qo_indptr=bounds)
        found.append(got[0].get().tobytes())
    assert found[0] == found[1]


_RACE = r"""
extern "C" __global__ void race(volatile int* lens, int* one, int* other, int n, int rounds) {
  for (int r = 0; r < rounds; ++r)
    for (int i = threadIdx.x; i < n; i += 32) lens[i] = ((r + i) % 2 ? one : other)[i];
}
"""


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_lengths_that_change_during_a_call(dtype: Any) -> None:
    """Each score is that of one of the lengths, or not written; a call ends, whatever they are."""
    race, rng = cp.RawKernel(_RACE, "race"), np.random.default_rng(0)
    batch, per = 70, 20
    numbers = rng.standard_normal((batch * per, 128, 128)).astype(dtype)
    keys = cp.asarray(numbers.view(f"u{dtype.itemsize}")).view(dtype)
    q = cp.asarray(numbers[:batch, :4].view(f"u{dtype.itemsize}")).view(dtype)[:, None]
    table = cp.asarray(rng.permutation(batch * per).astype(np.int32).reshape(batch, per))
    one, other = (cp.asarray(rng.integers(0, per * 128, batch, np.int32)) for _ in range(2))
    lens = one.copy()
    given = {"q": q, "keys": keys, "kv_lens": lens, "block_table": table, "block_size": 128}
    wanted = []
    for some in (other, one):
        lens[...] = some
        wanted.append(cumla.block_scores(**given).get())
    outs = cp.full((100, *wanted[0].shape), cp.nan, cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    race((1,), (32,), (lens, one, other, batch, 100000), stream=stream)
    for out in outs:
        cumla.block_scores(**given, out=out)
    cp.cuda.Device().synchronize()
    assert not cp.isnan(outs).all()
    for out in outs.get():
        assert ((out == wanted[0]) | (out == wanted[1]) | np.isnan(out)).all()
    lens[...] = one
    np.testing.assert_array_equal(cumla.block_scores(**given).get(), wanted[1])
