# SPDX-License-Identifier: Apache-2.0
"""Results that JAX drops while computations still read them: nothing may overwrite those yet."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core import frameworks
from tests.gpu.tools.arrays import jax_arguments
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.process import run_fresh

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
MAY_SKIP = ("this JAX drops a buffer only when its readers are done",)
cp: Any = pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def jax() -> Any:
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")
    for heads in (16, 128):
        cumla.MLADecodePlan(4, 2, heads).prepare()
    return jax


@functools.cache
def slow_copy(jax: Any) -> Any:
    """A jitted identity that reads its argument after some 100 ms of matrix products."""
    jnp = jax.numpy

    def copy(x: Any) -> Any:
        # Straight-line: enqueuing a loop makes JAX wait for what it enqueued before.
        noise = jnp.full((8192, 8192), 0.01, jnp.float32) + (x.ravel()[0] * 0).astype(jnp.float32)
        for _ in range(30):
            noise = jnp.tanh(noise @ noise)
        return x + (noise[0, 0] * 0).astype(x.dtype)

    return jax.jit(copy)


def a_problem(seed: int, **change: Any) -> Problem:
    options: dict[str, Any] = {"batch": 4, "q_len": 2, "kv_len": 1500, "seed": seed}
    problem = make_problem(cp, Case(**(options | change)))
    cp.cuda.Device().synchronize()
    return problem


def lent(*arguments: Any) -> Any:
    """Decode into CuPy's memory, which JAX is lent: without a stream XLA would allocate."""
    return cumla.mla_decode(*arguments, stream=cp.cuda.get_current_stream())


def ready_arguments(jax: Any, seed: int, **change: Any) -> tuple[Any, ...]:
    """JAX arrays whose memory is written, so that no call on them waits for JAX's stream."""
    made = jax_arguments(jax.numpy, a_problem(seed, **change))
    jax.block_until_ready(made)
    return made


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def drop_while_read(jax: Any, stream: Any, drop: Callable[[list[Any]], None]) -> tuple[Any, Any]:
    """Return what a slow reader got of a result dropped at once, and what it should have got."""
    first, others = ready_arguments(jax, 0), ready_arguments(jax, 1)
    copy = slow_copy(jax)
    kept = jax.numpy.array(cumla.mla_decode(*first, stream=stream).out, copy=True)
    expected = bits(copy(kept))
    different = bits(cumla.mla_decode(*others, stream=stream).out)
    assert (expected != different).mean() > 0.5  # one of the requests is empty
    cp.cuda.Device().synchronize()

    out, _ = cumla.mla_decode(*first, stream=stream)
    jax.block_until_ready(out)
    y = copy(out)
    held = [out]
    del out
    drop(held)
    later = [cumla.mla_decode(*others, stream=stream) for _ in range(10)]
    (stream or cp.cuda.get_current_stream()).synchronize()
    assert not y.is_ready(), "the reader was done before anything could overwrite what it reads"
    got = bits(y)
    for result in later:
        np.testing.assert_array_equal(bits(result.out), different)
    return got, expected


def drop_here(held: list[Any]) -> None:
    held.clear()


def delete(held: list[Any]) -> None:
    held.pop().delete()


def drop_in_a_thread(held: list[Any]) -> None:
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("drop", [drop_here, delete, drop_in_a_thread])
@pytest.mark.parametrize("own_stream", [False, True])
def test_later_calls_leave_a_dropped_result_to_its_reader(
    jax: Any, own_stream: bool, drop: Callable[[list[Any]], None]
) -> None:
    stream = cp.cuda.Stream(non_blocking=True) if own_stream else None
    got, expected = drop_while_read(jax, stream, drop)
    np.testing.assert_array_equal(got, expected)


def test_the_reader_would_see_memory_that_went_straight_back(
    jax: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results handed over as plain CuPy arrays: the test above finds what is wrong with that."""

    def plainly(jax: Any, array: Any, view: object, stream: int) -> Any:
        with frameworks.cupy_framework().use_stream(stream):
            return jax.dlpack.from_dlpack(array)

    monkeypatch.setattr(frameworks, "lend", plainly)
    got, expected = drop_while_read(jax, cp.cuda.Stream(non_blocking=True), drop_here)
    if np.array_equal(got, expected):
        pytest.skip("this JAX drops a buffer only when its readers are done")


def test_a_chain_of_calls_and_readers_that_never_waits(jax: Any) -> None:
    """Each result is read late and dropped at once, each call has another query."""
    made = [ready_arguments(jax, seed) for seed in range(3)]
    copy = slow_copy(jax)
    expected = [bits(cumla.mla_decode(*each).out) for each in made]
    read = [copy(lent(*made[i % 3]).out) for i in range(9)]
    for i, y in enumerate(read):
        np.testing.assert_array_equal(bits(y), expected[i % 3])


def test_dropped_memory_comes_back(jax: Any) -> None:
    made = ready_arguments(jax, 0, batch=64, heads=128, kv_len=128)
    copy = slow_copy(jax)
    pool = cp.get_default_memory_pool()
    result = lent(*made)
    size = result.out.nbytes
    jax.block_until_ready(copy(result.out))
    del result
    gc.collect()
    settle(jax, made)
    before = pool.used_bytes()
    last = None
    for _ in range(8):
        last = copy(lent(*made).out)
    assert pool.used_bytes() >= before + 5 * size, "the readers were too fast to prove anything"
    jax.block_until_ready(last)
    settle(jax, made)
    assert pool.used_bytes() <= before + 2 * size


def settle(jax: Any, made: tuple[Any, ...]) -> None:
    """Calls that come after the readers are done: they fence, and then find the fences passed."""
    for _ in range(4):
        jax.block_until_ready(lent(*made))
        time.sleep(0.02)


def test_threads_with_calls_readers_and_drops(jax: Any) -> None:
    made = [ready_arguments(jax, seed) for seed in range(4)]
    expected = [bits(cumla.mla_decode(*each).out) for each in made]
    read = jax.jit(lambda x: x * 2 / 2)
    jax.block_until_ready(read(lent(*made[0]).out))
    wrong: list[int] = []

    def work(i: int) -> None:
        stream = cp.cuda.Stream(non_blocking=True)
        for _ in range(50):
            y = read(cumla.mla_decode(*made[i], stream=stream).out)
            if not np.array_equal(bits(y), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


EXIT = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import cumla
import jax
from tests.gpu.core.test_jax_lifetime import lent, ready_arguments, slow_copy
made = ready_arguments(jax, 0)
held = lent(*made)
late = slow_copy(jax)(lent(*made).out)
dropped = lent(*made)
del dropped
print("done", flush=True)
"""


def test_interpreter_exit_with_results_held_dropped_and_being_read(jax: Any) -> None:
    done = run_fresh(EXIT)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    for trouble in ("Traceback", "Exception ignored", "Fatal", "terminate called"):
        assert trouble not in done.stderr
