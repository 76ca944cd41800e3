# SPDX-License-Identifier: Apache-2.0
"""cumla.transformers on a GPU that is not there: what the layers of a step share, and launch."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cumla.core import frameworks
from cumla.launch import kernel
from tests.compat.torch_gpu import TorchGpu, torch_gpu
from tests.fake_cuda import FakeBindings, FakeDriver
from tests.transformers.test_attention import (
    MODULE,
    and_masks,
    causal_mask_function,
    ours,
    overlay,
)

torch = pytest.importorskip("torch")
python_dispatch = pytest.importorskip("torch.utils._python_dispatch")

__all__ = ["ours"]  # the fixture

HEADS, KV_HEADS, COLUMNS = 4, 2, 16


class Operations(python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Counts what PyTorch computes or allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if not function.is_view:
            self.count[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


@pytest.fixture
def gpu(bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    gpu = TorchGpu()
    monkeypatch.setitem(frameworks.framework_of_type, torch.Tensor, gpu)
    return gpu


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def layer(tokens: int, batch: int = 3, q_len: int = 1, dtype: Any = torch.bfloat16) -> list[Any]:
    """Queries with tokens before heads in memory, and a dynamic cache."""
    q = torch.randn(batch, q_len, HEADS, COLUMNS, dtype=dtype).transpose(1, 2)
    return [q, *(torch.randn(batch, KV_HEADS, tokens, COLUMNS, dtype=dtype) for _ in range(2))]


def padded(ours: Any, tokens: int, counts: tuple[int, ...] = (0, 4, 7)) -> Any:
    given = torch.ones(len(counts), tokens)
    for request, count in enumerate(counts):
        given[request, :count] = 0
    return ours.mask(len(counts), 1, tokens, tokens - 1, 0, causal_mask_function, given)


ATTEND = "attention_few_bfloat16_64_64"
SCHEDULE = "mla_attention_schedule"


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_step_schedules_once_and_a_layer_allocates_its_output(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings, is_padded: bool
) -> None:
    """Also from one step to the next, while the cache grows, up to a power of two of rows."""
    for tokens in range(11, 16):
        bounds = padded(ours, tokens) if is_padded else None
        bindings.launched.clear()
        with Operations() as operations:
            for place in range(5):
                q, k, v = layer(tokens)
                operations.count.clear()
                ours.attention(MODULE, q, k, v, bounds, scaling=0.25)
                found = dict(operations.count)
                if place:
                    assert found == {"new_empty": 1}
                elif tokens > 11:
                    of_mask = {"sub": 1, "add_": 1} if is_padded else {}
                    assert found == {"add": 1, "new_empty": 1, **of_mask}
        assert bindings.entries == [SCHEDULE, *[ATTEND] * 5]


@pytest.mark.usefixtures("no_gradients")
def test_nothing_is_packed_anew_as_a_cache_grows(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    real = ours._Moving
    monkeypatch.setattr(ours, "_Moving", lambda *a: packed.append(a[0]) or real(*a))
    for tokens in range(33, 64):  # of 6 rows each: between two powers of two
        ours.attention(MODULE, *layer(tokens), None)
    assert len(packed) == 2 * 2  # the schedule and attention, for up to 256 and 512 rows


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_launches_take_the_addresses_of_each_layer(
    ours: Any,
    gpu: TorchGpu,
    bindings: FakeBindings,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    sinks: bool,
) -> None:
    """Their parameters are those of a launch that is made anew, with descriptors of a driver."""

    def encode(kind: Any, axes: Any, address: int, *layout: Any) -> tuple[int, Any]:
        text = address.to_bytes(8, "little") + hashlib.sha512(repr(layout).encode()).digest()
        held = ctypes.create_string_buffer(text, 128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(held))

    def note(config: Any, handle: int, pointers: int, extra: int) -> tuple[int]:
        (first,) = (ctypes.c_void_p * 1).from_address(pointers)
        launched.append(ctypes.string_at(first, size))
        return (0,)

    launched: list[bytes] = []
    size = 0
    monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", encode)
    options = {"sliding_window": window, "s_aux": torch.randn(HEADS) if sinks else None}
    ours.attention(MODULE, *layer(12), None, **options)
    (layers,) = ours._STEPS._of_shape.values()
    monkeypatch.setattr(bindings, "cuLaunchKernelEx", note)
    kernel.import_driver.cache_clear()
    for launch in layers._attend:
        assert launch._launch is not None
        size = len(launch._words) * 8
        launch._launch._launch = note
        for begin in (1 << 20, 5 << 30):
            places = tuple(begin + 4096 * i for i in range(5))
            launch(places)
            launch._template.at(dict(zip(ours._MOVED, places, strict=True)), 0)()
            assert launched[-1] == launched[-2]
        assert launched[-1] != launched[-3]


@pytest.mark.usefixtures("no_gradients")
def test_a_mask_is_known_by_itself(ours: Any, gpu: TorchGpu, bindings: FakeBindings) -> None:
    """Not by where it lies; and not after it was written to, as far as PyTorch tells."""

    def schedules(bounds: Any) -> int:
        bindings.launched.clear()
        for _ in range(2):
            ours.attention(MODULE, *layer(12), bounds)
        return bindings.entries.count(SCHEDULE)

    bounds = padded(ours, 12)
    assert schedules(bounds) == 1
    assert schedules(bounds) == 0
    assert schedules(padded(ours, 12)) == 1
    assert schedules(None) == 1
    assert schedules(bounds) == 1
    bounds.add_(1)
    assert schedules(bounds) == 1


@pytest.mark.usefixtures("no_gradients")
def test_layers_with_and_without_windows_keep_their_schedules(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings
) -> None:
    for _ in range(3):
        for window in (None, 4):
            ours.attention(MODULE, *layer(12), None, sliding_window=window)
    assert bindings.entries.count(SCHEDULE) == 2


@pytest.mark.usefixtures("no_gradients")
def test_streams_and_threads_share_nothing(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings
) -> None:
    def attend() -> None:
        with torch.no_grad():
            ours.attention(MODULE, *layer(12), None)

    for stream in (0, 5, 0, 5):
        gpu.stream = stream
        attend()
    launched = [(launch.entry, launch.stream) for launch in bindings.launched]
    assert launched == [
        *((name, stream) for stream in (0, 5) for name in (SCHEDULE, ATTEND)),
        *((ATTEND, stream) for stream in (0, 5)),
    ]
    bindings.launched.clear()
    thread = threading.Thread(target=attend)
    thread.start()
    thread.join()
    assert bindings.entries == [SCHEDULE, ATTEND]


@pytest.mark.usefixtures("no_gradients")
def test_a_capture_depends_on_no_eager_call(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings, driver: FakeDriver
) -> None:
    ours.attention(MODULE, *layer(12), None)
    bindings.launched.clear()
    driver.capturing.add(0)
    for _ in range(2):
        ours.attention(MODULE, *layer(12), None)
    assert bindings.entries == 2 * [SCHEDULE, ATTEND]
    driver.capturing.clear()
    ours.attention(MODULE, *layer(12), None)
    assert bindings.entries == [ATTEND]


@pytest.mark.usefixtures("no_gradients")
def test_the_device_is_current_before_its_stream_is_looked_at(
    ours: Any, gpu: TorchGpu, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without a context, or with that of another GPU, has another default stream."""
    current = []
    monkeypatch.setattr(driver, "enter_device", lambda device: not current.append(device))
    monkeypatch.setattr(driver, "enter_primary", current.append)
    monkeypatch.setattr(driver, "leave_device", current.pop)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: not current)
    for _ in range(2):
        ours.attention(MODULE, *layer(12), None)
    assert len(ours._STEPS._of_form) == 1 and not current


