# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and the README's rows, made from a record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import kernels
from bench.case import Section
from bench.figure import LEVEL, Dots, draw
from bench.files import piped
from bench.sections import SECTIONS
from cumla.bench.section import show_us

FIGURES = "figures/performance"
AGAIN = (
    "measure again: on a Hopper GPU, with the libraries that bench/README.md names, run\n"
    "  python -m cumla compile --output CUBINS; export CUMLA_CUBIN_DIR=$PWD/CUBINS\n"
    "  rm records/performance.json; python -m bench records/performance.json\n"
    "  python docs/scripts/performance.py"
)

Row = dict[str, Any]


class StaleRecordError(Exception):
    """The record is not about today's kernels."""


def read(path: Path) -> Row:
    """Read the record; `StaleRecordError` if it is not there or older than the kernels."""
    if not path.exists():
        raise StaleRecordError(f"{path.name} is not there; {AGAIN}")
    record: Row = json.loads(path.read_text("utf-8"))
    if changed := kernels.changed(record["kernels"]):
        names = ", ".join(changed[:5]) + (" and others" if len(changed) > 5 else "")
        raise StaleRecordError(
            f"{path.name} of {record['date'][:10]} is older than the kernels: the evidence does "
            f"not say that {names} still compile to the machine code that was measured; {AGAIN}"
        )
    return record


# --- rows -----------------------------------------------------------------------------------------


def measured(record: Row) -> Iterator[tuple[Section, list[Row]]]:
    """The sections that have rows, with those that did not fail."""
    for section in SECTIONS:
        rows = [row for row in record["sections"].get(section.name, ()) if "failed" not in row]
        order = {tuple(shape.values()): place for place, shape in enumerate(section.shapes)}
        known = [row for row in rows if _key(section, row) in order]
        if known:
            yield section, sorted(known, key=lambda row: order[_key(section, row)])


def _key(section: Section, row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in section.shapes[0])


def shape_of(section: Section, row: Row) -> dict[str, Any]:
    return {key: row[key] for key in section.shapes[0]}


def ratio(row: Row, peer: str, clock: str = "us") -> float | None:
    """A peer's time divided by cumla's in turns with it; above 1 cumla is faster."""
    own, other = row[clock], row["peers"].get(peer, {}).get(clock)
    return None if own is None or other is None else other / own


def peers_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row["peers"]))


def is_ahead(row: Row, peer: str) -> bool:
    """Return whether a peer is faster by either clock."""
    found = (ratio(row, peer, clock) for clock in ("us", "graph_us"))
    return any(x is not None and x < LEVEL for x in found)


# --- tables ---------------------------------------------------------------------------------------


