# SPDX-License-Identifier: Apache-2.0
"""All sections of the benchmark, and a run of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from bench.ceilings import measure
from bench.sections import append, forms, indexer, merge, mha, mla, sparse, sparse_v4, topk
from bench.sections.host import measure_host
from cumla.bench import run as base
from cumla.bench.gpu import Gpu
from cumla.bench.section import Note, Row, Section

__all__ = ["NAMES", "PROTOCOL", "SECTIONS", "run", "say", "write"]

PROTOCOL = base.PROTOCOL + (
    ". Batch-invariant: the plan's longest length at the "
    "longest request. Ragged queries: median of 3 behind one warm-up; efficiency: operations of "
    "visible pairs a second as a share of the matrix-product ceiling. Page sizes: all of them in "
    "turns, median of 3 turns of 10. FP8 caches: every format and bfloat16 in such turns, checked "
    "against float64 over what the quantised rows stand for; bytes: those of the format. Forms of "
    "the same work: those of a group in such turns, ratio: time / time of its first. Merging and "
    "writing into caches: some of what was written is checked against float64 first; bytes read "
    "and written, efficiency as a share of the copy ceiling; copy_us: a plain copy that reads and "
    "writes as many bytes, timed likewise; up to 256 MB graph_us: mean of the calls of a CUDA "
    "graph that moves 4 GiB and goes round 512 MiB of inputs and outputs, every set of which is "
    "checked afterwards, graph_copy_us: of plain copies, likewise. The indexer's logits: 64 heads "
    "of 128, float32, cleaned, inputs normal(0, 1) quantised, some rows checked against float64 "
    "first; bytes: each visible token's 132 once, the logits; the matrix-product ceiling is that "
    "of float8_e4m3fn. Sparse attention: bytes: each listed row once for each list, of a prefill "
    "each cached row once, queries, output, lists; top-k: scores once, indices; a step of a layer: "
    "logits, top-k and attention, floor: the sum of the three"
)

SECTIONS: tuple[Section, ...] = (
    *mla.SECTIONS,
    forms.SECTION,
    mha.SECTION,
    merge.SECTION,
    *append.SECTIONS,
    *indexer.SECTIONS,
    topk.SECTION,
    *sparse.SECTIONS,
    *sparse_v4.SECTIONS,
)
"""In the order in which they are measured and printed."""
NAMES = tuple(dict.fromkeys([*(section.name for section in SECTIONS), "host"]))
"""What can be measured alone: sections, and what a call costs the host."""


def run(note: Note, names: Collection[str] = NAMES, *, warm: bool = False) -> Iterator[Row]:
    """Measure what has these names, as `cumla.bench.run.run` does."""
    sections = tuple(section for section in SECTIONS if section.name in names)
    results: Row = {}
    for results in base.run(sections, note, warm=warm, limits=measure):
        results["protocol"] = PROTOCOL
        yield results
    if "host" in names:
        with Gpu() as gpu:
            measured = measure_host(gpu)
        results["notes"] += measured.pop("notes")
        note("host")
        yield results | measured


def say(line: str) -> None:
    """Tell what has been done."""
    print(line, file=sys.stderr, flush=True)


def write(file: Path, results: Row) -> None:
    """Write results so far."""
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
