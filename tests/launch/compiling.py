# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled once a session, whichever process asks first, and what CuPy asks NVRTC for."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cumla.errors import CompilationError
from cumla.launch import all_specs
from cumla.launch.module import CompiledKernel, compile_to_cubin
from cumla.launch.source import ADDED_BY_CUPY, OPTIONS, KernelSpec, cubin_name, translation_unit

FIRST_OF_FILES = {spec.stem: spec for spec in reversed(all_specs())}

SOME = [  # of each family, and of loads, products, schedules and conversions; soon compiled
    FIRST_OF_FILES[stem]
    for stem in (
        *("schedule", "mla_decode", "select_rows", "attention_simt", "quantize_fp8"),
        "paged_mqa_schedule",
    )
]
_ENTRIES = {spec.entry for spec in all_specs()}


def is_twin(spec: KernelSpec) -> bool:
    """Return whether the kernel is for float16 what another one is for bfloat16."""
    return "_float16" in spec.entry and spec.entry.replace("_float16", "_bfloat16") in _ENTRIES


of_some_files = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec in SOME else pytest.mark.exhaustive)
        for spec in all_specs()
    ],
    ids=lambda spec: spec.entry,
)
"""Some kernels; all of them with --exhaustive."""


def compile_once(folder: Path, way: Callable[[KernelSpec], Any], spec: KernelSpec) -> Any:
    """Compile a kernel one way, or read what another process of the session made of it."""
    path = folder / f"{way.__name__}-{cubin_name(spec)}"
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: who asks meanwhile waits
        file.seek(0)
        made = file.read()
        if not made:
            try:
                result = way(spec)
            except CompilationError as error:
                result = error
            made = pickle.dumps(result)
            file.write(made)
    result = pickle.loads(made)
    if isinstance(result, CompilationError):
        raise result
    return result


def compile_debug_build(spec: KernelSpec) -> CompiledKernel:
    return compile_to_cubin(spec, debug=True)


class _Compiled(Exception):
    """Carries a cubin out of CuPy before it loads it, which would need a GPU."""


class _NoCache:
    def load(self, name: str) -> None:
        return None

    def save(self, name: str, cubin: bytes, source: str) -> None:
        raise _Compiled(cubin)


class Asked(NamedTuple):
    """What CuPy gives to NVRTC for a kernel."""

    source: str
    headers: tuple[Any, ...]
    options: tuple[str, ...]
    method: str


class _Stopped(Exception):
    """Carries what NVRTC was asked for out of CuPy, in lieu of compiling it."""


def asked_by_cupy(spec: KernelSpec) -> Asked:
    """Stop what RawModule runs on an sm_90 GPU where it compiles the kernel."""
    import cupy

    text = translation_unit(spec)

    class Program(cupy.cuda.compiler._NVRTCProgram):  # type: ignore[misc]
        def __init__(self, src: Any, name: Any = "", headers: Any = (), *rest: Any, **named: Any):
            super().__init__(src, name, headers, *rest, **named)
            self.headers = headers

        def compile(self, options: Any = (), *rest: Any) -> Any:
            if spec.entry not in self.src:  # before the kernel CuPy asks for something of its own
                return super().compile(options, *rest)
            raise _Stopped(Asked(self.src, tuple(self.headers), tuple(options), self.method))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda.compiler, "_NVRTCProgram", Program)
        try:
            _run_cupy(text)
        except _Stopped as stopped:
            asked: Asked = stopped.args[0]
            return asked
    raise AssertionError("CuPy did not ask NVRTC for the kernel")


def compile_through_cupy(spec: KernelSpec) -> bytes:
    """Run what RawModule runs on an sm_90 GPU, from its options to the compiler, cold."""
    import cupy

    try:
        _run_cupy(translation_unit(spec))
    except _Compiled as compiled:
        cubin: bytes = compiled.args[0]
        return cubin
    except cupy.cuda.compiler.CompileException as error:
        raise CompilationError(str(error)) from None
    raise AssertionError("CuPy made no cubin, or did not offer it to its cache")


def _run_cupy(text: str) -> None:
    import cupy

    compiler = cupy.cuda.compiler
    options = tuple(option for option in OPTIONS if option not in ADDED_BY_CUPY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_kernel_cache_backend", _NoCache())
        patch.setattr(compiler, "_get_arch", lambda: "90")
        patch.setattr(
            compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin")
        )
        patch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
        cupy._core.core.compile_with_cache(
            text, options, prepend_cupy_headers=False, backend="nvrtc"
        )