def table(section: Section, rows: Sequence[Row]) -> str:
    """The rows of a section; ratios of peers that are ahead are bold and red."""
    shown = [key for key in section.columns if any(row[key] not in ("", False) for row in rows)]
    peers = peers_of(rows)
    has_rate = any(row["nbytes"] for row in rows)
    titles = [section.columns[key] or "form" for key in shown] + ["us", "in a graph"]
    titles += ["rate", "of the ceiling"] if has_rate else []
    for peer in peers:
        name = section.baseline.get(peer, peer)
        titles += [f"{name}, us", "x", "x in graphs"]
    lines = [titles]
    for row in rows:
        cells = [_cell(row[key]) for key in shown] + [show_us(row["us"]), show_us(row["graph_us"])]
        cells += [_rate(row), _share(row)] if has_rate else []
        for peer in peers:
            cells += [show_us(row["peers"].get(peer, {}).get("us"))]
            cells += [_marked(ratio(row, peer, clock)) for clock in ("us", "graph_us")]
        lines.append(cells)
    return piped(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


def _rate(row: Row) -> str:
    """By what bounds the row: operations or bytes a second."""
    if row["bound"] == "bytes":
        return f"{row['nbytes'] / (row['us'] * 1e3):,.0f} GB/s"
    return f"{row['flops'] / (row['us'] * 1e6):,.0f} TFLOP/s"


def _marked(x: float | None) -> str:
    if x is None:
        return "-"
    return f'**{x:.2f}**{{ style="color: #c62828" }}' if x < LEVEL else f"{x:.2f}"


# --- figures -------------------------------------------------------------------------------------


def figures(record: Row) -> Iterator[tuple[str, str]]:
    """Paths below docs, and what is there, of the sections that other libraries are in."""
    for section, rows in measured(record):
        if any(row["peers"] for row in rows):
            yield f"{FIGURES}/{section.name}.svg", figure(section, rows)


def figure(section: Section, rows: Sequence[Row]) -> str:
    """A line for each row of a section that a peer has."""
    lines: Dots = []
    for row in rows:
        names = section.baseline
        found = ((names.get(peer, peer), ratio(row, peer)) for peer in row["peers"])
        dots = [(peer, x) for peer, x in found if x is not None]
        if dots:
            lines.append((section.label(shape_of(section, row)), dots))
    return draw(section.title, lines)


def overview(record: Row) -> str:
    """A line for each section and library: all rows, and their geometric mean."""
    lines: Dots = []
    for section, rows in measured(record):
        for peer in section.libraries(peers_of(rows)):
            found = [x for row in rows if (x := ratio(row, peer)) is not None]
            lines.append((section.title, [(peer, x) for x in found]))
    means = {place: geometric_mean(x for _, x in dots) for place, (_, dots) in enumerate(lines)}
    return draw(overview_title(record), lines, means)


def overview_title(record: Row) -> str:
    """Say which run the figure is of."""
    where = f"{record['machine']['gpu']}, {record['date'][:10]}"
    return f"Other libraries beside cumla on one {where}; bar: geometric mean"


# --- what the page says ---------------------------------------------------------------------------


def parts(record: Row) -> dict[str, str]:
    """The values of `{{ name }}` in the page."""
    machine, found = record["machine"], record["ceilings"]
    libraries = ", ".join(f"{name} {version}" for name, version in record["libraries"].items())
    return {
        "date": record["date"][:10],
        "machine": f"{machine['gpu']}, driver {machine['driver']}, PyTorch {machine['torch']}, "
        f"NVRTC {machine['nvrtc']}, cumla {machine['cumla']}",
        "libraries": libraries,
        "ceilings": f"reading {found['read_GBps']:,.0f} GB/s, copying {found['copy_GBps']:,.0f} "
        f"GB/s, products of 8,192 x 8,192 matrices {found['bf16_matmul_TFLOPs']:,.0f} TFLOP/s in "
        f"bfloat16 ({found.get('bf16_sustained_TFLOPs', 0):,.0f} for 1.5 s) and "
        f"{found.get('fp8_matmul_TFLOPs', 0):,.0f} in FP8, an empty kernel "
        f"{found['empty_kernel_us']:.1f} us",
        "protocol": record["protocol"],
        "earlier": earlier(record),
        "behind": behind(record),
        "sections": sections(record),
        "host": host(record),
        "missing": missing(record),
    }


def earlier(record: Row) -> str:
    """The sections of an earlier run, whose kernels compile to the same machine code."""
    if "earlier" not in record:
        return ""
    of = record["earlier"]
    titles = ", ".join(section.title for section in SECTIONS if section.name in of["sections"])
    return (
        f"These tables are of an earlier run, of {of['date'][:16].replace('T', ' ')}, with the "
        f"same machine code of cumla on another GPU of this kind: {titles}."
    )


def behind(record: Row) -> str:
    """In how many rows of each section a library is ahead, and where it is most."""
    lines = [["section", "rows beside a library", "a library is ahead in", "smallest x"]]
    for section, rows in measured(record):
        pairs = [(row, peer) for row in rows for peer in section.libraries(row["peers"])]
        if not pairs:
            continue
        row, peer = min(pairs, key=lambda pair: ratio(*pair) or math.inf)
        label = section.label(shape_of(section, row))
        least = f"{_marked(ratio(row, peer))} ({peer}, {label})"
        beside, ahead = (
            len({id(row) for row, _ in some})
            for some in (pairs, [pair for pair in pairs if is_ahead(*pair)])
        )
        lines.append([section.title, f"{beside}", f"{ahead}", least])
    return piped(lines)


def sections(record: Row) -> str:
    found, have = [], {section.name: rows for section, rows in measured(record)}
    for section in SECTIONS:
        found.append(f"## {section.title}\n\n{section.about}")
        rows = have.get(section.name, [])
        if not rows:
            found.append("No row of it ran.")
            continue
        if any(row["peers"] for row in rows):
            found.append(f"![{section.title}: other libraries]({FIGURES}/{section.name}.svg)")
        found.append(table(section, rows))
    return "\n\n".join(found)


def host(record: Row) -> str:
    """Host time of a call, by section: the median of its rows."""
    lines = [["call", "cumla, us", "others, us"]]
    for section, rows in measured(record):
        peers = section.libraries(peers_of(rows))
        others = ", ".join(f"{peer} {_median(rows, peer):.0f}" for peer in peers)
        lines.append([section.title, f"{_median(rows):.0f}", others or "-"])
    return piped(lines)


def _median(rows: Sequence[Row], peer: str = "") -> float:
    times = [
        row["peers"][peer] if peer else row for row in rows if not peer or peer in row["peers"]
    ]
    return sorted(float(of["host_us"]) for of in times)[len(times) // 2]


def missing(record: Row) -> str:
    """The notes: parts that did not run, and why."""
    lines = [f"* {note}" for note in record["notes"]]
    return "\n".join(lines) or "Everything ran."


# --- the README -----------------------------------------------------------------------------------

# Its rows: section, the row's shape as far as it tells, what it says.
_README: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "dense",
        {"batch": 128, "queries": 1, "heads": 16, "kv_len": 4096},
        "`mla_decode`, 128 requests, 16 heads, 4,096 tokens",
    ),
    (
        "dense",
        {"batch": 128, "queries": 1, "heads": 128, "kv_len": 4096},
        "`mla_decode`, 128 requests, 128 heads, 4,096 tokens",
    ),
    (
        "sparse",
        {"batch": 128, "queries": 1, "heads": 128},
        "`mla_sparse_decode`, V3.2, 128 requests, 128 heads, 2,048 rows",
    ),
    (
        "gqa",
        {"kinds": "32/8", "columns": "d128", "batch": 128, "kv_len": 8192, "more": ""},
        "`attention`, 128 requests, 32/8 heads of 128, 8,192 tokens",
    ),
    (
        "prefill",
        {"kinds": "32/8", "batch": 1, "kv_len": 8192, "more": "rows"},
        "`attention`, prefill of 8,192 tokens, 32/8 heads of 128",
    ),
)


