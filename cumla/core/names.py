# SPDX-License-Identifier: Apache-2.0
"""The caller's names of arguments, in messages: functions of other libraries have other names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

# `names`: those of the caller, and those of its caller, or None. TorchDynamo traces no ContextVar.
_local = threading.local()


def arg(name: str) -> str:
    """Return the caller's name of an argument, or of a part of one, such as ``kv_cache[0]``.

    A caller may have its own words for a phrase as well.
    """
    found: Any = getattr(_local, "names", None)
    while found is not None:
        names, found = found
        if name in names:
            name = names[name]
        else:
            argument, bracket, part = name.partition("[")
            name = f"{names.get(argument, argument)}{bracket}{part}"
    return name


def enter(names: Mapping[str, str]) -> None:
    """Let messages have the names to which `names` lead, until :func:`leave`."""
    _local.names = (names, getattr(_local, "names", None))


def leave() -> None:
    """Let messages have the names of before the last :func:`enter`."""
    _local.names = _local.names[1]


class Naming:
    """A ``with`` block in whose messages arguments have the names to which `names` lead."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        enter(self._names)

    def __exit__(self, *error: object) -> None:
        leave()
