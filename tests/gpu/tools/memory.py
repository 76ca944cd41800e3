# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays on the GPU, with their strides and what lies between their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Memory"]


class Memory:
    """Copies of NumPy arrays on the GPU; views of one array stay views of one copy."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.copies: dict[int, tuple[np.ndarray, Any]] = {}

    def bytes_of(self, array: np.ndarray) -> Any:
        """The copy of the array that owns the memory, as bytes."""
        owner = owner_of(array)
        if id(owner) not in self.copies:
            there = self.cupy.asarray(owner.reshape(-1).view(np.uint8))
            self.copies[id(owner)] = owner, there
        return self.copies[id(owner)][1]

    def upload(self, value: Any) -> Any:
        """The same strides and places; CuPy takes numbers by their bits."""
        if isinstance(value, tuple):
            return tuple(self.upload(part) for part in value)
        if not isinstance(value, np.ndarray):
            return value
        memory = self.bytes_of(value)
        offset = value.ctypes.data - owner_of(value).ctypes.data
        bits = np.dtype(f"u{value.itemsize}")
        there = self.cupy.ndarray(value.shape, bits, memory.data + offset, value.strides)
        return there.view(value.dtype)

    def download(self, array: np.ndarray) -> np.ndarray:
        """Return what the copy of an array holds now."""
        owner = owner_of(array)
        there = self.bytes_of(array).get().view(owner.dtype).reshape(owner.shape)
        offset = array.ctypes.data - owner.ctypes.data
        return np.ndarray(array.shape, array.dtype, there, offset, array.strides)


def owner_of(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
