# SPDX-License-Identifier: Apache-2.0
"""Arrays of every framework, on the CPU and, with a driver and a CuPy that pretend, on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from importlib import metadata
from typing import ClassVar, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cumla.core import _cupy, _dlpack, _driver, _lend, _lifetime, arrays, frameworks
from cumla.core._lifetime import keep_until_passed, order_streams
from cumla.core.arrays import (
    ArrayView,
    check_mutable,
    current_stream,
    from_numpy,
    glance,
    note_written,
    open_call,
    open_device,
    reopen_call,
    to_numpy,
)
from cumla.errors import (
    CumlaError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)
from tests.fake_cuda import FakeLibrary

CODES = {name: key for key, name in _dlpack.DTYPES.items()}
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Producer:
    """An array that only DLPack can read: it counts what happens to its capsules."""

    exported: ClassVar[list[object]] = []  # a consumer may hold on to any of them

    def __init__(
        self,
        shape=(2, 3),
        dtype="float32",
        strides=None,
        device=(1, 0),
        versioned=False,
        major=1,
        lanes=1,
        offset=0,
        code=None,
        flags=0,
    ):
        self.deleted = 0
        self.streams = []
        self.versioned = versioned
        self.device = device
        code, bits = code or CODES[dtype]
        self.memory = np.arange(4096, dtype=np.uint8)
        self.layout = _dlpack.ManagedTensorVersioned if versioned else _dlpack.ManagedTensor
        managed = self.managed = self.layout()
        managed.deleter = ctypes.cast(self._make_deleter(), ctypes.c_void_p)
        if versioned:
            managed.major, managed.minor, managed.flags = major, 3, flags
        tensor = managed.tensor
        tensor.data, tensor.byte_offset = self.memory.ctypes.data, offset
        tensor.device_type, tensor.device_id = device
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), code, bits, lanes
        self.shape_array = (ctypes.c_int64 * len(shape))(*shape)
        tensor.shape = self.shape_array
        if strides is not None:
            self.strides_array = (ctypes.c_int64 * len(shape))(*strides)
            tensor.strides = self.strides_array

    def _make_deleter(self):
        def deleter(address):
            assert address == ctypes.addressof(self.managed)
            self.deleted += 1

        self.deleter = _dlpack._Deleter(deleter)
        return self.deleter

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        self.exported.append(self)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        self.capsule = _new_capsule(ctypes.addressof(self.managed), name, None)
        return self.capsule


class FakeDriver:
    """What `_driver.Driver` does, written down instead of done."""

    def __init__(self):
        self.current = 0
        self.stack = []
        self.capturing = set()
        self.recorded = []
        self.waits = []
        self.asked = []
        self.passed = set()
        self.destroyed = []

    def enter_device(self, device):
        if device == self.current:
            return False
        self.stack.append(self.current)
        self.current = device
        return True

    def leave_device(self):
        self.current = self.stack.pop()

    def current_device(self):
        return self.current

    def is_capturing(self, stream):
        return stream in self.capturing

    def record_event(self, stream):
        self.recorded.append(stream)
        return len(self.recorded)

    def wait_event(self, stream, event):
        self.waits.append((stream, event))

    def event_passed(self, event):
        self.asked.append((event, self.current))
        return event in self.passed

    def destroy_event(self, event):
        self.destroyed.append(event)

    @contextlib.contextmanager
    def relaxed_capture(self):
        yield


class FakeStream:
    def __init__(self, cupy, ptr):
        self.cupy, self.ptr = cupy, ptr

    def use(self):
        self.cupy.stream = self

    def __enter__(self):
        self.use()

    def __exit__(self, *error):
        self.cupy.null.use()  # as CuPy 14.2, where the one before was made current by use()


class FakeCuPy(types.ModuleType):
    """A CuPy whose arrays have addresses and nothing behind them."""

    def __init__(self):
        super().__init__("cupy")
        module = self
        self.null = self.stream = FakeStream(self, 0)
        self.allocated = []

        class ndarray(Producer):
            def __init__(self, shape=(4, 8), dtype="float16", device=0, ptr=0x1000):
                self.shape, self.dtype = shape, np.dtype(dtype)
                super().__init__(shape, self.dtype.name, device=(2, device))
                self.data = types.SimpleNamespace(ptr=ptr, device_id=device)
                steps = [self.dtype.itemsize]
                for length in shape[:0:-1]:
                    steps.insert(0, steps[0] * length)
                self.strides = tuple(steps)
                self.base = None

            def view(self, dtype):
                one_byte = type(self)(self.shape, dtype, self.data.device_id, self.data.ptr)
                assert one_byte.strides == self.strides
                one_byte.base = self
                return one_byte

        class Stream(FakeStream):
            null = module.null

            @staticmethod
            def from_external(stream):
                version, handle = stream.__cuda_stream__()
                assert version == 0
                return FakeStream(module, handle)

        self.ndarray = ndarray
        self.cuda = types.SimpleNamespace(
            get_current_stream=lambda device=0: module.stream,
            runtime=types.SimpleNamespace(getDevice=lambda: 1),
            Stream=Stream,
        )

    def empty(self, shape, dtype):
        if np.dtype(dtype).name.startswith("float8"):  # as CuPy 14.2
            raise ValueError(f"Unsupported dtype {np.dtype(dtype)}")
        self.allocated.append((shape, np.dtype(dtype).name, self.stream.ptr))
        return self.ndarray(shape, dtype, device=0, ptr=0x2000)


@pytest.fixture(autouse=True)
def _collections_of_what_is_new():
    """Frameworks have a million objects, at which no collection of these tests need look."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def cuda(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(arrays, "driver", lambda: driver)
    monkeypatch.setattr(_lifetime, "driver", lambda: driver)
    known = {np.ndarray: frameworks.NUMPY}
    monkeypatch.setattr(_lend, "_borrowers", {})
    with mock.patch.dict(frameworks.framework_of_type, known, clear=True):
        yield driver
    _lifetime.waiting.clear()
    _lifetime.in_graphs.clear()


@pytest.fixture
def no_cupy_yet():
    """Forget which CuPy there is, before and after a test."""

    def forget():
        frameworks.cupy_framework.cache_clear()
        _cupy.import_cupy.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def cupy(cuda, no_cupy_yet, monkeypatch):
    module = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class Device(NamedTuple):
    """Where an array of the fake JAX is."""

    platform: str
    number: int


@pytest.fixture
def fake_jax(cupy, monkeypatch):
    """A JAX with one array type, on a GPU."""

    class Array(Producer):
        def __init__(self, devices=1):
            super().__init__(dtype="bfloat16", device=(2, 0))
            self.dtype = np.dtype(ml_dtypes.bfloat16)
            self.sharding = types.SimpleNamespace(
                device_set={Device("gpu", i) for i in range(devices)}, is_fully_replicated=False
            )

            self.ready = True

        def is_deleted(self):
            return False

        def is_ready(self):
            return self.ready

        def block_until_ready(self):
            self.ready = True

    class Result:
        """What JAX makes of a capsule; its buffer goes when JAX says so, on any thread."""

        def __init__(self, exporter):
            self.kind = exporter.__dlpack_device__()
            self.buffer = _dlpack.Imported("result", exporter.__dlpack__(stream=module.reader))
            self.view = self.buffer.view

        def devices(self):
            return {"cuda:0"}

    class Fence:
        done = False

        def is_ready(self):
            return self.done

    class Compiled:
        def lower(self, number):
            return self

        def compile(self):
            module.compiled.append(module.number)
            return self

        def __call__(self, number):
            assert number is module.number
            fence = Fence()
            module.fences.append(fence)
            return fence

    def device_put(number, device):
        module.number = (int(number), device)
        return module.number

    module = types.SimpleNamespace(
        Array=Array,
        local_device_count=lambda platform: 1,
        dlpack=types.SimpleNamespace(from_dlpack=Result),
        transfer_guard=lambda level: contextlib.nullcontext(),
        ensure_compile_time_eval=contextlib.nullcontext,
        disable_jit=lambda disabled: contextlib.nullcontext(),
        device_put=device_put,
        jit=lambda function: Compiled(),
        compiled=[],
        fences=[],
        reader=77,
    )
    monkeypatch.setitem(sys.modules, "jax", module)
    fake = frameworks._Jax(module)
    for where in (frameworks, arrays):  # the real one stays: cumla.jax holds it
        monkeypatch.setattr(where, "jax_framework", lambda: fake)
    return module


