# SPDX-License-Identifier: Apache-2.0
"""Writes cumla/launch/_layouts.py: constants and parameter structs, as the compiler sees them.

    python -m tests.launch.layouts [--show]

Launchers name the constants that they need; their names, and the members of the structs that
kernels take, are compiled to PTX, without a GPU and in a few seconds. --show prints the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cumla" / "launch" / "_layouts.py"

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Written by ``python -m tests.launch.layouts``; layouts.py beside this file reads it.

Members of a struct are letters of `struct`, or names of structs, with ``:n`` for an array of n.
Before them are those of the struct that is named by "".
"""

from __future__ import annotations
'''

_LETTERS = {"TensorMap": "128s", "i64": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}
_UNUSED = "unused"
_BASE = re.compile(r"^struct (?:alignas\(\d+\) )?(\w+) : (\w+) {", re.MULTILINE)


class Recorded(ModuleType):
    """Stands for cumla.launch._layouts while launchers are imported: has what is asked for."""

    class Constants(dict[str, int]):
        def __missing__(self, asked: str) -> int:
            self[asked] = len(self) + 1  # no two are equal: launchers divide by differences
            return self[asked]

    def __init__(self) -> None:
        super().__init__("cumla.launch._layouts")
        self.CONSTANTS = defaultdict(self.Constants)
        self.STRUCTS: dict[str, dict[str, str]] = {}


def members_of(text: str, name: str) -> dict[str, tuple[str, bool]]:
    """The members of a struct of a kernel's text in their order, those of its base first.

    Of each a key of `Struct`'s declarations, and whether it is an array.
    """
    head = rf"struct (?:alignas\(\d+\) )?{name} (?:: (\w+) )?{{"
    body = re.search(rf"{head}\n(.*?)\n}};", text, re.DOTALL)
    assert body is not None, name
    members = members_of(text, body[1]) if body[1] else {}
    values = re.sub("//.*", "", body[2]).partition("__device__")[0]  # functions come after them
    for declaration in values.split(";")[:-1]:
        if declaration.lstrip().startswith("static "):  # is no part of the struct's memory
            continue
        kind, *names = re.findall(r"\w+(?:\[\w+\])?", declaration.replace("const ", ""))
        if "*" in declaration:
            kind = "i64"
        elif re.search(rf"enum {kind} : int ", text):
            kind = "int"
        for member in names:
            members[member.partition("[")[0]] = _LETTERS.get(kind, kind), "[" in member
    return members


def structs_of(text: str, name: str) -> Iterator[str]:
    """A struct of a kernel's text after those that it is made of."""
    for kind, _ in members_of(text, name).values():
        if kind not in _LETTERS.values():
            yield from structs_of(text, kind)
    yield name


def declarations(
    text: str, name: str, sizes: dict[str, int], own: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Return what the file says of a struct's members, with padding where the compiler has it.

    `own`: what structs of this text are called there.
    """
    end = 0
    for member, (kind, is_array) in members_of(text, name).items():
        begin, size = sizes[_offset(name, member)], sizes[_size(name, member)]
        if begin > end:
            yield f"padding_{end}", f"{begin - end}x"
        end = begin + size
        if member == _UNUSED:
            yield member, f"{size}x"
            continue
        one = sizes[_size(kind)] if kind not in _LETTERS.values() else _bytes_of(kind)
        assert size == one or (is_array and size % one == 0), (name, member)
        kind = own.get(kind, kind)
        yield member, f"{kind}:{size // one}" if is_array else kind
    if sizes[_size(name)] > end:
        yield f"padding_{end}", f"{sizes[_size(name)] - end}x"


def _bytes_of(letter: str) -> int:
    return 128 if letter == "128s" else {"q": 8, "i": 4, "f": 4}[letter.lower()]


def _size(name: str, member: str = "") -> str:
    return f"sizeof((({name}*)0)->{member})" if member else f"sizeof({name})"


def _offset(name: str, member: str) -> str:  # NVRTC has offsetof under this name only
    return f"__INTADDR__(&(({name}*)0)->{member})"


def evaluate(text: str, namespace: str, expressions: list[str]) -> dict[str, int]:
    """The values of constant expressions behind a kernel's text: functions fold as well."""
    from cuda.bindings import nvrtc

    stores = [f"  out[{i}] = static_cast<i64>({it});" for i, it in enumerate(expressions)]
    used = "\n".join(f"using namespace {name};" for name in dict.fromkeys(("cumla", namespace)))
    probe = 'extern "C" __global__ void probe(volatile long long* out) {'
    whole = "\n".join([text, used, probe, *stores, "}", ""])
    _, program = nvrtc.nvrtcCreateProgram(whole.encode(), b"probe.cu", 0, [], [])
    options = [b"-arch=compute_90a", b"-std=c++17", b"--device-as-default-execution-space"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    _, _, body = ptx.decode().partition(".entry probe(")
    numbers = dict(re.findall(r"mov\.\w64\s+(%rd\d+), (\d+);", body))
    stored = re.findall(r"st\.volatile\.global\.\w64\s+\[%rd\d+(?:\+(\d+))?\], (\S+);", body)
    found = {int(at or 0) // 8: int(numbers.get(value, value)) for at, value in stored}
    return {it: found[i] for i, it in enumerate(expressions)}


def written() -> str:
    """The text of the file, as launchers and kernels are now; in a fresh process only."""
    recorded: Any = Recorded()
    assert "cumla.launch" not in sys.modules
    sys.modules["cumla.launch._layouts"] = recorded
    import cumla.launch
    from cumla.launch.source import KernelSpec, translation_unit

    structs: dict[str, list[str]] = defaultdict(list)
    texts: dict[str, tuple[str, str]] = {}
    packages = [found.name for found in walk_packages(cumla.launch.__path__, "cumla.launch.")]
    specs: list[KernelSpec] = [
        spec for name in packages for spec in getattr(import_module(name), "SPECS", ())
    ]
    for spec in specs:
        kernel = f"{spec.package}.{spec.stem}".removeprefix("cumla.cuda.").replace(".", "/")
        if kernel not in texts:
            text, _, _ = translation_unit(spec).partition('extern "C"')
            texts[kernel] = text, spec.namespace
        structs[kernel] += structs_of(texts[kernel][0], spec.params)
    asked: dict[str, dict[str, int]] = recorded.CONSTANTS

    def compiled(kernel: str) -> dict[str, int]:
        text, namespace = texts[kernel]
        expressions = list(asked.get(kernel, ()))
        for name in structs[kernel]:
            expressions.append(_size(name))
            for member, (kind, _) in members_of(text, name).items():
                expressions += [_offset(name, member), _size(name, member)]
                expressions += [_size(kind)] if kind not in _LETTERS.values() else []
        return evaluate(text, namespace, list(dict.fromkeys(expressions)))

    kernels = sorted(texts)
    with ThreadPoolExecutor() as pool:
        values = dict(zip(kernels, pool.map(compiled, kernels), strict=True))
    declared: dict[str, dict[str, str]] = {}
    for kernel in kernels:
        own: dict[str, str] = {}  # names of its structs in the file
        for name in dict.fromkeys(structs[kernel]):
            found = dict(declarations(texts[kernel][0], name, values[kernel], own))
            called = name
            while declared.setdefault(called, found) != found:  # another struct of this name
                called += "2"
            own[name] = called
    assert all(spec.params in declared for spec in specs)
    bases = {name: base for text, _ in texts.values() for name, base in _BASE.findall(text)}
    short = {name: _after(members, bases.get(name), declared) for name, members in declared.items()}
    constants = {
        kernel: {it: values[kernel][it] for it in sorted(of)} for kernel, of in asked.items()
    }
    return f"{HEAD}{_table('CONSTANTS', 'int', constants)}{_table('STRUCTS', 'str', short)}"


def _after(
    members: dict[str, str], base: str | None, declared: Mapping[str, dict[str, str]]
) -> dict[str, str]:
    """Name a struct's base in place of the members that they have in common."""
    first = list(declared.get(base or "", {}).items())
    if not first or list(members.items())[: len(first)] != first:
        return members
    return {"": str(base), **dict(list(members.items())[len(first) :])}


def _table(name: str, kind: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"\n{name}: dict[str, dict[str, {kind}]] = {{"]
    for key, row in sorted(rows.items()):
        inner = [f"        {json.dumps(of)}: {json.dumps(value)}," for of, value in row.items()]
        lines += [f'    "{key}": {{', *inner, "    },"]
    return "\n".join([*lines, "}", ""])


def main() -> None:
    text = written()
    if "--show" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        FILE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
