# SPDX-License-Identifier: Apache-2.0
"""Compilations, which take most of the time, in processes beside the tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

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


def compile_through_cupy(spec: KernelSpec) -> bytes:
    """Run what RawModule runs on an sm_90 GPU, from its options to the compiler, cold."""
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
        try:
            cupy._core.core.compile_with_cache(
                translation_unit(spec), options, prepend_cupy_headers=False, backend="nvrtc"
            )
        except _Compiled as compiled:
            return compiled.args[0]
        except compiler.CompileException as error:  # which cannot go from one process to another
            raise CompilationError(str(error)) from None
    raise AssertionError("CuPy made no cubin, or did not offer it to its cache")


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
