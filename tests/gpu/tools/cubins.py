# SPDX-License-Identifier: Apache-2.0
"""Machine code in the evidence: what compiles to the same cubins as before needs no run on a GPU.

    python -m tests.gpu.tools.cubins FOLDER FOLDER [--add] [--launches-of COMMIT]

Each FOLDER holds an NVRTC library with its builtins, one of every version of record.PINNED (wheels
nvidia-cuda-nvrtc-cu12 12.9.86 and nvidia-cuda-nvrtc 13.0.88, unpacked). Entry points whose sources
differ from the evidence are compiled with all of them; those whose machine code is equal are proven
by the same runs. With --add the machine code of entry points without any is written down. The
evidence of calls that launches.py has in addition is that of a commit at which the kernels were
proven.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

from cumla.launch.source import OPTIONS, KernelSpec, translation_unit
from tests.gpu.tools import digests, record


class Nvrtc:
    """An NVRTC library, loaded from a folder beside whichever the process has otherwise."""

    def __init__(self, folder: Path) -> None:
        for builtins in sorted(folder.rglob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        (path,) = (p for p in folder.rglob("libnvrtc.so.*") if "alt" not in p.name)
        self.library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def cubin(self, spec: KernelSpec) -> bytes:
        """Compile an entry point."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text, name = translation_unit(spec).encode(), f"{spec.entry}.cu".encode()
        self._call("CreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = (ctypes.c_char_p * len(OPTIONS))(*(o.encode() for o in OPTIONS))
            self._call("CompileProgram", program, len(OPTIONS), options)
            self._call("GetCUBINSize", program, ctypes.byref(size))
            cubin = ctypes.create_string_buffer(size.value)
            self._call("GetCUBIN", program, cubin)
            return cubin.raw
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, f"nvrtc{name}")(*arguments):
            raise RuntimeError(f"nvrtc{name} of NVRTC {self.version} failed with {status}")


# --- cubins --------------------------------------------------------------------------------------

_SYMBOL_FIRST = (0x0A, 0x11, 0x12, 0x2F)  # attributes that begin with a symbol's number
_LOAD, _UNIFORM_LOAD = 0xB82, 0xAB9  # LDC, which may add a register, and ULDC
_FORMS = (3, 5)  # of instructions with an operand in a constant bank
_ADDRESSES = 4  # the constant bank of addresses of variables
_ENTRY = 8  # bytes of one


