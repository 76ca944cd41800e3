# SPDX-License-Identifier: Apache-2.0
"""A driver and a CuPy whose arrays have addresses and nothing behind them; nothing is launched."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np


class FakeDriver:
    """The driver's part in a call: nothing happens, and some streams are being captured."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.recorded: list[int] = []  # streams; event i is the i-th, from 1
        self.destroyed: list[int] = []

    def enter_device(self, device: int) -> bool:
        return False

    def enter_primary(self, device: int) -> None: ...

    def leave_device(self) -> None: ...

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self, stream: int) -> int:
        self.recorded.append(stream)
        return len(self.recorded)

    def destroy_event(self, event: int) -> None:
        self.destroyed.append(event)


class FakeCuPy(types.ModuleType):
    """A CuPy with one GPU model; its arrays have addresses and nothing behind them."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.capability = (9, 0)
        self.stream = 0
        self.nvrtc = (12, 8)

        class ndarray:
            def __init__(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> None:
                shadow = np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape)
                self.shape, self.dtype = shape, shadow.dtype
                ends = np.cumprod([self.dtype.itemsize, *shape[:0:-1]])
                self.strides = tuple(int(end) for end in ends[::-1])
                self.data = types.SimpleNamespace(ptr=0x1000, device_id=device)

        self.ndarray = ndarray
        streams = types.SimpleNamespace(from_external=lambda _: contextlib.nullcontext())
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=self._properties,
            CUDARuntimeError=RuntimeError,
        )
        self.cuda = types.SimpleNamespace(
            Device=FakeDevice,
            Stream=streams,
            get_current_stream=lambda device: types.SimpleNamespace(ptr=self.stream),
            nvrtc=types.SimpleNamespace(getVersion=self._nvrtc_version),
            runtime=runtime,
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if np.dtype(dtype).name.startswith("float8"):  # as CuPy 14.2
            raise ValueError(f"Unsupported dtype {np.dtype(dtype)}")
        return self.ndarray(shape, dtype)

    def like(self, array: Any, device: int = 0) -> Any:
        return self.ndarray(array.shape, array.dtype, device)

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
