# SPDX-License-Identifier: Apache-2.0
"""Arrays of one call, seen by a kernel: where they live, whose stream, who allocates.

How each framework's arrays are read is in `cumla.core.frameworks`; whether PyTorch's or CuPy's are
those of a call before, a `glance` tells in half the time. An array of another framework than the
first argument's is imported through DLPack, which orders its producer's stream before ours.

Nothing in this module waits for the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cumla.core._cupy import current_device
from cumla.core._dlpack import ArrayView as ArrayView
from cumla.core._dlpack import Imported
from cumla.core._driver import driver, on_device
from cumla.core._lend import borrower
from cumla.core._lifetime import keep_until_passed, release_finished, waiting
from cumla.core.frameworks import (
    DLPACK,
    Allocator,
    Framework,
    cupy_framework,
    eager_only,
    framework_of,
    framework_of_type,
    jax_framework,
    recognise,
    torch_framework,
)
from cumla.core.names import arg
from cumla.errors import NotPreparedError

WORKSPACE = "workspace"  # name of the memory that the launches of a call share


class Call:
    """One public call: where its arrays live, whose stream it runs on, who allocates.

    Made by `open_call` or `open_device`. Everything that allocates or launches happens inside its
    `with` block, which makes the device current where it is not, of the CPU's devices of JAX as
    well; leaving the block keeps what was imported through DLPack alive until the stream has passed
    this point.
    """

    __slots__ = (
        "_allocator",
        "_framework",
        "_home",
        "_imports",
        "_may_allocate",
        "_must_leave",
        "_stream_object",
        "device",
        "exports",
        "framework",
        "note_written",
        "stream",
        "views",
    )

    def __init__(
        self,
        framework: Framework,
        allocator: Allocator | None,
        device: int | None,
        stream: int,
        stream_object: object,
        views: tuple[ArrayView | None, ...] = (),
        imports: list[Imported] | None = None,
        home: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.device = device  # of every array; None if all are on the CPU
        self.stream = stream  # CUstream handle, 0 for the legacy default stream
        # Framework of the first array, and so of the results. Arrays that only DLPack can read give
        # one of these two.
        self.framework = framework.name or ("numpy" if device is None else "cupy")
        # One per argument, then one per output, None for an output that was not given.
        self.views = views
        self._framework = framework
        self.note_written = framework.note_written
        self.exports = framework.exports  # whether new arrays need `export`
        self._allocator = allocator  # None on the CPU
        self._may_allocate = allocator is not None and allocator.serves_capture
        self._imports = imports
        self._must_leave = False
        self._home = home  # of new arrays on the CPU
        self._stream_object = stream_object

    def __enter__(self) -> Call:
        if self.device is not None:
            self._must_leave = driver().enter_device(self.device)
        elif self._home is not None:
            self._home.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._home is not None:
            self._home.__exit__(*error)
        try:
            if self._imports and self.device is not None:
                keep_until_passed(self._imports, self.stream)
            self._imports = None
        finally:
            if self._must_leave:
                driver().leave_device()

    @property
    def stream_object(self) -> object:
        """The object that keeps the stream alive, for use after the call.

        The object that was given as `stream=`, or CuPy's current stream. PyTorch's are never
        destroyed, and a bare handle is the caller's to keep.
        """
        if self._stream_object is None and "cupy" in sys.modules:
            current = sys.modules["cupy"].cuda.get_current_stream(self.device)
            return current if current.ptr == self.stream else None
        return self._stream_object

    @property
    def allocator(self) -> Allocator:
        """The allocator of GPU memory."""
        assert self._allocator is not None
        return self._allocator

    @property
    def capturing(self) -> bool:
        """Return whether the stream is being captured into a CUDA graph."""
        return self.device is not None and driver().is_capturing(self.stream)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[object, ArrayView]:
        """Allocate a result on the GPU, from the framework's own allocator and on the stream.

        `export` makes the caller's result of the array. `NotPreparedError` if the stream is being
        captured and the allocator (CuPy's) does not serve captures.
        """
        if self._allocator is None or self.device is None:
            raise ValueError("empty: needs a call whose arrays are on the GPU, got the CPU")
        if not self._may_allocate:
            self._check_may_allocate(())
        return self._allocator.empty(shape, dtype, self.device, self.stream)

    def _check_may_allocate(self, names: tuple[str, ...]) -> None:
        """Refuse to allocate where the stream is being captured and the allocator is CuPy's."""
        if self.capturing:
            outputs = tuple([f"{name}=" for name in names if name != WORKSPACE])
            ways = [f"pass {_in_prose(outputs)}"] if outputs else []
            ways += ["use a plan"] if WORKSPACE in names else []
            raise NotPreparedError(
                f"the stream is being captured, and CuPy's allocator does not serve captures: "
                f"{', and '.join(ways) or 'pass workspace='}, made before the capture"
            )
        self._may_allocate = True  # a call neither begins nor ends a capture

    def allocate(
        self, wanted: tuple[tuple[str, tuple[int, ...], str, bool], ...]
    ) -> tuple[list[object], list[int]]:
        """Allocate arrays of (name, shape, dtype, swapped); the arrays and their addresses.

        An array that is dropped goes back to its allocator, which reuses the memory in the order of
        the stream.
        """
        arrays, addresses = [], []
        allocator, device = self._allocator, self.device
        if wanted and not self._may_allocate:
            self._check_may_allocate(tuple([name for name, *_ in wanted]))
        for _, shape, dtype, swapped in wanted:
            assert allocator is not None and device is not None
            empty = allocator.empty_swapped if swapped else allocator.empty
            array, view = empty(shape, dtype, device, self.stream)
            arrays.append(array)
            addresses.append(view.ptr)
        return arrays, addresses

    def export(self, array: object) -> object:
        """Turn a new array into what the caller gets, where `exports`; called after the launches.

        JAX receives CuPy's array through DLPack, which orders its reads after the stream.
        """
        return self._framework.export(array, self.stream)


@eager_only
def open_call(
    arguments: tuple[tuple[str, object], ...],
    outputs: tuple[tuple[str, object | None], ...] = (),
    *,
    stream: object = None,
) -> Call:
    """Look at the arrays of one public call, each with its name; of `outputs` None is not given.

    The first input decides about framework, stream and allocator. `stream` is an integer handle, or
    a stream object of CuPy, PyTorch or anything with `__cuda_stream__`; without it, the current
    stream of the first input's framework, and CuPy's for JAX, which has no public stream. Arrays on
    the CPU have none: nothing happens on it.

    `TypeError` for what is no array or no stream; for a tracer or a FakeTensor, which have no
    memory; for an output of JAX, or of another framework than the first input's. `ValueError` for
    arrays on the CPU and the GPU, on different devices, or sharded over several; for a tensor
    without memory, or with the negative bit; for a read-only output. `NotPreparedError` for an
    array that needs DLPack, on a stream that is being captured.
    """
    if waiting:
        release_finished()
    name, array = arguments[0]
    first = framework_of_type.get(type(array)) or recognise(name, array)
    same = True
    for _, array in arguments:
        if framework_of_type.get(type(array)) is not first:
            same = False
            break
    if same:
        views = first.views(arguments)
    else:
        views = [view for one in arguments for view in framework_of(*one).views((one,))]
    device = _device_of(arguments, views)
    allocator: Allocator | None = None
    handle = 0
    if device is not None:
        allocator = first.allocator()
        handle = allocator.current_stream(device) if stream is None else _handle_of(stream)
    elif stream is not None:
        _handle_of(stream)  # what is no stream is none on the CPU either
    written = _views_of_outputs(outputs, first, name, device) if outputs else []
    imports = None
    if not same or None in views:
        imports = _import_foreign(arguments, first, views, device, handle)
    home = first.at_home(arguments[0][1]) if device is None else None
    return Call(first, allocator, device, handle, stream, (*views, *written), imports, home)


def _device_of(
    arguments: tuple[tuple[str, object], ...], views: list[ArrayView | None]
) -> int | None:
    """CUDA ordinal of all arrays, None for the CPU."""
    first: int | None = None
    for place, (named, view) in enumerate(zip(arguments, views, strict=True)):
        device = framework_of(*named).device(*named) if view is None else view.device
        if place == 0:
            first = device
        elif device != first:
            raise _device_mismatch(arguments[0][0], first, named[0], device)
    return first


def _views_of_outputs(
    outputs: tuple[tuple[str, object | None], ...],
    first: Framework,
    first_name: str,
    device: int | None,
) -> list[ArrayView | None]:
    """Look at the arrays to write to, which need to be of the first argument's framework."""
    found: list[ArrayView | None] = []
    for name, output in outputs:
        view = None
        if output is not None:
            framework = framework_of_type.get(type(output)) or recognise(name, output)
            if framework is first:
                (view,) = first.views(((name, output),))
            if view is None:
                raise _wrong_output(name, output, framework, first_name)
            if view.device != device:
                raise _device_mismatch(first_name, device, name, view.device)
            if view.read_only:
                raise ValueError(
                    f"{arg(name)}: needs an array that can be written to, got a read-only one; "
                    f"pass a copy, or call without {arg(name)}="
                )
        found.append(view)
    return found


@eager_only
def glance(arrays: tuple[object, ...]) -> Hashable | None:
    """Look at the arrays of a call just to know them again, for less than half of `open_call`.

    Of two glances that are equal, `open_call` has the same views. None for arrays that only
    `open_call` can judge: they are not all CuPy's or all PyTorch's, or of a type that has not come
    before.
    """
    framework = framework_of_type.get(type(arrays[0]), DLPACK) if arrays else DLPACK
    for array in arrays:
        if framework_of_type.get(type(array)) is not framework:
            return None
    return framework.glance(arrays)


@eager_only
def reopen_call(array: object, device: int | None, stream: object = None) -> Call:
    """Open a call whose arrays a `glance` has known again; it has no views.

    All arrays are of the framework of `array`; `device` and `stream` are as in `open_call`.
    """
    if waiting:
        release_finished()
    framework = framework_of_type[type(array)]
    if device is None:
        if stream is not None:
            _handle_of(stream)  # what is no stream is none on the CPU either
        return Call(framework, None, None, 0, None)
    allocator = framework.allocator()
    handle = allocator.current_stream(device) if stream is None else _handle_of(stream)
    return Call(framework, allocator, device, handle, stream)


@eager_only
def current_stream(name: str, array: object, device: int | None) -> int:
    """CUstream handle of a call without `stream=` whose arrays, the first of them this, are there.

    It is what `open_call` finds, and nothing is asked of the array but its type.
    """
    if device is None:
        return 0
    return framework_of(name, array).allocator().current_stream(device)


def open_device(device: int | None = None, *, stream: object = None) -> Call:
    """Open a call without arrays: memory comes from CuPy, on its current device and stream.

    `UnsupportedDeviceError` if there is no such GPU, or no driver; `MissingDependencyError` if CuPy
    is missing, or installed twice.
    """
    if waiting:
        release_finished()
    cupy = cupy_framework()
    ordinal = current_device() if device is None else device
    with on_device(driver(), ordinal):
        handle = cupy.current_stream(ordinal) if stream is None else _handle_of(stream)
        return Call(cupy, cupy, ordinal, handle, stream)


def _in_prose(names: tuple[str, ...]) -> str:
    """List names: a, b and c."""
    *most, last = names or ("",)
    return f"{', '.join(most)} and {last}" if most else last


def parts(name: str, value: object, names: tuple[str, ...]) -> dict[str, object]:
    """Name an array, or the arrays in a tuple or list that hold its parts.

    `{"q": q}`, or `{"q[0]": q_nope, "q[1]": q_pe}`. `names` say in the error what the parts are;
    one that ends in `"?"` may be left out. `ValueError` for another number of parts.
    """
    if not isinstance(value, (tuple, list)):
        return {name: value}
    needed = sum(not part.endswith("?") for part in names)
    if not needed <= len(value) <= len(names):
        listed = _in_prose(names[:needed])
        rest = f", maybe with {_in_prose(names[needed:])}".replace("?", "")
        raise ValueError(
            f"{arg(name)}: needs one array, or a tuple or list of {listed}"
            f"{rest if needed < len(names) else ''}, got {len(value)} of them; pass each part as "
            f"one array"
        )
    return {f"{name}[{place}]": part for place, part in enumerate(value)}


def note_written(call: Call, arrays: Iterable[object]) -> None:
    """Tell the framework what a call writes to that was found in order; None is skipped."""
    if call.note_written is not None:
        for array in arrays:
            if array is not None:
                call.note_written(array)


def check_mutable(name: str, array: object) -> None:
    """Refuse an array of JAX where it is to be written to in place, and nothing is returned."""
    if framework_of(name, array).immutable:
        raise TypeError(
            f"{arg(name)}: JAX arrays are immutable and cannot be written to; pass an array "
            f"of CuPy, PyTorch or NumPy here (the other arguments may be JAX arrays), or call the "
            f"function of that name in cumla.jax, which returns the new array"
        )


def immutable_output(name: str) -> TypeError:
    """Say that an array of JAX cannot be written to where the result comes back."""
    return TypeError(
        f"{arg(name)}: JAX arrays are immutable and cannot be written to; call without "
        f"{arg(name)}= and take the result that comes back"
    )


def place_name(device: int | None) -> str:
    """Name a CUDA ordinal, or None, in a message."""
    return "the CPU" if device is None else f"CUDA device {device}"


def _device_mismatch(
    first: str, first_device: int | None, name: str, device: int | None
) -> ValueError:
    return ValueError(
        f"{arg(name)}: needs to be where {arg(first)} is, on {place_name(first_device)}, got an "
        f"array on {place_name(device)}; copy one of them"
    )


def _wrong_output(name: str, output: object, framework: Framework, first: str) -> TypeError:
    if framework.immutable:
        return immutable_output(name)
    # It could be written to, but nothing would make its framework wait for the write.
    return TypeError(
        f"{arg(name)}: needs an array of the framework of {arg(first)}, got "
        f"{type(output).__module__}.{type(output).__qualname__}; convert it, or call without "
        f"{arg(name)}="
    )


def _handle_of(stream: Any) -> int:
    """CUstream of what was given as `stream=`."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    elif hasattr(stream, "cuda_stream"):  # PyTorch
        handle = stream.cuda_stream
    elif hasattr(stream, "stream_id"):  # torch.Stream, of any kind of device
        handle = torch_framework().handle_of(stream)
    elif hasattr(stream, "ptr"):  # CuPy
        handle = stream.ptr
    else:
        raise TypeError(
            f"stream: needs an integer handle, or a stream object of CuPy, PyTorch or anything "
            f"with __cuda_stream__, got {type(stream).__module__}.{type(stream).__qualname__}"
        )
    if handle < 0:
        raise ValueError(f"stream: needs a stream handle, which is 0 or more, got {handle}")
    return 0 if handle == 1 else int(handle)  # 1 is another name of the legacy default stream


def _import_foreign(
    arguments: tuple[tuple[str, object], ...],
    first: Framework,
    views: list[ArrayView | None],
    device: int | None,
    stream: int,
) -> list[Imported] | None:
    """Import what only DLPack can view or order after its producer; put the views in place."""
    pending = [
        place
        for place, view in enumerate(views)
        if view is None or (device is not None and framework_of(*arguments[place]) is not first)
    ]
    if not pending:
        return None
    foreign = [arguments[place] for place in pending]
    if device is None:
        imports = [framework_of(*named).import_array(*named, None) for named in foreign]
    else:
        imports = _import_on_device(foreign, device, stream)
    for place, imported in zip(pending, imports, strict=True):
        view = imported.view
        immutable = framework_of(*arguments[place]).immutable
        views[place] = view._replace(read_only=True) if immutable else view
    return imports


def _import_on_device(
    arguments: list[tuple[str, object]], device: int, stream: int
) -> list[Imported]:
    cuda = driver()
    with on_device(cuda, device):  # producers record their events on it
        if cuda.is_capturing(stream):
            name, array = arguments[0]
            raise NotPreparedError(
                f"{name}: the stream is being captured, and a {type(array).__module__} array "
                f"cannot be imported through DLPack meanwhile; pass arrays that are all PyTorch's "
                f"or all CuPy's"
            )
        imports = [framework_of(*named).import_array(*named, stream) for named in arguments]
        borrower(device).fence_dropped()
    return imports


@eager_only
def to_numpy(name: str, array: object) -> np.ndarray[Any, Any]:
    """NumPy view of an array of any framework in CPU memory, with ml_dtypes' types.

    Nothing is copied: writing to it writes to the array (JAX's is read-only). Errors are those of
    `open_call`, and a `ValueError` for an array on a GPU.
    """
    framework = framework_of(name, array)
    (view,) = framework.views(((name, array),))
    device = framework.device(name, array) if view is None else view.device
    if device is not None:
        raise ValueError(
            f"{arg(name)}: needs an array on the CPU, got one on {place_name(device)}; copy it to "
            f"the host"
        )
    return framework.to_numpy(name, array)


def from_numpy(framework: str, array: np.ndarray[Any, Any]) -> object:
    """Array with the data of a NumPy array, copied only by JAX.

    `framework` is that of a call on the CPU: `"numpy"`, `"torch"` or `"jax"`.
    """
    if framework == "numpy":
        return array
    return (torch_framework() if framework == "torch" else jax_framework()).from_numpy(array)
