# SPDX-License-Identifier: Apache-2.0
"""What a change of the kernels brings: two states of the package, timed in turns on one GPU.

    git archive REVISION cumla | tar -x -C /tmp/before
    python tests/gpu/tools/compare.py /tmp/before --cases 128,1,16,4096 1,1,128,8192 128,1,16,1024,0

Machines differ by several per cent, and one machine from minute to minute. So each state runs in a
process of its own, and the two take turns case by case; repeated, the ratio is good to half a per
cent. Every result is held against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
Ask = Callable[[dict[str, Any]], dict[str, Any]]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a folder with another state of cumla/")
    parser.add_argument("after", type=Path, nargs="?", default=ROOT, help="by default this one")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=lambda text: [int(number) for number in text.split(",")],
        required=True,
        metavar="BATCH,Q_LEN,HEADS,KV_LEN[,SEED]",
        help="with a seed lengths are log-normal",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls a round")
    return parser.parse_args(arguments)


class State:
    """A process that times one state of the package."""

    def __init__(self, folder: Path, cases: list[list[int]]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder.resolve()), json.dumps(cases)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # there is no answer then
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        if "us" not in answer:
            raise RuntimeError(answer.get("error", f"the process ended: {self.process.args}"))
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(30)


def compare(
    before: Ask, after: Ask, cases: list[list[int]], rounds: int, repeats: int
) -> list[tuple[float, float]]:
    """Median times of each case before and after; who comes first changes from round to round."""
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in cases]
    for i in range(rounds):
        for case, (old, new) in zip(cases, times, strict=True):
            turns = [(before, old), (after, new)]
            for ask, measured in turns if i % 2 == 0 else reversed(turns):
                measured.append(ask({"case": case, "repeats": repeats})["us"])
    return [(median(old), median(new)) for old, new in times]


def table(cases: list[list[int]], times: list[tuple[float, float]]) -> str:
    lines = [f"{'case':32}{'before us':>12}{'after us':>12}{'ratio':>8}"]
    for case, (old, new) in zip(cases, times, strict=True):
        name = ",".join(map(str, case))
        lines.append(f"{name:32}{old:12.1f}{new:12.1f}{new / old:8.3f}")
    return "\n".join(lines)


def work(folder: str, shapes: list[list[int]]) -> None:
    """Answer jobs, a JSON object a line, with the package in `folder`."""
    sys.path.insert(0, folder)
    import cumla
    from cumla.bench.cases import Case
    from cumla.bench.dense import Workbench, check
    from cumla.bench.gpu import Gpu
    from cumla.bench.timing import time_cold

    assert cumla.__file__ is not None and cumla.__file__.startswith(folder), cumla.__file__
    answers, sys.stdout = sys.stdout, sys.stderr
    known = {tuple(shape): Case(*shape[:4], seed=([*shape, None])[4]) for shape in shapes}
    with Gpu() as gpu:
        bench = Workbench(gpu, tuple(known.values()))
        for line in sys.stdin:
            job = json.loads(line)
            case = known[tuple(job["case"])]
            inputs = bench.inputs(case)
            (call,) = inputs.calls()
            gpu.fill_bytes(inputs.out, 0xFF)
            gpu.fill_bytes(inputs.lse, 0xFF)
            call()
            try:
                check(gpu, inputs, case)
                answer: dict[str, Any] = {"us": time_cold(gpu, call, repeats=job["repeats"]).us}
            except Exception as error:
                answer = {"error": f"{folder}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    states = [State(folder, args.cases) for folder in (args.before, args.after)]
    try:
        before, after = (state.ask for state in states)
        print(table(args.cases, compare(before, after, args.cases, args.rounds, args.repeats)))
    finally:
        for state in states:
            state.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
