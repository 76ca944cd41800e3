# SPDX-License-Identifier: Apache-2.0
"""Records what a decoding step takes in CuPy, PyTorch and JAX: eager, compiled, in CUDA graphs.

    python -m bench.frameworks records/NAME.json

Each framework runs in a process of its own (framework_steps.py). One that is not installed, or does
not see the GPU, has a row that says so. All results of a case must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.files import piped, say, write
from bench.framework_steps import PARTS
from cumla.bench.gpu import Gpu
from cumla.bench.run import environment, refuse_slow_kernels
from cumla.bench.section import Column, Row, columns

__all__ = ["laid_out", "limits", "main", "printed_rows", "run", "to_markdown", "with_limits"]

PROTOCOL = (
    "us: median of 30 steps, each from the call until its result is there; host us: until the call "
    "returns; burst us: of a step among 16 without a wait between them, median of 6. A step is the "
    "schedule, and then in each layer one token of each request written into the layer's own "
    "cache, and attention; bfloat16, pages of 64 tokens, outputs and plans of CuPy and PyTorch "
    "made beforehand, caches of JAX donated. Callbacks: how often XLA called cumla's Python in "
    "each of the first six runs. XLA's own floor: in each layer a trivial operation, and a row "
    "written into the donated cache, on the arrays of the case; without a family 32 trivial "
    "operations on one array. All results of a case have the same bits"
)
_FACTOR = 1.2
_MARGIN = 15.0  # seconds that a row may take that was begun in time

_CASE = ("family", "heads", "kv_heads", "batch", "kv_len", "layers")
_SHOWN = (
    *columns("family", "heads", "kv_heads", "batch", "kv_len", "layers", "framework", "mode"),
    Column("us", "us", "us"),
    Column("us a layer", lambda row: row["us"] / row["layers"] if "us" in row else None, "us"),
    Column("host us", "host_us", "us"),
    Column("burst us", "burst_us", "us"),
    Column("callbacks", lambda row: ", ".join(map(str, row.get("callbacks", ()))) or None),
)


def run(seconds: float) -> Iterator[Row]:
    """Run all frameworks on the current GPU; yield the results so far, fuller each time."""
    refuse_slow_kernels()
    end = time.monotonic() + seconds
    results = environment(Gpu()) | {"protocol": PROTOCOL, "rows": []}
    for name in PARTS:
        results["rows"] += part(name, end - time.monotonic())
        yield with_limits(results)


def part(name: str, seconds: float) -> list[Row]:
    """Run a framework in a process of its own, no longer than that."""
    if find_spec(name) is None:
        return [{"framework": name, "skipped": f"{name} is not installed"}]
    return [
        {"framework": name} | row for row in printed_rows("bench.framework_steps", name, seconds)
    ]


def printed_rows(module: str, name: str, seconds: float) -> list[Row]:
    """Run a part of a module in a process of its own: the rows that it printed, and its end."""
    if seconds <= _MARGIN:
        return [{"skipped": "no time was left"}]
    command = [sys.executable, "-m", module, name, str(seconds - _MARGIN)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=os.environ
        )
        printed, errors = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        taken = error.stdout or b""
        printed = taken.decode() if isinstance(taken, bytes) else taken
        errors = f"not done after {seconds:.0f} s"
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if errors:
        rows.append({"failed": errors.strip().splitlines()[-1]})
    return rows


def with_limits(results: Row) -> Row:
    """Compare bits, and what is asked of a step in JAX with what it takes."""
    rows = results["rows"]
    for row in rows:
        first = next((r for r in rows if "bits" in r and _same_case(r, row)), row)
        if "bits" in row and row["bits"] != first["bits"]:
            row["failed"] = f"other bits than {first['framework']}, {first['mode']}"
    return results | {"limits": limits(rows)}


def limits(rows: Sequence[Row]) -> list[Row]:
    """List, for each case that ran, what a step with command buffers may take, and takes.

    It may take 1.2 times CuPy's CUDA graph of the step and XLA's floor of the case, and call back
    into Python in two runs.
    """
    found = []
    floors = [row for row in rows if row.get("op") == "floor" and "us" in row]
    for row in rows:
        graph = next((r for r in rows if _is(r, "CuPy", "graph") and _same_case(r, row)), {})
        of_case = [r for r in floors if _same_case(r | {"op": "step"}, row)] or floors[:1]
        if not _is(row, "JAX", "jit") or "us" not in graph or not of_case:
            continue
        floor = of_case[0]["us"]
        limit = _FACTOR * graph["us"] + floor
        holds = row["us"] <= limit and not any(row["callbacks"][2:])
        case = {name: row[name] for name in _CASE}
        times = {"us": row["us"], "graph_us": graph["us"], "floor_us": floor, "limit_us": limit}
        found.append(case | times | {"holds": holds})
    return found


def _is(row: Row, framework: str, mode: str) -> bool:
    kind = (row.get("op"), row.get("framework"), row.get("mode"))
    return kind == ("step", framework, mode) and "us" in row


def _same_case(row: Row, other: Row) -> bool:
    return all(row.get(name) == other.get(name) for name in ("op", *_CASE))


def to_markdown(results: Row) -> str:
    """Print results for documents: steps, single calls, what is asked of JAX, what did not run."""
    rows = results["rows"]
    steps = [row for row in rows if row.get("op") == "step"]
    others = [row for row in rows if row.get("op") in ("call", "floor") and "us" in row]
    parts = [laid_out(_SHOWN, [row for row in steps if "us" in row])]
    apart = ("kv_heads", "layers", "us a layer", "callbacks")
    parts.append(laid_out([c for c in _SHOWN if c.title not in apart], others))
    asked = (
        *columns(*_CASE[:5]),
        *[Column(name.replace("_", " "), name, "us") for name in ("us", "graph_us", "floor_us")],
        Column(f"{_FACTOR} x graph + floor", "limit_us", "us"),
        Column("holds", lambda row: "yes" if row["holds"] else "no"),
    )
    parts.append(laid_out(asked, results["limits"]))
    parts += [_reason(row) for row in rows if "skipped" in row or "failed" in row]
    return "\n\n".join([*filter(None, parts), f"{results['protocol']}."]) + "\n"


def _reason(row: Row) -> str:
    names = [str(row[key]) for key in ("framework", "mode", *_CASE) if key in row]
    return f"{', '.join(names)}: {row.get('skipped') or row.get('failed')}"


def laid_out(shown: Sequence[Column], rows: Sequence[Row]) -> str:
    """Print a table; nothing without rows."""
    if not rows:
        return ""
    lines = [[column.cell(row) for column in shown] for row in rows]
    return piped([[column.title for column in shown], *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Record into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=110.0, help="for all of it (110)")
    args = parser.parse_args(arguments)
    for results in run(args.seconds):
        write(args.file, results)
        say(f"{len(results['rows'])} rows")
    sys.stdout.write(to_markdown(results))


if __name__ == "__main__":
    main()
