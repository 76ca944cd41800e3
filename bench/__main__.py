# SPDX-License-Identifier: Apache-2.0
"""Measures all sections of the benchmark, or some of them, on the current GPU.

python -m bench --only merge append
python -m bench --from records/h200.json --markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import report
from bench.run import NAMES, run, say, write
from cumla.bench.report import failures, to_csv, to_text
from cumla.bench.section import Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, and report; 0 if every result was right."""
    parser = argparse.ArgumentParser("python -m bench", description=(__doc__ or "").split(".")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--warm", action="store_true", help="leave the L2 cache as it is")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: read this file")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--csv", type=Path, help="write the rows there")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args(arguments)
    results: Row = {}
    if args.source is not None:
        results = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        for results in run(say, args.only, warm=args.warm):
            if args.json is not None:
                write(args.json, results)
    rows, draw = report.lines(results), report.to_markdown if args.markdown else to_text
    print(draw(report.parts(results)).rstrip())
    if args.csv is not None:
        args.csv.write_text(to_csv(rows), encoding="utf-8")
    return 1 if failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
