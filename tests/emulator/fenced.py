# SPDX-License-Identifier: Apache-2.0
"""Arrays between pages that nobody may touch: an access outside of them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

__all__ = ["Fenced"]


class Fenced:
    """Arrays that end, or begin, where memory that nobody may touch begins, or ends."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.maps: list[Any] = []

    def empty(self, shape: Any, dtype: Any) -> Any:
        """An array of 0xFF bytes; bytes at a multiple of 256, as they may be a plan's buffer."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        self.maps.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for fence in (address, address + mmap.PAGESIZE + size):
            assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        offset = mmap.PAGESIZE
        if self.at_end:
            gap = size - nbytes
            offset += gap - gap % (256 if np.dtype(dtype) == np.uint8 else 1)
        array = np.ndarray(shape, dtype, memory, offset)
        array.view(np.uint8).fill(0xFF)
        return array

    def copy(self, array: Any) -> Any:
        """A copy without gaps."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy
