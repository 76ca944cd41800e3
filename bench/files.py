# SPDX-License-Identifier: Apache-2.0
"""Files of records, and tables of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cumla.bench.report import Table
from cumla.bench.section import Row


def say(line: str) -> None:
    """Tell what has been done."""
    print(line, file=sys.stderr, flush=True)


def write(file: Path, results: Row) -> None:
    """Write results so far."""
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _is_figure(cell: str) -> bool:
    return cell.lstrip("*-")[:1].isdigit()


def piped(table: Table) -> str:
    """Draw a table for Markdown, its first line the headings; columns of words to the left."""
    titles, *rows = table
    columns = zip(*rows, strict=True) if rows else ([] for _ in titles)
    rule = ["---:" if any(map(_is_figure, cells)) else "---" for cells in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))
