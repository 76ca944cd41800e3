# SPDX-License-Identifier: Apache-2.0
"""cumla inside transformations of JAX: on the CPU, and on a GPU that is not there."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi", reason="needs JAX 0.5 or later")

import jax.numpy as jnp  # noqa: E402

import cumla  # noqa: E402
import cumla.jax  # noqa: E402
from cumla.core import frameworks  # noqa: E402
from cumla.core import operation as core_operation  # noqa: E402
from cumla.core.operation import Ready  # noqa: E402
from cumla.jax import call, execute, fallback, handler, plans, spec  # noqa: E402
from cumla.launch import device as launch_device  # noqa: E402
from cumla.launch import kernel  # noqa: E402
from tests.bindings.two_caches import TWO_CACHES  # noqa: E402
from tests.bindings.xla_frame import Xla, custom_calls  # noqa: E402
from tests.calls import (  # noqa: E402
    OPERATIONS,
    PLANS,
    Arguments,
    Operation,
    Planned,
    arrays_of,
    every_operation,
    every_plan,
    int32,
    numbers,
    refused,
    with_array,
)
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver  # noqa: E402
from tests.selection import some  # noqa: E402
from tests.sparse.dsa_cases import (  # noqa: E402
    ATTENDED,
    MADE_OF,
    SELECTED_FROM,
    Step,
    window_of,
)

DECODE = OPERATIONS["mla_decode"]
IN_PLACE = {name: one for name, one in OPERATIONS.items() if one.in_place}
every_append = pytest.mark.parametrize("operation", IN_PLACE.values(), ids=IN_PLACE)


def as_jax(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(as_jax, value))
    return jax.device_put(value) if isinstance(value, np.ndarray) else value


def is_array(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(part, np.ndarray) for part in parts)


def function_of(operation: Operation) -> Callable[..., Any]:
    """The function that JAX's users call."""
    name = operation.function.__name__
    return getattr(cumla.jax if operation.in_place else cumla, name)  # type: ignore[no-any-return]