class Cubin:
    """A cubin, without the names in it.

    NVRTC lists every constant of a text, used or not, by name and in the order of the text: a
    renamed or moved one changes the file, and not the machine code.
    """

    def __init__(self, file: bytes) -> None:
        (at,), (size, count, names) = (
            struct.unpack_from("<Q", file, 40),
            struct.unpack_from("<HHH", file, 58),
        )
        headers = [struct.unpack_from("<IIQQQQIIQQ", file, at + i * size) for i in range(count)]
        self.file, self.headers = file, headers
        self.names = [_string(file, headers[names][4] + header[0]) for header in headers]

    def contents(self, i: int) -> bytes:
        _, kind, _, _, at, size, *_ = self.headers[i]
        return b"" if kind == 8 else self.file[at : at + size]  # 8: has no bytes in the file

    def code(self) -> bytes:
        """What runs: instructions, registers, attributes, constants, sizes of shared memory."""
        found = []
        for i, name in enumerate(self.names):
            if name.startswith((".rela.text", ".rela.nv.global")) and self.contents(i):
                raise ValueError(f"{name}: what it points to is not known")
            flags, size, info = (self.headers[i][k] for k in (2, 5, 7))
            if name.startswith(".text."):
                text, used = self._text(self.contents(i))
                found += [name, flags, info >> 24, text, *used]
            elif name.startswith(".nv.info"):
                found += [name, *_attributes(self.contents(i))]
            elif name.startswith(".nv.constant") and name != f".nv.constant{_ADDRESSES}":
                found += [name, self.contents(i)]
            elif name.startswith(".nv.shared"):
                found += [name, size]
        return repr(found).encode()

    def _text(self, text: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
        """Instructions, without the places of addresses in their table; what lies at the addresses.

        An instruction of another kind that only looks as if it read the table counts as one.
        """
        table, words, used = self._table(), list(struct.unpack(f"<{len(text) // 8}Q", text)), []
        for i in range(0, len(words), 2):
            word = words[i]
            place, bank, kind = (word >> 40 & 0x3FFF) * 4, word >> 54 & 0x1F, word & 0xFFF
            if bank != _ADDRESSES or kind >> 9 not in _FORMS or place // _ENTRY >= len(table):
                continue
            if kind == _LOAD and word >> 24 & 0xFF != 0xFF:
                raise ValueError("an address is looked up by a number that is not known")
            used.append((i, table[place // _ENTRY]))
            if kind in (_LOAD, _UNIFORM_LOAD):
                words[i] = word & ~(0x3FFE << 40)  # its lowest bit: which half of an address
        return struct.pack(f"<{len(words)}Q", *words), used

    def _table(self) -> list[bytes]:
        """Return what the variables hold whose addresses are in the table."""
        if f".nv.constant{_ADDRESSES}" not in self.names:
            return []
        symbols = self.contents(self.names.index(".symtab"))
        found = [b""] * (
            len(self.contents(self.names.index(f".nv.constant{_ADDRESSES}"))) // _ENTRY
        )
        relocations = self.contents(self.names.index(f".rela.nv.constant{_ADDRESSES}"))
        for offset, info, addend in struct.iter_unpack("<QQq", relocations):
            _, _, _, section, value, size = struct.unpack_from(
                "<IBBHQQ", symbols, (info >> 32) * 24
            )
            held = self.contents(section)[value : value + size] or bytes(size)
            found[offset // _ENTRY] = held + addend.to_bytes(8, "little", signed=True)
        return found


def sections(file: bytes) -> dict[str, bytes]:
    """The contents of a cubin's sections by name."""
    cubin = Cubin(file)
    return {name: cubin.contents(i) for i, name in enumerate(cubin.names)}


def _string(file: bytes, at: int) -> str:
    return file[at : file.index(b"\0", at)].decode()


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of a kernel, without the numbers of its symbols."""
    at = 0
    while at < len(section):
        form, kind, value = struct.unpack_from("<BBH", section, at)
        size = value if form == 4 else 0
        content = section[at + 2 : at + 4 + size]
        first = 2 + 4 * (kind in _SYMBOL_FIRST)
        yield kind, content[:2] + content[first:]
        at += 4 + size


_here: Nvrtc


def _begin(folder: Path) -> None:
    global _here
    _here = Nvrtc(folder)


def _digest(spec: KernelSpec) -> tuple[str, str, str]:
    return spec.entry, _here.version, digest_of(_here.cubin(spec))


def digest_of(cubin: bytes) -> str:
    """The digest of a cubin's machine code."""
    return hashlib.sha256(Cubin(cubin).code()).hexdigest()


def cubins(specs: Iterable[KernelSpec], folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Digests of machine code, by entry point and NVRTC."""
    specs = tuple(specs)
    found: dict[str, dict[str, str]] = {}
    fresh = multiprocessing.get_context("spawn")  # one NVRTC a process
    for folder in folders if specs else ():
        with ProcessPoolExecutor(None, fresh, _begin, (folder,)) as pool:
            for entry, version, value in pool.map(_digest, specs):
                found.setdefault(entry, {})[version] = value
    return found


def restamp(
    stem: str, made: dict[str, dict[str, str]], folder: Path, sources: record.Sources
) -> None:
    """Give entry points of equal machine code the digests of their present sources."""
    kernel = record.read(folder, stem)
    for entry, source in sources.kernels[stem]["entries"].items():
        known = kernel.get("entries", {}).get(entry)
        if known is None or entry not in made:
            continue
        if absent := set(record.PINNED) - made[entry].keys():
            raise ValueError(
                f"{entry}: needs NVRTC {', '.join(record.PINNED)}, got none of {absent}"
            )
        pinned = {version: made[entry][version] for version in record.PINNED}
        if known["source"] == source:
            known["cubins"] = pinned
        elif known.get("cubins") == pinned:
            known["source"] = source
    if kernel:
        record.write(folder, stem, kernel)


_SAY = """
import json, sys
from tests.gpu.tools import digests
json.dump({stem: digests.subject(stem) for stem in digests.launchers()}, sys.stdout)
"""


def launches_of(commit: str) -> dict[str, Any]:
    """What is known of the kernels of a commit's package, with the launches of today's table."""
    command = ["git", "archive", commit, "cumla"]
    archive = subprocess.run(command, cwd=record.ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        where = os.pathsep.join((folder, str(record.ROOT)))
        told = subprocess.run(
            [sys.executable, "-c", _SAY],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": where},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def adopt(stem: str, then: dict[str, Any], folder: Path) -> None:
    """Take the launches of a commit's package, if that is what the evidence is about."""
    kernel = record.read(folder, stem)
    if not kernel:
        return
    sources = {entry: known["source"] for entry, known in kernel["entries"].items()}
    same = all(
        groups.items() <= then["launches"].get(entry, {}).items()
        for entry, groups in kernel["launches"].items()
    )
    if sources == then["entries"] and same:
        record.write(folder, stem, kernel | {"launches": then["launches"]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nvrtc", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--add", action="store_true", help="cubins of entry points without any")
    parser.add_argument("--launches-of", metavar="COMMIT", help="launches of its package")
    parser.add_argument("--evidence-dir", type=Path, default=record.FOLDER, metavar="FOLDER")
    args = parser.parse_args()
    folder = args.evidence_dir
    if args.launches_of:
        for stem, then in launches_of(args.launches_of).items():
            adopt(stem, then, folder)
    sources = record.Sources.now()
    wanted = []
    for stem, kernel in sources.kernels.items():
        known = record.read(folder, stem).get("entries", {})
        for spec in digests.specs(stem):
            entry = known.get(spec.entry, {})
            changed = entry.get("source") != kernel["entries"][spec.entry]
            if entry and (changed if "cubins" in entry else args.add and not changed):
                wanted.append(spec)
    made = cubins(wanted, args.nvrtc)
    for stem in sources.kernels:
        restamp(stem, made, folder, sources)
        for problem in record.problems(stem, folder, sources):
            print(f"{stem}: {problem}")
    print(f"{len(wanted)} entry points compiled with {len(args.nvrtc)} NVRTCs")


if __name__ == "__main__":
    main()
