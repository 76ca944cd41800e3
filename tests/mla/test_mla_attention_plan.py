# SPDX-License-Identifier: Apache-2.0
"""MLAAttentionPlan: its buffer and streams, ready runs, and what is loaded when; no GPU is needed.

GPU arrays are those of the stand-in for CuPy in `tests.fake_cuda`; nothing is launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.core.arrays import ArrayView
from cumla.launch import KernelSpec
from cumla.launch.mla.shape import MLAAttentionKey
from cumla.mla import attention as ragged
from cumla.mla import attention_checks as ragged_checks
from cumla.mla import call as mla_call
from tests.fake_cuda import FakeCuPy, FakeDriver
from tests.mla.test_mla_attention_errors import (
    inputs_of,
    lengths_of,
    make,
    make_listed,
    on,
    plan_of,
)

KERNELS = ["mla_attention_schedule", "mla_attention_bfloat16"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Which kernels are loaded, prepared with which values, and launched, in order."""
    log: list[tuple[Any, ...]] = []

    def load(spec: KernelSpec, device: int, *, capturing: Any) -> KernelSpec:
        log.append(("load", spec.entry))
        return spec

    def prepare(spec: KernelSpec, *values: Any, stream: Any = None) -> Callable[[], None]:
        log.append(("prepare", spec.entry, values))
        return lambda: log.append(("launch", spec.entry, values))

    monkeypatch.setattr(mla_call, "load", load)
    for name in ("prepare_ragged_schedule", "prepare_attention"):
        monkeypatch.setattr(ragged, name, prepare)
    return log


def taken(events: list[tuple[Any, ...]], *kinds: str) -> list[tuple[Any, ...]]:
    """The events of some kinds; all are forgotten."""
    found = [event for event in events if event[0] in kinds]
    events.clear()
    return found


@pytest.fixture
def whole(cupy: FakeCuPy) -> dict[str, Any]:
    """All arrays of a run, each at an address of its own."""
    arguments = on(cupy, make())
    arguments |= {
        "out": cupy.ndarray((8, 16, 512), ml_dtypes.bfloat16),
        "lse": cupy.ndarray((8, 16), "float32"),
    }
    addresses = itertools.count(1)
    for array in arguments.values():
        array.data.ptr = next(addresses) << 24
    return arguments


def runs_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return inputs_of(arguments) | {name: arguments[name] for name in ("out", "lse")}


# --- kernels and buffers --------------------------------------------------------------------------


def test_everything_is_loaded_before_the_first_launch(
    whole: dict[str, Any], events: list[Any]
) -> None:
    cumla.mla_attention(**whole)
    names = [event[:2] for event in taken(events, "load", "launch")]
    assert names == [(kind, name) for kind in ("load", "launch") for name in KERNELS]
    plan = plan_of(whole)
    names = [event[:2] for event in taken(events, "load", "launch")]
    assert names == [("load", KERNELS[0]), ("load", KERNELS[1]), ("launch", KERNELS[0])]
    plan.update(**lengths_of(whole))
    plan.run(**runs_of(whole))
    assert [event[:2] for event in taken(events, "load", "launch")] == [
        ("launch", name) for name in KERNELS
    ]


