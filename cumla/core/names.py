# SPDX-License-Identifier: Apache-2.0
"""The caller's names of arguments, in messages: functions of other libraries have other names."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

_Names = tuple[Mapping[str, str], Any]  # and those of the caller's caller, or None
_names: ContextVar[_Names | None] = ContextVar("names", default=None)


def arg(name: str) -> str:
    """Return the caller's name of an argument, or of a part of one, such as ``kv_cache[0]``.

    A caller may have its own words for a phrase as well.
    """
    found = _names.get()
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
    _names.set((names, _names.get()))


def leave() -> None:
    """Let messages have the names of before the last :func:`enter`."""
    found = _names.get()
    assert found is not None
    _names.set(found[1])


class Naming:
    """A ``with`` block in whose messages arguments have the names to which `names` lead."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        enter(self._names)

    def __exit__(self, *error: object) -> None:
        leave()
