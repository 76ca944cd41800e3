# SPDX-License-Identifier: Apache-2.0
"""Reports of all sections, with peers beside them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.run import SECTIONS
from bench.sections.indexer import queries
from bench.sections.mla import peer_mark
from cumla.bench import dense
from cumla.bench.report import Part, Table, failures, head, how
from cumla.bench.section import Row, show_us

__all__ = ["lines", "parts", "piped", "to_markdown"]

_PEERS = "; x peer: the peer's time{where}, divided by ours"
_GRAPHS = (
    " Merges and appends of up to 256 MB: graphs go round 512 MiB of inputs and outputs; graph "
    "share: of the copy ceiling; graph copy: plain copies of as many bytes in such a graph."
)
_SCALED = (
    " *: scaled: that peer was measured on {device} ({date}), its time is multiplied by the ratio "
    "of the two GPUs' ceilings."
)
_BACK_TO_BACK = " +: as the mean of back-to-back graph replays, which hides the launch."
_IN_TURNS = " us in turns: ours in turns with the peers of this run, whose x is by it."
_APART = " ^: a much slower peer, which ran apart, minutes after ours."


def parts(results: Row) -> list[Part]:
    """List the lines and tables of a report, the last of them how to read it."""
    found: list[Part] = head(results)
    for section in SECTIONS:
        found.append(section.table(results))
        if section.name == "rows":
            found.append(_peers_of_this_run(section.rows(results)))
        if "paged_schedule" in section.ops and found[-1]:
            found.append(_indexer_in_turns(results["indexer"]))
    if "host" in results:
        found.append(_host_line(results))
    if "start" in results:
        found.append(_start_line(results["start"]))
    found += [*results.get("notes", ()), *failures(lines(results))]
    return [*(part for part in found if part), _how(results)]


def lines(results: Row) -> list[Row]:
    """List the rows of all sections, one for each time, with those of peers."""
    found: list[Row] = []
    for section in SECTIONS:
        for row in section.rows(results):
            peers = row.get("peers", {}).items()
            scaled = {f"{name}_scaled_us": peer["scaled_us"] for name, peer in peers}
            times = row.get(section.each, [{}]) if section.each else [{}]
            found += [{"section": section.name} | row | time | scaled for time in times]
    return found


def to_markdown(parts: Sequence[Part]) -> str:
    """Print a report for documents."""
    drawn = (part if isinstance(part, str) else piped(part) for part in parts)
    return "\n\n".join(drawn).replace("*", "\\*") + "\n"


def piped(table: Table) -> str:
    """Draw a table for Markdown."""
    titles, *rows = table
    rule = ["---:"] * len(titles)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))


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
    names = list(dict.fromkeys(name for row in rows for name in _measured(row)))
    shape = [column for column in dense.SECTION.shape if column.is_shown(rows)]
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


def _how(results: Row) -> str:
    rows = results["rows"] + results.get("indexer", [])
    peers = [peer for row in rows for peer in row.get("peers", {}).values()]
    text = how(results)
    if peers:
        in_this_run = any("measured" in peer for peer in peers)
        text += _PEERS.format(where=", in this run" if in_this_run else "")
    text += "."
    if any(row.get("graph_us") for name in ("merge", "append") for row in results.get(name, ())):
        text += _GRAPHS
    if any(map(_own_us, results["rows"])):
        text += _IN_TURNS
    if any("apart" in peer for peer in peers):
        text += _APART
    scaled = [peer for peer in peers if "measured" not in peer]
    if scaled:
        text += _SCALED.format(**results["peers"])
    if any("clock" in peer for peer in scaled):
        text += _BACK_TO_BACK
    return text
