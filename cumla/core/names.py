# SPDX-License-Identifier: Apache-2.0
"""The caller's names of arguments, in messages: functions of other libraries have other names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

local = threading.local()
"""`names` of the caller, and those of its caller, or None. TorchDynamo traces no `ContextVar`."""


def arg(name: str) -> str:
    """Return the caller's name of an argument, or of a part of one, such as ``kv_cache[0]``.

    A caller may have its own words for a phrase as well.
    """
    found: Any = getattr(local, "names", None)
    while found is not None:
        names, found = found
        if name in names:
            name = names[name]
        else:
            argument, bracket, part = name.partition("[")
            name = f"{names.get(argument, argument)}{bracket}{part}"
    return name


class Naming:
    """A ``with`` block in whose messages arguments have the names to which `names` lead."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        local.names = (self._names, getattr(local, "names", None))

    def __exit__(self, *error: object) -> None:
        local.names = local.names[1]
