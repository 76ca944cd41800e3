# SPDX-License-Identifier: Apache-2.0
"""What the arguments of dense MLA attention must look like; all of it before anything is allocated.

A message names the argument, what was needed, what came and the way out. The checks look at shapes,
strides, dtypes and addresses; :func:`check_data`, the check mode, looks at values on the device.
"""

from __future__ import annotations

import logging
import os
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from cumla.core._dlpack import numpy_dtype
from cumla.launch.device import import_cupy
from cumla.launch.mla.shape import CACHES, HEAD_DIM, SWAPPED_ROWS, VALUE_DIM, VARIANTS
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_PARTS, piece_blocks
from cumla.mla.fp8_caches import (
    E4M3,
    FP8,
    PACKED_BYTES,
    SCALES,
    check_factor,
    is_packed,
    relabelled,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView, Call
    from cumla.launch.mla.shape import MLADecodeKey

__all__ = [
    "DTYPES",
    "Arguments",
    "Columns",
    "cache_of",
    "check_block_table",
    "check_data",
    "check_device_number",
    "check_dtype",
    "check_elements",
    "check_int32",
    "check_layout",
    "check_lengths_of_plan",
    "check_mode",
    "check_number",
    "check_output",
    "check_own_memory",
    "check_parts",
    "check_seqlens",
    "check_shape_numbers",
    "check_values",
    "check_variant",
    "check_workspace",
    "checked_arguments",
    "checked_cache_dtype",
    "checked_flag",
    "checked_kv_scale",
    "checked_max_blocks",
    "checked_query_and_cache",
    "checked_scale",
    "columns_of",
    "copy_to_host",
    "may_look",
    "named_parts",
    "other_cache",
    "with_kv_head_axis",
]

_log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16")  # of q and kv_cache
QUERY_AXES = ("batch", "q_len", "num_heads")  # of q, before its columns
# Last axis of each array of query and cache: 512 latent and 64 RoPE columns in one, or in a pair.
_COLUMNS = {
    f"{name}{part}": columns
    for name in ("q", "kv_cache")
    for part, columns in (("", HEAD_DIM), ("[0]", VALUE_DIM), ("[1]", HEAD_DIM - VALUE_DIM))
} | {"kv_cache[2]": SCALES}
_ALIGNMENT = 16  # bytes: of addresses and strides, what the copy engine moves
# Of the scores. Queries and keys of ordinary size, products up to some 1e30 and down to some 1e-17,
# times this and log2(e), stay finite and normal as float32; what is larger is not caught.
_SCALES = (1e-20, 1e6)


class Arguments(NamedTuple):
    """Checked views of one call: latent and RoPE columns apart, those of the cache with heads.

    The cache's columns are of the query's dtype, or of float8_e4m3fn: then the RoPE ones may be of
    the query's, kv_scales ``(num_pages, page_size, num_kv_heads, 4)`` may hold a factor for 128
    latent columns each, and kv_scale, or the number there, is the factor of all other e4m3 columns.
    """

    q: ArrayView
    q_rope: ArrayView
    kv_cache: ArrayView
    kv_rope: ArrayView
    block_table: ArrayView
    cache_seqlens: ArrayView | None  # None where a plan holds them
    out: ArrayView | None
    lse: ArrayView | None
    kv_scales: ArrayView | None = None
    kv_scale: ArrayView | float = 1.0


class Columns(NamedTuple):
    """Query and cache of :class:`Arguments`."""

    q: ArrayView
    q_rope: ArrayView
    kv_cache: ArrayView
    kv_rope: ArrayView
    kv_scales: ArrayView | None


_Views: TypeAlias = "Mapping[str, ArrayView | None]"


def checked_scale(softmax_scale: Any) -> float:
    """Return the factor of the scores as a float; 576 ** -0.5 for None."""
    if softmax_scale is None:
        return float(HEAD_DIM**-0.5)
    if not isinstance(softmax_scale, (float, Real)):  # a float alone is told without asking an ABC
        raise TypeError(
            f"softmax_scale: needs a Python or NumPy number, got "
            f"{type(softmax_scale).__qualname__}; an array on a GPU would have to be waited for, "
            f"so pass float(...) of it once"
        )
    scale = float(softmax_scale)
    low, high = _SCALES
    if not low <= scale <= high:
        raise ValueError(
            f"softmax_scale: needs a number from {low} to {high}, got {scale}; put any other "
            f"factor into q"
        )
    return scale


def checked_arguments(views: _Views, kv_scale: float | None = None) -> Arguments:
    """Check the views of one call, by name, against each other.

    Parameters
    ----------
    views : mapping
        ``q``, or ``q[0]`` and ``q[1]``; ``kv_cache``, or ``kv_cache[0]``, ``kv_cache[1]`` and maybe
        ``kv_cache[2]``; ``block_table``, ``cache_seqlens``; ``out`` and ``lse``, which may be None;
        ``kv_scale`` if it is an array.
    kv_scale : float, optional
        If it is a number.

    Returns
    -------
    Arguments
    """
    columns = checked_query_and_cache(views)
    for name, view in columns_of(views).items():
        check_layout(name, view)
    block_table, cache_seqlens = (
        cast("ArrayView", views[name]) for name in ("block_table", "cache_seqlens")
    )
    out, lse = views["out"], views["lse"]
    factor: ArrayView | float = 1.0
    if kv_scale is not None or "kv_scale" in views:
        factor = checked_kv_scale(columns, views, kv_scale)
    batch, q_len, num_heads, _ = columns.q.shape
    check_block_table(block_table, batch)
    check_seqlens(cache_seqlens, batch)
    if out is not None:
        dtypes = (columns.q.dtype, "float32")
        check_output("out", out, (batch, q_len, num_heads, VALUE_DIM), dtypes)
        check_layout("out", out)
    if lse is not None:
        check_output("lse", lse, (batch, num_heads, q_len), ("float32",))
        check_elements("lse", lse)
    scales = columns.kv_scales
    return Arguments(*columns[:4], block_table, cache_seqlens, out, lse, scales, factor)


def checked_kv_scale(columns: Columns, views: _Views, kv_scale: float | None) -> ArrayView | float:
    """Check the factor of e4m3 columns, and that some are under it.

    Parameters
    ----------
    columns : Columns
        Checked.
    views : mapping
        With ``kv_scale``, if it is an array; others are not looked at.
    kv_scale : float or None
        If it is a number.

    Returns
    -------
    ArrayView or float
    """
    scaled = columns.kv_scales is not None
    if cache_of(columns.kv_cache) == "same" or (scaled and columns.kv_rope.dtype != FP8):
        got = columns.kv_cache.dtype
        if scaled:
            got = f"scales for each row beside RoPE columns of {columns.kv_rope.dtype}"
        raise ValueError(
            f"kv_scale: needs a cache with e4m3 columns that have no scales of their own, got "
            f"{got}; leave it out"
        )
    if kv_scale is not None:
        return kv_scale
    view = cast("ArrayView", views["kv_scale"])
    check_factor("kv_scale", view)
    return view


def checked_query_and_cache(views: _Views, query_axes: tuple[str, ...] = QUERY_AXES) -> Columns:
    """Check query and cache, by name: all but how they lie in memory.

    Parameters
    ----------
    views : mapping
        As of :func:`checked_arguments`.
    query_axes : tuple of str
        Axes of the query before its columns; the last one is num_heads.

    Returns
    -------
    Columns
        Latent and RoPE columns of the query, ``(batch, q_len, num_heads, 512)`` and 64, and of the
        cache, ``(num_pages, page_size, num_kv_heads, 512)`` and 64: of one array, views of it.
    """
    given = columns_of(views)
    _check_query_and_cache(given, query_axes)
    query = _apart("q", given)
    whole, scales = given.get("kv_cache"), given.get("kv_cache[2]")
    if whole is not None and is_packed(whole):
        latent, rope, scales = unpacked(whole)
    else:
        latent, rope = _apart("kv_cache", given)
    _check_heads(query[0].shape[-2], latent.shape[2])
    if latent.dtype != query[0].dtype:
        latent, rope = relabelled(latent), relabelled(rope)
    return Columns(*query, latent, rope, scales)


def columns_of(views: _Views) -> dict[str, ArrayView]:
    """Pick query and cache, the latter with its head axis."""
    picked = {name: cast("ArrayView", view) for name, view in views.items() if name in _COLUMNS}
    return {
        name: view if name.startswith("q") else with_kv_head_axis(view)
        for name, view in picked.items()
    }


def _apart(name: str, given: dict[str, ArrayView]) -> tuple[ArrayView, ArrayView]:
    """Take latent and RoPE columns apart, unless they came so."""
    if name not in given:
        return given[f"{name}[0]"], given[f"{name}[1]"]
    view = given[name]
    lead = view.shape[:-1]
    rope = view.ptr + VALUE_DIM * view.strides[-1]
    return (
        view._replace(shape=(*lead, VALUE_DIM)),
        view._replace(shape=(*lead, HEAD_DIM - VALUE_DIM), ptr=rope),
    )


def named_parts(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Name an array, or the two that hold latent and RoPE columns, or these and scales."""
    if not isinstance(value, tuple):
        return ((name, value),)
    if len(value) != 2 and (len(value) != 3 or name == "q"):
        third = ", or these and the scales of an e4m3 cache" if name != "q" else ""
        raise ValueError(
            f"{name}: needs one array, or a tuple of latent and RoPE columns{third}, got "
            f"{len(value)} arrays; join them"
        )
    return tuple([(f"{name}[{i}]", part) for i, part in enumerate(value)])


def with_kv_head_axis(kv_cache: ArrayView) -> ArrayView:
    """Take (num_pages, page_size, 576) for a cache of one kv head."""
    if len(kv_cache.shape) != 3:
        return kv_cache
    pages, rows, columns = kv_cache.shape
    page_stride, row_stride, stride = kv_cache.strides
    return kv_cache._replace(
        shape=(pages, rows, 1, columns), strides=(page_stride, row_stride, row_stride, stride)
    )


def _check_query_and_cache(given: dict[str, ArrayView], query_axes: tuple[str, ...]) -> None:
    """Check ranks, dtypes and sizes; the cache with its head axis."""
    for name, view in given.items():
        if len(view.shape) != (len(query_axes) + 1 if name.startswith("q") else 4):
            raise ValueError(_rank_problem(name, view, query_axes))
    _check_dtypes(given)
    for name, view in given.items():
        if view.shape[-1] != _COLUMNS[name] and not (name == "kv_cache" and is_packed(view)):
            raise ValueError(_columns_problem(name, view))
        if 0 in view.shape:
            raise ValueError(
                f"{name}: needs at least one element on every axis, got shape {view.shape}; skip "
                f"the call where there is nothing to attend"
            )
    for first, other in (
        ("q[0]", "q[1]"),
        ("kv_cache[0]", "kv_cache[1]"),
        ("kv_cache[0]", "kv_cache[2]"),
    ):
        if other in given and given[first].shape[:-1] != given[other].shape[:-1]:
            raise ValueError(
                f"{other}: needs the first axes of {first}, {given[first].shape[:-1]}, got "
                f"{given[other].shape[:-1]}; pass both parts of the same rows"
            )


def _check_dtypes(given: dict[str, ArrayView]) -> None:
    """Check that all is of the query's dtype, but for what is FP8 in a cache."""
    (first, query), *others = given.items()
    check_dtype(first, query.dtype)
    if {view.dtype for _, view in others} == {query.dtype} and "kv_cache[2]" not in given:
        return
    cache, cached = next((name, view) for name, view in others if name.startswith("kv_cache"))
    allowed: dict[str, tuple[str, ...]] = {name: (query.dtype,) for name, _ in others}
    if cached.dtype in E4M3:
        if query.dtype != DTYPES[0]:
            raise TypeError(
                f"{first}: needs {DTYPES[0]} with {cache} of {cached.dtype}, got {query.dtype}; "
                f"convert it first"
            )
        allowed |= {
            cache: E4M3,
            "kv_cache[1]": (query.dtype, cached.dtype),
            "kv_cache[2]": ("float32",),
        }
    elif "kv_cache[2]" in given:
        raise TypeError(
            f"kv_cache[2]: needs kv_cache[0] of {' or '.join(E4M3)}, got {cached.dtype}; leave it "
            f"out"
        )
    for name, view in others:
        if view.dtype in allowed[name]:
            continue
        if allowed[name] == (query.dtype,):
            raise TypeError(
                f"{name}: needs {first}'s dtype {query.dtype}, got {view.dtype}; convert one of "
                f"them"
            )
        raise TypeError(
            f"{name}: needs {' or '.join(allowed[name])}, got {view.dtype}; convert it first"
        )


def _rank_problem(name: str, view: ArrayView, query_axes: tuple[str, ...]) -> str:
    columns = _COLUMNS[name]
    if name.startswith("q"):
        hint = ", with q_len 1 where each request has one query" if "q_len" in query_axes else ""
        return (
            f"{name}: needs {len(query_axes) + 1} axes ({', '.join(query_axes)}, {columns}), got "
            f"shape {view.shape}; reshape it{hint}"
        )
    return (
        f"{name}: needs axes (num_pages, page_size, num_kv_heads, {columns}), or the same without "
        f"num_kv_heads, got shape {view.shape}; reshape it"
    )


def _columns_problem(name: str, view: ArrayView) -> str:
    latent, rope = VALUE_DIM, HEAD_DIM - VALUE_DIM
    if name == "kv_cache[2]":
        return (
            f"{name}: needs a last axis of {SCALES}, a scale for 128 latent columns each, got "
            f"shape {view.shape}; pass one for each row and 128 columns"
        )
    if name == "kv_cache" and view.dtype == "uint8":
        return (
            f"{name}: needs a last axis of {HEAD_DIM} e4m3 numbers ({latent} latent + {rope} RoPE),"
            f" or of the {PACKED_BYTES} bytes of a packed row, got shape {view.shape}; pass a tuple"
            f" of the parts where they lie apart"
        )
    if name in ("q", "kv_cache"):
        return (
            f"{name}: needs a last axis of {HEAD_DIM} ({latent} latent + {rope} RoPE), got shape "
            f"{view.shape}; pass a tuple of both where they lie apart, the latent one first"
        )
    return (
        f"{name}: needs a last axis of {_COLUMNS[name]}, got shape {view.shape}; a pair holds "
        f"{latent} latent columns, then {rope} RoPE ones"
    )


def check_dtype(name: str, dtype: str) -> None:
    """Check that queries and caches of this dtype are supported."""
    if dtype not in DTYPES:
        raise TypeError(f"{name}: needs {' or '.join(DTYPES)}, got {dtype}; convert it first")


def check_seqlens(view: ArrayView, batch: int) -> None:
    """Check the lengths' array."""
    check_int32("cache_seqlens", view, "(batch,)", (batch,))


def check_shape_numbers(
    numbers: Mapping[str, int], num_heads: int, num_kv_heads: int, page_size: int, dtype: str
) -> None:
    """Check a shape that was given in numbers, to make a plan for it; `numbers` by their names."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, value in (*numbers.items(), *heads.items()):
        check_number(name, value, "nothing to plan for")
    _check_heads(num_heads, num_kv_heads)
    check_number("page_size", page_size, "allocate the cache in pages of one token at least")
    check_dtype("dtype", dtype)


def check_number(name: str, value: object, else_: str) -> None:
    """Check an int from 1; `else_` ends the message for one that is smaller."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: needs an int, got {type(value).__qualname__}; convert it")
    if value < 1:
        raise ValueError(f"{name}: needs a number from 1, got {value}; {else_}")


def checked_flag(name: str, value: object) -> bool:
    """Return an option that is on or off as a bool; what is merely true or false is refused."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):  # such as an element of an array, or what a comparison gave
        return bool(value)
    raise TypeError(
        f"{name}: needs True or False, got {type(value).__qualname__}; pass one of the two, such "
        f"as bool(...) of a number"
    )


def checked_max_blocks(batch_invariant: bool, max_seqlen: Any) -> int:
    """Return the most KV blocks of a request of a plan; 0 where nothing depends on them."""
    if not batch_invariant:
        if max_seqlen is not None:
            raise ValueError(
                f"max_seqlen: needs batch_invariant=True, got {max_seqlen} for a plan that serves "
                f"any length; leave it out"
            )
        return 0
    if max_seqlen is None:
        raise ValueError(
            "max_seqlen: needs the length of the longest request that a batch_invariant plan is to "
            "serve, got None; pass it, it sizes the plan's buffer"
        )
    if isinstance(max_seqlen, np.integer):  # such as the maximum of lengths
        max_seqlen = int(max_seqlen)
    check_number("max_seqlen", max_seqlen, "nothing to plan for")
    return -(-int(max_seqlen) // BLOCK_TOKENS)


def cache_of(kv_cache: ArrayView) -> str:
    """Tell which of CACHES a cache is, by its latent columns as their checks have left them."""
    return "e4m3" if kv_cache.dtype == FP8 else "same"


def checked_cache_dtype(cache_dtype: object, dtype: str) -> str:
    """Check what a plan's caches are to hold; tell which of CACHES that is."""
    if cache_dtype is None or cache_dtype == dtype:
        return "same"
    if cache_dtype != FP8:
        raise TypeError(
            f"cache_dtype: needs dtype's {dtype}, or {FP8}, got {cache_dtype}; leave it out for "
            f"caches of dtype"
        )
    if dtype != DTYPES[0]:
        raise TypeError(
            f"dtype: needs {DTYPES[0]} with cache_dtype {FP8}, got {dtype}; convert the queries"
        )
    return "e4m3"


def other_cache(arguments: Arguments) -> ValueError:
    """Say that a plan is not for the cache that came."""
    got = arguments.kv_cache.dtype
    made = arguments.q.dtype if got == FP8 else FP8
    return ValueError(
        f"plan: made for a cache of {made}, got one of {got}; make a plan with the cache_dtype of "
        f"each"
    )


def check_variant(
    variant: object, num_heads: int, q_len: int, num_kv_heads: int, cache: str = CACHES[0]
) -> None:
    """Check the kernel that a plan is pinned to, or None."""
    if variant is None:
        return
    if not isinstance(variant, str):
        raise TypeError(
            f"variant: needs a string or None, got {type(variant).__qualname__}; leave it out"
        )
    if variant not in VARIANTS:
        names = ", ".join(repr(name) for name in VARIANTS)
        raise ValueError(f"variant: needs one of {names} or None, got {variant!r}; leave it out")
    if cache != CACHES[0]:
        raise ValueError(
            f"variant: needs a cache of 16-bit numbers, got {variant!r} for one of {FP8}, which "
            f"has kernels of its own; leave it out"
        )
    rows = q_len * num_heads // num_kv_heads
    if variant == "swapped" and rows > SWAPPED_ROWS:
        raise ValueError(
            f"variant: 'swapped' needs at most {SWAPPED_ROWS} query rows of a kv head, got {rows}; "
            f"leave it out"
        )


def check_parts(key: MLADecodeKey) -> None:
    """Check that a grid of thread blocks holds all parts of a batch-invariant shape."""
    if key.batch_invariant and key.parts > MOST_PARTS:
        raise ValueError(
            f"batch_invariant: needs at most {MOST_PARTS} pieces of requests, got {key.parts}: "
            f"{key.batch} requests of up to {key.max_blocks * BLOCK_TOKENS} tokens, cut every "
            f"{piece_blocks(key.row_groups) * BLOCK_TOKENS}; lower a plan's max_seqlen, pass fewer "
            f"columns of block_table, or fewer requests at once"
        )


def check_device_number(device: object) -> None:
    """Check a CUDA ordinal, or None."""
    if device is not None and (not isinstance(device, int) or isinstance(device, bool)):
        raise TypeError(
            f"device: needs a CUDA ordinal, which is an int, or None, got "
            f"{type(device).__module__}.{type(device).__qualname__}; pass its number"
        )


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


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads: needs a multiple of num_kv_heads, got {num_heads} query heads and "
            f"{num_kv_heads} kv heads; pad the query heads"
        )


