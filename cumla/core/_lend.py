# SPDX-License-Identifier: Apache-2.0
"""Results that JAX gets: their memory is reused only when JAX's readers are done.

XLA drops a buffer as soon as the last computation that reads it is enqueued on its compute stream.
For memory of its own that is enough: whatever gets it next is enqueued there, too. Our memory goes
back to CuPy's pool, and the next call could overwrite it from another stream while it is read.

So what JAX drops is put aside. The next call on JAX arrays enqueues a fence, a computation on one
number, which XLA runs behind all that it had enqueued before; later calls ask whether it is done,
and only then is the memory free. Dropped memory stays where it is if no such call comes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import time
from collections import deque
from typing import Any

import numpy as np

from cumla.core._dlpack import DTYPES, ArrayView, DLTensor, ManagedTensor, capsule_is_valid
from cumla.core._lifetime import keep_until, order_streams

_log = logging.getLogger(__name__)

_CUDA = 2  # DLDeviceType
_CODES = {name: code for code, name in DTYPES.items()}
_NAME = b"dltensor"  # a capsule keeps a pointer to it
_LAST_CALLS = 0.02  # seconds at the end of the process for calls of XLA that have begun
_FENCES = -1  # names the queue of fences; those of CUDA streams are named by their handles

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Borrower:
    """JAX on one device: what it has dropped, and the fence behind its computations."""

    def __init__(self, device: int) -> None:
        self.dropped: deque[object] = deque()
        self._device = device
        self._jax: Any = None
        self._fence: Any = None
        self._number: Any = None

    def prepare_fence(self, jax: Any, jax_device: Any) -> None:
        """Compile the fence, once. Whatever the caller has told JAX, it runs at once, and there."""
        if self._fence is not None:
            return
        self._jax = jax
        allow = jax.transfer_guard("allow")
        with jax.ensure_compile_time_eval(), jax.disable_jit(False), allow:
            self._number = jax.device_put(np.int32(0), jax_device)
            self._fence = jax.jit(lambda number: number + 1).lower(self._number).compile()

    def fence_dropped(self) -> None:
        """Enqueue a fence behind the readers of all that was dropped, and keep it until then."""
        if not self.dropped or self._fence is None:
            return
        batch: list[object] = []
        try:
            with contextlib.suppress(IndexError):  # other threads do the same
                while True:
                    batch.append(self.dropped.popleft())
            with self._jax.disable_jit(False):
                fence = self._fence(self._number)
            keep_until(lambda: _is_done(fence), batch, self._device, _FENCES)
        except BaseException:
            self.dropped.extend(batch)
            raise


def _is_done(fence: Any) -> bool:
    try:
        return bool(fence.is_ready())
    except RuntimeError as error:  # JAX's backend is gone, and all its computations with it
        # The text alone: a record with the error would hold on to what is about to be freed.
        reason = str(error)
        _log.warning("JAX cannot tell whether its readers are done (%s); taken as done", reason)
        return True


_borrowers: dict[int, Borrower] = {}
# By the address of the tensor that JAX got: the tensor, what it points to, and who has it.
_lent: dict[int, tuple[ManagedTensor, object, object, Borrower]] = {}


def borrower(device: int) -> Borrower:
    """JAX on the CUDA device of that ordinal."""
    return _borrowers.get(device) or _borrowers.setdefault(device, Borrower(device))


def _put_aside(address: int) -> None:
    """Take back what JAX drops; XLA calls this in any of its threads."""
    lent = _lent.pop(address)
    lent[3].dropped.append(lent)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_put_aside)  # takes the GIL


class Exporter:
    """A contiguous array on the GPU as the DLPack protocol wants it, for one consumer.

    `array` owns the memory, and `stream` is the handle of the stream that writes to it.
    """

    def __init__(self, array: object, view: ArrayView, stream: int) -> None:
        assert view.device is not None
        self._array = array
        self._view = view
        self.device = view.device
        self._stream = stream
        self._address = 0
        self._capsule: object = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.device)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        if stream != -1:  # which asks for no order
            order_streams(self._stream, stream or 0, self.device)
        view = self._view
        shape = (ctypes.c_int64 * len(view.shape))(*view.shape)
        code, bits = _CODES[view.dtype]
        tensor = DLTensor(view.ptr, _CUDA, self.device, len(shape), code, bits, 1, shape)
        deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        managed = ManagedTensor(tensor=tensor, deleter=deleter)
        self._address = ctypes.addressof(managed)
        _lent[self._address] = (managed, shape, self._array, borrower(self.device))
        self._capsule = _new_capsule(self._address, _NAME, None)
        return self._capsule

    def close(self) -> None:
        """Forget a capsule that the consumer did not take."""
        if self._capsule is not None and capsule_is_valid(self._capsule, _NAME):
            del _lent[self._address]
        self._capsule = None


def lend(jax: Any, array: object, view: ArrayView, stream: int) -> Any:
    """Make a JAX array of a contiguous one on the GPU; JAX's readers wait for `stream`.

    `array` owns the memory. It is let go of when JAX has dropped it and its readers are done.
    """
    exporter = Exporter(array, view, stream)
    try:
        result = jax.dlpack.from_dlpack(exporter)
    finally:
        exporter.close()
    (jax_device,) = result.devices()
    borrower(exporter.device).prepare_fence(jax, jax_device)
    return result


@atexit.register
def _leave_it_to_the_process() -> None:
    """Have nothing of Python called when JAX drops memory after the interpreter is gone."""
    nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
    for managed, *_ in list(_lent.values()):
        managed.deleter = nothing
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_lent))  # it still points to these tensors
    # A thread of XLA may be on its way into `_put_aside` already. Python ends threads that ask for
    # the GIL when the interpreter is gone, and in the middle of C++ that aborts the process: so it
    # gets the GIL now.
    if _borrowers:
        time.sleep(_LAST_CALLS)
