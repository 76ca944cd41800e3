# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: the kernels' speed beside the ceilings of the GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cumla.cli.progress import ProgressBar

if TYPE_CHECKING:
    from cumla.bench.cases import Case

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the kernels against the ceilings of this GPU",
        description="Check each case of the dense table against float64, time it, and put it "
        "beside the ceilings of the same run and published times of other libraries.",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=(),
        metavar="PATTERN",
        help="only rows whose names match, e.g. 'b128-*-kv4096' 'b1-s1-h16-kv8192'; leaves "
        "schedule, host and start times out",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the dense rows there")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE.json",
        help="measure nothing: print such a file as the README's table",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0 if every result was right."""
    if args.markdown is not None:
        return _print_markdown(args.markdown)
    from cumla.bench import cases, report

    try:
        chosen = cases.select(args.rows)
    except ValueError as error:
        print(f"cumla bench: {error}", file=sys.stderr)
        return 1
    results = _measure(chosen, args.json)
    if args.csv is not None:
        args.csv.write_text(report.to_csv(results), encoding="utf-8")
    print(report.to_text(results))
    return 1 if any("failed" in row for row in results["rows"]) else 0


def _print_markdown(path: Path) -> int:
    from cumla.bench.report import to_markdown

    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"cumla bench: {path}: {error}", file=sys.stderr)
        return 1
    print(to_markdown(results), end="")
    return 0


def _measure(chosen: tuple[Case, ...], path: Path | None) -> dict[str, Any]:
    """Run the benchmark; what has been measured is in the file even if a later step fails."""
    from cumla.bench import run as bench

    began = perf_counter()
    results: dict[str, Any] = {}
    with ProgressBar("benchmark", bench.steps(chosen)) as bar:

        def note(line: str) -> None:
            bar.advance(note=line)
            if not sys.stderr.isatty():
                print(f"{perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

        for results in bench.run(chosen, note):
            if path is not None:
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results
