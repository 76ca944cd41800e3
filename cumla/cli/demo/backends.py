# SPDX-License-Identifier: Apache-2.0
"""Where the demo's cache lives and attention runs: on the GPU if it can, else on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cumla
from cumla.launch.device import import_cupy, require_hopper

Array = NDArray[Any]


class CPUBackend:
    """NumPy arrays, which cumla's operations hand to `cumla.reference`."""

    name = "cumla.reference on the CPU"
    clock = "wall clock"
    repeats = "a call of the reference"

    def prepare(self, *plans_or_functions: Any) -> None:
        """Have kernels ready for plans and functions, so that no step waits for a compiler."""

    def put(self, array: Array) -> Any:
        """Bring a host array to where attention runs."""
        return array

    def fetch(self, array: Any) -> Array:
        """Bring it back."""
        return np.asarray(array)

    def write(self, target: Any, source: Array) -> None:
        """Overwrite a contiguous part of an array there."""
        target[...] = source

    def copy(self, target: Any, source: Any) -> None:
        """Copy a contiguous array there over another one."""
        target[...] = source

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Run a call to its end; its result and its seconds."""
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start

    def repeatable(self, call: Callable[[], None]) -> Callable[[], None]:
        """Make a call ready that is going to be repeated, on the same arrays with new contents."""
        return call


Backend = CPUBackend


class GPUBackend(CPUBackend):
    """CuPy arrays, on which cumla's operations run their kernels. Only copies are left to CuPy."""

    clock = "CUDA events around the call, launches included"
    repeats = "a replay of one CUDA graph"

    def __init__(self, cupy: Any, device: str) -> None:
        self._cupy = cupy
        self.name = f"CUDA kernels on {device}"

    def prepare(self, *plans_or_functions: Any) -> None:
        """Compile and load their kernels."""
        cumla.prepare(*plans_or_functions, device=0)

    def put(self, array: Array) -> Any:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def fetch(self, array: Any) -> Array:
        """Copy to the host, after all work so far."""
        return np.asarray(self._cupy.asnumpy(array))

    def write(self, target: Any, source: Array) -> None:
        """Copy to the GPU, into a contiguous part of an array."""
        target.set(source)

    def copy(self, target: Any, source: Any) -> None:
        """Copy on the GPU, on the current stream."""
        target.data.copy_from_device_async(source.data, source.nbytes)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Time by events on the current stream."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, self._cupy.cuda.get_elapsed_time(start, end) / 1e3

    def repeatable(self, call: Callable[[], None]) -> Callable[[], None]:
        """Capture the call into a CUDA graph, to be launched on the current stream."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
        launch: Callable[[], None] = graph.launch
        return launch


def choose_backend() -> tuple[Backend, str]:
    """Take the first GPU if it can run the kernels; say why or why not."""
    try:
        device = require_hopper(0)
    except cumla.CumlaError as error:
        return CPUBackend(), str(error).splitlines()[0]
    return GPUBackend(import_cupy(), device.name), "the first GPU"
