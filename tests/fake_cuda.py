# SPDX-License-Identifier: Apache-2.0
"""A driver, a CuPy and a cuda.bindings without a GPU: launches are written down, none happens."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import math
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla.errors import CumlaError

_FLOAT8 = {np.dtype(getattr(ml_dtypes, n)) for n in dir(ml_dtypes) if n.startswith("float8")}
_addresses = itertools.count(1)  # of no array twice: what calls remember of it outlives a test


class FakeDriver:
    """The driver's part in a call: nothing happens, and some streams are being captured."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.recorded: list[int] = []  # streams, in the order of the records
        self.events: list[int] = []  # at i - 1: which record was the last of event i
        self.waits: list[tuple[int, int]] = []  # streams: who waits, for whom
        self.passed = True  # whether events have
        self.gone: set[int] = set()  # streams that were destroyed
        self.destroyed: list[int] = []

    def enter_device(self, device: int) -> bool:
        return False

    def enter_primary(self, device: int) -> None: ...

    def leave_device(self) -> None: ...

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def record_event(self, stream: int, again: int = 0) -> int:
        if stream in self.gone:
            raise CumlaError("cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE (400)")
        self.recorded.append(stream)
        if not again:
            self.events.append(0)
        self.events[again - 1] = len(self.recorded) - 1
        return again or len(self.events)

    def wait_event(self, stream: int, event: int) -> None:
        self.waits.append((stream, self.recorded[self.events[event - 1]]))

    def event_passed(self, event: int) -> bool:
        return self.passed

    def destroy_event(self, event: int) -> None:
        self.destroyed.append(event)


class FakeCuPy(types.ModuleType):
    """A CuPy with one GPU model; its arrays have addresses, and those that are `like` a NumPy array
    its values, for who copies from the device."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.capability = (9, 0)
        self.stream = 0
        self.nvrtc = (12, 9)
        self.compiled: list[str] = []  # entry points, which are handles from 1
        self.allocated: list[int] = []  # bytes
        self.freed: list[int] = []  # bytes of those that nobody holds any more
        self.copied: list[str] = []  # what the check mode has looked at: dtype and shape
        self._contents: dict[int, np.ndarray] = {}

        freed = self.freed

        class ndarray:
            allocated: int | None = None  # bytes that `empty` counted

            def __del__(self) -> None:
                if self.allocated is not None:
                    freed.append(self.allocated)

            def __init__(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> None:
                self.shape, self.dtype = shape, np.dtype(dtype)
                strides, end = [], self.dtype.itemsize
                for length in reversed(shape):
                    strides.append(end)
                    end *= length
                self.strides = tuple(reversed(strides))
                self.data = types.SimpleNamespace(ptr=next(_addresses) << 32, device_id=device)

            def swapaxes(self, one: int, other: int) -> Any:
                """The same memory: no new address."""
                view = ndarray.__new__(ndarray)
                view.dtype, view.data, view.base = self.dtype, self.data, self
                for name in ("shape", "strides"):
                    sizes = [*getattr(self, name)]
                    sizes[one], sizes[other] = sizes[other], sizes[one]
                    setattr(view, name, tuple(sizes))
                return view

            def reshape(self, *shape: int) -> Any:
                """The same memory, of a contiguous array."""
                rest = int(np.prod(self.shape)) // abs(int(np.prod(shape)) or 1)
                return self.at(0, tuple([rest if n < 0 else n for n in shape]), self.dtype)

            def view(self, dtype: Any) -> Any:
                """The same memory, of an array with one axis."""
                size = np.dtype(dtype).itemsize
                return self.at(0, (self.shape[0] * self.dtype.itemsize // size,), dtype)

            def __getitem__(self, of: slice) -> Any:
                """A range of an array with one axis."""
                begin, end, _ = of.indices(self.shape[0])
                return self.at(begin * self.dtype.itemsize, (end - begin,), self.dtype)

            def at(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
                """A contiguous array, at an offset in bytes."""
                view = ndarray(shape, dtype)
                device = self.data.device_id
                view.data = types.SimpleNamespace(ptr=self.data.ptr + offset, device_id=device)
                view.base = self
                return view

        self.ndarray = ndarray
        streams = types.SimpleNamespace(
            null=self._stream(0), from_external=lambda given: self._stream(given.handle)
        )
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=self._properties,
            memcpyAsync=self._copy,
            memcpyDeviceToHost=2,
            streamSynchronize=lambda stream: None,
            CUDARuntimeError=RuntimeError,
        )
        self.cuda = types.SimpleNamespace(
            Device=FakeDevice,
            Stream=streams,
            compiler=types.SimpleNamespace(CompileException=RuntimeError),
            get_current_stream=lambda device=0: self._stream(self.stream),
            nvrtc=types.SimpleNamespace(getVersion=self._nvrtc_version),
            runtime=runtime,
        )

    def _stream(self, handle: int) -> Any:
        """Make a stream that can become the current one."""

        def use() -> None:
            self.stream = handle

        return types.SimpleNamespace(ptr=handle, use=use)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if np.dtype(dtype) in _FLOAT8:  # as CuPy 14.2
            raise ValueError(f"Unsupported dtype {np.dtype(dtype)}")
        array = self.ndarray(shape, dtype)
        nbytes = math.prod(shape) * array.dtype.itemsize
        self.allocated.append(nbytes)
        array.allocated = nbytes
        return array

    def like(self, array: Any, device: int = 0) -> Any:
        """Put a NumPy array, or those of a tuple or list, on the GPU; leave other things alone."""
        if isinstance(array, (tuple, list)):
            return type(array)([self.like(part, device) for part in array])
        if not isinstance(array, np.ndarray):
            return array
        there = self.ndarray(array.shape, array.dtype, device)
        self._contents[there.data.ptr] = array
        return there

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        """Compile nothing."""
        return types.SimpleNamespace(get_function=self._function)

    def _function(self, entry: str) -> Any:
        self.compiled.append(entry)
        handle = types.SimpleNamespace(ptr=len(self.compiled))
        return types.SimpleNamespace(kernel=handle, local_size_bytes=0)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        array = self._contents[source]
        self.copied.append(f"{array.dtype} {array.shape}")
        assert nbytes == array.nbytes
        ctypes.memmove(target, array.ctypes.data, nbytes)

    def _properties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"NVIDIA Imaginary",
            "major": self.capability[0],
            "minor": self.capability[1],
            "multiProcessorCount": 132,
            "sharedMemPerBlockOptin": 232448,
            "l2CacheSize": 50 << 20,
        }

    def _nvrtc_version(self) -> tuple[int, int]:
        if self.nvrtc == (0, 0):
            raise RuntimeError("CuPy failed to load libnvrtc.so.12\nsome more")
        return self.nvrtc


class Launched(NamedTuple):
    """A launch that the driver was asked for."""

    entry: str
    grid: tuple[int, int, int]
    stream: int
    parameters: int  # where they are
    freed: int  # arrays that had been let go by then

    def read(self, nbytes: int) -> bytes:
        """Read the parameters, while whoever launched them is there."""
        (first,) = (ctypes.c_void_p * 1).from_address(self.parameters)
        return ctypes.string_at(first, nbytes)


class FakeBindings(types.ModuleType):
    """`cuda.bindings.driver`: tensor maps of bytes that depend on all they are made of; a list of
    the kernels, of a `FakeCuPy`, that were launched."""

    def __init__(self, cupy: FakeCuPy) -> None:
        super().__init__("cuda.bindings.driver")
        self._cupy = cupy
        self.launched: list[Launched] = []
        self.attributes: list[tuple[int, Any, int]] = []  # of kernels: handle, name, value
        self.refused: Any = 0  # the status of whoever sets one
        self.cuuint64_t = self.cuuint32_t = int

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("CU"):
            raise AttributeError(name)
        return _Enumeration(name)

    @property
    def entries(self) -> list[str]:
        """Entry points of what was launched; all of it is forgotten."""
        names = [launch.entry for launch in self.launched]
        self.launched.clear()
        return names

    def CUlaunchConfig(self) -> Any:
        return types.SimpleNamespace()

    def CUlaunchAttribute(self) -> Any:
        value = types.SimpleNamespace(clusterDim=types.SimpleNamespace())
        return types.SimpleNamespace(value=value)

    def cuLaunchKernelEx(self, config: Any, handle: int, parameters: int, extra: int) -> tuple[int]:
        entry = self._cupy.compiled[handle - 1]
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        freed = len(self._cupy.freed)
        self.launched.append(Launched(entry, grid, config.hStream, parameters, freed))
        return (0,)

    def cuFuncSetAttribute(self, handle: int, attribute: Any, value: int) -> tuple[Any]:
        self.attributes.append((handle, attribute, value))
        return (self.refused,)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
        digest = hashlib.sha512(repr(arguments).encode()).digest()
        buffer = ctypes.create_string_buffer(2 * digest, 128)
        return 0, types.SimpleNamespace(getPtr=lambda: ctypes.addressof(buffer))


class _Enumeration:
    """Members of an enumeration of the driver's: their names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, member: str) -> str:
        return f"{self._name}.{member}"


