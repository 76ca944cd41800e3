# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention against float64: all that no query sees holds NaN. Long requests, graphs,
repeats, lists in any order, batch invariance, any bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.blocks.block_cases import Sample, check, make, prompts, samples
from tests.gpu.tools.memory import Memory
from tests.gpu.tools.placements import check_random_batches
from tests.gpu.tools.sanitize import multiprocessors

KERNELS = (
    "block_attention",
    "block_attention_few",
    "block_attention_gathered",
    "block_attention_rest",
    "block_lists",
    "block_places",
    "block_rows",
    "block_tiles",
    "widen_blocks",
)
MAY_SKIP = ("needs 20 GB",)
cp: Any = pytest.importorskip("cupy")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LEAST, MOST = -(2**31), 2**31 - 1


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.block_sparse_attention)
    cp.cuda.Device().synchronize()


def on_host(array: Any) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}").get().view(array.dtype)


def bits(state: Any) -> bytes:
    return b"".join(on_host(array).tobytes() for array in state)


def run(given: dict[str, Any]) -> cumla.AttentionState:
    memory = Memory(cp)
    got = cumla.block_sparse_attention(**{n: memory.upload(v) for n, v in given.items()})
    return cumla.AttentionState(*map(on_host, got))


@pytest.mark.parametrize("sample", samples(336), ids=str)
def test_grid(sample: Sample) -> None:
    """By all multiprocessors, and by so few that their parts have several lists."""
    problem = make(sample)
    check(problem, run(make(sample).given), sample.dtype)
    with multiprocessors(3 + sample.seed % 4):
        check(problem, run(make(sample).given), sample.dtype)


@pytest.mark.parametrize(
    "sample",
    samples(24, cache="e4m3", scales="rows", block=(64, 2), columns=(128, 128), heads=(32, 2)),
    ids=str,
)
def test_factors_of_rows(sample: Sample) -> None:
    """Of very unlike sizes, by clusters of all sizes, as a prompt, and batch-invariant."""
    prompt = replace(sample, queries="prompts", invariant=False)
    for one, count in ((sample, 132), (sample, 5), (prompt, 132)):
        problem = make(one)
        with multiprocessors(count):
            check(problem, run(make(one).given), one.dtype)


