# SPDX-License-Identifier: Apache-2.0
"""What launches pack, by the kernels' names, and checks by the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cumla.launch import module
from cumla.launch._layouts import STRUCTS
from cumla.launch.kernel import Launch
from cumla.launch.layouts import members_of
from cumla.launch.source import KernelSpec, translation_unit

__all__ = ["compile_checks", "leaves", "parameters"]


def compile_checks(spec: KernelSpec, checks: dict[str, int], *before: str) -> None:
    """Compile a kernel without its entry point: only the templates' syntax is looked at."""
    whole, _, _ = translation_unit(spec).partition('extern "C"')
    lines = [f'static_assert({what} == {value}, "differs");' for what, value in checks.items()]
    module._compile(spec, "\n".join([whole, *before, *lines, ""]), module.OPTIONS)


def leaves(name: str, prefix: str = "") -> Iterator[str]:
    """The names of all values of a struct, in the order in which a launch has them."""
    for member, declared in members_of(name).items():
        kind, _, count = declared.partition(":")
        paths = (
            [f"{prefix}{member}[{i}]" for i in range(int(count))] if count else [prefix + member]
        )
        for path in () if kind.endswith("x") else paths:
            if kind in STRUCTS:
                yield from leaves(kind, f"{path}.")
            else:
                yield path


def parameters(launch: Launch) -> dict[str, Any]:
    """Return what a launch packs, by the kernel's names; tensor maps must be bytes already."""
    values = launch.layout.unpack(launch.layout.pack(*launch.values))
    return dict(zip(leaves(launch.spec.params), values, strict=True))