class FakeDevice:
    id = 0

    def __init__(self, device: int = 0) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class FakeLibrary:
    """libcuda as `Driver` calls it: results go where the references point."""

    def __init__(
        self, current: int | None = 0, capture: tuple[int, int] = (0, 0), init: int = 0
    ) -> None:
        self.context = current  # context 100 + n is the primary one of device n
        self.capture = capture
        self.init = init
        self.pushed: list[int | None] = []
        self.retained: list[int] = []
        self.events: dict[int, object] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.asked: list[int] = []  # contexts, whether a stream of theirs is being captured
        self.mode = self.answer = 0
        self.lost = False  # in a forked process, where every call fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            return 3 if self.lost else int(getattr(self, "on_" + name)(*arguments))

        setattr(self, name, call)
        return call

    def on_cuInit(self, flags: Any) -> int:
        return self.init

    def on_cuCtxGetDevice(self, device: Any) -> int:
        if self.context is None:
            return 201
        device._obj.value = self.context % 100
        return 0

    def on_cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        if device > 7:
            return 101
        self.retained.append(device)
        context._obj.value = 100 + device
        return 0

    def on_cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.pushed.append(self.context)
        self.context = context.value
        return 0

    def on_cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.context = self.pushed.pop()
        return 0

    def on_cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        if self.context is None:  # the default stream is that of the current context
            return 201
        self.asked.append(self.context)
        status._obj.value = self.capture[1]
        return self.capture[0]

    def on_cuEventCreate(self, event: Any, flags: Any) -> int:
        event._obj.value = 1 + len(self.events)
        self.events[event._obj.value] = "created"
        return 0

    def on_cuEventRecord(self, event: Any, stream: Any) -> int:
        self.events[event.value] = stream
        return 400 if stream == 666 else 0

    def on_cuEventQuery(self, event: Any) -> int:
        return self.answer

    def on_cuEventDestroy_v2(self, event: Any) -> int:
        self.events[getattr(event, "value", event)] = "destroyed"
        return 0

    def on_cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:
        self.waits.append((stream, event, flags))
        return 0

    def on_cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def on_cuGetErrorName(self, status: Any, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_DEVICE"
        return 0