@pytest.mark.usefixtures("no_gradients")
def test_memory_is_bounded_and_no_cache_is_kept(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings
) -> None:
    held = []
    for batch in range(1, 20):
        arrays = layer(12, batch)
        held += [weakref.ref(array) for array in arrays]
        ours.attention(MODULE, *arrays, None)
        del arrays
    gc.collect()
    assert not any(one() is not None for one in held)
    assert len(ours._STEPS._of_shape) == len(ours._STEPS._of_form) == ours._MOST_LAYERS


@pytest.mark.usefixtures("no_gradients")
def test_what_layers_share_goes_with_their_model(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings
) -> None:
    """Another model that began a later step of the same shape keeps it."""
    first, second = torch.nn.Module(), torch.nn.Module()
    ours.attention(first, *layer(12), None)
    (shared,) = ours._STEPS._of_shape.values()
    held = weakref.ref(shared)
    ours.attention(second, *layer(13), None)  # begins a step
    ours.attention(first, *layer(13, 4), None)
    assert len(ours._STEPS._of_shape) == 2
    del first, shared
    assert list(ours._STEPS._of_shape.values()) == [held()]
    del second
    assert held() is None and not ours._STEPS._of_shape and not ours._STEPS._of_form


@pytest.mark.usefixtures("no_gradients")
def test_a_step_that_failed_is_computed_again(
    ours: Any, gpu: TorchGpu, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    ours.attention(MODULE, *layer(12), None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "add", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            ours.attention(MODULE, *layer(13), None)
    bindings.launched.clear()
    for tokens in (13, 12):
        ours.attention(MODULE, *layer(tokens), None)
    assert bindings.entries == 2 * [SCHEDULE, ATTEND]


@pytest.mark.usefixtures("no_gradients")
def test_the_check_mode_looks_at_each_call(
    ours: Any, gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ours, "check_mode", lambda: True)
    monkeypatch.setattr("cumla.attention", lambda *a, **k: seen.append(k) or (_ for _ in ()))
    with pytest.raises(AttributeError):
        ours.attention(MODULE, *layer(12), None)
    assert seen


def test_gradients_are_refused(ours: Any, gpu: TorchGpu) -> None:
    q, k, v = layer(12)
    with torch.no_grad():
        ours.attention(MODULE, q, k, v, None)
    with pytest.raises(RuntimeError, match=r"^q: needs a tensor that requires no gradient"):
        ours.attention(MODULE, q.requires_grad_(), k, v, None)


def test_modes_of_inference_may_change(ours: Any, gpu: TorchGpu, bindings: FakeBindings) -> None:
    for tokens, inference in ((12, True), (13, False), (14, True)):
        with torch.inference_mode(inference), torch.no_grad():
            ours.attention(MODULE, *layer(tokens), None)
    assert bindings.entries == 3 * [SCHEDULE, ATTEND]


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("q_len", "window"), [(1, None), (1, 5), (3, None)])
def test_results(
    ours: Any, q_len: int, window: int | None, is_padded: bool, sinks: bool, dtype: str
) -> None:
    """Two layers in each step are computed as on the CPU; one cache has tokens before heads."""
    torch.manual_seed(0)
    calls, found = [], []
    with torch_gpu():
        for tokens in (10, 11):
            given = torch.ones(3, tokens)
            given[1, :4] = given[2, : tokens - q_len] = 0
            function = causal_mask_function
            if window is not None:
                function = and_masks(overlay(window), causal_mask_function)
            of_mask = (3, q_len, tokens, tokens - q_len, 0, function, given if is_padded else None)
            bounds = ours.mask(*of_mask)
            assert (bounds is not None) == is_padded
            for place in range(2):
                q, k, v = layer(tokens, 3, q_len, getattr(torch, dtype))
                if place and tokens == 11:
                    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
                scores = torch.randn(HEADS) if sinks else None
                options = {"scaling": 0.25, "sliding_window": window, "s_aux": scores}
                calls.append(((MODULE, q, k, v, bounds), options))
                found.append(ours.attention(*calls[-1][0], **options)[0])
        assert ours._STEPS._of_form
    for out, (arrays, options) in zip(found, calls, strict=True):
        wanted, _ = ours.attention(*arrays, **options)
        error = 2e-6 if dtype == "float32" else 1e-2
        torch.testing.assert_close(out, wanted, atol=error, rtol=error)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_layer_is_compiled_without_breaks(ours: Any, is_padded: bool) -> None:
    pytest.importorskip("cumla.torch")

    def attend(q: Any, k: Any, v: Any, bounds: Any) -> Any:
        return ours.attention(MODULE, q, k, v, bounds, scaling=0.25)[0]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for tokens in (11, 12, 13):
        arrays = (*layer(tokens), padded(ours, tokens) if is_padded else None)
        assert torch.equal(compiled(*arrays), attend(*arrays))
