# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of a record that is made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import page
from bench.figure import draw
from bench.sections import SECTIONS
from cumla.launch import all_specs
from cumla.launch.source import digest

DENSE, FP8, GQA = (
    next(section for section in SECTIONS if section.name == name)
    for name in ("dense", "fp8", "gqa")
)
CEILINGS = {
    "read_GBps": 4500.0,
    "copy_GBps": 4200.0,
    "bf16_matmul_TFLOPs": 800.0,
    "bf16_sustained_TFLOPs": 660.0,
    "fp8_matmul_TFLOPs": 1500.0,
    "empty_kernel_us": 3.1,
}


def timed(us: float, **of: Any) -> dict[str, Any]:
    return {"us": us, "us_low": us, "graph_us": us - 1, "host_us": 20.0, "error": 1e-3} | of


def row(section: Any, place: int = 0, us: float = 100.0, **peers: float) -> dict[str, Any]:
    found = {
        name.replace("_", "-"): timed(time, variant="", variants={}) for name, time in peers.items()
    }
    work = {"nbytes": 10**8, "flops": 10**9, "product": "bfloat16", "floor_us": 50.0}
    return dict(section.shapes[place]) | work | {"bound": "bytes"} | timed(us) | {"peers": found}


@pytest.fixture
def record() -> dict[str, Any]:
    spec = all_specs()[0]
    machine = dict.fromkeys(("gpu", "driver", "torch", "nvrtc", "cumla"), "some")
    sections = {section.name: [row(section, 0, 200.0)] for section in SECTIONS}
    sections["dense"] = [
        row(DENSE, 1, FlashMLA=98.0, FlashAttention_3=130.0),
        row(DENSE, 0, FlashMLA=120.0),
        dict(DENSE.shapes[2]) | {"failed": "CheckError: cumla is off"},
    ]
    return {
        "date": "2026-11-29T15:30:00+00:00",
        "machine": machine,
        "libraries": {"vllm": "0.33.0"},
        "ceilings": CEILINGS,
        "protocol": "In turns",
        "notes": ["FlashInfer did not run: because"],
        "kernels": {spec.entry: {"source": digest(spec)}},
        "sections": sections,
    }


def test_rows_are_in_the_order_of_the_section(record: dict[str, Any]) -> None:
    (section, rows), *_ = page.measured(record)
    assert section is DENSE
    assert [of["kv_len"] for of in rows] == [1024, 4096]


def test_a_table_marks_where_a_library_is_ahead(record: dict[str, Any]) -> None:
    (section, rows), *_ = page.measured(record)
    titles, _, first, second = page.table(section, rows).splitlines()
    assert titles == (
        "| requests | query tokens | heads | cached tokens | us | in a graph | rate | "
        "of the ceiling | FlashMLA, us | x | x in graphs | FlashAttention-3, us | x | x in graphs |"
    )
    assert first == (
        "| 128 | 1 | 128 | 1,024 | 100 | 99.0 | 1,000 GB/s | 50% | 120 | 1.20 | 1.20 | - | - | - |"
    )
    assert '| 98.0 | **0.98**{ style="color: #c62828" } | **0.98**{' in second


def test_columns_without_a_value_are_left_out() -> None:
    titles, *_ = page.table(GQA, [row(GQA)]).splitlines()
    assert "| form |" not in titles
    windows = next(i for i, shape in enumerate(GQA.shapes) if shape["more"])
    titles, *_ = page.table(GQA, [row(GQA), row(GQA, windows)]).splitlines()
    assert "| form |" in titles


def test_the_page_has_every_section_and_says_what_is_missing(record: dict[str, Any]) -> None:
    del record["sections"]["merges"]
    text = page.fill("{{ date }} {{ behind }} {{ sections }} {{ host }} {{ missing }}", record)
    for section in SECTIONS:
        assert f"## {section.title}\n" in text
    assert text.count("No row of it ran.") == 1
    assert "* FlashInfer did not run: because" in text
    assert '| Dense decoding | 2 | 1 | **0.98**{ style="color: #c62828" } (FlashMLA, ' in text
    assert f"![Dense decoding: other libraries]({page.FIGURES}/dense.svg)" in text
    assert "fp8.svg" not in text  # nobody ran beside it
    assert [path for path, _ in page.figures(record)] == [f"{page.FIGURES}/dense.svg"]


