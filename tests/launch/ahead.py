# SPDX-License-Identifier: Apache-2.0
"""Compilations, which take most of the time, in processes beside the tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest

from cumla.errors import CompilationError
from cumla.launch.module import CompiledKernel, compile_to_cubin
from cumla.launch.source import ADDED_BY_CUPY, OPTIONS, KernelSpec, translation_unit

_MOST_PROCESSES = 8

Way = Callable[[KernelSpec], Any]
"""A function of a module, which another process can import."""


class Ahead:
    """Each kernel compiled once each way, if possible before it is asked for.

    The processes go from the end of `calls` to its beginning, and what they have not begun is
    compiled where it is asked for: if that goes in order, all are busy until they meet.
    """

    def __init__(self, calls: Iterable[tuple[Way, KernelSpec]]) -> None:
        self._made: dict[tuple[Way, KernelSpec], Future[Any]] = {}
        self._pool = ProcessPoolExecutor(
            min(_MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 1)),
            multiprocessing.get_context("spawn"),  # which takes over no patch and no thread
        )
        for call in reversed(dict.fromkeys(calls)):
            self._made[call] = self._pool.submit(*call)

    def get(self, way: Way, spec: KernelSpec) -> Any:
        """Wait for a kernel, or compile it; what goes wrong is raised here."""
        future = self._made.get((way, spec))
        if future is None or future.cancel():
            made = way(spec)
            future = self._made[way, spec] = Future()
            future.set_result(made)
        return future.result()

    def stop(self) -> None:
        """Leave out what is not compiled yet."""
        self._pool.shutdown(cancel_futures=True)


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
    except cupy.cuda.compiler.CompileException as error:  # which no other process could read
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


WAYS: dict[str, Way] = {
    "compiled": compile_to_cubin,
    "compiled_for_debugging": compile_debug_build,
    "compiled_by_cupy": compile_through_cupy,
}
"""Named as the fixtures that give them."""


def calls_of(items: Iterable[pytest.Item]) -> Iterable[tuple[Way, KernelSpec]]:
    """List the compilations that tests will ask for, in their order."""
    for item in items:
        spec = item.callspec.params.get("spec") if hasattr(item, "callspec") else None
        for fixture, way in WAYS.items():
            if isinstance(spec, KernelSpec) and fixture in getattr(item, "fixturenames", ()):
                yield way, spec
