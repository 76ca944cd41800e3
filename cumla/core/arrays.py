# SPDX-License-Identifier: Apache-2.0
"""Arrays of any framework, seen by a kernel: where they live, whose stream, who allocates.

Frameworks are told apart through `sys.modules` and are never imported for the question. PyTorch,
CuPy and NumPy arrays are read through their own attributes (about 1 us each), everything else
through DLPack; whether PyTorch's or CuPy's are those of a call before, a `glance` tells in half the
time. An array of another framework than the first argument's is imported through DLPack too: the
protocol then orders its producer's stream before ours, and the capsule keeps the memory alive until
our stream has passed.

Nothing in this module waits for the GPU.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla.core._cupy import current_device, import_cupy
from cumla.core._dlpack import ArrayView, Imported, import_array, numpy_dtype, ordinal
from cumla.core._driver import driver, on_device
from cumla.core._lend import borrower, lend
from cumla.core._lifetime import keep_until_passed, order_streams, release_finished, waiting
from cumla.errors import NotPreparedError

__all__ = [
    "ArrayView",
    "Call",
    "check_mutable",
    "from_numpy",
    "glance",
    "keep_until_passed",
    "open_call",
    "open_device",
    "order_streams",
    "place_name",
    "reopen_call",
    "to_numpy",
]


# --- frameworks ----------------------------------------------------------------------------------

_FLOAT8 = "float8_"  # how the names of one-byte floats begin


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else dtype.str


class _Framework:
    """A framework that only DLPack can read, and the base of those that are known.

    Without a public stream and an allocator that a caller may use, work on such arrays runs on
    CuPy's current stream, and results are CuPy's.
    """

    name = ""
    immutable = False

    def view(self, name: str, array: Any) -> ArrayView | None:
        """Look at an array; None if only a DLPack import can tell."""
        return None

    def glance(self, arrays: tuple[Any, ...]) -> Hashable | None:
        """See what `view` makes its answers of; None if it is not worth it, or cannot be told."""
        return None

    def device(self, name: str, array: Any) -> int | None:
        """CUDA ordinal of an array that `view` has no answer for."""
        try:
            device_type, device_id = array.__dlpack_device__()
        except (BufferError, RuntimeError) as error:
            raise ValueError(f"{name}: its device cannot be told: {error}") from error
        return ordinal(name, device_type, device_id)

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        """Consume an array's DLPack capsule, as `cumla.core._dlpack.import_array`."""
        return import_array(name, array, stream)

    def allocator(self) -> _Allocator:
        """Who owns the stream and allocates for calls whose first array is of this framework."""
        return _cupy()

    def export(self, array: Any, stream: int) -> object:
        """Turn what the allocator gave, written to on `stream`, into the caller's result."""
        return array

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        imported = import_array(name, array, None)
        return np.asarray(imported).view(numpy_dtype(imported.view.dtype))

    def from_numpy(self, array: np.ndarray[Any, Any]) -> object:
        return array


class _Allocator(_Framework, abc.ABC):
    """A framework with a current stream and an allocator that keeps to streams."""

    serves_capture = False

    @abc.abstractmethod
    def view(self, name: str, array: Any) -> ArrayView: ...

    def allocator(self) -> _Allocator:
        return self

    @abc.abstractmethod
    def current_stream(self, device: int) -> int: ...

    @abc.abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> object: ...


class _NumPy(_Framework):
    name = "numpy"

    def view(self, name: str, array: Any) -> ArrayView:
        return ArrayView(
            array.ctypes.data,
            array.shape,
            array.strides,
            _dtype_name(array.dtype),
            None,
            not array.flags.writeable,
        )

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)


