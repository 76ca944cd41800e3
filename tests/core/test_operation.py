# SPDX-License-Identifier: Apache-2.0
"""What holds for every public operation: frameworks, places, streams, captures, empty batches,
overlap, and recipes that can be moved to other addresses. Nothing is launched on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core import _lifetime as lifetime
from cumla.core import arrays, frameworks
from cumla.core import operation as core
from cumla.core._driver import Driver
from cumla.core.arrays import open_call
from cumla.core.operation import WORKSPACE, Address, Ready, unplaced
from cumla.errors import NotPreparedError
from cumla.launch import all_specs, kernel
from cumla.launch import module as launch_module
from cumla.launch.module import load
from tests import fake_cuda
from tests.calls import (
    BF16,
    E4M3,
    OPERATIONS,
    Arguments,
    Operation,
    Planned,
    aligned,
    arrays_of,
    broadcast,
    every_operation,
    every_plan,
    frozen,
    int32,
    refused,
    with_array,
)
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver, FakeLibrary
from tests.mla.fp8_arrays import FORMS

INSTALL_LINES = ('pip install "cumla[cu12]"', 'pip install "cumla[cu13]"')
DECODE = OPERATIONS["mla_decode"]
RAGGED = (cumla.mla_attention, cumla.attention)


def on_gpu(cupy: FakeCuPy, operation: Operation, *, outputs: bool = True) -> Arguments:
    """Put all that a call can be given on the GPU."""
    arguments = operation.make() | (operation.outputs() if outputs else {})
    return {name: cupy.like(value) for name, value in arguments.items()}


def load_all(entries: tuple[str, ...], but: str = "") -> None:
    for spec in all_specs():
        if spec.entry in entries and spec.entry != but:
            load(spec, 0, capturing=lambda: False)


def values_of(arguments: Arguments) -> list[bytes]:
    return [array.tobytes() for _, array in arrays_of(arguments)]


# --- on the CPU -----------------------------------------------------------------------------------


def as_torch(value: Any) -> Any:
    torch = pytest.importorskip("torch")
    if isinstance(value, (tuple, list)):
        return type(value)([as_torch(part) for part in value])
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == E4M3:
        return torch.from_numpy(value.view(np.uint8)).view(torch.float8_e4m3fn)
    if value.dtype == BF16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def as_jax(value: Any) -> Any:
    jax = pytest.importorskip("jax")
    if isinstance(value, (tuple, list)):
        return type(value)([as_jax(part) for part in value])
    return jax.device_put(value) if isinstance(value, np.ndarray) else value


@every_operation
def test_torch_tensors(operation: Operation) -> None:
    """They are written to, and their own kind comes back."""
    torch = pytest.importorskip("torch")
    expected = operation.make() | operation.outputs()
    operation.function(**expected)
    there = operation.make() | operation.outputs()  # tensors share this memory
    result = operation.function(**{name: as_torch(value) for name, value in there.items()})
    assert values_of(there) == values_of(expected)
    assert all(there[name].astype(float).any() for name in operation.outputs())
    new = operation.function(**{n: as_torch(v) for n, v in operation.make().items()})
    for one, other in zip(flat(new), flat(result), strict=True):
        assert isinstance(one, torch.Tensor)
        if operation.function not in RAGGED:  # rows of no request may hold anything
            same = other if one.dtype == other.dtype else other.to(one.dtype)
            assert torch.equal(one.view(torch.uint8), same.view(torch.uint8))


@every_operation
def test_jax_arrays(operation: Operation) -> None:
    """They are read, and come back; what is written in place is somebody else's."""
    jax = pytest.importorskip("jax")
    expected = operation.make()
    results = flat(operation.function(**expected))
    given = operation.make()
    read = {n: v if n in operation.in_place else as_jax(v) for n, v in given.items()}
    for one, other in zip(flat(operation.function(**read)), results, strict=True):
        assert isinstance(one, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if operation.function not in RAGGED:
            assert np.asarray(one).tobytes() == other.tobytes()
    assert values_of(given) == values_of(expected)
    for name, array in arrays_of(operation.outputs()):
        with refused(TypeError, f"{name}: JAX arrays are immutable ... without {name}="):
            operation(**{name: as_jax(array)})
    for name in operation.in_place:
        with refused(TypeError, f"{name}: JAX arrays are immutable ... ; pass an array of CuPy"):
            operation(**{name: as_jax(given[name])})
    if operation.in_place:
        with refused(TypeError, f"{name}: ... JAX tracer ... use cumla.jax"):
            jax.jit(lambda x: operation.function(**with_array(read, name, x)))(as_jax(given[name]))


def flat(result: Any) -> tuple[Any, ...]:
    if result is None:
        return ()
    results = result if isinstance(result, tuple) else (result,)
    return tuple(one for one in results if one is not None)  # what was not asked for


@every_operation
def test_outputs(operation: Operation) -> None:
    """The arrays that are given come back, and hold what new ones do."""
    arguments, outputs = operation.make(), operation.outputs()
    new = flat(operation.function(**arguments))
    results = flat(operation.function(**arguments, **outputs))
    assert all(one is other for one, other in zip(results, outputs.values(), strict=True))
    for one, (name, array) in zip(new, outputs.items(), strict=True):
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
        for wrong, error, message in (
            (array.astype(np.int16), TypeError, f"{name}: needs ... got int16; allocate it so"),
            (array[:-1], ValueError, f"{name}: needs shape {array.shape}, got ... ; allocate it"),
            (broadcast(array), ValueError, f"{name}: needs memory of its own for each ... ; copy"),
            (frozen(array), ValueError, f"{name}: needs an array that can be written to"),
            ("text", TypeError, f"{name}: needs an array of CuPy"),
        ):
            with refused(error, message):
                operation(**outputs | {name: wrong})
        torch = pytest.importorskip("torch")
        with refused(TypeError, f"{name}: needs an array of the framework of ... got torch.Tensor"):
            operation(**{name: torch.zeros(array.shape)})


@pytest.mark.parametrize("name", [n for n, o in OPERATIONS.items() if "lse" in o.outputs()])
def test_an_lse_has_the_shape_of_out_without_its_columns(
    name: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """In a new one of a batch, on a GPU, the tokens of a head are together, but with blocks."""
    given = on_gpu(cupy, OPERATIONS[name], outputs=False)
    out, lse = OPERATIONS[name].function(**given)
    assert lse.shape == out.shape[:-1]
    *_, of_token, of_head = lse.strides
    assert (of_token, of_head)[len(lse.shape) == 2 or "block_indices" in given] == 4


@every_operation
def test_nothing_is_written_by_a_call_that_fails(operation: Operation) -> None:
    arguments = operation.make() | operation.outputs()
    before = values_of(arguments)
    name = [n for n, v in arguments.items() if isinstance(v, np.ndarray)][-1]
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        operation.function(**arguments | {name: arguments[name].astype(np.complex64)})
    assert values_of(arguments) == before


@every_operation
@pytest.mark.parametrize("value", [None, [[1, 2]], "text"], ids=str)
def test_things_that_are_no_arrays(operation: Operation, value: Any) -> None:
    """Where one is needed; a list is refused as a pair, or by what is in it."""
    arguments = operation.make()
    first = next(iter(arguments))
    names = [name for name in (first, "slot_mapping", "kv_lens", "ks") if name in arguments]
    for name in names:
        if value is None and name == "slot_mapping" and "positions" in arguments:
            continue  # there is another way to tell
        with pytest.raises((TypeError, ValueError), match=rf"^{name}(\[0\])?: need(s|ed) "):
            operation(**{name: value})


def test_fake_and_meta_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    known = frameworks.framework_of_type
    monkeypatch.delitem(known, fake_tensor.FakeTensor, raising=False)  # of cumla.torch
    with fake_tensor.FakeTensorMode():
        q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16)
    with refused(TypeError, "q: ... FakeTensor ... ; import cumla.torch ... or call cumla outside"):
        DECODE(q=q)
    q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16, device="meta")
    with refused(ValueError, "q: ... CUDA device or on the CPU ... meta"):
        DECODE(q=q)


