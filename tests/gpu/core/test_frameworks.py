# SPDX-License-Identifier: Apache-2.0
"""CuPy, torch and JAX arrays in one process, mixtures of them, and what is refused on a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools.arrays import bits_of, from_jax, from_torch, jax_arguments, to_torch
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import Problem, make_problem, typed
from tests.gpu.tools.refusals import REFUSALS, launches, refused

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

DTYPES = ("bfloat16", "float16")


def a_problem(**change: Any) -> Problem:
    problem = make_problem(cp, Case(**({"batch": 4, "q_len": 2, "kv_len": 1500} | change)))
    cp.cuda.Device().synchronize()
    return problem


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


# --- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy(dtype: str) -> None:
    problem = a_problem(dtype=dtype)
    out, lse = cumla.mla_decode(*problem.arrays)
    assert isinstance(out, cp.ndarray)
    assert isinstance(lse, cp.ndarray)
    assert (str(out.dtype), str(lse.dtype)) == (dtype, "float32")
    problem.check(out, lse)
    with allocations() as sizes:
        cumla.mla_decode(*problem.arrays)
    assert len(sizes) >= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["nothing", "outputs", "float32"])
def test_torch(torch: Any, dtype: str, given: str) -> None:
    problem = a_problem(dtype=dtype, cache="padded both", query="padded", table="padded")
    arrays = [to_torch(torch, array) for array in problem.arrays]
    options = {}
    if given != "nothing":
        kind = getattr(torch, dtype if given == "outputs" else "float32")
        shapes = {"out": problem.out_shape, "lse": problem.lse_shape}
        types = {"out": kind, "lse": torch.float32}
        options = {
            name: torch.full(shape, float("nan"), dtype=types[name], device="cuda")
            for name, shape in shapes.items()
        }
    result = cumla.mla_decode(*arrays, **options)
    torch.cuda.synchronize()
    for name, tensor in result._asdict().items():
        assert isinstance(tensor, torch.Tensor)
        assert tensor.device == arrays[0].device
        assert tensor is options.get(name, tensor)
    assert result.out.dtype == getattr(torch, "float32" if given == "float32" else dtype)
    assert result.lse.dtype == torch.float32
    problem.check(from_torch(torch, result.out), from_torch(torch, result.lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(jax: Any, dtype: str) -> None:
    problem = a_problem(dtype=dtype)
    arrays = jax_arguments(jax.numpy, problem)
    out, lse = cumla.mla_decode(*arrays)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (str(out.dtype), str(lse.dtype)) == (dtype, "float32")
    assert out.devices() == lse.devices() == arrays[0].devices()
    problem.check(from_jax(out), from_jax(lse))


def test_all_three_agree_to_the_bit(torch: Any, jax: Any) -> None:
    problem = a_problem()
    tensors = [to_torch(torch, array) for array in problem.arrays]
    results = [
        cumla.mla_decode(*problem.arrays),
        [from_torch(torch, x) for x in cumla.mla_decode(*tensors)],
        [from_jax(x) for x in cumla.mla_decode(*jax_arguments(jax.numpy, problem))],
    ]
    torch.cuda.synchronize()
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert bool((bits_of(one) == bits_of(other)).all())


def test_cupy_queries_on_a_torch_cache_and_jax_tables(torch: Any, jax: Any) -> None:
    problem = a_problem()
    cache = to_torch(torch, problem.kv_cache)
    _, _, table, lengths = jax_arguments(jax.numpy, problem)
    out, lse = cumla.mla_decode(problem.q, cache, table, lengths)
    assert isinstance(out, cp.ndarray)
    problem.check(out, lse)


def test_a_torch_query_on_a_cupy_cache_still_being_written(torch: Any) -> None:
    """The copy into the cache is queued late on CuPy's stream; torch's must wait for it."""
    from tests.gpu.tools import kernels

    problem = a_problem()
    late = problem.kv_bits.copy()
    late[...] = 0
    stream = cp.cuda.Stream(non_blocking=True)
    query = to_torch(torch, problem.q)
    table, lengths = (to_torch(torch, a) for a in (problem.block_table, problem.kv_lens))
    cumla.mla_decode(query, typed(late, problem.case.dtype), table, lengths)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin()
        late[...] = problem.kv_bits
        out, lse = cumla.mla_decode(query, typed(late, problem.case.dtype), table, lengths)
    torch.cuda.synchronize()
    problem.check(from_torch(torch, out), from_torch(torch, lse))


def test_torch_plan_updated_and_run_in_jax_company(torch: Any, jax: Any) -> None:
    """What is kept alive for JAX is polled in later calls; that must not spoil a torch capture."""
    problem = a_problem()
    arrays = [to_torch(torch, array) for array in problem.arrays]
    cumla.mla_decode(*arrays)
    torch.cuda.synchronize()
    # copied before the capture, which no other thread of JAX's may disturb
    jax_arrays = jax.block_until_ready(jax_arguments(jax.numpy, problem))
    jax_result = cumla.mla_decode(*jax_arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cumla.mla_decode(*arrays)
    graph.replay()
    torch.cuda.synchronize()
    problem.check(from_torch(torch, result.out), from_torch(torch, result.lse))
    problem.check(from_jax(jax_result.out), from_jax(jax_result.lse))


# --- JAX's own order of things -------------------------------------------------------------------


@functools.cache
def slow_copy(jax: Any) -> Any:
    """A jitted identity that takes some 10 ms of matrix products first."""
    jnp = jax.numpy

    def chain(x: Any) -> Any:
        noise = jax.lax.fori_loop(
            0,
            60,
            lambda _, m: jnp.tanh(m @ m),
            jnp.full((4096, 4096), 0.01, jnp.float32) + (x.ravel()[0] * 0).astype(jnp.float32),
        )
        return x + (noise[0, 0] * 0).astype(x.dtype)

    return jax.jit(chain)


def test_a_jax_producer_still_running_and_a_consumer_at_once(jax: Any) -> None:
    jnp = jax.numpy
    problem = a_problem()
    q, kv, table, lengths = jax_arguments(jnp, problem)
    produce = slow_copy(jax)
    consume = jax.jit(lambda out: out.astype(jnp.float32) * 2)
    jax.block_until_ready((produce(q), produce(kv), consume(jnp.zeros(problem.out_shape, q.dtype))))
    for _ in range(3):
        result = cumla.mla_decode(produce(q), produce(kv), table, lengths)
        doubled = consume(result.out)
        half = np.asarray(doubled, dtype=np.float32) / 2
        out = cp.asarray(half.astype(np.dtype(q.dtype)).view(np.uint16))
        problem.check(typed(out, problem.case.dtype), from_jax(result.lse))


@pytest.mark.parametrize("how", ["del", "delete"])
def test_jax_inputs_deleted_right_after_the_call(jax: Any, how: str) -> None:
    """Their memory must not be handed out again before the kernels have read it."""
    jnp = jax.numpy
    problem = a_problem()
    arguments = jax_arguments(jnp, problem)
    produce = slow_copy(jax)
    jax.block_until_ready(produce(arguments[1]))
    for _ in range(3):
        arrays = [jnp.array(argument, copy=True) for argument in arguments]
        arrays[1] = produce(arrays[1])
        result = cumla.mla_decode(*arrays)
        shapes = [(array.shape, array.dtype) for array in arrays]
        while arrays:
            array = arrays.pop()
            if how == "delete":
                array.delete()
            del array
        gc.collect()
        thieves = [jnp.full(shape, -1, dtype) for shape, dtype in shapes for _ in range(4)]
        problem.check(from_jax(result.out), from_jax(result.lse))
        jax.block_until_ready(thieves)


def test_many_jax_calls_do_not_pile_up_memory(jax: Any) -> None:
    problem = a_problem()
    arrays = jax_arguments(jax.numpy, problem)
    result = None
    used = []
    for call in range(200):
        result = cumla.mla_decode(*arrays)
        if call % 50 == 49:
            cp.cuda.Device().synchronize()
            result = cumla.mla_decode(*arrays)  # lets go of what the finished calls used
            used.append(cp.get_default_memory_pool().used_bytes())
    assert result is not None
    problem.check(from_jax(result.out), from_jax(result.lse))
    assert used[-1] <= used[0] + (64 << 20), used


# --- refused -------------------------------------------------------------------------------------


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """Sizes of what this thread asks CuPy's allocator for; what is freed does not matter."""
    sizes: list[int] = []

    class Hook(cp.cuda.MemoryHook):
        name = "allocations"

        def malloc_preprocess(self, **request: Any) -> None:
            sizes.append(request["size"])

    with Hook():
        yield sizes


