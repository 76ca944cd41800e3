# SPDX-License-Identifier: Apache-2.0
"""What holds for every plan: whose stream, whose workspace, what it serves, what it remembers.
GPU arrays are a stand-in's; nothing is launched."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core import plan as core_plan
from cumla.core.frameworks import framework_of_type
from cumla.launch import all_specs, kernel
from cumla.launch.module import load
from tests import fake_cuda
from tests.calls import (
    OPERATIONS,
    PLANS,
    Arguments,
    Planned,
    arrays_of,
    every_plan,
    refused,
    with_array,
)
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

DECODE = PLANS["MLADecodePlan"]
NBYTES = 1 << 28


def on_gpu(cupy: FakeCuPy, planned: Planned) -> Arguments:
    """Put all that a call with outputs can be given on the GPU."""
    operation = OPERATIONS[planned.operation]
    arguments = operation.make() | operation.outputs()
    given = {name: cupy.like(value) for name, value in arguments.items() if value is not None}
    framework_of_type.clear()
    cumla.core.arrays.open_call((("q", given["q"]),))  # CuPy's arrays are known from now on
    return given


def entries(planned: Planned) -> tuple[list[str], list[str]]:
    """Name the kernels of an update, and those of a run."""
    kernels = list(OPERATIONS[planned.operation].kernels)
    return kernels[: planned.updates], kernels[planned.updates :]


def all_entries(planned: Planned) -> list[str]:
    schedule, attend = entries(planned)
    return schedule + attend


def lengths_in_messages(planned: Planned) -> str:
    if planned.kind in (
        cumla.AttentionPlan,
        cumla.BlockSparsePlan,
    ):  # what its plan is for, not what others are
        return {
            ("qo_indptr", "kv_indptr"): "kv_indptr=..., qo_indptr=...",
            ("kv_lens",): "kv_lens",
        }.get(planned.updated_with, "kv_lens, qo_indptr=...")
    return getattr(planned.kind, "_lengths", "kv_lens")


# --- on the CPU -----------------------------------------------------------------------------------


@every_plan
def test_a_plan_gives_what_a_call_gives(planned: Planned) -> None:
    """With the lengths of its update, whatever the arrays hold later."""
    operation = OPERATIONS[planned.operation]
    arguments, expected, outputs = operation.make(), operation.outputs(), operation.outputs()
    operation.function(**arguments, **expected)
    plan = planned.ready(arguments)
    for array in planned.lengths(arguments).values():
        array[...] = 0
    plan.run(**planned.inputs(arguments), **outputs)
    for name, array in outputs.items():
        assert array.tobytes() == expected[name].tobytes()
        assert array.any()
    assert plan.serves(7)
    plan.prepare()


@every_plan
def test_a_plan_that_was_never_updated(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    given = on_gpu(cupy, planned)
    for arguments in (OPERATIONS[planned.operation].make(), given):
        plan = planned.make(arguments)
        assert not plan.serves(0)
        lengths = lengths_in_messages(planned)
        message = f"plan: never updated; call plan.update({lengths}) before the first run"
        with refused(ValueError, message):
            plan.run(**planned.inputs(arguments))
    assert bindings.entries == []


@every_plan
def test_updates_check_the_lengths(planned: Planned) -> None:
    arguments = OPERATIONS[planned.operation].make()
    plan = planned.ready(arguments)
    lengths = planned.lengths(arguments)
    for name, array in lengths.items():
        for wrong, error, message in (
            (array.astype(np.int64), TypeError, f"{name}: needs int32, got int64; convert it"),
            (np.append(array, [0]).astype(np.int32), ValueError, f"{name}: needs shape (batch"),
            (array[None, None], ValueError, f"{name}: needs shape (batch"),
            ("text", TypeError, f"{name}: needs an array of CuPy"),
        ):
            with refused(error, message):
                plan.update(**lengths | {name: wrong})
    if "kv_lens" in lengths:
        with pytest.raises((TypeError, ValueError), match=r"^kv_lens: need.* got .*None"):
            plan.update(**lengths | {"kv_lens": None})
    plan.run(**planned.inputs(arguments))  # the update before serves on


@every_plan
def test_numbers_of_a_plan(planned: Planned) -> None:
    kind, sizes = planned.kind, planned.sizes()
    for name in planned.numbers:
        least = int(name not in ("batch", "q_len", "q_len", "total_tokens", "topk"))
        if kind is cumla.AttentionPlan and name in ("page_size", "q_len"):
            least = int(name == "q_len")
        if kind is cumla.BlockSparsePlan and name == "q_len":
            least = 1
        for value, error, need in (
            (least - 1, ValueError, f"a number from {least}, got {least - 1}; "),
            (2.0, TypeError, "an int, got float 2.0; convert it"),
            (True, TypeError, "an int, got bool True; convert it"),
            (None, TypeError, "an int, got NoneType; convert it"),
        ):
            if value is None and inspect.signature(kind).parameters[name].default is None:
                continue
            with refused(error, f"{name}: needs {need}"):
                kind(**planned.numbers | {name: value}, like=np.zeros(1))
            if name in sizes:
                with refused(error, f"{name}: needs {need}"):
                    kind.workspace_bytes(**sizes | {name: value}, sm_count=132)
    for value, error, need in (
        (0, ValueError, "a number from 1, got 0; leave it out to ask the current GPU"),
        (132.0, TypeError, "an int, got float"),
    ):
        with refused(error, f"sm_count: needs {need}"):
            kind.workspace_bytes(**sizes, sm_count=value)


@every_plan
def test_a_plan_of_another_shape(planned: Planned) -> None:
    """Each number of its shape but one that the lengths have alone."""
    plan = planned.ready(OPERATIONS[planned.operation].make())
    for name, size in planned.numbers.items():
        changes = {name: 2 * size}
        if name in planned.fixed:  # no array tells it
            continue
        if {"q_len", "total_tokens"} <= planned.numbers.keys():  # the product of two of them
            if name == "total_tokens":
                continue
            if name in ("batch", "q_len"):
                changes["total_tokens"] = 2 * planned.numbers["total_tokens"]
        elif size == 0 or (name == "batch" and (size == 1 or "total_tokens" in planned.numbers)):
            continue
        other = planned.kind(**planned.numbers | changes, like=np.zeros(1))
        assert other.key != plan.key
        lengths = planned.lengths(OPERATIONS[planned.operation].make())
        if name == "batch" or (name == "q_len" and planned.numbers["batch"] == 1):
            lengths = {n: np.tile(a, 2) for n, a in lengths.items()}
        other.update(**lengths)
        with refused(ValueError, "plan: made for ... got ... make a plan for this shape"):
            other.run(**planned.inputs(OPERATIONS[planned.operation].make()))


@every_plan
def test_empty_plans(planned: Planned, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    operation = OPERATIONS[planned.operation]
    for names in operation.empty:
        arguments = {n: v for n, v in operation.make().items() if v is not None}
        for text in names:
            name, _, left = text.partition("+")
            arguments[name] = arguments[name][: int(left or 0)]
        for given in (arguments, {n: cupy.like(v) for n, v in arguments.items()}):
            plan = planned.ready(given)
            result = plan.run(**planned.inputs(given))
            for array in result if isinstance(result, tuple) else (result,):
                assert 0 in array.shape
        assert not [entry for entry in bindings.entries if "schedule" not in entry]
        if len(names) > 1:
            assert 0 in {getattr(plan.key, name, 1) for name in ("batch", "q_len")}


# --- kernels and buffers --------------------------------------------------------------------------


@every_plan
def test_what_a_plan_launches(planned: Planned, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """All kernels are loaded by the update, or before it."""
    given = on_gpu(cupy, planned)
    schedule, attend = entries(planned)
    plan = planned.make(given)
    assert cupy.compiled == []
    plan.update(**planned.lengths(given))
    assert {*schedule, *attend} <= set(cupy.compiled)
    assert bindings.entries == schedule
    loaded = list(cupy.compiled)
    for _ in range(3):
        plan.run(**planned.inputs(given))
    assert bindings.entries == attend * 3
    plan.update(**planned.lengths(given))
    planned.make(given).prepare()
    assert bindings.entries == schedule
    assert cupy.compiled == loaded


def test_all_launches_of_an_update_and_of_a_run(
    cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be several of each, also where the arrays were found in order before."""
    for operation in (DECODE.kind._schedule, DECODE.kind._attend):
        recipe = operation.recipe
        twice = lambda *arguments, recipe=recipe: 2 * tuple(recipe(*arguments))  # noqa: E731
        monkeypatch.setattr(operation, "recipe", twice)
    given = on_gpu(cupy, DECODE)
    schedule, attend = entries(DECODE)
    plan = DECODE.make(given)
    for _ in range(2):
        plan.update(given["kv_lens"])
        assert bindings.entries == schedule * 2
    inputs = DECODE.inputs(given)
    allocating = {name: array for name, array in inputs.items() if name not in ("out", "lse")}
    for arguments in (inputs, allocating):
        for _ in range(2):
            plan.run(**arguments)
            assert bindings.entries == attend * 2