def divided(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """Arrays of JAX, and the rest."""
    arrays = {name: as_jax(value) for name, value in arguments.items() if is_array(value)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


def of_jax(operation: Operation) -> tuple[Callable[..., Any], Arguments]:
    """A function of arrays alone, and the arrays."""
    arrays, options = divided(operation.make())
    return functools.partial(function_of(operation), **options), arrays


def eager(operation: Operation) -> list[np.ndarray]:
    """Return what comes back from the same call on NumPy arrays, or was written."""
    arguments = operation.make()
    result = operation.function(**arguments)
    if operation.in_place:
        result = tuple(arguments[name] for name in operation.in_place)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def without_rows_of_nobody(operation: Operation, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Leave rows out that belong to no request: they may hold anything."""
    offsets = operation.make().get("qo_indptr")
    if offsets is None or operation.in_place:
        return arrays
    return [array[offsets[0] : offsets[-1]] for array in arrays]


def assert_same(operation: Operation, got: Any, expected: list[np.ndarray]) -> None:
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(got)]
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in expected]
    both = [without_rows_of_nobody(operation, arrays) for arrays in (found, expected)]
    for one, other in zip(*both, strict=True):
        assert one.tobytes() == other.tobytes()


def python(program: str, *arguments: str, **variables: str) -> str:
    """Run a program in a process of its own: what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def gpu(
    bindings: FakeBindings, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[tuple[str, bytes]]]:
    """A GPU that JAX sees: lists what was launched since it was last asked, with parameters."""
    launched: list[tuple[str, bytes]] = []
    launch = kernel.PreparedLaunch.__call__

    def note(self: kernel.PreparedLaunch) -> None:
        launch(self)
        launched.append((self._kernel.spec.entry, bytes(self._owned[0])))

    monkeypatch.setattr(kernel.PreparedLaunch, "__call__", note)
    monkeypatch.setattr(execute, "driver", lambda: driver)
    for module in (call, plans):
        monkeypatch.setattr(module, "gpu", lambda: 0)
    monkeypatch.setattr(execute, "_ready", type(execute._ready)())
    monkeypatch.setattr(execute, "_templates", Ready())

    def take() -> list[tuple[str, bytes]]:
        taken = launched[:]
        launched.clear()
        return taken

    return take


# --- on the CPU -----------------------------------------------------------------------------------


@every_operation
def test_jit_equals_the_eager_call(operation: Operation) -> None:
    function, arrays = of_jax(operation)
    assert_same(operation, jax.jit(function)(**arrays), eager(operation))
    for one, other in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(of_jax(operation)[1]), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()  # nothing was donated


@pytest.mark.parametrize("name", TWO_CACHES)
def test_two_caches_of_v4(name: str) -> None:
    """By the function, and by a plan whose schedule two layers share."""
    operation = TWO_CACHES[name]
    function, arrays = of_jax(operation)
    expected = eager(operation)
    assert_same(operation, jax.jit(function)(**arrays), expected)
    names = ("q", "kv_cache", "indices", "extra_kv_cache", "extra_indices")
    lengths = ("topk_lens", "extra_topk_lens")
    formats = {n: value for n, value in operation.make().items() if n.endswith("cache_format")}

    @jax.jit
    def step(arrays: Arguments) -> list[Any]:
        given = {name: arrays[name] for name in names}
        plan = cumla.jax.MLASparsePlan.from_arrays(**given, **formats)
        plan = plan.update(**{name: arrays[name] for name in lengths})
        results = []
        for _ in range(2):
            result, plan = plan.run(**{n: a for n, a in arrays.items() if n not in lengths})
            results.append(jax.tree.map(lambda a: a + 0, result))
        return results

    for result in step(arrays):
        assert_same(operation, result, expected)


@pytest.fixture
def default_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's default CPU device counts as a GPU for the kernels, but not while a call is traced."""
    monkeypatch.setattr(call, "_places", {})
    monkeypatch.setattr(call, "_place", lambda _: (None, jax.devices()[0]))


@pytest.mark.usefixtures("default_gpu")
@pytest.mark.parametrize("name", ["mla_decode", "mqa_logits", "merge_attention_states"])
def test_eager_calls_run_compiled(name: str) -> None:
    """Once for each shape."""
    operation = OPERATIONS[name]
    function, arrays = of_jax(operation)
    for _ in range(2):  # the first array of a type is looked at another way
        function(**arrays)
    made, used = call._custom_call.cache_info(), call._compiled.cache_info()
    for _ in range(3):
        assert_same(operation, function(**arrays), eager(operation))
    assert call._custom_call.cache_info() == made  # nothing was traced again
    assert call._compiled.cache_info().hits == used.hits + 3


@pytest.mark.usefixtures("default_gpu")
def test_eager_calls_of_arrays_that_are_gone() -> None:
    """The name of the first one, by whichever way the call would have run."""
    function, arrays = of_jax(DECODE)
    function(**arrays)
    arrays["kv_cache"] = jnp.array(arrays["kv_cache"], copy=True)
    arrays["kv_cache"].delete()
    for given in (arrays, arrays | {"kv_lens": np.asarray(arrays["kv_lens"])}):
        with refused(ValueError, "kv_cache: needs an array with memory, got one deleted or don"):
            function(**given)


class _Place:
    """As much of a device, of a sharding and of an array as tells where the array is."""

    def __init__(self, platform: str = "gpu", number: int = 0, memory: str = "device") -> None:
        self.platform, self.local_hardware_id, self.memory_kind = platform, number, memory
        self.device_set, self.sharding = {self}, self


def test_eager_calls_stay_where_the_arrays_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On JAX's default device, if that is a GPU for the kernels, in its own memory."""
    first, second, cpu = _Place(), _Place(number=1), _Place("cpu")
    pinned = _Place(memory="pinned_host")
    pinned.device_set = {first}
    monkeypatch.setitem(frameworks.framework_of_type, _Place, frameworks.jax_framework())
    monkeypatch.setattr(call, "_compiled", lambda *_: lambda *arrays: arrays)
    monkeypatch.setattr(call, "_places", {})

    def there(*arrays: Any, default: Any = first, ordinal: int | None = 0) -> bool:
        monkeypatch.setattr(call, "gpu", lambda: ordinal)
        monkeypatch.setattr(jax, "local_devices", lambda: [default])
        named = {str(i): array for i, array in enumerate(arrays)}
        operation: Any = None
        results = call.run_eagerly(operation, named, (), ())
        assert results in (None, arrays)
        return results is not None

    for _ in range(2):  # found, and known
        assert there(first) and there(first, first) and there(second, default=second, ordinal=1)
        assert not there(first, second) and not there(second) and not there(first, pinned)
        assert not there(cpu, default=cpu) and not there(first, np.ones(3))
    monkeypatch.setattr(call, "_places", {})
    assert not there(first, ordinal=None) and not there(first, ordinal=1)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert not there(first)


def test_errors_that_cannot_be_shown_do_not_end_the_process() -> None:
    """A text with surrogates, as of an undecodable path, and an error without a text."""

    class NoTextError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error, text in ((ValueError("a \udc80 b"), "a ? b"), (NoTextError(), "NoTextError")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        name = f"cumla_test_{type(error).__name__}"
        handler.register(name, "cpu", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
            jax.block_until_ready(
                jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), np.float32))(spec="")
            )


@every_append
def test_what_writes_in_place_returns_it_outside_of_jit_too(operation: Operation) -> None:
    function, arrays = of_jax(operation)
    assert_same(operation, function(**arrays), eager(operation))


@every_plan
def test_a_plan_serves_the_layers_of_a_step(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    step, arrays = layers_of(planned, 2)
    expected = eager(operation)
    for result in step(arrays):
        assert_same(operation, result, expected)


def layers_of(planned: Planned, count: int) -> tuple[Callable[..., list[Any]], Arguments]:
    """So many layers by one schedule, compiled, with work of XLA's between; and the arrays."""
    arrays, options = divided(OPERATIONS[planned.operation].make())
    kind = getattr(cumla.jax, planned.kind.__name__)

    @jax.jit
    def step(arrays: Arguments) -> list[Any]:
        plan = planned_with(kind, planned, arrays | options)
        results = []
        for _ in range(count):
            result, plan = plan.run(**planned.inputs(arrays | options))
            results.append(jax.tree.map(lambda a: a + 0, result))
        return results

    return step, arrays


def planned_with(kind: Any, planned: Planned, arguments: Arguments) -> Any:
    made_of = {name: arguments[name] for name in planned.made_of}
    return kind.from_arrays(**made_of).update(**planned.lengths(arguments))


def test_a_plan_is_a_value() -> None:
    """It goes through jit and scan, and one that was run is still what it was."""
    arrays, _ = divided(DECODE.make())
    q, kv_cache, table = (arrays[name] for name in ("q", "kv_cache", "block_table"))
    plan = cumla.jax.MLADecodePlan(2, 2, 16)
    assert plan.key == cumla.jax.MLADecodePlan.from_arrays(q, kv_cache).key
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    assert plan.key == cumla.jax.MLADecodePlan.from_arrays(shape, kv_cache).key
    with pytest.raises(ValueError, match=r"plan: never updated; call plan = plan\.update\(kv_lens"):
        plan.run(q, kv_cache, block_table=table)
    ready = jax.jit(lambda plan, lens: plan.update(lens))(plan, arrays["kv_lens"])

    @jax.jit
    def layers(plan: Any, queries: Any) -> Any:
        def layer(plan: Any, q: Any) -> tuple[Any, Any]:
            state, plan = plan.run(q, kv_cache, block_table=table)
            return plan, state.out

        return jax.lax.scan(layer, plan, queries)[1]

    outs = layers(ready, jnp.stack([q, q * 2]))
    for out, one in zip(outs, (q, q * 2), strict=True):
        expected, _ = cumla.mla_decode(one, *[arrays[n] for n in list(arrays)[1:]])
        np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    again, _ = ready.run(q, kv_cache, block_table=table)
    np.testing.assert_array_equal(np.asarray(again.out), np.asarray(outs[0]))


@every_plan
def test_a_plan_is_an_argument_and_a_result(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    arrays, options = divided(operation.make())
    kind = getattr(cumla.jax, planned.kind.__name__)
    plan = kind.from_arrays(**{name: (arrays | options)[name] for name in planned.made_of})
    lengths, inputs = planned.lengths(arrays | options), planned.inputs(arrays | options)
    plan = jax.jit(lambda plan: plan.update(**lengths))(plan)
    for _ in range(2):
        result, plan = jax.jit(lambda plan: plan.run(**inputs))(plan)
        assert_same(operation, result, eager(operation))


def test_names_of_cumla_are_not_looked_for_here() -> None:
    with pytest.raises(AttributeError, match=r"not have it; jax\.jit traces cumla\.mla_decode as"):
        cumla.jax.mla_decode  # noqa: B018
    with pytest.raises(AttributeError, match=r"^nothing: cumla\.jax does not have it$"):
        cumla.jax.nothing  # noqa: B018


@pytest.mark.parametrize("option", ["workspace", "device", "stream"])
def test_a_plan_refuses_what_is_xlas_to_decide(option: str) -> None:
    with refused(TypeError, f"{option}: needs None"):
        cumla.jax.MLADecodePlan(2, 2, 16, **{option: 0})


def test_a_plan_refuses_another_shape_and_outputs() -> None:
    arrays, _ = divided(DECODE.make())
    lengths = arrays.pop("kv_lens")
    plan = cumla.jax.MLADecodePlan(2, 2, 16).update(lengths)
    with refused(ValueError, "plan: made for batch 2, got batch 1; make a plan for this shape"):
        jax.jit(plan.run)(
            **arrays | {"q": arrays["q"][:1], "block_table": arrays["block_table"][:1]}
        )
    with refused(TypeError, "out: JAX arrays are immutable"):
        plan.run(**arrays, out=arrays["q"])


def decoding(steps: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Append and decode, step by step."""
    arrays, _ = divided(DECODE.make())
    q, kv_cache, table = (arrays[name] for name in ("q", "kv_cache", "block_table"))
    rows = as_jax(numbers(steps, 2, 576))

    def loop(kv_cache: Any, lengths: Any, rows: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            kv_cache, lengths = carry
            kv_cache = cumla.jax.append_mla_cache(
                rows,
                kv_cache,
                batch_indices=jnp.arange(2),
                positions=lengths,
                block_table=table,
            )
            return (kv_cache, lengths + 1), cumla.mla_decode(q, kv_cache, table, lengths + 1).out

        return jax.lax.scan(step, (kv_cache, lengths), rows)

    return loop, (kv_cache, as_jax(int32(3, 40)), rows)


def test_scan_writes_to_a_donated_cache_in_place() -> None:
    loop, (kv_cache, lengths, rows) = decoding(3)
    tables = DECODE.make()["block_table"]
    expected = np.asarray(kv_cache).copy()
    outs = []
    for i in range(3):
        at = {"batch_indices": np.arange(2), "positions": np.asarray(lengths) + i}
        cumla.append_mla_cache(np.asarray(rows[i]), expected, **at, block_table=tables)
        lens = np.asarray(lengths) + i + 1
        outs.append(cumla.mla_decode(DECODE.make()["q"], expected, tables, lens).out)
    mine = jnp.array(kv_cache, copy=True)
    place = mine.unsafe_buffer_pointer()
    (written, _), got = jax.jit(loop, donate_argnums=0)(mine, lengths, rows)
    assert written.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(np.asarray(written), expected)
    np.testing.assert_array_equal(np.asarray(got), outs)
    with refused(ValueError, "kv_cache: needs an array with memory, got one deleted or donated"):
        cumla.mla_decode(DECODE.make()["q"], mine, tables, lens)
    with refused(ValueError, "kv_cache: needs an array with memory, got one deleted or donated"):
        cumla.jax.append_mla_cache(rows[0], mine, jnp.arange(2))
    (kept, _), _ = jax.jit(loop)(kv_cache, lengths, rows)  # not donated: copied first
    np.testing.assert_array_equal(np.asarray(kept), expected)
    assert np.asarray(kv_cache).tobytes() == DECODE.make()["kv_cache"].tobytes()


def test_an_array_that_is_read_and_written() -> None:
    """XLA puts a copy where one is needed."""
    arrays, options = divided(OPERATIONS["append_indexer_cache"].make())
    append = functools.partial(cumla.jax.append_indexer_cache, **options)
    cache = arrays.pop("kv_cache")

    @functools.partial(jax.jit, donate_argnums=0)
    def both(cache: Any) -> Any:
        return append(kv_cache=cache, **arrays), jax.tree.map(lambda a: a + 0, cache)

    before = jax.tree.map(np.asarray, cache)
    new, old = both(jax.tree.map(lambda a: jnp.array(a, copy=True), cache))
    for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
    assert_same(OPERATIONS["append_indexer_cache"], new, eager(OPERATIONS["append_indexer_cache"]))


def test_some_arrays_are_traced_and_others_are_not() -> None:
    """Also where the first is none: constants of NumPy and of JAX."""
    arguments = DECODE.make()
    given = arguments | {"q": as_jax(arguments["q"])}
    for name, array in arrays_of(arguments):
        traced = jax.jit(lambda x, name=name: cumla.mla_decode(**with_array(given, name, x)))
        assert_same(DECODE, traced(as_jax(array)), eager(DECODE))


@every_operation
def test_wide_numbers_of_numpy(operation: Operation) -> None:
    """Beside traced arrays: refused where an eager call refuses them, otherwise as they are."""
    function, arrays = of_jax(operation)
    for i, (name, array) in enumerate(arrays_of(operation.make())):
        others = [n for n in arrays if n != name.partition("[")[0]]
        own = "int64" if array.dtype.kind in "iu" else "float64"
        for dtype in dict.fromkeys((own, ("int64", "uint64", "float64")[i % 3])) if others else ():
            wide = array.astype(dtype)
            given = with_array(arrays, name, wide)
            jitted = jax.jit(lambda one, given=given, n=others[0]: function(**given | {n: one}))
            try:
                operation.function(**with_array(operation.make(), name, wide))
            except TypeError as error:
                with refused(TypeError, str(error)):
                    jitted(given[others[0]])
            else:
                assert dtype == "int64"
                assert_same(operation, jitted(given[others[0]]), eager(operation))


@pytest.mark.parametrize("slot", [2**32 + 3, 2**31, -(2**32) + 3, -1])
def test_wide_slots_of_numpy_stay_outside(slot: int) -> None:
    cache, rows, slots = jnp.zeros((8, 16, 2, 64)), jnp.ones((1, 2, 64)), np.array([slot])
    append = jax.jit(lambda cache: cumla.jax.append_kv_cache(rows, rows, cache, cache, slots))
    assert not any(np.asarray(written).any() for written in append(cache))


def test_partial_results_in_one_array() -> None:
    operation = OPERATIONS["merge_attention_states"]
    arrays, options = divided(operation.make())
    stacked = {name: jnp.stack(parts) for name, parts in arrays.items()}
    merge = functools.partial(cumla.merge_attention_states, **options)
    assert_same(operation, jax.jit(merge)(**stacked), eager(operation))


def test_factors_are_arrays_that_may_change() -> None:
    operation = OPERATIONS["quantize_fp8"]
    x = jnp.asarray(operation.make()["x"])
    arrays, _ = divided(DECODE.make())
    arrays["kv_cache"] = arrays["kv_cache"].astype(jnp.float8_e4m3fn)

    @jax.jit
    def decode(factor: Any) -> Any:
        return cumla.mla_decode(**arrays, kv_scale=factor)

    for factor in (0.5, 2.0):
        expected = cumla.mla_decode(**arrays, kv_scale=factor)
        got = decode(jnp.float32(factor))
        assert_same(DECODE, got, [np.asarray(leaf) for leaf in expected])
        allowed = functools.partial(cumla.mla_decode, **arrays, fp8_products=True)
        for function in (allowed, jax.jit(allowed)):
            got = function(kv_scale=jnp.float32(factor))
            assert_same(DECODE, got, [np.asarray(leaf) for leaf in expected])
        in_e4m3 = arrays | {"q": arrays["q"].astype(jnp.float8_e4m3fn)}
        queries = functools.partial(cumla.mla_decode, **in_e4m3)
        got = jax.jit(queries)(q_scale=jnp.float32(factor))
        assert got.out.dtype == jnp.bfloat16
        assert_same(DECODE, got, [np.asarray(leaf) for leaf in queries(q_scale=factor)])
    values, scale = jax.jit(cumla.quantize_fp8)(x)
    assert values.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float32


def test_vmap_calls_once_for_each() -> None:
    function, arrays = of_jax(DECODE)
    lengths = jnp.stack([arrays.pop("kv_lens"), jnp.array([1, 9], jnp.int32)])
    mapped = jax.vmap(lambda lens: function(**arrays, kv_lens=lens).out)
    outs = {"eager": mapped(lengths), "jit": jax.jit(mapped)(lengths)}
    for got in outs.values():
        for out, lens in zip(got, lengths, strict=True):
            expected = function(**arrays, kv_lens=lens).out
            np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))


@pytest.mark.parametrize("operation", some(IN_PLACE.values(), 3))
def test_vmap_of_what_writes_in_place(operation: Operation) -> None:
    """Each member has a cache of its own."""
    check_two_members(operation)


def check_two_members(operation: Operation) -> None:
    """Compare two calls under vmap with eager ones."""
    function, arrays = of_jax(operation)
    twice = jax.tree.map(lambda a: as_jax(np.stack([a, a])), arrays)
    mapped = jax.device_get(jax.jit(jax.vmap(lambda arrays: function(**arrays)))(twice))
    for i in range(2):
        assert_same(operation, jax.tree.map(lambda a, i=i: a[i], mapped), eager(operation))


OF_NUMBERS = [o for o in OPERATIONS.values() if o.function is not cumla.find_prefix_groups]


@pytest.mark.parametrize("operation", some(OF_NUMBERS, 4))
def test_there_is_no_gradient(operation: Operation) -> None:
    function, arrays = of_jax(operation)
    name, array = next((n, a) for n, a in arrays_of(arrays) if a.dtype in (jnp.bfloat16, "f4"))

    def loss(x: Any) -> Any:
        leaves = jax.tree.leaves(function(**with_array(arrays, name, x)))
        return sum(leaf.astype(jnp.float32).sum() for leaf in leaves)

    with refused(TypeError, "cumla has no gradients"):
        jax.jit(jax.grad(loss))(array)
    found = jax.jit(jax.grad(lambda x: loss(jax.lax.stop_gradient(x))))(array)
    assert not np.asarray(found).any()


def test_there_is_no_gradient_outside_of_jit() -> None:
    arrays = of_jax(DECODE)[1]
    with refused(TypeError, "cumla has no gradients"):
        jax.grad(lambda q: cumla.mla_decode(**arrays | {"q": q}).lse.sum())(arrays["q"])


def test_shapes_without_arrays() -> None:
    function, arrays = of_jax(DECODE)
    out, lse = jax.eval_shape(function, **arrays)
    assert (out.shape, out.dtype, lse.shape) == ((2, 2, 16, 512), jnp.bfloat16, (2, 2, 16))


@pytest.mark.parametrize("of", [Step(), Step(q_len=2), Step(q_len=2, v4=True, window=11)], ids=str)
@pytest.mark.parametrize("each", [False, True])
def test_a_step_of_sparse_attention(of: Step, each: bool) -> None:
    """A plan gives inside jax.jit, and after it, what that of cumla gives outside."""
    given, lens = of.arguments(), int32(60, 3, 0)
    lens = of.visible(lens) if each else lens
    recent = {"extra_topk_lens": int32(11, 0, 4)} if of.v4 else {}
    plan = cumla.DSAPlan.from_arrays(
        **{name: given[name] for name in MADE_OF}, topk=of.topk, kv_lens=lens, **window_of(given)
    )
    plan.update(lens, **recent)
    positions = np.array(plan.select(**{name: given[name] for name in SELECTED_FROM}))
    expected = plan.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
    with pytest.raises(TypeError, match=r"^kv_lens: needs .* got a JAX tracer .* use cumla\.jax"):
        jax.jit(plan.update)(lens)

    @jax.jit
    def step(given: Arguments, lens: Any, recent: Arguments) -> Any:
        plan = cumla.jax.DSAPlan.from_arrays(
            **{name: given[name] for name in MADE_OF},
            topk=of.topk,
            kv_lens=lens,
            **window_of(given),
        )
        with refused(ValueError, "plan: needs an ... call plan = plan.update(kv_lens) before"):
            plan.select(**{name: given[name] for name in SELECTED_FROM})
        updated = plan.update(lens, **recent)
        with refused(ValueError, "indices: needs ... call indices, plan = plan.select("):
            updated.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
        found, plan = updated.select(**{name: given[name] for name in SELECTED_FROM})
        assert updated.indices is None
        for _ in range(2):  # the second layer shares the selection
            state, plan = plan.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
        return found, state, plan

    found, state, after = step(given, lens, recent)
    again, _ = after.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
    np.testing.assert_array_equal(np.asarray(found), positions)
    np.testing.assert_array_equal(np.asarray(after.indices), positions)
    for got in (state, again):
        assert_same_values(got, expected)


def step_of(of: Step, kind: Any, given: Arguments, lens: Any) -> Any:
    """Selection and attention of a layer by a plan of cumla, or one of cumla.jax."""
    made_of = {name: given[name] for name in MADE_OF}
    plan = kind.from_arrays(**made_of, topk=of.topk, **window_of(given))
    plan.prepare()
    plan = plan.update(lens) or plan
    found = plan.select(**{name: given[name] for name in SELECTED_FROM})
    if kind is cumla.DSAPlan:
        return found, *plan.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
    indices, plan = found
    state, _ = plan.run(**{name: given[name] for name in ATTENDED}, **window_of(given))
    return indices, *state


def assert_same_values(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize("option", ["workspace", "device", "stream"])
def test_a_plan_of_sparse_attention_refuses_what_is_xlas_to_decide(option: str) -> None:
    with refused(TypeError, f"{option}: needs None"):
        cumla.jax.DSAPlan(2, 1, 16, 32, index_heads=8, max_pages=4, **{option: 0})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": jnp.zeros((2, 2, 16, 500), jnp.bfloat16)},
            ValueError,
            "q: needs a last axis of 57",
        ),
        ({"q": jnp.zeros((2, 2, 16, 576))}, TypeError, "q: needs bfloat16 or float16, got float32"),
        ({"kv_lens": jnp.zeros(2)}, TypeError, "kv_lens: needs int32, got float32; convert"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, ValueError, "kv_lens: needs shape (batch,) with"),
        ({"block_table": [1, 2]}, TypeError, "block_table: needs an array of JAX or NumPy beside"),
        (
            {"softmax_scale": jnp.ones(())},
            TypeError,
            "softmax_scale: needs a Python or NumPy num ... in static_argnames",
        ),
        (
            {"fp8_products": True},
            ValueError,
            "fp8_products: needs a kv_cache of float8_e4m3fn, or ... got bfloat16; leave it out",
        ),
        ({"stream": 0}, TypeError, "stream: needs None inside a transformation of JAX, where XLA"),
        ({"out": jnp.zeros(3)}, TypeError, "out: JAX arrays are immutable ... call without out="),
        ({"q": jax.random.key(0)}, TypeError, "q: needs an array of numbers, got JAX's key<"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors_come_while_tracing(change: Arguments, error: type[Exception], message: str) -> None:
    arrays, _ = divided(DECODE.make())
    arguments = arrays | change
    traced = {name: a for name, a in arguments.items() if isinstance(a, jax.Array)}
    rest = {name: a for name, a in arguments.items() if name not in traced}
    with refused(error, message):
        jax.eval_shape(functools.partial(cumla.mla_decode, **rest), **traced)


def test_errors_are_shown_alone() -> None:
    """Without that of the look at a tracer's memory, which came first."""
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(cumla.mla_decode, **of_jax(DECODE)[1] | {"kv_lens": jnp.zeros(2)})
    assert caught.value.__context__ is None


def test_tensors_of_another_framework() -> None:
    torch = pytest.importorskip("torch")
    arrays, _ = divided(DECODE.make())
    lengths = torch.from_numpy(np.array(arrays.pop("kv_lens")))
    for given, got in ((lengths, "torch"), ([1, 2], "builtins.list; make one with jax")):
        message = f"kv_lens: needs an array of JAX or NumPy beside traced ones, got {got}"
        with refused(TypeError, message):
            jax.jit(functools.partial(cumla.mla_decode, kv_lens=given))(**arrays)


@every_append
def test_what_writes_in_place_names_the_function_that_returns(operation: Operation) -> None:
    arrays, options = divided(operation.make())
    with pytest.raises(TypeError, match=r"use cumla\.jax inside jax\.jit"):
        jax.jit(functools.partial(operation.function, **options))(**arrays)
    for name in ("q_out", "q_pe_out"):
        if name.removesuffix("_out") in operation.in_place:
            with refused(TypeError, f"{name}: JAX arrays are immutable"):
                function_of(operation)(**arrays, **options, **{name: arrays[operation.in_place[0]]})


@every_plan
def test_plans_of_cumla_name_those_of_cumla_jax(planned: Planned) -> None:
    arrays, options = divided(OPERATIONS[planned.operation].make())
    with pytest.raises(TypeError, match=r"use cumla\.jax inside jax\.jit, where plans"):
        jax.eval_shape(lambda arrays: planned.make(arrays | options) and None, arrays)


def test_sizes_that_are_not_known() -> None:
    export = pytest.importorskip("jax.export")
    (batch,) = export.symbolic_shape("b")
    arrays, _ = divided(DECODE.make())
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    with refused(TypeError, "kv_lens: needs sizes that are known while tracing, got (b,)"):
        jax.eval_shape(cumla.mla_decode, **arrays | {"kv_lens": lengths})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda n: cumla.jax.MLADecodePlan(n, 2, 16),
            "batch: needs an int, got ... bind it before jax.jit",
        ),
        (
            lambda n: cumla.jax.MLADecodePlan(2, 2, 16, batch_invariant=True, max_kv_len=n),
            "max_kv_len: needs an int, got ",
        ),
    ],
)
def test_sizes_that_are_traced(make: Callable[[Any], Any], message: str) -> None:
    """The lengths may be; a number that sizes memory may not."""
    with refused(TypeError, message):
        jax.eval_shape(lambda n: make(n) and None, jnp.int32(2))


def test_the_check_mode_looks_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    function, arrays = of_jax(DECODE)
    arrays["block_table"] = arrays["block_table"] + 1000
    with pytest.raises(Exception, match=r"ValueError: block_table\[0, 0\]: needs a page number"):
        jax.block_until_ready(jax.jit(function)(**arrays))


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"], ["cpu", "cuda"]], ids="-".join)
def test_programs_for_platforms_that_are_not_here(platforms: list[str]) -> None:
    """One call, whose cache is that of the arguments."""
    export = pytest.importorskip("jax.export")
    function, arrays = of_jax(OPERATIONS["append_kv_cache"])
    exported = export.export(
        jax.jit(function),
        platforms=platforms,
        disabled_checks=[export.DisabledSafetyCheck.custom_call("cumla")],
    )(**arrays)
    program = exported.mlir_module()
    assert program.count("custom_call @cumla(") == 1
    assert program.count("output_operand_alias<") == 2


def test_a_program_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    text, *_ = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])[0]
    assert spec.read(text).text().encode() == text
    with pytest.raises(cumla.CumlaError, match="traced with cumla 9"):
        spec.read(text.replace(cumla.__version__.encode(), b"9"))
    with pytest.raises(cumla.CumlaError, match="os:getcwd, which is no record of cumla's"):
        spec._rebuilt({"os:getcwd": []})


