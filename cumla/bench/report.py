# SPDX-License-Identifier: Apache-2.0
"""Results as tables: for the terminal, for Markdown, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

__all__ = ["to_csv", "to_markdown", "to_text"]

Results = dict[str, Any]
Row = dict[str, Any]
Table = list[list[str]]

_DENSE_TITLES = (
    *("batch", "q_len", "heads", "kv_len", "us", "TFLOP/s", "GB/s", "efficiency"),
    *("x FlashMLA*", "x best peer*", "stream-only us", "graph us"),
)
_MARK = (
    "x peer: the peer's time divided by ours. *scaled: peers were measured on {device} ({date}), "
    "their times are multiplied by the ratio of the two GPUs' ceilings. Times: single calls with "
    "an L2 cache full of other data; graph us: a call among many, back to back in a CUDA graph; "
    "efficiency: the time that bytes or operations need at the ceilings, divided by ours."
)
_BACK_TO_BACK = " +: timed as the mean of back-to-back graph replays, which hides the launch."


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
    parts = [_machine_line(results), _ceilings_line(results), _aligned(_dense(results["rows"]))]
    if "schedule" in results:
        parts += [_aligned(_schedule(results)), _host_line(results), _start_line(results)]
    parts += [row["failed"] for row in results["rows"] if "failed" in row]
    return "\n\n".join([*parts, _note(results)])


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
    parts = [_machine_line(results), _ceilings_line(results), _piped(_dense(results["rows"]))]
    if "schedule" in results:
        parts += [_piped(_schedule(results)), _host_line(results), _start_line(results)]
    return "\n\n".join([*parts, _note(results).replace("*", "\\*")]) + "\n"


def to_csv(results: Results) -> str:
    """Print the dense rows for a spreadsheet.

    Parameters
    ----------
    results : dict
        What `cumla.bench.run.run` returned.

    Returns
    -------
    str
        Comma-separated, one line a case, a column ``<peer>_scaled_us`` for each peer.
    """
    rows = results["rows"]
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
        f"{ceilings['bf16_matmul_TFLOPs']:.0f} TFLOP/s, an empty kernel "
        f"{ceilings['empty_kernel_us']:.1f} us"
    )


def _dense(rows: Sequence[Row]) -> Table:
    return [list(_DENSE_TITLES), *(_dense_cells(row) for row in rows)]


def _dense_cells(row: Row) -> list[str]:
    shape = [str(row[key]) for key in ("batch", "q_len", "heads", "kv_len")]
    if "failed" in row:
        return [*shape, "wrong result", *[""] * (len(_DENSE_TITLES) - len(shape) - 1)]
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
    mark = "+" if "clock" in peer else ""
    return f"{peer['x']:.2f} ({name}{mark})" if named else f"{peer['x']:.2f}{mark}"


def _us(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def _schedule(results: Results) -> Table:
    titles = ["schedule: batch", "kv_len", "lengths", "us", "over an empty kernel", "FlashMLA us"]
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
    times = ", ".join(f"{_us(time['us'])} us ({name})" for name, time in results["host"].items())
    return f"Host time of an eager call with a ready plan, out= and lse=: {times}"


def _start_line(results: Results) -> str:
    start = results["start"]
    if "failed" in start:
        return f"Start times: not measured ({start['failed']})"
    return (
        f"import cumla {start['import_s']:.2f} s; first call of a process "
        f"{start['first_call_cold_s']:.2f} s with a cold kernel cache, "
        f"{start['first_call_warm_s']:.2f} s with a warm one"
    )


def _note(results: Results) -> str:
    note = _MARK.format(**results["peers"])
    peers = [peer for row in results["rows"] for peer in row.get("peers", {}).values()]
    return note + _BACK_TO_BACK if any("clock" in peer for peer in peers) else note


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.rjust, cells, widths)) for cells in table)
    return "\n".join(line.rstrip() for line in lines)


def _piped(table: Table) -> str:
    titles, *rows = ([cell.replace("*", "\\*") for cell in cells] for cells in table)
    rule = ["---:"] * len(titles)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))