@every_plan
def test_prepare_loads_what_an_update_would(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    given = on_gpu(cupy, planned)
    plan = planned.make(given)
    plan.prepare()
    assert bindings.entries == []
    driver.capturing.add(0)
    plan.update(**planned.lengths(given))
    plan.run(**planned.inputs(given))
    assert bindings.entries == all_entries(planned)


@every_plan
@pytest.mark.parametrize("cold", [0, 1])
def test_a_cold_kernel_under_capture(
    planned: Planned, cold: int, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    given = on_gpu(cupy, planned)
    plan = planned.make(given)
    name = entries(planned)[cold][-1 if cold == 0 else planned.updates - 1]
    for spec in all_specs():
        if spec.entry in all_entries(planned) and spec.entry != name:
            load(spec, 0, capturing=lambda: False)
    driver.capturing.add(0)
    with refused(cumla.NotPreparedError, f"kernel {name} is not loaded on device 0"):
        plan.update(**planned.lengths(given))
    assert bindings.entries == []


@every_plan
def test_the_buffer_is_as_large_as_workspace_bytes_says(
    planned: Planned, cupy: FakeCuPy, no_cupy_yet: None
) -> None:
    size = planned.kind.workspace_bytes(**planned.sizes(), sm_count=132)
    assert cupy.allocated == []
    given = on_gpu(cupy, planned)
    planned.make(given)
    planned.kind(**planned.numbers, like=given["q"])
    planned.kind(**planned.numbers)
    assert cupy.allocated == [size] * 3
    assert planned.kind.workspace_bytes(**planned.sizes()) == size
    planned.make(given, workspace=cupy.ndarray((size,), "uint8"))
    assert len(cupy.allocated) == 3
    for shape, dtype, shift, error, message in (
        ((size,), "int8", 0, ValueError, "needs a contiguous one-dimensional uint8 ... got int8"),
        ((size, 1), "uint8", 0, ValueError, "needs a contiguous one-dimensional uint8 array"),
        ((size - 1,), "uint8", 0, ValueError, f"needs {size} bytes, got {size - 1}; ask workspace"),
        ((size,), "uint8", 128, ValueError, "needs an address that is a multiple of 256"),
    ):
        wrong = cupy.ndarray(shape, dtype)
        wrong.data.ptr += shift
        with refused(error, f"workspace: {message}"):
            planned.kind(**planned.numbers, workspace=wrong)
    with refused(
        ValueError, "workspace: needs an array on the GPU, got one on the CPU ... ; leave"
    ):
        planned.kind(**planned.numbers, workspace=np.zeros(size, np.uint8))


def test_places_that_differ(cupy: FakeCuPy) -> None:
    given, host = on_gpu(cupy, DECODE), OPERATIONS["mla_decode"].make()
    there, here = cupy.ndarray((NBYTES,), "uint8"), np.zeros(1 << 20, np.uint8)
    elsewhere = cupy.ndarray((NBYTES,), "uint8", device=1)
    for changes, message in (
        ({"device": 1, "like": there}, "like: needs ... device 1 (device=), got ... device 0"),
        ({"device": 1, "workspace": there}, "workspace: needs ... device 1 (device=), got"),
        ({"device": 0, "like": here}, "like: needs ... device 0 (device=), got ... the CPU"),
        ({"like": here, "workspace": there}, "workspace: ... the CPU (as like), got ... device 0"),
        ({"like": there, "workspace": here}, "workspace: ... device 0 (as like), got ... the CPU"),
        ({"like": there, "workspace": elsewhere}, "workspace: ... device 0 ... , got ... device 1"),
    ):
        with refused(ValueError, message + " ... ; let device, like and workspace name one place"):
            cumla.MLADecodePlan(2, 2, 16, **changes)
    with refused(ValueError, "workspace: ... the CPU (as like)"):
        DECODE.make(host, workspace=there)
    with refused(ValueError, "workspace: ... device 0 (as like)"):
        DECODE.make(given, workspace=here)
    for device in ("0", 0.0, True, np.zeros(1)):
        message = f"device: needs a CUDA ordinal ... got {device!r}; pass its number"
        with refused(TypeError, message):
            cumla.MLADecodePlan(1, 1, 16, device=device)  # type: ignore[arg-type]
        with refused(TypeError, message):
            cumla.prepare(cumla.mla_decode, device=device)  # type: ignore[arg-type]


@every_plan
def test_arrays_in_another_place(planned: Planned, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    plan.run(**planned.inputs(given))
    bindings.launched.clear()
    host = OPERATIONS[planned.operation].make()
    elsewhere = {name: cupy.like(value, device=1) for name, value in host.items()}
    for others, place in ((elsewhere, "CUDA device 1"), (host, "the CPU")):
        message = f"plan: made for CUDA device 0, got arrays on {place}; copy them, or make a"
        others = {name: value for name, value in others.items() if value is not None}
        with refused(ValueError, message):
            plan.run(**planned.inputs(others))
        with refused(ValueError, message):
            plan.update(**planned.lengths(others))
    assert bindings.entries == []
    cupy.capability = (8, 0)
    cumla.launch.device.properties.cache_clear()
    with refused(cumla.UnsupportedDeviceError, "device 0 is NVIDIA Imaginary"):
        planned.make(given)


def test_without_a_gpu(cupy: FakeCuPy) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime.getDevice = cupy.cuda.runtime.getDeviceProperties = fail
    for call in (
        lambda: cumla.MLADecodePlan(1, 1, 16),
        lambda: cumla.MLADecodePlan(1, 1, 16, device=0),
        lambda: cumla.MLADecodePlan.workspace_bytes(1, 1, 16),
        lambda: cumla.prepare(cumla.mla_decode),
    ):
        with pytest.raises(cumla.UnsupportedDeviceError, match="cudaErrorInsufficientDriver"):
            call()


# --- streams and captures -------------------------------------------------------------------------


@every_plan
def test_another_stream(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """One update serves runs on any stream: each waits on the device for the last one."""
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    for stream in (0, 5, 5, 7, 0):
        plan.run(**planned.inputs(given), stream=stream)
    updated, ran = (len(names) for names in entries(planned))
    streams = [launch.stream for launch in bindings.launched]
    assert streams == [0] * (updated + ran) + [5] * 2 * ran + [7] * ran + [0] * ran
    assert driver.waits == [(5, 0), (7, 5), (0, 7)]
    assert plan.serves(5)
    plan.update(**planned.lengths(given), stream=5)  # behind the last run
    assert driver.waits[3:] == [(5, 0)]


@every_plan
@pytest.mark.parametrize("stream", [0, 5])
def test_runs_that_are_captured_use_an_eager_update(
    planned: Planned, stream: int, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """On whatever stream: no schedule is computed in the graph, and no stream waits."""
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    plan.prepare()
    bindings.launched.clear()
    driver.capturing.add(stream)
    assert plan.serves(stream)
    for _ in range(3):  # layers
        plan.run(**planned.inputs(given), stream=stream)
    driver.capturing.clear()
    _, ran = entries(planned)
    assert bindings.entries == list(ran) * 3
    assert driver.waits == []
    plan.run(**planned.inputs(given))  # eager runs go on as before


@every_plan
def test_an_update_that_was_only_captured(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """It serves captured runs on its stream, and no eager one."""
    given = on_gpu(cupy, planned)
    plan = planned.make(given)
    plan.prepare()
    driver.capturing.add(5)
    plan.update(**planned.lengths(given), stream=5)
    plan.run(**planned.inputs(given), stream=5)
    assert bindings.entries == all_entries(planned)
    assert plan.serves(5)
    driver.capturing.clear()
    assert not plan.serves(5)
    lengths = lengths_in_messages(planned)
    message = (
        f"plan: its last update was captured into a CUDA graph ... ; call plan.update({lengths}) "
        f"outside of a capture before this run"
    )
    for _ in range(2):
        with refused(ValueError, message):
            plan.run(**planned.inputs(given), stream=5)
    with refused(ValueError, "plan: never updated"):
        plan.run(**planned.inputs(given))
    plan.update(**planned.lengths(given), stream=5)
    plan.run(**planned.inputs(given), stream=5)
    assert plan.serves(5)


@every_plan
@pytest.mark.parametrize("stream", [0, 5])
def test_a_captured_update_replaces_the_eager_one(
    planned: Planned, stream: int, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """From the first replay on the buffer holds the graph's schedule, and nobody says when."""
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    plan.run(**planned.inputs(given))
    driver.capturing.add(stream)
    plan.update(**planned.lengths(given), stream=stream)
    plan.run(**planned.inputs(given), stream=stream)
    driver.capturing.clear()
    bindings.launched.clear()
    with refused(ValueError, "plan: its last update was captured"):
        plan.run(**planned.inputs(given), stream=stream)
    with refused(ValueError, "plan: "):
        plan.run(**planned.inputs(given))
    assert not plan.serves(0)
    assert bindings.entries == []
    plan.update(**planned.lengths(given))
    plan.run(**planned.inputs(given))
    assert bindings.entries == all_entries(planned)


def test_a_stream_goes_after_the_last_one(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """Of the first update, too: work on the allocator's stream may still use the memory."""
    given = on_gpu(cupy, DECODE)
    plan = DECODE.make(given, stream=3)
    for stream in (3, 3, 5, 5, 7, 3):
        plan.update(given["kv_lens"], stream=stream)
    assert driver.waits == [(5, 3), (7, 5), (3, 7)]


def test_captures_are_left_out_of_the_order(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """Warmed up on 3, captured on 5, then eager on 7: after 3, and never after the capture."""
    given = on_gpu(cupy, DECODE)
    plan = DECODE.make(given, stream=3)
    plan.update(given["kv_lens"], stream=3)
    driver.capturing.add(5)
    plan.update(given["kv_lens"], stream=5)
    plan.run(**DECODE.inputs(given), stream=5)
    assert driver.waits == []
    plan.update(given["kv_lens"], stream=7)
    assert driver.waits == [(7, 3)]
    driver.capturing.add(7)
    plan.update(given["kv_lens"], stream=8)  # an event on 7 would draw 8 into its capture
    assert driver.waits == [(7, 3)]


def test_a_stream_that_is_gone_is_reported_and_no_error(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    given = on_gpu(cupy, DECODE)
    plan = DECODE.make(given, stream=3)
    driver.gone.add(3)
    plan.update(given["kv_lens"], stream=5)
    assert "stream 0x3, on which a plan was used last, is not there any more" in caplog.text
    assert plan.serves(5)


@every_plan
def test_the_buffer_is_kept_until_another_stream_has_passed(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """Each use away from where it was allocated is noted, also of runs found in order before."""
    given = on_gpu(cupy, planned)
    memory = cupy.ndarray((NBYTES,), "uint8")
    seen = weakref.ref(memory)
    plan = planned.make(given, workspace=memory, stream=3)
    plan.update(**planned.lengths(given), stream=3)
    plan.run(**planned.inputs(given), stream=3)
    assert driver.recorded == []
    plan.update(**planned.lengths(given), stream=5)
    for _ in range(2):
        plan.run(**planned.inputs(given), stream=5)
    assert driver.recorded == [3, 5, 5, 5]  # the first for the order
    assert driver.destroyed == [1]  # that of the order; the buffer's is recorded again
    driver.passed = False
    del plan, memory
    gc.collect()
    cumla.core.arrays.open_call((("q", given["q"]),))
    assert seen() is not None
    driver.passed = True
    cumla.core.arrays.open_call((("q", given["q"]),))
    assert seen() is None
    assert driver.destroyed == [1, 2]


def test_at_home_the_buffer_goes_back_at_once(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """The allocator reuses it in the order of that stream; what a graph reads is the caller's."""
    given = on_gpu(cupy, DECODE)
    memory = cupy.ndarray((NBYTES,), "uint8")
    seen = weakref.ref(memory)
    plan = DECODE.make(given, workspace=memory, stream=3)
    plan.update(given["kv_lens"], stream=3)
    driver.capturing.add(5)
    plan.update(given["kv_lens"], stream=5)
    del plan, memory
    gc.collect()
    assert seen() is None
    assert driver.recorded == []


# --- shared workspaces ----------------------------------------------------------------------------


def test_workspaces_that_overlap(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Parts of one array may not be of two plans, unless they are apart; nor hold what is read."""
    given = on_gpu(cupy, DECODE)
    memory = cupy.ndarray((NBYTES,), "uint8")
    size = DECODE.kind.workspace_bytes(**DECODE.numbers, sm_count=132)
    size += -size % 256

    def part(begin: int) -> Any:
        slice_ = cupy.ndarray((size,), "uint8")
        slice_.data.ptr = memory.data.ptr + begin
        return slice_

    plan = DECODE.make(given, workspace=part(0))
    with refused(ValueError, "workspace: needs memory apart ... overlaps one at"):
        DECODE.make(given, workspace=part(256))
    DECODE.make(given, workspace=part(size)).update(given["kv_lens"])
    given["kv_lens"].data.ptr = memory.data.ptr + 512
    with refused(ValueError, "workspace: needs memory of its own, got memory that kv_lens uses"):
        plan.update(given["kv_lens"])
    given = on_gpu(cupy, DECODE)
    plan.update(given["kv_lens"])
    given["out"].data.ptr = memory.data.ptr + 512
    with refused(ValueError, "out: needs memory of its own, got memory that workspace uses"):
        plan.run(**DECODE.inputs(given))
    assert bindings.entries == ["mla_schedule"] * 2


@every_plan
def test_the_last_plan_that_was_updated_has_the_workspace(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    given = on_gpu(cupy, planned)
    memory = cupy.ndarray((NBYTES,), "uint8")
    one, other = (planned.make(given, workspace=memory) for _ in range(2))
    lengths, inputs = planned.lengths(given), planned.inputs(given)
    one.update(**lengths)
    for _ in range(2):
        one.run(**inputs)  # the second of them needs no checks
    other.update(**lengths)
    bindings.launched.clear()
    message = (
        f"plan: its workspace has been taken by another plan ... ; call "
        f"plan.update({lengths_in_messages(planned)}) again ... a workspace of its own"
    )
    with refused(ValueError, message):
        one.run(**inputs)
    assert not one.serves(0)
    assert bindings.entries == []
    other.run(**inputs)
    one.update(**lengths, stream=5)
    assert driver.waits == [(5, 0)]  # they share the order of streams, too
    one.run(**inputs, stream=5)
    with refused(ValueError, message):
        other.run(**inputs)
    del one
    gc.collect()
    other.update(**lengths)
    other.run(**inputs)


# --- runs that were found in order before ---------------------------------------------------------


def without_outputs(planned: Planned, given: Arguments) -> Arguments:
    written = OPERATIONS[planned.operation].outputs()
    return {name: value for name, value in planned.inputs(given).items() if name not in written}


@every_plan
@pytest.mark.parametrize("has_outputs", [True, False])
def test_a_ready_run_sees_other_arrays(
    planned: Planned,
    has_outputs: bool,
    cupy: FakeCuPy,
    bindings: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address, a stride, a dtype, a shape, a device or a framework that has changed."""
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    plan._sorted.looks.clear()  # of other tests: with too many all are forgotten
    inputs = planned.inputs(given) if has_outputs else without_outputs(planned, given)

    def launched() -> list[int]:
        monkeypatch.setattr(fake_cuda, "_addresses", itertools.count(1 << 20))  # of new outputs
        bindings.launched.clear()
        plan.run(**inputs)
        return [launch.parameters for launch in bindings.launched]

    first = launched() and launched()
    for name, array in arrays_of(inputs):
        assert launched() == first
        array.data.ptr += 1 << 20
        there = launched() and launched()
        assert there != first
        array.data.ptr -= 1 << 20
        strides, shape, dtype = array.strides, array.shape, array.dtype
        array.strides = (strides[0] + 1024, *strides[1:])
        if name in ("kv_indices", "sinks"):
            with refused(ValueError, f"{name}: needs ... got a stride of"):
                plan.run(**inputs)
        elif name in ("k", "v") and "block_indices" in inputs:
            with refused(ValueError, "v: needs strides in proportion to those of k"):
                plan.run(**inputs)
        else:
            assert launched() not in (first, there)
        array.strides = strides
        bindings.launched.clear()
        for attribute, kept, wrong in (
            ("dtype", dtype, np.dtype(np.complex64)),
            ("shape", shape, (*shape[:-1], shape[-1] + 3)),
        ):
            setattr(array, attribute, wrong)
            if name in ("block_table", "kv_indices") and attribute == "shape":
                setattr(array, attribute, kept)
                continue  # of which there may be more
            with pytest.raises((TypeError, ValueError), match=r"^[a-z_\[\]01]+: "):
                plan.run(**inputs)
            setattr(array, attribute, kept)
        array.data.device_id = 1
        with pytest.raises(ValueError, match="CUDA device 1"):
            plan.run(**inputs)
        array.data.device_id = 0
        with pytest.raises((TypeError, ValueError)):
            plan.run(**with_array(inputs, name, np.zeros(shape, dtype)))
        assert bindings.entries == []
    assert launched() == first


@every_plan
def test_layers_without_outputs_are_known_by_a_glance(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later layers launch what they would if they were checked, and so does a stream's first."""
    layers = [without_outputs(planned, on_gpu(cupy, planned)) for _ in range(3)]
    plan = planned.ready(on_gpu(cupy, planned))
    plan.run(**layers[0])
    seen: list[tuple[str, Any, bytes]] = []

    def note(launch: Any) -> None:
        seen.append((launch._kernel.spec.entry, launch._config, bytes(launch._owned[0])))

    monkeypatch.setattr(kernel.PreparedLaunch, "__call__", note)

    def launched(layer: Arguments, **options: Any) -> list[tuple[str, Any, bytes]]:
        monkeypatch.setattr(fake_cuda, "_addresses", itertools.count(1 << 20))  # of new outputs
        seen.clear()
        plan.run(**layer, **options)
        return [*seen]

    with monkeypatch.context() as patch:
        patch.setattr(core_plan, "open_call", None)
        found = launched(layers[1])
        assert found and launched(layers[1]) == found
    memory = plan._memory
    assert launched(layers[2], stream=7) != launched(layers[1], stream=7) != found
    for kept in (memory.forms, memory.near, memory.ready):
        kept.clear()
    assert launched(layers[1], stream=0) == found


@every_plan
def test_layers_of_a_form_are_checked_once(
    planned: Planned,
    cupy: FakeCuPy,
    bindings: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later layers launch what they would if they were checked, also on another stream."""
    layers = [planned.inputs(on_gpu(cupy, planned)) for _ in range(2)]
    plan = planned.ready(on_gpu(cupy, planned))
    seen: list[tuple[str, Any, bytes]] = []

    def note(launch: Any) -> None:
        seen.append((launch._kernel.spec.entry, launch._config, bytes(launch._owned[0])))

    monkeypatch.setattr(kernel.PreparedLaunch, "__call__", note)
    plan.run(**layers[0])
    found = []
    for stream in (0, 7):
        with monkeypatch.context() as patch:
            patch.setattr(core_plan, "pack", None)
            seen.clear()
            plan.run(**layers[1], stream=stream)
        found.append([*seen])
        plan._memory.forms.clear()
        plan._memory.ready.clear()
        seen.clear()
        plan.run(**layers[1], stream=stream)
        assert found[-1] == seen
    assert [*found[0]] != [*found[1]]  # their streams
    first, lengths = (planned.lengths(on_gpu(cupy, planned)) for _ in range(2))
    plan.update(**first)
    updates = []
    for pack in (None, core_plan.pack):
        with monkeypatch.context() as patch:
            patch.setattr(core_plan, "pack", pack)
            seen.clear()
            plan.update(**lengths)
        updates.append([*seen])
        plan._memory.forms.clear()
        plan._updates.clear()
    assert updates[0] == updates[1]
    given = on_gpu(cupy, planned)
    for name in OPERATIONS[planned.operation].outputs():
        inputs, (_, other) = planned.inputs(given), next(arrays_of(given))
        inputs[name].data = other.data
        with refused(ValueError, f"{name}: needs memory of its own, got memory that"):
            plan.run(**inputs)


@every_plan
def test_a_ready_run_keeps_no_array_alive(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    for _ in range(2):
        plan.run(**planned.inputs(given))
    inputs = dict(arrays_of(planned.inputs(given)))
    seen = [weakref.ref(array) for array in inputs.values()]
    given.clear()
    inputs.clear()
    gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)
    assert plan.serves(0)


@every_plan
def test_runs_whose_outputs_are_allocated(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Each has outputs of its own, and the launch that goes with them."""
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    names = list(OPERATIONS[planned.operation].outputs())
    inputs = {n: v for n, v in planned.inputs(given).items() if n not in names}
    bindings.launched.clear()
    for given_name in (None, *names):
        outputs = {} if given_name is None else {given_name: given[given_name]}
        for _ in range(3):
            result = plan.run(**inputs, **outputs)
            arrays = dict(zip(names, result if len(names) > 1 else (result,), strict=True))
            for name, array in arrays.items():
                assert (array is given[name]) == (name == given_name)
                assert (array.shape, array.dtype) == (given[name].shape, given[name].dtype)
    assert bindings.entries == entries(planned)[1] * 3 * (1 + len(names))


# --- check mode -----------------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")


@pytest.mark.usefixtures("checking")
@every_plan
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_lengths_that_have_changed_since_the_update(
    planned: Planned, place: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    host = {n: v for n, v in OPERATIONS[planned.operation].make().items() if v is not None}
    given = host if place == "cpu" else {n: cupy.like(v) for n, v in host.items()}
    plan = planned.ready(given)
    plan.run(**planned.inputs(given))
    lengths = lengths_in_messages(planned)
    for name in planned.updated_with:
        kept = host[name][1]
        host[name][1] -= 1
        message = (
            f"{name}[1]: needs the value that the plan was updated with, {kept}, got {kept - 1}; "
            f"call plan.update({lengths}) after each change of the lengths"
        )
        with refused(ValueError, message):
            plan.run(**planned.inputs(given))
        host[name][1] = kept
        plan.run(**planned.inputs(given))


@pytest.mark.usefixtures("checking")
@every_plan
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_another_thread(
    planned: Planned, place: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    host = {n: v for n, v in OPERATIONS[planned.operation].make().items() if v is not None}
    given = host if place == "cpu" else {n: cupy.like(v) for n, v in host.items()}
    plan = planned.ready(given)
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            plan.run(**planned.inputs(given))
        except ValueError as error:
            errors.append(error)
        plan.update(**planned.lengths(given))
        plan.run(**planned.inputs(given))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    (error,) = errors
    assert str(error).startswith("plan: updated by another thread; a plan serves one thread at a ")
    with refused(ValueError, "plan: updated by another thread"):
        plan.run(**planned.inputs(given))


@every_plan
def test_a_ready_run_looks_once_check_mode_is_on(
    planned: Planned, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = on_gpu(cupy, planned)
    plan = planned.ready(given)
    for _ in range(2):
        plan.run(**planned.inputs(given))
    assert cupy.copied == []
    monkeypatch.setenv("CUMLA_CHECK", "1")
    plan.update(**planned.lengths(given))
    looked = len(cupy.copied)
    assert looked == len(planned.updated_with)
    plan.run(**planned.inputs(given))
    others = set(plan._attend.trusted) & set(given)
    assert len(cupy.copied) == 2 * looked + len(others)  # the lengths again
    monkeypatch.delenv("CUMLA_CHECK")
    plan.run(**planned.inputs(given))
    assert len(cupy.copied) == 2 * looked + len(others)


@every_plan
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copies(planned: Planned, again: Any, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Two plans would write their schedules to one buffer."""
    for plan in (
        planned.make(on_gpu(cupy, planned)),
        planned.make(OPERATIONS[planned.operation].make()),
    ):
        name = type(plan).__name__
        with pytest.raises(
            TypeError, match=f"^{name}: a plan cannot be copied or pickled, .* make"
        ):
            again(plan)


@pytest.mark.parametrize("name", ["MLAAttentionPlan", "AttentionPlan"])
def test_updates_in_turn_of_a_table_and_of_a_list(
    name: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """The last one decides which pages runs take, although its arrays are known again."""
    table, listed = PLANS[name], PLANS[f"{name} of a list"]
    given = on_gpu(cupy, table)
    made = OPERATIONS[listed.operation].make()
    in_list = {n: v for n, v in given.items() if n != "block_table"}
    in_list |= {n: cupy.like(made[n]) for n in ("kv_indptr", "kv_indices")}
    plan = table.make(given)
    for _ in range(3):
        for one, other in ((table, listed), (listed, table)):
            arrays = {table.operation: given, listed.operation: in_list}
            for _ in range(2):
                plan.update(**one.lengths(arrays[one.operation]))
                plan.run(**one.inputs(arrays[one.operation]))
                with refused(ValueError, "block_table" if one is listed else "kv_indices"):
                    plan.run(**other.inputs(arrays[other.operation]))
