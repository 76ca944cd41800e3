# SPDX-License-Identifier: Apache-2.0
"""Kernels run by the CPU: their own text, compiled by a C++ compiler, each thread a fiber.

What is written in PTX has a counterpart in instructions.hpp. runtime.cpp runs the threads, and is
compiled once for all kernels. Products and copies happen when they are issued, blocks run one after
the other: races between them are not seen, nor is time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.core import _cupy, _driver, frameworks
from cumla.core._dlpack import ArrayView, numpy_dtype
from cumla.core.operation import Address, Ready
from cumla.launch import device, module
from cumla.launch.blocks import block_attention_few
from cumla.launch.device import DeviceProperties
from cumla.launch.kernel import Launch
from cumla.launch.module import write_whole
from cumla.launch.source import KernelSpec, translation_unit
from cumla.launch.tensor_map import TensorMap
from tests import selection
from tests.fake_cuda import FakeDriver
from tests.gpu.tools import digests, record
from tests.sources import sources

__all__ = ["CuPy", "emulate", "emulated_gpu"]

HERE = Path(__file__).parent
# Families whose kernels the tests of a folder launch, beside SHARED: they are left out by these.
SHARED = ("split", "merge_states")
FAMILIES = {
    "mla": ("mla",),
    "mha": ("mha",),
    "indexer": ("indexer",),
    "sparse": ("sparse", "indexer"),
    "blocks": ("blocks", "mha", "sparse"),
}
# Calls of each family whose kernels a C++ compiler compiles soon; nine tenths of the instructions.
ALWAYS = tuple(
    f"tests/emulator/test_kernels.py::test_kernels_on_the_cpu[{call}]"
    for call in (
        *("few_queries", "ragged_queries", "fp8_cache", "few_rows", "merges"),
        *("rows_into_caches", "rows_into_v4", "logits", "selection"),
    )
)
COMPILED = HERE.parents[1] / ".pytest_cache" / "emulator"
SOURCES = Path(cumla.__file__).parent / "cuda"
_FUNCTION = re.compile(
    r"^__device__ __forceinline__ [^;{}]*?\) (?:const )?\{\n(?:(?!^\}).*\n)*?^\}", re.MULTILINE
)
_ASM = re.compile(r"\basm\b|\bCUMLA_WGMMA")  # or what is written with the macro
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
_BYTES = {"UINT8": 1, "BFLOAT16": 2, "FLOAT16": 2, "FLOAT32": 4, "UINT32": 4, "UINT64": 8}


def emulate(launch: Launch) -> None:
    """Run a launch whose addresses are those of CPU memory."""
    home, known = _home(launch.spec.stem), FAMILIES.get(_folder(_current_test()))
    assert known is None or home in (*known, *SHARED), f"FAMILIES of this folder lack {home}"
    values = [_map(v) if isinstance(v, TensorMap) else v for v in launch.values]
    parameters = launch.layout.pack(*values)
    buffer = ctypes.create_string_buffer(len(parameters) + 64)
    aligned = -ctypes.addressof(buffer) % 64 + ctypes.addressof(buffer)
    ctypes.memmove(aligned, parameters, len(parameters))
    run = _library(launch.spec).run
    run.restype = ctypes.c_char_p
    failure = run(
        ctypes.c_void_p(aligned), *launch.grid, launch.spec.threads, launch.cluster
    ).decode()
    assert not failure, f"{launch.spec.entry}: {failure}"


class Array(np.ndarray):
    """A NumPy array that stands for CuPy's: cumla takes it for one on GPU 0."""

    def get(self) -> np.ndarray[Any, Any]:
        """Copy to the host."""
        return np.array(self)