def test_every_word_of_the_page_is_known(record: dict[str, Any]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/performance.md").read_text("utf-8")
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == set(page.parts(record))
    assert "This is the source of a page" in text
    assert "source of a page" not in page.fill(text, record)


def test_a_figure_has_a_dot_for_each_library_and_marks_what_is_ahead(
    record: dict[str, Any],
) -> None:
    (section, rows), *_ = page.measured(record)
    svg = ElementTree.fromstring(page.figure(section, rows))
    names = "{http://www.w3.org/2000/svg}"
    dots = [of for of in svg.iter(f"{names}circle") if of.find(f"{names}title") is not None]
    said = [str(of.findtext(f"{names}title")) for of in dots]
    assert [line.rpartition(": ")[2] for line in said] == [
        "FlashMLA 1.20", "FlashMLA 0.98", "FlashAttention-3 1.30",
    ]  # fmt: skip
    one = next(of for of in svg.iter(f"{names}line") if of.get("stroke") == "#222222")
    at = [float(of.get("cx", 0)) for of in dots]
    assert at[1] < float(one.get("x1", 0)) < at[0] < at[2]
    bold = [
        of.text
        for of in svg.iter(f"{names}text")
        if of.get("font-weight") and of.get("text-anchor")
    ]
    assert bold == [section.label(page.shape_of(section, rows[1]))]


def test_a_figure_of_far_ratios_stays_inside() -> None:
    svg = ElementTree.fromstring(draw("A & B", [("x < y", [("P", 0.2), ("P", 30.0)])], {0: 2.4}))
    width = float(svg.get("width", 0))
    assert all(0 < float(of.get("cx", 0)) < width for of in svg.iter() if "cx" in of.attrib)


def test_the_readme_has_five_rows(record: dict[str, Any]) -> None:
    for section in SECTIONS:
        if section.name in ("dense", "gqa", "prefill", "sparse"):
            record["sections"][section.name] = [
                row(section, place, DeepGEMM=90.0) for place in range(len(section.shapes))
            ]
    before = "On one A\n\n| call |\n| old |\n\nmore\n"
    readme = page.with_readme_parts(before, record)
    assert page.with_readme_parts(readme, record) == readme
    assert readme.count("| 100 | 1,000 GB/s | 50% | DeepGEMM 0.90 |\n") == 5
    line = "On one some: `mla_decode`, 128 requests, 16 heads, 4,096 tokens: 100 us, 50% of "
    assert readme.startswith(line)
    assert readme.endswith("|\n\nmore\n")
    with pytest.raises(ValueError, match="nothing like"):
        page.with_readme_parts("empty", record)


def test_an_old_record_is_refused_with_the_way_out(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "performance.json"
    with pytest.raises(page.StaleRecordError, match="is not there; measure again: "):
        page.read(path)
    path.write_text(json.dumps(record))
    assert page.read(path) == record
    entry = next(iter(record["kernels"]))
    record["kernels"][entry] = {"source": "other"}
    path.write_text(json.dumps(record))
    with pytest.raises(
        page.StaleRecordError, match=f"older than the kernels: .* {entry} still .*\n.*compile"
    ):
        page.read(path)


def test_libraries_beside_a_baseline_are_counted(record: dict[str, Any]) -> None:
    """And the baseline, which is none, has a heading of its own."""
    blocks = next(section for section in SECTIONS if section.name == "blocks")
    record["sections"]["blocks"] = [
        row(blocks, 0, plain=90.0, vLLM=120.0),
        row(blocks, 1, plain=90.0, vLLM=80.0),
        row(blocks, 2, plain=90.0),
    ]
    line = next(
        line for line in page.behind(record).splitlines() if line.startswith(f"| {blocks.title}")
    )
    assert line.startswith(f"| {blocks.title} | 2 | 1 | ")
    assert "vLLM" in line
    rows = record["sections"]["blocks"]
    titles = page.table(blocks, rows).splitlines()[0]
    assert "| attention to these pages, us | x | x in graphs | vLLM, us |" in titles
    hosts = next(line for line in page.host(record).splitlines() if blocks.title in line)
    assert "vLLM 20" in hosts
    assert "plain" not in hosts
