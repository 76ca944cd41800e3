# SPDX-License-Identifier: Apache-2.0
"""NumPy's products on one thread: on a busy machine more make small ones far slower."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

_lock = Lock()
_inside = 0  # calls that are running
_before = 1


@cache
def _openblas() -> tuple[Any, Any] | None:
    """Find how to ask and to tell NumPy's OpenBLAS its number of threads, if it has one."""
    try:
        library = ctypes.CDLL(np.linalg._umath_linalg.__file__)
        for name in ("scipy_openblas_{}64_", "openblas_{}64_", "scipy_openblas_{}", "openblas_{}"):
            get, put = (name.format(f"{do}_num_threads") for do in ("get", "set"))
            if hasattr(library, put):
                return library[get], library[put]
    except (AttributeError, OSError):
        pass
    return None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS take one thread, in all threads of the process; as a decorator, too."""
    global _inside, _before
    found = _openblas()
    if found is None:
        yield
        return
    get, put = found
    with _lock:
        if not _inside:
            _before = get()
            put(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                put(_before)
