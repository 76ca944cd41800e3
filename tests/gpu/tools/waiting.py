# SPDX-License-Identifier: Apache-2.0
"""Calls in which PyTorch may not wait for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