@pytest.fixture
def fake_torch(cuda, monkeypatch):
    """A torch whose tensors are on a GPU."""

    class Tensor:
        is_cuda = True
        ordinal = 0

        def __init__(self, shape, dtype):
            self.shape, self.dtype = shape, dtype

        def data_ptr(self):
            return 0x7F0000003000

        def stride(self):
            return tuple([1] * len(self.shape))

        def get_device(self):
            return self.ordinal

        def is_neg(self):
            return False

    class DType:
        itemsize = 1

        def __str__(self):
            return "torch.uint8"

    module = types.SimpleNamespace(Tensor=Tensor, uint8=DType(), current=7, allocated=[])

    @contextlib.contextmanager
    def use(stream):
        previous, module.current = module.current, stream
        yield
        module.current = previous

    def empty(shape, dtype, device):
        module.allocated.append((shape, device, module.current))
        return Tensor(shape, dtype)

    module._C = types.SimpleNamespace(
        _cuda_getCurrentRawStream=lambda device: module.current,
        _is_torch_function_mode_enabled=lambda: False,
        _len_torch_dispatch_stack=lambda: 0,
        DisableTorchFunction=contextlib.nullcontext,
    )
    module.is_grad_enabled = lambda: False
    module.autograd = types.SimpleNamespace(
        forward_ad=types.SimpleNamespace(_current_level=-1),
        graph=types.SimpleNamespace(increment_version=lambda tensor: None),
    )
    module.cuda = types.SimpleNamespace(stream=use, ExternalStream=lambda handle, device: handle)
    module.empty = empty
    monkeypatch.setitem(sys.modules, "torch", module)
    frameworks.torch_framework.cache_clear()
    yield module
    frameworks.torch_framework.cache_clear()


def view_of(array):
    with open_call((("x", array),)) as call:
        assert call.device is None
        assert not call.capturing
        return call, call.views[0]


# --- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "float8_e4m3fn"])
def test_numpy_view(dtype):
    array = np.zeros((4, 6, 8), np.dtype(dtype))[::2, :, 1:5]
    call, view = view_of(array)
    size = array.itemsize
    expected = ArrayView(array.ctypes.data, (2, 6, 4), (96 * size, 8 * size, size), dtype, None)
    assert (call.framework, view) == ("numpy", expected)


def test_foreign_byte_order_has_no_known_name():
    assert view_of(np.zeros(3, ">f4"))[1].dtype == ">f4"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn"])
def test_torch_view(dtype):
    torch = pytest.importorskip("torch")
    array = torch.zeros(4, 6, 8, dtype=getattr(torch, dtype))[::2, :, 1:5]
    call, view = view_of(array)
    size = array.element_size()
    expected = ArrayView(array.data_ptr(), (2, 6, 4), (96 * size, 8 * size, size), dtype, None)
    assert (call.framework, view) == ("torch", expected)
    assert type(view.shape) is tuple


def test_torch_parameter_is_a_tensor():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(3))
    with torch.no_grad():
        call = open_call((("x", torch.zeros(3)), ("y", parameter)))
    assert call.views[1].ptr == parameter.data_ptr()


@pytest.mark.parametrize("is_output", [False, True])
def test_torch_tensor_that_requires_a_gradient(is_output):
    torch = pytest.importorskip("torch")
    tensors = {"x": torch.zeros(3), "y": torch.zeros(3, requires_grad=True)}
    given = list(tensors.items())
    named, outputs = (given[:1], given[1:]) if is_output else (given, ())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert None not in open_call(tuple(named), tuple(outputs)).views
            assert glance(tuple(tensors.values())) is not None
    message = r"y: needs a tensor that requires no gradient, .* torch\.no_grad\(\) .* y\.detach\(\)"
    for seen in (False, True):
        assert glance(tuple(tensors.values())) is None, seen
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            open_call(tuple(named), tuple(outputs))


def test_torch_counts_what_is_written():
    torch = pytest.importorskip("torch")
    x, out = torch.zeros(3), torch.zeros(3)
    versions = [(x._version, out._version)]
    call = open_call((("x", x),), (("out", out), ("lse", None)))
    check_mutable("out", out)
    versions.append((x._version, out._version))
    for one in (call, reopen_call(x, None)):
        note_written(one, (out, None))
        versions.append((x._version, out._version))
    assert versions == [(0, 0), (0, 0), (0, 1), (0, 2)]
    with torch.inference_mode():
        note_written(call, (torch.zeros(3),))  # which has no count


def test_torch_tensor_with_a_tangent():
    torch = pytest.importorskip("torch")
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        plain = torch.zeros(3)
        dual = forward.make_dual(plain, torch.ones(3))
        assert None not in open_call((("q", plain),)).views
        assert glance((dual,)) is None
        with pytest.raises(
            RuntimeError, match=r"^q: needs a tensor without a tangent, .*\.primal$"
        ):
            open_call((("q", dual),))
        with torch.inference_mode():  # which computes none
            assert None not in open_call((("q", dual),)).views


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn"])
def test_jax_view(dtype):
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((3, 5), dtype)
    call, view = view_of(array)
    size = array.dtype.itemsize
    where = array.unsafe_buffer_pointer()
    expected = ArrayView(where, (3, 5), (5 * size, size), dtype, None, read_only=True)
    assert (call.framework, view) == ("jax", expected)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", sorted(CODES))
def test_dlpack_view(dtype, versioned):
    array = Producer((2, 3), dtype, strides=(8, 2), offset=16, versioned=versioned)
    call, view = view_of(array)
    size = CODES[dtype][1] // 8
    expected = ArrayView(array.memory.ctypes.data + 16, (2, 3), (8 * size, 2 * size), dtype, None)
    assert (call.framework, view) == ("numpy", expected)


def test_dlpack_without_strides_is_contiguous():
    assert view_of(Producer((2, 3, 5), "float16"))[1].strides == (30, 10, 2)
    assert view_of(Producer((), "float16"))[1].strides == ()


@pytest.mark.parametrize(("flags", "read_only"), [(0, False), (1, True), (2, True), (4, False)])
def test_dlpack_memory_that_must_not_be_written_to(flags, read_only):
    array = Producer(versioned=True, flags=flags)
    assert view_of(array)[1].read_only is read_only
    assert to_numpy("x", Producer(versioned=True, flags=flags)).flags.writeable is not read_only


def test_numpy_memory_that_must_not_be_written_to():
    array = np.zeros(3)
    assert open_call((("x", array),), (("out", array),)).views[1].read_only is False
    array.flags.writeable = False
    assert view_of(array)[1].read_only is True
    message = "out: needs an array that can be written to, got a read-only one; pass a copy"
    with pytest.raises(ValueError, match=message):
        open_call((("x", array),), (("out", array),))


