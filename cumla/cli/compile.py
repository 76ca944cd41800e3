# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla compile``: every kernel for sm_90a, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cumla.cli import positive
from cumla.errors import CompilationError, MissingDependencyError

if TYPE_CHECKING:
    from cumla.launch.module import CompiledKernel
    from cumla.launch.source import KernelSpec

_COLUMNS = "{:<36} {:>7} {:>9} {:>12} {:>6} {:>6} {:>8} {:>7}"
_TITLES = ("kernel", "threads", "registers", "shared", "stack", "spills", "cubin KB", "seconds")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "compile",
        help="compile every kernel for sm_90a; needs NVRTC, no GPU",
        description="Compile every kernel for sm_90a and show what it uses. Fails on register "
        "spills, stack frames and the C75xx remarks of ptxas (serialised wgmma, ignored "
        "setmaxnreg).",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write the cubins there; CUMLA_CUBIN_DIR=DIR then starts without compiling",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that compile (default: one for each core, here %(default)s)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compile all kernels, print a table; 0 if every kernel is clean, else 1."""
    from cumla.launch import all_specs
    from cumla.launch.module import bindings_nvrtc_version
    from cumla.launch.source import debug_build

    debug = debug_build()
    try:
        major, minor = bindings_nvrtc_version()
        if args.output is not None:
            _make_folder(args.output)
        print(f"NVRTC {major}.{minor}, sm_90a{', debug build' if debug else ''}")
        print(_COLUMNS.format(*_TITLES), flush=True)
        specs = all_specs()
        clean = sum(_report(made, args.output) for made in _compile_all(specs, debug, args.jobs))
    except MissingDependencyError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # of stdout, which the command line knows what to do with
        raise
    except OSError as error:
        print(f"cumla compile: --output {args.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{clean} of {len(specs)} kernels clean")
    if clean and args.output is not None:
        print(f"cubins are in {args.output}: set CUMLA_CUBIN_DIR={args.output.resolve()}")
    return 0 if clean == len(specs) else 1


def _make_folder(folder: Path) -> None:
    """Make the folder, which nobody else may write to: its cubins run on the GPU as they are."""
    from cumla.launch.module import why_shared

    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    problem = why_shared(folder)  # by which the loader would refuse it
    if problem is not None:
        raise PermissionError(errno.EPERM, f"{problem}, or name another folder")


class _Made(NamedTuple):
    """The result of compiling a kernel: one of `kernel` and `error`, and the seconds."""

    spec: KernelSpec
    name: str
    seconds: float
    kernel: CompiledKernel | None = None
    error: CompilationError | None = None


def _compile_all(specs: Iterable[KernelSpec], debug: bool, jobs: int) -> Iterator[_Made]:
    """Compile in `jobs` processes; results come in the order of the kernels."""
    compile_ = partial(_compile_one, debug=debug)
    if jobs == 1:
        yield from map(compile_, specs)
        return
    # spawn: a fork would take over the threads and locks of a program that called `main`
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(compile_, specs)
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_one(spec: KernelSpec, *, debug: bool) -> _Made:
    from cumla.launch.module import compile_to_cubin
    from cumla.launch.source import cubin_name

    began = time.perf_counter()
    kernel = error = None
    try:
        kernel = compile_to_cubin(spec, debug=debug)
    except CompilationError as failure:
        error = failure
    seconds = time.perf_counter() - began
    return _Made(spec, cubin_name(spec, debug=debug), seconds, kernel, error)


def _report(made: _Made, output: Path | None) -> bool:
    """Print a row, write the cubin; False if the kernel is not clean."""
    from cumla.launch.module import write_whole

    spec, kernel = made.spec, made.kernel
    if kernel is None:
        print(f"{spec.entry:<36} FAILED", flush=True)
        print(made.error, file=sys.stderr, flush=True)
        return False
    row = (
        spec.entry,
        spec.threads,
        kernel.registers,
        kernel.smem,
        kernel.stack,
        kernel.spills,
        f"{len(kernel.cubin) / 1000:.1f}",
        f"{made.seconds:.2f}",
    )
    print(_COLUMNS.format(*row), flush=True)
    if output is not None:
        write_whole(output / made.name, kernel.cubin)
    return True
