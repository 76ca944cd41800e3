# SPDX-License-Identifier: Apache-2.0
"""cumla inside jax.jit on the GPU: the bits of eager calls, command buffers, memory in place."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import OPERATIONS, Operation, Planned, every_operation, every_plan
from tests.gpu.tools.process import run_fresh
from tests.sparse.dsa_cases import Step

KERNELS = (
    "append_cache",
    "append_fp8_cache",
    "append_indexer_cache",
    "append_kv_cache",
    "attention_decode",
    "merge_states",
    "mla_decode",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_mqa_schedule",
    "quantize_fp8",
    "ragged_schedule",
    "schedule",
    "top_k",
)
MAY_SKIP = ("needs JAX on the GPU", "needs two GPUs")
cp: Any = pytest.importorskip("cupy")
jax: Any = pytest.importorskip("jax")
helpers: Any = pytest.importorskip("tests.bindings.test_jax")
devices: Any = pytest.importorskip("tests.bindings.on_devices")

DECODE = OPERATIONS["mla_decode"]


@pytest.fixture(autouse=True, scope="module")
def _jax_on_the_gpu() -> None:
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")


@functools.cache
def callbacks() -> Any:
    """Count how often XLA calls the handler; one look into what it keeps is one call."""
    from cumla.core.operation import Ready
    from cumla.jax import execute

    class Counting(Ready):
        count = 0

        def get(self, *arguments: Any) -> Any:
            self.count += 1
            return super().get(*arguments)

    execute._ready = Counting()
    return execute._ready


def on_gpu(operation: Operation) -> list[np.ndarray]:
    """The eager call: what comes back, or what was written in CuPy's arrays."""
    arguments = operation.make()
    if not operation.in_place:
        there = {name: helpers.as_jax(v) for name, v in arguments.items()}
        return [np.asarray(leaf) for leaf in jax.tree.leaves(operation.function(**there))]

    def to_cupy(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(to_cupy, value))
        if not isinstance(value, np.ndarray):
            return value
        plain = np.ascontiguousarray(value)
        return cp.asarray(plain.view(f"u{plain.itemsize}")).view(plain.dtype)

    there = {name: to_cupy(value) for name, value in arguments.items()}
    operation.function(**there)
    written = jax.tree.leaves(tuple(there[name] for name in operation.in_place))
    return [a.view(f"u{a.dtype.itemsize}").get().view(a.dtype) for a in written]


@every_operation
def test_jit_gives_the_bits_of_the_eager_call(operation: Operation) -> None:
    function, arrays = helpers.of_jax(operation)
    expected = on_gpu(operation)
    compiled = jax.jit(function)
    for _ in range(4):  # a plain run, a capture, replays
        helpers.assert_same(operation, compiled(**arrays), expected)


