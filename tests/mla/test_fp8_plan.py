# SPDX-License-Identifier: Apache-2.0
"""What comes before a launch over an FP8 cache: views, kernels, ready runs; no GPU is needed.

GPU arrays are those of the stand-in for CuPy in `tests.fake_cuda`; nothing is launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.launch import KernelSpec
from cumla.launch.mla import mla_attention as attention_launcher
from cumla.launch.mla.mla_decode_fp8 import SPECS, fp8_spec
from cumla.mla import attention as ragged
from cumla.mla import call as mla_call
from cumla.mla import decode as mla
from cumla.mla.checks import Arguments
from tests.fake_cuda import FakeCuPy
from tests.mla.fp8_arrays import BF16, FORMS, SCALED

GROUPED = ("scales", "scales, e4m3 rope", "packed")


class Event(NamedTuple):
    """A kernel that is loaded, prepared or launched."""

    kind: str
    entry: str
    values: tuple[Any, ...] = ()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    log: list[Event] = []

    def load(spec: KernelSpec, device: int, *, capturing: Any) -> KernelSpec:
        log.append(Event("load", spec.entry))
        return spec

    def prepare(spec: KernelSpec, *values: Any, stream: Any = None) -> Callable[[], None]:
        log.append(Event("prepare", spec.entry, values))
        return lambda: log.append(Event("launch", spec.entry, values))

    monkeypatch.setattr(mla_call, "load", load)
    for module, names in (
        (mla, ("prepare_schedule", "prepare_decode", "prepare_decode_fp8")),
        (ragged, ("prepare_ragged_schedule",)),
        (attention_launcher, ("prepare_decode", "prepare_decode_fp8")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, prepare)
    return log


def taken(events: list[Event], *kinds: str) -> list[Event]:
    """The events of some kinds; all are forgotten."""
    found = [event for event in events if event.kind in kinds]
    events.clear()
    return found


@pytest.fixture
def make(cupy: FakeCuPy) -> Callable[..., dict[str, Any]]:
    """All that a decoding call can be given, each array at an address of its own."""
    addresses = itertools.count(1)

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        made = cupy.ndarray(shape, dtype)
        made.data.ptr = next(addresses) << 24
        return made

    def make(form: str, kv_scale: Any = None) -> dict[str, Any]:
        columns = FORMS.get(form, ((576, BF16),))
        parts = tuple(array((6, 64, 1, n), dtype) for n, dtype in columns)
        return {
            "q": array((2, 2, 16, 576), BF16),
            "kv_cache": parts if len(parts) > 1 else parts[0],
            "block_table": array((2, 3), "int32"),
            "cache_seqlens": array((2,), "int32"),
            "kv_scale": array((), "float32") if kv_scale == "array" else kv_scale,
            "out": array((2, 2, 16, 512), BF16),
            "lse": array((2, 16, 2), "float32"),
        }

    return make


class Ragged:
    """The same for queries of different lengths, behind one face."""

    @staticmethod
    def of(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
        given = {name: array for name, array in arguments.items() if name != "cache_seqlens"}
        for name, shape in (("q", (4, 16, 576)), ("out", (4, 16, 512)), ("lse", (4, 16))):
            old = arguments[name]
            given[name] = cupy.ndarray(shape, old.dtype)
            given[name].data.ptr = old.data.ptr
        return given


def lengths_of(cupy: FakeCuPy) -> dict[str, Any]:
    return {"qo_indptr": cupy.ndarray((3,), "int32"), "kv_lens": cupy.ndarray((2,), "int32")}


def call_of(
    cupy: FakeCuPy, arguments: dict[str, Any], operation: str, *, plan: bool = False
) -> Callable[[], Any]:
    """A call of one of the operations; with a plan that has been updated."""
    if operation == "decode":
        if not plan:
            return lambda: cumla.mla_decode(**arguments)
        made = cumla.MLADecodePlan.from_arrays(arguments["q"], arguments["kv_cache"])
        made.update(arguments["cache_seqlens"])
        return lambda: made.run(**arguments)
    given, lengths = Ragged.of(cupy, arguments), lengths_of(cupy)
    if not plan:
        return lambda: cumla.mla_attention(**given, **lengths)
    ragged_plan = cumla.MLAAttentionPlan.from_arrays(
        given["q"], given["kv_cache"], lengths["qo_indptr"]
    )
    ragged_plan.update(**lengths)
    return lambda: ragged_plan.run(**given)


OPERATIONS = pytest.mark.parametrize("operation", ["decode", "attention"])
Make = Callable[..., dict[str, Any]]


# --- views ----------------------------------------------------------------------------------------


@OPERATIONS
@pytest.mark.parametrize("form", FORMS)
def test_the_launcher_sees_one_form(
    cupy: FakeCuPy, make: Make, events: list[Event], form: str, operation: str
) -> None:
    """512 e4m3 columns, 64 others, maybe scales: where they lie in what came."""
    whole = make(form)
    call_of(cupy, whole, operation)()
    (prepared,) = [e for e in events if e.kind == "prepare" and "fp8" in e.entry]
    (arguments,) = [value for value in prepared.values if isinstance(value, Arguments)]
    parts = whole["kv_cache"] if isinstance(whole["kv_cache"], tuple) else (whole["kv_cache"],)
    latent, rope, scales = arguments.kv_cache, arguments.kv_rope, arguments.kv_scales
    assert (latent.shape, latent.dtype) == ((6, 64, 1, 512), "float8_e4m3fn")
    assert latent.ptr == parts[0].data.ptr
    assert latent.strides == parts[0].strides
    assert rope.shape == (6, 64, 1, 64)
    in_16_bits = form in ("16-bit rope", "scales", "packed")
    assert rope.dtype == ("bfloat16" if in_16_bits else "float8_e4m3fn")
    begin = {"one": 512, "bytes": 512, "packed": 528}.get(form)
    assert rope.ptr == (parts[1].data.ptr if begin is None else latent.ptr + begin)
    of_rope = parts[1].strides if begin is None else (*latent.strides[:3], rope.strides[3])
    assert rope.strides == of_rope
    assert rope.strides[3] == (2 if in_16_bits else 1)
    assert (scales is not None) == (form in GROUPED)
    if scales is not None:
        assert (scales.shape, scales.dtype) == ((6, 64, 1, 4), "float32")
        packed = form == "packed"
        assert scales.ptr == (latent.ptr + 512 if packed else parts[2].data.ptr)
        assert scales.strides == ((*latent.strides[:3], 4) if packed else parts[2].strides)
    assert arguments.kv_scale == 1.0
    assert arguments.q.dtype == arguments.q_rope.dtype == "bfloat16"


@OPERATIONS
@pytest.mark.parametrize("form", SCALED)
def test_factors(
    cupy: FakeCuPy, make: Make, events: list[Event], form: str, operation: str
) -> None:
    """A number as float32 has it; of an array the address, and nothing behind it."""
    for kv_scale in (None, 0.1, 3, "array"):
        whole = make(form, kv_scale)
        for plan in (False, True):
            events.clear()
            call_of(cupy, whole, operation, plan=plan)()
            (prepared,) = [e for e in events if e.kind == "prepare" and "fp8" in e.entry]
            (arguments,) = [value for value in prepared.values if isinstance(value, Arguments)]
            got: Any = arguments.kv_scale
            if kv_scale == "array":
                assert got.ptr == whole["kv_scale"].data.ptr
                assert (got.shape, got.dtype) == ((), "float32")
            else:
                assert got == float(np.float32(kv_scale or 1.0))


# --- kernels --------------------------------------------------------------------------------------


@OPERATIONS
@pytest.mark.parametrize("form", FORMS)
def test_kernels(
    cupy: FakeCuPy, make: Make, events: list[Event], form: str, operation: str
) -> None:
    """All of a plan's are loaded with its update; the cache that comes decides which one runs."""
    whole = make(form)
    for plan in (False, True):
        call = call_of(cupy, whole, operation, plan=plan)
        call()
        loaded = [e.entry for e in events if e.kind == "load"]
        launched = [e.entry for e in events if e.kind == "launch"]
        one, grouped = [entry for entry in loaded if "fp8" in entry]
        assert launched[-1] == (grouped if form in GROUPED else one)
        assert len(loaded) == len(set(loaded)) == 3
        assert all(e.kind == "load" for e in events[:3])
        events.clear()
        call()
        assert [e.entry for e in taken(events, "load")] == ([] if plan else loaded)


