# SPDX-License-Identifier: Apache-2.0
"""Arrays of every framework, on the CPU and, with a driver and a CuPy that pretend, on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest

from cumla import _dlpack, _driver, arrays
from cumla.arrays import ArrayView, from_numpy, open_call, open_device, to_numpy
from cumla.errors import CumlaError, MissingDependencyError, NotPreparedError

CODES = {name: key for key, name in _dlpack._DLPACK_DTYPES.items()}
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Producer:
    """An array that only DLPack can read: it counts what happens to its capsules."""

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
    ):
        self.deleted = 0
        self.streams = []
        self.versioned = versioned
        self.device = device
        code, bits = code or CODES[dtype]
        self.memory = np.arange(4096, dtype=np.uint8)
        self.layout = _dlpack._ManagedTensorVersioned if versioned else _dlpack._ManagedTensor
        managed = self.managed = self.layout()
        managed.deleter = ctypes.cast(self._make_deleter(), ctypes.c_void_p)
        if versioned:
            managed.major, managed.minor = major, 3
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

    def is_capturing(self, stream):
        return stream in self.capturing

    def record_event(self, stream):
        self.recorded.append(stream)
        return len(self.recorded)

    def event_passed(self, event):
        return event in self.passed

    def destroy_event(self, event):
        self.destroyed.append(event)

    @contextlib.contextmanager
    def relaxed_capture(self):
        yield


class FakeStream:
    def __init__(self, cupy, ptr):
        self.cupy, self.ptr = cupy, ptr

    def __enter__(self):
        self.previous = self.cupy.stream
        self.cupy.stream = self

    def __exit__(self, *error):
        self.cupy.stream = self.previous


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

        class Stream(FakeStream):
            null = module.null

            @staticmethod
            def from_external(stream):
                version, handle = stream.__cuda_stream__()
                assert version == 0
                return FakeStream(module, handle)

        self.ndarray = ndarray
        self.cuda = types.SimpleNamespace(
            get_current_stream=lambda device: module.stream,
            runtime=types.SimpleNamespace(getDevice=lambda: 1),
            Stream=Stream,
        )

    def empty(self, shape, dtype):
        self.allocated.append((shape, np.dtype(dtype).name, self.stream.ptr))
        return self.ndarray(shape, dtype, device=0, ptr=0x2000)


@pytest.fixture
def cuda(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(arrays, "driver", lambda: driver)
    monkeypatch.setattr(_dlpack, "driver", lambda: driver)
    monkeypatch.setattr(arrays, "_framework_of_type", {np.ndarray: arrays._NUMPY})
    yield driver
    _dlpack.retained.clear()


@pytest.fixture
def cupy(cuda, monkeypatch):
    module = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    arrays._cupy.cache_clear()
    yield module
    arrays._cupy.cache_clear()


@pytest.fixture
def fake_jax(cupy, monkeypatch):
    """A JAX with one array type, on a GPU."""

    class Array(Producer):
        def __init__(self, devices=1):
            super().__init__(dtype="bfloat16", device=(2, 0))
            self.sharding = types.SimpleNamespace(device_set=set(range(devices)))

        def is_deleted(self):
            return False

    def from_dlpack(array):
        return ("jax", array, cupy.stream.ptr)

    module = types.SimpleNamespace(
        Array=Array, dlpack=types.SimpleNamespace(from_dlpack=from_dlpack)
    )
    monkeypatch.setitem(sys.modules, "jax", module)
    arrays._jax.cache_clear()
    yield module
    arrays._jax.cache_clear()


@pytest.fixture
def fake_torch(cuda, monkeypatch):
    """A torch whose tensors are on a GPU."""

    class Tensor:
        is_cuda = True

        def __init__(self, shape, dtype):
            self.shape, self.dtype = shape, dtype

        def data_ptr(self):
            return 0x3000

        def stride(self):
            return tuple([1] * len(self.shape))

        def get_device(self):
            return 0

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

    module._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: module.current)
    module.cuda = types.SimpleNamespace(stream=use, ExternalStream=lambda handle, device: handle)
    module.empty = empty
    monkeypatch.setitem(sys.modules, "torch", module)
    arrays._torch.cache_clear()
    yield module
    arrays._torch.cache_clear()


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
    call = open_call((("x", torch.zeros(3)), ("y", parameter)))
    assert call.views[1].ptr == parameter.data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn"])
def test_jax_view(dtype):
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((3, 5), dtype)
    call, view = view_of(array)
    size = array.dtype.itemsize
    expected = ArrayView(array.unsafe_buffer_pointer(), (3, 5), (5 * size, size), dtype, None)
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


# --- what is not an array, or has no memory ------------------------------------------------------


@pytest.mark.parametrize("value", [[1, 2], 3.0, None, "text"])
def test_not_an_array(value):
    with pytest.raises(TypeError, match="cache_seqlens: needs an array of CuPy, PyTorch, JAX"):
        open_call((("q", np.zeros(3)), ("cache_seqlens", value)))


def test_jax_tracer():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"q: needs an array with memory, got a JAX tracer"):
        jax.jit(lambda x: open_call((("q", x),)))(jax.numpy.ones(3))


def test_jax_output():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    with pytest.raises(TypeError, match=r"out: JAX arrays are immutable .* call without out="):
        open_call((("q", x),), (("out", x),))


def test_jax_deleted_array():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    x.delete()
    with pytest.raises(
        ValueError, match="q: needs an array with memory, got one deleted or donated"
    ):
        open_call((("q", x),))


def test_jax_sharded_array():
    pytest.importorskip("jax")
    program = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from cumla.arrays import open_call
mesh = jax.make_mesh((2,), ("x",))
array = jax.device_put(np.zeros((4, 2), np.float32), NamedSharding(mesh, PartitionSpec("x")))
try:
    open_call((("kv_cache", array),))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "kv_cache: needs an array on one device, got one that is sharded over 2" in done.stdout


def test_torch_fake_tensor():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

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

    def inside_vmap(x):
        open_call((("q", x),))
        return x

    with pytest.raises(TypeError, match="q: needs a dense tensor with memory of its own"):
        torch.vmap(inside_vmap)(torch.zeros(2, 3))


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
    inputs = tuple((name, cupy.ndarray(ptr=i)) for i, name in enumerate("abc"))
    call = open_call(inputs, (("out", None), ("lse", cupy.ndarray(ptr=9))))
    assert [view and view.ptr for view in call.views] == [0, 1, 2, None, 9]
    assert call.views[0] == ArrayView(0, (4, 8), (16, 2), "float16", 0)


def test_cupy_distributed_array(cupy):
    class DistributedArray(cupy.ndarray):
        pass

    with pytest.raises(ValueError, match=r"q: .*got a DistributedArray, which is sharded"):
        open_call((("q", DistributedArray()),))


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
    with pytest.raises(error, match="stream: needs a"):
        open_call((("q", cupy.ndarray()),), stream=stream)


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
    _dlpack.release_finished()
    assert [array.deleted for own in producers for array in own] == [1] * 200


# --- allocation ----------------------------------------------------------------------------------


def test_cupy_allocates_on_the_stream_of_the_call(cupy):
    for stream in (0, 640):
        cupy.stream = FakeStream(cupy, 5)
        with open_call((("q", cupy.ndarray()),), stream=stream) as call:
            array, view = call.empty((2, 3), "bfloat16")
            workspace = call.workspace(256)
        assert cupy.allocated[-2:] == [((2, 3), "bfloat16", stream), ((256,), "uint8", stream)]
        assert (cupy.stream.ptr, call.export(array)) == (5, array)
        assert (view.shape, view.dtype, workspace.ptr) == ((2, 3), "bfloat16", 0x2000)


def test_torch_allocates_on_the_stream_of_the_call(fake_torch, cuda):
    cuda.capturing.add(7)
    q = fake_torch.Tensor((3,), fake_torch.uint8)
    for stream in (None, 640):
        with open_call((("q", q),), stream=stream) as call:
            array, view = call.empty((16,), "uint8")
            assert call.capturing == (stream is None)
        assert (type(array), view.ptr) == (fake_torch.Tensor, 0x3000)
    assert fake_torch.allocated == [((16,), 0, 7), ((16,), 0, 640)]


def test_jax_results_are_cupys_handed_over_on_the_stream(fake_jax, cupy):
    q = fake_jax.Array()
    with open_call((("q", q),), stream=640) as call:
        array, _ = call.empty((2,), "bfloat16")
        result = call.export(array)
    assert (call.framework, q.streams) == ("jax", [640])
    assert result == ("jax", array, 640)
    assert cupy.allocated == [((2,), "bfloat16", 640)]


def test_jax_sharded_array_on_gpus(fake_jax):
    with pytest.raises(ValueError, match=r"q: .*sharded over 4; .*q\.addressable_shards"):
        open_call((("q", fake_jax.Array(devices=4)),))


def test_capture_forbids_cupy_allocations(cuda, cupy):
    cuda.capturing.add(5)
    with open_call((("q", cupy.ndarray()),), stream=5) as call:
        assert call.capturing
        with pytest.raises(NotPreparedError, match="out=, lse= and plan="):
            call.empty((2,), "float16")
        with pytest.raises(NotPreparedError, match="out=, lse= and plan="):
            call.workspace(256)
    assert cupy.allocated == []


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
    arrays._cupy.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"cumla\[cu12\]") as caught:
        open_call((("q", fake_jax.Array()),))
    assert isinstance(caught.value, ImportError)
    assert 'pip install "cumla[cu13]"' in str(caught.value)


# --- the driver ----------------------------------------------------------------------------------


class FakeLibrary:
    """libcuda as `Driver` calls it: results go where the references point."""

    def __init__(self, current=0, capture=(0, 0)):
        self.context = current  # context 100 + n is the primary one of device n
        self.capture = capture
        self.pushed, self.retained, self.mode, self.events = [], [], 0, {}

    def __getattr__(self, name):
        def call(*arguments):
            return getattr(self, "on_" + name)(*arguments)

        setattr(self, name, call)
        return call

    def on_cuInit(self, flags):
        return 0

    def on_cuCtxGetDevice(self, device):
        if self.context is None:
            return 201
        device._obj.value = self.context % 100
        return 0

    def on_cuDevicePrimaryCtxRetain(self, context, device):
        if device > 7:
            return 101
        self.retained.append(device)
        context._obj.value = 100 + device
        return 0

    def on_cuCtxPushCurrent_v2(self, context):
        self.pushed.append(self.context)
        self.context = context.value
        return 0

    def on_cuCtxPopCurrent_v2(self, context):
        self.context = self.pushed.pop()
        return 0

    def on_cuStreamIsCapturing(self, stream, status):
        status._obj.value = self.capture[1]
        return self.capture[0]

    def on_cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def on_cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_INVALID_DEVICE"
        return 0


def make_driver(monkeypatch, **options):
    library = FakeLibrary(**options)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library)
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


def test_driver_names_the_error(monkeypatch):
    _, driver = make_driver(monkeypatch)
    with pytest.raises(CumlaError, match=r"device 9 failed: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        driver.enter_device(9)


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
    program = "import cumla.arrays, sys; print({'torch', 'jax', 'cupy', 'cuda'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
