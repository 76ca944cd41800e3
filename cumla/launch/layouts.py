# SPDX-License-Identifier: Apache-2.0
"""Constants and parameter structs of the kernels, as the compiler sees them.

Sizes, threads, stages and the members of structs are written in CUDA alone. ``_layouts.py`` holds
what launchers ask for: ``python -m tests.launch.layouts`` writes it, after a change of either side.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from cumla.launch._layouts import CONSTANTS, STRUCTS
from cumla.launch.kernel import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView
    from cumla.launch.source import KernelSpec


def constant(kernel: str, expression: str) -> int:
    """Return the value of a constant expression of a kernel's file, named as in "mla/mla_decode".

    Its names are looked up in the namespace of the kernel's family.
    """
    try:
        return CONSTANTS[kernel][expression]
    except KeyError:
        raise KeyError(
            f"{expression} of {kernel} is not in cumla/launch/_layouts.py; generate it with "
            f"python -m tests.launch.layouts"
        ) from None


class Struct:
    """The parameter struct of a kernel.

    Values are named by its members. Those of a nested struct are a mapping, those of an array a
    sequence, which may be shorter than the array; None stands for zeros.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._members: list[tuple[str, Struct | None, int]] = []
        letters: list[str] = []
        for member, declared in members_of(name).items():
            kind, _, count = declared.partition(":")
            inner = struct_of(kind) if kind in STRUCTS else None
            letters.append((inner.letters if inner else kind) * int(count or 1))
            if not kind.endswith("x"):
                self._members.append((member, inner, int(count or 0)))
        self.letters: str = "".join(letters)
        self.layout = struct.Struct(f"<{self.letters}")
        self._zeros = self.layout.unpack(bytes(self.layout.size))

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """List values in the order of `layout`; `TypeError` where a name is unknown or missing."""
        found: list[Any] = []
        self._put(given, found)
        return tuple(found)

    def _put(self, given: Mapping[str, Any] | None, found: list[Any]) -> None:
        if given is None:
            found.extend(self._zeros)
            return
        if len(given) != len(self._members):
            raise self._misfit(given)
        try:
            for name, inner, count in self._members:
                value = given[name]
                if inner or count:
                    self._put_member(name, inner, count, value, found)
                else:
                    found.append(value)
        except KeyError:
            raise self._misfit(given) from None

    def _put_member(
        self, name: str, inner: Struct | None, count: int, value: Any, found: list[Any]
    ) -> None:
        values = value if count else (value,)
        if len(values) > max(count, 1):
            raise TypeError(f"{self.name}.{name}: needs at most {count} values, got {len(values)}")
        for one in values:
            if inner:
                inner._put(one, found)
            else:
                found.append(one)
        if count:
            found.extend((inner._zeros if inner else (0,)) * (count - len(values)))

    def _misfit(self, given: Mapping[str, Any]) -> TypeError:
        names = {name for name, _, _ in self._members}
        return TypeError(
            f"{self.name}: needs a value for each of its members, got none for "
            f"{sorted(names - given.keys())} and values for {sorted(given.keys() - names)}, "
            f"which it does not have"
        )


struct_of = cache(Struct)


def members_of(name: str) -> dict[str, str]:
    """List the declared members of a struct, after those of its base."""
    members = dict(STRUCTS[name])
    base = members.pop("", None)
    return {**(members_of(base) if base else {}), **members}


def launch_of(
    spec: KernelSpec, grid: tuple[int, int, int], values: Mapping[str, Any], cluster: int = 1
) -> Launch:
    """Describe a launch of a kernel whose parameter struct has these values, by name."""
    params = struct_of(spec.params)
    return Launch(spec, grid, params.layout, params.values(values), cluster)


def strided(view: ArrayView, *names: str) -> dict[str, Any]:
    """Name where an array begins and the strides in bytes of its first axes."""
    return dict(zip(names, (view.ptr, *view.strides), strict=False))
