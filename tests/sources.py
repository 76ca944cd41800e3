# SPDX-License-Identifier: Apache-2.0
"""The sources that evidence is about, read once a process."""

from __future__ import annotations

from functools import cache

from tests.gpu.tools import record


@cache
def sources() -> record.Sources:
    """Digests of all kernels, of their launchers and of the modules that test them."""
    return record.Sources.now()