class _Torch(_Allocator):
    name = "torch"
    serves_capture = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dtypes: dict[object, tuple[str, int]] = {}

    def view(self, name: str, array: Any) -> ArrayView:
        try:
            ptr = array.data_ptr()
            strides = array.stride()
        except RuntimeError as error:  # sparse, functorch's batched tensors ...
            raise TypeError(
                f"{name}: needs a dense tensor with memory of its own: {error}"
            ) from error
        dtype = self._dtypes.get(array.dtype)
        if dtype is None:
            dtype = (str(array.dtype).removeprefix("torch."), array.dtype.itemsize)
            self._dtypes[array.dtype] = dtype
        itemsize = dtype[1]
        return ArrayView(
            ptr,
            tuple(array.shape),
            tuple([stride * itemsize for stride in strides]),
            dtype[0],
            array.get_device() if array.is_cuda else self._host(name, array),
        )

    def glance(self, arrays: tuple[Any, ...]) -> Hashable | None:
        try:
            return tuple([(a.data_ptr(), a.shape, a.stride(), a.dtype, a.device) for a in arrays])
        except RuntimeError:  # no dense tensor, as `view` will say
            return None

    @staticmethod
    def _host(name: str, array: Any) -> None:
        if not array.is_cpu:
            raise ValueError(
                f"{name}: needs a tensor on a CUDA device or on the CPU, got one on "
                f"{array.device}; move it with .to('cuda')"
            )

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        dtype = str(array.dtype).removeprefix("torch.")
        if not dtype.startswith(_FLOAT8):  # older versions export none of them
            return import_array(name, array, stream)
        return _import_bits(name, array.view(self._torch.uint8), dtype, stream)

    def current_stream(self, device: int) -> int:
        return int(self._torch._C._cuda_getCurrentRawStream(device))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> object:
        torch = self._torch
        if stream == self.current_stream(device):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        # The caching allocator hands memory out for the stream that is current in torch.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        torch = self._torch
        array = array.detach()
        dtype = str(array.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, dtype):  # torch refuses NumPy these types, so go by their bits
            bits = torch.uint8 if array.dtype.itemsize == 1 else torch.int16
            return np.asarray(array.view(bits).numpy()).view(numpy_dtype(dtype))
        return np.asarray(array.numpy())

    def from_numpy(self, array: np.ndarray[Any, Any]) -> object:
        torch = self._torch
        if not hasattr(ml_dtypes, array.dtype.name):
            return torch.from_numpy(array)
        bits = np.uint8 if array.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))


