# SPDX-License-Identifier: Apache-2.0
"""Launching: grid, stream, parameters, programmatic dependent launch."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from cumla.errors import CumlaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.launch.module import LoadedKernel

__all__ = ["launch"]


def launch(
    kernel: LoadedKernel,
    grid: tuple[int, int],
    layout: struct.Struct,
    values: Sequence[Any],
    stream: int,
) -> None:
    """Launch a kernel that takes one struct by value.

    The launch may overlap the tail of the kernel before it in the stream (programmatic dependent launch):
    every kernel of ours executes ``griddepcontrol.wait`` before it touches memory.

    Parameters
    ----------
    kernel : LoadedKernel
        What to launch; its threads and dynamic shared memory are those of its spec.
    grid : tuple[int, int]
        Blocks in x and y.
    layout : struct.Struct
        Memory layout of the parameter struct, padding included.
    values : sequence
        The struct's fields in order.
    stream : int
        CUstream handle.
    """
    driver = _driver()
    parameters = ctypes.create_string_buffer(layout.size)
    layout.pack_into(parameters, 0, *values)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY = grid
    config.gridDimZ = 1
    config.blockDimX = kernel.spec.threads
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = kernel.spec.smem_bytes
    config.hStream = stream
    config.attrs = [_overlap_attribute()]
    config.numAttrs = 1
    (status,) = driver.cuLaunchKernelEx(config, kernel.handle, ctypes.addressof(pointers), 0)
    if status:
        raise CumlaError(f"{kernel.spec.entry}: the launch failed with {status.name}")


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _overlap_attribute() -> Any:
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