@pytest.mark.parametrize("form", GROUPED)
def test_packed_rows_have_their_kernel_with_few_query_rows(
    cupy: FakeCuPy, make: Make, events: list[Event], form: str
) -> None:
    """Whole pages of them, in one array or views of it; it is loaded whatever cache comes."""
    whole = make(form)
    for name, shape in (("q", (2, 2, 8, 576)), ("out", (2, 2, 8, 512)), ("lse", (2, 8, 2))):
        old = whole[name]
        whole[name] = cupy.ndarray(shape, old.dtype)
        whole[name].data.ptr = old.data.ptr
    for plan in (False, True):
        call_of(cupy, whole, "decode", plan=plan)()
        names = [f"mla_decode_fp8_16{tag}" for tag in ("", "_grouped", "_packed")]
        assert [e.entry for e in events if e.kind == "load"][1:] == names
        (prepared,) = [e for e in events if e.kind == "prepare" and "fp8" in e.entry]
        assert prepared.entry == names[2 if form == "packed" else 1]
        events.clear()


@OPERATIONS
@pytest.mark.parametrize("form", ["pair", "scales"])
def test_broadcast_arrays_have_the_kernel_of_any_pages(
    cupy: FakeCuPy, make: Make, events: list[Event], form: str, operation: str
) -> None:
    """The driver might refuse to describe strides of 0 to the copy engine."""
    whole = make(form)
    last = whole["kv_cache"][-1]
    last.strides = (0, 0, 0, last.strides[3])
    for plan in (False, True):
        call_of(cupy, whole, operation, plan=plan)()
        name = "mla_decode_fp8_32" if operation == "decode" else "mla_attention_fp8"
        suffix = "_grouped_rows" if form == "scales" else "_rows"
        (prepared,) = [e.entry for e in events if e.kind == "prepare" and "fp8" in e.entry]
        assert prepared == name + suffix
        kinds = [event.kind for event in events if event.entry == prepared]
        assert kinds.index("load") < kinds.index("prepare")
        events.clear()


