# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/kv-length-*.svg and roofline.svg: dense rows beside the ceilings of their run.

python docs/scripts/curves.py [RECORD.json] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from cumla.bench.cases import Case, Ceilings

ROOT = Path(__file__).resolve().parents[2]
Measured = dict[Case, dict[str, Any]]

# Dark enough on white, and told apart by readers who see red and green alike (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = "osD^vP"
_GRAY = "#666666"
_STYLE = {  # the same bytes for the same figure, text as text, and little else
    "svg.hashsalt": "cumla",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "ytick.minor.size": 0,
}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw results into SVG files.

    Parameters
    ----------
    results : dict
        A recorded run, or what ``cumla bench --json`` wrote.
    folder : Path
        Made if it is not there.

    Returns
    -------
    list of Path
        The files.
    """
    measured = {Case.from_json(row): row for row in results["rows"] if "us" in row}
    ceilings = Ceilings.from_json(results["ceilings"])
    title = f"{results['machine']['gpu']}, cumla {results['machine']['cumla']}"
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        figures = {"roofline": _roofline(measured, ceilings, title)}
        for name, curves in _families(measured).items():
            figures[f"kv-length-{name}"] = _over_kv_length(curves, ceilings, title)
        return [_save(figure, folder / f"{name}.svg") for name, figure in figures.items()]


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    return path


def _families(measured: Measured) -> dict[str, list[Measured]]:
    """Group cases by all but heads and kv length, then by heads: a figure, and its curves."""
    families: dict[str, dict[int, Measured]] = {}
    for case in sorted(measured, key=lambda case: (case.heads, case.kv_len)):
        shape = f"-h{case.heads}-kv{case.kv_len}"
        family = families.setdefault(case.name.replace(shape, ""), {})
        family.setdefault(case.heads, {})[case] = measured[case]
    return {
        name: list(curves.values())
        for name, curves in families.items()
        if any(len(curve) > 1 for curve in curves.values())
    }


def _over_kv_length(curves: Sequence[Measured], ceilings: Ceilings, title: str) -> Figure:
    """Time and efficiency over the kv length, a curve for each number of heads."""
    figure = _figure(9.5, 4.2)
    time, efficiency = figure.subplots(1, 2)
    any_case = next(iter(curves[0]))
    for curve, color, marker in zip(curves, _COLORS * 9, _MARKERS * 9, strict=False):
        lengths = [case.kv_len for case in curve]
        style = {"color": color, "marker": marker, "markersize": 4}
        heads = f"{next(iter(curve)).heads} heads"
        time.plot(lengths, [row["us"] for row in curve.values()], label=heads, **style)
        for line, floor in ((":", Case.memory_us), ("--", Case.arithmetic_us)):
            floors = [floor(case, ceilings) for case in curve]
            time.plot(lengths, floors, line, color=color, linewidth=1)
        shares = [row["efficiency"] for row in curve.values()]
        efficiency.plot(lengths, shares, label=heads, **style)
    time.plot([], [], ":", color=_GRAY, label="bytes at the read ceiling")
    time.plot([], [], "--", color=_GRAY, label="operations at the matrix-product ceiling")
    efficiency.axhline(1.0, color=_GRAY, linewidth=1)
    best = max(row["efficiency"] for curve in curves for row in curve.values())
    efficiency.set_ylim(0.0, max(1.1, 1.05 * best))  # the matrix product is no wall
    time.set_yscale("log")
    time.minorticks_off()
    for axes, name in ((time, "time of a call, us"), (efficiency, "efficiency: floor / time")):
        _length_axis(axes, sorted({case.kv_len for curve in curves for case in curve}))
        axes.set_ylabel(name)
    _legend_below(figure, time, columns=5)
    figure.suptitle(f"{title}: {_words(any_case)}", fontsize=10)
    return figure


def _legend_below(figure: Figure, axes: Any, columns: int) -> None:
    """Explain the lines of these axes below the figure, where it covers none."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def _words(case: Case) -> str:
    """Describe what the curves of a figure have in common."""
    ragged = "" if case.seed is None else f", log-normal lengths (seed {case.seed})"
    several = f", {case.kv_heads} kv heads" if case.kv_heads > 1 else ""
    return f"batch {case.batch}, q_len {case.q_len}, {case.dtype}{several}{ragged}"


def _length_axis(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
    axes.set_xlabel("kv length, tokens of a request")
    axes.grid(alpha=0.3)


def _roofline(measured: Measured, ceilings: Ceilings, title: str) -> Figure:
    """Operations a second over operations a byte, below what memory and tensor cores allow."""
    figure = _figure(6.4, 4.4)
    axes = figure.subplots()
    ridge = ceilings.matmul_tflops * 1e3 / ceilings.read_gbps
    intensities = [case.flops / case.nbytes for case in measured] or [ridge]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    roof = [low * ceilings.read_gbps / 1e3, ceilings.matmul_tflops, ceilings.matmul_tflops]
    axes.plot([low, ridge, high], roof, color=_GRAY, label="read and matrix-product ceilings")
    kinds = sorted({(case.heads, case.q_len) for case in measured})
    for (heads, q_len), color, marker in zip(kinds, _COLORS * 9, _MARKERS * 9, strict=False):
        points = [
            (case.flops / case.nbytes, row["tflops"])
            for case, row in measured.items()
            if (case.heads, case.q_len) == (heads, q_len)
        ]
        x, y = zip(*points, strict=True)
        name = f"{heads} heads, q_len {q_len}"
        axes.plot(x, y, marker, color=color, markersize=5, alpha=0.8, label=name)
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    _legend_below(figure, axes, columns=3)
    axes.set_title(title, fontsize=10)
    return figure


def main() -> None:
    """Draw the figures of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, nargs="?", default=ROOT / "records/h200.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/figures")
    arguments = parser.parse_args()
    draw(json.loads(arguments.record.read_text(encoding="utf-8")), arguments.output)


if __name__ == "__main__":
    main()