def test_an_old_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_operation, "_module", import_module)
    monkeypatch.delattr(jax, "ffi")
    monkeypatch.setitem(sys.modules, "jax.ffi", None)
    monkeypatch.delattr(cumla, "jax")
    for name in [name for name in sys.modules if name.startswith("cumla.jax")]:
        monkeypatch.delitem(sys.modules, name)
    message = r"^jax: cumla\.jax needs JAX 0\.5 or later, with jax\.ffi \("
    with pytest.raises(cumla.MissingDependencyError, match=message):
        jax.jit(cumla.quantize_fp8)(jnp.ones((2, 16)))


IN_ANOTHER_PROCESS = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import cumla
from tests.bindings.test_jax import DECODE, OPERATIONS, assert_same, decoding, eager, of_jax
function, arrays = of_jax(DECODE)
both = Mesh(np.array(jax.devices()), ("x",))
sharded, replicated = (jax.device_put(arrays["q"], NamedSharding(both, P(*x))) for x in ("x", ""))
for several in (sharded, replicated):
    try:
        function(**arrays | {"q": several})
    except ValueError as error:
        print("error", error)
given = {name: a[:1] for name, a in DECODE.make().items() if name in ("block_table", "kv_lens")}
shard = sharded.addressable_shards[0].data
print("shard", function(**arrays | given | {"q": shard}).out.shape)

