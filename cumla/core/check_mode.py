# SPDX-License-Identifier: Apache-2.0
"""The check mode, ``CUMLA_CHECK=1``: a look at the values that kernels take on trust."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.core._cupy import import_cupy

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView, Call

__all__ = ["check_mode", "copy_to_host", "may_look", "refuse_first"]

_log = logging.getLogger(__name__)


def check_mode() -> bool:
    """Tell whether CUMLA_CHECK asks for a look at values."""
    return os.environ.get("CUMLA_CHECK", "") not in ("", "0")


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
    name: str, values: np.ndarray[Any, Any], wrong: np.ndarray[Any, Any], need: str
) -> None:
    """Raise for the first value that is wrong."""
    places = np.argwhere(wrong)
    if places.size:
        place = tuple(places[0].tolist())
        index = ", ".join(map(str, place))
        raise ValueError(
            f"{name}[{index}]: needs {need}, got {values[place]}; its rows would be skipped"
        )
