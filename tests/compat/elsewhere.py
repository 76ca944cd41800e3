# SPDX-License-Identifier: Apache-2.0
"""Calls of the faces as a thread sees them in which the arrays' GPU is not the current one."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import pytest

from cumla.core import _driver, arrays, frameworks
from tests.fake_cuda import FakeLibrary


def open_elsewhere(
    monkeypatch: pytest.MonkeyPatch, face: ModuleType, current: int | None
) -> FakeLibrary:
    """Let a face open its calls on the default stream of GPU 3, in a thread with this context.

    Its arrays are on the CPU; the driver's library, which comes back, notes what it is asked.
    """
    library = FakeLibrary(current)
    with monkeypatch.context() as loaders:
        for loader in ("PyDLL", "CDLL"):
            loaders.setattr(ctypes, loader, lambda name: library)
        cuda = _driver.Driver()
    monkeypatch.setattr(arrays, "driver", lambda: cuda)

    def open_call(arguments: tuple[tuple[str, Any], ...]) -> arrays.Call:
        views = arrays.open_call(arguments).views
        return arrays.Call(frameworks.NUMPY, None, 3, 0, None, views)

    monkeypatch.setattr(face, "open_call", open_call)
    return library