def check_layout(name: str, view: ArrayView) -> None:
    """Last axis contiguous; the address and every other stride a multiple of 16 bytes.

    An empty array lies nowhere, and NumPy reports strides of 0.
    """
    if 0 in view.shape:
        return
    itemsize = numpy_dtype(view.dtype).itemsize
    if view.strides[-1] != itemsize:
        raise ValueError(
            f"{name}: needs a contiguous last axis, got a stride of {view.strides[-1]} bytes for "
            f"{itemsize}-byte elements; make a contiguous copy"
        )
    if view.ptr % _ALIGNMENT:
        raise ValueError(
            f"{name}: needs an address that is a multiple of {_ALIGNMENT} bytes, got "
            f"{view.ptr:#x}; copy the array, or slice it at such a multiple"
        )
    for axis, (size, stride) in enumerate(zip(view.shape[:-1], view.strides, strict=False)):
        if size > 1 and (stride % _ALIGNMENT or stride < 0):
            raise ValueError(
                f"{name}: needs strides that are multiples of {_ALIGNMENT} bytes and not negative, "
                f"got {stride} on axis {axis}; pad the rows, or make a contiguous copy"
            )


def check_elements(name: str, view: ArrayView) -> None:
    """Four-byte elements that lie at multiples of four bytes."""
    if view.ptr % 4 or any(stride % 4 for stride in view.strides):
        raise ValueError(
            f"{name}: needs an address and strides that are multiples of 4 bytes, got address "
            f"{view.ptr:#x} and strides {view.strides}; copy it"
        )