_, second = jax.devices()
there = jax.device_put(arrays, second)
result = jax.jit(function)(**there)
assert result.out.devices() == {second}
for one in (result, function(**there), jax.jit(function)(**arrays | {"q": sharded})):
    assert_same(DECODE, one, eager(DECODE))
print("same")

if len(sys.argv) > 1:
    from jax import export
    program = export.deserialize(open(sys.argv[1], "rb").read())
    assert_same(DECODE, program.call(**arrays), eager(DECODE))
    print("exported")

last = jax.devices()[1]
results = []
for operation in OPERATIONS.values():
    if not operation.in_place:
        function, arrays = of_jax(operation)
        results.append(function(**jax.device_put(arrays, last)))
from tests.calls import PLANS
for planned in PLANS.values():
    operation = OPERATIONS[planned.operation]
    given = operation.make() | jax.device_put(of_jax(operation)[1], last)
    results.append(planned.ready(given).run(**planned.inputs(given)))
assert all(leaf.devices() == {last} for leaf in jax.tree.leaves(results))
assert jax.numpy.asarray(np.ones(1)).devices() == {jax.devices()[0]}
print(f"home of {len(results)}")

if not hasattr(jax, "shard_map"):
    raise SystemExit

from tests.bindings.on_devices import SHARES, divided_call, mesh, one_by_one
for shares in SHARES.values():
    each, arrays = divided_call(shares, 2)
    assert_same(OPERATIONS[shares.operation], each(arrays), one_by_one(shares, 2))
