# SPDX-License-Identifier: Apache-2.0
"""Arrays of any producer through DLPack, read with ctypes.

No reader among the dependencies takes both bfloat16 and float8, so the capsule is read here. A
capsule is consumed once, its memory is given back once, and never before the stream that reads
it has passed.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cumla.core.names import arg


class ArrayView(NamedTuple):
    """Address, layout and dtype of an array: all that a kernel needs.

    An element type goes by NumPy's name, with ml_dtypes' names for the rest: `"float32"`,
    `"bfloat16"`, `"float8_e4m3fn"` ... An array in foreign byte order has NumPy's code instead
    (`">f4"`), which matches none of them.
    """

    ptr: int  # address of the first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes from one element to the next along each axis
    dtype: str
    device: int | None  # CUDA ordinal; None for CPU memory
    read_only: bool = False  # its owner forbids, or would not see, that a kernel writes to it


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's or ml_dtypes' element type of that name."""
    return np.dtype(getattr(ml_dtypes, name, name))


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("device_type", "device_id", "ndim")),
        *((name, ctypes.c_uint8) for name in ("code", "bits")),
        ("lanes", ctypes.c_uint16),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("shape", "strides")),
        ("byte_offset", ctypes.c_uint64),
    ]


# PYFUNCTYPE: the deleters of some producers touch Python objects.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class ManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class ManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_DLPACK_VERSION = (1, 0)
# Flags of a versioned capsule: its memory must not be written to; it is a copy, so that the
# producer would not see what is written.
_READ_ONLY, _IS_COPIED = 1, 2
# A capsule keeps a pointer to its name, so both names live as long as this module.
_CAPSULES: tuple[tuple[bytes, bytes, Any], ...] = (
    (b"dltensor", b"used_dltensor", ManagedTensor),
    (b"dltensor_versioned", b"used_dltensor_versioned", ManagedTensorVersioned),
)

capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)

DTYPES: dict[tuple[int, int], str] = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}

# DLDeviceType: 1 CPU, 2 CUDA, 3 page-locked CPU memory, 13 CUDA managed memory.
_CPU_DEVICES = (1, 3)
_CUDA_DEVICES = (2, 13)


def ordinal(name: str, device_type: int, device_id: int) -> int | None:
    """CUDA ordinal of a DLPack device, None for the CPU."""
    if device_type in _CUDA_DEVICES:
        return int(device_id)
    if device_type in _CPU_DEVICES:
        return None
    raise ValueError(
        f"{arg(name)}: needs an array on a CUDA device or on the CPU, got one on the DLPack device "
        f"type {int(device_type)}; copy it to a CUDA device first"
    )


class Imported:
    """A DLPack capsule that has been consumed; dropping this object gives the memory back."""

    __slots__ = ("_address", "_deleter", "view")

    def __init__(self, name: str, capsule: object) -> None:
        self._deleter = 0
        for fresh, used, layout in _CAPSULES:
            if capsule_is_valid(capsule, fresh):
                self._address = _capsule_pointer(capsule, fresh)
                managed = layout.from_address(self._address)
                _capsule_rename(capsule, used)
                self._deleter = managed.deleter or 0
                break
        else:
            raise TypeError(
                f"{arg(name)}: __dlpack__ must return a fresh DLPack capsule, got {capsule!r}"
            )
        if layout is ManagedTensorVersioned and managed.major > _DLPACK_VERSION[0]:
            raise TypeError(
                f"{arg(name)}: its DLPack capsule has version {managed.major}.{managed.minor}, and "
                f"1.x is the newest that can be read; pass an array of PyTorch, CuPy or JAX"
            )
        view = _view_of_tensor(name, managed.tensor)
        if layout is ManagedTensorVersioned and managed.flags & (_READ_ONLY | _IS_COPIED):
            view = view._replace(read_only=True)
        self.view = view

    # At interpreter exit the producer may be gone already: its memory goes with the process. The
    # globals of this module may be gone as well, so the question is bound here.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._deleter and not _is_finalizing():
            _Deleter(self._deleter)(self._address)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """The elements as opaque bytes of their size: every dtype fits into them."""
        view = self.view
        return {
            "version": 3,
            "data": (view.ptr, view.read_only),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{numpy_dtype(view.dtype).itemsize}",
        }


def _view_of_tensor(name: str, tensor: Any) -> ArrayView:
    dtype = DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(
            f"{arg(name)}: its element type is unknown (DLPack type code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes); pass it as one of "
            f"{', '.join(DTYPES.values())}"
        )
    ndim, itemsize = tensor.ndim, tensor.bits // 8
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    if not tensor.data and 0 not in shape:
        raise ValueError(
            f"{arg(name)}: needs an array with memory, got one at address 0; pass the array that "
            f"holds the values"
        )
    if ndim and tensor.strides:
        strides = tuple([stride * itemsize for stride in tensor.strides[:ndim]])
    else:
        strides = tuple([itemsize * math.prod(shape[axis + 1 :]) for axis in range(ndim)])
    device = ordinal(name, tensor.device_type, tensor.device_id)
    return ArrayView((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, device)


def import_array(name: str, array: Any, stream: int | None) -> Imported:
    """Consume `array.__dlpack__`, ordered before what `stream` does next; None for the CPU."""
    # In the protocol 1 is the legacy default stream, 2 the per-thread one, and 0 is not allowed.
    number = None if stream is None else stream or 1
    try:
        try:
            capsule = array.__dlpack__(stream=number, max_version=_DLPACK_VERSION)
        except TypeError:  # a producer older than DLPack 1.0
            capsule = array.__dlpack__(stream=number)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{arg(name)}: its producer does not export it: {error}") from error
    return Imported(name, capsule)