def check_int32(name: str, view: ArrayView, axes: str, shape: tuple[int | None, ...]) -> None:
    """Check a table with a row for each request; None in its shape fits any size."""
    if view.dtype != "int32":
        raise TypeError(f"{name}: needs int32, got {view.dtype}; convert it first")
    fits = len(view.shape) == len(shape) and all(
        wanted in (None, got) for wanted, got in zip(shape, view.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: needs shape {axes} with batch {shape[0]}, got {view.shape}; give each "
            f"request of the batch its entry"
        )
    check_elements(name, view)


def check_block_table(view: ArrayView, batch: int) -> None:
    """Check the page numbers of each request."""
    check_int32("block_table", view, "(batch, max_pages)", (batch, None))
    if view.shape[1] > 1 and view.strides[1] != 4:
        raise ValueError(
            f"block_table: needs contiguous rows, got a stride of {view.strides[1]} bytes on the "
            f"last axis; make a contiguous copy"
        )


def check_output(
    name: str, view: ArrayView, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    """One of the dtypes, the shape, and memory for each element."""
    if view.dtype not in dtypes:
        raise TypeError(
            f"{name}: needs {' or '.join(dtypes)}, got {view.dtype}; allocate it so or leave it out"
        )
    if view.shape != shape:
        raise ValueError(
            f"{name}: needs shape {shape}, got {view.shape}; allocate it so or leave it out"
        )
    check_own_memory(name, view)


def check_own_memory(name: str, view: ArrayView) -> None:
    """Memory that is written to: no two elements in one place."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.strides, strict=True)):
        raise ValueError(
            f"{name}: needs memory of its own for each element, got a broadcast array with strides "
            f"{view.strides}; copy it"
        )


# Check mode: CUMLA_CHECK=1 looks at what the kernels take on trust.


def check_mode() -> bool:
    """Tell whether CUMLA_CHECK asks for :func:`check_data`."""
    return os.environ.get("CUMLA_CHECK", "") not in ("", "0")


def may_look(call: Call) -> bool:
    """Tell whether CUMLA_CHECK asks for a look at the device, and the stream allows it."""
    if check_mode() and call.capturing:
        _log.warning("CUMLA_CHECK: nothing can be checked while the stream is being captured")
        return False
    return check_mode()


def check_data(call: Call, arguments: Arguments, planned: int | None = None) -> None:
    """Copy lengths and page numbers to the host and name the first that is out of range.

    Does nothing unless the environment variable CUMLA_CHECK asks for it: it waits for the stream.

    Parameters
    ----------
    call : Call
        On the GPU.
    arguments : Arguments
        Of the call.
    planned : int, optional
        Address of the requests and lengths that the call's plan was updated with (layout.places);
        they are compared.
    """
    if not may_look(call):
        return
    assert arguments.cache_seqlens is not None
    lengths = copy_to_host(arguments.cache_seqlens, call.stream)
    table = copy_to_host(arguments.block_table, call.stream)
    check_values(lengths, table, *arguments.kv_cache.shape[:2])
    if planned is not None:
        view = arguments.cache_seqlens._replace(
            ptr=planned, shape=(len(lengths), 2), strides=(8, 4)
        )
        places = copy_to_host(view, call.stream)
        in_order = np.full_like(lengths, -1)  # a plan that was never updated holds anything
        known = (places[:, 0] >= 0) & (places[:, 0] < len(lengths))
        in_order[places[known, 0]] = places[known, 1]
        check_lengths_of_plan(lengths, in_order)


def check_values(
    lengths: np.ndarray[Any, Any], table: np.ndarray[Any, Any], num_pages: int, page_size: int
) -> None:
    """Raise for the first length or used page number that is out of range."""
    longest = table.shape[1] * page_size
    wrong = np.flatnonzero((lengths < 0) | (lengths > longest))
    if wrong.size:
        i = wrong[0]
        raise ValueError(
            f"cache_seqlens[{i}]: needs a length from 0 to max_pages * page_size = {longest}, got "
            f"{lengths[i]}; the kernels would clamp it"
        )
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= num_pages)))
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"block_table[{i}, {j}]: needs a page number from 0 to {num_pages - 1}, got "
            f"{table[i, j]}; the kernels would read zeros for that page"
        )


def check_lengths_of_plan(lengths: np.ndarray[Any, Any], planned: np.ndarray[Any, Any]) -> None:
    """Raise for the first length that is not the one a plan was updated with."""
    changed = np.flatnonzero(lengths != planned)
    if changed.size:
        i = changed[0]
        raise ValueError(
            f"cache_seqlens[{i}]: needs the length that the plan was updated with, {planned[i]}, "
            f"got {lengths[i]}; call plan.update(cache_seqlens) after each change of the lengths, "
            f"and give a batch_invariant plan the max_seqlen that they need"
        )


def copy_to_host(view: ArrayView, stream: int) -> np.ndarray[Any, Any]:
    """Copy an array of integers from the GPU, in the order of the stream, and wait for it."""
    dtype = np.dtype(view.dtype)
    runtime = import_cupy().cuda.runtime
    reaches = [(n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)]
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    first = sum(reach for reach in reaches if reach < 0)
    span = np.empty(sum(abs(reach) for reach in reaches) + dtype.itemsize, np.uint8)
    runtime.memcpyAsync(
        span.ctypes.data, view.ptr + first, span.nbytes, runtime.memcpyDeviceToHost, stream
    )
    runtime.streamSynchronize(stream)
    return np.ndarray(view.shape, dtype, span, offset=-first, strides=view.strides)