def test_dlpack_producer_older_than_versions():
    class Old(Producer):
        def __dlpack__(self, *, stream=None):
            return super().__dlpack__(stream=stream)

    assert view_of(Old((2, 3)))[1].shape == (2, 3)


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_capsule_is_consumed_and_given_back_once(versioned):
    array = Producer(versioned=versioned)
    call = open_call((("x", array),))
    assert "used_dltensor" + ("_versioned" if versioned else "") in repr(array.capsule)
    assert array.deleted == 0
    with call:
        assert array.deleted == 0
    assert array.deleted == 1
    del call
    gc.collect()
    assert array.deleted == 1


def test_dlpack_capsule_is_given_back_when_the_call_is_never_entered():
    array = Producer()
    call = open_call((("x", array),))
    del call
    assert array.deleted == 1


@pytest.mark.parametrize(
    ("producer", "error", "message"),
    [
        (Producer(code=(2, 4)), TypeError, "x: its element type is unknown .*code 2, 4 bits"),
        (Producer(lanes=2), TypeError, "x: its element type is unknown .*2 lanes"),
        (Producer(versioned=True, major=2), TypeError, r"x: its DLPack capsule has version 2\.3"),
        (Producer(device=(10, 0)), ValueError, "x: .*DLPack device type 10"),
    ],
)
def test_dlpack_refused(producer, error, message):
    with pytest.raises(error, match=message):
        open_call((("x", producer),))
    gc.collect()
    assert producer.deleted == len(producer.streams)


def test_dlpack_capsule_used_before_is_refused():
    class Reusing(Producer):
        def __dlpack__(self, **options):
            return self.capsule if self.streams else super().__dlpack__(**options)

    array = Reusing()
    open_call((("x", array),))
    with pytest.raises(TypeError, match="x: __dlpack__ must return a fresh DLPack capsule"):
        open_call((("x", array),))
    assert array.deleted == 1


def test_producer_that_refuses_is_named():
    class Refusing(Producer):
        def __dlpack__(self, **options):
            raise BufferError("not today")

    with pytest.raises(ValueError, match="kv_cache: its producer does not export it: not today"):
        open_call((("kv_cache", Refusing()),))


# --- one-byte floats ------------------------------------------------------------------------------


def bytes_of(imported):
    """Return what a kernel would read at the address of an imported contiguous array."""
    view = imported.view
    return np.frombuffer(ctypes.string_at(view.ptr, int(np.prod(view.shape))), np.uint8)


FLOAT8 = pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])


def some_float8(dtype):
    return np.arange(-6, 6).reshape(3, 4).astype(getattr(ml_dtypes, dtype))


@FLOAT8
def test_float8_tensors_are_imported_where_torch_does_not_export_them(monkeypatch, dtype):
    """As tensors are where another framework's array comes first."""
    torch = pytest.importorskip("torch")
    values = some_float8(dtype)
    tensor = from_numpy("torch", values)
    export = torch.Tensor.__dlpack__

    def refuse(self, **options):
        if str(self.dtype).startswith("torch.float8"):
            raise BufferError("float8 types are not supported by dlpack")
        return export(self, **options)

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    imported = frameworks.torch_framework().import_array("q", tensor, None)
    expected = ArrayView(tensor.data_ptr(), (3, 4), (4, 1), dtype, None)
    assert imported.view == expected
    assert (bytes_of(imported) == values.view(np.uint8).ravel()).all()
    part = frameworks.torch_framework().import_array("q", tensor[1:, ::2], None)
    assert part.view.strides == (4, 2)


@FLOAT8
def test_float8_arrays_of_cupy_are_imported_as_bytes(cupy, dtype):
    """NumPy's array in CuPy's place: neither of them exports the type."""
    values = some_float8(dtype)
    with pytest.raises((BufferError, ValueError)):
        _dlpack.import_array("q", values, None)
    imported = frameworks._CuPy(cupy).import_array("q", values, None)
    expected = ArrayView(values.ctypes.data, (3, 4), (4, 1), dtype, None)
    assert imported.view == expected


@FLOAT8
def test_float8_arrays_of_jax_are_not_copied(dtype):
    jax = pytest.importorskip("jax")
    array = jax.numpy.asarray(some_float8(dtype))
    call = open_call((("q", array),))
    assert call.views[0].ptr == array.unsafe_buffer_pointer()
    assert call.views[0].dtype == dtype


@FLOAT8
def test_float8_arrays_of_a_jax_that_does_not_export_them(monkeypatch, dtype):
    jax = pytest.importorskip("jax")
    values = some_float8(dtype)
    array = jax.numpy.asarray(values)
    kind = type(array)
    export = kind.__dlpack__

    def refuse(self, **options):
        if self.dtype.itemsize == 1 and self.dtype.kind == "V":
            raise RuntimeError("INVALID_ARGUMENT: XLA type has no DLPack equivalent")
        return export(self, **options)

    monkeypatch.setattr(kind, "__dlpack__", refuse)
    call = open_call((("q", array), ("w", jax.numpy.ones(3))))
    assert (call.framework, call.views[0].shape, call.views[0].dtype) == ("jax", (3, 4), dtype)
    assert call.views[0].read_only
    imported = frameworks.jax_framework().import_array("q", array, None)
    assert (bytes_of(imported) == values.view(np.uint8).ravel()).all()


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_host_waits_for_what_may_be_a_copy_from_another_gpu(fake_jax, gpus):
    """JAX 0.11.2 exports it too early. With one GPU nothing waits."""
    fake_jax.local_device_count = {"cpu": 1, "gpu": gpus}.__getitem__
    array = fake_jax.Array()
    array.ready = False
    frameworks.jax_framework().import_array("q", array, 0)
    assert array.ready == (gpus == 2)


def test_what_jax_refuses_for_another_reason_is_refused(fake_jax):
    array = fake_jax.Array()

    def refuse(**options):
        raise RuntimeError("not today")

    array.__dlpack__ = refuse
    with pytest.raises(ValueError, match="q: its producer does not export it: not today"):
        frameworks.jax_framework().import_array("q", array, None)


# --- what is not an array, or has no memory ------------------------------------------------------


@pytest.mark.parametrize("value", [[1, 2], 3.0, None, "text"])
def test_not_an_array(value):
    with pytest.raises(TypeError, match="cache_seqlens: needs an array of CuPy, PyTorch, JAX"):
        open_call((("q", np.zeros(3)), ("cache_seqlens", value)))


def test_jax_tracer():
    jax = pytest.importorskip("jax")
    with pytest.raises(
        frameworks.Traced, match=r"q: needs .* got a JAX tracer .* use cumla\.jax"
    ) as refused:
        jax.jit(lambda x: open_call((("q", x),)))(jax.numpy.ones(3))
    assert refused.value.binding == "cumla.jax"


def test_jax_output():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    with pytest.raises(TypeError, match=r"out: JAX arrays are immutable .* call without out="):
        open_call((("q", x),), (("out", x),))


def test_jax_deleted_array():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    x.delete()
    message = "q: needs an array with memory, got one deleted or donated; use the array that the "
    with pytest.raises(ValueError, match=f"^{message}donating call returned$"):
        open_call((("q", x),))


def test_torch_fake_tensor(monkeypatch):
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.delitem(frameworks.framework_of_type, FakeTensor, raising=False)  # cumla.torch's

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(TypeError, match=r"q: needs a tensor with memory, got a FakeTensor"):
        open_call((("q", fake),))


