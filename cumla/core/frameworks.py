# SPDX-License-Identifier: Apache-2.0
"""Frameworks: how each one's arrays are read, allocated, imported and copied to the host.

They are told apart through `sys.modules` and are never imported for the question. PyTorch, CuPy
and NumPy arrays are read through their own attributes (about 1 us each), everything else through
DLPack. What has no memory, or does not mean what its memory says, is refused here, by name.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from cumla.core._cupy import import_cupy
from cumla.core._dlpack import ArrayView, Imported, import_array, numpy_dtype, ordinal
from cumla.core._lend import lend
from cumla.core.names import arg

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FLOAT8 = "float8_"  # how the names of one-byte floats begin
# Addresses below may be an offset into storage that is gone: the first bytes of a view of it.
_SUSPECT = 1 << 40
_MAKE_ONE = "torch.tensor, cupy.asarray, jax.numpy.asarray or numpy.asarray"
_DISABLE = (
    "graphs take cumla's functions where cumla.torch is imported, and in place of plans call "
    "torch.ops.cumla.<function>_schedule and _attend; or put the call into a function of its own "
    "under @torch.compiler.disable"
)
NO_PLANS = (
    "cumla's functions can be traced, but not its plans: call torch.ops.cumla.<function>_schedule "
    "and _attend; "
)
NO_DSA_PLAN = "in place of DSAPlan call paged_mqa_logits, top_k and mla_sparse_decode of cumla"
_OUTSIDE = "call cumla outside the traced function"
_IMPORT = (
    f"import cumla.torch, which takes cumla's functions, but no plans, into graphs, or {_OUTSIDE}"
)
_requires_grad = attrgetter("requires_grad")


class Traced(TypeError):
    """An argument stands for an array inside a transformation that `binding` serves.

    `cumla.core.operation.run` hands its call to the function ``run`` of that module. Whoever else
    needs arrays with memory shows the message, perhaps by an error of this class without a binding.
    """

    def __init__(self, message: str, binding: str = "") -> None:
        super().__init__(message)
        self.binding = binding

    def __reduce__(self) -> tuple[Any, ...]:  # by default a copy is made of the message alone
        return type(self), (str(self), self.binding), self.__dict__


def eager_only(function: _Function) -> _Function:
    """Have TorchDynamo give the way out where it would trace `function`; costs a call nothing."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        f"cumla runs eagerly and torch.compile cannot trace it; {_DISABLE}"
    )
    return function


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else dtype.str


class Framework:
    """A framework that only DLPack can read, and the base of those that are known.

    Without a public stream and an allocator that a caller may use, work on such arrays runs on
    CuPy's current stream, and results are CuPy's.
    """

    name: ClassVar[str] = ""
    immutable: ClassVar[bool] = False
    exports: ClassVar[bool] = False  # whether `export` does anything
    # Module whose `run_eagerly` runs eager calls with less work for the host, or says that it
    # cannot.
    binding: str | None = None
    # Tells a framework that wants to know that its array is written to by address.
    note_written: Callable[[Any], object] | None = None

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        """Look at arrays of this framework; None for each that only a DLPack import can tell."""
        return [None] * len(named)

    def glance(self, arrays: tuple[Any, ...]) -> Hashable | None:
        """See what `views` makes its answers of; None if it is not worth it, or cannot be told."""
        return None

    def device(self, name: str, array: Any) -> int | None:
        """CUDA ordinal of an array that `views` has no answer for."""
        try:
            device_type, device_id = array.__dlpack_device__()
        except (BufferError, RuntimeError) as error:
            raise ValueError(f"{arg(name)}: its device cannot be told: {error}") from error
        return ordinal(name, device_type, device_id)

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        """Consume an array's DLPack capsule, as `cumla.core._dlpack.import_array`."""
        return import_array(name, array, stream)

    def allocator(self) -> Allocator:
        """Return the allocator of calls whose first array is of this framework."""
        return cupy_framework()

    def export(self, array: Any, stream: int) -> object:
        """Turn what the allocator gave, written to on `stream`, into the caller's result."""
        return array

    def at_home(self, array: Any) -> contextlib.AbstractContextManager[Any] | None:
        """Make the place of an array on the CPU the one of new arrays, where there are several."""
        return None

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        """NumPy view of an array in CPU memory."""
        imported = import_array(name, array, None)
        return np.asarray(imported).view(numpy_dtype(imported.view.dtype))

    def from_numpy(self, array: np.ndarray[Any, Any]) -> object:
        """Array of this framework with the data of a NumPy array."""
        return array


