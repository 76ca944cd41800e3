# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that looking after arrays and streams takes.

They go through ctypes, because each call of an operation pays for them: about 0.4 us a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from cumla.errors import CumlaError, UnsupportedDeviceError

_log = logging.getLogger(__name__)

_CUDA_ERROR_NOT_READY = 600
_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
_CU_EVENT_DISABLE_TIMING = 2
_CU_STREAM_CAPTURE_MODE_RELAXED = 2


def _declare(function: Any, *types: Any) -> Any:
    function.argtypes = types
    return function


class Driver:
    """Driver calls on plain integers; a failure raises `CumlaError` with the driver's name of it.

    `PyDLL` keeps the GIL: most of these calls never wait, and giving it up would cost a thread
    switch whenever another Python thread is busy. To record an event and to wait for one go into
    the stream's queue, and a full queue makes the host wait until the GPU gets on; if that waits
    for a host function written in Python, the process hangs unless the GIL is given up (`CDLL`).

    `UnsupportedDeviceError` if there is no driver, or it finds no GPU.
    """

    def __init__(self) -> None:
        try:
            cuda = ctypes.PyDLL("libcuda.so.1")
            waiting = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedDeviceError(
                f"arrays on the GPU need NVIDIA's driver, which cannot be loaded ({error}); arrays "
                f"in CPU memory need none"
            ) from error
        handle = pointer = ctypes.c_void_p
        self._get_device = _declare(cuda.cuCtxGetDevice, pointer)
        self._retain_context = _declare(cuda.cuDevicePrimaryCtxRetain, pointer, ctypes.c_int)
        self._push = _declare(cuda.cuCtxPushCurrent_v2, handle)
        self._pop = _declare(cuda.cuCtxPopCurrent_v2, pointer)
        self._is_capturing = _declare(cuda.cuStreamIsCapturing, handle, pointer)
        info = (handle, pointer, pointer, pointer, pointer, pointer)
        self._capture_info = _declare(cuda.cuStreamGetCaptureInfo_v2, *info)
        self._exchange_mode = _declare(cuda.cuThreadExchangeStreamCaptureMode, pointer)
        self._event_create = _declare(cuda.cuEventCreate, pointer, ctypes.c_uint)
        self._event_record = _declare(waiting.cuEventRecord, handle, handle)
        self._event_query = _declare(cuda.cuEventQuery, handle)
        self._wait_event = _declare(waiting.cuStreamWaitEvent, handle, handle, ctypes.c_uint)
        self._event_destroy = _declare(cuda.cuEventDestroy_v2, handle)
        self._error_name = _declare(cuda.cuGetErrorName, ctypes.c_int, pointer)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._check(cuda.cuInit(0), "cuInit", UnsupportedDeviceError)

    def _check(self, status: int, what: str, error: type[CumlaError] = CumlaError) -> None:
        if status:
            raise error(f"{what} failed: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._error_name(status, ctypes.byref(name))
        return f"{name.value.decode() if name.value else 'unknown error'} ({status})"

    def enter_device(self, device: int) -> bool:
        """Make a context of `device` current; whether one was pushed, to be popped later.

        A thread that has not used CUDA yet has no current context at all, and a context that is
        current on the right device may be a green one: both are why this asks the driver.
        """
        current = ctypes.c_int(-1)
        if self._get_device(ctypes.byref(current)) == 0 and current.value == device:
            return False
        self.enter_primary(device)
        return True

    def enter_primary(self, device: int) -> None:
        """Make the primary context of `device` current, to be popped later: kernels live in it."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            status = self._retain_context(ctypes.byref(context), device)
            what = f"cuDevicePrimaryCtxRetain of device {device}"
            self._check(status, what, UnsupportedDeviceError)
            self._contexts[device] = context  # for the life of the process
        self._check(self._push(context), "cuCtxPushCurrent")

    def leave_device(self) -> None:
        """Pop what `enter_device` or `enter_primary` pushed."""
        self._check(self._pop(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")

    def current_device(self) -> int:
        """Ordinal of the device whose context is current."""
        device = ctypes.c_int()
        self._check(self._get_device(ctypes.byref(device)), "cuCtxGetDevice")
        return device.value

    def is_capturing(self, stream: int) -> bool:
        """Return whether `stream` is being captured into a graph."""
        status = ctypes.c_int()
        result = self._is_capturing(stream, ctypes.byref(status))
        if result == _CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True  # the legacy stream, while a stream that synchronises with it captures
        self._check(result, "cuStreamIsCapturing")
        return status.value != 0

    def capture_number(self, stream: int) -> int | None:
        """Return the number of the capture that `stream` is part of, or None."""
        if not self.is_capturing(stream):
            return None
        status, number = ctypes.c_int(), ctypes.c_uint64()
        places = (ctypes.byref(status), ctypes.byref(number))
        result = self._capture_info(stream, *places, None, None, None)
        self._check(result, "cuStreamGetCaptureInfo")
        return number.value

    def record_event(self, stream: int, again: int = 0) -> int:
        """Record a new event, or one `again`, on `stream`, whose device is current."""
        if again:
            self._check(self._event_record(again, stream), "cuEventRecord")
            return again
        event = ctypes.c_void_p()
        status = self._event_create(ctypes.byref(event), _CU_EVENT_DISABLE_TIMING)
        self._check(status, "cuEventCreate")
        status = self._event_record(event, stream)
        if status:
            self._event_destroy(event)
        self._check(status, "cuEventRecord")
        return event.value or 0

    def wait_event(self, stream: int, event: int) -> None:
        """Make `stream` wait for the event; the host does not."""
        self._check(self._wait_event(stream, event, 0), "cuStreamWaitEvent")

    def event_passed(self, event: int) -> bool:
        """Return whether all work before the event is done; never waits.

        An event that fails will never be anything else: it counts as passed.
        """
        status = self._event_query(event)
        if status not in (0, _CUDA_ERROR_NOT_READY):
            reason = self._describe(status)
            _log.warning("cuEventQuery failed: %s; what was kept until then is released", reason)
        return bool(status != _CUDA_ERROR_NOT_READY)

    def destroy_event(self, event: int) -> None:
        """Give the event back."""
        self._event_destroy(event)

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread query events: under a global-mode capture a query would break it."""
        mode = ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED)
        self._exchange_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))


