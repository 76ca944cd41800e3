# SPDX-License-Identifier: Apache-2.0
"""Results as tables: for the terminal, for Markdown, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["failures", "to_csv", "to_markdown", "to_text"]

Results = dict[str, Any]
Row = dict[str, Any]
Table = list[list[str]]

_SHAPE = ("batch", "q_len", "heads", "kv_len")
# Columns only for others.
_USUAL = {"kv_heads": 1, "dtype": "bfloat16", "lengths": "equal", "batch_invariant": False}
_FIGURES = (
    *("us", "TFLOP/s", "GB/s", "efficiency"),
    *("x FlashMLA", "x best peer", "stream-only us", "graph us"),
)
_NOTE = "Times: single calls with an L2 cache {l2}"
_COLUMNS = (
    "; graph us: a call among many, back to back in a CUDA graph; efficiency: the time that bytes "
    "or operations need at the ceilings, divided by ours; x peer: the peer's time{where}, divided "
    "by ours"
)
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
# Operations beside attention: what tells their cases apart, a key of a row by its title.
_OPERATIONS = {
    "merge": {"partial results": "count", "tokens": "tokens", "dtype": "dtype"},
    "append": {"tokens": "tokens", "page": "page_size", "rotated": "rotated", "dtype": "dtype"},
}
# The same of the indexer, whose rows, of several operations, are one section.
_INDEXER_OPERATIONS = {
    "quantize_fp8": {"rows": "tokens", "columns": "dim", "dtype": "dtype"},
    "append_indexer_cache": {"tokens": "tokens", "head_dim": "dim", "dtype": "dtype"},
}
_LOGITS = ("paged_mqa_logits", "mqa_logits")
# Sections of rows that may have failed.
_SECTIONS = (
    *("rows", "ragged", "invariant", "attention", "pages", "fp8", "forms"),
    *(*_OPERATIONS, "indexer"),
)


def to_text(results: Results) -> str:
    """Print results for the terminal.

    Parameters
    ----------
    results : dict
        What `cumla.bench.run.run` returned.

    Returns
    -------
    str
        Aligned tables.
    """
    said = ["\n".join(notes)] if (notes := results.get("notes")) else []
    return "\n\n".join([*_parts(results, _aligned), *said, *failures(results), _note(results)])


def failures(results: Results) -> list[str]:
    """List what is wrong with results that are.

    Parameters
    ----------
    results : dict
        What `cumla.bench.run.run` returned.

    Returns
    -------
    list of str
        A sentence for each row without times, of every section.
    """
    rows = (row for section in _SECTIONS for row in results.get(section, ()))
    return [row["failed"] for row in rows if "failed" in row]


def to_markdown(results: Results) -> str:
    """Print results for the README.

    Parameters
    ----------
    results : dict
        What `cumla.bench.run.run` returned, perhaps read from a file.

    Returns
    -------
    str
        Markdown.
    """
    note = _note(results).replace("*", "\\*")
    return "\n\n".join([*_parts(results, _piped), note]) + "\n"


def _parts(results: Results, draw: Callable[[Table], str]) -> list[str]:
    """List what every report has: the lines, and the tables as `draw` makes them."""
    rows = results["rows"]
    parts = [_machine_line(results), _ceilings_line(results)]
    if rows:  # none where a section was measured alone
        parts.append(draw(_dense(rows)))
    if any(_measured(row) for row in rows):
        parts.append(draw(_peers_of_this_run(rows)))
    if "ragged" in results:
        parts.append(draw(_ragged(results["ragged"])))
    if "invariant" in results:
        parts.append(draw(_invariant(results["invariant"])))
    if "schedule" in results:
        parts.append(draw(_schedule(results)))
    if "attention" in results:
        parts.append(draw(_attention(results["attention"])))
    if results.get("pages"):
        parts.append(draw(_pages(results["pages"])))
    if results.get("fp8"):
        parts.append(draw(_fp8(results["fp8"])))
    if results.get("forms"):
        parts.append(draw(_forms(results["forms"])))
    parts += [
        draw(_operation(name, keys, results[name]))
        for name, keys in _OPERATIONS.items()
        if name in results
    ]
    if "indexer" in results:
        parts += [draw(table) for table in _indexer(results)]
    if "host" in results:
        parts.append(_host_line(results))
    if "start" in results:
        parts.append(_start_line(results))
    return parts


def to_csv(results: Results) -> str:
    """Print rows for a spreadsheet: of attention, of the indexer, of merges and of appends.

    Parameters
    ----------
    results : dict
        What `cumla.bench.run.run` returned.

    Returns
    -------
    str
        Comma-separated, one line a case, a column ``<peer>_scaled_us`` for each peer.
    """
    operations = [{"op": name} | row for name in _OPERATIONS for row in results.get(name, ())]
    rows = results["rows"] + results.get("indexer", []) + operations
    columns = [key for key in _all_keys(rows) if key != "peers"]
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


def _machine_line(results: Results) -> str:
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


def _ceilings_line(results: Results) -> str:
    ceilings = results["ceilings"]
    return (
        f"Ceilings of this run: read {ceilings['read_GBps']:.0f} GB/s, copy "
        f"{ceilings['copy_GBps']:.0f} GB/s, bfloat16 8192^3 matrix product "
        f"{ceilings['bf16_matmul_TFLOPs']:.0f} TFLOP/s{_sustained_ceiling(ceilings)}"
        f"{_fp8_ceiling(ceilings)}, an empty kernel "
        f"{ceilings['empty_kernel_us']:.1f} us"
    )


def _sustained_ceiling(ceilings: Row) -> str:
    sustained = ceilings.get("bf16_sustained_TFLOPs")  # earlier files have none
    return f" (sustained, repeated for 1.5 s: {sustained:.0f})" if sustained else ""


def _fp8_ceiling(ceilings: Row) -> str:
    if "fp8_matmul_TFLOPs" not in ceilings:  # earlier files
        return ""
    how = " (scaled from that of bfloat16, not measured)" if ceilings["fp8_scaled"] else ""
    return f", float8_e4m3fn {ceilings['fp8_matmul_TFLOPs']:.0f} TFLOP/s{how}"


def _dense(rows: Sequence[Row]) -> Table:
    columns = _shape_columns(rows)
    return [[*columns, *_FIGURES], *(_dense_cells(row, columns) for row in rows)]


def _shape_columns(rows: Sequence[Row]) -> list[str]:
    unusual = [
        name for name, usual in _USUAL.items() if any(row.get(name, usual) != usual for row in rows)
    ]
    return [*_SHAPE, *unusual]


def _dense_cells(row: Row, columns: Sequence[str]) -> list[str]:
    shape = [str(row[key]) for key in columns]
    if "failed" in row:
        return [*shape, "wrong result", *[""] * (len(_FIGURES) - 1)]
    return [
        *shape,
        _us(row["us"]),
        f"{row['tflops']:.0f}",
        f"{row['gbps']:.0f}",
        f"{row['efficiency']:.2f}",
        _against(row, "FlashMLA"),
        _against(row, row["best_peer"], named=True),
        _us(row["stream_only_us"]),
        _us(row["graph_us"]),
    ]


def _against(row: Row, name: str | None, *, named: bool = False) -> str:
    peer = row["peers"].get(name)
    if peer is None:
        return "-"
    mark = _mark(peer)
    return f"{peer['x']:.2f} ({name}{mark})" if named else f"{peer['x']:.2f}{mark}"


def _mark(peer: Row) -> str:
    """Say how it was timed, if neither in turns nor in a file older than those."""
    if "measured" in peer:
        return "^" if "apart" in peer else ""
    return "*+" if "clock" in peer else "*"


def _measured(row: Row) -> dict[str, Row]:
    """Peers that ran in this run."""
    return {name: peer for name, peer in row.get("peers", {}).items() if "measured" in peer}


def _own_us(row: Row) -> float | None:
    """Find what ours took in turns with peers; all of a row share these turns."""
    times = (peer["own_us"] for peer in _measured(row).values() if "own_us" in peer)
    return next(times, None)


def _peers_of_this_run(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if _measured(row)]
    names = _all_keys([_measured(row) for row in rows])
    columns = _shape_columns(rows)
    titles = [title for name in names for title in (f"{name} us", "x")]
    own = ["us", "us in turns"] if any(map(_own_us, rows)) else ["us"]
    table = [["peers of this run: batch", *columns[1:], *own, *titles]]
    for row in rows:
        times = (row["us"], _own_us(row))[: len(own)]
        cells = [*(str(row[key]) for key in columns), *map(_us, times)]
        for name in names:
            peer = _measured(row).get(name)
            x = "-" if peer is None else f"{peer['x']:.2f}{_mark(peer)}"
            cells += ["-" if peer is None else _us(peer["us"]), x]
        table.append(cells)
    return table


def _ragged(rows: Sequence[Row]) -> Table:
    titles = ["ragged: batch", "q_len", "heads", "mean kv_len", "worst seed us", "all seeds us"]
    table = [[*titles, "equal lengths us", "worst / equal"]]
    for row in rows:
        shape = [str(row[key]) for key in _SHAPE]
        if "failed" in row:
            table.append([*shape, "wrong result", "", "", ""])
            continue
        seeds = ", ".join(_us(seed["us"]) for seed in row["seeds"])
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.append([*shape, _us(row["worst_us"]), seeds, _us(row["equal_us"]), ratio])
    return table


def _invariant(rows: Sequence[Row]) -> Table:
    titles = ["batch-invariant: batch", "q_len", "heads", "kv_len", "invariant us", "usual us"]
    table = [[*titles, "invariant / usual"]]
    for row in rows:
        shape = [str(row[key]) for key in _SHAPE]
        if "failed" in row:
            table.append([*shape, "wrong result", "", ""])
            continue
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.append([*shape, _us(row["us"]), _us(row["usual_us"]), ratio])
    return table


def _attention(rows: Sequence[Row]) -> Table:
    titles = ["ragged queries: batch", "heads", "q_len", "kv_len", "causal"]
    figures = ["us", "TFLOP/s", "efficiency"]
    has_share = any(row.get("sustained_share") for row in rows)  # earlier files have none
    if has_share:
        figures.append("share of the sustained product")
    table = [[*titles, *figures, "schedule us"]]
    for row in rows:
        q_len, decodes = str(row["q_len"]), row["decodes"]
        if decodes:
            q_len = f"{decodes} x 1, {row['batch'] - decodes} x {q_len}"
        shape = [str(row["batch"]), str(row["heads"]), q_len, str(row["kv_len"])]
        shape.append(str(row["causal"]))
        if "failed" in row:
            table.append([*shape, "failed", *[""] * len(figures)])
            continue
        cells = [*shape, _us(row["us"]), f"{row['tflops']:.0f}", f"{row['efficiency']:.2f}"]
        if has_share:
            cells.append(f"{row['sustained_share']:.2f}")
        table.append([*cells, _us(row["schedule_us"])])
    return table


def _pages(rows: Sequence[Row]) -> Table:
    """Show times by page size, and behind each its ratio to that with pages of 64."""
    sizes = list(dict.fromkeys(of["page"] for row in rows for of in row.get("pages", ())))
    titles = [f"{size}: us (ratio)" for size in sizes] or ["us (ratio)"]
    table = [["page sizes: batch", "heads", "kv_len", *titles]]
    for row in rows:
        shape = [str(row[key]) for key in ("batch", "heads", "kv_len")]
        times = [f"{_us(of['us'])} ({of['ratio']:.3f})" for of in row.get("pages", ())]
        if "failed" in row:
            times = ["failed", *[""] * (len(titles) - 1)]
        table.append([*shape, *times])
    return table


def _fp8(rows: Sequence[Row]) -> Table:
    """Show a line for each format of a cache."""
    titles = ["FP8 caches: batch", "heads", "kv_len", "format", "us", "GB/s"]
    table = [[*titles, "share of the read ceiling", "x bfloat16"]]
    for row in rows:
        shape = [str(row[key]) for key in ("batch", "heads", "kv_len")]
        if "failed" in row:
            table.append([*shape, "failed", "", "", "", ""])
        for of in row.get("formats", ()):
            figures = [f"{of['gbps']:.0f}", f"{of['read_share']:.2f}", f"{of['x_bfloat16']:.2f}"]
            table.append([*shape, of["format"], _us(of["us"]), *figures])
    return table


def _forms(rows: Sequence[Row]) -> Table:
    """Show a line for each form, and its ratio to the first of its group."""
    table = [["forms: batch", "heads", "kv_len", "by", "form", "us", "ratio to the first"]]
    for row in rows:
        shape = [str(row[key]) for key in ("batch", "heads", "kv_len", "varied")]
        if "failed" in row:
            table.append([*shape, "failed", "", ""])
        for of in row.get("forms", ()):
            table.append([*shape, of["form"], _us(of["us"]), f"{of['ratio']:.3f}"])
    return table


def _indexer(results: Results) -> list[Table]:
    """Tables of the logits, of their schedule, and of what quantises; those that have rows."""
    rows, empty = results["indexer"], results["ceilings"]["empty_kernel_us"]
    shape, peer = ("queries", "kv_len", "us"), "DeepGEMM, published"
    figures = ("TFLOP/s", "GB/s", "efficiency", "x DeepGEMM", "graph us")
    logits = [["indexer: op", "batch", *shape, *figures]]
    schedule = [["indexer schedule: batch", *shape, "over empty", peer]]
    for row in rows:
        if row["op"] in _LOGITS:
            logits.append(_logits_cells(row))
        elif row["op"] == "paged_schedule":
            case = [str(row[key]) for key in ("batch", "next_n", "kv_len")]
            times = (row["us"], row["us"] - empty, row["deep_gemm_us"])
            schedule.append([*case, *map(_us, times)])
    operations = [
        _operation(name, keys, [row for row in rows if row["op"] == name])
        for name, keys in _INDEXER_OPERATIONS.items()
    ]
    tables = (logits, schedule, _indexer_in_turns(rows), *operations)
    return [table for table in tables if len(table) > 1]


def _indexer_in_turns(rows: Sequence[Row]) -> Table:
    """Show what a peer of this run took in turns with cumla."""
    table = [["indexer in turns: op", "batch", "queries", "kv_len", "us", "DeepGEMM us", "x"]]
    for row in rows:
        for peer in _measured(row).values():
            times = [_us(peer["own_us"]), _us(peer["us"]), f"{peer['x']:.3f}"]
            table.append([*_logits_shape(row), *times])
    return table


def _logits_shape(row: Row) -> list[str]:
    queries = row["next_n"] if "next_n" in row else row["q_len"]
    return [row["op"], str(row.get("batch", 1)), str(queries), str(row["kv_len"])]


def _logits_cells(row: Row) -> list[str]:
    shape = _logits_shape(row)
    if "failed" in row:
        return [*shape, "wrong result", *[""] * 5]
    return [
        *shape,
        _us(row["us"]),
        f"{row['tflops']:.0f}",
        f"{row['gbps']:.0f}",
        f"{row['efficiency']:.2f}",
        _against(row, "DeepGEMM"),
        _us(row["graph_us"]),
    ]


def _operation(name: str, keys: dict[str, str], rows: Sequence[Row]) -> Table:
    first, *others = keys
    figures = ["MB read and written", "us", "GB/s", "share of the copy ceiling"]
    has_copies = any("copy_us" in row for row in rows)  # earlier files have none
    if has_copies:
        figures.append("us of a plain copy")
    has_graphs = any("graph_us" in row for row in rows)  # nor these
    if has_graphs:
        for of in ("graph", "graph copy"):
            figures += [f"{of} us", f"{of} GB/s", f"{of} share"]
    table = [[f"{name}: {first}", *others, *figures]]
    for row in rows:
        cells = [*(str(row[key]) for key in keys.values()), f"{row['nbytes'] / 1e6:.0f}"]
        if "failed" in row:
            cells += ["wrong result", "", ""]
        else:
            cells += [_us(row["us"]), f"{row['gbps']:.0f}", f"{row['efficiency']:.2f}"]
        if has_copies:
            cells.append("" if "failed" in row else _us(row.get("copy_us")))
        if has_graphs:
            for of in ("graph", "graph_copy"):
                cells += [""] * 3 if "failed" in row else _graph_cells(row, of)
        table.append(cells)
    return table


def _graph_cells(row: Row, of: str) -> list[str]:
    """Show the time of a call in a graph, its rate and its share; large cases have none."""
    if row.get(f"{of}_us") is None:
        return ["-"] * 3
    rates = [f"{row[f'{of}_gbps']:.0f}", f"{row[f'{of}_efficiency']:.2f}"]
    return [_us(row[f"{of}_us"]), *rates]


def _us(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def _schedule(results: Results) -> Table:
    titles = ["schedule: batch", "kv_len", "lengths", "us", "over empty", "FlashMLA, published"]
    empty = results["ceilings"]["empty_kernel_us"]
    return [
        titles,
        *(
            [
                *(str(row[key]) for key in ("batch", "kv_len", "lengths")),
                *(_us(time) for time in (row["us"], row["us"] - empty, row["flash_mla_us"])),
            ]
            for row in results["schedule"]
        ),
    ]


def _host_line(results: Results) -> str:
    times = ", ".join(
        f"{_us(time['us'])} us ({name}{', which allocates both' if name == 'JAX' else ''})"
        for name, time in results["host"].items()
    )
    line = f"Host time of an eager call with a ready plan, out= and lse=: {times}"
    does = {"arguments": "read the arguments", "launch": "are the driver's launch"}
    stages = results.get("host_stages", {}).items()  # earlier files have none
    parts = [f"{_us(time['us'])} us {does[name]}" for name, time in stages]
    return line + (f"; of CuPy's {', '.join(parts)}" if parts else "")


def _start_line(results: Results) -> str:
    start = results["start"]
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


def _note(results: Results) -> str:
    note = _NOTE.format(l2=_L2[results.get("l2", "cold")])
    rows = results["rows"] + results.get("indexer", [])
    peers = [peer for row in rows for peer in row.get("peers", {}).values()]
    if rows or "attention" in results:
        in_this_run = any("measured" in peer for peer in peers)
        note += _COLUMNS.format(where=", in this run" if in_this_run else "")
    note += "."
    if any(row.get("graph_us") for name in _OPERATIONS for row in results.get(name, ())):
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
