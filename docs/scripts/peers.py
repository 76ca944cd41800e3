# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/peers.svg: other libraries beside cumla, from a recorded run in turns.

python docs/scripts/peers.py [RECORD.json] [--output FILE.svg]
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
# Told apart by readers who see red and green alike (Okabe and Ito 2008).
PEERS = {
    "FlashMLA": ("FlashMLA", "#0072b2"),
    "FA3-MLA": ("FlashAttention-3", "#d55e00"),
    "FlashInfer": ("FlashInfer", "#009e73"),
}
_GRAY = "#666666"


def ratios(results: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Find each row's times of the peers, divided by cumla's time in turns with them.

    Parameters
    ----------
    results : dict
        A recorded run.

    Returns
    -------
    list of (row, {peer: ratio})
    """
    return [
        (row, {name: row["peers"][name]["x"] for name in PEERS if name in row["peers"]})
        for row in results["rows"]
    ]


def draw(results: dict[str, Any]) -> Figure:
    """Draw a group of bars for each row.

    Parameters
    ----------
    results : dict
        A recorded run.

    Returns
    -------
    Figure
    """
    rows = ratios(results)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots()
    width = 0.27
    for place, (name, (title, color)) in enumerate(PEERS.items()):
        heights = [found.get(name, 1.0) - 1.0 for _, found in rows]
        centers = [at + (place - 1) * width for at in range(len(rows))]
        axes.bar(centers, heights, width, bottom=1.0, color=color, label=title)
    axes.axhline(1.0, color="black", linewidth=1, label="cumla")
    axes.set_xticks(range(len(rows)), [_length(row["kv_len"]) for row, _ in rows], fontsize=8)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("time / cumla's time (bars begin at 1)")
    lowest = min(ratio for _, found in rows for ratio in found.values())
    axes.set_ylim(min(0.98, lowest - 0.02), None)
    axes.set_xlabel("cached tokens of a request")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _name_groups(axes, [row for row, _ in rows])
    machine = f"{results['machine']['gpu']}, {results['date'][:10]}"
    figure.suptitle(f"Dense MLA decoding, bfloat16, in turns on one GPU ({machine})", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _name_groups(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Write batch, heads and query length above the rows that share them."""
    begin = 0
    top = axes.get_ylim()[1]
    axes.set_ylim(None, top + 0.11 * (top - 1.0))
    for shape, members in groupby(rows, lambda row: (row["batch"], row["q_len"], row["heads"])):
        count = len(list(members))
        batch, q_len, heads = shape
        name = f"b{batch}\nh{heads}" + (f"\nq{q_len}" if q_len > 1 else "")
        center = begin + (count - 1) / 2
        axes.text(center, top, name, ha="center", va="center", fontsize=7, color=_GRAY)
        begin += count
        if begin < len(rows):
            axes.axvline(begin - 0.5, color=_GRAY, linewidth=0.5, alpha=0.6)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K"


def save(figure: Figure, path: Path) -> None:
    """Write the same bytes for the same figure, text as text.

    Parameters
    ----------
    figure : Figure
    path : Path
    """
    with rc_context({"svg.hashsalt": "cumla", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Draw the figure of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, nargs="?", default=ROOT / "records/h200-peers.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/figures/peers.svg")
    arguments = parser.parse_args()
    results = json.loads(arguments.record.read_text(encoding="utf-8"))
    save(draw(results), arguments.output)


if __name__ == "__main__":
    main()
