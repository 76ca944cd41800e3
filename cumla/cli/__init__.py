# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m cumla COMMAND`, installed as `cumla` too.

A command is a module of this package with `add_parser(subparsers)`, which sets `func`, and
`run(args)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from cumla import __version__
from cumla.errors import CumlaError

COMMANDS = ("info", "demo", "bench", "compile")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; those of the process by default.

    Returns
    -------
    int
        The exit code: 0, or what the command returned, or 1 after an error that the command line
        explains by itself.
    """
    parser = argparse.ArgumentParser(
        prog="cumla", description="Multi-head latent attention kernels for Hopper GPUs."
    )
    parser.add_argument("--version", action="version", version=f"cumla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"cumla.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        code = int(args.func(args))
        print(end="", flush=True)  # which, unlike sys.stdout, is there if stdout was closed
        return code
    except CumlaError as error:
        print(f"cumla {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of `cumla info | head -1` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
