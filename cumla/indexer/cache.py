# SPDX-License-Identifier: Apache-2.0
"""FP8 for the indexer: :func:`quantize_fp8` and :func:`append_indexer_cache`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cumla import reference
from cumla.core.arrays import check_mutable, from_numpy, open_call, to_numpy
from cumla.indexer.pages import E4M3, HEAD_DIMS, fused_pages, one_of, pair_of_pages
from cumla.launch.device import require_hopper
from cumla.launch.indexer.append_indexer_cache import (
    AppendIndexerArguments,
    append_indexer_spec,
    prepare_append_indexer,
)
from cumla.launch.indexer.quantize_fp8 import (
    MOST_AXES,
    MOST_COLUMNS,
    merge_axes,
    prepare_quantize,
    quantize_spec,
)
from cumla.launch.kernel import ReadyLaunches
from cumla.launch.module import load
from cumla.mla.cache_checks import check_integers, refuse_first
from cumla.mla.checks import (
    check_elements,
    check_layout,
    check_mode,
    check_output,
    check_own_memory,
    checked_flag,
    copy_to_host,
    may_look,
)
from cumla.reference import QuantizedRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView, Call

__all__ = ["QuantizedRows", "append_indexer_cache", "quantize_fp8"]

_ready_quantize = ReadyLaunches()
_ready_append = ReadyLaunches()

_FLOATS = ("bfloat16", "float16", "float32")


def quantize_fp8(
    x: Any,
    *,
    power_of_two_scales: bool = False,
    out: Any = None,
    scale_out: Any = None,
    stream: Any = None,
) -> QuantizedRows:
    """Quantise each row, along the last axis, to e4m3 and one float32 scale.

    The scale is the row's largest magnitude over 448, the largest e4m3 number, and a row is about
    ``values * scale``. Arrays on the GPU are quantised by a CUDA kernel (compute capability 9.0),
    on the caller's stream and without waiting for it; arrays on the CPU by
    :func:`cumla.reference.quantize_fp8`, which gives the same bits and has the formulas.

    Parameters
    ----------
    x : array
        ``(..., columns)`` bfloat16, float16 or float32, of CuPy, PyTorch, JAX or NumPy. A multiple
        of 16 columns, up to 8192. Any strides that are multiples of 16 bytes, the last axis
        contiguous.
    power_of_two_scales : bool
        Round each scale up to a power of two, from 2 ** -13 on, the first one above 1e-4.
    out : array, optional
        Of the shape of x, float8_e4m3fn or uint8; written and returned. Strides as for x. Must not
        overlap it. Of the framework of x; JAX's arrays cannot be written to.
    scale_out : array, optional
        ``(...)`` float32, with any strides; written and returned.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    QuantizedRows
        ``values``, of the shape of x, and ``scale``, of that shape without the last axis, arrays of
        the framework of x. The values are float8_e4m3fn, on the CPU of ml_dtypes where NumPy lacks
        it. New ones of CuPy, which computes nothing with that type, are uint8 with the same bits.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype, or a flag that is
        neither True nor False. As with every error but the last, the message names it, and nothing
        has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment or place.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    MissingDependencyError
        The arrays are on a GPU, and CuPy, NVRTC or cuda.bindings is missing.
    CompilationError
        The kernel does not compile with the NVRTC that is installed.
    NotPreparedError
        The stream is being captured and the kernel is not loaded yet, or memory is needed that
        capture forbids.
    CumlaError
        The driver refuses a launch; base class of the four above.

    Notes
    -----
    Infinities count as the largest float32; NaN becomes the NaN 0x7f and changes nothing else in
    its row. Scales are positive, finite and normal, also those of rows of zeros.
    """
    power_of_two_scales = checked_flag("power_of_two_scales", power_of_two_scales)
    call = open_call((("x", x),), (("out", out), ("scale_out", scale_out)), stream=stream)
    key = (call.views, power_of_two_scales, call.stream)
    ready = _ready_quantize.get(key)
    if ready is not None:
        with call:
            ready()
        return QuantizedRows(out, scale_out)
    rows, values, scale = _checked_quantize(call)
    if call.device is None:
        return _quantize_on_cpu(call, x, power_of_two_scales, out, scale_out)
    require_hopper(call.device)
    with call:
        new_values = new_scale = None
        kernel = load(quantize_spec(rows.dtype), call.device, capturing=lambda: call.capturing)
        if values is None:
            dtype = "uint8" if call.framework == "cupy" else "float8_e4m3fn"
            new_values, values = call.empty(rows.shape, dtype)
        if scale is None:
            new_scale, scale = call.empty(rows.shape[:-1], "float32")
        if 0 not in rows.shape:
            launch = prepare_quantize(kernel, rows, values, scale, power_of_two_scales, call.stream)
            launch()
            if out is not None and scale_out is not None:  # no memory of this call's
                _ready_quantize.keep(key, launch)
        return QuantizedRows(
            out if new_values is None else call.export(new_values),
            scale_out if new_scale is None else call.export(new_scale),
        )


def _checked_quantize(call: Call) -> tuple[ArrayView, ArrayView | None, ArrayView | None]:
    """Check the views of one call against each other."""
    rows, values, scale = cast("tuple[ArrayView, ArrayView | None, ArrayView | None]", call.views)
    if rows.dtype not in _FLOATS:
        raise TypeError(f"x: needs {' or '.join(_FLOATS)}, got {rows.dtype}; convert it first")
    columns = rows.shape[-1] if rows.shape else 0
    if columns % 16 or not 0 < columns <= MOST_COLUMNS:
        raise ValueError(
            f"x: needs a last axis of a multiple of 16 columns, up to {MOST_COLUMNS}, got shape "
            f"{rows.shape}; pad it with zeros, or cut it into rows"
        )
    check_layout("x", rows)
    if values is not None:
        check_output("out", values, rows.shape, E4M3)
        check_layout("out", values)
    if scale is not None:
        check_output("scale_out", scale, rows.shape[:-1], ("float32",))
        check_elements("scale_out", scale)
    _check_axes(rows, values, scale)
    return rows, values, scale


def _check_axes(rows: ArrayView, values: ArrayView | None, scale: ArrayView | None) -> None:
    """Check that a launch holds the axes of the rows; new outputs are contiguous."""
    lead = rows.shape[:-1]
    if 0 in lead:
        return
    contiguous = tuple(prod(lead[axis + 1 :]) for axis in range(len(lead)))
    axes = merge_axes(
        lead,
        rows.strides[:-1],
        contiguous if values is None else values.strides[:-1],
        contiguous if scale is None else scale.strides,
    )
    if len(axes) > MOST_AXES:
        raise ValueError(
            f"x: needs at most {MOST_AXES} axes before the last that are not contiguous in x, out "
            f"and scale_out alike, got {len(axes)} in shape {rows.shape}; make contiguous copies"
        )


def _quantize_on_cpu(
    call: Call, x: Any, power_of_two_scales: bool, out: Any, scale_out: Any
) -> QuantizedRows:
    result = reference.quantize_fp8(
        to_numpy("x", x),
        power_of_two_scales=power_of_two_scales,
        out=None if out is None else to_numpy("out", out),
        scale_out=None if scale_out is None else to_numpy("scale_out", scale_out),
    )
    return QuantizedRows(
        from_numpy(call.framework, result.values) if out is None else out,
        from_numpy(call.framework, result.scale) if scale_out is None else scale_out,
    )


def append_indexer_cache(
    k: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    power_of_two_scales: bool = False,
    stream: Any = None,
) -> None:
    """Quantise the indexer keys of new tokens, and write them into the pages of a cache, in place.

    As :func:`quantize_fp8` quantises them, in the same kernel that writes them. Arrays on the GPU
    are written by a CUDA kernel (compute capability 9.0), on the caller's stream and without
    waiting for it; arrays on the CPU by :func:`cumla.reference.append_indexer_cache`, with the same
    bits.

    A row is skipped, and nothing is written, where its slot is negative or lies behind the last
    page. Which of several rows for the same slot is written is undefined: it may be a mixture.

    Parameters
    ----------
    k : array
        ``(tokens, head_dim)`` bfloat16, float16 or float32, head_dim 32, 64 or 128; of CuPy,
        PyTorch, JAX or NumPy. Any row stride that is a multiple of 16 bytes, the last axis
        contiguous.
    kv_cache : array or pair of arrays
        ``(num_pages, page_size, 1, head_dim + 4)`` uint8, or the same without the axis of 1, with
        pages of 16, 32, 64 or 128 tokens: the bytes of a page are ``page_size * head_dim`` e4m3
        values, then ``page_size`` float32 scales. Pages are contiguous, their address and stride
        multiples of 16 bytes. A tuple ``(values, scales)`` holds the two apart:
        ``(num_pages, page_size, head_dim)`` float8_e4m3fn or uint8, or the same with an axis of 1
        before the last, strides as for k; and ``(num_pages, page_size)`` float32, any strides. Not
        of JAX, whose arrays are immutable.
    slot_mapping : array
        ``(tokens,)`` int32 or int64: page * page_size + offset.
    power_of_two_scales : bool
        Round each scale up to a power of two.
    stream : optional
        A CUDA stream, as in :func:`cumla.mla_decode`. By default the current stream of kv_cache's
        framework.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype, a flag that is
        neither True nor False, or a cache of JAX's. As with every error but the last, the message
        names it, and nothing has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment or place; or arguments do not fit
        together.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    MissingDependencyError
        The arrays are on a GPU, and CuPy, NVRTC or cuda.bindings is missing.
    CompilationError
        The kernel does not compile with the NVRTC that is installed.
    NotPreparedError
        The stream is being captured and the kernel is not loaded yet.
    CumlaError
        The driver refuses a launch; base class of the four above.
    """
    power_of_two_scales = checked_flag("power_of_two_scales", power_of_two_scales)
    caches = _cache_parts(kv_cache)
    for name, array in caches.items():
        check_mutable(name, array)
    # The cache comes first, because its framework must know of what is written.
    (first, cache), *written = caches.items()
    inputs = ((first, cache), ("k", k), ("slot_mapping", slot_mapping))
    call = open_call(inputs, tuple(written), stream=stream)
    names = (name for name, _ in (*inputs, *written))
    views = cast("dict[str, ArrayView]", dict(zip(names, call.views, strict=True)))
    key = (call.views, power_of_two_scales, call.stream)
    ready = None if check_mode() else _ready_append.get(key)
    if ready is not None:
        with call:
            ready()
        return
    arguments = _checked_append(views)
    if call.device is None:
        _append_on_cpu(k, caches, slot_mapping, arguments, power_of_two_scales)
        return
    require_hopper(call.device)
    if arguments.k.shape[0]:
        with call:
            if may_look(call):
                _check_slots(copy_to_host(arguments.slot_mapping, call.stream), arguments)
            spec = append_indexer_spec(arguments.k.dtype)
            kernel = load(spec, call.device, capturing=lambda: call.capturing)
            launch = prepare_append_indexer(kernel, arguments, power_of_two_scales, call.stream)
            launch()
            _ready_append.keep(key, launch)


def _cache_parts(kv_cache: Any) -> dict[str, Any]:
    """Name the fused cache, or the two arrays of a pair."""
    if not isinstance(kv_cache, (tuple, list)):
        return {"kv_cache": kv_cache}
    if len(kv_cache) != 2:
        raise ValueError(
            f"kv_cache: needs one array, or a pair of values and scales, got {len(kv_cache)} "
            f"arrays; pass (values, scales)"
        )
    return {f"kv_cache[{i}]": part for i, part in enumerate(kv_cache)}


def _checked_append(views: Mapping[str, ArrayView]) -> AppendIndexerArguments:
    """Check the views of one call, by name, against each other."""
    k, slots = views["k"], views["slot_mapping"]
    if k.dtype not in _FLOATS:
        raise TypeError(f"k: needs {' or '.join(_FLOATS)}, got {k.dtype}; convert it first")
    if len(k.shape) != 2 or k.shape[1] not in HEAD_DIMS:
        raise ValueError(
            f"k: needs shape (tokens, head_dim) with head_dim {one_of(HEAD_DIMS)}, got "
            f"{k.shape}; reshape it, or pad its rows and the cache's with zeros"
        )
    check_layout("k", k)
    head_dim = k.shape[1]
    for name, view in views.items():
        if name.startswith("kv_cache"):
            _check_written(name, view)
    if "kv_cache" in views:
        values, scales = fused_pages(views["kv_cache"], head_dim)
    else:
        values, scales = pair_of_pages(views["kv_cache[0]"], views["kv_cache[1]"], head_dim)
        check_layout("kv_cache[0]", values)
    check_integers("slot_mapping", slots, ("int32", "int64"), "(tokens,)", (k.shape[0],))
    return AppendIndexerArguments(k, values, scales, slots)


def _check_written(name: str, view: ArrayView) -> None:
    if view.read_only:
        raise ValueError(
            f"{name}: needs an array that can be written to, got a read-only one; pass the array "
            f"that owns the memory"
        )
    check_own_memory(name, view)


def _check_slots(slots: np.ndarray[Any, Any], arguments: AppendIndexerArguments) -> None:
    """Raise for the first slot behind the last page."""
    last = prod(arguments.scales.shape) - 1
    refuse_first("slot_mapping", slots, slots > last, f"a slot up to {last}, or below 0 to skip")


def _append_on_cpu(
    k: Any,
    caches: dict[str, Any],
    slot_mapping: Any,
    arguments: AppendIndexerArguments,
    power_of_two_scales: bool,
) -> None:
    slots = to_numpy("slot_mapping", slot_mapping)
    if check_mode():
        _check_slots(slots, arguments)
    parts = tuple(to_numpy(name, array) for name, array in caches.items())
    reference.append_indexer_cache(
        to_numpy("k", k),
        parts if len(parts) == 2 else parts[0],
        slots,
        power_of_two_scales=power_of_two_scales,
    )
