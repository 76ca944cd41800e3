# SPDX-License-Identifier: Apache-2.0
"""The argument table: what arrays must look like, checked before anything is allocated.

A table has a row for each array of an operation: its axes, its dtypes, its layout in memory.
The same names on the axes of different arrays stand for the same sizes. A message names the
argument, what was needed, what came and the way out. What fits no table is a function after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from numbers import Number, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla.core._dlpack import numpy_dtype
from cumla.core.names import arg

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView

INT32 = ("int32",)
WIDE = ("int32", "int64")

Views = Mapping[str, "ArrayView | None"]
"""Views by the names of their arguments; those of pairs are ``name[0]`` and ``name[1]``."""

_ALIGNMENT = 16  # bytes: of addresses and strides, what the copy engine moves
# Bounds of softmax_scale. Products of ordinary queries and keys, from 1e-17 to 1e30, times this
# and log2(e), stay finite and normal as float32. Larger products are not caught.
_SCALES = (1e-20, 1e6)
FACTORS = ("q_scale", "kv_scale", "k_scale", "v_scale")  # of e4m3 arrays: numbers or arrays
_MOST_TOKENS = 0x7FFFFFC0  # of a request
_FACTOR_RANGE = (2.0**-126, 2.0**126)  # normal as float32, and so are their inverses


class Array(NamedTuple):
    """A row of an argument table.

    `axes` are names of sizes, or numbers, between spaces. A name is bound by the array that has it
    first, or before; ``name+1`` is one more. Nothing: a scalar.

    It `lies` in ``"rows"``: last axis contiguous, address and strides multiples of 16 bytes; in a
    ``"row"``: last axis contiguous; as ``"elements"``: any strides of whole elements.
    """

    axes: str
    dtypes: tuple[str, ...]  # any of these
    lies: str = "elements"
    way_out: str = "reshape it"  # ends the message for another shape
    conversion: str = "convert it first"  # ends the message for another dtype


SINKS = {"sinks": Array("num_heads", ("float32",), "row", "pass a score for each query head")}


def bind(table: Mapping[str, Array], views: Views, sizes: Mapping[str, int]) -> dict[str, int]:
    """Check the arrays of a table that are given, in its order; sizes of all axes by name.

    `views` go by the names of the table: others are not looked at, and None is not given. `sizes`
    are those of axes that are known before.
    """
    bound = dict(sizes)
    for name, row in table.items():
        view = views.get(name)
        if view is None:
            continue
        check_dtype(name, view.dtype, row.dtypes, row.conversion)
        _bind_axes(name, view, row, bound)
        check_lies(name, view, row.lies)
    return bound


@cache
def _axes(axes: str) -> tuple[tuple[str, str, int], ...]:
    """Parse axes: text, name ("" for a number), what is added."""
    parsed = []
    for text in axes.split():
        name, _, more = text.partition("+")
        is_number = name.isdigit()
        parsed.append((text, "" if is_number else name, int(name) if is_number else int(more or 0)))
    return tuple(parsed)


def _bind_axes(name: str, view: ArrayView, row: Array, bound: dict[str, int]) -> None:
    axes = _axes(row.axes)
    if len(view.shape) == len(axes):
        for (_, symbol, more), size in zip(axes, view.shape, strict=True):
            if (
                size < more
                or (bound.setdefault(symbol, size - more) if symbol else 0) + more != size
            ):
                break
        else:
            return
    known = ", ".join(f"{arg(s)} {bound[s]}" for _, s, _ in axes if s in bound)
    raise ValueError(
        f"{arg(name)}: needs shape {_in_shape(axes)}{known and f' with {known}'}, got "
        f"{view.shape}; {row.way_out}"
    )


def _in_shape(axes: tuple[tuple[str, str, int], ...]) -> str:
    """Write axes as a shape: (batch + 1,)."""
    texts = [_axis(text) for text, _, _ in axes]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _axis(text: str) -> str:
    for sign in "+*":
        if sign in text:
            return f" {sign} ".join(map(arg, text.split(sign)))
    return arg(text)


def check_dtype(
    name: str, dtype: str, dtypes: tuple[str, ...], way_out: str = "convert it first"
) -> None:
    """Check that a dtype is one of some."""
    if dtype not in dtypes:
        raise TypeError(f"{arg(name)}: needs {' or '.join(dtypes)}, got {dtype}; {way_out}")


def check_shape(
    name: str, view: ArrayView, axes: str, shape: tuple[int, ...], way_out: str
) -> None:
    """Check a shape whose axes are named in a message."""
    if view.shape != shape:
        raise ValueError(f"{arg(name)}: needs shape {axes} = {shape}, got {view.shape}; {way_out}")


def check_lies(name: str, view: ArrayView, lies: str) -> None:
    """Check the layout of an array in memory, as :class:`Array` says."""
    if 0 in view.shape:  # it has no memory
        return
    if lies == "rows":
        check_layout(name, view)
        return
    size = numpy_dtype(view.dtype).itemsize
    if view.ptr % size or any(stride % size for stride in view.strides):
        raise ValueError(
            f"{arg(name)}: needs an address and strides that are multiples of {size} bytes, got "
            f"address {view.ptr:#x} and strides {view.strides}; copy it"
        )
    if lies == "row" and view.shape[-1] > 1 and view.strides[-1] != size:
        raise ValueError(
            f"{arg(name)}: needs contiguous rows, got a stride of {view.strides[-1]} bytes on the "
            f"last axis; make a contiguous copy"
        )


def check_layout(name: str, view: ArrayView) -> None:
    """Last axis contiguous; the address and every other stride a multiple of 16 bytes.

    An empty array has no memory, and NumPy reports strides of 0.
    """
    if 0 in view.shape:
        return
    itemsize = numpy_dtype(view.dtype).itemsize
    if view.strides[-1] != itemsize:
        raise ValueError(
            f"{arg(name)}: needs a contiguous last axis, got a stride of {view.strides[-1]} bytes "
            f"for {itemsize}-byte elements; make a contiguous copy"
        )
    if view.ptr % _ALIGNMENT:
        raise ValueError(
            f"{arg(name)}: needs an address that is a multiple of {_ALIGNMENT} bytes, got "
            f"{view.ptr:#x}; copy the array, or slice it at such a multiple"
        )
    for axis, (size, stride) in enumerate(zip(view.shape[:-1], view.strides, strict=False)):
        if size > 1 and (stride % _ALIGNMENT or stride < 0):
            raise ValueError(
                f"{arg(name)}: needs strides that are multiples of {_ALIGNMENT} bytes and not "
                f"negative, got {stride} on axis {axis}; pad the rows, or make a contiguous copy"
            )


def check_output(
    name: str, view: ArrayView, shape: tuple[int, ...], dtypes: tuple[str, ...], lies: str
) -> None:
    """One of the dtypes, the shape, and memory for each element."""
    way_out = "allocate it so or leave it out"
    check_dtype(name, view.dtype, dtypes, way_out)
    if view.shape != shape:
        raise ValueError(f"{arg(name)}: needs shape {shape}, got {view.shape}; {way_out}")
    check_own_memory(name, view)
    check_lies(name, view, lies)


def check_own_memory(name: str, view: ArrayView) -> None:
    """Memory that is written to: no two elements in one place.

    Each axis has to step over all inner axes, as those of slices and transposes do.
    """
    if 0 in view.shape:
        return
    reach = numpy_dtype(view.dtype).itemsize  # of the axes with smaller strides
    axes = [(abs(stride), size) for stride, size in zip(view.strides, view.shape, strict=True)]
    for stride, size in sorted(axes):
        if size > 1 and stride < reach:
            kind = "an array whose elements overlap" if stride else "a broadcast array"
            raise ValueError(
                f"{arg(name)}: needs memory of its own for each element, got {kind} with strides "
                f"{view.strides}; copy it"
            )
        reach += (size - 1) * stride


def check_written(name: str, view: ArrayView) -> None:
    """Memory that is written to in place."""
    if view.read_only:
        raise ValueError(
            f"{arg(name)}: needs an array that can be written to, got a read-only one; pass the "
            f"array that owns the memory"
        )
    check_own_memory(name, view)


def check_workspace(view: ArrayView, nbytes: int) -> None:
    """Check the memory that is to be a plan's buffer."""
    if view.read_only:
        raise TypeError(
            "workspace: needs memory that can be written to, got a read-only array, as JAX's all "
            "are; allocate it with CuPy or PyTorch"
        )
    if view.dtype != "uint8" or len(view.shape) != 1 or view.strides[0] != 1:
        raise ValueError(
            f"workspace: needs a contiguous one-dimensional uint8 array, got {view.dtype} of shape "
            f"{view.shape} and byte strides {view.strides}; allocate one for it"
        )
    if view.shape[0] < nbytes:
        raise ValueError(
            f"workspace: needs {nbytes} bytes, got {view.shape[0]}; ask workspace_bytes of the "
            f"plan's class for the size"
        )
    if view.ptr % 256:
        raise ValueError(
            f"workspace: needs an address that is a multiple of 256, got {view.ptr:#x}; allocate "
            f"it on its own, or slice at such multiples"
        )