def decoding(
    batch: int,
    q_len: int,
    heads: tuple[int, int],
    lens: Any,
    topk: int,
    block: int = 128,
    columns: int = 128,
    num_pages: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """A step of a model, with random lists and shared pages."""
    rng = np.random.default_rng(seed)
    lens = np.broadcast_to(np.asarray(lens, np.int32), batch).copy()
    most = -(-int(lens.max()) // block)
    num_pages = num_pages or batch * most
    tokens = batch * q_len
    entries = np.full((tokens, heads[1], topk), -1, np.int32)
    for token, head in np.ndindex(tokens, heads[1]):
        seen = int(lens[token // q_len]) - (q_len - 1 - token % q_len)
        visible = max(-(-seen // block), 0)
        some = rng.permutation(visible)[:topk]
        entries[token, head, : len(some)] = some
    cache = rng.standard_normal((2, num_pages, block, heads[1], columns)).astype(BF16)
    return {
        "q": rng.standard_normal((batch, q_len, heads[0], columns)).astype(BF16),
        "k": cache[0],
        "v": cache[1],
        "block_indices": entries,
        "block_size": block,
        "kv_lens": lens,
        "block_table": rng.integers(0, num_pages, (batch, most)).astype(np.int32),
    }


def agrees(given: dict[str, Any], got: Any) -> None:
    want = cumla.reference.block_sparse_attention(**given)
    scale = np.abs(want.out.astype(np.float64)).max()
    assert np.abs(got.out.astype(np.float64) - want.out.astype(np.float64)).max() <= 0.02 * scale
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pages", [800, 1408, 3520, 8192])
def test_many_pages(pages: int) -> None:
    """More pages a request than other libraries' kernels take."""
    given = decoding(3, 1, (16, 1), [pages * 128, pages * 128 - 77, 5], 16, num_pages=64)
    agrees(given, run(given))


@pytest.mark.parametrize(("block", "topk"), [(16, 1024), (4, 600)])
def test_long_lists(block: int, topk: int) -> None:
    """And more blocks than a bitmap holds."""
    lens = [70000 * block, 9000, block]
    given = decoding(3, 1, (4, 1), lens, topk, block, 64, num_pages=512)
    given["block_indices"][0, 0, :3] = 69999, 65536, 65535
    agrees(given, run(given))


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (17, 4), (64, 1), (128, 1), (200, 2)])
def test_batches(batch: int, kv_heads: int) -> None:
    lens = np.random.default_rng(batch).integers(0, 9000, batch)
    given = decoding(batch, 1 + batch % 3, (16 * kv_heads, kv_heads), lens, 16, num_pages=300)
    agrees(given, run(given))


@pytest.mark.parametrize("heads", [(16, 4), (6, 1)])
def test_heads_and_tokens_that_are_not_evenly_spaced(heads: tuple[int, int]) -> None:
    """Each kv head then takes launches of its own."""
    given = decoding(5, 3, heads, 2000, 8)
    there = {n: Memory(cp).upload(v) for n, v in given.items()}
    want = cumla.block_sparse_attention(**there)
    agrees(given, cumla.AttentionState(*map(on_host, want)))

    def apart(array: Any) -> Any:
        batch, tokens, number, *columns = array.shape
        wide = cp.zeros((batch, tokens + 1, number + 1, *columns), f"u{array.dtype.itemsize}")
        part = wide[:, :tokens, :number]
        part[...] = array.view(part.dtype)
        return part.view(array.dtype)

    there["q"] = apart(there["q"])
    got = cumla.block_sparse_attention(**there, out=apart(want.out), lse=apart(want.lse))
    agrees(given, cumla.AttentionState(*map(on_host, got)))


def test_prefill() -> None:
    """Chunks of prompts with and without history, whose first tokens see few blocks."""
    given = decoding(3, 300, (8, 2), [300, 301, 2500], 6, 64, 64)
    agrees(given, run(given))


def tiled(given: dict[str, Any]) -> bool:
    """Tell whether neighbouring query tokens share row tiles."""
    names = "q", "k", "v", "block_indices", "block_size", "qo_indptr", "kv_layout"
    arrays = {n: given[n] for n in names if n in given}
    plan = cumla.BlockSparsePlan.from_arrays(**{n: uploaded(v) for n, v in arrays.items()})
    return plan.key.tile is not None


def uploaded(value: Any) -> Any:
    return Memory(cp).upload(value)


@pytest.mark.parametrize("sample", prompts(120), ids=str)
def test_prompts(sample: Sample) -> None:
    """Row tiles of several query tokens, over the blocks of all of them, or lists of each."""
    problem = make(sample)
    with multiprocessors(1 + sample.seed % 2):
        assert tiled(problem.given)
        check(problem, run(make(sample).given), sample.dtype)


@pytest.mark.parametrize(
    ("heads", "block", "topk"), [((32, 2), 128, 3), ((16, 2), 64, 6), ((64, 4), 128, 1)]
)
def test_long_prompts(heads: tuple[int, int], block: int, topk: int) -> None:
    """Tiles of all multiprocessors, and more than one for each, with and without history."""
    given = decoding(3, 300, heads, [300, 701, 9000], topk, block)
    assert tiled(given)
    agrees(given, run(given))


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(256, 1024), (256, 1088), (256, 1089), (256, 1340), (2048, 8256), (2048, 8257), (2048, 9000)],
)
def test_blocks_past_the_last_slot(tokens: int, length: int) -> None:
    """Prompts over e4m3 blocks, whose history is about as long as what is widened."""
    given = decoding(1, tokens, (16, 1), length, 4, 64)
    given |= {name: given[name].astype(E4M3) for name in "kv"}
    given["block_indices"] = np.repeat(given["block_indices"][::64], 64, axis=0)
    there = {n: uploaded(v) for n, v in given.items()}
    lengths, block = {"kv_lens": there.pop("kv_lens")}, there.pop("block_size")
    arrays = {n: there[n] for n in ("q", "k", "v", "block_indices")}
    with multiprocessors(16):
        key = cumla.BlockSparsePlan.from_arrays(**arrays, block_size=block).key
        assert key.tile and key.tile.widened == tokens * 4 // 64 + 1
        memory = cp.full(key.layout.nbytes, 0xFF, np.uint8)
        plan = cumla.BlockSparsePlan.from_arrays(**arrays, block_size=block, workspace=memory)
        plan.update(**lengths)
        got = plan.run(**there)
    agrees(given, cumla.AttentionState(*map(on_host, got)))


def test_prompts_of_long_contexts() -> None:
    """Blocks of more than one window of the bitmap."""
    given = decoding(1, 300, (16, 1), [70000 * 64], 3, 64, num_pages=512)
    given["block_indices"][:, 0, :2] = [[65535, 65536 + i % 4000] for i in range(300)]
    with multiprocessors(16):
        assert tiled(given)
        agrees(given, run(given))


def test_lists_of_prompts_are_sets() -> None:
    """Order and repetition change no bit, nor does a repeated call; a missing block does."""
    given = decoding(2, 600, (16, 1), [6000, 700], 12)
    given["block_indices"][..., 8:] = -1
    assert tiled(given)
    rng = np.random.default_rng(1)
    there = {n: uploaded(v) for n, v in given.items()}
    want = bits(cumla.block_sparse_attention(**there))
    for _ in range(20):
        assert bits(cumla.block_sparse_attention(**there)) == want
    for _ in range(5):
        lists = given["block_indices"].copy()
        lists[..., 8:] = lists[..., rng.integers(0, 8, 4)]
        there["block_indices"] = cp.asarray(rng.permuted(lists, axis=-1))
        assert bits(cumla.block_sparse_attention(**there)) == want
    lists = given["block_indices"].copy()
    lists[300, 0, 7] = -1
    there["block_indices"] = cp.asarray(lists)
    assert bits(cumla.block_sparse_attention(**there)) != want


@pytest.mark.parametrize("seed", range(20))
def test_any_bits_of_prompts(seed: int) -> None:
    """Lengths, offsets, lists and tables of any values lead nowhere; the bits repeat."""
    sample = prompts(20)[seed]
    given, rng = make(sample).given, np.random.default_rng(seed)
    with multiprocessors(2):
        assert tiled(given)
        for name in ("kv_lens", "qo_indptr", "block_table", "topk_lens", "block_indices"):
            if name in given and rng.integers(2):
                _spoil(given[name], rng)
        first, second = run(given), run(given)
    assert first.out.tobytes() == second.out.tobytes()
    assert first.lse.tobytes() == second.lse.tobytes()


def test_all_blocks_are_attention() -> None:
    given = decoding(9, 4, (16, 2), np.arange(4, 1900, 211), 16)
    given["block_table"] = np.arange(given["block_table"].size, dtype=np.int32).reshape(9, -1)
    there = {n: Memory(cp).upload(v) for n, v in given.items()}
    got = cumla.block_sparse_attention(**there)
    del there["block_indices"], there["block_size"]
    want = cumla.attention(**there)
    scale = np.abs(on_host(want.out).astype(np.float32)).max()
    error = np.abs(on_host(got.out).astype(np.float32) - on_host(want.out).astype(np.float32))
    assert error.max() <= 2**-7 * scale
    np.testing.assert_allclose(on_host(got.lse), on_host(want.lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sms", [132, 5])
@pytest.mark.parametrize("topk", [24, 12])
def test_lists_are_sets(invariant: bool, sms: int, topk: int) -> None:
    """Order and repetition change no bit, nor does a repeated call; a missing block does."""
    given = decoding(11, 1, (16, 1), 6000, topk) | {"batch_invariant": invariant}
    given["block_indices"][..., -4:] = -1
    rng = np.random.default_rng(1)
    memory = Memory(cp)
    there = {n: memory.upload(v) for n, v in given.items()}
    with multiprocessors(sms):
        want = bits(cumla.block_sparse_attention(**there))
        for _ in range(20):
            assert bits(cumla.block_sparse_attention(**there)) == want
        for _ in range(5):
            lists = given["block_indices"].copy()
            lists[..., -4:] = lists[..., rng.integers(0, topk - 4, 4)]
            lists = rng.permuted(lists, axis=-1)
            assert (
                bits(cumla.block_sparse_attention(**there | {"block_indices": cp.asarray(lists)}))
                == want
            )
        lists = given["block_indices"].copy()
        lists[3, 0, 7] = -1
        assert (
            bits(cumla.block_sparse_attention(**there | {"block_indices": cp.asarray(lists)}))
            != want
        )


def test_batch_invariance() -> None:
    """A query token has the same bits alone, with others, and among drafts."""
    given = decoding(150, 2, (16, 2), 5000, 40, 64, num_pages=400) | {"batch_invariant": True}
    whole = run(given)
    for i in (0, 77, 149):
        alone = dict(given, q=given["q"][i : i + 1], kv_lens=given["kv_lens"][i : i + 1])
        alone |= {"block_table": given["block_table"][i : i + 1]}
        alone["block_indices"] = given["block_indices"][2 * i : 2 * i + 2]
        got = run(alone)
        assert got.out.tobytes() == whole.out[i].tobytes()
        assert got.lse.tobytes() == whole.lse[i].tobytes()
        one = dict(alone, q=alone["q"][:, 1:], block_indices=alone["block_indices"][1:])
        assert run(one).out.tobytes() == whole.out[i, 1].tobytes()


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "topk"),
    [(3, 2, (16, 1), 16), (9, 2, (16, 1), 16), (9, 2, (16, 4), 16), (2, 300, (16, 1), 4)],
)
def test_graphs(batch: int, q_len: int, heads: tuple[int, int], topk: int) -> None:
    """Lengths, lists and tables change between replays of update and run."""
    given = decoding(batch, q_len, heads, 3000, topk)
    assert tiled(given) == (q_len > 2)
    memory = Memory(cp)
    there = {n: memory.upload(v) for n, v in given.items()}
    kept = {"kv_lens": there.pop("kv_lens")}
    fixed = {"block_size": there.pop("block_size")}
    arrays = {n: there[n] for n in ("q", "k", "v", "block_indices")}
    out = cp.empty(there["q"].shape, np.uint16).view(there["q"].dtype)
    lse = cp.empty(there["q"].shape[:-1], np.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        plan = cumla.BlockSparsePlan.from_arrays(**arrays, **fixed)
        plan.prepare()
        plan.update(**kept)
        plan.run(**there, out=out, lse=lse)
        stream.begin_capture()
        plan.update(**kept)
        plan.run(**there, out=out, lse=lse)
        graph = stream.end_capture()
    for seed, length in enumerate((3000, 1, 130, 0, 2047)):
        new = decoding(batch, q_len, heads, length, topk, seed=seed)
        table = given["block_table"].copy()
        table[:, : new["block_table"].shape[1]] = new["block_table"]
        changed = {"kv_lens": new["kv_lens"], "block_table": table}
        changed["block_indices"] = new["block_indices"]
        with stream:
            for name, value in changed.items():
                (kept | there)[name].set(value)
            out.view(np.uint16).fill(0x7FFF)
            graph.launch(stream)
        stream.synchronize()
        agrees(given | changed, cumla.AttentionState(on_host(out), on_host(lse)))


def test_large_strides() -> None:
    """Pages beyond 2 ** 31 elements."""
    pages, heads = 33000, 4
    if cp.cuda.Device().mem_info[0] < 20e9:
        pytest.skip("needs 20 GB")
    given = decoding(2, 1, (16, heads), 1500, 8, num_pages=40)
    number = np.random.default_rng(3).permutation(pages)[:40]
    number[:2] = pages - 1, pages - 2
    whole = cp.zeros((2, pages, 128, heads, 128), np.uint16)
    for i, name in enumerate("kv"):
        whole[i, cp.asarray(number)] = cp.asarray(given[name].view(np.uint16))
    there = {n: Memory(cp).upload(v) for n, v in given.items() if n not in "kv"}
    there["block_table"] = cp.asarray(number[given["block_table"]].astype(np.int32))
    for layout in ("NHD", "HND"):
        if layout == "HND":
            whole = cp.ascontiguousarray(whole.swapaxes(2, 3))
        k, v = (whole[i].view(BF16) for i in range(2))
        got = cumla.block_sparse_attention(**there, k=k, v=v, kv_layout=layout)
        agrees(given, cumla.AttentionState(*map(on_host, got)))


def _spoil(array: Any, rng: Any) -> None:
    odd = np.array([LEAST, MOST, -1, 0, 1, 3, 2**20, 700], np.int64)
    random = rng.integers(LEAST, MOST, array.shape)
    array[...] = np.where(rng.random(array.shape) < 0.5, rng.choice(odd, array.shape), random)


@pytest.mark.parametrize("seed", range(40))
def test_any_bits(seed: int) -> None:
    """Lengths, offsets, lists and tables of any values lead nowhere; the bits repeat."""
    sample = samples(40, queries="ragged")[seed]
    given, rng = make(sample).given, np.random.default_rng(seed)
    for name in ("kv_lens", "qo_indptr", "block_table", "topk_lens", "block_indices"):
        if name in given and rng.integers(2):
            _spoil(given[name], rng)
    first, second = run(given), run(given)
    assert first.out.tobytes() == second.out.tobytes()
    assert first.lse.tobytes() == second.lse.tobytes()


def test_nothing() -> None:
    """No tokens, no entries, no pages."""
    given = decoding(3, 1, (16, 2), 300, 4)
    there = {n: Memory(cp).upload(v) for n, v in given.items()}
    out = cumla.block_sparse_attention(**there | {"block_indices": there["block_indices"][..., :0]})
    assert not on_host(out.out).astype(np.float32).any()
    assert np.isneginf(on_host(out.lse)).all()
    empty = {n: there[n][:0] for n in ("q", "kv_lens", "block_table", "block_indices")}
    assert cumla.block_sparse_attention(**there | empty).out.shape == (0, 1, 16, 128)
    out = cumla.block_sparse_attention(**there | {n: there[n][:0] for n in "kv"})
    assert np.isneginf(on_host(out.lse)).all()


def test_random_batches() -> None:
    """Each query token has one set of bits, in calls and by plans."""
    check_random_batches("block_sparse_attention")