def test_torch_tensor_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(
        ValueError, match=r"q: needs a tensor on a CUDA device or .*got one on meta"
    ):
        open_call((("q", torch.zeros(3, device="meta")),))


def test_torch_distributed_tensor():
    torch = pytest.importorskip("torch")

    class DTensor(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=r"q: .*got a DTensor.*q\.to_local\(\)"):
        open_call((("q", torch.zeros(3).as_subclass(DTensor)),))


# --- where the arrays are ------------------------------------------------------------------------


def test_cpu_arrays_of_several_frameworks():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    call = open_call((("a", torch.zeros(2)), ("b", np.zeros(3)), ("c", jax.numpy.ones(4))))
    assert (call.framework, call.device) == ("torch", None)
    assert [view.shape for view in call.views] == [(2,), (3,), (4,)]


def test_cpu_and_gpu_mixed(cupy):
    message = "table: needs to be where q is, on CUDA device 0, got an array on the CPU; copy"
    with pytest.raises(ValueError, match=message):
        open_call((("q", cupy.ndarray()), ("table", np.zeros(3))))
    with pytest.raises(ValueError, match=r"table: .* q is, on the CPU, got .* on CUDA device 0"):
        open_call((("q", np.zeros(3)), ("table", cupy.ndarray())))


def test_devices_differ(cupy):
    with pytest.raises(
        ValueError, match=r"table: .*on CUDA device 0, got an array on CUDA device 1"
    ):
        open_call((("q", cupy.ndarray()), ("table", cupy.ndarray(device=1))))
    with pytest.raises(ValueError, match=r"lse: .*on CUDA device 0, got an array on CUDA device 1"):
        open_call((("q", cupy.ndarray()),), (("out", None), ("lse", cupy.ndarray(device=1))))


def test_output_of_another_framework():
    torch = pytest.importorskip("torch")
    message = r"out: needs an array of the framework of q, got torch\.Tensor; convert it, or call"
    with pytest.raises(TypeError, match=message):
        open_call((("q", np.zeros(3)),), (("out", torch.zeros(3)),))


def test_views_are_in_the_order_given(cupy):
    inputs = tuple((name, cupy.ndarray(ptr=i)) for i, name in enumerate("abc", 1))
    call = open_call(inputs, (("out", None), ("lse", cupy.ndarray(ptr=9))))
    assert [view and view.ptr for view in call.views] == [1, 2, 3, None, 9]
    assert call.views[0] == ArrayView(1, (4, 8), (16, 2), "float16", 0)


def test_cupy_distributed_array(cupy):
    class DistributedArray(cupy.ndarray):
        pass

    with pytest.raises(ValueError, match=r"q: .*got a DistributedArray, which is sharded"):
        open_call((("q", DistributedArray()),))


# --- arrays that are known again ----------------------------------------------------------------


def views_at_first(*given):
    """Views of each array; it also makes their types known."""
    return [open_call((("x", array),)).views[0] for array in given]


def check_glances(given):
    """Two glances are equal exactly where the views are."""
    views = views_at_first(*given)
    glances = [glance((array,)) for array in given]
    assert None not in glances
    for one, view in zip(glances, views, strict=True):
        same = [other == one and hash(other) == hash(one) for other in glances]
        assert same == [other == view for other in views]
    assert len(set(glances)) == len(given) - 1  # the first two are one array in two objects


def test_a_glance_tells_torch_tensors_apart():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    others = (x[:, :, :], x[1:], x[:2], x.view(24, 8), x.transpose(0, 1), x[::2], x[:, ::2])
    check_glances((x, *others, x.view(torch.float16), x.clone()))


def test_a_glance_sees_the_negative_bit():
    """Such a tensor has address, shape and strides of the one whose values it negates."""
    torch = pytest.importorskip("torch")
    z = torch.ones(3, dtype=torch.complex64)
    for x, negated in ((z.imag, z.conj().imag), (torch.ones(3), None)):
        views_at_first(x)
        y = torch._neg_view(x) if negated is None else negated
        assert (x.data_ptr(), x.stride()) == (y.data_ptr(), y.stride())
        assert glance((y,)) not in (glance((x,)), None)


def test_a_glance_tells_torch_devices_apart(fake_torch):
    tensor = fake_torch.Tensor((3,), fake_torch.uint8)
    views_at_first(tensor)
    seen = glance((tensor,))
    tensor.ordinal = 1
    assert glance((tensor,)) not in (seen, None)
    tensor.ordinal = 0
    assert glance((tensor,)) == seen


def test_the_current_stream_is_that_of_a_call(fake_torch, cupy):
    for array in (fake_torch.Tensor((3,), fake_torch.uint8), cupy.ndarray(), np.zeros(3)):
        call = open_call((("x", array),))
        assert current_stream("x", array, call.device) == call.stream


def test_a_glance_tells_cupy_arrays_apart(cupy):
    kind = cupy.ndarray
    others = (kind(), kind((4, 9)), kind(dtype="int16"), kind(device=1), kind(ptr=0x2000))
    transposed = kind()
    transposed.strides = (2, 8)
    check_glances((kind(), *others, transposed))


def test_a_tensor_that_changes_is_not_known_again():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6)
    another = torch.zeros(4, 6)  # made here: later it could get the memory that resize_ frees
    views_at_first(x)
    seen = {glance((x,))}
    for change in (
        lambda: x.resize_(4, 8),
        lambda: x.t_(),
        lambda: x.unsqueeze_(0),
        lambda: setattr(x, "data", another),
        lambda: setattr(x, "data", x.data.view(torch.int32)),
    ):
        change()
        assert glance((x,)) not in seen
        seen.add(glance((x,)))


def test_modes_of_torch_see_no_look():
    """Nor pay for it: a default device is such a mode."""
    torch = pytest.importorskip("torch")
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    x = torch.zeros(3)
    views_at_first(x)
    with Mode():
        assert glance((x,)) is not None and open_call((("x", x),)).views
        assert not seen
        assert x.shape == (3,) and seen


def test_what_a_glance_leaves_to_the_whole_look(cupy):
    torch = pytest.importorskip("torch")
    tensor, array, host = torch.zeros(3), cupy.ndarray(), np.zeros(3)
    assert glance((tensor,)) is None  # nobody has seen its type yet
    views_at_first(tensor, array, host)
    assert glance((tensor, tensor)) is not None
    assert glance((array, array)) is not None
    for given in (
        (tensor, array),
        (array, tensor),
        (tensor, None),
        (None, tensor),
        (host, host),
        (array, Producer()),
        (torch.zeros(3).to_sparse(),),
        (tensor, [1, 2]),
        (tensor, (tensor, tensor)),
        (),
    ):
        assert glance(given) is None, given


def test_a_call_that_is_opened_again(cuda, cupy):
    cupy.stream = FakeStream(cupy, 5)
    with open_call((("q", Producer(device=(2, 0))),), stream=9):
        pass
    array = cupy.ndarray(device=3)
    first = open_call((("q", array),))
    assert _lifetime.waiting
    cuda.passed.add(1)
    call = reopen_call(array, 3)
    assert not _lifetime.waiting  # it lets go of what is done, as every call
    assert (call.device, call.stream, call.framework) == (3, first.stream, first.framework)
    assert reopen_call(array, 3, CoreStream()).stream == 99
    with call:
        assert cuda.current == 3
    assert cuda.current == 0


# --- streams and devices -------------------------------------------------------------------------