class CuPy:
    """The little of CuPy that tests use."""

    uint8, uint16, uint32, float32 = np.uint8, np.uint16, np.uint32, np.float32
    ndarray = Array

    @staticmethod
    def empty(shape: Any, dtype: Any = np.float32) -> Any:
        """An array of 0xFF bytes, NaN as any float, at a multiple of 256 bytes."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(count + 256, 0xFF, np.uint8)
        begin = -memory.ctypes.data % 256
        return memory[begin : begin + count].view(dtype).reshape(shape).view(Array)

    def zeros(self, shape: Any, dtype: Any = np.float32) -> Any:
        """An array of zeros."""
        return self.asarray(np.zeros(shape, dtype))

    def asarray(self, array: Any) -> Any:
        """Copy to the GPU."""
        there = self.empty(array.shape, array.dtype)
        there[...] = array
        return there

    def like(self, value: Any) -> Any:
        """Copy an array of the host with its strides, the gaps between its rows included."""
        if not isinstance(value, np.ndarray):
            return value
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        memory = self.empty(owner.nbytes, np.uint8)
        memory[...] = np.ascontiguousarray(owner).reshape(-1).view(np.uint8)
        offset = value.ctypes.data - owner.ctypes.data
        return np.ndarray(value.shape, value.dtype, memory, offset, value.strides).view(Array)


class _Emulated(frameworks.Allocator):
    """Arrays of the class above: CuPy's, as far as cumla can tell."""

    name = "cupy"
    serves_capture = True

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        return [view and view._replace(device=0) for view in frameworks.NUMPY.views(named)]

    def current_stream(self, device: int) -> int:
        return 0

    def empty(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int
    ) -> tuple[object, ArrayView]:
        array = CuPy.empty(shape, numpy_dtype(dtype))
        (view,) = self.views((("", array),))
        assert view is not None
        return array, view

    def dtype(self, name: str) -> np.dtype[Any]:
        return numpy_dtype(name)


class _Template(NamedTuple):
    """A launch that runs here."""

    launch: Launch

    def bound(self, addresses: Mapping[str, int]) -> _Template:
        def moved(value: Any) -> Any:
            if isinstance(value, TensorMap):
                return value._replace(ptr=moved(value.ptr))
            if isinstance(value, Address) and value.argument in addresses:
                return addresses[value.argument] + value.addend
            return value

        return _Template(self.launch._replace(values=tuple(map(moved, self.launch.values))))

    def at(self, addresses: Mapping[str, int], stream: int) -> Callable[[], None]:
        launch = self.bound(addresses).launch
        return lambda: emulate(launch)


@cache
def passed_on_a_gpu(stem: str) -> bool:
    """Whether a kernel passed its tests there, with its launcher and the host code as they are."""
    problems = record.problems(stem, record.FOLDER, sources())
    return all(record.SANITIZER in problem for problem in problems)


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def _folder(test: str) -> str:
    return Path(test.partition("::")[0]).parent.name


def _home(stem: str) -> str:
    """Name the family of a kernel's launcher."""
    return digests.launchers()[stem].__name__.split(".")[2]


def kernels_of(test: str) -> Iterable[str]:
    """Tell which kernels a test is about: those that it may launch.

    A module of a kernel's name is about that one, and any of a family's folder about the family.
    """
    kernels, stem = sources().kernels, Path(test.partition("::")[0]).stem.removeprefix("test_")
    if stem in kernels:
        return (stem,)
    known = FAMILIES.get(_folder(test))
    return [k for k in kernels if known is None or _home(k) in (*known, *SHARED)]


def is_left_out(test: str) -> bool:
    """Tell which tests need not emulate: those whose kernels all passed on a GPU.

    Those of ALWAYS emulate anyway: the emulator is tested, too.
    """
    if selection.exhaustive is not False or test.startswith(ALWAYS):
        return False
    return all(map(passed_on_a_gpu, kernels_of(test)))