def _readme_rows(record: Row) -> Iterator[tuple[str, Row]]:
    found = {section.name: rows for section, rows in measured(record)}
    for name, wanted, says in _README:
        (row,) = (row for row in found[name] if all(row[key] == wanted[key] for key in wanted))
        yield says, row


def readme_table(record: Row) -> str:
    """The five rows of the README."""
    lines = ["| call | us | rate | of the ceiling | others' time / cumla's |"]
    lines.append("|---|---:|---:|---:|---|")
    for says, row in _readme_rows(record):
        beside = ", ".join(f"{peer} {ratio(row, peer):.2f}" for peer in row["peers"])
        cells = (says, show_us(row["us"]), _rate(row), _share(row), beside or "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def readme_line(record: Row) -> str:
    """The last of the README's first lines, which names the first row of its table."""
    says, row = next(_readme_rows(record))
    gpu = record["machine"]["gpu"].removeprefix("NVIDIA ")
    return (
        f"On one {gpu}: {says}: {show_us(row['us'])} us, {_share(row)} of measured "
        "bandwidth ([all tables](docs/performance.md))."
    )


def with_readme_parts(readme: str, record: Row) -> str:
    """Put both into the README, in place of those that are there."""
    parts = {
        r"^\| call \|.*?\n\n": readme_table(record) + "\n\n",
        r"^On one [^\n]*\n": readme_line(record) + "\n",
    }
    for pattern, part in parts.items():
        begin, *rest = re.split(pattern, readme, maxsplit=1, flags=re.M | re.S)
        if not rest:
            raise ValueError(f"README.md has nothing like {pattern}")
        readme = begin + part + rest[0]
    return readme


def _share(row: Row) -> str:
    return f"{row['floor_us'] / row['us']:.0%}"


# --- the page -------------------------------------------------------------------------------------


def fill(text: str, record: Row) -> str:
    """Put what `parts` makes in place of `{{ name }}`; the note about the source goes."""
    found = parts(record)
    text = re.sub(r"^(> .*\n)+\n", "", text, count=1, flags=re.MULTILINE)
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: found[match[1]], text)
