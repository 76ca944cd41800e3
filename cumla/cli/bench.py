# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla bench``: the kernels' speed beside the ceilings of the GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cumla.cli import positive
from cumla.cli.progress import ProgressBar
from cumla.errors import MissingDependencyError, UnsupportedDeviceError

if TYPE_CHECKING:
    from cumla.bench.cases import Case

_GRID = {"batch": 128, "q_len": 1, "heads": 128, "kv_len": 4096}
"""Default values of the axes of a grid."""
_CASES = ("rows", *_GRID, "kv_heads", "dtype", "lengths")
"""Options that choose cases."""


class _UsageError(Exception):
    """Arguments do not fit together."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the kernels against the ceilings of this GPU",
        description="Check each case of dense decoding against float64, time it, and put it beside "
        "the ceilings of the same run. `python -m bench` in the repository measures all else.",
    )
    _add_cases(parser)
    _add_ways(parser)
    _add_outputs(parser)
    parser.set_defaults(func=run)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which cases")
    group.add_argument(
        "--rows",
        nargs="+",
        metavar="PATTERN",
        help="rows of the table whose names match, e.g. 'b128-*-kv4096' 'b1-s1-h16-kv8192'",
    )
    for name, default in _GRID.items():
        option = "--" + name.replace("_", "-")
        text = f"instead of the table a grid; {default} where other axes are given"
        group.add_argument(option, nargs="+", type=positive, metavar="N", help=text)
    group.add_argument("--kv-heads", nargs="+", type=positive, metavar="N", help="1 by default")
    group.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float16"), help="bfloat16 by default"
    )
    group.add_argument(
        "--lengths",
        nargs="+",
        metavar="KIND",
        help="equal (the default), or lognormal:SEED: ragged, with kv-len as their mean",
    )


def _add_ways(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--warm", action="store_true", help="leave the L2 cache as it is instead of emptying it"
    )
    group.add_argument(
        "--explain",
        action="store_true",
        help="measure nothing: say which kernel the library chooses for each case, and why",
    )
    group.add_argument(
        "--sm-count",
        type=positive,
        metavar="N",
        help="multiprocessors for --explain; by default those of the GPU, or of an H200",
    )
    group.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE.json",
        help="measure nothing: read what --json wrote",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")


def run(args: argparse.Namespace) -> int:
    """Measure or read, and report; 0 if every result was right."""
    try:
        if args.explain:
            if given := _given(args, ("warm", "source", "json", "csv")):
                raise _UsageError(f"{', '.join(given)}: --explain has no use for it; leave it out")
            _explain(_cases(args), args.sm_count)
            return 0
        if args.sm_count:
            raise _UsageError("--sm-count: needs --explain, got none; add it")
        source: Path | None = args.source
        given = _given(args, (*_CASES, "warm", "json"))
        if source and given:
            raise _UsageError(f"{', '.join(given)}: nothing is measured where a file is read")
        _check_outputs(args)
        results = _measure(args) if source is None else _read(source)
        return 1 if _report(args, results) and source is None else 0
    except _UsageError as error:
        print(f"cumla bench: {error}", file=sys.stderr)
        return 1
    except (MissingDependencyError, UnsupportedDeviceError) as error:
        print(f"cumla bench: {error}\n{_WITHOUT_GPU}", file=sys.stderr)
        return 1


_WITHOUT_GPU = """\
Measuring needs a Hopper GPU (compute capability 9.0), its driver, and cumla[cu12] or cumla[cu13]; \
`python -m cumla info` says what is here. Without them there is:
  python -m cumla bench --explain     # which kernel would be chosen, and why
  python -m cumla bench --from FILE   # what --json wrote elsewhere; the repository has records/
  python -m cumla demo                # attention by cumla.reference, each step checked"""


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """Choose dense cases: the table, rows of it or a grid, and variants of them."""
    from cumla.bench import cases

    axes = {name: getattr(args, name) for name in _GRID}
    try:
        if not any(axes.values()):
            chosen = cases.select(args.rows or ())
        elif args.rows:
            raise _UsageError("--rows chooses from the table: leave it out where a grid is given")
        else:
            chosen = cases.grid(*(axes[name] or [default] for name, default in _GRID.items()))
        seeds = [cases.seed_of(name) for name in args.lengths or ["equal"]]
        return cases.vary(chosen, args.kv_heads or [1], args.dtype or ["bfloat16"], seeds)
    except ValueError as error:
        raise _UsageError(str(error)) from error


def _given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """List the options of these names that were given, as they are written."""
    given = (name for name in names if getattr(args, name))
    return [f"--{'from' if name == 'source' else name.replace('_', '-')}" for name in given]


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what cannot be written, before anything is measured."""
    for name in ("json", "csv"):
        path: Path | None = getattr(args, name)
        if path is None:
            continue
        if not path.parent.is_dir():
            raise _UsageError(
                f"--{name}: needs a folder that exists, got {path} in {path.parent}, which does "
                f"not; make it first"
            )
        if path.is_dir():
            raise _UsageError(f"--{name}: needs a file, got {path}, which is a folder")


def _explain(chosen: tuple[Case, ...], sm_count: int | None) -> None:
    from cumla.bench.explain import explain, find_sm_count

    if sm_count is None:
        sm_count, origin = find_sm_count()
        print(f"{sm_count} multiprocessors ({origin})\n")
    for case in chosen:
        print(explain(case, sm_count))


def _read(path: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _UsageError(f"{path}: {error}") from error
    if not isinstance(results, dict) or not {"rows", "ceilings", "machine"} <= results.keys():
        raise _UsageError(
            f"{path}: needs results of a benchmark, with rows and ceilings, got another file; name "
            f"one that --json wrote"
        )
    return results


def _report(args: argparse.Namespace, results: dict[str, Any]) -> bool:
    """Print and write; true if a result was wrong."""
    from cumla.bench import report

    rows = results["rows"]
    print(report.to_text(report.parts(results)))
    if args.csv is not None:
        args.csv.write_text(report.to_csv(rows), encoding="utf-8")
    return bool(report.failures(rows))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; what has been measured is in the file even if a later step fails."""
    from cumla.bench import dense
    from cumla.bench import run as bench

    section = replace(dense.SECTION, cases=_cases(args))
    began = perf_counter()
    results: dict[str, Any] = {}
    with ProgressBar("benchmark", 1 + len(section.cases)) as bar:

        def note(line: str) -> None:
            bar.advance(note=line)
            if not sys.stderr.isatty():
                print(f"{perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

        for results in bench.run((section,), note, warm=args.warm):
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results