class CoreStream:
    def __cuda_stream__(self):
        return (0, 99)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 5),
        (0, 0),
        (1, 0),
        (2, 2),
        (77, 77),
        (CoreStream(), 99),
        (types.SimpleNamespace(cuda_stream=33), 33),
        (types.SimpleNamespace(ptr=44), 44),
    ],
)
def test_stream(cupy, stream, handle):
    cupy.stream = FakeStream(cupy, 5)
    assert open_call((("q", cupy.ndarray()),), stream=stream).stream == handle
    assert open_device(0, stream=stream).stream == handle


@pytest.mark.parametrize(
    ("stream", "error"), [(True, TypeError), ("s", TypeError), (1.5, TypeError), (-1, ValueError)]
)
def test_not_a_stream(cupy, stream, error):
    for array in (cupy.ndarray(), np.zeros(3)):
        with pytest.raises(error, match="stream: needs a"):
            open_call((("q", array),), stream=stream)


class DeviceStream:
    """A `torch.Stream`, which has no handle."""

    stream_id, device_index, device_type = 3, 0, 1

    def __init__(self, kind="cuda"):
        self.device = types.SimpleNamespace(type=kind)


def test_stream_of_torch_for_any_device(fake_torch):
    def of_cuda(*, stream_id, device_index, device_type):
        return types.SimpleNamespace(cuda_stream=100 * stream_id + 10 * device_index + device_type)

    fake_torch.cuda.Stream = of_cuda
    array = fake_torch.Tensor((3,), fake_torch.uint8)
    assert open_call((("q", array),), stream=DeviceStream()).stream == 301
    assert reopen_call(array, 0, DeviceStream()).stream == 301
    with pytest.raises(ValueError, match=r"^stream: needs a stream of a CUDA device, got one of"):
        open_call((("q", array),), stream=DeviceStream("xpu"))


def test_torch_current_stream(fake_torch):
    call = open_call((("q", fake_torch.Tensor((3,), fake_torch.uint8)),))
    assert (call.framework, call.device, call.stream) == ("torch", 0, 7)


def test_device_is_current_inside_the_call_only(cuda, cupy):
    with open_call((("q", cupy.ndarray(device=3)),)):
        assert cuda.current == 3
    assert (cuda.current, cuda.stack) == (0, [])
    with pytest.raises(KeyError), open_call((("q", cupy.ndarray(device=3)),)):
        raise KeyError
    assert (cuda.current, cuda.stack) == (0, [])


def test_open_device_without_a_device_takes_the_current_one(cupy):
    call = open_device()
    assert (call.device, call.framework, call.views) == (1, "cupy", ())


@pytest.mark.parametrize(("stream", "number"), [(0, 1), (1, 1), (2, 2), (640, 640)])
def test_dlpack_stream_numbers(cuda, cupy, stream, number):
    array = Producer(device=(2, 0))
    call = open_call((("q", array),), stream=stream)
    assert array.streams == [number]
    assert call.framework == "cupy"


def test_dlpack_on_the_cpu_has_no_stream():
    array = Producer()
    open_call((("q", array),))
    assert array.streams == [None]


def test_foreign_arrays_are_ordered_behind_their_producer(cuda, cupy):
    cupy.stream = FakeStream(cupy, 5)
    own, foreign, own_too = cupy.ndarray(), Producer(device=(2, 0)), cupy.ndarray()
    call = open_call((("a", own), ("b", foreign), ("c", own_too)))
    assert (own.streams, foreign.streams, own_too.streams) == ([], [5], [])
    assert call.views[1].ptr == foreign.memory.ctypes.data
    guest = cupy.ndarray()
    open_call((("a", Producer(device=(2, 0))), ("b", guest)))
    assert guest.streams == [5]


def test_producer_runs_with_its_device_current(cuda, cupy):
    class Asking(Producer):
        def __dlpack__(self, **options):
            self.current = cuda.current
            return super().__dlpack__(**options)

    array = Asking(device=(13, 4))
    open_call((("q", array),))
    assert (array.current, cuda.current) == (4, 0)


# --- how long imported arrays live ---------------------------------------------------------------


def test_imports_live_until_the_stream_has_passed(cuda, cupy):
    array = Producer(device=(2, 0))
    with open_call((("q", array),), stream=9):
        pass
    assert (cuda.recorded, array.deleted) == ([9], 0)
    open_call((("q", cupy.ndarray()),))
    assert array.deleted == 0
    cuda.passed.add(1)
    open_call((("q", cupy.ndarray()),))
    assert (array.deleted, cuda.destroyed) == (1, [1])
    open_call((("q", cupy.ndarray()),))
    assert array.deleted == 1


def test_imports_live_on_after_an_error_in_the_call(cuda, cupy):
    array = Producer(device=(2, 0))
    with pytest.raises(KeyError), open_call((("q", array),), stream=9):
        raise KeyError
    assert (cuda.recorded, array.deleted) == ([9], 0)


