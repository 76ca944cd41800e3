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