# --- nothing to do --------------------------------------------------------------------------------


def emptied(operation: Operation, names: tuple[str, ...]) -> Arguments:
    """Cut arguments to nothing on their first axes; "+1" leaves one element."""
    arguments = operation.make() | operation.outputs()
    for text in names:
        name, _, left = text.partition("+")
        left = int(left or 0)
        value = arguments[name]
        parts = isinstance(value, (tuple, list))
        arguments[name] = type(value)([a[:left] for a in value]) if parts else value[:left]
    if operation.function is cumla.mqa_logits and names == ("kv",):
        arguments["out"] = arguments["out"][:, :0]
        return arguments
    tokens = {len(a) for n, a in arrays_of(arguments) if n in ("q", "x", "scores", "outs[0]")}
    if tokens == {0} or operation.function is cumla.find_prefix_groups:
        for name in operation.outputs():
            arguments[name] = arguments[name][:0]
    return arguments


EMPTY = [
    pytest.param(operation, names, id=f"{name}-{'-'.join(names)}")
    for name, operation in OPERATIONS.items()
    for names in operation.empty
]


@pytest.mark.parametrize(("operation", "names"), EMPTY)
def test_empty_batches(
    operation: Operation, names: tuple[str, ...], cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Empty outputs, nothing written in place, and nothing launched."""
    given = emptied(operation, names)
    before = values_of(given)
    for outputs in ({}, {name: given[name] for name in operation.outputs()}):
        inputs = {n: v for n, v in given.items() if n not in operation.outputs()}
        results = flat(operation.function(**inputs, **outputs))
        assert [r.shape for r in results] == [given[n].shape for n in operation.outputs()]
        assert values_of(given) == before
        there = {n: cupy.like(v) for n, v in inputs.items()}
        results = flat(operation.function(**there, **{n: cupy.like(v) for n, v in outputs.items()}))
        assert [r.shape for r in results] == [given[n].shape for n in operation.outputs()]
    assert bindings.entries == []


# --- on a GPU that is not there -------------------------------------------------------------------


@every_operation
def test_what_is_launched(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """The same launch for the same arrays, on the stream that is asked for."""
    given = on_gpu(cupy, operation)
    results = flat(operation.function(**given))
    assert all(given[n] is r for n, r in zip(operation.outputs(), results, strict=True))
    assert tuple(bindings.entries) == operation.kernels
    assert set(cupy.compiled) == set(operation.kernels)
    operation.function(**given)
    first = list(bindings.launched)
    bindings.launched.clear()
    operation.function(**given)
    assert bindings.launched == first or len(first) > 1  # a workspace of each call's own
    bindings.launched.clear()
    cupy.stream = 7
    operation.function(**given)
    operation.function(**given, stream=1)  # another name of 0
    assert [launch.stream for launch in bindings.launched] == ([7] * len(first) + [0] * len(first))
    assert set(cupy.compiled) == set(operation.kernels)
    assert driver.recorded == []


@every_operation
def test_a_call_sees_other_arrays(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Another address under the same object, and again the first; addresses and strides that do
    not fit any more."""
    given = on_gpu(cupy, operation)

    def launched() -> list[Any]:
        bindings.launched.clear()
        operation.function(**given)
        assert tuple(launch.entry for launch in bindings.launched) == operation.kernels
        return [launch.parameters for launch in bindings.launched]

    has_workspace = len(operation.kernels) > 1
    launched()
    for name, array in arrays_of(given):
        here = launched()
        array.data.ptr += 1 << 20
        there = launched()
        assert here[-1] != there[-1]
        array.data.ptr -= 1 << 20
        assert has_workspace or launched() == here
        array.data.ptr += 1
        if array.dtype.itemsize > 1:
            with refused(ValueError, f"{name}: needs an address"):
                operation.function(**given)
        array.data.ptr -= 1
        array.data.device_id = 1
        with pytest.raises(ValueError, match="CUDA device 1"):
            operation.function(**given)
        array.data.device_id = 0


@every_operation
def test_places_that_differ(operation: Operation, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    host = operation.make()
    given = {name: cupy.like(value) for name, value in host.items()}
    first = next(iter(open_names(operation, host)))
    for name, array in arrays_of(host):
        if name == first or name in operation.in_place:
            continue
        where = f"{name}: needs to be where {first} is, on CUDA device 0, got an array on "
        with refused(ValueError, f"{where}the CPU; copy"):
            operation.function(**with_array(given, name, array))
        with refused(ValueError, f"{where}CUDA device 1; copy"):
            operation.function(**with_array(given, name, cupy.like(array, device=1)))
    for name, array in arrays_of(operation.outputs()):
        with refused(ValueError, f"{name}: ... CUDA device 0 ... CUDA device 1"):
            operation.function(**given, **{name: cupy.like(array, device=1)})
    assert bindings.entries == []


def open_names(operation: Operation, arguments: Arguments) -> list[str]:
    """Names in the order in which a call looks at them: the cache first that is written to."""
    names = [name for name, _ in arrays_of(arguments)]
    return [*operation.in_place[:1], *names]


@every_operation
def test_unsupported_gpus(operation: Operation, cupy: FakeCuPy) -> None:
    cupy.capability = (10, 0)
    message = "device 0 is NVIDIA Imaginary of compute capability 10.0: ... 9.0 ... CPU memory"
    with refused(cumla.UnsupportedDeviceError, message):
        operation.function(**on_gpu(cupy, operation))


@every_operation
def test_streams_of_another_kind(operation: Operation, cupy: FakeCuPy) -> None:
    for arguments in (on_gpu(cupy, operation), operation.make()):
        for stream in ("0", 1.5, True):
            kind = type(stream).__name__
            with refused(TypeError, f"stream: needs an integer handle ... got builtins.{kind}"):
                operation.function(**arguments, stream=stream)
        with refused(ValueError, "stream: needs a stream handle, which is 0 or more, got -1"):
            operation.function(**arguments, stream=-1)


@every_operation
def test_cold_kernels_under_capture(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """Named before any other is launched and before anything is allocated."""
    cold = operation.kernels[-1]
    load_all(operation.kernels, but=cold)
    given = on_gpu(cupy, operation, outputs=False)
    driver.capturing.add(0)
    message = f"kernel {cold} is not loaded on device 0 ... captured ... call cumla.prepare("
    with refused(cumla.NotPreparedError, message):
        operation.function(**given)
    assert (bindings.entries, cupy.allocated) == ([], [])


@every_operation
@pytest.mark.parametrize("current", [None, 1])
def test_a_cold_call_from_a_thread_of_another_context(
    operation: Operation, current: int | None, cupy: FakeCuPy, bindings: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether the default stream is being captured is asked in the context of the arrays' GPU."""
    library = FakeLibrary(current)
    with monkeypatch.context() as loaders:
        for loader in ("PyDLL", "CDLL"):
            loaders.setattr(ctypes, loader, lambda name: library)
        cuda = Driver()
    for module in (arrays, lifetime, launch_module):
        monkeypatch.setattr(module, "driver", lambda: cuda)
    operation.function(**on_gpu(cupy, operation, outputs=False))
    assert tuple(bindings.entries) == operation.kernels
    assert set(library.asked) == {100}  # the primary context of GPU 0
    assert library.context == current


def test_the_same_memory_in_another_framework(
    cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allocated depends on the framework, which views do not tell."""
    operation = OPERATIONS["quantize_fp8"]
    given = on_gpu(cupy, operation, outputs=False)
    wanted: list[str] = []

    def opened(*arguments: Any, **options: Any) -> Any:
        call = open_call(*arguments, **options)
        call.framework = framework
        return call

    def allocate(self: Any, missing: Any) -> Any:
        wanted.append(missing[0][2])
        return [object() for _ in missing], [1 << 20 for _ in missing]

    monkeypatch.setattr(frameworks.cupy_framework(), "glance", lambda arrays: None)
    monkeypatch.setattr(core, "open_call", opened)
    monkeypatch.setattr(arrays.Call, "allocate", allocate)
    for framework in ("cupy", "torch", "cupy"):  # noqa: B007, of opened
        operation.function(**given)
    assert wanted == ["uint8", "float8_e4m3fn", "uint8"]


@every_operation
def test_what_is_allocated_lives_until_the_last_launch(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """An allocator without a pool unmaps what is let go: a launch after that writes to nothing."""
    given = on_gpu(cupy, operation, outputs=False)
    for _ in ("checked", "found in order"):
        before = len(cupy.freed)
        operation.function(**given)
        assert {launch.freed for launch in bindings.launched} == {before}
        bindings.launched.clear()


@every_operation
def test_allocations_under_capture(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """CuPy's allocator serves none: outputs must be given, and a plan where there is one."""
    load_all(operation.kernels)
    given = on_gpu(cupy, operation)
    absent = {n: v for n, v in given.items() if n not in operation.outputs()}
    driver.capturing.add(0)
    message = "the stream is being captured, and CuPy's allocator does not serve captures:"
    if operation.outputs():
        listed = " ... ".join(f"{name}=" for name in operation.outputs())
        with refused(cumla.NotPreparedError, f"{message} pass {listed} ... before the capture"):
            operation.function(**absent)
    if len(operation.kernels) > 1:
        with refused(cumla.NotPreparedError, f"{message} use a plan, made before the capture"):
            operation.function(**given)
        assert bindings.entries == []
    else:
        operation.function(**given)
        assert tuple(bindings.entries) == operation.kernels
    assert cupy.allocated == []


@every_operation
def test_check_mode_looks_at_the_device(
    operation: Operation,
    cupy: FakeCuPy,
    bindings: FakeBindings,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At indices and factors; values out of range are found before a launch."""
    host = operation.make()
    given = {name: cupy.like(value) for name, value in host.items()}
    outputs = {name: cupy.like(value) for name, value in operation.outputs().items()}
    operation.function(**given, **outputs)
    assert cupy.copied == []
    monkeypatch.setenv("CUMLA_CHECK", "1")
    operation.function(**given, **outputs)
    integers = {name: host[name] for name in operation.integers}
    looked = [f"{array.dtype} {array.shape}" for _, array in arrays_of(integers)]
    assert Counter(cupy.copied) == Counter(looked)
    monkeypatch.setattr(frameworks._CuPy, "note_written", pytest.fail)  # of a refused call
    bindings.launched.clear()
    for name in set(operation.integers) - set(operation.any_values):
        (*_, place) = map(tuple, np.argwhere(host[name] > 0))
        kept = host[name][place]
        host[name][place] = value = 10**6 if host[name].dtype.kind == "i" else np.inf
        with pytest.raises(ValueError, match=rf"^\w+(\[.*\])?: needs .* {value}"):
            operation.function(**given, **outputs)
        host[name][place] = kept
    assert bindings.entries == []
    monkeypatch.setattr(frameworks._CuPy, "note_written", None)
    if operation.integers and len(operation.kernels) == 1:
        driver.capturing.add(0)
        with caplog.at_level(logging.WARNING, "cumla"):
            operation.function(**given, **outputs)
        assert "CUMLA_CHECK: nothing can be checked" in caplog.text


# --- outputs that overlap -------------------------------------------------------------------------


@every_operation
@pytest.mark.parametrize("known", [False, True])
def test_outputs_that_overlap(
    operation: Operation,
    known: bool,
    cupy: FakeCuPy,
    bindings: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An input, or each other: every pair is found; of what is in a cache only the caller knows."""
    given = on_gpu(cupy, operation)
    if known:  # arrays of this form
        operation.function(**given)
        bindings.launched.clear()
    written = [*operation.outputs(), *(set(operation.in_place) - {"kv_cache"})]
    pairs = [
        (name, other)
        for name in written
        for other, _ in arrays_of(given)
        if other != name
        and not other.startswith(f"{name}s[")  # which it may be
        and (name, other) not in operation.shares
    ]
    assert pairs or not written
    monkeypatch.setattr(frameworks._CuPy, "note_written", pytest.fail)  # of a refused call
    for name, other in pairs:
        array = dict(arrays_of(given))[other]
        kept = array.data.ptr
        array.data.ptr = given[name].data.ptr
        with pytest.raises(
            ValueError, match=rf"^({name}|{other.split('[')[0]}.*): needs memory of"
        ):
            operation.function(**given)
        array.data.ptr = kept
    assert bindings.entries == []
    monkeypatch.setattr(frameworks._CuPy, "note_written", None)
    operation.function(**given)


def test_parts_of_a_cache_do_not_overlap(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Rows may lie in the cache, in slots that are not written to."""
    for name, parts in (
        ("append_mla_cache", (aligned((6, 16, 512)), aligned((6, 16, 64)))),
        ("append_indexer_cache", (aligned((6, 16, 64), E4M3), aligned((6, 16), np.float32))),
    ):
        given = on_gpu(cupy, OPERATIONS[name])
        rows = given.get("rows", given.get("k"))
        rows.data.ptr = given["kv_cache"].data.ptr
        OPERATIONS[name].function(**given)
        given["kv_cache"] = cupy.like(parts)
        OPERATIONS[name].function(**given)
        given["kv_cache"][1].data.ptr = given["kv_cache"][0].data.ptr
        with refused(
            ValueError, "kv_cache[1]: needs memory of its own, got memory that kv_cache[0]"
        ):
            OPERATIONS[name].function(**given)
    assert len(bindings.entries) == 4


def test_outputs_in_place(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """q_pe_out may be q_pe, and merged states may go where one of them is; nothing else."""
    append = on_gpu(cupy, OPERATIONS["append_mla_cache"])
    cumla.append_mla_cache(**append, q_pe_out=append["q_pe"])
    merge = on_gpu(cupy, OPERATIONS["merge_attention_states"], outputs=False)
    cumla.merge_attention_states(**merge, out=merge["outs"][1], lse=merge["lses"][2])
    assert bindings.entries == ["append_cache_bfloat16", "merge_states_bfloat16"]
    other, out = cupy.like(aligned((5, 3, 64))), cupy.like(aligned((2, 5, 3, 16)))
    other.data.ptr = append["q_pe"].data.ptr + 128
    with refused(ValueError, "q_pe_out: needs memory of its own, got memory that q_pe uses too"):
        cumla.append_mla_cache(**append, q_pe_out=other)
    out.data.ptr = merge["outs"][1].data.ptr + 96
    with refused(ValueError, "out: needs memory of its own, got memory that outs[1] uses too"):
        cumla.merge_attention_states(**merge, out=out)
    stack = {
        "outs": cupy.like(aligned((3, 2, 5, 3, 16))),
        "lses": cupy.like(np.zeros((3, 2, 5, 3), np.float32)),
    }
    out.data.ptr = stack["outs"].data.ptr + 2 * 5 * 3 * 16 * 2
    out.data.ptr += 96
    with refused(ValueError, "out: needs memory of its own, got memory that outs[1] uses too"):
        cumla.merge_attention_states(**stack, out=out)


@every_operation
def test_outputs_that_overlap_on_the_cpu(operation: Operation) -> None:
    outputs = operation.outputs()
    if len(outputs) == 2:
        (first, one), (second, other) = outputs.items()
        memory = aligned((one.nbytes,), np.uint8)
        outputs[first] = memory.view(one.dtype).reshape(one.shape)
        outputs[second] = memory[: other.nbytes].view(other.dtype).reshape(other.shape)
        with refused(ValueError, f"{second}: needs memory of its own, got memory that {first} "):
            operation(**outputs)


# --- recipes --------------------------------------------------------------------------------------


def decoding(q_len: int = 1, page_size: int = 64, **changes: Any) -> Arguments:
    arguments: Arguments = {
        "q": aligned((2, q_len, 16, 576)),
        "kv_cache": aligned((6, page_size, 1, 576)),
        "block_table": int32([0, 1, 2], [3, 4, 5]),
        "kv_lens": int32(5, 13),
    }
    return arguments | changes


def attending(**changes: Any) -> Arguments:
    return OPERATIONS["mla_attention"].make() | changes


def fp8_cache(form: str, page_size: int = 64) -> Any:
    parts = tuple(aligned((6, page_size, 1, n), dtype) for n, dtype in FORMS[form])
    return parts if len(parts) > 1 else parts[0]


def halves(array: Any) -> Any:
    return aligned((*array.shape[:-1], 512)), aligned((*array.shape[:-1], 64))


def many_partials(count: int) -> Arguments:
    return {"outs": [aligned((3, 2, 16))] * count, "lses": [np.zeros((3, 2), "f4")] * count}


def append_to(cache: Any, **changes: Any) -> Arguments:
    return {
        "rows": aligned((5, 576)),
        "kv_cache": cache,
        "slot_mapping": np.zeros(5, int),
    } | changes


ONE = np.ones(1, np.float32)
CALLS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    **{name: (op.function, op.make()) for name, op in OPERATIONS.items()},
    **{f"with outputs: {n}": (o.function, o.make() | o.outputs()) for n, o in OPERATIONS.items()},
    **{f"pages of {n}": (cumla.mla_decode, decoding(page_size=n)) for n in (1, 16, 48, 128)},
    **{f"{n} positions": (cumla.mla_decode, decoding(n)) for n in (4, 9)},
    "batch-invariant": (cumla.mla_decode, decoding(batch_invariant=True)),
    "pairs": (
        cumla.mla_decode,
        decoding(q=halves(aligned((2, 4, 16, 576))), kv_cache=halves(aligned((6, 64, 1, 576)))),
    ),
    "ragged pairs": (
        cumla.mla_attention,
        attending(q=halves(aligned((8, 16, 576))), kv_cache=halves(aligned((6, 64, 1, 576)))),
    ),
    **{
        f"{size} tokens a page, {form}": (
            cumla.mla_decode,
            decoding(kv_cache=fp8_cache(form, size)),
        )
        for form in FORMS
        for size in (64, 16)
    },
    **{
        f"ragged, {form}": (cumla.mla_attention, attending(kv_cache=fp8_cache(form)))
        for form in FORMS
    },
    "a factor": (cumla.mla_decode, decoding(kv_cache=fp8_cache("pair"), kv_scale=ONE)),
    "a ragged factor": (cumla.mla_attention, attending(kv_cache=fp8_cache("one"), kv_scale=ONE)),
    "lengths of rows": (
        cumla.paged_mqa_logits,
        OPERATIONS["paged_mqa_logits"].make() | {"kv_lens": np.ones((2, 3), np.int32)},
    ),
    "two arrays of pages": (
        cumla.paged_mqa_logits,
        OPERATIONS["paged_mqa_logits"].make()
        | {"kv_cache": (aligned((6, 16, 32), E4M3), aligned((6, 16), np.float32))},
    ),
    "compressed": (cumla.mqa_logits, OPERATIONS["mqa_logits"].make() | {"max_kv_len": 4}),
    "appended pairs": (
        cumla.append_mla_cache,
        append_to(halves(aligned((6, 16, 576))), rows=halves(aligned((5, 576)))),
    ),
    **{f"appended, {f}": (cumla.append_mla_cache, append_to(fp8_cache(f))) for f in (*FORMS,)[:6]},
    "appended, packed": (cumla.append_mla_cache, append_to(fp8_cache("packed"))),
    "appended with a factor": (cumla.append_mla_cache, append_to(fp8_cache("one"), kv_scale=ONE)),
    "appended by a list": (
        cumla.append_mla_cache,
        OPERATIONS["append_mla_cache by request"].make()
        | {"block_table": None, "kv_indices": int32(0, 1, 5, 2), "kv_indptr": int32(0, 2, 4)},
    ),
    "rotated elsewhere": (
        cumla.append_mla_cache,
        OPERATIONS["append_mla_cache"].make() | {"q_pe_out": aligned((5, 3, 64))},
    ),
    "keys apart": (
        cumla.append_indexer_cache,
        OPERATIONS["append_indexer_cache"].make()
        | {"kv_cache": (aligned((6, 16, 64), E4M3), aligned((6, 16), np.float32))},
    ),
    "merged in turns": (cumla.merge_attention_states, many_partials(130)),
    "a stack": (
        cumla.merge_attention_states,
        {"outs": aligned((3, 5, 2, 16)), "lses": np.zeros((3, 5, 2), np.float32)},
    ),
}
every_call = pytest.mark.parametrize(("function", "arguments"), CALLS.values(), ids=CALLS)


def asked(function: Callable[..., Any], arguments: Arguments) -> tuple[Any, Any, Any, Any]:
    """Operation, inputs, outputs and options with which a function asks `core.operation.run`."""
    found: list[tuple[Any, Any, Any, Any]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is core.run.__code__:
            local = frame.f_locals
            found.append((local["operation"], local["inputs"], local["outputs"], local["options"]))

    sys.setprofile(note)
    try:
        function(**arguments)
    finally:
        sys.setprofile(None)
    (one,) = found
    return one


class Recipe:
    """The launches of a call whose arrays lie at addresses of the test's choice."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self.operation, inputs, outputs, self._options = asked(function, arguments)
        call = open_call(tuple(inputs.items()), tuple(outputs.items()))
        self._views = dict(zip((*inputs, *outputs), call.views, strict=True))
        self.returned = self.operation.outputs(self._arguments(self._views))
        self.nbytes = self.operation.workspace_bytes(self._key(self._views))
        self.names = [name for name, view in self._views.items() if view is not None]
        self.names += [out.name for out in self.returned if out.name not in self.names]
        self.names += [WORKSPACE] if self.nbytes else []

    def _arguments(self, views: Any) -> Any:
        return self.operation.arguments(views, self._options)

    def _key(self, views: Any) -> Any:
        return self.operation.key(self._arguments(views), 0)

    def launches(self, place: Callable[[str], int]) -> Any:
        views = {
            name: None if view is None else view._replace(ptr=place(name))
            for name, view in self._views.items()
        }
        outs = [
            views[out.name] or unplaced(out, 0)._replace(ptr=place(out.name))
            for out in self.returned
        ]
        arguments = self._arguments(views)
        key = self.operation.key(arguments, 0)
        return self.operation.recipe(key, arguments, outs, place(WORKSPACE) if self.nbytes else 0)


@pytest.fixture
def launches(
    bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[tuple[str, Any, bytes]]]:
    """Tell what a call launches; what it allocates lies where it did in the call before."""
    seen: list[tuple[str, Any, bytes]] = []

    def note(launch: Any) -> None:
        seen.append((launch._kernel.spec.entry, launch._config, bytes(launch._owned[0])))

    def ask(function: Callable[..., Any], **arguments: Any) -> list[tuple[str, Any, bytes]]:
        seen.clear()
        monkeypatch.setattr(fake_cuda, "_addresses", itertools.count(1 << 20))
        function(**arguments)
        return [*seen]

    monkeypatch.setattr(kernel.PreparedLaunch, "__call__", note)
    return ask


@every_operation
@pytest.mark.parametrize("outputs", [False, True])
def test_a_form_is_checked_once(
    operation: Operation,
    outputs: bool,
    cupy: FakeCuPy,
    launches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays that lie elsewhere need no checks; they are launched with as if they had them."""
    first, second = (on_gpu(cupy, operation, outputs=outputs) for _ in range(2))
    load_all(operation.kernels)
    launches(operation.function, **first)
    with monkeypatch.context() as patch:
        patch.setattr(core, "pack", None)
        found = launches(operation.function, **second)
    monkeypatch.setattr(Ready, "get", lambda *_: None)
    assert found == launches(operation.function, **second)
    assert found


def test_calls_of_ever_new_shapes_are_not_all_remembered(
    cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_MOST_READY", 5)
    kept = []
    for tokens in range(1, 20):
        outs = cupy.empty((2, tokens, 3, 64), BF16)
        lses = cupy.empty((2, tokens, 3), np.dtype(np.float32))
        cumla.merge_attention_states(outs, lses)
        kept.append(len(core.forms))
    assert max(kept) == 5
    assert len(bindings.launched) == len(kept)


ROWS = {
    "in 16 bits": ((512, BF16), (64, BF16)),
    "packed": ((512, np.uint8), (64, BF16), (4, np.float32)),
}
"""Parts of a cache that may be one array, for which kernels know another way."""


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["one first", "apart first"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_form_tells_parts_of_one_array_from_arrays_apart(
    rows: str,
    order: tuple[bool, bool],
    cupy: FakeCuPy,
    launches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not how far apart these are, which differs from call to call."""
    given = on_gpu(cupy, DECODE, outputs=False) | {"q": cupy.empty((2, 1, 16, 576), BF16)}
    begins = dict(zip(ROWS, ((0, 1024), (0, 528, 512)), strict=True))[rows]
    row = 1152 if rows == "in 16 bits" else 656

    def call(together: bool) -> Arguments:
        parts = [cupy.empty((6, 64, 1, n), np.dtype(dtype)) for n, dtype in ROWS[rows]]
        for part, begin in zip(parts, begins, strict=True):
            part.strides = (64 * row, row, row, part.dtype.itemsize)
            part.data.ptr = (parts[0].data.ptr if together else part.data.ptr) + begin
        return given | {"kv_cache": tuple(parts)}

    found = []
    for together in order:
        arguments = call(together)
        found.append(launches(cumla.mla_decode, **arguments))
        with monkeypatch.context() as patch:
            patch.setattr(Ready, "get", lambda *_: None)
            assert found[-1] == launches(cumla.mla_decode, **arguments)
    (*_, one), (*_, other) = found
    assert one[0] != other[0]
    arguments = call(False)
    arguments["kv_cache"][1].data.ptr += 1 << 40
    monkeypatch.setattr(core, "pack", None)
    assert launches(cumla.mla_decode, **arguments)


@every_call
def test_recipes_can_be_moved(
    function: Callable[..., Any],
    arguments: Arguments,
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    """Addresses are put into what was packed for others: the bytes are those of packing anew, and
    nothing but what is relocated differs."""
    recipe = Recipe(function, {name: cupy.like(value) for name, value in arguments.items()})
    there = {name: (1 + i) << 40 for i, name in enumerate(recipe.names)}
    elsewhere = {name: address * 3 + 0x12300 for name, address in there.items()}
    movable = recipe.launches(lambda name: Address.of(name, there[name]))
    packed = [[launch.pack() for launch in recipe.launches(p.get)] for p in (there, elsewhere)]
    assert [launch.pack() for launch in movable] == packed[0]
    bindings.launched.clear()
    moved = [launch.template(0, lambda: False).at(elsewhere, 5) for launch in movable]
    for launch in moved:
        launch()
    read = [
        launched.read(launch.layout.size)
        for launched, launch in zip(bindings.launched, movable, strict=True)
    ]
    assert read == packed[1]
    for launch, one, other in zip(movable, *packed, strict=True):
        covered: set[int] = set()
        for offset, name, _, tensor_map in launch.relocations():
            assert name in recipe.names
            covered |= set(range(offset, offset + (128 if tensor_map else 8)))
        assert {i for i in range(len(one)) if one[i] != other[i]} <= covered
    relocated = {r.argument for launch in movable for r in launch.relocations()}
    assert relocated == set(recipe.names)


@every_call
def test_the_workspace_is_as_large_as_the_operation_says(
    function: Callable[..., Any], arguments: Arguments, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    given = {name: cupy.like(value) for name, value in arguments.items()}
    results = flat(function(**given))
    allocated = Counter(cupy.allocated)
    recipe = Recipe(function, given)
    assert [out.shape for out in recipe.returned] == [result.shape for result in results]
    sizes = [
        result.dtype.itemsize * int(np.prod(result.shape))
        for out, result in zip(recipe.returned, results, strict=True)
        if out.name not in arguments
    ]
    assert allocated == Counter([*sizes, *([recipe.nbytes] if recipe.nbytes else [])])


@every_call
def test_outputs_need_no_gpu(
    function: Callable[..., Any], arguments: Arguments, no_cupy_yet: None
) -> None:
    """They follow from the shapes, and are those that the CPU computes."""
    operation, inputs, outputs, options = asked(function, arguments)
    call = open_call(tuple(inputs.items()), tuple(outputs.items()))
    views = dict(zip((*inputs, *outputs), call.views, strict=True))
    found = operation.outputs(operation.arguments(views, options))
    results = flat(function(**arguments))
    assert [(out.shape, out.dtypes[0]) for out in found if out.name not in arguments] == [
        (result.shape, result.dtype.name)
        for out, result in zip(found, results, strict=True)
        if out.name not in arguments
    ]


# --- what is written ------------------------------------------------------------------------------


def written(operation: Operation, given: Arguments) -> list[Any]:
    """Arrays that a call writes to."""
    names = {*operation.outputs(), *operation.in_place}
    return [array for name, array in arrays_of(given) if name.split("[")[0] in names]


@every_operation
def test_frameworks_are_told_once_of_what_calls_write(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls of new arrays, of a known form and of known arrays; by none that is refused."""
    told: list[Any] = []
    monkeypatch.setattr(frameworks._CuPy, "note_written", told.append)
    for _ in range(2):
        given = on_gpu(cupy, operation)
        for _ in range(2):
            operation.function(**given)
            assert Counter(map(id, told)) == Counter(map(id, written(operation, given)))
            told.clear()
        for name, array in arrays_of(given):
            other = cupy.empty(array.shape, np.dtype(np.int8))
            with pytest.raises((TypeError, ValueError)):
                operation.function(**with_array(given, name, other))
        assert told == []


def test_frameworks_are_told_of_no_call_that_has_no_memory(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = on_gpu(cupy, DECODE)
    cumla.mla_decode(**given)
    monkeypatch.setattr(frameworks._CuPy, "note_written", pytest.fail)
    driver.capturing.add(0)
    with pytest.raises(NotPreparedError, match="use a plan"):
        cumla.mla_decode(**given)


@every_operation
def test_torch_counts_what_calls_write(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each tensor, and none of a call that is refused; on the CPU."""
    host = operation.make() | operation.outputs()
    given = {name: as_torch(value) for name, value in host.items()}
    tensors = dict(arrays_of(given))

    def versions() -> list[int]:
        return [tensor._version for tensor in tensors.values()]

    before = versions()
    ours = set(map(id, written(operation, given)))
    operation.function(**given)
    assert versions() == [
        version + (id(tensor) in ours)
        for version, tensor in zip(before, tensors.values(), strict=True)
    ]
    before = versions()
    with pytest.raises(TypeError, match=r"^stream: "):
        operation.function(**given, stream="fast")
    monkeypatch.setenv("CUMLA_CHECK", "1")
    for name in set(operation.integers) - set(operation.any_values):
        (*_, place) = map(tuple, np.argwhere(host[name] > 0))
        kept = host[name][place]
        host[name][place] = 10**6 if host[name].dtype.kind == "i" else np.inf
        with pytest.raises(ValueError, match=r"^\w+(\[.*\])?: needs .* "):
            operation.function(**given)
        host[name][place] = kept
    assert versions() == before


@every_plan
def test_torch_counts_what_runs_write(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    given = {name: as_torch(value) for name, value in operation.make().items()}
    outputs = {name: as_torch(value) for name, value in operation.outputs().items()}
    plan = planned.ready(given)
    inputs = planned.inputs(given)
    plan.run(**inputs, **outputs)
    with pytest.raises(TypeError, match=r"^stream: "):
        plan.run(**inputs, **outputs, stream="fast")
    assert {tensor._version for tensor in outputs.values()} == {1}
    assert {tensor._version for _, tensor in arrays_of(inputs)} == {0}


@every_plan
def test_frameworks_are_told_of_what_ready_runs_write(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(frameworks._CuPy, "note_written", told.append)
    operation = OPERATIONS[planned.operation]
    given = {name: cupy.like(value) for name, value in operation.make().items()}
    outputs = {name: cupy.like(value) for name, value in operation.outputs().items()}
    plan = planned.ready(given)
    for _ in range(3):
        plan.run(**planned.inputs(given), **outputs)
        assert list(map(id, told)) == list(map(id, outputs.values()))
        told.clear()
        for name, array in arrays_of(planned.inputs(given)):
            other = cupy.empty(array.shape, np.dtype(np.int8))
            with pytest.raises((TypeError, ValueError)):
                plan.run(**with_array(planned.inputs(given), name, other), **outputs)
        assert told == []


@every_operation
def test_a_call_that_failed_to_launch_can_be_made_again(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found in order is kept before memory is allocated, which may fail."""
    given = {name: cupy.like(value) for name, value in operation.make().items()}
    with monkeypatch.context() as patch:
        patch.setattr(core.Packed, "placed", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                operation.function(**given)
    assert not bindings.launched
    operation.function(**given)
    assert bindings.launched


# --- how much a call does -------------------------------------------------------------------------


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Calls of cumla's functions, and how often the next one is of another module."""
    modules: list[str] = []
    inside = str(Path(cumla.__file__).parent) + os.sep

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            modules.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(modules), sum(a != b for a, b in pairwise(modules))


def test_calls_of_a_ready_run(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, DECODE)
    lengths = given.pop("kv_lens")
    plan = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"])
    plan.update(lengths)
    plan.run(**given)
    bindings.launched.clear()
    calls, _ = count(lambda: plan.run(**given))
    assert len(bindings.launched) == 1
    assert calls <= 14


def test_calls_of_a_ready_run_of_many_heads(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, OPERATIONS["attention"])
    lengths = {name: given.pop(name) for name in ("kv_lens", "qo_indptr")}
    arrays = {name: given[name] for name in ("q", "k", "v")}
    plan = cumla.AttentionPlan.from_arrays(**arrays, qo_indptr=lengths["qo_indptr"])
    plan.update(**lengths)
    plan.run(**given)
    bindings.launched.clear()
    calls, _ = count(lambda: plan.run(**given))
    assert len(bindings.launched) == 1
    assert calls <= 14


def test_calls_of_a_warm_decode(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, DECODE, outputs=False)
    for _ in range(2):
        cumla.mla_decode(**given)
    bindings.launched.clear()
    calls, changes = count(lambda: cumla.mla_decode(**given))
    assert len(bindings.launched) == 2
    assert calls <= 70
    assert changes <= 15


# --- installation ---------------------------------------------------------------------------------


def test_cupy_missing(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("not to be asked")

    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (
        lambda: cumla.prepare(cumla.mla_decode),
        lambda: cumla.MLADecodePlan(2, 1, 16),
        lambda: DECODE(**dict.fromkeys(DECODE.make(), Foreign())),
    ):
        with pytest.raises(cumla.MissingDependencyError, match=r"^CuPy") as caught:
            call()
        assert all(line in str(caught.value) for line in INSTALL_LINES)
        assert isinstance(caught.value, ImportError)


def test_cupy_installed_twice(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    versions = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    message = "CuPy is installed 2 times (cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0) ... uninstall"
    with refused(cumla.MissingDependencyError, message):
        cumla.prepare(cumla.mla_decode)


def test_nvrtc_missing(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.nvrtc = (0, 0)
    message = "CuPy found no NVRTC (CuPy failed to load libnvrtc.so.12)"
    with refused(cumla.MissingDependencyError, message):
        DECODE.function(**on_gpu(cupy, DECODE))
    cupy.nvrtc = (12, 8)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with refused(cumla.MissingDependencyError, "cuda.bindings"):
        DECODE.function(**on_gpu(cupy, DECODE))
