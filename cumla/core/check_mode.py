# SPDX-License-Identifier: Apache-2.0
"""Flags of the environment; the check mode, a look at the values that kernels take on trust.

A flag may be set and unset while the process runs, so each call looks again. `os.environ.get` takes
1 us for it; the mapping behind it, by the encoded name, 50 ns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.core._cupy import import_cupy
from cumla.errors import CumlaError

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView, Call

__all__ = [
    "check_mode",
    "copy_to_host",
    "environment_flag",
    "may_look",
    "page_lists",
    "refuse_first",
    "refuse_pages",
]

_log = logging.getLogger(__name__)

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}
_CHECK = "CUMLA_CHECK"
_ENCODED = os.environ.encodekey(_CHECK)


def check_mode() -> bool:
    """Tell whether ``CUMLA_CHECK`` asks for checks that look at values and wait for the GPU.

    Raises
    ------
    CumlaError
        As `environment_flag`.
    """
    try:
        if _ENCODED not in os.environ._data:  # type: ignore[attr-defined]
            return False
    except AttributeError:  # somebody has put another mapping there
        pass
    return environment_flag(_CHECK)


def environment_flag(name: str) -> bool:
    """Read a flag from the environment: off where it is not set, or empty.

    Parameters
    ----------
    name : str
        Name of the variable.

    Raises
    ------
    CumlaError
        If it is none of 0, 1, true, false, yes, no, on and off, in any case.
    """
    value = os.environ.get(name, "")
    flag = _FLAGS.get(value.strip().lower())
    if flag is None:
        raise CumlaError(
            f"{name}: needs 1, true, yes or on, or 0, false, no or off, got {value!r}; unset the "
            f"environment variable where it is not meant"
        )
    return flag


def may_look(call: Call) -> bool:
    """Tell whether the stream of a call in check mode allows a look at the device."""
    if call.capturing:
        _log.warning("CUMLA_CHECK: nothing can be checked while the stream is being captured")
        return False
    return True


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


def refuse_first(
    name: str,
    values: np.ndarray[Any, Any],
    wrong: np.ndarray[Any, Any],
    need: str,
    effect: str = "its rows would be skipped",
) -> None:
    """Raise for the first value that is wrong."""
    places = np.argwhere(wrong)
    if places.size:
        place = tuple(places[0].tolist())
        index = ", ".join(map(str, place))
        raise ValueError(f"{name}[{index}]: needs {need}, got {values[place]}; {effect}")


def page_lists(
    host: Mapping[str, np.ndarray[Any, Any]],
) -> tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Give the name of the page numbers, these, and where those of each request begin and end."""
    if "block_table" in host:
        pages = host["block_table"]
        begin = np.zeros(len(pages), np.int64)
        return "block_table", pages, begin, begin + pages.shape[1]
    pages, bounds = host["kv_indices"], host["kv_indptr"]
    wrong = (bounds < 0) | (bounds > len(pages))
    refuse_first("kv_indptr", bounds, wrong, f"a number from 0 to {len(pages)}, the entries")
    return "kv_indices", pages, bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)


def refuse_pages(
    host: Mapping[str, np.ndarray[Any, Any]],
    requests: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    num_pages: int,
    page_size: int,
) -> None:
    """Raise for the first new row whose request, position or page number is out of range."""
    name, pages, begin, end = page_lists(host)
    last = len(begin) - 1
    refuse_first(
        "batch_indices", requests, requests > last, f"a request up to {last}, or below 0 to skip"
    )
    used = np.flatnonzero((requests >= 0) & (positions >= 0))
    request, column = requests[used], positions[used] // page_size
    outside = np.zeros(len(positions), bool)
    outside[used] = column >= (end - begin)[request]
    refuse_first("positions", positions, outside, "a position in the pages of its request")
    entry = begin[request] + column
    read = np.zeros(pages.shape, bool)
    read[(request, entry) if pages.ndim == 2 else entry] = True
    wrong = read & ((pages < 0) | (pages >= num_pages))
    refuse_first(name, pages, wrong, f"a page number from 0 to {num_pages - 1}")
