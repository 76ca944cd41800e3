# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m cumla COMMAND`, installed as `cumla` too.

A command is a module of this package with `add_parser(subparsers)`, which sets `func`, and
`run(args)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

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
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"cumla.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.func(args))
    except CumlaError as error:
        print(f"cumla {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
