# SPDX-License-Identifier: Apache-2.0
"""What a change brings or costs: two states of the package, timed in turns on one GPU.

    mkdir -p build && git archive 1fc334a cumla | gzip > build/before.tar.gz
    python tests/gpu/tools/compare.py build/before.tar.gz --json turns.json

Machines differ by several per cent, and one machine from minute to minute. So each state runs in a
process of its own, and the two take turns case by case; repeated, the ratio is good to half a per
cent. Every result is compared with float64 before it is timed (compare_worker.py). The states may
differ in layout, names and order of arguments. `--only` takes patterns of case names.

Exit code: 0 if nothing got slower than the limits, 1 if something did, 2 if a result was wrong or
something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread, Timer
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("compare_worker.py")
FRAMEWORKS = ("CuPy", "PyTorch")
FUNCTIONS = ("plan.run", "mla_decode")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An operation of compare_worker.Worker with its arguments."""

    op: str
    numbers: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For example ``decode-128,1,16,4096-page=16``."""
        options = (f"{key}={value}" for key, value in self.options.items())
        return "-".join([self.op, ",".join(map(str, self.numbers)), *options])

    @property
    def repeats(self) -> tuple[int, int]:
        """Timed calls of a turn, and calls before them; prefills take up to 60 ms."""
        return (2, 1) if self.op == "attention" and "schedule" not in self.options else (15, 4)


def all_cases() -> list[Case]:
    """List every row: the benchmark's, less those that differ by a repetition only."""
    dense = [
        *product((128,), (1,), (128,), (1024, 4096, 8192, 16384)),
        *product((128,), (2,), (128,), (1024, 4096, 8192)),
        *product((128,), (1,), (64,), (1024, 4096, 16384)),
        *product((128,), (1,), (16,), (1024, 4096, 8192, 16384)),
        *product((16, 4, 1), (1,), (128, 16), (8192,)),
        *((1, 1, 128, 131072), (1, 1, 16, 131072), (4, 1, 16, 131072), (16, 1, 128, 131072)),
    ]
    few, many, chunk = (128, 1, 16, 4096), (128, 1, 128, 4096), (16, 1, 128, 8192)
    cases = [Case("decode", shape) for shape in dense]
    cases += [Case("decode", shape, {"ragged": True}) for shape in (few, many)]
    cases += [Case("decode", shape, {"invariant": True}) for shape in (few, many)]
    cases += [
        Case("decode", shape, {"page": page})
        for shape in (few, many, chunk)
        for page in (1, 16, 32, 48, 128)
    ]
    cases += [
        Case("decode", shape, {"cache": cache})
        for shape in ((128, 1, 16, 8192), (128, 1, 16, 16384), (128, 1, 64, 4096), many)
        for cache in ("e4m3", "scales", "packed")
    ]
    cases += [Case("decode", shape, {"dtype": "float16"}) for shape in (few, many)]
    cases += [Case("decode", shape, {"cache": "split"}) for shape in (few, many)]
    cases += [Case("decode", (64, 1, 32, 4096), {"kv_heads": 2})]
    schedules = ((1, 128, 8192), (16, 128, 8192), (128, 128, 4096), (1024, 128, 4096))
    cases += [Case("decode_schedule", shape) for shape in schedules]
    cases += [Case("decode_schedule", (1024, 128, 4096), {"ragged": True})]
    cases += [
        Case("attention", (batch, heads, q_len, 8192), {"causal": causal})
        for batch, heads, q_len, causal in product((1, 8), (64, 128), (512, 2048), (False, True))
    ]
    cases += [Case("attention", (1, 128, 4096, 4096))]
    cases += [Case("attention", (64, 128, 512, 4096), {"decodes": 60})]
    cases += [Case("attention", (8, 128, 512, 8192), {"schedule": True})]
    paged = [(64, 1, 8192), (64, 1, 32768), (128, 1, 32768), (64, 2, 8192), (128, 2, 32768)]
    paged += [(128, 4, 32768), *((batch, 1, 131072) for batch in (8, 4, 2, 1))]
    cases += [Case("paged_logits", shape) for shape in paged]
    cases += [Case("paged_logits", shape, {"schedule": True}) for shape in (paged[0], paged[4])]
    cases += [Case("logits", (4096, kv_len)) for kv_len in (8192, 32768)]
    cases += [
        Case("quantize", (rows,), {"cache": True} if cache else {})
        for cache in (False, True)
        for rows in (329856, 5154624)
    ]
    cases += [Case("merge", (2, 170)), Case("merge", (8, 57)), Case("merge", (2, 2722))]
    cases += [Case("merge", (8, 907)), Case("merge", (2, 1363), {"dtype": "float32"})]
    for tokens in (55552, 868032):
        cases += [Case("append", (tokens, page)) for page in (64, 1)]
        cases += [Case("append", (tokens, 64), {"rotated": True})]
    cases += [Case("append", (868032, 64), {"cache": cache}) for cache in ("e4m3", "packed")]
    return cases