def test_threads_give_every_import_back_once(cuda, cupy):
    producers = [[Producer(device=(2, 0)) for _ in range(50)] for _ in range(4)]

    def work(own):
        for array in own:
            with open_call((("q", array),)):
                pass
            cuda.passed.update(range(len(cuda.recorded)))

    threads = [threading.Thread(target=work, args=(own,)) for own in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuda.passed.update(range(1000))
    _lifetime.release_finished()
    assert [array.deleted for own in producers for array in own] == [1] * 200


class Owner:
    """Something to be kept."""


def freed(alive):
    gc.collect()
    return alive() is None


def test_a_blocked_stream_does_not_hold_up_another(cuda):
    owners = [Owner() for _ in range(4)]
    alive = [weakref.ref(owner) for owner in owners]
    for stream in (9, 5, 9, 5):
        keep_until_passed(owners.pop(0), stream)
    cuda.passed |= {2, 3, 4}
    _lifetime.release_finished()
    assert [ref() is not None for ref in alive] == [True, False, True, False]
    assert cuda.destroyed == [2, 4]
    cuda.passed.add(1)
    _lifetime.release_finished()
    assert [ref() for ref in alive] == [None] * 4
    assert _lifetime.waiting == {}


def test_events_are_asked_on_their_own_device(cuda):
    keep_until_passed(object(), 9, device=3)
    assert cuda.current == 0
    cuda.current = None  # as in a thread that has not used CUDA yet
    _lifetime.release_finished()
    assert (cuda.asked, cuda.current) == ([(1, 3)], None)


def test_what_a_graph_reads_is_kept_for_good_and_once(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    cuda.capturing.add(9)
    for _ in range(3):
        keep_until_passed(owner, 9)
    del owner
    assert (cuda.recorded, len(_lifetime.in_graphs)) == ([], 1)
    cuda.capturing.clear()
    _lifetime.release_finished()
    assert alive() is not None


def test_finalizers_may_come_back_in_the_middle(cuda, monkeypatch):
    """A garbage collection can run anywhere, a finalizer that keeps something in it."""

    def collect(event):
        if event == 1:
            keep_until_passed("a successor", 9)
            _lifetime.release_finished()
        return FakeDriver.event_passed(cuda, event)

    monkeypatch.setattr(cuda, "event_passed", collect)
    keep_until_passed("an owner", 9)
    cuda.passed.add(1)
    _lifetime.release_finished()
    assert (cuda.recorded, cuda.destroyed) == ([9, 9], [1])
    cuda.passed.add(2)
    _lifetime.release_finished()
    assert cuda.destroyed == [1, 2]


def test_a_stream_waits_for_another(cuda):
    order_streams(7, 7)
    assert cuda.recorded == []
    order_streams(7, 9)
    assert (cuda.recorded, cuda.waits, cuda.destroyed) == ([7], [(9, 1)], [1])


# --- what JAX gets -------------------------------------------------------------------------------


def a_jax_result(fake_jax, stream=640):
    with open_call((("q", fake_jax.Array()),), stream=stream) as call:
        array, _ = call.empty((2, 3), "bfloat16")
        return call.export(array), weakref.ref(array)


def test_jax_results_are_cupys_and_ordered_behind_the_stream(fake_jax, cuda, cupy):
    result, _ = a_jax_result(fake_jax)
    assert cupy.allocated == [((2, 3), "bfloat16", 640)]
    assert result.kind == (2, 0)
    assert result.view == ArrayView(0x2000, (2, 3), (6, 2), "bfloat16", 0)
    assert (77, 1) in cuda.waits
    assert cuda.recorded[0] == 640


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def test_jax_results_of_fp8_are_bytes_of_cupys(fake_jax, cupy):
    with open_call((("q", fake_jax.Array()),), stream=640) as call:
        array, view = call.empty((2, 3), "float8_e4m3fn")
        result = call.export(array)
    assert cupy.allocated == [((2, 3), "uint8", 640)]
    assert view == result.view == ArrayView(0x2000, (2, 3), (3, 1), "float8_e4m3fn", 0)
    memory = weakref.ref(array.base)
    del array
    assert not freed(memory)


def test_a_jax_that_takes_no_fp8_gets_bytes(fake_jax, monkeypatch):
    take = fake_jax.dlpack.from_dlpack

    def old(exporter):
        if exporter._view.dtype == E4M3.name:
            exporter.__dlpack__(stream=77)
            raise RuntimeError("UNIMPLEMENTED: Unknown or invalid DLPack type code 10")
        return take(exporter)

    monkeypatch.setattr(fake_jax.dlpack, "from_dlpack", old)
    fake_jax.lax = types.SimpleNamespace(bitcast_convert_type=lambda bits, dtype: (bits, dtype))
    before = len(_lend._lent)
    with open_call((("q", fake_jax.Array()),), stream=640) as call:
        array, _ = call.empty((2, 3), E4M3.name)
        bits, dtype = call.export(array)
    assert (bits.view.ptr, bits.view.dtype, dtype) == (0x2000, "uint8", E4M3)
    assert len(_lend._lent) == before + 1


def test_what_jax_does_not_take_for_another_reason_is_an_error(fake_jax, monkeypatch):
    def refuse(exporter):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fake_jax.dlpack, "from_dlpack", refuse)
    with open_call((("q", fake_jax.Array()),), stream=640) as call:
        for dtype in ("bfloat16", E4M3.name):
            array, _ = call.empty((2, 3), dtype)
            with pytest.raises(RuntimeError, match="out of memory"):
                call.export(array)


@pytest.mark.parametrize(("reader", "waits"), [(None, [(0, 1)]), (-1, []), (640, [])])
def test_jax_readers_that_need_no_order(fake_jax, cuda, reader, waits):
    fake_jax.reader = reader
    a_jax_result(fake_jax)
    assert cuda.waits == waits


def test_dropped_jax_results_wait_for_the_readers(fake_jax, cuda, cupy):
    result, alive = a_jax_result(fake_jax)
    assert fake_jax.compiled == [(0, "cuda:0")]
    open_call((("q", fake_jax.Array()),))
    assert fake_jax.fences == []  # nothing was dropped
    del result
    assert not freed(alive)
    open_call((("q", cupy.ndarray()),))
    assert fake_jax.fences == []  # JAX is left alone where none of its arrays takes part
    open_call((("q", fake_jax.Array()),))
    open_call((("q", fake_jax.Array()),))
    (fence,) = fake_jax.fences
    assert not freed(alive)
    fence.done = True
    open_call((("q", cupy.ndarray()),))
    assert freed(alive)
    assert len(fake_jax.compiled) == 1


def test_a_fence_covers_only_what_was_dropped_before_it(fake_jax):
    (one, one_alive), (two, two_alive) = (a_jax_result(fake_jax) for _ in range(2))
    del one
    open_call((("q", fake_jax.Array()),))
    del two
    fake_jax.fences[0].done = True
    open_call((("q", fake_jax.Array()),))
    assert freed(one_alive)
    assert not freed(two_alive)
    fake_jax.fences[1].done = True
    _lifetime.release_finished()
    assert freed(two_alive)


def test_a_fence_that_fails_frees_nothing(fake_jax, monkeypatch):
    result, alive = a_jax_result(fake_jax)
    del result

    def fail(self, number):
        raise KeyboardInterrupt

    kind = type(_lend.borrower(0)._fence)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, "__call__", fail)
        open_call((("q", fake_jax.Array()),))
    assert not freed(alive)
    open_call((("q", fake_jax.Array()),))
    fake_jax.fences[0].done = True
    _lifetime.release_finished()
    assert freed(alive)


def test_readers_of_a_jax_backend_that_is_gone(fake_jax, monkeypatch, caplog):
    result, alive = a_jax_result(fake_jax)
    del result
    open_call((("q", fake_jax.Array()),))

    def gone(self):
        raise RuntimeError("Array has been deleted")

    monkeypatch.setattr(type(fake_jax.fences[0]), "is_ready", gone)
    _lifetime.release_finished()
    assert freed(alive)
    assert "Array has been deleted" in caplog.text


def test_a_result_that_jax_refuses_is_freed(fake_jax, monkeypatch):
    def refuse(exporter):
        exporter.__dlpack__(stream=77)
        raise ValueError("not this one")

    monkeypatch.setattr(fake_jax.dlpack, "from_dlpack", refuse)
    before = len(_lend._lent)
    with open_call((("q", fake_jax.Array()),), stream=640) as call:
        array, _ = call.empty((2, 3), "bfloat16")
        alive = weakref.ref(array)
        with pytest.raises(ValueError, match="not this one"):
            call.export(array)
    del array
    gc.collect()
    assert (alive(), len(_lend._lent)) == (None, before)


def lend_to_jax(jax, values):
    """A JAX array on the CPU over the memory of `values`, as if that were a GPU."""
    view = ArrayView(values.ctypes.data, values.shape, values.strides, values.dtype.name, 0)
    return _lend.lend(jax, values, view, 5)


def aligned(length):
    memory = np.zeros(length * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + length * 4].view(np.float32)


@pytest.mark.parametrize("traced", [False, True])
def test_jax_itself_takes_them_and_gives_them_back(cuda, monkeypatch, traced):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(_lend, "_CUDA", 1)
    values = aligned(1000)
    values[:] = np.arange(1000)
    alive = weakref.ref(values)
    held = [values]
    del values

    def work(x):  # concrete arrays are lent while JAX traces something else
        held.append(lend_to_jax(jax, held[0]))
        return x

    jax.jit(work)(1.0) if traced else work(1.0)
    result = held.pop()
    assert result.unsafe_buffer_pointer() == held.pop().ctypes.data
    total = jax.jit(lambda x: x.sum())(result)
    gc.collect()
    assert alive() is not None
    thread = threading.Thread(target=result.delete)
    del result
    thread.start()
    thread.join()
    del thread
    assert float(total) == 499500
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        with jax.disable_jit(), jax.transfer_guard("disallow_explicit"):
            _lend.borrower(0).fence_dropped()
        _lifetime.release_finished()
        gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_jax_itself_sees_the_dtype(cuda, monkeypatch, dtype):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(_lend, "_CUDA", 1)
    values = aligned(64).view(getattr(ml_dtypes, dtype, dtype))
    values[:] = np.arange(len(values)) % 16
    result = lend_to_jax(jax, values)
    assert result.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(result), values)


