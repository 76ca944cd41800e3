# SPDX-License-Identifier: Apache-2.0
"""Results as tables: for the terminal, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from cumla.bench.dense import SECTION
from cumla.bench.section import Row

Table = list[list[str]]
Part = str | Table

_L2 = {"cold": "full of other data", "warm": "as the call before has left it"}


def parts(results: Row) -> list[Part]:
    """List the lines of a report and its table, the last of them how to read it."""
    rows = results["rows"]
    return [*head(results), SECTION.table(results), *failures(rows), f"{how(results)}."]


def head(results: Row) -> list[Part]:
    """Say what ran, and what the GPU can do at best."""
    return [_machine_line(results), _ceilings_line(results)]


def how(results: Row) -> str:
    """Say how to read the table, without a full stop."""
    return (
        f"Times: single calls with an L2 cache {_L2[results.get('l2', 'cold')]}; graph us: a call "
        "among many, back to back in a CUDA graph; efficiency: the time that bytes or operations "
        "need at the ceilings, divided by ours"
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """List what is wrong with rows that are."""
    return [row["failed"] for row in rows if "failed" in row]


def to_text(parts: Sequence[Part]) -> str:
    """Print a report for the terminal."""
    return "\n\n".join(part if isinstance(part, str) else _aligned(part) for part in parts)


def to_csv(rows: Sequence[Row]) -> str:
    """Print rows for a spreadsheet, without what is nested in them."""
    columns = {
        key: None
        for row in rows
        for key, value in row.items()
        if not isinstance(value, (dict, list))
    }
    file = io.StringIO()
    writer = csv.DictWriter(file, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _machine_line(results: Row) -> str:
    machine = results["machine"]
    known = (
        f"{machine['gpu']} ({machine['sm_count']} SMs)",
        f"driver {machine['driver']}",
        machine["cupy"],
        f"NVRTC {machine['nvrtc']}",
        f"cumla {machine['cumla']}",
        results["date"][:10],
    )
    return ", ".join(known)


def _ceilings_line(results: Row) -> str:
    ceilings = results["ceilings"]
    sustained = ceilings.get("bf16_sustained_TFLOPs")  # earlier files have none
    long = f" (sustained, repeated for 1.5 s: {sustained:.0f})" if sustained else ""
    fp8 = ""
    if ceilings.get("fp8_matmul_TFLOPs"):
        how = " (scaled from that of bfloat16, not measured)" if ceilings.get("fp8_scaled") else ""
        fp8 = f", float8_e4m3fn {ceilings['fp8_matmul_TFLOPs']:.0f} TFLOP/s{how}"
    return (
        f"Ceilings of this run: read {ceilings['read_GBps']:.0f} GB/s, copy "
        f"{ceilings['copy_GBps']:.0f} GB/s, bfloat16 8192^3 matrix product "
        f"{ceilings['bf16_matmul_TFLOPs']:.0f} TFLOP/s{long}{fp8}, an empty kernel "
        f"{ceilings['empty_kernel_us']:.1f} us"
    )


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.rjust, cells, widths)) for cells in table)
    return "\n".join(line.rstrip() for line in lines)