class State:
    """A process that works with one state of the package."""

    def __init__(self, folder: Path, device: str = "cupy") -> None:
        self.folder = folder.resolve()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUMLA_")}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(self.folder), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=kept,
        )

    def ask(self, do: str, **job: Any) -> Row:
        """Have a job done; ``error`` in the answer says why it was not."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # there is no answer then
            self.process.stdin.write(json.dumps({"do": do} | job) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": "the process ended"}

    def end(self) -> None:
        """Let the process end, or kill it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


States = tuple[State, State]


def at_once(states: States, do: str, **job: Any) -> list[Row]:
    """Have both states do a job at the same time."""
    answers: list[Row] = [{}, {}]

    def work(i: int) -> None:
        answers[i] = states[i].ask(do, **job)

    threads = [Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@dataclass(frozen=True)
class Limits:
    """What is measured how often, and what counts as slower."""

    rounds: int = 6
    rest: float = 0.02
    row: float = 1.015
    mean: float = 1.005
    host: float = 1.05
    host_shape: tuple[int, int, int] = (16, 16, 1024)
    host_repeats: int = 512
    host_warmup: int = 64


def measure(states: States, case: Case, limits: Limits, deadline: float) -> Row:
    """Check a case in both states, then time it in turns; longer if it seems slower."""
    row: Row = {"name": case.name, "op": case.op}
    prepared = at_once(states, "prepare", op=case.op, numbers=case.numbers, options=case.options)
    for state, answer in zip(("before", "after"), prepared, strict=True):
        if "error" in answer:
            return row | {"failed": f"{state}: {answer['error']}"}
    row["same_bits"] = prepared[0]["bits"] == prepared[1]["bits"]
    repeats, warmup = case.repeats
    job = {"repeats": repeats, "warmup": warmup, "rest": limits.rest}
    turns = in_turns(states, "time", job, row, limits.rounds, deadline)
    if turns.get("ratio", 0.0) > limits.row:
        turns = in_turns(states, "time", job, turns, 2 * limits.rounds, deadline)
    return turns


def in_turns(states: States, do: str, job: Row, row: Row, rounds: int, deadline: float) -> Row:
    """Time both states `rounds` times, each first every other time; add to what `row` has."""
    times: tuple[list[float], list[float]] = row.get("rounds", ([], []))
    for _ in range(rounds):
        if monotonic() > deadline:
            break
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        measured: dict[int, Row] = {i: states[i].ask(do, **job) for i in order}
        for i in order:
            if "error" in measured[i]:
                return row | {"failed": f"{('before', 'after')[i]}: {measured[i]['error']}"}
        for i in order:
            times[i].append(measured[i]["us"])
    if not times[0]:
        return row | {"failed": "no time was left"}
    before, after = (median(of) for of in times)
    ratio = median(b / a for a, b in zip(*times, strict=True)) if before else 1.0
    return row | {"before_us": before, "after_us": after, "ratio": ratio, "rounds": times}


def compare(
    states: States, cases: Sequence[Case], limits: Limits, deadline: float
) -> Iterator[Row]:
    """Measure all cases, then what calls cost the host."""
    for case in cases:
        if monotonic() > deadline:
            yield {"name": case.name, "op": case.op, "failed": "no time was left"}
        else:
            yield measure(states, case, limits, deadline)


def compare_host(states: States, limits: Limits, deadline: float) -> Iterator[Row]:
    """Measure what an eager call costs the host: with a ready plan, and without one."""
    for framework, function in product(FRAMEWORKS, FUNCTIONS):
        row = {"name": f"host: {framework}, {function}", "op": "host"}
        job = {"framework": framework, "function": function, "shape": limits.host_shape}
        job |= {"repeats": limits.host_repeats, "warmup": limits.host_warmup}
        yield in_turns(states, "host", job, row, limits.rounds, deadline)


def geometric_mean(rows: Sequence[Row]) -> float:
    """Mean of the ratios; 1 of no rows."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else 1.0


def line(row: Row, limit: float) -> str:
    """Print a row."""
    if "failed" in row:
        return f"{row['name']:48}  FAILED: {row['failed']}"
    marks = "  SLOWER" if row["ratio"] > limit else ""
    marks += "" if row.get("same_bits", True) else "  other bits"
    return (
        f"{row['name']:48}{row['before_us']:11.1f}{row['after_us']:11.1f}{row['ratio']:8.3f}{marks}"
    )


def verdict(rows: Sequence[Row], limits: Limits) -> tuple[str, int]:
    """Sum up: what is said, and the exit code."""
    timed, host = ([row for row in rows if (row["op"] == "host") is of] for of in (False, True))
    said = [
        f"{op}: {geometric_mean([row for row in timed if row['op'] == op]):.4f}"
        for op in dict.fromkeys(row["op"] for row in timed)
    ]
    mean = geometric_mean(timed)
    slower = [row["name"] for row in timed if row.get("ratio", 0.0) > limits.row]
    slower += [row["name"] for row in host if row.get("ratio", 0.0) > limits.host]
    failed = [row["name"] for row in rows if "failed" in row]
    lines = [
        f"geometric mean after / before: {mean:.4f} (at most {limits.mean}); {', '.join(said)}",
        f"slower than the limits: {', '.join(slower) or 'none'}",
        f"wrong or not measured: {', '.join(failed) or 'none'}",
    ]
    code = 2 if failed else int(bool(slower) or mean > limits.mean)
    return "\n".join(lines), code


@contextlib.contextmanager
def folder_of(path: Path) -> Iterator[Path]:
    """Give the folder that holds cumla/: the path itself, or what an archive holds."""
    if path.is_dir():
        yield path
        return
    with TemporaryDirectory() as folder, tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
        yield Path(folder)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="folder or .tar.gz with another state of cumla/")
    parser.add_argument("after", type=Path, nargs="?", default=ROOT, help="by default this one")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--rounds", type=int, default=Limits.rounds)
    parser.add_argument("--row", type=float, default=Limits.row, help="largest ratio of a row")
    parser.add_argument("--mean", type=float, default=Limits.mean, help="largest mean")
    parser.add_argument("--host", type=float, default=Limits.host, help="largest of host times")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="what is not measured by then is left out"
    )
    parser.add_argument("--json", type=Path, help="write the rows there, as they come")
    return parser.parse_args(arguments)


def run(states: States, args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Compare two states and report."""
    limits = Limits(rounds=args.rounds, row=args.row, mean=args.mean, host=args.host)
    begin = monotonic()
    deadline = begin + args.seconds
    cases = [
        case
        for case in all_cases()
        if any(fnmatchcase(case.name, pattern) for pattern in args.only)
    ]
    rows: list[Row] = []
    # host times first: they take seconds, and nothing is in their way
    for measured, limit in (
        (compare_host(states, limits, deadline), limits.host),
        (compare(states, cases, limits, deadline), limits.row),
    ):
        for row in measured:
            rows.append(row)
            say(f"{monotonic() - begin:6.1f} s  {line(row, limit)}")
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text, code = verdict(rows, limits)
    say(text)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return the exit code."""
    args = parsed(arguments)
    with folder_of(args.before) as before:
        states = (State(before), State(args.after))
        # a process that hangs must not hold the GPU
        guard = Timer(args.seconds + 30.0, lambda: [state.process.kill() for state in states])
        guard.start()
        try:
            return run(states, args, lambda text: print(text, flush=True))
        finally:
            guard.cancel()
            for state in states:
                state.end()


if __name__ == "__main__":
    sys.exit(main())
