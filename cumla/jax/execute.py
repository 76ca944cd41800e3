# SPDX-License-Identifier: Apache-2.0
"""Executing a call inside XLA: the reference on the CPU, patched launches on the GPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cumla.core._cupy import import_cupy
from cumla.core._dlpack import numpy_dtype
from cumla.core._driver import driver
from cumla.core.arguments import FACTORS, WIDE
from cumla.core.arrays import WORKSPACE
from cumla.core.check_mode import check_factors, check_mode, copy_to_host
from cumla.core.operation import Address, Ready, unplaced
from cumla.errors import CumlaError
from cumla.jax.spec import Spec, operation_of, read
from cumla.launch.device import require_hopper

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumla.core.operation import Operation, Output, Template
    from cumla.jax.spec import Buffer

__all__ = ["Execution", "on_cpu", "on_gpu"]


class Execution(Protocol):
    """XLA's data about one execution of a call."""

    def stream(self) -> int:
        """Return the CUstream handle."""

    def device(self) -> int:
        """Return the CUDA ordinal."""

    def check(self, shapes: list[tuple[int, ...]]) -> None:
        """Compare the buffers with the shapes of arguments and results."""


class _Program(NamedTuple):
    """A call whose static part was read and checked."""

    spec: Spec
    operation: Operation[Any, Any]
    arguments: Any
    returned: tuple[Output, ...]
    buffers: tuple[Buffer, ...]  # inputs, then results
    names: tuple[str, ...]  # theirs
    aliases: tuple[tuple[int, int], ...]  # places of buffers that are one

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [buffer.shape for buffer in self.buffers]

    def apart(self, addresses: tuple[int, ...]) -> list[tuple[int, int]]:
        """List the buffers that XLA has in two places although they are one: the old, the new.

        Its fusion of slices with the call between them does so, as for `jax.vmap`: it forgets that
        a result begins with what an argument holds.
        """
        return [pair for pair in self.aliases if addresses[pair[0]] != addresses[pair[1]]]


@lru_cache(maxsize=4096)
def _program(text: bytes, device: int | None) -> _Program:
    """Read the static part of a call."""
    spec = read(text)
    operation = operation_of(spec)
    arguments = operation.arguments(spec.views(device), spec.options)
    returned = operation.outputs(arguments)
    results = spec.results(returned)
    count = len(spec.inputs)
    aliases = tuple([(i, count + o) for i, o in spec.aliases(results).items()])
    buffers = spec.inputs + results
    names = tuple([buffer.name for buffer in buffers])
    return _Program(spec, operation, arguments, returned, buffers, names, aliases)


# --- CPU -----------------------------------------------------------------------------------------


def on_cpu(text: bytes, addresses: tuple[int, ...], frame: Execution) -> None:
    """Compute with the reference."""
    program = _program(text, None)
    frame.check(program.shapes)
    arrays = [_array(b, at) for b, at in zip(program.buffers, addresses, strict=True)]
    for old, new in program.apart(addresses):
        arrays[new][...] = arrays[old]
        arrays[old] = arrays[new]
    count = len(program.spec.inputs)
    inputs = zip(program.spec.inputs, arrays, strict=False)
    host = {buffer.name: array for buffer, array in inputs if buffer.name != WORKSPACE}
    if check_mode():
        check_factors(host, program.operation.factor_axes)
        program.operation.check_values(host, program.arguments)
    computed = program.operation.reference(host, program.arguments)
    # Not into them at once: rows of no request would keep what XLA's memory holds.
    for result, array in zip(arrays[count:], computed, strict=False):
        result[...] = array


def _array(buffer: Buffer, address: int) -> np.ndarray[Any, Any]:
    """See XLA's memory as a NumPy array."""
    dtype = numpy_dtype(buffer.dtype)
    nbytes = prod(buffer.shape) * dtype.itemsize
    if not nbytes:
        return np.empty(buffer.shape, dtype)
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    return np.ndarray(buffer.shape, dtype, memory)


# --- GPU -----------------------------------------------------------------------------------------


class _Launches(NamedTuple):
    """Packed launches of a call whose buffers have the same addresses as before."""

    device: int
    launches: list[Callable[[], None]]


_templates = Ready()  # by the text of a call and the device
_ready = Ready()


def on_gpu(text: bytes, addresses: tuple[int, ...], frame: Execution) -> None:
    """Launch on XLA's stream, which may be being captured."""
    stream = frame.stream()
    identity = text, addresses, stream
    ready = _ready.get(identity)
    if ready is None:
        ready = _placed(text, addresses, frame, stream)
        _ready.keep(identity, ready)
    cuda = driver()
    must_leave = cuda.enter_device(ready.device)
    try:
        if check_mode() and not cuda.is_capturing(stream):
            _check_values(_program(text, ready.device), addresses, stream)
        for launch in ready.launches:
            launch()
    finally:
        if must_leave:
            cuda.leave_device()


def _check_values(program: _Program, addresses: tuple[int, ...], stream: int) -> None:
    """Check mode: look at the values of an execution that is no replay."""
    places = dict(zip(program.names, addresses, strict=True))
    host = {}
    for name, view in program.spec.views(None).items():
        if view is not None and (view.dtype in WIDE or name in FACTORS):
            host[name] = copy_to_host(view._replace(ptr=places[name]), stream)
    check_factors(host, program.operation.factor_axes)
    program.operation.check_values(host, program.arguments)


def _placed(text: bytes, addresses: tuple[int, ...], frame: Execution, stream: int) -> _Launches:
    """Put new addresses into the launches."""
    device = frame.device()
    program = _program(text, device)
    templates = _templates.get((text, device))
    if templates is None:
        frame.check(program.shapes)
        templates = _packed(program, device, stream)
        _templates.keep((text, device), templates)
    runtime = import_cupy().cuda.runtime
    launches: list[Callable[[], None]] = []
    for old, new in program.apart(addresses):
        buffer = program.buffers[new]
        nbytes = prod(buffer.shape) * numpy_dtype(buffer.dtype).itemsize
        what = addresses[new], addresses[old], nbytes, runtime.memcpyDeviceToDevice, stream
        launches.append(partial(runtime.memcpyAsync, *what))
    places = dict(zip(program.names, addresses, strict=True))  # of two places the new one
    launches += [template.at(places, stream) for template in templates]
    return _Launches(device, launches)


def _packed(program: _Program, device: int, stream: int) -> tuple[Template, ...]:
    """Load the kernels and pack their parameters, but for addresses."""
    require_hopper(device)
    spec, operation, arguments = program.spec, program.operation, program.arguments
    if spec.key is None:
        key = operation.key(arguments, device)
        nbytes = operation.workspace_bytes(key)
    else:  # a plan's: one that was made without a GPU has no workspace
        key, nbytes = spec.key, 1
    if nbytes > spec.workspace:
        raise CumlaError(
            f"workspace: needs {nbytes} bytes or more on CUDA device {device}, got a program that "
            f"was traced with {spec.workspace}; trace or export it where JAX sees such a GPU"
        )
    # XLA's results are contiguous.
    outs = [unplaced(output._replace(swapped=False), device) for output in program.returned]
    buffer = Address.of(WORKSPACE, 0) if spec.workspace else 0
    recipe = operation.recipe(key, arguments, outs, buffer)

    def capturing() -> bool:
        return driver().is_capturing(stream)

    return tuple([launch.template(device, capturing) for launch in recipe])