@every_plan
def test_one_schedule_for_all_layers(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    step, arrays = helpers.layers_of(planned, 6)
    expected = on_gpu(operation)
    for _ in range(4):
        for result in step(arrays):
            helpers.assert_same(operation, result, expected)


@pytest.mark.parametrize("v4", [False, True])
def test_a_step_of_sparse_attention(v4: bool) -> None:
    """A plan of cumla.jax gives the bits of one of cumla."""
    of = Step(topk=100, heads=16, page=64, pages=8, index_heads=64, dim=128, q_len=2, v4=v4)
    given, lens = of.arguments(), np.array([500, 65, 256], np.int32)
    there = {name: helpers.as_jax(array) for name, array in given.items()}
    expected = [
        np.array(a) for a in helpers.step_of(of, cumla.DSAPlan, there, helpers.as_jax(lens))
    ]
    compiled = jax.jit(functools.partial(helpers.step_of, of, cumla.jax.DSAPlan))
    np.testing.assert_array_equal(expected[0], of.selected(given, lens))
    for _ in range(4):  # a plain run, a capture, replays
        for got, want in zip(compiled(there, helpers.as_jax(lens)), expected, strict=True):
            assert np.asarray(got).tobytes() == want.tobytes()


@pytest.fixture
def without_handler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have calls traced as with a JAX whose layout is not known, from the call of this on."""
    pytest.importorskip("jax.experimental.buffer_callback")
    from cumla.jax import handler

    def fail(*_: Any) -> None:
        raise AssertionError

    def forbid() -> None:
        monkeypatch.setattr(handler, "_unknown", ["a layout of a test"])
        monkeypatch.setattr(jax.ffi, "ffi_call", fail)

    return forbid


@every_operation
def test_buffer_callback_gives_the_bits_of_the_eager_call(
    operation: Operation, without_handler: Any
) -> None:
    expected = on_gpu(operation)
    without_handler()
    function, arrays = helpers.of_jax(operation)
    compiled = jax.jit(function)
    for _ in range(3):
        helpers.assert_same(operation, compiled(**arrays), expected)


@every_plan
def test_buffer_callback_runs_on_the_stream_of_its_neighbours(
    planned: Planned, without_handler: Any
) -> None:
    """Layers of one schedule, with work of XLA's between, in order without a host's wait."""
    operation = OPERATIONS[planned.operation]
    expected = on_gpu(operation)
    without_handler()
    step, arrays = helpers.layers_of(planned, 6)
    for results in [step(arrays) for _ in range(3)]:
        for result in results:
            helpers.assert_same(operation, result, expected)


def test_buffer_callback_writes_to_a_donated_cache_in_place(without_handler: Any) -> None:
    loop, (kv_cache, *rest) = helpers.decoding(4)
    expected = jax.tree.leaves(jax.device_get(jax.jit(loop)(kv_cache, *rest)))
    without_handler()
    mine = jax.numpy.array(kv_cache, copy=True)
    place = mine.unsafe_buffer_pointer()
    got = jax.jit(lambda *arrays: loop(*arrays), donate_argnums=0)(mine, *rest)
    assert got[0][0].unsafe_buffer_pointer() == place
    for one, other in zip(jax.tree.leaves(got), expected, strict=True):
        assert np.asarray(one).tobytes() == other.tobytes()


def test_a_plan_that_is_used_twice_is_copied() -> None:
    """Each of two branches has the schedule, whichever runs first."""
    import cumla.jax

    arrays, _ = helpers.divided(DECODE.make())
    lengths = arrays.pop("kv_lens")

    @jax.jit
    def both(lengths: Any) -> Any:
        plan = cumla.jax.MLADecodePlan(2, 2, 16).update(lengths)
        return [plan.run(**arrays)[0] for _ in range(3)]

    for result in both(lengths):
        helpers.assert_same(DECODE, result, on_gpu(DECODE))


COMMAND_BUFFERS = """
import os
os.environ["XLA_FLAGS"] = "--xla_gpu_graph_min_graph_size=1"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import numpy as np
import jax, jax.numpy as jnp
import cumla.jax
from tests.gpu.core.test_jax_jit import callbacks

layers, batch, heads, pages = 8, 8, 16, 64
count = callbacks()
keys = jax.random.split(jax.random.key(0), 3)
queries = jax.random.normal(keys[0], (layers, batch, 1, heads, 576), jnp.bfloat16)
kv_cache = jax.random.normal(keys[1], (pages, 64, 576), jnp.bfloat16)
table = jax.random.permutation(keys[2], pages).astype(jnp.int32).reshape(batch, -1)

@jax.jit
def step(queries, kv_cache, table, kv_lens):
    plan = cumla.jax.MLADecodePlan.from_arrays(queries[0], kv_cache).update(kv_lens)
    outs = []
    for q in queries:
        (out, _), plan = plan.run(q, kv_cache, block_table=table)
        outs.append(out)
    return outs

def run(lens):
    before = count.count
    outs = jax.block_until_ready(step(queries, kv_cache, table, lens))
    return outs, count.count - before

def check(outs, lens):
    for q, out in zip(queries, outs):
        expected = cumla.mla_decode(q, kv_cache, table, lens).out
        assert np.asarray(out).tobytes() == np.asarray(expected).tobytes(), lens
"""
OTHER_LENGTHS = """
lens = jnp.full(batch, 100, jnp.int32)
print("callbacks", [run(lens)[1] for _ in range(6)])
for seed in range(6):
    new = jnp.asarray(np.random.default_rng(seed).integers(0, 513, batch), jnp.int32)
    check(run(new)[0], new)
print("same")
"""
BUSY_THREAD = """
from tests.bindings.test_jax import busy_thread
lens = jnp.full(batch, 100, jnp.int32)
with busy_thread():
    first = [run(lens)[1] for _ in range(20)]
    last = [run(lens)[1] for _ in range(200)]
    kept = [run(lens)[0] for _ in range(30)]  # new places each time
print("callbacks", first[0], sum(last))
for outs in kept:
    check(outs, lens)
print("same")
"""


def test_command_buffers_replay_with_other_lengths() -> None:
    """Python runs in the plain execution and in the capture, and then no more."""
    done = run_fresh(COMMAND_BUFFERS + OTHER_LENGTHS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["callbacks [9, 9, 0, 0, 0, 0]", "same"]


def test_command_buffers_beside_a_thread_that_computes_all_the_time() -> None:
    """Replays do without the GIL, and callbacks wait for it; nothing waits for ever."""
    done = run_fresh(COMMAND_BUFFERS + BUSY_THREAD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["callbacks 9 0", "same"]


def test_scan_writes_to_a_donated_cache_in_place() -> None:
    loop, (kv_cache, lengths, rows) = helpers.decoding(4)
    expected = jax.device_get(jax.jit(loop)(kv_cache, lengths, rows))
    mine = jax.numpy.array(kv_cache, copy=True)
    place = mine.unsafe_buffer_pointer()
    (written, _), outs = jax.jit(loop, donate_argnums=0)(mine, lengths, rows)
    assert written.unsafe_buffer_pointer() == place
    (cache, _), eager = expected
    assert np.asarray(written).tobytes() == cache.tobytes()
    assert np.asarray(outs).tobytes() == eager.tobytes()
    q, table = (helpers.as_jax(DECODE.make()[name]) for name in ("q", "block_table"))
    last = cumla.mla_decode(q, written, table, lengths + 4).out
    assert np.asarray(outs[-1]).tobytes() == np.asarray(last).tobytes()


def test_a_device_computes_its_share() -> None:
    """All of it; test_jax_devices.py has two."""
    for shares in devices.SHARES.values():
        each, arrays = devices.divided_call(shares, 1)
        expected = devices.one_by_one(shares, 1)
        for _ in range(3):
            helpers.assert_same(OPERATIONS[shares.operation], each(arrays), expected)


def test_a_thread_that_computes_all_the_time() -> None:
    """New places of the results have XLA call back, behind the thread's GIL."""
    function, arrays = helpers.of_jax(DECODE)
    compiled, expected = jax.jit(function), on_gpu(DECODE)
    with helpers.busy_thread():
        for call in (compiled, function):
            for result in [call(**arrays) for _ in range(20)]:
                helpers.assert_same(DECODE, result, expected)


def test_what_a_call_costs_the_host() -> None:
    """Times are printed, not judged: of an eager call on JAX arrays, and of a compiled one."""
    function, arrays = helpers.of_jax(DECODE)
    for name, call in (("eager", function), ("jit", jax.jit(function))):
        alone, waited = [], []
        for _ in range(60):
            begin = time.perf_counter()
            result = call(**arrays)
            alone.append(time.perf_counter() - begin)
            jax.block_until_ready(result)
            waited.append(time.perf_counter() - begin)
        alone_us, waited_us = (np.median(times[10:]) * 1e6 for times in (alone, waited))
        print(f"{name}: {alone_us:.0f} us, {waited_us:.0f} us with the result")