loop, given = decoding(2)
stacked = tuple(np.stack([a, a]) for a in given)

def local(*given):
    return jax.tree.map(lambda a: a[None], loop(*[a[0] for a in given]))

loops = jax.shard_map(local, mesh=mesh(2), in_specs=(P("x"),) * 3, out_specs=P("x"))
alone = jax.jit(loop)(*given)
for many, one in zip(*map(jax.tree.leaves, (jax.jit(loops)(*stacked), alone)), strict=True):
    assert all(part.tobytes() == np.asarray(one).tobytes() for part in np.asarray(many))
print("shares")
"""


@pytest.fixture(scope="module")
def another_process(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what the program above printed, with two devices."""
    paths = []
    with contextlib.suppress(ImportError):
        import flatbuffers  # noqa: F401
        from jax import export

        function, arrays = of_jax(DECODE)
        checks = [export.DisabledSafetyCheck.custom_call("cumla")]
        make = export.export(jax.jit(function), platforms=["cpu"], disabled_checks=checks)
        paths.append(tmp_path_factory.mktemp("exported") / "program")
        paths[0].write_bytes(make(**arrays).serialize())
    devices = "--xla_force_host_platform_device_count=2"
    return python(IN_ANOTHER_PROCESS, *map(str, paths), XLA_FLAGS=devices).splitlines()


