# SPDX-License-Identifier: Apache-2.0
"""Plans, their buffers and streams, check mode, and what is loaded when: no GPU is needed.

GPU arrays are those of the stand-in for CuPy in `tests.mla.test_mla_errors`; nothing is launched.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core import arrays, frameworks, workspace
from cumla.core.arrays import ArrayView
from cumla.launch import KernelSpec
from cumla.launch.split import plan as mla_plan
from cumla.mla import call as mla_call
from cumla.mla import checks
from cumla.mla import decode as mla
from tests.fake_cuda import FakeCuPy, FakeDriver
from tests.mla.test_mla_errors import make

NBYTES = 1 << 28


class Log:
    """What plans did to streams and kernels, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def taken(self, *kinds: str) -> list[tuple[Any, ...]]:
        """Give the events of some kinds, and forget all."""
        found = [event for event in self.events if event[0] in kinds]
        self.events.clear()
        return found


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def driver(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, log: Log) -> FakeDriver:
    """The same, with a log of the order of streams and of what is kept."""
    monkeypatch.setattr(
        workspace,
        "order_streams",
        lambda before, after: log.events.append(("order", before, after)),
    )
    monkeypatch.setattr(
        workspace,
        "keep_until_event",
        lambda owner, event, device, stream: log.events.append(
            ("keep", owner, event, device, stream)
        ),
    )
    monkeypatch.setattr(workspace, "_given", type(workspace._given)())
    return driver