@OPERATIONS
def test_the_buffer_is_as_large_as_workspace_bytes_says(
    cupy: FakeCuPy,
    make: Make,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    sizes: list[int] = []
    empty = cupy.empty

    def note(shape: tuple[int, ...], dtype: Any) -> Any:
        sizes.append(shape[0])
        return empty(shape, dtype)

    monkeypatch.setattr(cupy, "empty", note)
    whole = make("packed")
    for plan in (True, False):
        call_of(cupy, whole, operation, plan=plan)()
    options: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "sm_count": 132}
    size = (
        cumla.MLADecodePlan.workspace_bytes(2, 2, 16, **options)
        if operation == "decode"
        else cumla.MLAAttentionPlan.workspace_bytes(2, 4, 16, **options)
    )
    assert sizes == [size] * 2


def test_every_kernel_of_the_launcher_is_one_of_a_shape(make: Make) -> None:
    options: dict[str, Any] = {"like": np.zeros(1), "cache_dtype": "float8_e4m3fn"}
    for operation, key in (
        ("decode", cumla.MLADecodePlan(2, 2, 16, **options).key),
        ("attention", cumla.MLAAttentionPlan(2, 4, 16, **options).key),
    ):
        specs = {fp8_spec(key, grouped) for grouped in (False, True)}
        assert len(specs) == 2, operation
        assert specs <= set(SPECS)


def test_kernels_of_other_caches_stay(cupy: FakeCuPy, make: Make, events: list[Event]) -> None:
    """No plan for 16 bits loads what it cannot run."""
    for operation in ("decode", "attention"):
        call_of(cupy, make("16 bits"), operation, plan=True)()
    assert not [event for event in events if "fp8" in event.entry]
    assert len(taken(events, "load")) == 4


def test_prepare(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[KernelSpec] = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec))
    cumla.prepare()
    assert not set(SPECS) & set(loaded)
    usual = list(loaded)
    loaded.clear()
    cumla.prepare(fp8_caches=True)
    assert set(loaded) == {*usual, *SPECS}
    assert len(loaded) == len(set(loaded))


# --- runs that were found in order before ---------------------------------------------------------


@OPERATIONS
@pytest.mark.parametrize("form", FORMS)
def test_a_run_is_prepared_once(
    cupy: FakeCuPy,
    make: Make,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    operation: str,
) -> None:
    for kv_scale in (None, *((0.5, "array") if form in SCALED else ())):
        call = call_of(cupy, make(form, kv_scale), operation, plan=True)
        events.clear()
        call()
        with monkeypatch.context() as patch:
            for module in (mla, ragged):
                patch.setattr(module, "open_call", lambda *_, **__: pytest.fail("looked again"))
            call()
        assert [event.kind for event in events] == ["prepare", "launch", "launch"]
        assert events[1].values is events[2].values