# --- numbers and flags ---------------------------------------------------------------------------


def checked_int(
    name: str, value: object, way_out: str, least: int = 1, need: str = "an int"
) -> int:
    """Return an int, Python's or NumPy's, that is at least `least`."""
    if isinstance(value, np.integer):  # such as the maximum of lengths
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_option(name, need, value, "convert it")
    if value < least:
        raise ValueError(f"{arg(name)}: needs a number from {least}, got {value}; {way_out}")
    return value


def checked_max_kv_len(batch_invariant: bool, max_kv_len: object) -> int:
    """Return the longest request of a plan; 0 where nothing depends on it."""
    if not batch_invariant:
        if max_kv_len is not None:
            raise ValueError(
                f"{arg('max_kv_len')}: needs batch_invariant=True, got {max_kv_len} for a plan "
                f"that serves any length; leave it out"
            )
        return 0
    if max_kv_len is None:
        raise ValueError(
            f"{arg('max_kv_len')}: needs the length of the longest request that a "
            f"{arg('batch_invariant')} plan is to serve, got None; pass it, it sizes the plan's "
            f"buffer"
        )
    return checked_int("max_kv_len", max_kv_len, "pass the size of a call")


def checked_window(name: str, value: Any) -> tuple[int, int] | None:
    """Check a window, and return its left and right side, -1 for no bound."""
    if value is None:
        return None
    pair = value if isinstance(value, (tuple, list)) else (value, None)
    if len(pair) != 2:
        raise ValueError(
            f"{arg(name)}: needs one number or a pair (left, right), got {len(pair)} of them; "
            f"pass -1 or None for a side without a bound"
        )
    way_out = "pass -1 or None for no bound"
    need = "an int, a pair (left, right) of ints, or None"
    sides = [-1 if n is None else checked_int(name, n, way_out, -1, need) for n in pair]
    left, right = (min(side, _MOST_TOKENS) for side in sides)
    return left, right


