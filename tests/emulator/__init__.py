# SPDX-License-Identifier: Apache-2.0
"""Kernels run by the CPU: their own text, compiled by a C++ compiler, each thread a fiber.

What is written in PTX has a counterpart in instructions.hpp. Products and copies happen when they
are issued, blocks run one after the other: races between them are not seen, nor is time.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.core._dlpack import numpy_dtype
from cumla.core.arrays import open_call
from cumla.core.operation import Operation, checked_outputs
from cumla.launch.device import DeviceProperties
from cumla.launch.kernel import Launch
from cumla.launch.source import KernelSpec, translation_unit
from cumla.launch.tensor_map import TensorMap

__all__ = ["emulate", "emulated"]

GPU = DeviceProperties("NVIDIA Imaginary", (9, 0), 4, 232448, 50 << 20)  # few parts
HERE = Path(__file__).parent
SOURCES = Path(cumla.__file__).parent / "cuda"
_FUNCTION = re.compile(
    r"^__device__ __forceinline__ [^;{}]*?\) (?:const )?\{\n(?:(?!^\}).*\n)*?^\}", re.MULTILINE
)
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
_BYTES = {"UINT8": 1, "BFLOAT16": 2, "FLOAT16": 2, "FLOAT32": 4, "UINT32": 4, "UINT64": 8}


def emulate(launch: Launch) -> None:
    """Run a launch whose addresses are those of CPU memory."""
    values = [_map(v) if isinstance(v, TensorMap) else v for v in launch.values]
    parameters = launch.layout.pack(*values)
    buffer = ctypes.create_string_buffer(len(parameters) + 64)
    aligned = -ctypes.addressof(buffer) % 64 + ctypes.addressof(buffer)
    ctypes.memmove(aligned, parameters, len(parameters))
    run = _library(launch.spec).run
    run.restype = ctypes.c_char_p
    failure = run(ctypes.c_void_p(aligned), *launch.grid, launch.spec.threads).decode()
    assert not failure, f"{launch.spec.entry}: {failure}"


def emulated(operation: Operation[Any, Any], *call: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """Run an operation's launches on NumPy arrays: inputs, outputs and options as for `run`."""
    inputs, outputs, options = call
    opened = open_call(tuple(inputs.items()), tuple(outputs.items()))
    views = dict(zip((*inputs, *outputs), opened.views, strict=True))
    arguments = operation.arguments(views, options)
    returned = operation.outputs(arguments)
    given = checked_outputs(operation, returned, views, tuple(outputs))
    results, outs = [], []
    for output, view in zip(returned, given, strict=True):
        array = outputs[output.name]
        if array is None:
            array = poisoned(output.shape, numpy_dtype(output.dtypes[0]))
            view = open_call(((output.name, array),)).views[0]
        results.append(array)
        outs.append(view)
    with mock.patch("cumla.launch.device.properties", return_value=GPU):
        key = operation.key(arguments, 0)
    nbytes = operation.workspace_bytes(key)
    workspace = poisoned((nbytes + 256,), np.dtype(np.uint8))
    buffer = workspace.ctypes.data + -workspace.ctypes.data % 256
    for launch in operation.recipe(key, arguments, outs, buffer):
        emulate(launch)
    return tuple(results)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of 0xFF bytes, NaN as any float, at a multiple of 64 bytes."""
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(count + 64, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count].view(dtype).reshape(shape)


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
            text += re.sub("^#(include|pragma).*$", "", header.read_text("utf-8"), flags=re.MULTILINE)
    text = re.sub(r"^#line.*$|^#pragma unroll.*$", "", text, flags=re.MULTILINE)
    text = _FUNCTION.sub(lambda m: _declared(m[0]) if "asm" in m[0] else m[0], text)
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 static", text)
    text = _DYNAMIC.sub(r"unsigned char* const \1 = host::shared;", text)
    instructions = (HERE / "instructions.hpp").read_text("utf-8")
    names = {"ENTRY": f"{spec.namespace}::{spec.function}", "PARAMS": f"{spec.namespace}::{spec.params}"}
    for name, value in names.items():
        instructions = instructions.replace(name, value)
    using = f"using namespace cumla; using namespace {spec.namespace};\n"
    folder = Path(mkdtemp())
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    runtime = (HERE / "runtime.hpp").read_text("utf-8")
    source.write_text("\n".join([runtime, text, using, instructions]))
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    done = subprocess.run(
        [compiler, *options, "-o", library, source], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[:6000]
    return ctypes.CDLL(str(library))


def _declared(function: str) -> str:
    """Leave the body away."""
    return function[: function.index(") {\n") + 1] + ";"
