# SPDX-License-Identifier: Apache-2.0
"""Figures are drawn from results, those of version 0.1 included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cumla.bench.cases import Case, Ceilings
from tests.house.test_docs import RESULTS, load

pytest.importorskip("matplotlib")
curves_of = load("curves")


@pytest.fixture
def recorded() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_figures_of_the_whole_table(recorded: dict[str, Any], tmp_path: Path):
    files = curves_of.draw(recorded, tmp_path / "new")
    assert {file.name for file in files} >= {"kv-length-b128-s1.svg", "roofline.svg"}
    for file in files:
        assert file.read_text().count("</svg>") == 1
    text = (tmp_path / "new" / "kv-length-b128-s1.svg").read_text()
    for word in ("16 heads", "64 heads", "128 heads", "bytes at the read ceiling", "16384"):
        assert word in text
    assert "128 heads, q_len 2" in (tmp_path / "new" / "roofline.svg").read_text()


def test_the_legend_covers_no_line(recorded: dict[str, Any]):
    rows = {Case.from_json(row): row for row in recorded["rows"]}
    ceilings = Ceilings.from_json(recorded["ceilings"])
    figures = [curves_of._roofline(rows, ceilings, "")]
    figures += [
        curves_of._over_kv_length(of, ceilings, "") for of in curves_of._families(rows).values()
    ]
    for figure in figures:
        figure.canvas.draw()
        (legend,) = figure.legends
        for axes in figure.axes:
            assert axes.get_legend() is None
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_same_results_give_the_same_files(recorded: dict[str, Any], tmp_path: Path):
    recorded["rows"] = recorded["rows"][:4]  # one family
    first, second = (curves_of.draw(recorded, tmp_path / name) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_curves_and_ceilings(recorded: dict[str, Any]):
    rows = {Case.from_json(row): row for row in recorded["rows"]}
    ceilings = Ceilings.from_json(recorded["ceilings"])
    curves = curves_of._families(rows)["b128-s1"]
    time, efficiency = curves_of._over_kv_length(curves, ceilings, "").axes
    lines = {line.get_label(): line for line in time.lines}
    case = Case(128, 1, 64, 4096)
    at = list(lines["64 heads"].get_xdata()).index(4096)
    assert lines["64 heads"].get_ydata()[at] == rows[case]["us"]
    floors = [max(line.get_ydata()[at] for line in time.lines[4:6])]  # of the second curve
    assert floors == [pytest.approx(rows[case]["floor_us"])]
    shares = {line.get_label(): line for line in efficiency.lines}["64 heads"].get_ydata()
    assert shares[at] == rows[case]["efficiency"]


def test_variants_have_figures_of_their_own(recorded: dict[str, Any], tmp_path: Path):
    rows = recorded["rows"] = recorded["rows"][:2]
    rows += [row | {"dtype": "float16", "lengths": "lognormal:1"} for row in rows[:2]]
    rows.append({"batch": 3, "q_len": 1, "heads": 1, "kv_len": 64, "failed": "wrong"})
    names = [file.name for file in curves_of.draw(recorded, tmp_path)]
    assert "kv-length-b128-s1-float16-lognormal1.svg" in names


def test_failed_rows_alone_leave_the_roof(recorded: dict[str, Any], tmp_path: Path):
    recorded["rows"] = [row | {"failed": "wrong"} for row in recorded["rows"]]
    for row in recorded["rows"]:
        del row["us"]
    assert [file.name for file in curves_of.draw(recorded, tmp_path)] == ["roofline.svg"]
