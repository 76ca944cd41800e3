# SPDX-License-Identifier: Apache-2.0
"""JAX on two GPUs: shares of a call, sharded arrays, programs and plans on the second GPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import OPERATIONS, PLANS, Operation, Planned, every_operation, every_plan
from tests.gpu.tools.process import run_fresh

KERNELS = ()  # it is about the binding
MAY_SKIP = ("needs two GPUs",)
jax: Any = pytest.importorskip("jax")
helpers: Any = pytest.importorskip("tests.bindings.test_jax")
devices: Any = pytest.importorskip("tests.bindings.on_devices")
one_gpu: Any = pytest.importorskip("tests.gpu.core.test_jax_jit")

DECODE = OPERATIONS["mla_decode"]
RUNS = 4  # a plain one, a capture, replays


@pytest.fixture(autouse=True, scope="module")
def _two_gpus() -> None:
    if jax.default_backend() not in ("gpu", "cuda") or len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("shares", devices.SHARES.values(), ids=devices.SHARES)
def test_each_device_computes_its_share(shares: Any) -> None:
    """With the bits of eager calls of the same shares on one GPU."""
    each, arrays = devices.divided_call(shares, 2)
    expected = devices.one_by_one(shares, 2)
    for _ in range(RUNS):
        results = each(arrays)
        assert all(len(result.sharding.device_set) == 2 for result in results)
        helpers.assert_same(OPERATIONS[shares.operation], results, expected)


def test_an_array_that_is_sharded_without_shard_map() -> None:
    """Gathered under jit; an eager call says what to do instead, which works."""
    function, arrays = helpers.of_jax(DECODE)
    sharding = jax.sharding.NamedSharding(devices.mesh(2), devices.P("x"))
    spread = arrays | {"q": jax.device_put(arrays["q"], sharding)}
    for _ in range(RUNS):
        helpers.assert_same(DECODE, jax.jit(function)(**spread), one_gpu.on_gpu(DECODE))
    with helpers.refused(ValueError, "q: needs an array on one device, got one that is sharded ov"):
        function(**spread)
    outs = []
    for i, shard in enumerate(spread["q"].addressable_shards):
        rest = {"block_table": arrays["block_table"][i : i + 1]}
        rest |= {"kv_lens": arrays["kv_lens"][i : i + 1], "kv_cache": arrays["kv_cache"]}
        outs.append(function(q=shard.data, **jax.device_put(rest, shard.device)))
        assert outs[-1].out.devices() == {shard.device}
    expected = devices.one_by_one(devices.SHARES["mla_decode, batch"], 2)
    parts = [np.concatenate(list(map(np.asarray, leaves))) for leaves in zip(*outs, strict=True)]
    helpers.assert_same(DECODE, tuple(parts), expected)


@every_operation
def test_arrays_on_the_second_gpu(operation: Operation) -> None:
    """Under jit and outside: results are there, with the bits of the first GPU."""
    function, arrays = helpers.of_jax(operation)
    second = jax.devices()[1]
    there = jax.device_put(arrays, second)
    for call in (function, jax.jit(function)):
        for _ in range(RUNS):
            results = call(**there)
            assert {leaf.device for leaf in jax.tree.leaves(results)} == {second}
            helpers.assert_same(operation, results, one_gpu.on_gpu(operation))
    with jax.default_device(second):  # not committed
        function, arrays = helpers.of_jax(operation)
        for call in (function, jax.jit(function)):
            results = call(**arrays)
            assert {leaf.device for leaf in jax.tree.leaves(results)} == {second}
            helpers.assert_same(operation, results, one_gpu.on_gpu(operation))


@every_plan
def test_a_plan_on_the_second_gpu(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    step, arrays = helpers.layers_of(planned, 3)
    there = jax.device_put(arrays, jax.devices()[1])
    for _ in range(RUNS):
        for result in step(there):
            helpers.assert_same(operation, result, one_gpu.on_gpu(operation))


def test_a_plan_for_layers_of_which_each_device_has_its_heads() -> None:
    shares = devices.SHARES["mla_decode, heads"]
    step, arrays = helpers.layers_of(PLANS["MLADecodePlan"], 3)
    each = jax.shard_map(
        lambda given: [tuple(result) for result in step(given)],
        mesh=devices.mesh(2),
        in_specs=({name: devices.along(shares.axes.get(name)) for name in arrays},),
        out_specs=[tuple(map(devices.along, shares.results))] * 3,
    )
    expected = devices.one_by_one(shares, 2)
    compiled = jax.jit(each)
    for _ in range(RUNS):
        for result in compiled(arrays):
            helpers.assert_same(DECODE, result, expected)


def test_each_device_writes_to_its_donated_cache_in_place() -> None:
    loop, given = helpers.decoding(3)
    for device in range(2):  # XLA captures loops at their first execution, where nothing is loaded
        cumla.prepare(cumla.append_mla_cache, cumla.mla_decode, device=device)
    sharding = jax.sharding.NamedSharding(devices.mesh(2), devices.P("x"))
    stacked = [jax.jit(jax.numpy.stack, out_shardings=sharding)([a, a]) for a in given]

    def local(*given: Any) -> Any:
        return jax.tree.map(lambda a: a[None], loop(*[a[0] for a in given]))

    spec = devices.P("x")
    loops = jax.shard_map(local, mesh=devices.mesh(2), in_specs=(spec,) * 3, out_specs=spec)
    alone = jax.device_get(jax.jit(loop)(*given))
    places = [shard.data.unsafe_buffer_pointer() for shard in stacked[0].addressable_shards]
    (cache, lengths), outs = jax.jit(loops, donate_argnums=0)(*stacked)
    assert [s.data.unsafe_buffer_pointer() for s in cache.addressable_shards] == places
    for many, one in zip((cache, lengths, outs), jax.tree.leaves(alone), strict=True):
        assert all(np.asarray(part).tobytes() == np.asarray(one).tobytes() for part in many)
    with helpers.refused(ValueError, "kv_cache: needs an array with memory, got one deleted or d"):
        cumla.jax.append_mla_cache(given[2][0], stacked[0], jax.numpy.arange(2))


def test_a_program_for_each_gpu_at_once() -> None:
    """A thread each; nothing of one is taken for the other's."""
    function, arrays = helpers.of_jax(DECODE)
    compiled, expected = jax.jit(function), one_gpu.on_gpu(DECODE)
    wrong: list[str] = []

    def work(device: Any) -> None:
        there = jax.device_put(arrays, device)
        for call in (compiled, function) * 30:
            result = call(**there)
            if result.out.devices() != {device}:
                wrong.append("place")
            same = zip(map(np.asarray, result), expected, strict=True)
            if any(a.tobytes() != b.tobytes() for a, b in same):
                wrong.append("bits")

    threads = [threading.Thread(target=work, args=(device,)) for device in jax.devices()[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


BOTH = """
import os
os.environ["XLA_FLAGS"] = "--xla_gpu_graph_min_graph_size=1"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import numpy as np
import jax, jax.numpy as jnp
import cumla.jax
from tests.bindings.on_devices import P, mesh
from tests.gpu.core.test_jax_jit import callbacks

count = callbacks()
keys = jax.random.split(jax.random.key(0), 3)
queries = jax.random.normal(keys[0], (4, 8, 1, 32, 576), jnp.bfloat16)
kv_cache = jax.random.normal(keys[1], (64, 64, 576), jnp.bfloat16)
table = jax.random.permutation(keys[2], 64).astype(jnp.int32).reshape(8, -1)

def layers(queries, kv_cache, table, kv_lens):
    plan = cumla.jax.MLADecodePlan.from_arrays(queries[0], kv_cache).update(kv_lens)
    outs, total = [], jnp.zeros(())
    for q in queries:
        before = jax.lax.psum(q.astype(jnp.float32).sum(), "x")  # while kernels are still cold
        (out, _), plan = plan.run(q + 0 * before.astype(q.dtype), kv_cache, block_table=table)
        total += jax.lax.psum(out.astype(jnp.float32).sum(), "x")
        outs.append(out)
    return jnp.stack(outs), total

heads = P(None, None, None, "x")
step = jax.jit(jax.shard_map(
    layers, mesh=mesh(2), in_specs=(heads, P(), P(), P()), out_specs=(heads, P())))
given = [jax.device_put(a, jax.sharding.NamedSharding(mesh(2), s))
         for a, s in ((queries, heads), (kv_cache, P()), (table, P()))]
made = []
for seed in range(8):
    lens = np.random.default_rng(seed).integers(0, 513, 8).astype(np.int32)
    lens = jax.device_put(lens, jax.sharding.NamedSharding(mesh(2), P()))
    before = count.count
    outs, total = jax.block_until_ready(step(*given, lens))
    made.append(count.count - before)
    there = np.asarray(lens)
    for q, out in zip(queries, outs):
        for i in range(2):
            half = np.s_[:, :, 16 * i : 16 * i + 16]
            expected = cumla.mla_decode(q[half], kv_cache, table, jnp.asarray(there)).out
            assert np.asarray(out[half]).tobytes() == np.asarray(expected).tobytes(), seed
print("callbacks", made)
print("same")
"""


def test_collectives_between_calls() -> None:
    """Cold kernels wait for no other device, nor do callbacks; replays have the same bits."""
    done = run_fresh(BOTH)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert done.stdout.splitlines()[-1] == "same"
