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
from cumla.core.arguments import FACTORS, number_of
from cumla.errors import CumlaError

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView, Call

_log = logging.getLogger(__name__)

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}
_CHECK = "CUMLA_CHECK"
_ENCODED = os.environ.encodekey(_CHECK)


def check_mode() -> bool:
    """Return whether ``CUMLA_CHECK`` asks for checks that look at values and wait for the GPU.

    Errors are those of `environment_flag`.
    """
    try:
        if _ENCODED not in os.environ._data:  # type: ignore[attr-defined]
            return False
    except AttributeError:  # somebody has put another mapping there
        pass
    return environment_flag(_CHECK)


def environment_flag(name: str) -> bool:
    """Read a flag from the environment: off where it is not set, or empty.

    `CumlaError` if it is none of 0, 1, true, false, yes, no, on and off, in any case.
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
    """Return whether the stream of a call in check mode allows a look at the device."""
    if call.capturing:
        _log.warning("CUMLA_CHECK: nothing can be checked while the stream is being captured")
        return False
    return True


def check_factors(host: Mapping[str, np.ndarray[Any, Any]], axes: int = 2) -> None:
    """Refuse factors in arrays as numbers are; a request's where `kv_lens` gives it tokens.

    Factors of more than so many axes may be anything where none is read.
    """
    for name in FACTORS:
        factors = host.get(name, np.empty(0))
        for place, factor in np.ndenumerate(factors if factors.ndim <= axes else np.empty(0)):
            is_of_request = name != "kv_scale" and len(place) == 2
            if not is_of_request or ("kv_lens" in host and host["kv_lens"][place[0]] > 0):
                number_of(f"{name}[{', '.join(map(str, place))}]" if place else name, factor)


def copy_to_host(view: ArrayView, stream: int) -> np.ndarray[Any, Any]:
    """Copy an array from the GPU, in the order of the stream, and wait for it."""
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
