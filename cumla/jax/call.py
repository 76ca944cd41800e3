# SPDX-License-Identifier: Apache-2.0
"""Calls of operations on traced arrays: checked while tracing, then one custom call of XLA's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from cumla.core._dlpack import numpy_dtype
from cumla.core.arrays import WORKSPACE, immutable_output
from cumla.core.frameworks import (
    Framework,
    Traced,
    framework_of,
    framework_of_type,
    jax_framework,
)
from cumla.core.state import AttentionState
from cumla.errors import CumlaError
from cumla.jax.execute import on_cpu, on_gpu
from cumla.jax.fallback import callback
from cumla.jax.handler import register, unknown_layout
from cumla.jax.spec import Buffer, Spec
from cumla.launch.device import require_hopper
from cumla.mha.bias import AttentionBias
from cumla.mha.mask import AttentionMask
from cumla.prefix_groups import PrefixGroups
from cumla.reference import QuantizedRows, TopKResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumla.core.operation import Operation

__all__ = [
    "TARGET",
    "Reference",
    "buffer_of",
    "emit",
    "gpu",
    "refuse_outputs",
    "refuse_stream",
    "run",
    "run_eagerly",
]

_KNOWN = (0, 5), (0, 12)  # versions of JAX; with others eager calls do without programs
_MOST_SHARDINGS = 1024
_INT32 = np.iinfo(np.int32)
_FRAMEWORK = jax_framework()
# Shardings, kept alive for the sake of their ids, and the GPU that each stands for.
_places: dict[int, tuple[Any, Any]] = {}
TARGET = "cumla"
"""Name of the custom calls in a program, which `jax.export` asks for."""

register(TARGET, "cpu", on_cpu)
register(TARGET, "CUDA", on_gpu)
for _kind in (AttentionMask, AttentionBias):
    jax.tree_util.register_dataclass(_kind, [field.name for field in fields(_kind)], [])
with suppress(ImportError):  # a JAX without jax.export, or without what that needs
    from jax import export

    for _result in (
        AttentionState,
        PrefixGroups,
        QuantizedRows,
        TopKResult,
    ):  # what exported programs may return
        _name = f"cumla.{_result.__name__}"
        export.register_namedtuple_serialization(_result, serialized_name=_name)


class Reference:
    """An argument that is written to in place: after the call it holds the new array."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        framework_of_type.setdefault(Reference, _REFERENCES)
        self.value = value


class _References(Framework):
    """The framework that functions which write in place take for writable."""

    def views(self, named: tuple[tuple[str, Any], ...]) -> NoReturn:
        raise Traced(f"{named[0][0]}: needs an array with memory", "cumla.jax")


_REFERENCES = _References()


