# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of a GPU, through CuPy: memory, launches, events, graphs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from cumla.errors import UnsupportedDeviceError
from cumla.launch.device import import_cupy, require_hopper
from cumla.launch.kernel import launch
from cumla.launch.module import load
from cumla.launch.source import KernelSpec

__all__ = ["FLUSH_BYTES", "READ_STREAM", "STREAM_BYTES", "Gpu", "bench_spec"]

STREAM_BYTES = 4 << 30
"""The array whose reading and copying gives the memory ceilings."""
FLUSH_BYTES = 512 << 20
"""Read of it before each timed run: many times an L2 cache."""

_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}  # what NumPy does not know by name


def bench_spec(name: str, params: str, threads: int, smem_bytes: int = 0) -> KernelSpec:
    """Describe kernel `name` of ``cumla/bench/cuda``, which is compiled as the library's are."""
    return KernelSpec(
        stem=f"../bench/cuda/{name}",
        entry=f"bench_{name}",
        function=name,
        params=params,
        threads=threads,
        smem_bytes=smem_bytes,
    )


READ_STREAM = bench_spec("read_stream", "ReadStreamParams", 512)
_READ_STREAM_PARAMS = struct.Struct("<QqQ")
_READ_STREAM_BLOCKS = 4  # of a multiprocessor


class Gpu:
    """CuPy's current device, with a stream of its own that is CuPy's current one inside ``with``.

    Attributes
    ----------
    ordinal : int
        CUDA device number.
    properties : DeviceProperties
        What the device is.
    stream : cupy.cuda.Stream
        Where everything runs.

    Raises
    ------
    MissingDependencyError, UnsupportedDeviceError
        CuPy or a GPU of compute capability 9.0 is missing.
    """

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self.ordinal: int = self._current_device()
        self.properties = require_hopper(self.ordinal)
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streamed: Any = None
        self._sink: Any = None

    def _current_device(self) -> int:
        runtime = self._cupy.cuda.runtime
        try:
            return int(runtime.getDevice())
        except runtime.CUDARuntimeError as error:
            raise UnsupportedDeviceError(
                f"bench needs a GPU, and there is none ({error})"
            ) from error

    def __enter__(self) -> Gpu:
        self.stream.__enter__()
        self._streamed = self.empty((STREAM_BYTES // 2,), "uint16")
        self._sink = self.empty((1,), "uint32")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stream.__exit__(kind, error, trace)

    @property
    def streamed(self) -> Any:
        """A large array, uint16, whose contents nobody needs."""
        return self._streamed

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate an array, uninitialised."""
        return self._cupy.empty(shape, dtype=_DTYPES.get(dtype, dtype))

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        """Copy an array to the device."""
        return self._cupy.asarray(array)

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy an array to the host, after all work on the stream."""
        copied: np.ndarray[Any, Any] = self._cupy.asnumpy(array, stream=self.stream)
        self.synchronize()
        return copied

    def address(self, array: Any) -> int:
        """Where a contiguous array begins."""
        return int(array.data.ptr)

    def fill_bytes(self, array: Any, value: int) -> None:
        """Set every byte of a contiguous array."""
        array.data.memset_async(value, array.nbytes, self.stream)

    def copy(self, destination: Any, source: Any) -> None:
        """Copy a contiguous array over another one of its size."""
        destination.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def launch(
        self, spec: KernelSpec, blocks: int, layout: struct.Struct, values: Sequence[Any]
    ) -> None:
        """Launch a kernel that takes one struct; compile it the first time."""
        kernel = load(spec, self.ordinal, capturing=lambda: False)
        launch(kernel, (blocks, 1), layout, values, self.stream.ptr)

    def read(self, array: Any) -> None:
        """Read a contiguous array whose size is a multiple of 16 bytes."""
        values = (self.address(array), array.nbytes // 16, self.address(self._sink))
        blocks = _READ_STREAM_BLOCKS * self.properties.sm_count
        self.launch(READ_STREAM, blocks, _READ_STREAM_PARAMS, values)

    def flush_l2(self) -> None:
        """Read so much that nothing of interest is left in the L2 cache."""
        self.read(self._streamed[: FLUSH_BYTES // 2])

    def record(self) -> Any:
        """Record an event now."""
        event = self._cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Time between two events that have passed, in microseconds."""
        return 1e3 * float(self._cupy.cuda.get_elapsed_time(begin, end))

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self.stream.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work into a CUDA graph; the callable that comes back replays it."""
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
        graph.upload(self.stream)

        def replay() -> None:
            graph.launch(self.stream)

        return replay