def test_arrays_on_another_device_and_on_several(another_process: list[str]) -> None:
    """Under jit the results are where the arrays are, and what is sharded is gathered."""
    assert "same" in another_process


def test_results_of_eager_calls_are_where_the_arrays_are(another_process: list[str]) -> None:
    count = len(OPERATIONS) - len(IN_PLACE) + len(PLANS)
    assert f"home of {count}" in another_process


def test_eager_calls_of_arrays_on_several_devices(another_process: list[str]) -> None:
    sharded, replicated, shard = another_process[:3]
    begin = "error q: needs an array on one device, got one that is"
    assert sharded.startswith(f"{begin} sharded over 2; ")
    assert "q.addressable_shards[i].data" in sharded
    assert replicated.startswith(begin)
    assert replicated.endswith(
        "got one that is replicated over 2; pass one copy (q.addressable_shards[0].data)"
    )
    assert shard == "shard (1, 2, 16, 512)"


def test_an_exported_program_runs_in_another_process(another_process: list[str]) -> None:
    pytest.importorskip("flatbuffers")
    pytest.importorskip("jax.export")
    assert "exported" in another_process


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs JAX 0.6 or later")
def test_each_device_computes_its_share(another_process: list[str]) -> None:
    assert "shares" in another_process


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Compute in Python all the time, beside what runs inside ``with``."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_thread_that_computes_all_the_time() -> None:
    """It has the GIL whenever XLA calls back; every call is answered."""
    operations = [DECODE, OPERATIONS["append_indexer_cache"]]
    compiled = [(one, jax.jit(of_jax(one)[0]), of_jax(one)[1], eager(one)) for one in operations]
    with busy_thread():
        for _ in range(10):
            for operation, function, arrays, expected in compiled:
                assert_same(operation, function(**arrays), expected)


def test_every_function_and_plan_has_its_form() -> None:
    """Those that write in place, and those that hold a schedule."""
    forms = {one.function.__name__ for one in IN_PLACE.values()}
    forms |= {planned.kind.__name__ for planned in PLANS.values()} | {"DSAPlan"}
    assert {*cumla.jax.__all__} == forms
    assert all(getattr(cumla.jax, name).__doc__ for name in forms)


EMPTY = [
    pytest.param(one, names, id=f"{name}-{'-'.join(names)}")
    for name, one in OPERATIONS.items()
    for names in one.empty
]


@pytest.mark.parametrize(("operation", "names"), EMPTY)
def test_nothing_to_do(
    operation: Operation, names: tuple[str, ...], cupy: FakeCuPy, gpu: Any
) -> None:
    """Empty batches have empty results, and launch nothing."""
    arguments = operation.make()
    for text in names:
        name, _, left = text.partition("+")
        arguments[name] = jax.tree.map(lambda a, left=left: a[: int(left or 0)], arguments[name])
    arrays, options = divided(arguments)
    function = functools.partial(function_of(operation), **options)
    got = jax.jit(function)(**arrays)
    expected = operation.function(**arguments) if not operation.in_place else got
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (got, expected)]
    assert shapes[0] == shapes[1]
    xla = Xla(execute.on_gpu)
    for text, inputs, results in custom_calls(function, **arrays):
        aliases = dict(execute._program(text, 0).aliases)
        at = [(1 + i) << 32 for i in range(len(inputs) + len(results))]
        for one, other in aliases.items():
            at[other] = at[one]
        buffers = [*zip(at, [*inputs, *results], strict=True)]
        assert xla.call(xla.frame(text, buffers[: len(inputs)], buffers[len(inputs) :])) == ""
    assert gpu() == []


# --- on a GPU that is not there -------------------------------------------------------------------


def placed(xla: Xla, traced: tuple[bytes, Any, Any], addresses: dict[str, int]) -> Any:
    """A frame whose buffers lie where their names say."""
    text, inputs, results = traced
    program = execute._program(text, 0)
    names = [buffer.name for buffer in program.buffers]
    at = [(addresses[n], s) for n, s in zip(names, [*inputs, *results], strict=True)]
    return xla.frame(text, at[: len(inputs)], at[len(inputs) :])


