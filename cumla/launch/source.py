# SPDX-License-Identifier: Apache-2.0
"""From package data to the one text that a compiler sees.

A kernel lives in ``cumla/cuda/<stem>.cu``, those of the benchmark in ``cumla/bench/cuda``. NVRTC
gets it as a single translation unit: every header of ours is written out at the place of its first
``#include`` (CuPy's disk cache looks at the text only, so a header behind ``-I`` could change
unnoticed), ``#line`` keeps the compiler's messages pointing at the files, and a generated
``extern "C"`` entry point calls the kernel's template for one set of types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cumla.core.check_mode import environment_flag
from cumla.errors import CompilationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.resources.abc import Traversable

# Options that CuPy's RawModule adds to every compilation (CuPy 14). -ftz=true changes the
# code that comes out, so the compilations that do not go through CuPy ask for it as well.
ADDED_BY_CUPY: tuple[str, ...] = ("-ftz=true", "--device-as-default-execution-space")

OPTIONS: tuple[str, ...] = ("-arch=sm_90a", "-std=c++17", *ADDED_BY_CUPY)
"""The options of every compilation. RawModule is given them without ``ADDED_BY_CUPY``."""


_CUDA = "cumla.cuda"  # the kernels of the library, and everybody's headers

HALVES = ("bfloat16", "float16")
FLOATS = (*HALVES, "float32")
_TYPES = dict(zip(FLOATS, ("Bf16", "Fp16", "Fp32"), strict=True))  # their names in CUDA


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compiled entry point of a kernel."""

    # The kernel's file <stem>.cu in `package`. In cumla.cuda its launcher is the module of
    # cumla.launch whose SPECS hold it, mostly cumla/launch/<stem>.py.
    stem: str
    entry: str  # name of the extern "C" entry point, such as "mla_decode_bf16"
    # The device function, or function template with its arguments, that the entry point calls. It
    # is looked up in the namespace of its family, for example "mla_decode<Bf16>".
    function: str
    params: str  # the struct of the same namespace that the kernel takes by value
    threads: int  # of a block
    min_blocks: int = 1  # that must fit on a multiprocessor at once; bounds a thread's registers
    smem_bytes: int = 0  # dynamic shared memory of a block
    # The folder of the kernel's file, as a dotted name; its headers are in cumla.cuda. A folder
    # below that is a family: files of cumla.cuda.mla are of namespace cumla::mla.
    package: str = _CUDA

    @classmethod
    def of(
        cls,
        family: str,
        stem: str,
        params: str,
        *arguments: object,
        name: str | None = None,
        tags: Iterable[str] = (),
        **limits: int,
    ) -> KernelSpec:
        """Describe an entry point of the family's function, or template, that its file is named by.

        `family` is "" for what all families share. `arguments` are those of the template: dtypes,
        bools, numbers and names. `name` and `tags` make the entry point's name, `name` being that
        of the file by default; `limits` are threads, min_blocks and smem_bytes.
        """
        listed = ", ".join(map(in_cuda, arguments))
        entry, function = "_".join((name or stem, *tags)), f"{stem}<{listed}>" if listed else stem
        package = f"{_CUDA}.{family}" if family else _CUDA
        return cls(stem, entry, function, params, package=package, **limits)

    @property
    def path(self) -> str:
        """The kernel's file, as compilers and messages name it."""
        return _path_in(self.package, f"{self.stem}.cu")

    @property
    def namespace(self) -> str:
        """The C++ namespace of `function` and `params`."""
        family = self.package.removeprefix(_CUDA).replace(".", "::")
        return f"cumla{family}" if self.package.startswith(_CUDA) else "cumla"


def in_cuda(argument: object) -> str:
    """Write an argument of a template: of a dtype the type of its numbers."""
    text = str(argument)
    return text.lower() if isinstance(argument, bool) else _TYPES.get(text, text)


def debug_build() -> bool:
    """Return whether ``CUMLA_DEBUG`` asks for kernels whose waits trap after a time limit."""
    return environment_flag("CUMLA_DEBUG")


def _sources(package: str) -> Traversable:
    """Return the folder of a package, which need not be one that Python can import."""
    top, *folders = package.split(".")
    from importlib import resources  # 15 ms of a process that may compile nothing

    return resources.files(top).joinpath(*folders)


def _path_in(package: str, name: str) -> str:
    return f"{package.replace('.', '/')}/{name}"


def translation_unit(spec: KernelSpec, *, debug: bool = False) -> str:
    """Write the text that the compiler sees: a kernel's file, with our headers, and its entry.

    `debug` defines ``CUMLA_DEBUG``: waits trap after a time limit instead of hanging. Raise
    `CompilationError` if the kernel's file or one of its headers is missing.
    """
    return f"{_body(spec, debug)}\n{_entry_point(spec)}"


