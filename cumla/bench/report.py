# SPDX-License-Identifier: Apache-2.0
"""Results as tables: for the terminal, for Markdown, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from cumla.bench.indexer import queries
from cumla.bench.mla import SHAPE, peer_mark
from cumla.bench.run import SECTIONS
from cumla.bench.section import Row, show_us

__all__ = ["failures", "to_csv", "to_markdown", "to_text"]

Table = list[list[str]]

_COLUMNS = (
    "; graph us: a call among many, back to back in a CUDA graph; efficiency: the time that bytes "
    "or operations need at the ceilings, divided by ours"
)
_PEERS = "; x peer: the peer's time{where}, divided by ours"
_GRAPHS = (
    " Merges and appends of up to 256 MB: graphs go round 512 MiB of inputs and outputs; graph "
    "share: of the copy ceiling; graph copy: plain copies of as many bytes in such a graph."
)
_L2 = {"cold": "full of other data", "warm": "as the call before has left it"}
_SCALED = (
    " *: scaled: that peer was measured on {device} ({date}), its time is multiplied by the ratio "
    "of the two GPUs' ceilings."
)
_BACK_TO_BACK = " +: as the mean of back-to-back graph replays, which hides the launch."
_IN_TURNS = " us in turns: ours in turns with the peers of this run, whose x is by it."
_APART = " ^: a much slower peer, which ran apart, minutes after ours."


def to_text(results: Row) -> str:
    """Print results for the terminal."""
    said = ["\n".join(notes)] if (notes := results.get("notes")) else []
    return "\n\n".join([*_parts(results, _aligned), *said, *failures(results), _note(results)])


def failures(results: Row) -> list[str]:
    """List what is wrong with results that are."""
    rows = (row for section in SECTIONS for row in section.rows(results))
    return [row["failed"] for row in rows if "failed" in row]


def to_markdown(results: Row) -> str:
    """Print results for documents."""
    note = _note(results).replace("*", "\\*")
    return "\n\n".join([*_parts(results, _piped), note]) + "\n"


def _parts(results: Row, draw: Callable[[Table], str]) -> list[str]:
    """List what every report has: the lines, and the tables as `draw` makes them."""
    parts = [_machine_line(results), _ceilings_line(results)]
    for section in SECTIONS:
        tables = [section.table(results)]
        if section.name == "rows":
            tables.append(_peers_of_this_run(section.rows(results)))
        if "paged_schedule" in section.ops:
            tables.append(_indexer_in_turns(results["indexer"] if tables[0] else ()))
        parts += [draw(table) for table in tables if table]
    if "host" in results:
        parts.append(_host_line(results))
    if "start" in results:
        parts.append(_start_line(results["start"]))
    return parts


def to_csv(results: Row) -> str:
    """Print the rows of all sections for a spreadsheet."""
    rows: list[Row] = []
    for section in SECTIONS:
        for row in section.rows(results):
            flat = {"section": section.name} | row
            lines: Any = flat.pop(section.each, [{}]) if section.each else [{}]
            rows += [flat | line for line in lines]
    nested = ("peers", "seeds", "pages")
    columns = [key for key in _all_keys(rows) if key not in nested]
    peers = _all_keys([row.get("peers", {}) for row in rows])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}_scaled_us" for name in peers)])
    for row in rows:
        found = row.get("peers", {})
        times = [found[name]["scaled_us"] if name in found else None for name in peers]
        writer.writerow([*(row.get(key) for key in columns), *times])
    return file.getvalue()


def _all_keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


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
        how = " (scaled from that of bfloat16, not measured)" if ceilings["fp8_scaled"] else ""
        fp8 = f", float8_e4m3fn {ceilings['fp8_matmul_TFLOPs']:.0f} TFLOP/s{how}"
    return (
        f"Ceilings of this run: read {ceilings['read_GBps']:.0f} GB/s, copy "
        f"{ceilings['copy_GBps']:.0f} GB/s, bfloat16 8192^3 matrix product "
        f"{ceilings['bf16_matmul_TFLOPs']:.0f} TFLOP/s{long}{fp8}, an empty kernel "
        f"{ceilings['empty_kernel_us']:.1f} us"
    )


def _measured(row: Row) -> dict[str, Row]:
    """Peers that ran in this run."""
    return {name: peer for name, peer in row.get("peers", {}).items() if "measured" in peer}


def _own_us(row: Row) -> float | None:
    """Find what ours took in turns with peers; all of a row share these turns."""
    times = (peer["own_us"] for peer in _measured(row).values() if "own_us" in peer)
    return next(times, None)


def _peers_of_this_run(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if _measured(row)]
    if not rows:
        return []
    names = _all_keys([_measured(row) for row in rows])
    shape = [column for column in SHAPE if column.is_shown(rows)]
    own = ["us", "us in turns"] if any(map(_own_us, rows)) else ["us"]
    titles = [title for name in names for title in (f"{name} us", "x")]
    first, *others = (column.title for column in shape)
    table = [[f"peers of this run: {first}", *others, *own, *titles]]
    for row in rows:
        times = (row["us"], _own_us(row))[: len(own)]
        cells = [*(column.cell(row) for column in shape), *map(show_us, times)]
        for name in names:
            peer = _measured(row).get(name)
            x = "-" if peer is None else f"{peer['x']:.2f}{peer_mark(peer)}"
            cells += [show_us(peer["us"] if peer else None), x]
        table.append(cells)
    return table


def _indexer_in_turns(rows: Sequence[Row]) -> Table:
    """Show what a peer of this run took in turns with cumla."""
    table = [["indexer in turns: op", "batch", "queries", "kv_len", "us", "DeepGEMM us", "x"]]
    for row in rows:
        for peer in _measured(row).values():
            shape = (row["op"], row.get("batch", 1), queries(row), row["kv_len"])
            times = [show_us(peer["own_us"]), show_us(peer["us"]), f"{peer['x']:.3f}"]
            table.append([*map(str, shape), *times])
    return table if len(table) > 1 else []


def _host_line(results: Row) -> str:
    times = ", ".join(
        f"{show_us(time['us'])} us ({name}{', which allocates both' if name == 'JAX' else ''})"
        for name, time in results["host"].items()
    )
    line = f"Host time of an eager call with a ready plan, out= and lse=: {times}"
    does = {"arguments": "read the arguments", "launch": "are the driver's launch"}
    stages = results.get("host_stages", {}).items()  # earlier files have none
    parts = [f"{show_us(time['us'])} us {does[name]}" for name, time in stages]
    return line + (f"; of CuPy's {', '.join(parts)}" if parts else "")


def _start_line(start: Row) -> str:
    if "failed" in start:
        return f"Start times: not measured ({start['failed']})"
    names = ""
    if "names_s" in start:
        names = (
            f", with a name that computes {start['names_s']:.2f} s (numpy and ml_dtypes alone "
            f"{start['dependencies_s']:.2f} s)"
        )
    return (
        f"import cumla {start['import_s']:.3f} s{names}; first call of a process "
        f"{start['first_call_cold_s']:.2f} s with a cold kernel cache, "
        f"{start['first_call_warm_s']:.2f} s with a warm one"
    )


def _note(results: Row) -> str:
    note = f"Times: single calls with an L2 cache {_L2[results.get('l2', 'cold')]}"
    rows = results["rows"] + results.get("indexer", [])
    peers = [peer for row in rows for peer in row.get("peers", {}).values()]
    if rows or "attention" in results:
        note += _COLUMNS
    if peers:
        in_this_run = any("measured" in peer for peer in peers)
        note += _PEERS.format(where=", in this run" if in_this_run else "")
    note += "."
    if any(row.get("graph_us") for name in ("merge", "append") for row in results.get(name, ())):
        note += _GRAPHS
    if any(map(_own_us, results["rows"])):
        note += _IN_TURNS
    if any("apart" in peer for peer in peers):
        note += _APART
    scaled = [peer for peer in peers if "measured" not in peer]
    if scaled:
        note += _SCALED.format(**results["peers"])
    if any("clock" in peer for peer in scaled):
        note += _BACK_TO_BACK
    return note


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.rjust, cells, widths)) for cells in table)
    return "\n".join(line.rstrip() for line in lines)


def _piped(table: Table) -> str:
    titles, *rows = ([cell.replace("*", r"\*") for cell in cells] for cells in table)
    rule = ["---:"] * len(titles)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))
