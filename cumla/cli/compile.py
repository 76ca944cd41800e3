# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla compile``: every kernel for sm_90a, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cumla.errors import CompilationError, MissingDependencyError

if TYPE_CHECKING:
    from cumla.launch.source import KernelSpec

_COLUMNS = "{:<28} {:>7} {:>9} {:>12} {:>6} {:>6} {:>8} {:>7}"
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
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compile all kernels, print a table; 0 if every kernel is clean, else 1."""
    from cumla.launch import all_specs
    from cumla.launch.module import bindings_nvrtc_version
    from cumla.launch.source import debug_build

    debug = debug_build()
    try:
        major, minor = bindings_nvrtc_version()
    except MissingDependencyError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"NVRTC {major}.{minor}, sm_90a{', debug build' if debug else ''}")
    print(_COLUMNS.format(*_TITLES))
    specs = all_specs()
    clean = sum(_compile_one(spec, args.output, debug=debug) for spec in specs)
    print(f"{clean} of {len(specs)} kernels clean")
    if clean and args.output is not None:
        print(f"cubins are in {args.output}: set CUMLA_CUBIN_DIR={args.output.resolve()}")
    return 0 if clean == len(specs) else 1


def _compile_one(spec: KernelSpec, output: Path | None, *, debug: bool) -> bool:
    """Compile, print a row, write the cubin; False if the kernel is not clean."""
    from cumla.launch.module import compile_to_cubin, write_whole
    from cumla.launch.source import cubin_name

    began = time.perf_counter()
    try:
        kernel = compile_to_cubin(spec, debug=debug)
    except CompilationError as error:
        print(f"{spec.entry:<28} FAILED")
        print(error, file=sys.stderr, flush=True)
        return False
    row = (
        spec.entry,
        spec.threads,
        kernel.registers,
        kernel.smem,
        kernel.stack,
        kernel.spills,
        f"{len(kernel.cubin) / 1000:.1f}",
        f"{time.perf_counter() - began:.2f}",
    )
    print(_COLUMNS.format(*row), flush=True)
    if output is not None:
        write_whole(output / cubin_name(spec, debug=debug), kernel.cubin)
    return True