def _body(spec: KernelSpec, debug: bool) -> str:
    """Write what all kernels of a file have in common."""
    lines = ["#define CUMLA_DEBUG 1"] if debug else []
    _inline(spec.package, f"{spec.stem}.cu", None, set(), lines)
    return "\n".join(lines)


def _entry_point(spec: KernelSpec) -> str:
    namespaces = dict.fromkeys(("cumla", spec.namespace))
    lines = (
        '#line 1 "entry point generated by cumla/launch/source.py"',
        *(f"using namespace {name};" for name in namespaces),
        f'extern "C" __global__ void __launch_bounds__({spec.threads}, {spec.min_blocks})',
        f"{spec.entry}(const __grid_constant__ {spec.namespace}::{spec.params} params) {{",
        f"  {spec.namespace}::{spec.function}(params);",
        "}",
        "",
    )
    return "\n".join(lines)


_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def _inline(
    package: str, name: str, included_from: str | None, seen: set[str], lines: list[str]
) -> None:
    """Append file `name` to `lines`, its headers in place of their first ``#include``."""
    path = _path_in(package, name)
    try:
        text = _sources(package).joinpath(*name.split("/")).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        source = "" if included_from is None else f", which {included_from} includes,"
        raise CompilationError(
            f"{path}{source} is not in this installation; install cumla again"
        ) from None
    seen.add(name)
    lines.append(f'#line 1 "{path}"')
    for number, line in enumerate(text.split("\n"), start=1):
        if "#" not in line:
            lines.append(line)
            continue
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if _PRAGMA_ONCE.match(line) else line)
        elif include[1] in seen:
            lines.append("")
        else:
            _inline(_CUDA, include[1], path, seen, lines)
            lines.append(f'#line {number + 1} "{path}"')


# In order: raw string, string and character literals; numbers, because of their separators (1'000);
# and the two kinds of comment, of which // goes on after a backslash at the end of its line.
_TOKEN = re.compile(
    r"""(?P<keep>R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)"
          |"(?:[^"\\\n]|\\.)*"
          |'(?:[^'\\\n]|\\.)*'
          |\b\d(?:'?[\w.])*)
      |//(?:[^\\\n]|\\.)*
      |/\*.*?\*/""",
    re.VERBOSE | re.DOTALL,
)
_LINE = re.compile(r'#line (\d+) "([^"]*)"')


def strip_comments(text: str) -> str:
    """Take comments, ``#line`` directives, blank lines and spaces at line ends out of CUDA text.

    Literals are respected. Two texts that differ only in what was taken out give the same one.
    """
    bare = _TOKEN.sub(lambda token: token["keep"] or " ", text)
    lines = (line.rstrip() for line in bare.split("\n") if not _LINE.match(line))
    return "\n".join(line for line in lines if line)


_bare_body = lru_cache(maxsize=4)(strip_comments)  # 20 ms, the same for every kernel of a file


def digest(spec: KernelSpec, *, debug: bool = False) -> str:
    """Name what a compilation of `spec` depends on, whatever its comments say.

    It is the SHA-256, in hexadecimal, of the translation unit without its comments, and of the
    options.
    """
    text = f"{_bare_body(_body(spec, debug))}\n{strip_comments(_entry_point(spec))}"
    import hashlib

    return hashlib.sha256("\n".join([*OPTIONS, text]).encode()).hexdigest()


def cubin_name(spec: KernelSpec, *, debug: bool = False) -> str:
    """Name the file in ``CUMLA_CUBIN_DIR`` that holds `spec`, compiled from these sources."""
    return f"{spec.entry}-{digest(spec, debug=debug)}.cubin"


_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic |fatal )?error\b", re.MULTILINE)


def error_excerpt(text: str, log: str, *, around: int = 3, most: int = 5) -> str:
    """Show the source lines of a translation unit that a compiler's log complains about.

    These are numbered lines of the files that the first `most` errors are in, with `around` lines
    before and after each, the lines in error marked with ``>``; empty if the log names no line of
    the text.
    """
    files: dict[str, dict[int, str]] = {}
    name, number = "", 0
    for line in text.split("\n"):
        directive = _LINE.fullmatch(line)
        if directive is not None:
            number, name = int(directive[1]), directive[2]
        else:
            files.setdefault(name, {})[number] = line
            number += 1
    parts = []
    for name, where in list(dict.fromkeys(_ERROR.findall(log)))[:most]:
        lines, at = files.get(name, {}), int(where)
        if at in lines:
            near = (n for n in range(at - around, at + around + 1) if n in lines)
            shown = [f"{'>' if n == at else ' '}{n:5d} | {lines[n]}" for n in near]
            parts.append("\n".join([f"{name}:", *shown]))
    return "\n".join(parts)
