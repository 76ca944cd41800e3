# SPDX-License-Identifier: Apache-2.0
"""Ranks on virtual devices of JAX, inside `jax.shard_map`, against one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.distributed import ContextParallel, Shard

jax: Any = pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[2]
PAGE, HEADS, COLUMNS = 4, 8, 6
LENGTHS = (17, 3, 0, -4, 10_000)


def mapped(
    world: int, compute: Callable[..., Any], out_specs: Any, *arrays: Any, repeats: int = 1
) -> Any:
    """Compute on so many devices, with tuples of arrays for arrays of each rank; the same bits."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:world]), ("ranks",))
    in_specs = tuple(spec("ranks") if isinstance(a, tuple) else spec() for a in arrays)
    given = [jax.numpy.stack(a) if isinstance(a, tuple) else a for a in arrays]

    def local(*values: Any) -> Any:
        own = [v[0] if isinstance(a, tuple) else v for a, v in zip(arrays, values, strict=True)]
        return compute(*own)

    each = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    first = each(*given)
    for _ in range(repeats):
        again = each(*given)
        for one, other in zip(*map(jax.tree.leaves, (first, again)), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return first


def caches(world: int, *columns: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Whole caches, for each those of the ranks, and the table of both."""
    random = np.random.default_rng(0)
    batch = len(LENGTHS)
    table = random.permutation(batch * COLUMNS).reshape(batch, -1).astype(np.int32)
    whole, own = [], []
    for shape in columns:
        cache = jax.numpy.asarray(
            random.standard_normal((table.size, PAGE, *shape)), jax.numpy.bfloat16
        )
        whole.append(cache)
        pages = np.full((world, table.size, PAGE, *shape), np.nan, np.float32)
        for entry in range(COLUMNS):  # entry j of the table is a page of rank j % world
            pages[entry % world, table[:, entry]] = np.asarray(cache[table[:, entry]], np.float32)
        own.append(tuple(jax.numpy.asarray(pages, jax.numpy.bfloat16)))
    return whole, tuple(own), jax.numpy.asarray(table)


def lengths() -> Any:
    return jax.numpy.asarray(np.array(LENGTHS, np.int32))


def heads(whole: Any) -> Any:
    """Result specs: out of four axes and lse, sharded over heads."""
    spec = jax.sharding.PartitionSpec
    return cumla.AttentionState(spec(None, None, "ranks"), spec(None, None, "ranks"))


def same(found: Any, whole: Any) -> None:
    np.testing.assert_allclose(found.lse, whole.lse, atol=1e-5, rtol=1e-5)
    out = np.asarray(found.out, np.float32)
    np.testing.assert_allclose(out, np.asarray(whole.out, np.float32), atol=2e-2, rtol=2e-2)


def decodes(world: int, q_len: int, repeats: int = 1) -> None:
    """MLA by the function, and by a plan of cumla.jax whose results are merged."""
    import cumla.jax

    (cache,), (own,), table = caches(world, (576,))
    shape = (len(LENGTHS), q_len, HEADS, 576)
    q = jax.random.normal(jax.random.key(1), shape, jax.numpy.bfloat16)
    whole = cumla.mla_decode(q, cache, table, lengths())
    parallel = ContextParallel("ranks", page_size=PAGE)

    def attend(q: Any, table: Any, kv_lens: Any, cache: Any) -> Any:
        pages = parallel.pages(kv_lens, table, q_len=q_len)
        return parallel.attend(cumla.mla_decode, q, cache, *pages)

    def planned(q: Any, table: Any, kv_lens: Any, cache: Any) -> Any:
        pages = parallel.pages(kv_lens, table, q_len=q_len)
        tokens = q.reshape(-1, 1, HEADS, 576)
        plan = cumla.jax.MLADecodePlan.from_arrays(tokens, cache).update(pages.kv_lens)
        (out, lse), _ = plan.run(tokens, cache, block_table=pages.block_table)
        return parallel.merge(out.reshape(-1, q_len, HEADS, 512), lse.reshape(-1, q_len, HEADS))

    results = [
        mapped(world, function, heads(whole), q, table, lengths(), own, repeats=repeats)
        for function in (attend, planned)
    ]
    same(results[0], whole)
    assert all(map(np.array_equal, *results))


def gathers(world: int) -> None:
    """All heads on every rank, from queries of which each rank has a share."""
    (cache,), (own,), table = caches(world, (576,))
    shape = (len(LENGTHS), 1, HEADS, 576)
    q = jax.random.normal(jax.random.key(1), shape, jax.numpy.bfloat16)
    parallel = ContextParallel("ranks", page_size=PAGE)

    def attend(table: Any, kv_lens: Any, cache: Any, q: Any) -> Any:
        pages = parallel.pages(kv_lens, table)
        q = parallel.gather_heads(q)
        state = parallel.attend(cumla.mla_decode, q, cache, *pages, gather=True)
        return jax.tree.map(lambda array: array[None], state)

    spec = jax.sharding.PartitionSpec("ranks")
    shares = tuple(jax.numpy.split(q, world, axis=2))
    found = mapped(world, attend, spec, table, lengths(), own, shares)
    for rank in range(world):
        same(
            jax.tree.map(lambda a, r=rank: a[r], found),
            cumla.mla_decode(q, cache, table, lengths()),
        )


def merges_nothing(world: int) -> None:
    """An empty batch, as each rank computes it."""
    parallel = ContextParallel("ranks", page_size=PAGE)
    out, lse = (jax.numpy.zeros((0, 1, HEADS, 512)), jax.numpy.zeros((0, 1, HEADS)))

    def merge(out: Any, lse: Any) -> Any:
        return jax.tree.map(lambda array: array[None], parallel.merge(out, lse, gather=True))

    found = mapped(world, merge, jax.sharding.PartitionSpec("ranks"), out, lse)
    assert [array.shape[1:] for array in found] == [out.shape, lse.shape]


def attends(world: int, *dtypes: str) -> None:
    """GQA with sinks."""
    whole, own, table = caches(world, (2, 64), (2, 32))
    q = jax.random.normal(jax.random.key(2), (len(LENGTHS), 3, HEADS, 64), jax.numpy.bfloat16)
    sinks = jax.numpy.linspace(-1, 2, HEADS, dtype=jax.numpy.float32)
    places = {"kv_lens": lengths(), "block_table": table}
    parallel = ContextParallel("ranks", page_size=PAGE)
    for dtype in dtypes:
        q, *whole = (array.astype(dtype) for array in (q, *whole))
        own = tuple(tuple(a.astype(dtype) for a in arrays) for arrays in own)
        expected = cumla.attention(q, *whole, **places, sinks=sinks)

        def attend(q: Any, table: Any, kv_lens: Any, sinks: Any, k: Any, v: Any) -> Any:
            pages = parallel.pages(kv_lens, table, q_len=3)
            return parallel.attend(cumla.attention, q, k, v, **pages._asdict(), sinks=sinks)

        found = mapped(world, attend, heads(expected), q, table, lengths(), sinks, *own)
        same(found, expected)
        assert found.out.dtype == q.dtype


def writes(world: int) -> None:
    """Each new token is written by the rank that owns it, in a program."""
    import cumla.jax

    _, (own,), table = caches(world, (576,))
    rows = jax.numpy.ones((len(LENGTHS), 576), jax.numpy.bfloat16)
    at = np.array([0, 5, 10, 23, -1], np.int32)
    parallel = ContextParallel("ranks", page_size=PAGE)

    def write(table: Any, at: Any, rows: Any, cache: Any) -> Any:
        slots = parallel.slots(table, jax.numpy.arange(len(LENGTHS)), at)
        return cumla.jax.append_mla_cache(rows, cache, slots)[None]

    new = mapped(world, write, jax.sharding.PartitionSpec("ranks"), table, at, rows, own)
    changed = 0
    for rank in range(world):
        shard = Shard(rank, world, page_size=PAGE)
        slots = shard.slots(np.asarray(table), np.arange(len(LENGTHS)), at)
        old = np.array(own[rank], np.float32).reshape(-1, 576)
        old[slots[slots >= 0]] = 1
        np.testing.assert_array_equal(np.asarray(new[rank], np.float32).reshape(-1, 576), old)
        changed += int((slots >= 0).sum())
    assert changed == 4


def selects(world: int) -> None:
    """The list of one device with all scores, and what each rank holds of it."""
    _, _, table = caches(world, (8,))
    random = np.random.default_rng(3)
    width = COLUMNS * PAGE
    scores = random.integers(-3, 3, (len(LENGTHS), width)).astype(np.float32)
    scores[1, ::5] = np.nan
    own = [np.full_like(scores, 9) for _ in range(world)]  # behind the ends: larger than any
    for rank in range(world):
        entries = [scores[:, e * PAGE : (e + 1) * PAGE] for e in range(rank, COLUMNS, world)]
        own[rank][:, : len(entries) * PAGE] = np.concatenate(entries, 1)
    whole = cumla.top_k(scores, 7, row_lens=np.clip(LENGTHS, 0, width).astype(np.int32))
    parallel = ContextParallel("ranks", page_size=PAGE)

    def select(table: Any, kv_lens: Any, scores: Any) -> Any:
        pages = parallel.pages(kv_lens, table)
        positions = parallel.top_k(scores, 7, row_lens=pages.kv_lens)
        found = positions, *parallel.lists(positions, table)
        return jax.tree.map(lambda array: array[None], found)

    given = tuple(jax.numpy.asarray(part) for part in own)
    spec = jax.sharding.PartitionSpec("ranks")
    found, slots, lens = mapped(world, select, spec, table, lengths(), given)
    for rank in range(world):
        np.testing.assert_array_equal(found[rank], whole.indices)
        shard = Shard(rank, world, page_size=PAGE)
        wanted = shard.lists(whole.indices, np.asarray(table))
        np.testing.assert_array_equal(slots[rank], wanted.indices)
        np.testing.assert_array_equal(lens[rank], wanted.topk_lens)
    assert int(np.asarray(lens).sum()) == int((whole.indices >= 0).sum()) > 0


def selects_blocks(world: int) -> None:
    """The lists of one device with all scores, and what each rank holds of them."""
    random = np.random.default_rng(4)
    block, width = PAGE // 2, COLUMNS * 2  # two blocks of a page
    scores = random.integers(-3, 3, (len(LENGTHS), 2, width)).astype(np.float32)
    scores[1, :, ::5] = np.nan
    own = [np.full_like(scores, 9) for _ in range(world)]  # behind the ends: larger than any
    for rank in range(world):
        entries = [scores[..., 2 * e : 2 * e + 2] for e in range(rank, COLUMNS, world)]
        own[rank][..., : len(entries) * 2] = np.concatenate(entries, -1)
    visible = -(-np.clip(LENGTHS, 0, width * block) // block).astype(np.int32)
    forced = {"init_blocks": 1, "local_blocks": 2}
    whole = cumla.select_blocks(scores, 5, visible=visible, **forced)
    parallel = ContextParallel("ranks", page_size=PAGE)

    def select(visible: Any, scores: Any) -> Any:
        lists = parallel.select_blocks(scores, 5, visible=visible, block_size=block, **forced)
        return jax.tree.map(lambda array: array[None], (lists, parallel.blocks(lists, block)))

    given = tuple(jax.numpy.asarray(part) for part in own)
    spec = jax.sharding.PartitionSpec("ranks")
    found, blocks = mapped(world, select, spec, jax.numpy.asarray(visible), given)
    for rank in range(world):
        np.testing.assert_array_equal(found[rank], whole)
        wanted = Shard(rank, world, page_size=PAGE).blocks(whole, block)
        np.testing.assert_array_equal(blocks[rank], wanted)
    assert int((np.asarray(blocks) >= 0).sum()) == int((whole >= 0).sum()) > 0


def python(program: str, devices: int) -> None:
    flags = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | flags,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


PROGRAM = """
from tests.distributed import test_jax as t
t.decodes(4, 3)
t.writes(4)
t.merges_nothing(4)
t.selects(4)
t.selects_blocks(4)
"""
MORE = """
t.decodes(2, 1)
t.gathers(2)
t.attends(2, "bfloat16", "float32")
t.writes(2)
"""
needs_shard_map = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs JAX 0.6 or later")


@needs_shard_map
def test_devices_compute_what_one_does() -> None:
    python(PROGRAM, 4)


@needs_shard_map
@pytest.mark.exhaustive
def test_two_devices_compute_what_one_does() -> None:
    python(PROGRAM.splitlines()[1] + MORE, 2)


def test_an_axis_that_is_not_mapped() -> None:
    parallel = ContextParallel("ranks", page_size=PAGE)
    with pytest.raises(
        ValueError, match=r"^group: needs the name of an axis that jax\.shard_map maps"
    ):
        parallel.pages(lengths(), np.zeros((len(LENGTHS), 2), np.int32))


def test_a_plan_that_is_a_value() -> None:
    kind = import_module("cumla.jax").MLADecodePlan
    with pytest.raises(
        TypeError, match=r"^attention: .* got one of cumla\.jax.*ContextParallel\.merge"
    ):
        ContextParallel("ranks").attend(kind.__new__(kind).run, np.zeros((1, 1, 16, 576)))