def test_interpreter_exit_with_jax_results():
    """Memory that JAX drops late must not call into an interpreter that is gone.

    Each way of holding it ends a process of its own, all children of one that has imported JAX.
    """
    pytest.importorskip("jax")
    program = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import atexit, threading, time, jax, numpy as np
from cumla.core import _lend, _lifetime
from tests.core.test_arrays import FakeDriver, aligned, lend_to_jax
for how in ("held", "held by JAX", "dropped", "fenced", "in a thread"):
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(how, status, flush=True)
else:
    sys.exit()
cuda = FakeDriver()
_lifetime.driver = lambda: cuda
_lend._CUDA = 1
result = lend_to_jax(jax, aligned(1000))
if how == "held by JAX":
    hold = jax.jit(lambda x: x)
    result = [result, jax.device_put(result), result.addressable_shards]
    atexit.register(lambda: lend_to_jax(jax, aligned(10)))
elif how == "in a thread":
    def drop(held):
        time.sleep(0.05)
        del held[:]
        time.sleep(10)
    threading.Thread(target=drop, args=([result],), daemon=True).start()
    del result
elif how != "held":
    del result
    if how == "fenced":
        _lend.borrower(0).fence_dropped()
print("done:", end=" ", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ways = ("held", "held by JAX", "dropped", "fenced", "in a thread")
    expected = "".join(f"done: {how} 0\n" for how in ways)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


# --- allocation ----------------------------------------------------------------------------------


def test_cupy_allocates_on_the_stream_of_the_call(cupy):
    for stream in (0, 640):
        cupy.stream = FakeStream(cupy, 5)
        with open_call((("q", cupy.ndarray()),), stream=stream) as call:
            array, view = call.empty((2, 3), "bfloat16")
            arrays, (address,) = call.allocate((("workspace", (256,), "uint8", False),))
        assert cupy.allocated[-2:] == [((2, 3), "bfloat16", stream), ((256,), "uint8", stream)]
        assert (cupy.stream.ptr, call.export(array)) == (5, array)
        assert (view.shape, view.dtype) == ((2, 3), "bfloat16")
        assert address == 0x2000 == arrays[0].data.ptr


def test_torch_allocates_on_the_stream_of_the_call(fake_torch, cuda):
    cuda.capturing.add(7)
    q = fake_torch.Tensor((3,), fake_torch.uint8)
    for stream in (None, 640):
        with open_call((("q", q),), stream=stream) as call:
            array, view = call.empty((16,), "uint8")
            assert call.capturing == (stream is None)
        assert (type(array), view.ptr) == (fake_torch.Tensor, 0x7F0000003000)
    assert fake_torch.allocated == [((16,), 0, 7), ((16,), 0, 640)]


def test_jax_sharded_array_on_gpus(fake_jax):
    with pytest.raises(ValueError, match=r"q: .*sharded over 4; .*q\.addressable_shards"):
        open_call((("q", fake_jax.Array(devices=4)),))


def test_capture_forbids_cupy_allocations(cuda, cupy):
    cuda.capturing.add(5)
    with open_call((("q", cupy.ndarray()),), stream=5) as call:
        assert call.capturing
        with pytest.raises(NotPreparedError, match="captures: pass workspace=, made before"):
            call.empty((2,), "float16")
    assert cupy.allocated == []


@pytest.mark.parametrize(
    ("wanted", "ways"),
    [
        (("out", "scale_out"), "pass out= and scale_out="),
        (("lse",), "pass lse="),
        (("out", "lse", "workspace"), "pass out= and lse=, and use a plan"),
        (("workspace",), "use a plan"),
    ],
)
def test_a_refusal_under_capture_names_what_is_missing(cuda, cupy, wanted, ways):
    cuda.capturing.add(5)
    call = open_call((("q", cupy.ndarray()),), stream=5)
    with call, pytest.raises(NotPreparedError, match=f"captures: {ways}, made before the capture$"):
        call.allocate(tuple((name, (2,), "float16", False) for name in wanted))


def test_capture_forbids_imports(cuda, fake_jax):
    cuda.capturing.add(5)
    q = fake_jax.Array()
    with pytest.raises(NotPreparedError, match="q: the stream is being captured"):
        open_call((("q", q),), stream=5)
    assert q.streams == []


def test_nothing_is_allocated_on_the_cpu():
    with pytest.raises(ValueError, match="empty: needs a call whose arrays are on the GPU"):
        open_call((("q", np.zeros(3)),)).empty((3,), "float32")


def test_missing_cupy_names_both_extras(fake_jax, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"cumla\[cu12\]") as caught:
        open_call((("q", fake_jax.Array()),))
    assert isinstance(caught.value, ImportError)
    assert 'pip install "cumla[cu13]"' in str(caught.value)


def test_cupy_installed_twice(no_cupy_yet, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "14.2.0")
    with pytest.raises(MissingDependencyError, match=r"installed 4 times .*cupy-cuda13x 14\.2\.0"):
        open_device()


class CUDARuntimeError(RuntimeError):
    pass


def test_no_gpu_for_cupy(cupy):
    def get_device():
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime = types.SimpleNamespace(
        getDevice=get_device, CUDARuntimeError=CUDARuntimeError
    )
    with pytest.raises(UnsupportedDeviceError, match=r"9\.0.*no GPU.*cudaErrorInsuf.*sm_count="):
        open_device()


def test_no_driver(no_cupy_yet, monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy())
    monkeypatch.setattr(arrays, "driver", _driver.Driver)
    monkeypatch.setattr(ctypes, "PyDLL", load)
    with pytest.raises(UnsupportedDeviceError, match=r"driver.*libcuda\.so\.1: cannot open"):
        open_device(0)


# --- the driver ----------------------------------------------------------------------------------


def make_driver(monkeypatch, **options):
    library = FakeLibrary(**options)
    for loader in ("PyDLL", "CDLL"):
        monkeypatch.setattr(ctypes, loader, lambda name: library)
    return library, _driver.Driver()


def test_driver_leaves_a_right_context_alone(monkeypatch):
    library, driver = make_driver(monkeypatch, current=203)  # some green context of device 3
    assert driver.enter_device(3) is False
    assert library.pushed == []


@pytest.mark.parametrize("before", [None, 100])
def test_driver_pushes_and_pops_the_primary_context(monkeypatch, before):
    library, driver = make_driver(monkeypatch, current=before)
    for _ in range(2):
        assert driver.enter_device(3) is True
        assert library.context == 103
        driver.leave_device()
        assert library.context == before
    assert library.retained == [3]


def test_the_primary_context_for_a_while(monkeypatch):
    library, driver = make_driver(monkeypatch, current=203)
    with pytest.raises(KeyError), _driver.in_primary_context(driver, 3):
        assert library.context == 103
        library.context = 104  # cudaSetDevice replaces what is current
        raise KeyError
    assert (library.context, library.pushed) == (203, [])


def test_driver_calls_that_may_wait_release_the_gil(monkeypatch):
    """A stream with a full queue gets on only when a host function written in Python has run."""

    def load(loader):
        library = FakeLibrary(current=100)
        for name in ("cuEventRecord", "cuStreamWaitEvent"):
            setattr(library, name, loader(None).usleep)  # of as many us as the handle's number
        return library

    kinds = {name: getattr(ctypes, name) for name in ("PyDLL", "CDLL")}
    for name, loader in kinds.items():
        monkeypatch.setattr(ctypes, name, lambda _, loader=loader: load(loader))
    driver = _driver.Driver()
    wait_us = 600_000
    driver._event_create = lambda event, flags: setattr(event._obj, "value", wait_us) or 0
    for call in (lambda: driver.record_event(9), lambda: driver.wait_event(wait_us, 9)):
        ran = []
        timer = threading.Timer(0.05, lambda ran=ran: ran.append(time.monotonic()))
        began = time.monotonic()
        timer.start()
        call()
        timer.join()
        assert ran[0] - began < 0.5


FORK = """
import ctypes, os, sys, threading, weakref
import numpy as np
from tests.fake_cuda import FakeLibrary
library = FakeLibrary(current=100)
ctypes.PyDLL = ctypes.CDLL = lambda name: library
from cumla.core import _lifetime
from cumla.core.arrays import open_call, open_device
from cumla.errors import UnsupportedDeviceError

class Owner:
    pass

def use_the_cpu():
    assert open_call((("x", np.zeros(3)),)).device is None

library.answer = 600
first, second = Owner(), Owner()
alive = [weakref.ref(first), weakref.ref(second)]
if BEFORE:
    _lifetime.keep_until_passed(first, 9, 0)
    library.capture = (0, 1)
    _lifetime.keep_until_passed(first, 7, 0)
    library.capture = (0, 0)
    held, done = threading.Event(), threading.Event()

    def look():
        with _lifetime._lock:
            held.set()
            done.wait()

    other = threading.Thread(target=look)
    other.start()
    held.wait()
del first
child = os.fork()
if child == 0:
    if BEFORE:
        library.lost = True
        use_the_cpu()
        assert alive[0]() is not None
        _lifetime.keep_until_event(second, 5, 0, 9)  # as a plan's end does
        del second
        use_the_cpu()
        assert alive[1]() is not None
        assert _lifetime._lock.acquire(timeout=5)
        assert (_lifetime.waiting, _lifetime.in_graphs) == ({}, {})
        try:
            _lifetime.driver()
        except UnsupportedDeviceError as error:
            assert "forked" in str(error) and "spawn" in str(error)
        else:
            raise AssertionError
    else:
        _lifetime.keep_until_passed(second, 9, 0)
        assert len(_lifetime.waiting) == 1
    print("done", flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
if BEFORE:
    done.set()
    other.join()
    assert len(_lifetime.waiting) == len(_lifetime.in_graphs) == 1
    library.answer = 0
    use_the_cpu()
    assert _lifetime.waiting == {}
sys.exit(status)
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_fork(before):
    """The CPU serves a child of a process with work on the GPU; of another one the GPU does."""
    program = FORK.replace("BEFORE", str(before))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_driver_names_the_error(monkeypatch):
    _, driver = make_driver(monkeypatch)
    message = r"device 9 failed: CUDA_ERROR_INVALID_DEVICE \(101\)"
    with pytest.raises(UnsupportedDeviceError, match=message):
        driver.enter_device(9)


def test_driver_without_a_gpu(monkeypatch):
    with pytest.raises(UnsupportedDeviceError, match=r"cuInit failed: .* \(100\)"):
        make_driver(monkeypatch, init=100)


def test_driver_records_waits_and_destroys(monkeypatch):
    library, driver = make_driver(monkeypatch, current=103)
    assert driver.current_device() == 3
    event = driver.record_event(9)
    assert library.events == {event: 9}
    driver.wait_event(5, event)
    assert library.waits == [(5, event, 0)]
    driver.destroy_event(event)
    assert library.events == {event: "destroyed"}


def test_driver_leaves_no_event_that_it_could_not_record(monkeypatch):
    library, driver = make_driver(monkeypatch)
    with pytest.raises(CumlaError, match="cuEventRecord failed"):
        driver.record_event(666)
    assert library.events == {1: "destroyed"}


@pytest.mark.parametrize(("answer", "passed"), [(0, True), (600, False), (700, True), (400, True)])
def test_driver_takes_an_event_that_fails_as_passed(monkeypatch, caplog, answer, passed):
    library, driver = make_driver(monkeypatch)
    library.answer = answer
    assert driver.event_passed(1) is passed
    assert ("cuEventQuery failed" in caplog.text) == (answer not in (0, 600))


@pytest.mark.parametrize(
    ("capture", "expected"), [((0, 0), False), ((0, 1), True), ((0, 2), True), ((906, 0), True)]
)
def test_driver_capture_status(monkeypatch, capture, expected):
    _, driver = make_driver(monkeypatch, capture=capture)
    assert driver.is_capturing(0) is expected


def test_driver_restores_the_capture_mode(monkeypatch):
    library, driver = make_driver(monkeypatch)
    with driver.relaxed_capture():
        assert library.mode == 2
    assert library.mode == 0


# --- the CPU path --------------------------------------------------------------------------------

HOST_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int32", "uint8"]


@pytest.mark.parametrize("dtype", HOST_DTYPES)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_numpy_there_and_back(framework, dtype):
    if framework != "numpy":
        pytest.importorskip(framework)
    values = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype, dtype))
    array = from_numpy(framework, values)
    assert open_call((("x", array),)).framework == framework
    back = to_numpy("x", array)
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_writing_to_the_numpy_view_writes_to_the_tensor(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, dtype=getattr(torch, dtype), requires_grad=dtype == "float32")
    with torch.no_grad():
        to_numpy("x", tensor[::2, 1:])[1, 2] = 3
    written = tensor.detach().float()
    assert (float(written[2, 3]), float(written.sum())) == (3, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_numpy_view_of_a_dlpack_array(dtype):
    array = Producer((2, 3), dtype, strides=(8, 2), offset=16)
    view = to_numpy("x", array)
    size = view.itemsize
    assert view.dtype == np.dtype(dtype)
    start = array.memory[16 : 16 + 2 * 8 * size].view(dtype).reshape(2, 8)[:, :6:2]
    np.testing.assert_array_equal(view.view(f"u{size}"), start.view(f"u{size}"))
    assert np.shares_memory(view, array.memory)
    assert array.deleted == 0
    del view
    gc.collect()
    assert array.deleted == 1


def test_numpy_view_of_a_gpu_array(cupy):
    with pytest.raises(ValueError, match="q: needs an array on the CPU, got one on CUDA device 0"):
        to_numpy("q", cupy.ndarray())


def test_importing_arrays_imports_no_framework():
    frameworks = "{'torch', 'jax', 'cupy', 'cuda'}"
    program = f"import cumla.core.arrays, sys; print({frameworks} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
@pytest.mark.parametrize("variable", ["CUPY_CACHE_DIR", "HOME"])
def test_cupy_without_a_folder_for_its_cache(variable, tmp_path):
    """It is imported, its kernels are compiled in memory, and the variable is as it was."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    program = f"""
import os
from cumla.core._cupy import import_cupy
for _ in range(2):
    import_cupy()
print(os.environ[{variable!r}], os.environ["CUPY_CACHE_IN_MEMORY"], "CUPY_CACHE_DIR" in os.environ)
"""
    env = {n: value for n, value in os.environ.items() if not n.startswith("CUPY_")}
    env[variable] = folder
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.split() == [folder, "1", str(variable != "HOME")], done.stderr
    assert done.stderr.count("let CUPY_CACHE_DIR name a folder to which you can write") == 1


def test_what_lives_until_the_interpreter_exits():
    """Finalizers say nothing where the globals of their modules are gone before them."""
    program = """
import sys
import numpy as np
from cumla.core import _dlpack, plan
kept = _dlpack.import_array("x", np.zeros(3), None)
workspace = plan.Workspace.__new__(plan.Workspace)
workspace._event = 1
sys.kept = (sys.modules["__main__"], _dlpack, plan)  # modules in use are cleared, the last first
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