def run(
    operation: Operation[Any, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    options: Any,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Run an operation inside a transformation of JAX, as `cumla.core.operation.run` outside.

    An operation that returns nothing writes to its first input, and to what there is among
    `outputs`: those are `Reference`, and hold the new arrays afterwards.
    """
    refuse_stream(stream)
    refuse_outputs(outputs)
    given = {name: array for name, array in outputs.items() if array is not None}
    arrays = {**inputs, **given}
    references = {name: a for name, a in arrays.items() if isinstance(a, Reference)}
    values = arrays | {name: reference.value for name, reference in references.items()}
    absent = tuple([name for name in outputs if name not in given])
    device = gpu()

    def nbytes(arguments: Any) -> int:
        return 0 if device is None else operation.workspace_bytes(operation.key(arguments, device))

    results = emit(operation, values, options, nbytes, absent=absent, written=tuple(references))
    for name, reference in references.items():
        reference.value = results.pop(name)
    results.pop(WORKSPACE, None)
    return tuple(results.values())


def run_eagerly(
    operation: Operation[Any, Any],
    inputs: Mapping[str, Any],
    outputs: tuple[str, ...],
    options: Any,
) -> tuple[Any, ...] | None:
    """Run an eager call as a program of its own, which is compiled once for each shape.

    None if that would not run where the arrays are: if one of them is traced or not of JAX, as the
    first one is, or not on the GPU on which `jax.jit` computes those that are not committed to a
    device.
    """
    default = jax.config.jax_default_device or jax.local_devices()[0]
    arrays = tuple(inputs.values())
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:
            return None
        sharding = array.sharding
        if (_places.get(id(sharding)) or _place(sharding))[1] is not default:
            return None
    try:
        return _compiled(operation, tuple(inputs), outputs, options)(*arrays)
    except RuntimeError:
        for name, array in inputs.items():
            _FRAMEWORK.check_memory(name, array)
        raise


def _place(sharding: Any) -> tuple[Any, Any]:
    """Look up in the memory of which GPU for the kernels arrays are, if of one."""
    device, *others = sharding.device_set
    is_known = (
        _KNOWN[0] <= jax.__version_info__[:2] < _KNOWN[1]
        and not unknown_layout()
        and not others
        and device.platform == "gpu"
        and device.local_hardware_id == gpu()
        and sharding.memory_kind in (None, "device")
    )
    if len(_places) >= _MOST_SHARDINGS:
        _places.clear()
    _places[id(sharding)] = place = (sharding, device if is_known else None)
    return place


# A graph of one call costs the host more than its launches, where results are new memory each time.
_ONE_CALL = {"xla_gpu_enable_command_buffer": ""}


@lru_cache(maxsize=4096)
def _compiled(
    operation: Operation[Any, Any], names: tuple[str, ...], outputs: tuple[str, ...], options: Any
) -> Callable[..., tuple[Any, ...]]:
    """Make the compiled function of a call."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        inputs = dict(zip(names, arrays, strict=True))
        return run(operation, inputs, dict.fromkeys(outputs), options)

    compiled: Callable[..., tuple[Any, ...]] = jax.jit(call, compiler_options=_ONE_CALL)
    return compiled


def emit(
    operation: Operation[Any, Any],
    arrays: Mapping[str, Any],
    options: Any,
    nbytes: Callable[[Any], int],
    *,
    key: Any = None,
    absent: tuple[str, ...] = (),
    written: tuple[str, ...] = (),
    keeps_workspace: bool = False,
) -> dict[str, Any]:
    """Check a call and put it into the program; all its results, by name, the workspace too.

    `nbytes` tells the size of the workspace from checked arguments; the rest is as in `Spec`.
    """
    values = {name: as_array(name, array) for name, array in arrays.items()}

    def described() -> Spec:
        buffers = tuple([buffer_of(name, value) for name, value in values.items()])
        return Spec.of(operation, options, key, buffers, absent, written, 0, keeps_workspace)

    spec = described()
    wide = [name for name, value in values.items() if isinstance(value, np.ndarray)]
    if wide:
        operation.arguments(spec.views(None), options)  # takes int64 alone, of slots and positions
        values |= {name: _narrowed(values[name]) for name in wide}
        spec = described()
    arguments = operation.arguments(spec.views(None), options)
    spec = spec._replace(workspace=nbytes(arguments))
    results = spec.results(operation.outputs(arguments))
    aliases = tuple(spec.aliases(results).items())
    call = _custom_call(spec.text(), results, aliases, unknown_layout())
    called = call(*values.values())
    axes = frozenset().union(*map(_mapped_axes, values.values()))
    # Inside jax.shard_map: results differ along the axes along which an input does.
    called = tuple([_varying(result, axes) for result in called]) if axes else called
    return {buffer.name: result for buffer, result in zip(results, called, strict=True)}


def _varying(value: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _mapped_axes(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def _mapped_axes(value: Any) -> frozenset[str]:
    """Return the axes of `jax.shard_map` along which a value differs, if JAX keeps a record."""
    if not hasattr(jax.lax, "pcast"):  # an older JAX: check_vma=False where a loop complains
        return frozenset()
    kind = jax.typeof(value)
    varying = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return frozenset(varying or getattr(kind, "vma", None) or ())


@lru_cache(maxsize=4096)
def _custom_call(
    text: str, results: tuple[Buffer, ...], aliases: tuple[tuple[int, int], ...], unknown: str
) -> Callable[..., tuple[Any, ...]]:
    """Make the function of arrays that XLA calls; without a handler if `unknown` says why."""
    shapes = tuple([jax.ShapeDtypeStruct(b.shape, numpy_dtype(b.dtype)) for b in results])
    options: Any = {"vmap_method": "sequential", "input_output_aliases": dict(aliases)}
    if unknown:
        call = callback(text, shapes, options, unknown)
    else:
        call = partial(jax.ffi.ffi_call(TARGET, shapes, **options), spec=text)

    def launch(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call(*arrays))

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise TypeError(
            "cumla has no gradients: its functions are for inference; keep them out of jax.grad "
            "and jax.jvp, or pass jax.lax.stop_gradient(...) of their arguments"
        )

    function = jax.custom_jvp(launch)
    function.defjvp(refuse)
    called: Callable[..., tuple[Any, ...]] = function
    return called


@cache
def gpu() -> int | None:
    """CUDA ordinal of the first GPU that JAX sees, if it can run the kernels."""
    try:
        ordinal = int(jax.local_devices(backend="cuda")[0].local_hardware_id)
        require_hopper(ordinal)
    except (RuntimeError, CumlaError):
        return None
    return ordinal


def refuse_stream(stream: Any) -> None:
    """Refuse a stream where XLA chooses it."""
    if stream is not None:
        raise TypeError(
            f"stream: needs None inside a transformation of JAX, where XLA chooses the stream, got "
            f"{type(stream).__qualname__}; leave it out"
        )


def refuse_outputs(outputs: Mapping[str, Any]) -> None:
    """Refuse arrays to write to, unless they stand for what comes back."""
    for name, array in outputs.items():
        if array is not None and not isinstance(array, Reference):
            raise immutable_output(name)


def _narrowed(array: Any) -> Any:
    """Convert numbers to 32 bits; what is outside of a cache or table stays there."""
    return jax.numpy.asarray(array.clip(_INT32.min, _INT32.max).astype(np.int32))


def as_array(name: str, array: Any) -> Any:
    """Take an array of JAX, traced or not, or of NumPy; `TypeError` for what is neither.

    NumPy's stays what it is if its numbers have 64 bits and JAX's have not.
    """
    if isinstance(array, (jax.Array, np.ndarray)):
        if isinstance(array, jax.Array):
            if not isinstance(array, jax.core.Tracer):
                _FRAMEWORK.check_memory(name, array)
        elif array.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
            return array  # whose numbers JAX would cut off
        return jax.numpy.asarray(array)
    if type(array) not in (list, tuple):
        framework_of(name, array)  # the error of what is no array
    raise TypeError(
        f"{name}: needs an array of JAX or NumPy beside traced ones, got "
        f"{type(array).__module__}.{type(array).__qualname__}; make one with jax.numpy.asarray"
    )


def buffer_of(name: str, array: Any) -> Buffer:
    """Describe an array, or a `jax.ShapeDtypeStruct`; `TypeError` where XLA has no fixed shape."""
    _FRAMEWORK.check_numbers(name, array)
    if not all(isinstance(size, int) for size in array.shape):
        raise TypeError(
            f"{name}: needs sizes that are known while tracing, got {array.shape}; export a "
            f"program for each shape"
        )
    return Buffer(name, array.dtype.name, tuple(array.shape))