class Allocator(Framework, abc.ABC):
    """A framework with a current stream and an allocator that keeps to streams."""

    serves_capture: ClassVar[bool] = False

    @abc.abstractmethod
    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        """Look at arrays of this framework; it has an answer for each."""

    def allocator(self) -> Allocator:
        """Return itself."""
        return self

    @abc.abstractmethod
    def current_stream(self, device: int) -> int:
        """CUstream handle of the framework's current stream."""

    @abc.abstractmethod
    def empty(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[Any, ArrayView]:
        """Allocate a contiguous array for use on `stream`."""

    @abc.abstractmethod
    def dtype(self, name: str) -> object:
        """Find an element type."""

    def part(
        self, array: Any, begin: int, shape: tuple[int, ...], dtype: str
    ) -> tuple[object, ArrayView]:
        """See bytes of a contiguous uint8 array, from `begin` on, as an array of another type."""
        end = begin + math.prod(shape) * numpy_dtype(dtype).itemsize
        part = array[begin:end].view(self.dtype(dtype)).reshape(*shape)
        (view,) = self.views((("workspace", part),))
        assert view is not None
        return part, view

    def empty_swapped(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[Any, ArrayView]:
        """Allocate as `empty`, with the last two axes in the other order in memory."""
        of_memory = (*shape[:-2], shape[-1], shape[-2])
        array, view = self.empty(of_memory, dtype, device, stream)
        strides = (*view.strides[:-2], view.strides[-1], view.strides[-2])
        return array.swapaxes(-1, -2), view._replace(shape=shape, strides=strides)


class _NumPy(Framework):
    name = "numpy"

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        views: list[ArrayView | None] = []
        for _, a in named:
            dtype, fixed = _dtype_name(a.dtype), not a.flags.writeable
            views.append(ArrayView(a.ctypes.data, a.shape, a.strides, dtype, None, fixed))
        return views

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)


class _Torch(Allocator):
    """PyTorch: its tensors are read, and the results allocated, as in eager PyTorch code."""

    name = "torch"
    serves_capture = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dtypes: dict[object, tuple[str, Callable[[int], int]]] = {}
        # Through a mode, such as a default device, each look at a tensor takes 2 us.
        self._has_mode = torch._C._is_torch_function_mode_enabled
        self._plainly = torch._C.DisableTorchFunction  # without any, which takes 0.3 us
        try:
            self._dynamo = torch._C._dynamo.eval_frame.get_eval_frame_callback
        except AttributeError:  # a PyTorch without TorchDynamo
            self._dynamo = bool
        self._modes = torch._C._len_torch_dispatch_stack
        self._records = torch.is_grad_enabled
        # Autograd then finds what it has saved of an array changed.
        self.note_written = torch.autograd.graph.increment_version
        self._forward = torch.autograd.forward_ad  # its level is -1 where there are no dual numbers

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        if self._compiles():
            raise TypeError(
                f"{arg(named[0][0])}: cumla runs eagerly, got torch.compile; {_DISABLE}"
            )
        if (self._modes() or self._has_mode()) and self._is_traced():
            raise self.traced(named[0][0])
        with self._plainly():
            views: list[ArrayView | None] = [self._view(name, array) for name, array in named]
            self.refuse_gradients(named)  # of dense tensors: others have derivatives of their own
            return views

    def refuse_gradients(self, named: Iterable[tuple[str, Any]]) -> None:
        """Refuse tensors through which PyTorch would compute derivatives; `RuntimeError`."""
        if self._records():
            for name, array in named:
                if array.requires_grad:
                    raise RuntimeError(
                        f"{arg(name)}: needs a tensor that requires no gradient, got one that "
                        f"does; no gradients flow through cumla: call under torch.no_grad() or "
                        f"torch.inference_mode(), or pass {arg(name)}.detach()"
                    )
        if self._forward._current_level >= 0:
            for name, array in named:
                if self._forward.unpack_dual(array).tangent is not None:
                    raise RuntimeError(
                        f"{arg(name)}: needs a tensor without a tangent, got a dual one; no "
                        f"derivatives flow through cumla: call under torch.inference_mode(), or "
                        f"pass torch.autograd.forward_ad.unpack_dual({arg(name)}).primal"
                    )

    def _is_traced(self) -> bool:
        """Return whether calls are traced into a graph, or are fake.

        Such modes are `make_fx`'s, also the one before dispatch, and `FakeTensorMode`.
        """
        of_kind, kinds = self._torch._C._get_dispatch_mode, self._torch._C._TorchDispatchModeKey
        if any(of_kind(kind) for kind in (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL)):
            return True
        return bool(self._torch._ops._len_torch_dispatch_stack_pre_dispatch())

    @staticmethod
    def traced(name: str) -> TypeError:
        """Make the error of a tensor with memory in such a mode, or what enters the graph."""
        got = f"{arg(name)}: cumla runs eagerly, got a call under make_fx or a FakeTensorMode; "
        if "cumla.torch" in sys.modules:
            return Traced(f"{got}{NO_PLANS}{NO_DSA_PLAN}", "cumla.torch")
        return TypeError(f"{got}{_IMPORT}")

    def _view(self, name: str, array: Any) -> ArrayView:
        try:
            ptr = array.data_ptr()
            strides = array.stride()
        except RuntimeError as error:
            raise self._not_dense(name, array, error) from error
        shape = tuple(array.shape)
        if shape and type(shape[0]) is not int:
            raise TypeError(f"{arg(name)}: cumla runs eagerly, got torch.jit.trace; {_OUTSIDE}")
        dtype, to_bytes = self._dtypes.get(array.dtype) or self._learn(array.dtype)
        if array.is_cuda:
            device = array.get_device()
        elif array.is_cpu:
            device = None
        else:
            there, way_out = array.device, "move it with .to('cuda')"
            if there.type == "meta":
                way_out = "it has no memory: make one there, and fill it"
            raise ValueError(
                f"{arg(name)}: needs a tensor on a CUDA device or on the CPU, got one on {there}; "
                f"{way_out}"
            )
        if ptr < _SUSPECT:
            self._check_memory(name, array, ptr)
        if array.is_neg():
            raise ValueError(
                f"{arg(name)}: needs a tensor whose memory holds its values, got one with the "
                f"negative bit, as of x.conj().imag; pass {arg(name)}.resolve_neg()"
            )
        return ArrayView(ptr, shape, tuple(map(to_bytes, strides)), dtype, device)

    @eager_only
    def _compiles(self) -> bool:
        """Return whether TorchDynamo gets each frame first; it skips those without tensors."""
        return bool(self._dynamo())  # False or None where it does not

    def glance(self, arrays: tuple[Any, ...]) -> Hashable | None:
        if self._modes() or self._has_mode():
            if self._is_traced():
                return None
            if self._has_mode():
                with self._plainly():
                    return self.glance(arrays)
        if self._forward._current_level >= 0 or (
            self._records() and any(map(_requires_grad, arrays))
        ):
            return None  # `views` refuses them
        try:
            seen = [
                (a.data_ptr(), a.shape, a.stride(), a.dtype, a.get_device(), a.is_neg())
                for a in arrays
            ]
            return tuple(seen)
        except RuntimeError:  # no dense tensor, as `views` will say
            return None

    def _learn(self, dtype: Any) -> tuple[str, Callable[[int], int]]:
        """Name an element type, with what makes bytes of a number of elements."""
        known = (str(dtype).removeprefix("torch."), int(dtype.itemsize).__mul__)
        self._dtypes[dtype] = known
        return known

    @staticmethod
    def _check_memory(name: str, array: Any, ptr: int) -> None:
        """Refuse a tensor with elements and an address that stands for none."""
        try:
            if 0 in array.shape or (ptr and array.untyped_storage().data_ptr()):
                return
        except (RuntimeError, NotImplementedError):  # storage that is none
            pass
        kind = type(array).__qualname__
        raise ValueError(
            f"{arg(name)}: needs a tensor with memory, got a {kind} without: a wrapper around "
            f"other tensors, or one whose storage was freed (resize_(0), as FSDP does); pass the "
            f"tensor that holds the values, or bring its storage back first"
        )

    def _not_dense(self, name: str, array: Any, error: RuntimeError) -> TypeError:
        """Make the error of a tensor that has no address: one of functorch, or a sparse one."""
        try:
            wrapped = self._torch._C._functorch.is_functorch_wrapped_tensor(array)
        except AttributeError:
            wrapped = False
        if wrapped:
            return TypeError(
                f"{arg(name)}: needs a dense tensor with memory of its own, got one inside "
                f"torch.vmap or torch.func.grad; cumla has neither batching rules nor gradients: "
                f"pass the whole batch in one call, outside the transformed function"
            )
        return TypeError(
            f"{arg(name)}: needs a dense tensor with memory of its own, got a {array.layout} one "
            f"({str(error).splitlines()[0]}); convert it, e.g. with .to_dense()"
        )

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        dtype = str(array.dtype).removeprefix("torch.")
        if not dtype.startswith(_FLOAT8):  # older versions export none of them
            return import_array(name, array, stream)
        return _import_bits(name, array.view(self._torch.uint8), dtype, stream)

    def current_stream(self, device: int) -> int:
        return int(self._torch._C._cuda_getCurrentRawStream(device))

    def handle_of(self, stream: Any) -> int:
        """CUstream handle of a `torch.Stream`, which tells none itself."""
        place, index, kind = stream.stream_id, stream.device_index, stream.device_type
        if stream.device.type != "cuda":
            raise ValueError(
                f"stream: needs a stream of a CUDA device, got one of {stream.device}; pass a "
                f"torch.cuda.Stream, or leave it out"
            )
        of_cuda = self._torch.cuda.Stream(stream_id=place, device_index=index, device_type=kind)
        return int(of_cuda.cuda_stream)

    def empty(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[object, ArrayView]:
        if self._has_mode():
            with self._plainly():
                return self.empty(shape, dtype, device, stream)
        torch = self._torch
        kind: Any = self.dtype(dtype)
        if stream == torch._C._cuda_getCurrentRawStream(device):
            array = torch.empty(shape, dtype=kind, device=device)
        else:  # the caching allocator hands memory out for the stream that is current in torch
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
                array = torch.empty(shape, dtype=kind, device=device)
        to_bytes = (self._dtypes.get(kind) or self._learn(kind))[1]
        strides = tuple(map(to_bytes, array.stride()))
        return array, ArrayView(array.data_ptr(), shape, strides, dtype, device)

    def dtype(self, name: str) -> object:
        return getattr(self._torch, name)

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


class _CuPy(Allocator):
    """CuPy, which also serves the frameworks without a stream and an allocator of their own."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        views: list[ArrayView | None] = []
        for name, array in named:
            data, shape = array.data, array.shape
            if not data.ptr and 0 not in shape:
                raise ValueError(
                    f"{arg(name)}: needs an array with memory, got one at address 0; pass the "
                    f"array that holds the values"
                )
            dtype = _dtype_name(array.dtype)
            views.append(ArrayView(data.ptr, shape, array.strides, dtype, data.device_id))
        return views

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

    @contextlib.contextmanager
    def use_stream(self, stream: int) -> Iterator[None]:
        """Make `stream` CuPy's current one: its pool hands memory out for that stream.

        Not by CuPy's own `with stream:`, which makes the null stream the current one at its end
        where the one before was made so by `use()`.
        """
        cuda = self._cupy.cuda
        before = cuda.get_current_stream()
        of_caller = cuda.Stream.from_external(_StreamHandle(stream)) if stream else cuda.Stream.null
        of_caller.use()
        try:
            yield
        finally:
            before.use()

    def empty(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[object, ArrayView]:
        float8 = dtype.startswith(_FLOAT8)  # CuPy allocates none of them, but views bytes as such
        stored = np.dtype(np.uint8) if float8 else numpy_dtype(dtype)
        if stream == self._cupy.cuda.get_current_stream(device).ptr:
            array = self._cupy.empty(shape, dtype=stored)
        else:
            with self.use_stream(stream):
                array = self._cupy.empty(shape, dtype=stored)
        if float8:
            array = array.view(numpy_dtype(dtype))
        data = array.data
        return array, ArrayView(data.ptr, shape, array.strides, dtype, data.device_id)

    def dtype(self, name: str) -> object:
        return numpy_dtype(name)


class _StreamHandle(NamedTuple):
    """A stream as the CUDA stream protocol wants it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class _Jax(Framework):
    """JAX: read through DLPack; its results are CuPy's memory, lent to it."""

    name = "jax"
    immutable = True
    exports = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        if hasattr(jax, "ffi"):  # not in an older JAX
            self.binding = "cumla.jax"

    def device(self, name: str, array: Any) -> int | None:
        self.check_numbers(name, array)
        self.check_memory(name, array)
        devices = len(array.sharding.device_set)
        if devices > 1:
            how, way_out = "sharded", f"call once a shard ({name}.addressable_shards[i].data)"
            if array.sharding.is_fully_replicated:
                how, way_out = "replicated", f"pass one copy ({name}.addressable_shards[0].data)"
            raise _sharded(name, f"one that is {how} over {devices}", way_out)
        return super().device(name, array)

    @staticmethod
    def check_numbers(name: str, array: Any) -> None:
        if not isinstance(array.dtype, np.dtype):
            raise TypeError(
                f"{arg(name)}: needs an array of numbers, got JAX's {array.dtype}; pass the "
                f"numbers of a key, jax.random.key_data({arg(name)}), if they are meant"
            )

    @staticmethod
    def check_memory(name: str, array: Any) -> None:
        if array.is_deleted():
            raise ValueError(
                f"{arg(name)}: needs an array with memory, got one deleted or donated; use the "
                f"array that the donating call returned"
            )

    def import_array(self, name: str, array: Any, stream: int | None) -> Imported:
        # JAX 0.11.2 exports an array before a copy from another GPU, that it waits for, is ordered.
        if not array.is_ready():
            device = next(iter(array.sharding.device_set))
            if self._jax.local_device_count(device.platform) > 1:
                array.block_until_ready()
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
        (view,) = cupy_framework().views((("result", array),))
        assert view is not None
        try:
            return lend(self._jax, array, view, stream)
        except RuntimeError:
            if not view.dtype.startswith(_FLOAT8):  # older versions take none of them
                raise
        bits = lend(self._jax, array, view._replace(dtype="uint8"), stream)
        return self._jax.lax.bitcast_convert_type(bits, numpy_dtype(view.dtype))

    def at_home(self, array: Any) -> contextlib.AbstractContextManager[Any] | None:
        context: contextlib.AbstractContextManager[Any]
        context = self._jax.default_device(next(iter(array.sharding.device_set)))
        return context

    def to_numpy(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> object:
        return self._jax.numpy.asarray(array)


def _import_bits(name: str, bits: Any, dtype: str, stream: int | None) -> Imported:
    """Import the bytes of an array of one-byte elements, as what they are."""
    imported = import_array(name, bits, stream)
    imported.view = imported.view._replace(dtype=dtype)
    return imported


NUMPY = _NumPy()
DLPACK = Framework()
# Array types that have been seen; a look-up is all that a warm call pays to tell frameworks apart.
framework_of_type: dict[type, Framework] = {np.ndarray: NUMPY}


@functools.cache
def torch_framework() -> _Torch:
    """PyTorch, which the caller has imported."""
    return _Torch(sys.modules["torch"])


@functools.cache
def jax_framework() -> _Jax:
    """JAX, which the caller has imported."""
    return _Jax(sys.modules["jax"])


@functools.cache
def cupy_framework() -> _CuPy:
    """CuPy, imported for the GPU's sake; `MissingDependencyError` without it."""
    return _CuPy(import_cupy())


def framework_of(name: str, array: object) -> Framework:
    """Framework of an array; refuses what is none, or has no memory."""
    return framework_of_type.get(type(array)) or recognise(name, array)


def _sharded(name: str, got: str, way_out: str) -> ValueError:
    return ValueError(f"{arg(name)}: needs an array on one device, got {got}; {way_out}")


def _is_instance(array: object, module: str, kind: str) -> bool:
    return isinstance(array, getattr(sys.modules.get(module), kind, ()))


def recognise(name: str, array: object) -> Framework:
    """Return the framework of an array whose type has not been seen yet."""
    kind = type(array)
    parents = {parent.__name__ for parent in kind.__mro__}
    framework: Framework
    if _is_instance(array, "torch", "Tensor"):
        if parents & {"FakeTensor", "FunctionalTensor"}:
            raise TypeError(
                f"{arg(name)}: needs a tensor with memory, got a {kind.__name__}, which "
                f"torch.compile and torch.export trace with; {_IMPORT}"
            )
        if "DTensor" in parents:
            raise _sharded(name, "a DTensor, which is sharded", f"pass {name}.to_local()")
        framework = torch_framework()
    elif _is_instance(array, "cupy", "ndarray"):
        if "DistributedArray" in parents:
            raise _sharded(name, "a DistributedArray, which is sharded", "call once a chunk")
        framework = cupy_framework()
    elif _is_instance(array, "jax", "Array"):
        if "Tracer" in parents:
            raise Traced(
                f"{arg(name)}: needs an array with memory, got a JAX tracer ({kind.__name__}); use "
                f"cumla.jax inside jax.jit, where plans and functions that write in place differ",
                "cumla.jax",
            )
        framework = jax_framework()
    elif isinstance(array, np.ndarray):
        framework = NUMPY
    elif hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        framework = DLPACK
    else:
        raise _no_array(name, array)
    framework_of_type[kind] = framework
    return framework


def _no_array(name: str, array: object) -> TypeError:
    kind = type(array)
    got, way_out = f"{kind.__module__}.{kind.__qualname__}", f"make one with {_MAKE_ONE}"
    if isinstance(array, tuple) and hasattr(array, "_fields"):
        way_out = f"pass one array of it, such as .{array._fields[0]}"
    elif isinstance(array, (list, tuple)):
        got += f" of {len(array)}"
    elif _is_instance(array, "torch.fx", "Proxy") or kind.__name__ == "ShapeDtypeStruct":
        way_out = f"it has no memory: {_OUTSIDE}"
    return TypeError(
        f"{arg(name)}: needs an array of CuPy, PyTorch, JAX or NumPy, or one with __dlpack__, got "
        f"{got}; {way_out}"
    )