@pytest.mark.parametrize(
    "operation",
    [*OPERATIONS.values(), *TWO_CACHES.values()],
    ids=[*OPERATIONS, *(f"{name} of two caches" for name in TWO_CACHES)],
)
def test_launches_are_those_of_the_eager_call(
    operation: Operation, cupy: FakeCuPy, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry points and all parameters, for the same addresses; nothing runs while tracing."""
    cupy.stream = 7
    new: list[int] = []
    empty = cupy.empty

    def noted(shape: tuple[int, ...], dtype: Any) -> Any:
        array = empty(shape, dtype)
        new.append(array.data.ptr)
        return array

    monkeypatch.setattr(cupy, "empty", noted)
    arguments = operation.make()
    there = {name: cupy.like(_as_in_jax(value)) for name, value in arguments.items()}
    outputs = {name: cupy.like(value) for name, value in operation.outputs().items()}
    operation.function(**there, **outputs)
    expected = gpu()
    assert expected
    function, arrays = of_jax(operation)
    (traced,) = custom_calls(function, **arrays)
    assert gpu() == []
    addresses = {name: array.data.ptr for name, array in arrays_of(there | outputs)}
    addresses["workspace"] = new[-1] if new else 0
    xla = Xla(execute.on_gpu)
    assert xla.call(placed(xla, traced, addresses)) == ""
    assert gpu() == expected


def _as_in_jax(value: Any) -> Any:
    """Contiguous, and integers of 32 bits."""
    if not is_array(value):
        return value
    return jax.tree.map(lambda a: np.ascontiguousarray(as_jax(a)), value)


def decode_addresses(first: int) -> dict[str, int]:
    names = ("q", "kv_cache", "block_table", "kv_lens", "out", "lse", "workspace")
    return {name: first + (i << 20) for i, name in enumerate(names)}


def test_addresses_seen_before_and_new_ones(cupy: FakeCuPy, gpu: Any) -> None:
    (traced,) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    xla = Xla(execute.on_gpu)
    frames = [placed(xla, traced, decode_addresses(first << 40)) for first in (1, 2)]
    seen = []
    for frame in (*frames, *frames):
        assert xla.call(frame) == ""
        seen.append(gpu())
    assert [entry for entry, _ in seen[0]] == list(DECODE.kernels)
    assert seen[:2] == seen[2:] and seen[0] != seen[1]
    assert len(execute._ready) == 2
    xla.stream = 8  # another stream has launches of its own
    assert xla.call(frames[0]) == ""
    assert gpu() == seen[0] and len(execute._ready) == 3


def test_a_capture_needs_kernels_that_are_loaded(
    cupy: FakeCuPy, driver: FakeDriver, bindings: FakeBindings, gpu: Any
) -> None:
    (traced,) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    xla = Xla(execute.on_gpu, stream=7)
    driver.capturing = {7}
    assert "NotPreparedError: kernel mla_schedule" in xla.call(
        placed(xla, traced, decode_addresses(1 << 40))
    )
    driver.capturing = set()
    assert xla.call(placed(xla, traced, decode_addresses(1 << 40))) == ""
    driver.capturing = {7}
    gpu()
    for first in (1, 3):  # seen before, and new
        assert xla.call(placed(xla, traced, decode_addresses(first << 40))) == ""
    assert len(gpu()) == 4


@every_plan
def test_a_plan_on_the_gpu(planned: Planned, cupy: FakeCuPy, gpu: Any) -> None:
    """One schedule, then attention for each layer, in one workspace."""
    operation, kind = OPERATIONS[planned.operation], getattr(cumla.jax, planned.kind.__name__)
    step, arrays = layers_of(planned, 2)
    calls = custom_calls(step, arrays)
    xla, places = Xla(execute.on_gpu), {}
    for name, _ in [*arrays_of(arrays), *arrays_of(operation.outputs()), ("workspace", None)]:
        places[name] = (len(places) + 1) << 32
    for traced in calls:
        assert xla.call(placed(xla, traced, places)) == ""
    attend = operation.kernels[planned.updates :]
    assert [entry for entry, _ in gpu()] == [*operation.kernels, *attend]
    sizes = {execute._program(text, 0).spec.workspace for text, *_ in calls}
    assert sizes == {kind.workspace_bytes(**planned.sizes(), sm_count=132)} or "page" in str(sizes)


@pytest.mark.parametrize("of", [Step(), Step(q_len=2, v4=True, window=11)], ids=str)
def test_a_step_of_sparse_attention_on_the_gpu(of: Step, cupy: FakeCuPy, gpu: Any) -> None:
    """It launches what a plan of cumla does, from the same kernels that `prepare` loads."""
    given, lens = of.arguments(), int32(60, 3, 0)

    there = {name: cupy.like(array) for name, array in given.items()}
    step_of(of, cumla.DSAPlan, there, cupy.like(lens))
    expected, loaded = [entry for entry, _ in gpu()], list(cupy.compiled)
    xla, places = Xla(execute.on_gpu), defaultdict(lambda: (len(places) + 1) << 32)
    jax_arrays = {name: as_jax(array) for name, array in given.items()}
    for traced in custom_calls(functools.partial(step_of, of, cumla.jax.DSAPlan), jax_arrays, lens):
        assert xla.call(placed(xla, traced, places)) == ""
    assert [entry for entry, _ in gpu()] == expected
    assert cupy.compiled == loaded


def test_the_check_mode_looks_at_values_on_the_gpu(
    cupy: FakeCuPy, driver: FakeDriver, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of executions, and not of captures, whose replays nobody sees."""
    given = DECODE.make()
    given["block_table"] = given["block_table"] + 1000
    there = {name: cupy.like(array).data.ptr for name, array in arrays_of(given)}
    plan = functools.partial(planned_with, cumla.jax.MLADecodePlan, PLANS["MLADecodePlan"])

    def layer(arrays: Arguments) -> Any:
        return plan(arrays).run(**{n: arrays[n] for n in ("q", "kv_cache", "block_table")})[0]

    arrays = of_jax(DECODE)[1]
    whole = custom_calls(cumla.mla_decode, **arrays)
    for traced in (*whole, custom_calls(layer, arrays)[1]):
        xla = Xla(execute.on_gpu)
        frame = placed(xla, traced, decode_addresses(1 << 50) | there)
        assert xla.call(frame) == "" and gpu()
        with monkeypatch.context() as checked:
            checked.setenv("CUMLA_CHECK", "1")
            assert xla.call(frame).startswith("ValueError: block_table[0, 0]: needs a page number")
            assert gpu() == []
            driver.capturing = {xla.stream}
            assert xla.call(frame) == "" and gpu()
            driver.capturing = set()


def test_a_plan_loads_its_kernels(cupy: FakeCuPy, gpu: Any) -> None:
    cumla.jax.MLADecodePlan(2, 2, 16).prepare()
    assert set(DECODE.kernels) <= {*cupy.compiled}
    assert gpu() == []


def test_requests_that_are_cut_at_fixed_positions(cupy: FakeCuPy, gpu: Any) -> None:
    """Two launches make their schedule, in the call and in the plan."""
    operation = OPERATIONS["attention"]
    arrays, options = divided(operation.make())
    options["batch_invariant"] = True
    planned = PLANS["AttentionPlan"]

    def step(arrays: Arguments) -> Any:
        given = arrays | options
        made_of = {name: given[name] for name in planned.made_of}
        fixed = {"batch_invariant": True, "max_kv_len": 4096}
        plan = cumla.jax.AttentionPlan.from_arrays(**made_of, **fixed)
        inputs = {n: v for n, v in planned.inputs(given).items() if n not in fixed}
        run = {n: v for n, v in inputs.items() if n not in ("causal", "window")}
        return plan.update(**planned.lengths(given)).run(**run)[0]

    whole = functools.partial(cumla.attention, **options)
    for function, given in ((whole, arrays), (step, {"arrays": arrays})):
        xla, launched = Xla(execute.on_gpu), []
        for traced in custom_calls(function, **given):
            program = execute._program(traced[0], 0)
            places = {name: (1 + i) << 32 for i, name in enumerate(sorted(set(program.names)))}
            assert xla.call(placed(xla, traced, places)) == ""
            launched += [entry for entry, _ in gpu()]
        assert launched == [operation.kernels[0], "invariant_parts", "attention_bfloat16_64_64"]
    assert_same(operation, jax.jit(whole)(**arrays), eager(operation))


def test_a_gpu_that_runs_no_kernel(cupy: FakeCuPy, gpu: Any) -> None:
    (traced,) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    cupy.capability = (8, 0)
    launch_device.properties.cache_clear()
    xla = Xla(execute.on_gpu)
    message = xla.call(placed(xla, traced, decode_addresses(1 << 40)))
    assert message.startswith("UnsupportedDeviceError: device 0 is NVIDIA Imaginary of compute cap")


def test_a_program_that_was_traced_without_a_gpu(
    cupy: FakeCuPy, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (call, plans):
        monkeypatch.setattr(module, "gpu", lambda: None)
    arrays = of_jax(DECODE)[1]
    xla = Xla(execute.on_gpu)
    plan = cumla.jax.MLADecodePlan(2, 2, 16)
    for function, given in (
        (cumla.mla_decode, arrays),
        (plan.update, {"kv_lens": arrays["kv_lens"]}),
    ):
        (traced,) = custom_calls(function, **given)
        message = xla.call(placed(xla, traced, decode_addresses(1 << 40)))
        assert "workspace: needs" in message and "where JAX sees such a GPU" in message
    assert gpu() == []


@every_append
def test_buffers_that_xla_did_not_share(
    operation: Operation, cupy: FakeCuPy, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under vmap on a GPU: the results begin with what the arguments hold, which stay."""
    runtime, copies = cupy.cuda.runtime, []
    monkeypatch.setattr(runtime, "memcpyDeviceToDevice", 3, raising=False)
    monkeypatch.setattr(runtime, "memcpyAsync", lambda *what: copies.append(what))
    function, arrays = of_jax(operation)
    (traced,) = custom_calls(function, **arrays)
    text, inputs, results = traced
    program = execute._program(text, 0)
    at = [(1 + i) << 32 for i in range(len(program.buffers))]
    xla = Xla(execute.on_gpu)
    buffers = [*zip(at, [*inputs, *results], strict=True)]
    frame = xla.frame(text, buffers[: len(inputs)], buffers[len(inputs) :])
    for _ in range(2):
        assert xla.call(frame) == ""
        launched = gpu()
        expected = []
        for old, new in program.aliases:
            shape, dtype = program.buffers[new].shape, program.buffers[new].dtype
            nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
            expected.append((at[new], at[old], nbytes, 3, xla.stream))
        assert expected and copies == expected
        copies.clear()
    shared = dict(zip(program.names, at, strict=True))
    assert xla.call(placed(xla, traced, shared)) == ""
    assert copies == [] and gpu() == launched


def test_buffers_that_xla_did_not_share_on_the_cpu() -> None:
    operation = OPERATIONS["append_indexer_cache"]
    function, arrays = of_jax(operation)
    ((text, inputs, _),) = custom_calls(function, **arrays)
    program = execute._program(text, None)
    given = {name: np.array(as_jax(a)) for name, a in arrays_of(arrays)}
    before = {name: a.copy() for name, a in given.items()}
    memory = [given[name] for name in program.names[: len(inputs)]]
    memory += [np.full(b.shape, 7, b.dtype) for b in program.buffers[len(inputs) :]]
    frame = SimpleNamespace(check=lambda shapes: None)
    execute.on_cpu(text, tuple([a.ctypes.data for a in memory]), frame)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])
    ((_, new),) = program.aliases
    np.testing.assert_array_equal(memory[new], np.asarray(jax.jit(function)(**arrays)))


def test_launches_without_a_handler(
    cupy: FakeCuPy, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stream and the device that JAX tells, the same for the same addresses."""
    ((text, inputs, results),) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    places = decode_addresses(1 << 40)
    assert (
        Xla(execute.on_gpu).call(placed(Xla(execute.on_gpu), (text, inputs, results), places)) == ""
    )
    expected = gpu()
    assert expected

    def forget() -> None:
        for name in ("_ready", "_templates"):
            monkeypatch.setattr(execute, name, Ready())

    buffer_callback = pytest.importorskip("jax.experimental.buffer_callback")
    monkeypatch.setattr(buffer_callback, "buffer_callback", lambda function, shapes: function)
    monkeypatch.setattr(fallback, "_address", lambda buffer: buffer.address)
    run = fallback.callback(text.decode(), (), {}, "another layout")
    names = [buffer.name for buffer in execute._program(text, 0).buffers]
    buffers = [
        SimpleNamespace(address=places[name], shape=shape, __dlpack_device__=lambda: (2, 0))
        for name, shape in zip(names, [*inputs, *results], strict=True)
    ]
    arguments, outputs = buffers[: len(inputs)], tuple(buffers[len(inputs) :])
    forget()
    run(SimpleNamespace(stream=7), outputs, *arguments)
    assert gpu() == expected and len(execute._ready) == 1
    forget()
    with refused(cumla.CumlaError, "CumlaError: JAX passes buffers of shapes"):
        run(SimpleNamespace(stream=7), outputs, *arguments[:-1], arguments[0])
    assert gpu() == []


@pytest.mark.parametrize("where", ["on_cpu", "on_gpu"])
def test_a_layout_that_is_not_known(where: str, cupy: FakeCuPy, gpu: Any) -> None:
    """Sizes of structs and shapes of buffers are compared before anything is read or launched."""
    (traced,) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    xla = Xla(getattr(execute, where))
    frame = placed(xla, traced, decode_addresses(1 << 40))
    frame[5] = 32
    assert "in a way that cumla.jax does not know (structs of [168, 32," in xla.call(frame)
    text, (first, *rest), results = traced
    frame = placed(xla, (text, [first[:-1], *rest], results), decode_addresses(1 << 40))
    assert "a buffer of rank 3, not 4" in xla.call(frame)
    frame = placed(xla, (text, [(*first[:-1], 9), *rest], results), decode_addresses(1 << 40))
    assert "a buffer of shape (2, 2, 16, 9)" in xla.call(frame)
    assert gpu() == []


def test_xla_is_told_that_launches_may_be_replayed() -> None:
    assert Xla(execute.on_gpu).ask() == (0, 1, 1)


def test_tracers_do_not_stay_in_the_table_of_frameworks() -> None:
    function, arrays = of_jax(DECODE)
    jax.jit(function)(**arrays)
    assert not any("Tracer" in kind.__name__ for kind in frameworks.framework_of_type)


def test_what_a_callback_takes(cupy: FakeCuPy, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses seen before take less than new ones; times are printed, not judged."""
    (traced,) = custom_calls(cumla.mla_decode, **of_jax(DECODE)[1])
    monkeypatch.setattr(kernel.PreparedLaunch, "__call__", lambda self: None)
    xla = Xla(execute.on_gpu)
    frames = [placed(xla, traced, decode_addresses(i << 40)) for i in range(1, 401)]
    assert xla.call(frames[0]) == ""

    def median(frames: list[Any]) -> float:
        times = []
        for frame in frames:
            begin = time.perf_counter()
            xla.call(frame)
            times.append(time.perf_counter() - begin)
        return float(np.median(times))

    new, seen = median(frames), median(frames)
    print(f"a callback: {seen * 1e6:.1f} us for addresses seen before, {new * 1e6:.1f} us for new")
    assert seen < new