class _CuPy(_Allocator):
    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def view(self, name: str, array: Any) -> ArrayView:
        data = array.data
        return ArrayView(
            data.ptr, array.shape, array.strides, _dtype_name(array.dtype), data.device_id
        )

    def glance(self, arrays: tuple[Any, ...]) -> Hashable | None:
        seen = []
        for a in arrays:
            data = a.data
            seen.append((data.ptr, a.shape, a.strides, a.dtype, data.device_id))
        return tuple(seen)

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        dtype = _dtype_name(array.dtype)
        if not dtype.startswith(_FLOAT8):  # CuPy exports none of them
            return import_array(name, array, stream)
        return _import_bits(name, array.view(np.uint8), dtype, stream)

    def current_stream(self, device: int) -> int:
        return int(self._cupy.cuda.get_current_stream(device).ptr)

    def use_stream(self, device: int, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` CuPy's current one: its pool hands memory out for that stream."""
        if stream == self.current_stream(device):
            return contextlib.nullcontext()
        streams = self._cupy.cuda.Stream
        if stream == 0:
            return streams.null  # type: ignore[no-any-return]
        return streams.from_external(_StreamHandle(stream))  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> object:
        with self.use_stream(device, stream):
            if dtype.startswith(_FLOAT8):  # CuPy allocates none of them, but views bytes as such
                return self._cupy.empty(shape, dtype=np.uint8).view(numpy_dtype(dtype))
            return self._cupy.empty(shape, dtype=numpy_dtype(dtype))


class _StreamHandle(NamedTuple):
    """A stream as the CUDA stream protocol wants it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class _Jax(_Framework):
    name = "jax"
    immutable = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def device(self, name: str, array: Any) -> int | None:
        if array.is_deleted():
            raise ValueError(f"{name}: needs an array with memory, got one deleted or donated")
        devices = len(array.sharding.device_set)
        if devices > 1:
            way_out = f"call once a shard ({name}.addressable_shards[i].data)"
            raise _sharded(name, f"one that is sharded over {devices}", way_out)
        return super().device(name, array)

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        try:
            return import_array(name, array, stream)
        except ValueError:
            dtype = _dtype_name(array.dtype)
            if not dtype.startswith(_FLOAT8):  # older versions export none of them
                raise
        # A copy, in JAX's own order: of the address alone nobody could tell when to read there.
        bits = self._jax.lax.bitcast_convert_type(array, np.uint8)
        return _import_bits(name, bits, dtype, stream)

    def export(self, array: Any, stream: int) -> object:
        view = _cupy().view("result", array)
        try:
            return lend(self._jax, array, view, stream)
        except RuntimeError:
            if not view.dtype.startswith(_FLOAT8):  # older versions take none of them
                raise
        bits = lend(self._jax, array, view._replace(dtype="uint8"), stream)
        return self._jax.lax.bitcast_convert_type(bits, numpy_dtype(view.dtype))

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> object:
        return self._jax.numpy.asarray(array)


def _import_bits(name: str, bits: Any, dtype: str, stream: int | None) -> Imported:
    """Import the bytes of an array of one-byte elements, as what they are."""
    imported = import_array(name, bits, stream)
    imported.view = imported.view._replace(dtype=dtype)
    return imported


_NUMPY = _NumPy()
_DLPACK = _Framework()
# Array types that have been seen; a look-up is all that a warm call pays to tell frameworks apart.
_framework_of_type: dict[type, _Framework] = {np.ndarray: _NUMPY}


@functools.cache
def _torch() -> _Torch:
    return _Torch(sys.modules["torch"])


@functools.cache
def _jax() -> _Jax:
    return _Jax(sys.modules["jax"])


@functools.cache
def _cupy() -> _CuPy:
    return _CuPy(import_cupy())


def _sharded(name: str, got: str, way_out: str) -> ValueError:
    return ValueError(f"{name}: needs an array on one device, got {got}; {way_out}")


def _is_instance(array: object, module: str, kind: str) -> bool:
    return isinstance(array, getattr(sys.modules.get(module), kind, ()))


def _recognise(name: str, array: object) -> _Framework:
    """Tell the framework of an array whose type has not been seen yet."""
    kind = type(array)
    parents = {parent.__name__ for parent in kind.__mro__}
    framework: _Framework
    if _is_instance(array, "torch", "Tensor"):
        if parents & {"FakeTensor", "FunctionalTensor"}:
            raise TypeError(
                f"{name}: needs a tensor with memory, got a {kind.__name__}, which torch.compile "
                f"and torch.export trace with; call cumla outside the traced function, or wrap "
                f"the call in a torch.library.custom_op"
            )
        if "DTensor" in parents:
            raise _sharded(name, "a DTensor, which is sharded", f"pass {name}.to_local()")
        framework = _torch()
    elif _is_instance(array, "cupy", "ndarray"):
        if "DistributedArray" in parents:
            raise _sharded(name, "a DistributedArray, which is sharded", "call once a chunk")
        framework = _cupy()
    elif _is_instance(array, "jax", "Array"):
        if "Tracer" in parents:
            raise TypeError(
                f"{name}: needs an array with memory, got a JAX tracer ({kind.__name__}); cumla "
                f"runs eagerly, so call it outside jax.jit, jax.grad and jax.vmap"
            )
        framework = _jax()
    elif isinstance(array, np.ndarray):
        framework = _NUMPY
    elif hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        framework = _DLPACK
    else:
        raise TypeError(
            f"{name}: needs an array of CuPy, PyTorch, JAX or NumPy, or one with __dlpack__, got "
            f"{kind.__module__}.{kind.__qualname__}; convert it first, e.g. with cupy.asarray"
        )
    _framework_of_type[kind] = framework
    return framework


# --- a call --------------------------------------------------------------------------------------


class Call:
    """One public call: where its arrays live, whose stream it runs on, who allocates.

    Made by `open_call` or `open_device`. Everything that allocates or launches happens inside
    its `with` block, which makes the device current where it is not; leaving the block keeps
    what was imported through DLPack alive until the stream has passed this point.

    Attributes
    ----------
    device : int or None
        CUDA ordinal of every array; None if all are on the CPU.
    stream : int
        CUstream handle, 0 for the legacy default stream.
    framework : str
        `"cupy"`, `"torch"`, `"jax"` or `"numpy"`: of the first array, and so of the results.
        Arrays of a framework that only DLPack can read get `"cupy"`, on the CPU `"numpy"`.
    views : tuple of ArrayView or None
        One a argument, then one an output, None for an output that was not given.
    """

    __slots__ = (
        "_framework",
        "_imports",
        "_must_leave",
        "_outputs",
        "_stream_object",
        "_workspaces",
        "device",
        "framework",
        "stream",
        "views",
    )

    def __init__(
        self,
        framework: _Framework,
        device: int | None,
        stream: int,
        views: tuple[ArrayView | None, ...],
        imports: list[Imported] | None,
    ) -> None:
        self.device = device
        self.stream = stream
        self.framework = framework.name or ("numpy" if device is None else "cupy")
        self.views = views
        self._framework = framework
        self._imports = imports
        self._must_leave = False
        self._stream_object: object = None
        self._outputs: tuple[tuple[str, object], ...] = ()
        self._workspaces: list[object] = []

    def __enter__(self) -> Call:
        if self.device is not None:
            self._must_leave = driver().enter_device(self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._imports and self.device is not None:
                keep_until_passed(self._imports, self.stream)
            self._imports = None
        finally:
            if self._must_leave:
                driver().leave_device()

    @property
    def stream_object(self) -> object:
        """What keeps the stream from being destroyed, for those who use it after the call.

        The object that was given as `stream=`, or CuPy's current stream. PyTorch's are never
        destroyed, and a bare handle is the caller's to keep.
        """
        if self._stream_object is None and "cupy" in sys.modules:
            current = sys.modules["cupy"].cuda.get_current_stream(self.device)
            return current if current.ptr == self.stream else None
        return self._stream_object

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        return self.device is not None and driver().is_capturing(self.stream)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[object, ArrayView]:
        """Allocate a result on the GPU, from the framework's own allocator and on the stream.

        Parameters
        ----------
        shape : tuple of int
        dtype : str
            As in `ArrayView`.

        Returns
        -------
        array : object
            What `export` makes the caller's result of.
        view : ArrayView

        Raises
        ------
        NotPreparedError
            The stream is being captured, and the allocator (CuPy's) does not serve captures.
        """
        if self.device is None:
            raise ValueError("empty: needs a call whose arrays are on the GPU, got the CPU")
        allocator = self._framework.allocator()
        if not allocator.serves_capture and self.capturing:
            absent = (f"{name}=" for name, output in self._outputs if output is None)
            ways = (*absent, "plan= or workspace=")
            raise NotPreparedError(
                f"the stream is being captured, and CuPy's allocator does not serve captures: pass "
                f"{_in_prose(ways)} where the call takes one, made before the capture"
            )
        array = allocator.empty(shape, dtype, self.device, self.stream)
        return array, allocator.view("result", array)

    def workspace(self, nbytes: int) -> ArrayView:
        """Allocate bytes on the GPU that live until the work of this call is done.

        They are 256-byte aligned, as every CUDA allocator promises. They go back to the
        allocator with this object, and the allocator reuses them in the order of the stream.

        Raises
        ------
        NotPreparedError
            As `empty`.
        """
        array, view = self.empty((nbytes,), "uint8")
        self._workspaces.append(array)
        return view

    def export(self, array: object) -> object:
        """Turn an array of `empty` into what the caller gets; called after the launches.

        JAX receives CuPy's array through DLPack, which orders its reads behind the stream.
        """
        return self._framework.export(array, self.stream)


def open_call(
    arguments: tuple[tuple[str, object], ...],
    outputs: tuple[tuple[str, object | None], ...] = (),
    *,
    stream: object = None,
) -> Call:
    """Look at the arrays of one public call.

    Parameters
    ----------
    arguments : tuple of (name, array)
        The inputs. The first one decides about framework, stream and allocator.
    outputs : tuple of (name, array or None)
        The arrays to write to, where the caller gave them; of the first input's framework.
    stream : optional
        An integer handle, or a stream object of CuPy, PyTorch or anything with
        `__cuda_stream__`. Without it, the current stream of the first input's framework; CuPy's
        for JAX, which has no public stream. Not looked at for arrays on the CPU.

    Returns
    -------
    Call
        To be entered before anything is allocated or launched.

    Raises
    ------
    TypeError
        Not an array; a tracer or a FakeTensor, which have no memory; an output of JAX, or of
        another framework than the first input's.
    ValueError
        Arrays on the CPU and the GPU, on different devices, or sharded over several; a read-only
        output.
    NotPreparedError
        An array that needs DLPack, on a stream that is being captured.
    """
    if waiting:
        release_finished()
    first = _framework_of(*arguments[0])
    views: list[ArrayView | None] = []
    pending: list[int] = []  # what only a DLPack import can give a view of, or an order
    device: int | None = None
    for name, array in arguments:
        framework = _framework_of_type.get(type(array)) or _recognise(name, array)
        view = framework.view(name, array)
        where = framework.device(name, array) if view is None else view.device
        if where != device:
            if views:
                raise _device_mismatch(arguments[0][0], device, name, where)
            device = where
        if view is None or (framework is not first and where is not None):
            pending.append(len(views))
        views.append(view)
    for name, output in outputs:
        view = None
        if output is not None:
            framework = _framework_of_type.get(type(output)) or _recognise(name, output)
            view = framework.view(name, output) if framework is first else None
            if view is None:
                raise _wrong_output(name, output, framework, arguments[0][0])
            if view.device != device:
                raise _device_mismatch(arguments[0][0], device, name, view.device)
            if view.read_only:
                raise ValueError(
                    f"{name}: needs an array that can be written to, got a read-only one; pass a "
                    f"copy, or call without {name}="
                )
        views.append(view)
    handle = 0 if device is None else _handle(stream, first.allocator(), device)
    imports = _import_pending(arguments, pending, views, device, handle) if pending else None
    call = Call(first, device, handle, tuple(views), imports)
    call._stream_object = stream
    call._outputs = outputs
    return call


def glance(arrays: tuple[object, ...]) -> Hashable | None:
    """Look at the arrays of a call just to know them again, for less than half of `open_call`.

    Parameters
    ----------
    arrays : tuple of array
        Arguments and outputs of one call; a tuple of two or three among them is one argument.

    Returns
    -------
    Hashable or None
        Of two glances that are equal, `open_call` has the same views. None for arrays that only
        `open_call` can judge: they are not all CuPy's or all PyTorch's, or of a type that has not
        come before.
    """
    framework = _framework_of_type.get(type(arrays[0]), _DLPACK)
    for array in arrays:
        if _framework_of_type.get(type(array)) is not framework:
            return _glance_at_parts(arrays)
    return framework.glance(arrays)


def _glance_at_parts(arrays: tuple[object, ...]) -> Hashable | None:
    """Look at arrays some of which are in parts, and at which of them are."""
    each = [a if isinstance(a, tuple) and len(a) in (2, 3) else (a,) for a in arrays]
    flat = tuple([array for group in each for array in group])
    seen = glance(flat) if len(flat) > len(arrays) else None
    return seen and (tuple([len(group) for group in each]), seen)


def reopen_call(array: object, device: int | None, stream: object = None) -> Call:
    """Open a call whose arrays a `glance` has known again; it has no views.

    Parameters
    ----------
    array : array
        One of them: all are of one framework.
    device : int or None
        Where they are, as in `Call`.
    stream : optional
        As in `open_call`.

    Returns
    -------
    Call
        To be entered before anything is launched.
    """
    if waiting:
        release_finished()
    framework = _framework_of_type[type(array)]
    handle = 0 if device is None else _handle(stream, framework.allocator(), device)
    return Call(framework, device, handle, (), None)


def open_device(device: int | None = None, *, stream: object = None) -> Call:
    """Open a call without arrays: memory comes from CuPy, on its current device and stream.

    Parameters
    ----------
    device : int, optional
        CUDA ordinal. Without it, CuPy's current device.
    stream : optional
        As in `open_call`.

    Returns
    -------
    Call
        To be entered before anything is allocated or launched.

    Raises
    ------
    UnsupportedDeviceError
        There is no such GPU, or no driver.
    MissingDependencyError
        CuPy is missing, or installed twice.
    """
    if waiting:
        release_finished()
    cupy = _cupy()
    ordinal = current_device() if device is None else device
    with on_device(driver(), ordinal):
        call = Call(cupy, ordinal, _handle(stream, cupy, ordinal), (), None)
        call._stream_object = stream
        return call


def _in_prose(names: tuple[str, ...]) -> str:
    """List names: a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _framework_of(name: str, array: object) -> _Framework:
    return _framework_of_type.get(type(array)) or _recognise(name, array)


def check_mutable(name: str, array: object) -> None:
    """Refuse an array of JAX where it is to be written to in place, and nothing is returned.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    array : object

    Raises
    ------
    TypeError
        The array is JAX's, or none at all.
    """
    if _framework_of(name, array).immutable:
        raise TypeError(
            f"{name}: JAX arrays are immutable and cannot be written to; keep what is written in "
            f"an array of CuPy or PyTorch, the other arguments may be JAX's"
        )


def place_name(device: int | None) -> str:
    """Name a CUDA ordinal, or None, in a message."""
    return "the CPU" if device is None else f"CUDA device {device}"


def _device_mismatch(
    first: str, first_device: int | None, name: str, device: int | None
) -> ValueError:
    return ValueError(
        f"{name}: needs to be where {first} is, on {place_name(first_device)}, got an array on "
        f"{place_name(device)}; copy one of them"
    )


def _wrong_output(name: str, output: object, framework: _Framework, first: str) -> TypeError:
    if framework.name == "jax":
        return TypeError(
            f"{name}: JAX arrays are immutable and cannot be written to; call without {name}= "
            f"and take the result that comes back"
        )
    # It could be written to, but nothing would make its framework wait for the write.
    return TypeError(
        f"{name}: needs an array of the framework of {first}, got {type(output).__module__}."
        f"{type(output).__qualname__}; convert it, or call without {name}="
    )


def _handle(stream: object, allocator: _Allocator, device: int) -> int:
    """CUstream of `stream=`, or of the allocator's current stream."""
    if stream is None:
        handle = allocator.current_stream(device)
    elif isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    elif hasattr(stream, "cuda_stream"):  # PyTorch
        handle = stream.cuda_stream
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


def _import_pending(
    arguments: tuple[tuple[str, object], ...],
    pending: list[int],
    views: list[ArrayView | None],
    device: int | None,
    stream: int,
) -> list[Imported]:
    """Import the arguments at the places `pending`, and put their views there."""
    if device is None:
        imports = [_import(*arguments[place], None) for place in pending]
    else:
        imports = _import_on_device(tuple(arguments[place] for place in pending), device, stream)
    for place, imported in zip(pending, imports, strict=True):
        view = imported.view
        immutable = _framework_of(*arguments[place]).immutable
        views[place] = view._replace(read_only=True) if immutable else view
    return imports


def _import(name: str, array: object, stream: int | None) -> Imported:
    return _framework_of(name, array).import_array(name, array, stream)


def _import_on_device(
    arguments: tuple[tuple[str, object], ...], device: int, stream: int
) -> list[Imported]:
    cuda = driver()
    if cuda.is_capturing(stream):
        name, array = arguments[0]
        raise NotPreparedError(
            f"{name}: the stream is being captured, and a {type(array).__module__} array cannot "
            f"be imported through DLPack meanwhile; pass arrays that are all PyTorch's or all "
            f"CuPy's"
        )
    with on_device(cuda, device):  # producers record their events on it
        imports = [_import(name, array, stream) for name, array in arguments]
        borrower(device).fence_dropped()
    return imports


# --- the CPU path --------------------------------------------------------------------------------


def to_numpy(name: str, array: object) -> np.ndarray[Any, Any]:
    """NumPy view of an array of any framework in CPU memory.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    array : object

    Returns
    -------
    numpy.ndarray
        With ml_dtypes' types for what NumPy lacks. Nothing is copied: writing to it writes to
        the array (JAX's is read-only).

    Raises
    ------
    TypeError, ValueError
        As `open_call`, and for an array on a GPU.
    """
    framework = _framework_of(name, array)
    view = framework.view(name, array)
    device = framework.device(name, array) if view is None else view.device
    if device is not None:
        raise ValueError(
            f"{name}: needs an array on the CPU, got one on {place_name(device)}; copy it to the "
            f"host"
        )
    return framework.to_numpy(name, array)


def from_numpy(framework: str, array: np.ndarray[Any, Any]) -> object:
    """Array of `framework` with the data of a NumPy array, copied only by JAX.

    Parameters
    ----------
    framework : str
        `Call.framework` of a call on the CPU: `"numpy"`, `"torch"` or `"jax"`.
    array : numpy.ndarray
        ml_dtypes' types included.
    """
    owners: dict[str, Callable[[], _Framework]] = {"torch": _torch, "jax": _jax}
    return array if framework == "numpy" else owners[framework]().from_numpy(array)


def parts(name: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Name an array, or the arrays of a tuple or list: name[0], name[1] ..."""
    if not isinstance(value, (tuple, list)):
        return {name: value}
    return {f"{name}[{i}]": part for i, part in enumerate(value)}


def refuse_overlap(outputs: dict[str, ArrayView], inputs: dict[str, ArrayView]) -> None:
    """Stand in."""