def test_cpu_and_gpu_mixed(torch: Any) -> None:
    problem, host = a_problem(), make_problem(np, Case(batch=4, q_len=2, kv_len=1500))
    q, kv, table, lengths = problem.arrays
    with pytest.raises(ValueError, match=r"kv_lens: .*CUDA device 0.*the CPU"):
        cumla.mla_decode(q, kv, table, host.kv_lens)
    with pytest.raises(ValueError, match=r"kv_cache: .*CUDA device 0.*the CPU"):
        cumla.mla_decode(q, host.kv_cache, table, lengths)
    with pytest.raises(ValueError, match=r"kv_cache: .*on the CPU, got .*CUDA device 0"):
        cumla.mla_decode(host.q, kv, table, lengths)
    with pytest.raises(ValueError, match=r"block_table: .*the CPU"):
        cumla.mla_decode(q, kv, torch.as_tensor(problem.table), lengths)


def test_outputs_of_another_framework_or_place(torch: Any, jax: Any) -> None:
    problem = a_problem()
    with pytest.raises(TypeError, match="out: "):
        out = torch.empty(problem.out_shape, dtype=torch.bfloat16, device="cuda")
        cumla.mla_decode(*problem.arrays, out=out)
    with pytest.raises((TypeError, ValueError), match="lse: "):
        cumla.mla_decode(*problem.arrays, lse=np.empty(problem.lse_shape, np.float32))
    arrays = jax_arguments(jax.numpy, problem)
    with pytest.raises(TypeError, match="lse: JAX arrays are immutable"):
        cumla.mla_decode(*arrays, lse=jax.numpy.zeros(problem.lse_shape))
    with pytest.raises(TypeError, match="out: JAX arrays are immutable"):
        cumla.mla_decode(*arrays, out=jax.numpy.zeros(problem.out_shape, arrays[0].dtype))


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_arguments_that_do_not_fit(change: str, error: type[Exception], message: str) -> None:
    """Refused before anything is allocated or launched."""
    arrays, options = refused(cp, a_problem(), change)
    with allocations() as sizes, pytest.raises(error, match=message):
        cumla.mla_decode(*arrays, **options)
    assert sizes == []


