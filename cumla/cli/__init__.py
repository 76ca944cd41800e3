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
    """Run one command, of the process's arguments by default; the exit code.

    It is 0, or what the command returned, or 1 after an error that the command line explains by
    itself.
    """
    parser = argparse.ArgumentParser(
        prog="cumla",
        description="Attention kernels for Hopper GPUs: MLA, MHA and GQA, DeepSeek's indexer.",
    )
    parser.add_argument("--version", action="version", version=f"cumla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"cumla.cli.{name}").add_parser(subparsers)
    command = "cumla"
    try:
        args = parser.parse_args(argv)
        command = f"cumla {args.command}"
        code = int(args.func(args))
        _flush()
        return code
    except SystemExit:  # after --help, or a mistake in the arguments
        _flush()
        raise
    except BrokenPipeError:  # the reader of `cumla info | head -1` has what it wanted
        _discard_output()
        return 1
    except (CumlaError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        _discard_output()
        return 1
    except KeyboardInterrupt:
        return 130


def positive(text: str) -> int:
    """Read an argument that is a whole number from 1."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"needs a whole number from 1, got {text!r}")
    return int(text)


def _flush() -> None:
    if sys.stdout is not None:  # it is, where the process was started with it closed
        sys.stdout.flush()


def _discard_output() -> None:
    """Have the interpreter not try again to write what a closed pipe or a full disk refused."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