def window_sides(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """Return the tokens that a query sees on the left and on the right, -1 for all."""
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def dtype_name(dtype: Any) -> Any:
    """Name a dtype of any framework; what is none, and names, are returned for their checks."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    library, _, name = str(dtype).partition(".")
    if library == "torch":
        return name
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def checked_flag(name: str, value: object) -> bool:
    """Return an option that is on or off as a bool; what is merely true or false is refused."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):  # such as an element of an array, or what a comparison gave
        return bool(value)
    way_out = "pass one of the two, such as bool(...) of a number"
    raise _wrong_option(name, "True or False", value, way_out)


def as_number(name: str, value: Any) -> float:
    """Return a factor that is a Python or NumPy number as a float."""
    # A float alone is told without asking an ABC.
    if not isinstance(value, (float, Real)) or isinstance(value, bool):
        way_out = "pass float(...) of it"
        if hasattr(value, "shape"):
            way_out += " once (an array on a GPU would have to be waited for)"
        raise _wrong_option(name, "a Python or NumPy number", value, way_out)
    return float(value)


def _wrong_option(name: str, need: str, value: object, way_out: str) -> TypeError:
    """Say what an option needs; one that JAX traces has no value to convert."""
    if hasattr(value, "_trace"):  # TorchDynamo, which looks here too, knows no more than this
        way_out = (
            "options are no arrays: bind it before jax.jit, as by functools.partial, or name it "
            "in static_argnames"
        )
    got = type(value).__qualname__
    if isinstance(value, (str, int, float, np.generic)):  # no array: that may be on a GPU
        got += f" {value!r:.40}" if isinstance(value, str) else f" {value}"
    return TypeError(f"{arg(name)}: needs {need}, got {got}; {way_out}")


_NO_ARRAYS = (Number, np.generic, str, bytes, tuple, list, dict, set)


def number_of(name: str, factor: Any) -> float | None:
    """Return the factor of an FP8 cache in float32 if it is a number, and None if it is none."""
    if not isinstance(factor, Real) or isinstance(factor, bool):
        if not isinstance(factor, _NO_ARRAYS):
            return None  # or what is refused as none
        raise _wrong_option(name, "a number, or a float32 array", factor, "pass one of them")
    low, high = _FACTOR_RANGE
    if not low <= float(factor) <= high:
        raise ValueError(
            f"{arg(name)}: needs a number from 2 ** -126 to 2 ** 126, got {factor}; pass the "
            f"factor by which quantised rows give the rows"
        )
    return float(np.float32(factor))


def checked_scale(softmax_scale: Any, default: float, name: str = "softmax_scale") -> float:
    """Return the factor of the scores as a float."""
    if softmax_scale is None:
        return default
    scale = softmax_scale if type(softmax_scale) is float else as_number(name, softmax_scale)
    low, high = _SCALES
    if not low <= scale <= high:
        raise ValueError(
            f"{arg(name)}: needs a number from {low} to {high}, got {scale}; put any other factor "
            f"into {arg('q')}"
        )
    return scale


def check_device_number(device: object) -> None:
    """Check a CUDA ordinal, or None."""
    if device is not None and (not isinstance(device, int) or isinstance(device, bool)):
        raise TypeError(
            f"device: needs a CUDA ordinal, which is an int, or None, got {device!r}; pass its "
            f"number, as 0 for cuda:0, or for the CPU no device: a plan takes like="
        )
