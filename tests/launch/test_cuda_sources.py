# SPDX-License-Identifier: Apache-2.0
"""The rules that the CUDA sources keep, and what the compiled decode kernels consist of."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import pytest

from cumla.launch.source import KernelSpec, strip_comments
from tests.launch.compiling import of_some_files
from tests.launch.conftest import Compiler

ROOT = Path(str(resources.files("cumla").joinpath("cuda")))
WRAPPERS = sorted(ROOT.glob("ptx/*.cuh"))
OTHERS = sorted(path for path in ROOT.rglob("*.cu*") if path not in WRAPPERS)

# Instructions that neither wait, arrive, fence, load nor store as far as the compiler need know: it
# may move memory accesses across them. wgmma.mma_async reads shared memory between wgmma fences.
WITHOUT_MEMORY = re.compile(
    r"(mov|cvt|setp|selp|add|sub|mul|fma|min|max|and|or|xor|not|neg|abs|shl|shr|bfe|bfi|prmt|lop3"
    r"|ex2|lg2|rcp|cvta|mapa|createpolicy|elect|vote|shfl|activemask|setmaxnreg"
    r"|wgmma\.mma_async|mma|movmatrix)\b"
)


class Asm(NamedTuple):
    """One asm statement of a wrapper."""

    line: int
    volatile: bool
    instructions: tuple[str, ...]
    memory: bool


_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def statements(text: str) -> list[Asm]:
    """Find the asm statements in CUDA text; their instructions come without operands."""
    return [
        _statement(text, found)
        for found in re.finditer(r"\basm\b\s*(volatile\b)?\s*\(", text)
        if not text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        .lstrip()
        .startswith("//")
    ]


def _statement(text: str, found: re.Match[str]) -> Asm:
    depth, at = 1, found.end()
    colon = None
    while depth:
        string = _STRING.match(text, at)
        if string is not None:
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if text[at] == ":" and colon is None:
            colon = at
        at += 1
    body = "".join(_STRING.findall(text[found.end() : colon or at]))
    instructions = _instructions(body.replace("\\n", "\n").replace("\\t", " "))
    if body.strip() and not instructions:
        raise ValueError(f"no instruction found in {body!r}")
    memory = re.search(r':[^:"]*(?:"[a-z]+"[^:"]*)*"memory"', text[colon:at]) if colon else None
    return Asm(
        line=text.count("\n", 0, found.start()) + 1,
        volatile=found[1] is not None,
        instructions=instructions,
        memory=memory is not None,
    )


def _instructions(body: str) -> tuple[str, ...]:
    """Names of the instructions in PTX text: no directives, labels, predicates or operands."""
    names = []
    for piece in re.split(r"[;\n]", body):
        bare = re.sub(r"^[\s{}]*(?:[A-Za-z_$%][\w$%=]*:(?!:)\s*)?(?:@!?[\w%]+\s+)?", "", piece)
        name = re.match(r"[a-z][\w.:]*", bare)
        if name is not None:
            names.append(name[0])
    return tuple(names)


def complaints(text: str) -> list[str]:
    """Say what is wrong with the asm statements of a wrapper file."""
    found = []
    for asm in statements(text):
        where = f"line {asm.line}: {', '.join(asm.instructions)}"
        touching = [name for name in asm.instructions if not WITHOUT_MEMORY.match(name)]
        if touching and not asm.memory:
            found.append(f"{where}: no memory clobber")
        if touching and not asm.volatile:
            found.append(f"{where}: not volatile")
        if asm.instructions and not names_section(text, asm.line):
            found.append(f"{where}: no `// PTX ISA: <section>` above the function")
    return found


def names_section(text: str, line: int) -> bool:
    """Tell whether the function, or macro, around a line has the manual's section above it.

    A specialisation may leave that to the template it specialises.
    """
    lines = text.split("\n")[:line]
    while lines and not re.search(r"__device__|^#define", lines[-1]):
        lines.pop()
    specialised = re.search(r"\b(\w+)<[^()]*>\(", lines[-1]) if lines else None
    while lines and lines[-1].strip() and not lines[-1].lstrip().startswith(("//", "}")):
        lines.pop()
    while lines and lines[-1].lstrip().startswith("//"):
        if re.match(r"\s*// PTX ISA: \S+", lines.pop()):
            return True
    if specialised is None:
        return False
    template = re.search(rf"__device__[^;{{]*\b{specialised[1]}\(", "\n".join(lines))
    return template is not None and names_section(text, text.count("\n", 0, template.end()) + 1)


@pytest.mark.parametrize("path", WRAPPERS, ids=lambda path: path.name)
def test_asm_wrappers(path: Path):
    assert complaints(path.read_text()) == []


def test_there_are_wrappers_to_look_at():
    found = [asm for path in WRAPPERS for asm in statements(path.read_text())]
    names = {name.split(".")[0] for asm in found for name in asm.instructions}
    assert {"mbarrier", "wgmma", "cp", "fence"} <= names


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_asm_lives_in_ptx(path: Path):
    assert not re.search(r"\basm\b", strip_comments(path.read_text()))


@pytest.mark.parametrize("path", [*WRAPPERS, *OTHERS], ids=lambda path: path.name)
def test_no_toolkit_header_licence_first_and_no_long_lines(path: Path):
    text = path.read_text()
    assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n")
    assert not re.findall(r"^.{121,}$", text, re.MULTILINE)
    for name in re.findall(r"^\s*#\s*include\s*(\S+)", text, re.MULTILINE):
        assert name.startswith('"')
        assert (ROOT / name.strip('"')).is_file(), f"{name} is not relative to cumla/cuda"


def opening(path: Path, seen: frozenset[Path] = frozenset()) -> str:
    """The comment that a file begins with, and those of the CUDA files that it names."""
    text = path.read_text()
    own = text[: len(text) - len(re.sub(r"\A(?://.*\n)+", "", text))]
    named = {ROOT / name for name in re.findall(r"\b[\w/]+/\w+\.cuh?\b", own)} - seen - {path}
    return own + "".join(opening(other, seen | named | {path}) for other in named)


def barriers(path: Path) -> set[str]:
    """Names of the mbarriers that a kernel initialises, in its file or in one that it includes."""
    text, todo, seen = "", [path], {path}
    while todo:
        text += todo.pop().read_text()
        found = {ROOT / name for name in re.findall(r'#include "([^"]+)"', text)} - seen
        todo += sorted(found)
        seen |= found
    return set(re.findall(r"\bmbarrier_init\(shared\.(\w+)\(", strip_comments(text)))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.cu")), ids=lambda path: path.name)
def test_kernel_opens_with_its_barriers_and_budget(path: Path):
    text = opening(path)
    assert re.search(r"\b[Bb]arrier", text)
    assert re.search(r"\bBudget:|\bRegisters:", text)
    cells = re.findall(r"^// (\S.*?)  ", text, re.MULTILINE)  # the first ones of the rows
    table = {name for cell in cells for name in re.findall(r"\w+", cell)}
    assert barriers(path) <= table, "barriers without a row in the table of the opening comment"


def test_there_are_barriers_to_look_at():
    assert {"full", "free", "query_full", "query_free"} <= barriers(ROOT / "mla/mla_decode.cu")


GOOD = """\
// PTX ISA: Some Section: st
// More words.
template <int kN>
__device__ __forceinline__ void store(u32 to, float value) {
  asm volatile("st.shared::cta.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
"""


def test_scanner_accepts_a_good_wrapper():
    assert complaints(GOOD) == []
    (asm,) = statements(GOOD)
    assert asm == Asm(5, True, ("st.shared::cta.f32",), True)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (' : "memory"', "", "no memory clobber"),
        (' : "memory"', ' : "cc"', "no memory clobber"),
        (
            '%1;" ::"r"(to), "f"(value) : "memory"',
            '%1; // : memory" ::"r"(to)',
            "no memory clobber",
        ),
        ("asm volatile", "asm", "not volatile"),
        ("// PTX ISA: Some Section: st\n", "", "no `// PTX ISA"),
        ("// PTX ISA: Some Section: st\n", "// PTX ISA: \n", "no `// PTX ISA"),
        ("// More words.\n", "// More words.\n\n", "no `// PTX ISA"),
        ("store(u32", "store<int>(u32", None),
        ("// PTX ISA: Some Section: st\n", "// PTX ISA: st\nint f();\n\n", "no `// PTX ISA"),
    ],
)
def test_scanner_finds_what_is_wrong(old, new, complaint):
    assert old in GOOD
    found = complaints(GOOD.replace(old, new, 1))
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_scanner_looks_at_the_template_of_a_specialisation():
    primary = """\
// PTX ISA: Some Section: cvt
template <typename T>
__device__ __forceinline__ u32 pack(float x);

"""
    special = """\
template <>
__device__ __forceinline__ u32 pack<Bf16>(float x) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(packed) : "f"(x));
}
"""
    assert complaints(primary + special) == []
    assert len(complaints(special)) == 1
    assert len(complaints(primary.replace("// PTX ISA", "// ISA") + special)) == 1


def test_scanner_reads_every_instruction():
    text = (
        'asm volatile("{\\n.reg .pred p;\\nagain: @!p bra again;\\n"\n'
        '  "mbarrier.try_wait.b64 p, [%1];\\n"\n'
        '  "@p ld.shared.b32 %0, [%1]; }" : "=r"(x) : "r"(f(a)) : "cc", "memory");'
    )
    (asm,) = statements(text)
    assert asm.instructions == ("bra", "mbarrier.try_wait.b64", "ld.shared.b32")
    assert asm.memory


def disassembler() -> str | None:
    """Find cuobjdump on PATH, or the one that the `test` extra installs."""
    found = shutil.which("cuobjdump")
    if found is None and importlib.util.find_spec("cuda.pathfinder") is not None:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("cuobjdump")
    return found


@of_some_files
def test_machine_code(spec: KernelSpec, tmp_path: Path, compiled: Compiler):
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: neither on PATH nor from nvidia-cuda-cuobjdump")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(spec).cubin)
    path = os.pathsep.join([str(Path(tool).parent), os.environ.get("PATH", "")])
    listing = subprocess.run(
        [tool, "-sass", str(cubin)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    ).stdout
    opcodes = set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", listing))
    assert "EXIT" in opcodes
    assert not opcodes & {"LDL", "STL"}
    if spec.stem == "mla_decode":
        assert "HGMMA" in opcodes
        assert ("UTMALDG" in opcodes) != spec.entry.endswith("_rows")
