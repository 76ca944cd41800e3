# SPDX-License-Identifier: Apache-2.0
"""The benchmark's access to a GPU, through CuPy: memory, launches, events, graphs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import sleep
from types import TracebackType
from typing import Any, cast

import ml_dtypes
import numpy as np

from cumla.launch.device import current_device, import_cupy, require_hopper
from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec

STREAM_BYTES = 4 << 30
"""The array whose reading and copying gives the memory ceilings."""
FLUSH_BYTES = 512 << 20
"""Read of it before each timed run: many times an L2 cache."""

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""The element types of queries and caches; one of them NumPy does not know by name."""
_TAGS = {"bfloat16": "Bf16", "float16": "Fp16"}  # their names in CUDA


def bench_spec(
    name: str, params: str, threads: int, smem_bytes: int = 0, dtype: str | None = None
) -> KernelSpec:
    """Describe kernel `name` of ``cumla/bench/cuda``, which is compiled as the library's are.

    With a dtype the kernel is a template.
    """
    return KernelSpec(
        stem=name,
        entry=f"bench_{name}" if dtype is None else f"bench_{name}_{dtype}",
        function=name if dtype is None else f"{name}<{_TAGS[dtype]}>",
        params=params,
        threads=threads,
        smem_bytes=smem_bytes,
        package="cumla.bench.cuda",
    )


READ_STREAM = bench_spec("read_stream", "ReadStreamParams", 512)
_READ_STREAM_PARAMS = struct.Struct("<QqQ")
_READ_STREAM_BLOCKS = 4  # of a multiprocessor
SPIN = bench_spec("spin", "SpinParams", 32)
_SPIN_PARAMS = struct.Struct("<q")
_HOLD_CLOCKS = 200_000  # 100 us: as long as emptying the L2 cache takes


class Gpu:
    """CuPy's current device, with a stream of its own that is CuPy's current one inside ``with``.

    Everything runs on that stream. `MissingDependencyError` or `UnsupportedDeviceError` if CuPy or
    a GPU of compute capability 9.0 is missing.
    """

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self.ordinal = current_device()
        self.properties = require_hopper(self.ordinal)
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streamed: Any = None
        self._sink: Any = None

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
        return self._cupy.empty(shape, dtype=DTYPES.get(dtype, dtype))

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        """Copy an array to the device."""
        return self._cupy.asarray(array)

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy an array to the host, after all work on the stream."""
        copied: np.ndarray[Any, Any] = self._cupy.asnumpy(array, stream=self.stream)
        self.synchronize()
        return copied

    def address(self, array: Any) -> int:
        """Return the address of a contiguous array."""
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
        launch = Launch(spec, (blocks, 1, 1), layout, tuple(values))
        launch.template(self.ordinal, lambda: False).at({}, self.stream.ptr)()

    def read(self, array: Any) -> None:
        """Read a contiguous array whose size is a multiple of 16 bytes."""
        values = (self.address(array), array.nbytes // 16, self.address(self._sink))
        blocks = _READ_STREAM_BLOCKS * self.properties.sm_count
        self.launch(READ_STREAM, blocks, _READ_STREAM_PARAMS, values)

    def flush_l2(self) -> None:
        """Read so much that nothing of interest is left in the L2 cache."""
        self.read(self._streamed[: FLUSH_BYTES // 2])

    def rest(self) -> None:
        """Wait until all work is done, and a tenth of a second more.

        A GPU that was at its power limit a moment ago keeps lower clocks for some time: one case
        took 17 % longer after another one. So no timing depends on what was timed before.
        """
        self.synchronize()
        sleep(0.1)

    def hold(self) -> None:
        """Keep the stream busy about as long as `flush_l2` does, and leave the caches alone."""
        self.launch(SPIN, 1, _SPIN_PARAMS, (_HOLD_CLOCKS,))

    def release(self) -> None:
        """Give memory that no array uses back to the driver, for arrays of other sizes."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        pool = self._cupy.get_default_memory_pool()
        return int(self._cupy.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())

    def torch_stream(self, torch: Any) -> AbstractContextManager[object]:
        """Make the stream PyTorch's current one inside ``with``."""
        return cast(
            "AbstractContextManager[object]",
            torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)),
        )

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
