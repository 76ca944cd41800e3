# SPDX-License-Identifier: Apache-2.0
"""Launching: grid, stream, parameters, programmatic dependent launch."""

from __future__ import annotations

import ctypes
import struct
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from cumla.errors import CumlaError
from cumla.launch.device import import_driver

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from cumla.launch.module import LoadedKernel

__all__ = ["PreparedLaunch", "ReadyLaunches"]

_MOST_READY = 1024


class PreparedLaunch:
    """A kernel that takes one struct by value, with its struct, grid and stream.

    Calling it launches; it can be called any number of times, from any thread. The launch may
    overlap the tail of the kernel before it in the stream (programmatic dependent launch): every
    kernel of ours executes ``griddepcontrol.wait`` before it reads or writes memory.

    Parameters
    ----------
    kernel : LoadedKernel
        What to launch; its threads and dynamic shared memory are those of its spec.
    grid : tuple[int, int, int]
        Blocks in x, y and z.
    layout : struct.Struct
        Memory layout of the parameter struct, padding included.
    values : sequence
        The struct's fields in order.
    stream : int
        CUstream handle.
    """

    __slots__ = ("_config", "_handle", "_kernel", "_launch", "_owned", "_pointers", "_stream")

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        layout: struct.Struct,
        values: Sequence[Any],
        stream: int,
    ) -> None:
        parameters = _buffer_type(layout.size)()
        layout.pack_into(parameters, 0, *values)
        pointers = _Pointers(ctypes.addressof(parameters))
        spec = kernel.spec
        self._launch = import_driver().cuLaunchKernelEx
        self._config = _config(grid, spec.threads, spec.smem_bytes, stream)
        self._handle = kernel.handle
        self._pointers = ctypes.addressof(pointers)
        self._owned = (parameters, pointers)
        self._kernel = kernel
        self._stream = stream

    def __call__(self) -> None:
        """Launch the kernel; raise `CumlaError` if the driver refuses."""
        (status,) = self._launch(self._config, self._handle, self._pointers, 0)
        if status:
            raise CumlaError(
                f"kernel {self._kernel.spec.entry}: the launch on stream {self._stream:#x} of CUDA "
                f"device {self._kernel.device} failed with {status.name}; stream= must be a live "
                f"stream of that device, and what an earlier kernel of any library did wrong is "
                f"reported here too: CUMLA_CHECK=1 looks for it in the arguments of this one"
            )


class ReadyLaunches(dict["Hashable", PreparedLaunch]):
    """Launches by the views of the call that prepared them, and whatever else they depend on.

    What was checked and packed for some arrays need not be for the same ones again: a launch holds
    addresses, shapes and strides, and no array.
    """

    def keep(self, key: Hashable, launch: PreparedLaunch) -> None:
        """Keep a launch; where there are too many, the others are forgotten."""
        if len(self) >= _MOST_READY:
            self.clear()
        self[key] = launch


_Pointers = ctypes.c_void_p * 1


@cache
def _buffer_type(size: int) -> Any:
    return ctypes.c_char * size


@lru_cache(maxsize=1024)
def _config(grid: tuple[int, int, int], threads: int, smem_bytes: int, stream: int) -> Any:
    """Make a launch configuration; the driver only reads it, so calls and threads share it."""
    driver = import_driver()
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX = threads
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs = [overlap]
    config.numAttrs = 1
    return config