@contextlib.contextmanager
def emulated_gpu(multiprocessors: int = 4, *, always: bool = False) -> Iterator[CuPy]:
    """Let cumla take arrays of this module's CuPy for a GPU's, on which it launches kernels.

    `always`: also in a test that could be left out, because it runs few of them.
    """
    test = _current_test()
    if test and not always and is_left_out(test):
        pytest.skip("its kernels ran on a GPU as they are: --exhaustive emulates them here")
    gpu = DeviceProperties("emulated", (9, 0), multiprocessors, 232448, 50 << 20)
    real = {"properties": device.properties, "load": module.load, "driver": _driver.driver}
    put = {"properties": lambda ordinal: gpu, "load": lambda *a, **o: None, "driver": FakeDriver}
    real["current_device"] = _cupy.current_device  # which would import the real CuPy
    put["current_device"] = lambda: 0
    with contextlib.ExitStack() as stack:
        cupy = sys.modules.pop("cupy", None)  # another test's, without a GPU
        if cupy is not None:
            stack.callback(sys.modules.__setitem__, "cupy", cupy)
        for name, imported in [*sys.modules.items()]:
            for function, value in real.items():
                if name.startswith("cumla.") and getattr(imported, function, None) is value:
                    stack.enter_context(mock.patch.object(imported, function, put[function]))
        stack.enter_context(
            mock.patch.object(Launch, "template", lambda launch, *_: _Template(launch))
        )
        stack.enter_context(mock.patch.object(block_attention_few, "allow_clusters"))
        # Memory of one GPU's arrays may be that of another's later: no call is the same again.
        stack.enter_context(mock.patch.object(Ready, "get", return_value=None))
        known = {Array: _Emulated()}
        stack.enter_context(mock.patch.dict(frameworks.framework_of_type, known))
        yield CuPy()


def _map(wanted: TensorMap) -> bytes:
    """Pack what copy_box of runtime.hpp reads."""
    rank = len(wanted.sizes)
    size = _BYTES[wanted.kind]

    def padded(values: tuple[int, ...]) -> list[int]:
        return [*values, *[0] * (5 - rank)]

    return struct.pack(
        "<14q5h6x",
        *(wanted.ptr, rank, size, wanted.swizzle),
        *padded(wanted.sizes),
        *padded((size, *wanted.strides)),
        *padded(wanted.box),
    )


@cache
def _library(spec: KernelSpec) -> ctypes.CDLL:
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    text, _, _ = translation_unit(spec).partition('#line 1 "entry point')
    for header in sorted((SOURCES / "ptx").glob("*.cuh")):  # instructions.hpp is about all of them
        if f"ptx/{header.name}" not in text:
            text += re.sub(
                "^#(include|pragma).*$", "", header.read_text("utf-8"), flags=re.MULTILINE
            )
    text = re.sub(r"^#line.*$|^#pragma unroll.*$", "", text, flags=re.MULTILINE)
    text = _FUNCTION.sub(lambda m: _declared(m[0]) if _ASM.search(m[0]) else m[0], text)
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 static", text)
    text = _DYNAMIC.sub(r"unsigned char* const \1 = host::shared;", text)
    instructions = (HERE / "instructions.hpp").read_text("utf-8")
    names = {
        "ENTRY": f"{spec.namespace}::{spec.function}",
        "PARAMS": f"{spec.namespace}::{spec.params}",
    }
    for name, value in names.items():
        instructions = instructions.replace(name, value)
    using = f"using namespace cumla; using namespace {spec.namespace};\n"
    header, bodies = ((HERE / f"runtime.{end}").read_text("utf-8") for end in ("hpp", "cpp"))
    precompiled = _made([compiler, "-Og", "-x", "c++-header"], header, ".gch")
    include = ["-include", str(precompiled.with_suffix(""))]
    runtime = _made([compiler, "-O2", "-ftree-vectorize", "-c"], header + bodies, ".o")
    gold = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # in a fifth of the time
    begin = [compiler, "-Og", "-shared", *gold, str(runtime), *include]
    return ctypes.CDLL(str(_made(begin, "\n".join([text, using, instructions]), ".so")))


def _made(begin: list[str], text: str, suffix: str) -> Path:
    """Compile a text, unless it is done: what came of it, beside the text."""
    options = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
    command = [*begin, "-std=c++20", "-w", *options]
    name = hashlib.sha256("\n".join([*command, text]).encode()).hexdigest()
    source = COMPILED / f"{name}.cpp"
    made = Path(f"{source}{suffix}")
    COMPILED.mkdir(parents=True, exist_ok=True)
    with (COMPILED / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # while another process compiles the same
        if not made.exists():
            write_whole(source, text.encode())
            output = Path(mkdtemp()) / "made"
            done = subprocess.run(
                [*command, "-o", output, source], capture_output=True, text=True, check=False
            )
            assert not done.returncode, done.stderr[:6000]
            write_whole(made, output.read_bytes())
    return made


def _declared(function: str) -> str:
    """Leave the body away."""
    return function[: function.index(") {\n") + 1] + ";"