@OPERATIONS
def test_a_ready_run_sees_every_part(
    cupy: FakeCuPy, make: Make, events: list[Event], operation: str
) -> None:
    """An address, a stride or a dtype that has changed under the same array."""
    whole = make("scales, e4m3 rope", "array")
    call = call_of(cupy, whole, operation, plan=True)
    call()
    arrays = (*whole["kv_cache"], whole["kv_scale"])
    for number, array in enumerate(arrays):
        events.clear()
        array.data.ptr += 1 << 20
        call()
        call()
        (prepared,) = taken(events, "prepare")
        (arguments,) = [value for value in prepared.values if isinstance(value, Arguments)]
        views = (arguments.kv_cache, arguments.kv_rope, arguments.kv_scales, arguments.kv_scale)
        view: Any = views[number]
        assert view.ptr == array.data.ptr
    for part in whole["kv_cache"]:
        page, row, *others = part.strides
        part.strides = (page + 1024, row, *others)
        call()
        assert len(taken(events, "prepare")) == 1
    whole["kv_scale"].dtype = np.dtype("float64")
    with pytest.raises(TypeError, match=r"^kv_scale: needs float32, got float64"):
        call()


@OPERATIONS
def test_a_ready_run_sees_the_factor(
    cupy: FakeCuPy, make: Make, events: list[Event], operation: str
) -> None:
    """Each number has a launch; none is that without one; an array is no number."""
    whole = make("one")
    given = whole if operation == "decode" else Ragged.of(cupy, whole)
    plan: Any
    if operation == "decode":
        plan = cumla.MLADecodePlan.from_arrays(given["q"], given["kv_cache"])
        plan.update(given["cache_seqlens"])
    else:
        lengths = lengths_of(cupy)
        plan = cumla.MLAAttentionPlan.from_arrays(
            given["q"], given["kv_cache"], lengths["qo_indptr"]
        )
        plan.update(**lengths)
    events.clear()
    factor = cupy.ndarray((1,), "float32")
    for kv_scale in (None, 0.5, 1.0, factor, None, 0.5, 1, factor, np.float32(0.5)):
        plan.run(**given | {"kv_scale": kv_scale})
    assert len(taken(events, "prepare")) == 4
    for wrong, error in ((-1.0, ValueError), (True, TypeError), ("0.5", TypeError)):
        with pytest.raises(error, match=r"^kv_scale: "):
            plan.run(**given | {"kv_scale": wrong})
    assert events == []


@OPERATIONS
def test_a_ready_run_over_16_bits_takes_no_factor(
    cupy: FakeCuPy, make: Make, events: list[Event], operation: str
) -> None:
    whole = make("16 bits")
    call_of(cupy, whole, operation, plan=True)()
    for kv_scale in (1.0, cupy.ndarray((), "float32")):
        with pytest.raises(ValueError, match=r"^kv_scale: needs a cache with e4m3 .* bfloat16;"):
            call_of(cupy, whole | {"kv_scale": kv_scale}, operation, plan=True)()


@OPERATIONS
def test_a_ready_run_sees_another_form(
    cupy: FakeCuPy, make: Make, events: list[Event], operation: str
) -> None:
    """One plan, caches in turn: each has its launch, and its kernel."""
    forms = {form: make(form) for form in FORMS}
    first = forms["one"]
    given = {name: first[name] for name in first if name != "kv_cache"}
    plan: Any
    if operation == "decode":
        plan = cumla.MLADecodePlan.from_arrays(first["q"], first["kv_cache"])
        plan.update(first["cache_seqlens"])
    else:
        given, lengths = Ragged.of(cupy, given), lengths_of(cupy)
        plan = cumla.MLAAttentionPlan.from_arrays(
            given["q"], first["kv_cache"], lengths["qo_indptr"]
        )
        plan.update(**lengths)
    events.clear()
    for _ in range(2):
        for arguments in forms.values():
            plan.run(**given, kv_cache=arguments["kv_cache"])
    assert len([event for event in events if event.kind == "prepare"]) == len(FORMS)
    launches = taken(events, "launch")
    assert [e.entry for e in launches[: len(FORMS)]] == [e.entry for e in launches[len(FORMS) :]]
    grouped = {e.entry for e, form in zip(launches, FORMS, strict=False) if form in GROUPED}
    assert len(grouped) == 1
    assert len({event.entry for event in launches}) == 2


def test_a_factor_on_another_device(cupy: FakeCuPy, make: Make, events: list[Event]) -> None:
    whole = make("one", "array")
    whole["kv_scale"].data.device_id = 1
    with pytest.raises(ValueError, match=r"^kv_scale: needs to be where q is, .* CUDA device 1"):
        cumla.mla_decode(**whole)
    host = np.ones((), np.float32)
    with pytest.raises(ValueError, match=r"^kv_scale: needs to be where q is, .* the CPU; copy"):
        cumla.mla_decode(**whole | {"kv_scale": host})
    assert events == []
