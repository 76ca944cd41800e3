# SPDX-License-Identifier: Apache-2.0
"""A launch as data, and launching it: grid, parameters, relocations, stream, dependent launch."""

from __future__ import annotations

import ctypes
import re
import struct
from abc import abstractmethod
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from cumla.core.operation import Address, Operation
from cumla.errors import CumlaError
from cumla.launch.device import import_driver, require_hopper
from cumla.launch.module import load
from cumla.launch.tensor_map import TensorMap, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cumla.core.arrays import ArrayView
    from cumla.launch.module import LoadedKernel
    from cumla.launch.source import KernelSpec

A = TypeVar("A")


class Relocation(NamedTuple):
    """A field of a parameter struct that depends on the address of an argument."""

    offset: int  # of the field in the struct, in bytes
    argument: str
    addend: int  # bytes from where the argument begins
    map: TensorMap | None  # to be encoded with the address; None for the address itself, 64 bits


class Launch(NamedTuple):
    """One launch as data: no GPU, no loaded kernel and no stream is needed to make it."""

    # The kernel takes one struct by value; threads and shared memory are in its spec.
    spec: KernelSpec
    grid: tuple[int, int, int]  # blocks in x, y and z
    layout: struct.Struct  # of the parameter struct, padding included
    values: tuple[Any, ...]  # the struct's fields in order; a tensor map as TensorMap
    cluster: int = 1  # blocks of a cluster, neighbours in x; the grid is whole clusters

    def template(self, device: int, capturing: Callable[[], bool]) -> Template:
        """Load the kernel and pack its parameters, to be completed and launched.

        `capturing` tells whether the stream is being captured; it is asked only where the kernel is
        cold.
        """
        return Template(load(self.spec, device, capturing=capturing), self)

    def pack(self) -> bytes:
        """Pack the struct; tensor maps are encoded, which needs the driver's library."""
        values = [v.encode() if isinstance(v, TensorMap) else v for v in self.values]
        try:
            return self.layout.pack(*values)
        except struct.error as error:
            numbers = [value for value in self.values if isinstance(value, int)]
            raise ValueError(
                f"{self.spec.entry}: needs sizes and strides that its 32-bit numbers hold, got one "
                f"that does not, of at most {max(map(abs, numbers))}; split the call ({error})"
            ) from error

    def relocations(self) -> tuple[Relocation, ...]:
        """List the fields that depend on an argument's address: those that are :class:`Address`."""
        found = []
        for offset, value in zip(_offsets(self.layout.format), self.values, strict=True):
            is_map = isinstance(value, TensorMap)
            address = value.ptr if is_map else value
            if isinstance(address, Address):
                tensor_map = value if is_map else None
                found.append(Relocation(offset, address.argument, address.addend, tensor_map))
        return tuple(found)


class Unplanned(Operation[A, None], Generic[A]):
    """An operation whose launches follow from its arguments alone."""

    def key(self, arguments: A, device: int) -> None:
        """Refuse a GPU on which the kernels cannot run."""
        require_hopper(device)

    def recipe(
        self, key: None, arguments: A, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launch]:
        """Describe the launches."""
        return self.launches(arguments, outs)

    @abstractmethod
    def launches(self, arguments: A, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        """Describe the launches, as :meth:`recipe` does."""


@cache
def _offsets(layout: str) -> tuple[int, ...]:
    """Return the offsets of the fields of a layout that adds no gaps between them ("<")."""
    found, offset = [], 0
    for text, letter in re.findall(r"(\d*)([a-zA-Z?])", layout):
        count, size = int(text or 1), struct.calcsize(f"<{letter}")
        if letter in "sx":  # a count of bytes, not of fields
            count, size = 1, count
        found += [offset + i * size for i in range(count) if letter != "x"]
        offset += count * size
    return tuple(found)


class Template:
    """A launch with its kernel loaded and its parameters packed, but for some addresses."""

    __slots__ = ("_cluster", "_fields", "_grid", "_kernel", "_packed")

    def __init__(self, kernel: LoadedKernel, launch: Launch) -> None:
        self._kernel = kernel
        self._grid = launch.grid
        self._cluster = launch.cluster
        self._packed = launch.pack()
        # And where a packed descriptor takes other addresses, if it was packed with a plain one.
        self._fields = [
            (*found, found.map.address_at() if found.map and is_plain(found.map.ptr) else None)
            for found in launch.relocations()
        ]

    def bound(self, addresses: Mapping[str, int]) -> Template:
        """Fill in what these arguments' addresses are; the others stay open."""
        bound: Template = object.__new__(Template)
        bound._kernel, bound._grid, bound._cluster = self._kernel, self._grid, self._cluster
        packed = bytearray(self._packed)
        bound._fields = self._put(packed, addresses)
        bound._packed = bytes(packed)
        return bound

    def at(self, addresses: Mapping[str, int], stream: int) -> PreparedLaunch:
        """Complete the parameters with the addresses of the arguments that the relocations name."""
        parameters = _buffer_type(len(self._packed)).from_buffer_copy(self._packed)
        self._put(parameters, addresses)
        return PreparedLaunch(self._kernel, self._grid, self._cluster, parameters, stream)

    def _put(self, parameters: Any, addresses: Mapping[str, int]) -> list[Any]:
        """Put addresses into packed parameters; the fields that they leave open come back."""
        left = []
        for field in self._fields:
            offset, argument, addend, tensor_map, within = field
            if argument not in addresses:
                left.append(field)
                continue
            address = addresses[argument] + addend
            if tensor_map is None:
                _pack_address(parameters, offset, address)
            elif within is not None and is_plain(address):  # the rest of the descriptor is packed
                _pack_address(parameters, offset + within, address)
            else:
                encoded = tensor_map._replace(ptr=address).encode()
                parameters[offset : offset + len(encoded)] = encoded
        return left


_pack_address = struct.Struct("<Q").pack_into


class PreparedLaunch:
    """A kernel on one GPU with its packed parameters, grid and stream (a CUstream handle).

    Calling it launches; it can be called any number of times, from any thread. The launch may
    overlap the tail of the kernel before it in the stream (programmatic dependent launch): every
    kernel of ours executes ``griddepcontrol.wait`` before it reads or writes memory.
    """

    __slots__ = ("_config", "_handle", "_kernel", "_launch", "_owned", "_pointers", "_stream")

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        cluster: int,
        parameters: Any,
        stream: int,
    ) -> None:
        pointers = _Pointers(ctypes.addressof(parameters))
        spec = kernel.spec
        self._launch = import_driver().cuLaunchKernelEx
        self._config = _config(grid, cluster, spec.threads, spec.smem_bytes, stream)
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
                f"stream of that device, and a fault of an earlier kernel of any library is "
                f"reported here, too: CUMLA_CHECK=1 checks the arguments of this one"
            )


_Pointers = ctypes.c_void_p * 1


@cache
def _buffer_type(size: int) -> Any:
    return ctypes.c_char * size


@lru_cache(maxsize=1024)
def _config(
    grid: tuple[int, int, int], cluster: int, threads: int, smem_bytes: int, stream: int
) -> Any:
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
    attributes = [overlap]
    if cluster > 1:
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x = cluster
        together.value.clusterDim.y = together.value.clusterDim.z = 1
        attributes.append(together)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