@functools.cache
def driver() -> Driver:
    """Load the driver once, when the first array on a GPU comes.

    `UnsupportedDeviceError` as `Driver`, and in a process that was forked from one that had it.
    """
    if forked():
        raise UnsupportedDeviceError(
            "arrays on the GPU cannot be used here: this process was forked from one that used "
            "the GPU, and CUDA does not survive a fork; start it with multiprocessing's 'spawn' "
            "method, or fork before the GPU is first used; arrays in CPU memory are served"
        )
    return Driver()


def forked() -> bool:
    """Return whether this process is the fork of one that had loaded the driver."""
    return _forked


_forked = False


def _forget_driver() -> None:
    global _forked
    _forked = _forked or driver.cache_info().currsize > 0
    driver.cache_clear()


os.register_at_fork(after_in_child=_forget_driver)


@contextlib.contextmanager
def on_device(cuda: Driver, device: int | None) -> Iterator[None]:
    """Make a context of `device` current for a while; None leaves what is current."""
    must_leave = device is not None and cuda.enter_device(device)
    try:
        yield
    finally:
        if must_leave:
            cuda.leave_device()


@contextlib.contextmanager
def in_primary_context(cuda: Driver, device: int) -> Iterator[None]:
    """Make the primary context of `device` current for a while, whatever context was before.

    `cudaSetDevice`, which CuPy calls, replaces the context at the top of the thread's stack: that
    is this one then, and the caller's, a green one maybe, is current again afterwards.
    """
    cuda.enter_primary(device)
    try:
        yield
    finally:
        cuda.leave_device()
