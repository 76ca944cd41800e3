# SPDX-License-Identifier: Apache-2.0
"""Measures cumla beside other libraries on the current GPU, in turns, into one record.

    python -m bench records/performance.json
    python -m bench /tmp/some.json --only dense fp8 --rows '*b128*'
    python -m bench --tiny                  # no GPU: every case small, on the CPU, checked

A file that has some rows already gets the others; the exit status is 3 if the GPU's context was
lost: the same command goes on after the row that lost it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from bench.case import Section
from bench.lab import Lab
from bench.measure import ROUNDS, Lost, check
from bench.record import record
from bench.sections import SECTIONS

LOST = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 if all that ran was right."""
    parser = argparse.ArgumentParser(
        "python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("file", nargs="?", type=Path, help="the record")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="SECTION",
                        help=", ".join(names))  # fmt: skip
    parser.add_argument("--except", nargs="+", choices=names, default=[], dest="without",
                        metavar="SECTION")  # fmt: skip
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="of 'SECTION ROW', as printed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--row-seconds", type=float, default=120.0, help="for one row")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return not args.rows or any(fnmatchcase(name, pattern) for pattern in args.rows)

    chosen = tuple(
        section
        for section in SECTIONS
        if section.name in (args.only or names) and section.name not in args.without
    )
    if args.tiny:
        return _tiny(chosen, wanted)
    if args.file is None:
        parser.error("name the file of the record")
    options = {"seconds": args.seconds, "row_seconds": args.row_seconds, "rounds": args.rounds}
    try:
        content = record(args.file, _say, sections=chosen, rows=wanted, **options)
    except Lost as lost:
        _say(f"the GPU's context is lost: {lost}")
        return LOST
    return 1 if any("failed" in row for rows in content["sections"].values() for row in rows) else 0


def _tiny(sections: Sequence[Section], wanted: Callable[[str], bool]) -> int:
    lab = Lab(tiny=True)
    for section in sections:
        for shape in section.shapes:
            name = f"{section.name} {section.label(shape)}"
            if wanted(name):
                case = section.build(lab, **shape)
                _say(f"{name}: error {check(case, case.run(), case.limit, name):.0e}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
