# SPDX-License-Identifier: Apache-2.0
"""The parameter structs of the kernels: members by name, checks by the compiler."""

from __future__ import annotations

import re
from typing import Any

from cumla.launch import module
from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec, translation_unit

__all__ = ["compile_checks", "members_of", "parameters"]


def compile_checks(spec: KernelSpec, checks: dict[str, int], *before: str) -> None:
    """Compile a kernel without its entry point: only the templates' syntax is looked at."""
    whole, _, _ = translation_unit(spec).partition('extern "C"')
    lines = [f'static_assert({what} == {value}, "differs");' for what, value in checks.items()]
    module._compile(spec, "\n".join([whole, *before, *lines, ""]), module.OPTIONS)


def count_of(text: str, member: str) -> int:
    """How many values a member holds: an array's bound is a number, or a constant of the text."""
    array = re.search(r"\[(\w+)\]", member)
    if array is None:
        return 1
    constant = re.search(rf"constexpr int {array[1]} = (\d+);", text)
    return int(constant[1] if constant else array[1])


def members_of(text: str, name: str, prefix: str = "") -> dict[str, str]:
    """The members of a struct of a kernel's text, a letter of `struct` each, in their order."""
    head = rf"struct (?:alignas\(\d+\) )?{name} (?:: (\w+) )?{{"
    body = re.search(rf"{head}\n(.*?)\n}};", text, re.DOTALL)
    assert body is not None, name
    members = members_of(text, body[1], prefix) if body[1] else {}
    values = re.sub("//.*", "", body[2]).partition("__device__")[0]  # functions come after them
    for declaration in values.split(";")[:-1]:
        if declaration.lstrip().startswith("static "):  # is no part of the struct's memory
            continue
        kind, *rest = re.findall(r"\w+(?:\[\w+\])?", declaration.replace("const ", ""))
        if "*" in declaration or kind in ("i64", "u64"):
            letter = "q"
        elif kind in ("int", "u32") or re.search(rf"enum {kind} : (?:int|u32) ", text):
            letter = "i"
        else:
            letter = {"float": "f", "TensorMap": "s"}.get(kind, "")
        for member in rest:
            path, count = prefix + member.partition("[")[0], count_of(text, member)
            paths = [f"{path}[{i}]" for i in range(count)] if "[" in member else [path]
            for each in paths:
                inner = {each: letter} if letter else members_of(text, kind, f"{each}.")
                members.update(inner)
    return members


def parameters(launch: Launch) -> dict[str, Any]:
    """What a launch packs, by the kernel's names; tensor maps must be bytes already."""
    text, _, _ = translation_unit(launch.spec).partition('extern "C"')
    values = launch.layout.unpack(launch.layout.pack(*launch.values))
    return dict(zip(members_of(text, launch.spec.params), values, strict=True))