def test_the_buffer_is_as_large_as_workspace_bytes_says(
    cupy: FakeCuPy, whole: dict[str, Any], events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And calls without a plan take the same."""
    sizes: list[int] = []
    empty = cupy.empty

    def note(shape: tuple[int, ...], dtype: Any) -> Any:
        sizes.append(shape[0])
        return empty(shape, dtype)

    monkeypatch.setattr(cupy, "empty", note)
    size = cumla.MLAAttentionPlan.workspace_bytes(2, 8, 16, sm_count=132)
    plan_of(whole)
    cumla.mla_attention(**whole)
    cumla.MLAAttentionPlan(2, 8, 16, like=whole["q"])
    assert sizes == [size] * 3
    assert cumla.MLAAttentionPlan.workspace_bytes(2, 8, 16) == size
    assert plan_of(make()).key.sm_count == 0  # nothing on the CPU


def test_calls_of_one_shape_share_their_key(whole: dict[str, Any], events: list[Any]) -> None:
    for causal in (True, True, False):
        cumla.mla_attention(**whole, causal=causal)
    keys = [values[0] for _, name, values in taken(events, "prepare") if name == KERNELS[0]]
    assert keys[0] is keys[1]
    assert [key.causal for key in keys[1:]] == [True, False]
    assert isinstance(keys[0], MLAAttentionKey)


def test_plans_share_a_workspace_in_turn(
    cupy: FakeCuPy, whole: dict[str, Any], events: list[Any]
) -> None:
    buffer = cupy.ndarray((1 << 28,), "uint8")
    one, other = (plan_of(whole, workspace=buffer, updated=False) for _ in range(2))
    one.update(**lengths_of(whole))
    one.run(**runs_of(whole))
    other.update(**lengths_of(whole))
    with pytest.raises(ValueError, match=r"^plan: its workspace has been taken by another plan.*"):
        one.run(**runs_of(whole))
    other.run(**runs_of(whole))
    one.update(**lengths_of(whole))
    one.run(**runs_of(whole))
    with pytest.raises(ValueError, match=r"call plan\.update\(qo_indptr, kv_lens\) again"):
        other.run(**runs_of(whole))


def test_a_plan_away_from_its_buffers_stream_notes_each_use(
    whole: dict[str, Any], events: list[Any], driver: FakeDriver
) -> None:
    """Ready runs, too: the allocator must not reuse the buffer before them."""
    plan = plan_of(whole, updated=False)
    plan.update(**lengths_of(whole), stream=7)
    for _ in range(3):
        plan.run(**runs_of(whole), stream=7)
    assert driver.recorded == [7] * 4


# --- runs that were found in order before ---------------------------------------------------------


def test_a_run_is_prepared_once_and_launched_each_time(
    whole: dict[str, Any], events: list[Any]
) -> None:
    plan = plan_of(whole)
    taken(events)
    for scale in (None, 576**-0.5, np.float64(576**-0.5)):
        result = plan.run(**runs_of(whole), softmax_scale=scale)
        assert result.out is whole["out"]
        assert result.lse is whole["lse"]
        cumla.mla_attention(**whole, plan=plan, softmax_scale=scale)
        plan.update(**lengths_of(whole))
    attention = [event for event in events if event[1] == KERNELS[1]]
    assert [event[0] for event in attention] == ["prepare"] + ["launch"] * 6
    assert all(event[2] is attention[0][2] for event in attention)


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "out", "lse"])
def test_a_ready_run_sees_another_address(
    whole: dict[str, Any], events: list[Any], name: str
) -> None:
    """Under the same object; and both are ready then."""
    plan = plan_of(whole)
    taken(events)
    address = whole[name].data.ptr
    for moved in (0, 1 << 20, 0, 1 << 20):
        whole[name].data.ptr = address + moved
        plan.run(**runs_of(whole))
    one, other = taken([e for e in events if e[0] == "prepare"], "prepare")
    launched = [values for _, _, values in taken(events, "launch")]
    assert all(a is b[2] for a, b in zip(launched, (one, other, one, other), strict=True))
    assert one[2] != other[2]


@pytest.mark.parametrize("split", [("q",), ("kv_cache",), ("q", "kv_cache")], ids="-".join)
def test_a_ready_run_knows_pairs(
    cupy: FakeCuPy, whole: dict[str, Any], events: list[Any], split: tuple[str, ...]
) -> None:
    """The second run is launched as it was; caches in two arrays have a kernel of their own."""
    for place, name in enumerate(split):
        shape, dtype = whole[name].shape[:-1], whole[name].dtype
        whole[name] = tuple(cupy.ndarray((*shape, columns), dtype) for columns in (512, 64))
        for number, array in enumerate(whole[name]):
            array.data.ptr = (20 + 2 * place + number) << 24
    plan = plan_of(whole)
    taken(events)
    for _ in range(2):
        assert plan.run(**runs_of(whole)).out is whole["out"]
    kernel = KERNELS[1] + ("_boxes" if "kv_cache" in split else "")
    kinds = [event[0] for event in events if event[0] != "load"]
    assert kinds == ["prepare", "launch", "launch"]
    assert {event[1] for event in events} == {kernel}
    whole[split[0]][1].data.ptr += 1 << 20
    plan.run(**runs_of(whole))
    assert len(taken(events, "prepare")) == 2


def test_a_ready_run_still_sees_what_is_wrong(
    cupy: FakeCuPy, whole: dict[str, Any], events: list[Any]
) -> None:
    """The scale, the alignment, the stream, the form of pages."""
    plan = plan_of(whole)
    plan.run(**runs_of(whole))
    taken(events)
    with pytest.raises(ValueError, match=r"^softmax_scale: "):
        plan.run(**runs_of(whole), softmax_scale=-1.0)
    with pytest.raises(ValueError, match=r"^plan: updated on stream"):
        plan.run(**runs_of(whole), stream=5)
    indices = cupy.ndarray((4,), "int32")
    with pytest.raises(ValueError, match=r"^block_table: needs pages .*, got both"):
        plan.run(**runs_of(whole), kv_indices=indices)
    plan.update(**lengths_of(whole), kv_indptr=cupy.ndarray((3,), "int32"))
    with pytest.raises(ValueError, match=r"^block_table: needs a plan that was updated without"):
        plan.run(**runs_of(whole))
    plan.update(**lengths_of(whole))
    taken(events)
    plan.run(**runs_of(whole))
    assert [event[0] for event in events] == ["launch"]
    whole["q"].data.ptr += 8
    with pytest.raises(ValueError, match=r"^q: needs an address"):
        plan.run(**runs_of(whole))


def test_a_run_whose_outputs_are_allocated_is_prepared_each_time(
    whole: dict[str, Any], events: list[Any]
) -> None:
    plan = plan_of(whole)
    for given in ({}, {"out": whole["out"]}, {"lse": whole["lse"]}):
        taken(events)
        for _ in range(2):
            plan.run(**inputs_of(whole), **given)
        assert len(taken(events, "prepare")) == 2


# --- check mode -----------------------------------------------------------------------------------


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """What check mode finds at an address."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    memory: dict[int, np.ndarray] = {}

    def copy(view: ArrayView, stream: int) -> np.ndarray:
        return memory[view.ptr]

    for module in (ragged, ragged_checks):
        monkeypatch.setattr(module, "copy_to_host", copy)
    return memory


@pytest.mark.parametrize("to", [make, make_listed])
def test_check_mode_looks_at_the_device(
    cupy: FakeCuPy,
    events: list[Any],
    on_device: dict[int, np.ndarray],
    driver: FakeDriver,
    to: Callable[..., dict[str, Any]],
) -> None:
    host = to()
    given = on(cupy, host)
    for number, (name, array) in enumerate(given.items()):
        array.data.ptr = (number + 1) << 24
        on_device[array.data.ptr] = host[name]
    pages = "block_table" if "block_table" in host else "kv_indices"
    cumla.mla_attention(**given)
    plan = plan_of(given)
    plan.run(**inputs_of(given))
    cumla.mla_attention(**given, plan=plan)
    taken(events)

    used = (1, 2) if pages == "block_table" else 3
    host[pages][used] = 6
    where = "block_table[1, 2]" if pages == "block_table" else "kv_indices[3]"
    for call in (
        lambda: cumla.mla_attention(**given),
        lambda: plan.run(**inputs_of(given)),
        lambda: cumla.mla_attention(**given, plan=plan),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).startswith(f"{where}: needs a page number from 0 to 5, got 6")
    host[pages][used] = 5
    on_device[given["kv_lens"].data.ptr] = np.array([5, 129], np.int32)
    with pytest.raises(ValueError, match=r"^kv_lens\[1\]: needs what the plan was updated with"):
        cumla.mla_attention(**given, plan=plan)
    on_device[given["kv_lens"].data.ptr] = np.array([5, -1], np.int32)
    with pytest.raises(ValueError, match=r"^kv_lens\[1\]: needs a length from 0"):
        plan.update(**lengths_of(given))
    assert taken(events, "launch") == []


# --- prepare --------------------------------------------------------------------------------------


def test_prepare_loads_these_kernels(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec.entry))
    for dtypes, page_sizes, wanted in (
        (("bfloat16",), (64, 128), {"bfloat16"}),
        (("float16",), (1, 48), {"float16_rows", "float16_boxes"}),
        (("bfloat16", "float16"), (64,), {"bfloat16", "float16"}),
    ):
        loaded.clear()
        cumla.prepare(dtypes=dtypes, page_sizes=page_sizes)
        found = {name for name in loaded if name.startswith("mla_attention_")}
        assert found == {"mla_attention_schedule", *(f"mla_attention_{form}" for form in wanted)}