def freed(torch: Any, tensor: Any) -> Any:
    """A tensor whose storage was given back, as FSDP does."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def wrapped(torch: Any, tensor: Any) -> Any:
    """A tensor around others, as torchao's: it has no memory of its own."""

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
            raise NotImplementedError(func)

    return torch.Tensor._make_wrapper_subclass(
        Wrapper, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def negated(torch: Any, tensor: Any) -> Any:
    """A view whose sign is only a flag."""
    return torch._neg_view(tensor)


@pytest.mark.parametrize("spoil", [freed, wrapped, negated])
@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "kv_lens", "out", "lse"])
def test_tensors_that_do_not_mean_their_memory(torch: Any, name: str, spoil: Any) -> None:
    """Refused before any launch, also where the same addresses have been seen before."""
    problem = a_problem()
    names = ("q", "kv_cache", "block_table", "kv_lens")
    given = {n: to_torch(torch, a) for n, a in zip(names, problem.arrays, strict=True)}
    given |= {n: torch.empty_like(x) for n, x in cumla.mla_decode(**given)._asdict().items()}
    cumla.mla_decode(**given)
    plan = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"])
    plan.update(given["kv_lens"])
    plan.run(**{n: x for n, x in given.items() if n != "kv_lens"})
    torch.cuda.synchronize()
    spoilt = given | {name: spoil(torch, given[name])}
    with launches(forbidden=True):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            cumla.mla_decode(**spoilt)
        lengths = spoilt.pop("kv_lens")
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            if name == "kv_lens":
                plan.update(lengths)
            plan.run(**spoilt)
    result = cumla.mla_decode(**given)
    torch.cuda.synchronize()
    problem.check(from_torch(torch, result.out), from_torch(torch, result.lse))


# --- check mode ----------------------------------------------------------------------------------


def test_check_mode_finds_bad_lengths_and_page_numbers(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    problem = a_problem(table="padded")
    problem.check(*cumla.mla_decode(*problem.arrays))
    capacity = 64 * problem.table.shape[1]
    pages = problem.kv_bits.shape[0]
    table, lengths = problem.block_table, problem.kv_lens

    for position, value in ((2, -1), (1, capacity + 1)):
        kept = int(lengths[position])
        lengths[position] = value
        place = rf"kv_lens\[{position}\]: .*{capacity}, got {value}"
        with pytest.raises(ValueError, match=place):
            cumla.mla_decode(*problem.arrays)
        lengths[position] = kept

    kept = int(table[0, 3])
    for value in (pages, -1, 2147480000):
        table[0, 3] = value
        with pytest.raises(ValueError, match=rf"block_table\[0, 3\]: .*{pages - 1}, got {value}"):
            cumla.mla_decode(*problem.arrays)
        arrays = [to_torch(torch, array) for array in problem.arrays]
        with pytest.raises(ValueError, match=rf"block_table\[0, 3\]: .*got {value}"):
            cumla.mla_decode(*arrays)
    table[0, 3] = kept
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    plan.update(lengths)
    problem.check(*plan.run(**problem.inputs))
    table[0, 0] = -7
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]: .*got -7"):
        plan.run(**problem.inputs)


def test_check_mode_says_that_it_cannot_look_into_a_capture(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = a_problem()
    arrays = [to_torch(torch, array) for array in problem.arrays]
    cumla.MLADecodePlan(4, 2, 16).prepare()
    torch.cuda.synchronize()
    monkeypatch.setenv("CUMLA_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING, logger="cumla"), torch.cuda.graph(graph):
        result = cumla.mla_decode(*arrays)
    assert "CUMLA_CHECK" in caplog.text
    graph.replay()
    torch.cuda.synchronize()
    problem.check(from_torch(torch, result.out), from_torch(torch, result.lse))