@pytest.fixture
def cupy(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with addresses of its arrays' own."""
    cupy.cuda.Stream.null = cupy.cuda.Stream.from_external(None)
    addresses = itertools.count(1)

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        array = cupy.ndarray(shape, dtype)
        array.data.ptr = next(addresses) << 32
        return array

    monkeypatch.setattr(cupy, "empty", empty)
    return cupy


@pytest.fixture
def on_gpu(cupy: Any) -> dict[str, Any]:
    """The arguments of `make` on the GPU."""
    return {name: cupy.like(array) for name, array in make().items()}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Log which kernels are loaded and launched."""

    def load(spec: KernelSpec, device: int, *, capturing: Any) -> KernelSpec:
        log.events.append(("load", spec.stem))
        return spec

    def prepare(spec: KernelSpec, *_: object) -> Callable[[], None]:
        return lambda: log.events.append(("launch", spec.stem))

    monkeypatch.setattr(mla_call, "load", load)
    for name in ("prepare_schedule", "prepare_decode"):
        monkeypatch.setattr(mla, name, prepare)


def plan_for(arguments: dict[str, Any], **options: Any) -> cumla.MLADecodePlan:
    return cumla.MLADecodePlan.from_arrays(arguments["q"], arguments["kv_cache"], **options)


KERNELS = ["mla_schedule", "mla_decode"]  # of 32 query rows


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_everything_is_loaded_before_the_first_launch(on_gpu: dict[str, Any], log: Log) -> None:
    cumla.mla_decode(**on_gpu)
    loaded = [("load", stem) for stem in KERNELS]
    assert log.taken("load", "launch") == loaded + [("launch", stem) for stem in KERNELS]

    plan = plan_for(on_gpu)
    plan.update(on_gpu["cache_seqlens"])
    assert log.taken("load", "launch") == [*loaded, ("launch", "mla_schedule")]
    plan.update(on_gpu["cache_seqlens"])
    plan.run(**on_gpu)
    assert [stem for _, stem in log.taken("load", "launch")] == ["mla_schedule", *KERNELS[1:]]


def test_nothing_is_launched_or_allocated_when_the_last_kernel_cannot_be_loaded(
    on_gpu: dict[str, Any], cupy: Any, kernels: None, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(on_gpu)

    def fail(spec: KernelSpec, *_: object, **__: object) -> KernelSpec:
        if spec.stem == KERNELS[-1]:
            raise cumla.NotPreparedError("cold")
        return spec

    monkeypatch.setattr(mla_call, "load", fail)
    monkeypatch.setattr(cupy, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(cumla.NotPreparedError):
        cumla.mla_decode(**on_gpu)
    with pytest.raises(cumla.NotPreparedError):
        plan.update(on_gpu["cache_seqlens"])
    assert log.events == []


@pytest.mark.usefixtures("kernels")
def test_calls_of_one_shape_share_their_key(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[mla_plan.MLADecodeKey] = []
    prepare = mla.prepare_schedule

    def note(kernel: Any, key: Any, *rest: Any) -> Any:
        keys.append(key)
        return prepare(kernel, key, *rest)

    monkeypatch.setattr(mla, "prepare_schedule", note)
    for causal in (True, True, False):
        cumla.mla_decode(**on_gpu, causal=causal)
    assert keys[0] is keys[1]
    assert keys[2].causal is False


# --- plans that are pinned to a kernel -----------------------------------------------------------


FEW_ROWS = {"q": np.zeros((2, 1, 16, 576), ml_dtypes.bfloat16)}
PINNED = {
    "swapped": ("mla_decode_swapped", "mla_decode_bfloat16_swapped"),
    "one_tile": ("mla_decode", "mla_decode_bfloat16"),
    "shared_blocks": ("mla_decode", "mla_decode_bfloat16_shared_blocks"),
}


@pytest.mark.parametrize("mode", [{}, {"batch_invariant": True, "max_seqlen": 4096}], ids=str)
@pytest.mark.parametrize("variant", PINNED)
def test_a_plan_loads_and_launches_the_kernel_that_it_is_pinned_to(
    cupy: Any, kernels: None, log: Log, monkeypatch: pytest.MonkeyPatch, variant: str, mode: Any
) -> None:
    arguments = {name: cupy.like(array) for name, array in make(**FEW_ROWS).items()}
    stem, entry = PINNED[variant]
    entries: list[str] = []
    load = mla_call.load

    def note(spec: KernelSpec, *rest: Any, **options: Any) -> Any:
        entries.append(spec.entry)
        return load(spec, *rest, **options)

    monkeypatch.setattr(mla_call, "load", note)
    plans = [
        plan_for(arguments, variant=variant, **mode),
        cumla.MLADecodePlan(2, 1, 16, like=arguments["q"], variant=variant, **mode),
    ]
    usual = plan_for(arguments, **mode)
    assert (usual.key.pinned, usual.key.variant) == (None, "swapped")
    for plan in plans:
        assert (plan.key.pinned, plan.key.variant) == (variant, variant)
        assert plan.key is plans[0].key
        assert plan.key.layout == usual.key.layout
        log.taken()
        plan.update(arguments["cache_seqlens"])
        plan.run(**arguments)
        cumla.mla_decode(**arguments, plan=plan, batch_invariant=bool(mode))
        names = [name for _, name in log.taken("launch")]
        assert names == ["mla_schedule", stem, stem]
        assert entries[-1] == entry
    cumla.mla_decode(**arguments)  # a call of its own is that of the shape
    assert entries[-1] == "mla_decode_bfloat16_swapped"


@pytest.mark.parametrize("variant", [None, *PINNED])
def test_a_pinned_plan_on_the_cpu(variant: str | None) -> None:
    """Checked, and of no effect."""
    arguments = make(**FEW_ROWS)
    plan = plan_for(arguments, variant=variant)
    plan.update(arguments["cache_seqlens"])
    for one, other in zip(plan.run(**arguments), cumla.mla_decode(**arguments), strict=True):
        np.testing.assert_array_equal(one, other)
    assert plan.key.variant == (variant or "swapped")


# --- batch-invariant plans -----------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, kernels: None) -> list[tuple[str, Any]]:
    """The schedule kernels that are prepared, with their keys."""
    found: list[tuple[str, Any]] = []
    prepare = mla.prepare_schedule

    def note(kernel: Any, key: Any, *rest: Any) -> Any:
        found.append((kernel.entry, key))
        return prepare(kernel, key, *rest)

    monkeypatch.setattr(mla, "prepare_schedule", note)
    return found


def test_a_batch_invariant_call_has_room_for_what_its_table_can_hold(
    on_gpu: dict[str, Any], prepared: list[tuple[str, Any]]
) -> None:
    for _ in range(2):
        cumla.mla_decode(**on_gpu, batch_invariant=True)
    cumla.mla_decode(**on_gpu)
    entries, keys = zip(*prepared, strict=True)
    assert entries == ("mla_schedule_invariant", "mla_schedule_invariant", "mla_schedule")
    assert keys[0] is keys[1]
    assert [(key.batch_invariant, key.max_blocks) for key in keys[1:]] == [(True, 3), (False, 0)]


def test_a_batch_invariant_plan_has_room_for_its_longest_request(
    on_gpu: dict[str, Any], prepared: list[tuple[str, Any]]
) -> None:
    shape = (2, 2, 16)
    for max_seqlen, max_blocks, parts in ((1, 1, 2), (1024, 16, 2), (1025, 17, 4), (4096, 64, 8)):
        mode = {"batch_invariant": True, "max_seqlen": max_seqlen}
        nbytes = cumla.MLADecodePlan.workspace_bytes(*shape, **mode, sm_count=132)
        for plan in (
            plan_for(on_gpu, **mode),
            cumla.MLADecodePlan(*shape, like=on_gpu["q"], **mode),
        ):
            assert plan.key.max_blocks == max_blocks
            assert plan.key.parts == parts
            assert plan.key.layout.nbytes == nbytes
            plan.update(on_gpu["cache_seqlens"])
            assert prepared[-1] == ("mla_schedule_invariant", plan.key)
            plan.run(**on_gpu)
            cumla.mla_decode(**on_gpu, plan=plan, batch_invariant=True)


def test_the_multiprocessors_do_not_matter_to_batch_invariant_parts() -> None:
    mode = {"batch_invariant": True, "max_seqlen": 100_000}
    sizes = [
        cumla.MLADecodePlan.workspace_bytes(3, 1, 16, **mode, sm_count=sm_count)
        for sm_count in (1, 78, 132)
    ]
    assert len(set(sizes)) == 1


@pytest.mark.usefixtures("kernels")
def test_more_pieces_than_a_grid_has_thread_blocks(on_gpu: dict[str, Any], log: Log) -> None:
    """65535 along y: with 32 rows, 65535 * 1024 tokens of one request, or half of two."""
    log.taken()
    most = 65535 // 2 * 1024
    make_plans: list[Callable[[int], Any]] = [
        lambda n: cumla.MLADecodePlan.workspace_bytes(
            2, 2, 16, batch_invariant=True, max_seqlen=n, sm_count=132
        ),
        lambda n: plan_for(make(), batch_invariant=True, max_seqlen=n),
    ]
    message = (
        r"^batch_invariant: needs at most 65535 pieces of requests, got 65536: 2 requests of up to "
        r"33553472 tokens, cut every 1024; lower a plan's max_seqlen, pass fewer columns of"
    )
    for make_plan in make_plans:
        make_plan(most)
        with pytest.raises(ValueError, match=message):
            make_plan(most + 1)
    with pytest.raises(ValueError, match=message):
        plan_for(on_gpu, batch_invariant=True, max_seqlen=most + 1)
    wide = np.broadcast_to(np.zeros((2, 1), np.int32), (2, most // 64 + 1))
    with pytest.raises(ValueError, match=r"^block_table: needs contiguous rows"):
        cumla.mla_decode(**make(block_table=wide), batch_invariant=True)
    table = type(on_gpu["q"])(wide.shape, "int32")
    with pytest.raises(ValueError, match=message):
        cumla.mla_decode(**on_gpu | {"block_table": table}, batch_invariant=True)
    assert log.events == []


@pytest.mark.parametrize("planned", [False, True])
def test_batch_invariant_on_the_cpu(planned: bool) -> None:
    arguments = make()
    want = cumla.mla_decode(**arguments)
    mode: dict[str, Any] = {"batch_invariant": True}
    if planned:
        mode["plan"] = plan_for(arguments, batch_invariant=True, max_seqlen=130)
        mode["plan"].update(arguments["cache_seqlens"])
    for got in (
        cumla.mla_decode(**arguments, **mode),
        cumla.reference.mla_decode(*arguments.values(), batch_invariant=True),
    ):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("checked")
def test_requests_beyond_max_seqlen_are_found() -> None:
    plan = plan_for(make(), batch_invariant=True, max_seqlen=65)
    plan.update(np.array([5, 130], np.int32))
    with pytest.raises(ValueError, match=r"^cache_seqlens\[1\]: .*, 128, got 130; .*max_seqlen"):
        plan.run(**make())


def test_requests_beyond_max_seqlen_are_cut_off_on_the_cpu_too() -> None:
    """At the next multiple of 64 tokens, as on the GPU."""
    plan = plan_for(make(), batch_invariant=True, max_seqlen=65)
    plan.update(np.array([5, 130], np.int32))
    cut = make(cache_seqlens=np.array([5, 128], np.int32))
    for one, other in zip(plan.run(**make()), cumla.mla_decode(**cut), strict=True):
        np.testing.assert_array_equal(one, other)


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_another_stream_goes_behind_the_last_one(on_gpu: dict[str, Any], log: Log) -> None:
    plan = plan_for(on_gpu, stream=3)
    lengths = on_gpu["cache_seqlens"]
    log.taken()
    for stream in (3, 3, 5, 5, 7, 3):
        plan.update(lengths, stream=stream)
    orders = [("order", 3, 5), ("order", 5, 7), ("order", 7, 3)]
    assert log.taken("order") == orders


@pytest.mark.usefixtures("kernels")
def test_the_order_comes_before_the_launch(on_gpu: dict[str, Any], log: Log) -> None:
    """Of the first update, too: work on the allocator's stream may still use the memory."""
    plan = plan_for(on_gpu)
    log.taken()
    plan.update(on_gpu["cache_seqlens"], stream=5)
    assert log.taken("order", "launch") == [("order", 0, 5), ("launch", "mla_schedule")]


@pytest.mark.usefixtures("kernels")
def test_captures_are_left_out_of_the_order(
    on_gpu: dict[str, Any], driver: FakeDriver, log: Log
) -> None:
    """Warmed up on 3, captured on 5, then eager on 7: behind 3, and never behind the capture."""
    plan = plan_for(on_gpu, stream=3)
    lengths = on_gpu["cache_seqlens"]
    plan.update(lengths, stream=3)
    driver.capturing.add(5)
    plan.update(lengths, stream=5)
    out, lse = type(lengths)((2, 2, 16, 512), ml_dtypes.bfloat16), type(lengths)((2, 16, 2), "f4")
    plan.run(**on_gpu, out=out, lse=lse, stream=5)
    assert log.taken("order") == []
    plan.update(lengths, stream=7)
    assert log.taken("order") == [("order", 3, 7)]
    driver.capturing.add(7)
    plan.update(lengths, stream=8)  # an event on 7 would draw 8 into its capture
    assert log.taken("order") == []


@pytest.mark.usefixtures("kernels")
def test_a_stream_that_is_gone_is_reported_and_no_error(
    on_gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise cumla.CumlaError("cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE (400)")

    monkeypatch.setattr(workspace, "order_streams", refuse)
    plan = plan_for(on_gpu, stream=3)
    plan.update(on_gpu["cache_seqlens"], stream=5)
    assert "stream 0x3, on which a plan was used last, is not there any more" in caplog.text
    assert plan.serves(5)
    del plan  # an error in a finalizer would be reported as a warning, which fails the test
    gc.collect()


@pytest.mark.usefixtures("kernels")
def test_the_buffer_is_kept_until_another_stream_has_passed(
    on_gpu: dict[str, Any], log: Log
) -> None:
    plan = plan_for(on_gpu, stream=3)
    plan.update(on_gpu["cache_seqlens"], stream=5)
    address = plan._memory.buffer.ptr
    log.taken()
    del plan
    gc.collect()
    ((_, owner, event, device, stream),) = log.taken("keep")
    assert (owner.data.ptr, event, device, stream) == (address, 1, 0, 5)


@pytest.mark.usefixtures("kernels")
def test_each_use_on_another_stream_is_noted_behind_its_launches(
    on_gpu: dict[str, Any], driver: FakeDriver, log: Log
) -> None:
    plan = plan_for(on_gpu, stream=3)
    lengths = on_gpu["cache_seqlens"]
    out, lse = type(lengths)((2, 2, 16, 512), ml_dtypes.bfloat16), type(lengths)((2, 16, 2), "f4")
    for stream in (3, 5):
        plan.update(lengths, stream=stream)
        for _ in range(2):
            plan.run(**on_gpu, out=out, lse=lse, stream=stream)
    assert driver.recorded == [5, 5, 5]
    assert driver.destroyed == [1, 2]


@pytest.mark.usefixtures("kernels")
def test_on_its_own_stream_the_buffer_goes_back_at_once(
    on_gpu: dict[str, Any], driver: FakeDriver, log: Log
) -> None:
    """The allocator reuses it in the order of that stream; what a graph reads is the caller's."""
    plan = plan_for(on_gpu, stream=3)
    plan.update(on_gpu["cache_seqlens"], stream=3)
    driver.capturing.add(5)
    plan.update(on_gpu["cache_seqlens"], stream=5)
    del plan
    gc.collect()
    assert log.taken("keep") == []


# --- runs that were found in order before --------------------------------------------------------


@pytest.fixture
def prepared_for(monkeypatch: pytest.MonkeyPatch, kernels: None, log: Log) -> list[Any]:
    """Views, scale and stream of each attention that is prepared."""
    found: list[Any] = []

    def prepare(spec: KernelSpec, key: Any, buffer: int, *rest: Any) -> Callable[[], None]:
        found.append(rest)
        return lambda: log.events.append(("launch", rest))

    monkeypatch.setattr(mla, "prepare_decode", prepare)
    return found


@pytest.fixture
def whole(on_gpu: dict[str, Any], cupy: Any) -> dict[str, Any]:
    """All that a run can be given, each at an address of its own."""
    outputs = {
        "out": cupy.ndarray((2, 2, 16, 512), ml_dtypes.bfloat16),
        "lse": cupy.ndarray((2, 16, 2), "float32"),
    }
    arguments = on_gpu | outputs
    for number, array in enumerate(arguments.values()):
        array.data.ptr = (number + 1) << 24
    return arguments


def test_a_run_is_prepared_once_and_launched_each_time(
    whole: dict[str, Any], prepared_for: list[Any], log: Log
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    log.taken()
    for scale in (None, 576**-0.5, np.float64(576**-0.5)):
        result = plan.run(**whole, softmax_scale=scale)
        assert result.out is whole["out"]
        assert result.lse is whole["lse"]
        cumla.mla_decode(**whole, plan=plan, softmax_scale=scale)
    (once,) = prepared_for
    assert log.taken("launch") == [("launch", once)] * 6


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens", "out", "lse"])
def test_a_ready_run_sees_another_address(
    whole: dict[str, Any], prepared_for: list[Any], log: Log, name: str
) -> None:
    """Under the same object; and both are ready then."""
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    log.taken()
    address = whole[name].data.ptr
    for moved in (0, 1 << 20, 0, 1 << 20):
        whole[name].data.ptr = address + moved
        plan.run(**whole)
    one, other = prepared_for
    launched = [rest for _, rest in log.taken("launch")]
    assert all(a is b for a, b in zip(launched, (one, other, one, other), strict=True))
    if name != "cache_seqlens":  # no parameter of attention
        assert one != other


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("kv_cache", "shape", (5, 64, 1, 576)),
        ("kv_cache", "strides", (2 * 64 * 1152, 1152, 1152, 2)),
        ("block_table", "shape", (2, 2)),
        ("block_table", "strides", (16, 4)),
        ("q", "strides", (1152 * 64, 1152 * 32, 1152, 2)),
        ("out", "dtype", np.dtype("float32")),
        ("out", "strides", (4096 * 16, 1024 * 16, 1024, 2)),
        ("lse", "strides", (512, 8, 4)),
    ],
)
def test_a_ready_run_sees_another_layout(
    whole: dict[str, Any], prepared_for: list[Any], name: str, attribute: str, value: Any
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    before = getattr(whole[name], attribute)
    assert before != value
    setattr(whole[name], attribute, value)
    if attribute == "dtype":
        whole[name].strides = tuple(2 * stride for stride in whole[name].strides)
    plan.run(**whole)
    assert len(prepared_for) == 2
    assert prepared_for[0] != prepared_for[1]


@pytest.mark.parametrize(
    ("name", "attribute", "value", "message"),
    [
        ("q", "dtype", np.dtype("float16"), "dtype"),
        ("q", "shape", (2, 2, 15, 576), "^(q|plan|out): "),
        ("cache_seqlens", "shape", (3,), "^cache_seqlens: "),
        ("cache_seqlens", "dtype", np.dtype("int64"), "^cache_seqlens: "),
        ("out", "shape", (2, 2, 16, 511), "^out: "),
        ("lse", "dtype", np.dtype("float16"), "^lse: "),
    ],
)
def test_a_ready_run_refuses_what_does_not_fit_any_more(
    whole: dict[str, Any],
    prepared_for: list[Any],
    log: Log,
    name: str,
    attribute: str,
    value: Any,
    message: str,
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    log.taken()
    setattr(whole[name], attribute, value)
    with pytest.raises((TypeError, ValueError), match=message):
        plan.run(**whole)
    assert log.events == []


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens", "out", "lse"])
def test_a_ready_run_sees_another_device_or_framework(
    whole: dict[str, Any], prepared_for: list[Any], log: Log, name: str
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    log.taken()
    whole[name].data.device_id = 1
    with pytest.raises(ValueError, match="CUDA device 1"):
        plan.run(**whole)
    host = np.zeros(whole[name].shape, whole[name].dtype)
    with pytest.raises((TypeError, ValueError), match=f"^{name if name != 'q' else 'kv_cache'}: "):
        plan.run(**whole | {name: host})
    assert log.events == []


def test_a_ready_run_sees_the_stream_and_the_scale(
    whole: dict[str, Any], prepared_for: list[Any], cupy: Any, log: Log
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    log.taken()
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x0, got a run on stream 0x5"):
        plan.run(**whole, stream=5)
    cupy.stream = 7
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x0, got a run on stream 0x7"):
        plan.run(**whole)
    plan.run(**whole, stream=0)
    assert len(prepared_for) == 1
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    plan.run(**whole, softmax_scale=0.5)
    with pytest.raises(TypeError, match=r"^softmax_scale: "):
        plan.run(**whole, softmax_scale=np.zeros(1))
    assert [(rest[-2], rest[-1]) for rest in prepared_for] == [
        (576**-0.5, 0),
        (576**-0.5, 7),
        (0.5, 7),
    ]


def test_a_ready_run_looks_once_check_mode_is_on(
    whole: dict[str, Any], prepared_for: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)

    def copy(view: ArrayView, stream: int) -> np.ndarray:
        raise KeyError("looked")

    monkeypatch.setattr(checks, "copy_to_host", copy)
    for value in ("0", ""):
        monkeypatch.setenv("CUMLA_CHECK", value)
        plan.run(**whole)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with pytest.raises(KeyError, match="looked"):
        plan.run(**whole)
    monkeypatch.delenv("CUMLA_CHECK")
    plan.run(**whole)
    assert len(prepared_for) == 1


def test_a_ready_run_of_arrays_that_a_glance_does_not_know(
    whole: dict[str, Any], prepared_for: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two frameworks: they are looked at in full, and known again by their views."""
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    monkeypatch.setattr(mla, "glance", lambda arrays: None)
    for shift in (0, 0, 1 << 20, 0):
        whole["q"].data.ptr += shift
        plan.run(**whole)
    assert len(prepared_for) == 2
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x0, got a run on stream 0x5"):
        plan.run(**whole, stream=5)


def test_a_ready_run_knows_pairs(
    whole: dict[str, Any], prepared_for: list[Any], cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in enumerate(("q", "kv_cache")):
        shape, dtype = whole[name].shape[:-1], whole[name].dtype
        whole[name] = tuple(cupy.ndarray((*shape, columns), dtype) for columns in (512, 64))
        for number, array in enumerate(whole[name]):
            array.data.ptr = (20 + 2 * place + number) << 24
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    with monkeypatch.context() as patch:
        patch.setattr(mla, "open_call", lambda *_, **__: pytest.fail("looked at all of them"))
        assert plan.run(**whole).out is whole["out"]
    assert len(prepared_for) == 1
    for name in ("q", "kv_cache"):
        whole[name][1].data.ptr += 1 << 20
        plan.run(**whole)
    assert len(prepared_for) == 3
    latent, rope = whole["q"]
    with pytest.raises(ValueError, match=r"^(q|kv_cache|block_table)"):
        plan.run(**whole | {"q": latent, "kv_cache": (rope, whole["kv_cache"][0])})


def test_a_ready_run_keeps_no_array_alive(
    whole: dict[str, Any], on_gpu: dict[str, Any], prepared_for: list[Any]
) -> None:
    plan = plan_for(whole)
    plan.update(whole["cache_seqlens"])
    plan.run(**whole)
    plan.run(**whole)
    seen = [weakref.ref(array) for array in whole.values()]
    whole.clear()
    on_gpu.clear()
    gc.collect()
    assert [reference() for reference in seen] == [None] * 6
    assert len(prepared_for) == 1


# --- shared workspaces ---------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_the_last_plan_that_was_updated_has_the_workspace(
    on_gpu: dict[str, Any], cupy: Any, log: Log
) -> None:
    memory = cupy.ndarray((NBYTES,), "uint8")
    a, b = plan_for(on_gpu, workspace=memory), plan_for(on_gpu, workspace=memory)
    lengths = on_gpu["cache_seqlens"]
    outputs = {
        "out": cupy.ndarray((2, 2, 16, 512), ml_dtypes.bfloat16),
        "lse": cupy.ndarray((2, 16, 2), "float32"),
    }
    a.update(lengths)
    for _ in range(2):
        a.run(**on_gpu, **outputs)  # the second of them needs no checks
    b.update(lengths)
    log.taken()
    message = (
        r"^plan: its workspace has been taken by another plan.*; call "
        r"plan\.update\(cache_seqlens\) again, .* a workspace of its own$"
    )
    for given in (outputs, {}):
        with pytest.raises(ValueError, match=message):
            a.run(**on_gpu, **given)
    with pytest.raises(ValueError, match=message):
        cumla.mla_decode(**on_gpu, plan=a)
    assert log.events == []
    b.run(**on_gpu)
    a.update(lengths)
    a.run(**on_gpu, **outputs)
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x0, got a run on stream 0x5"):
        a.run(**on_gpu, stream=5)
    with pytest.raises(ValueError, match=message):
        b.run(**on_gpu)
    del a
    gc.collect()
    b.update(lengths)
    b.run(**on_gpu)


@pytest.mark.usefixtures("kernels")
def test_plans_that_share_a_workspace_share_its_order(
    on_gpu: dict[str, Any], cupy: Any, log: Log
) -> None:
    memory = cupy.ndarray((NBYTES,), "uint8")
    a, b = plan_for(on_gpu, workspace=memory), plan_for(on_gpu, workspace=memory)
    a.update(on_gpu["cache_seqlens"], stream=5)
    log.taken()
    b.update(on_gpu["cache_seqlens"], stream=7)
    assert log.taken("order") == [("order", 5, 7)]
    del a
    gc.collect()
    assert log.taken("keep") == []  # b has it still
    del b
    gc.collect()
    assert [event[1:] for event in log.taken("keep")] == [(memory, 2, 0, 7)]


@pytest.mark.usefixtures("kernels")
def test_plans_with_buffers_of_their_own_do_not_meet(on_gpu: dict[str, Any]) -> None:
    a, b = plan_for(on_gpu), plan_for(on_gpu)
    a.update(on_gpu["cache_seqlens"])
    b.update(on_gpu["cache_seqlens"])
    a.run(**on_gpu)
    b.run(**on_gpu)


# --- where a plan lives --------------------------------------------------------------------------


def test_read_only_memory_is_no_workspace(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = cupy.ndarray((NBYTES,), "uint8")
    whole = frameworks._CuPy.views
    monkeypatch.setattr(
        frameworks._CuPy,
        "views",
        lambda *given: [view._replace(read_only=True) for view in whole(*given)],
    )
    with pytest.raises(TypeError, match=r"^workspace: .*read-only.*JAX.*; allocate it with CuPy"):
        cumla.MLADecodePlan(2, 2, 16, workspace=memory)


@pytest.mark.parametrize("of_numpy", [True, False])
def test_a_workspace_on_the_cpu_is_refused(of_numpy: bool) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    if not of_numpy:
        memory = pytest.importorskip("jax").numpy.asarray(memory)
    message = r"^workspace: needs an array on the GPU, got one on the CPU, .*; leave it out$"
    with pytest.raises(ValueError, match=message):
        cumla.MLADecodePlan(2, 2, 16, workspace=memory)
    with pytest.raises(ValueError, match=message):
        plan_for(make(), workspace=memory)


def test_places_that_differ(on_gpu: dict[str, Any], cupy: Any) -> None:
    there, host = cupy.ndarray((NBYTES,), "uint8"), np.zeros(NBYTES >> 8, np.uint8)
    elsewhere = cupy.ndarray((NBYTES,), "uint8", device=1)
    for changes, message in (
        ({"device": 1, "like": there}, r"^like: needs .*device 1 \(device=\), got .*device 0"),
        ({"device": 1, "workspace": there}, r"^workspace: needs .*device 1 \(device=\), got"),
        ({"like": host, "workspace": there}, r"^workspace: .*the CPU \(as like\), got .*device 0"),
        ({"like": there, "workspace": host}, r"^workspace: .*device 0 \(as like\), got .*the CPU"),
        ({"like": there, "workspace": elsewhere}, r"^workspace: .*device 0 .*, got .*device 1"),
    ):
        with pytest.raises(ValueError, match=message + r".*; let device, like and workspace name"):
            cumla.MLADecodePlan(2, 2, 16, **changes)
    with pytest.raises(ValueError, match=r"^workspace: .*the CPU \(as like\)"):
        plan_for(make(), workspace=there)
    with pytest.raises(ValueError, match=r"^workspace: .*device 0 \(as like\)"):
        plan_for(on_gpu, workspace=host)


@pytest.mark.parametrize("device", ["0", 0.0, True, np.zeros(1)])
def test_device_is_a_number(device: object) -> None:
    kind = type(device).__qualname__
    message = rf"^device: needs a CUDA ordinal, .*got \w+\.{kind}; pass its number$"
    with pytest.raises(TypeError, match=message):
        cumla.MLADecodePlan(1, 1, 16, device=device)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        cumla.prepare(device)  # type: ignore[arg-type]


def test_without_a_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def fail(*_: object) -> None:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    for name, value in (
        ("CUDARuntimeError", CUDARuntimeError),
        ("getDevice", fail),
        ("getDeviceProperties", fail),
    ):
        monkeypatch.setattr(cupy.cuda.runtime, name, value)
    for call in (
        lambda: cumla.MLADecodePlan(1, 1, 16),
        lambda: cumla.MLADecodePlan(1, 1, 16, device=0),
        lambda: cumla.MLADecodePlan.workspace_bytes(1, 1, 16),
        cumla.prepare,
    ):
        with pytest.raises(cumla.UnsupportedDeviceError, match="cudaErrorInsufficientDriver"):
            call()
    assert cumla.MLADecodePlan.workspace_bytes(1, 1, 16, sm_count=132) > 0


@pytest.mark.parametrize(
    ("sm_count", "error", "message"),
    [
        (0, ValueError, "a number from 1, got 0; leave it out to ask the current GPU"),
        (-132, ValueError, "a number from 1, got -132"),
        (132.0, TypeError, "an int, got float"),
    ],
)
def test_sm_count(sm_count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^sm_count: needs {message}"):
        cumla.MLADecodePlan.workspace_bytes(1, 1, 16, sm_count=sm_count)


def test_a_lone_string_is_no_sequence_of_dtypes() -> None:
    message = r"^dtypes: needs a sequence.*got the string 'bfloat16'; pass \('bfloat16',\)$"
    with pytest.raises(TypeError, match=message):
        cumla.prepare(dtypes="bfloat16")


# --- check mode ----------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")


def test_values_on_the_cpu_are_taken_as_they_are_without_check_mode() -> None:
    cumla.mla_decode(**make(cache_seqlens=np.array([5, 1000], np.int32)))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_values_on_the_cpu_are_checked(framework: str) -> None:
    convert = {
        "numpy": np.asarray,
        "torch": lambda a: arrays.from_numpy("torch", a),
        "jax": lambda a: arrays.from_numpy("jax", a),
    }[framework]
    if framework != "numpy":
        pytest.importorskip(framework)

    def call(**changes: Any) -> None:
        arguments = {name: convert(array) for name, array in make(**changes).items()}
        cumla.mla_decode(**arguments)
        plan = plan_for(arguments)
        plan.update(arguments["cache_seqlens"])
        plan.run(**arguments)

    call()
    with pytest.raises(ValueError, match=r"^cache_seqlens\[1\]: .*got 193"):
        call(cache_seqlens=np.array([192, 193], np.int32))
    table = np.array([[0, 9, 9], [0, 5, 6]], np.int32)
    with pytest.raises(ValueError, match=r"^block_table\[1, 2\]: .*got 6"):
        call(block_table=table)


@pytest.mark.usefixtures("checked")
def test_lengths_that_changed_since_the_update_on_the_cpu() -> None:
    arguments = make()
    plan = plan_for(arguments)
    plan.update(arguments["cache_seqlens"])
    plan.run(**arguments)
    message = r"^cache_seqlens\[1\]: .*updated with, 130, got 131; call plan\.update\("
    with pytest.raises(ValueError, match=message):
        plan.run(**arguments | {"cache_seqlens": np.array([5, 131], np.int32)})


@pytest.mark.usefixtures("checked", "kernels")
def test_lengths_that_changed_since_the_update_on_the_gpu(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's copy of them is read from its buffer, also by a run that was found in order."""
    plan = plan_for(on_gpu)
    plan.update(on_gpu["cache_seqlens"], stream=3)
    places = plan._memory.buffer.ptr + plan.key.layout.places
    held = [[1, 130], [0, 5]]  # requests, in the schedule's order, and their lengths

    def copy(view: ArrayView, stream: int) -> np.ndarray:
        assert (view.dtype, stream) == ("int32", 3)
        if view.ptr == places:
            assert (view.shape, view.strides) == ((2, 2), (8, 4))
            return np.array(held, np.int32)
        return np.array([5, 130] if view.shape == (2,) else [[0, 1, 2], [3, 4, 5]], np.int32)

    monkeypatch.setattr(checks, "copy_to_host", copy)
    outputs = {
        "out": type(on_gpu["q"])((2, 2, 16, 512), ml_dtypes.bfloat16),
        "lse": type(on_gpu["q"])((2, 16, 2), "float32"),
    }
    plan.run(**on_gpu, **outputs, stream=3)
    for place, found in (([1, 129], "129"), ([9, 130], "-1")):
        held[0] = place
        message = rf"^cache_seqlens\[1\]: .*updated with, {found}, got 130"
        with pytest.raises(ValueError, match=message):
            plan.run(**on_gpu, **outputs, stream=3)
    cumla.mla_decode(**on_gpu, **outputs, stream=3)  # without a plan there is nothing to compare


def test_scales_at_the_ends_keep_scores_in_float32() -> None:
    """Ordinary 16-bit inputs, up to the outliers of 1e4 on every column, stay finite and normal."""
    low, high = checks._SCALES
    assert checks.checked_scale(low) == low
    assert checks.checked_scale(high) == high
    largest = 576 * 1e4**2 * high * np.log2(np.e)
    assert largest < np.finfo(np.float32).max
    smallest = 1e-17 * low * np.log2(np.e)
    assert smallest > np.finfo(np.float32).tiny
