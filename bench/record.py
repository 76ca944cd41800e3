# SPDX-License-Identifier: Apache-2.0
"""The record of a run: one JSON file that says what ran where, and what it took.

A run can be continued: rows that the file has are not measured again, so a run that lost its
GPU's context, or its time, is taken up by a new process.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from bench import ceilings, kernels
from bench.case import Case, Section
from bench.lab import Lab
from bench.measure import ROUNDS, Lost, Stopwatch, measure
from bench.sections import SECTIONS
from cumla.bench.cases import Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.run import environment, refuse_slow_kernels
from cumla.launch import module

FORMAT = 2
PROTOCOL = (
    "Every output is compared with float64 before it is timed, and after. Then cumla and the other "
    "libraries run in turns, each once a round, every round begins with another; the median of "
    f"{ROUNDS} rounds. 512 MiB are read through L2 before each call, and the GPU is kept busy "
    "until the host has launched it. Schedules are made beforehand for all, outputs are given "
    "where the library takes them. A library counts with the fastest of its variants that is "
    "right. Graph: each call alone in a CUDA graph, replayed in such turns"
)

Row = dict[str, Any]
Say = Callable[[str], None]


class Record:
    """The file, and what is in it."""

    def __init__(self, path: Path, say: Say) -> None:
        self.path, self.say = path, say
        self.content: Row = {}
        if path.exists():
            self.content = json.loads(path.read_text("utf-8"))

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
        part.replace(self.path)

    def note(self, line: str) -> None:
        """Say once what did not go as it should."""
        if line not in self.content["notes"]:
            self.content["notes"].append(line)
            self.say(f"  {line}")

    def begin(self, gpu: Gpu) -> None:
        """Say what runs here; `ValueError` if the file is about other kernels or another GPU."""
        found = environment(gpu)
        del found["digests"]  # of all kernels; the record has those that ran
        if not self.content:
            self.content = found | {
                "format": FORMAT,
                "protocol": PROTOCOL,
                "ceilings": ceilings.measure(gpu).to_json(),
                "libraries": {},
                "kernels": {},
                "notes": [],
                "sections": {},
            }
            return
        if self.content["machine"] != found["machine"]:
            raise ValueError(f"{self.path} is of another machine; name a new file")
        if changed := kernels.changed(self.content["kernels"]):
            raise ValueError(f"{self.path} is about another {changed[0]}; name a new file")
        self._settle_interrupted()

    def _settle_interrupted(self) -> None:
        """Give up on the row in which an earlier process ended."""
        at = self.content.pop("running", None)
        if at is not None:
            row = at["shape"] | {"failed": "the process ended while this row ran"}
            self.content["sections"].setdefault(at["section"], []).append(row)

    def has(self, section: Section, shape: Any) -> bool:
        rows = self.content["sections"].get(section.name, ())
        return any(all(row.get(key) == shape[key] for key in shape) for row in rows)

    @contextmanager
    def row(self, section: Section, shape: Any) -> Iterator[Row]:
        """Fill a row; what goes wrong with it leaves the others."""
        row = dict(shape)
        self.content["running"] = {"section": section.name, "shape": row.copy()}
        self.write()
        try:
            yield row
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            row["failed"] = f"{type(error).__name__}: {reason[:300]}"
            self.note(f"{section.name}, {section.label(shape)}: {row['failed']}")
            if isinstance(error, Lost) or "CUDA error" in reason or "illegal" in reason:
                raise Lost(reason) from error
        finally:
            del self.content["running"]
            self.content["sections"].setdefault(section.name, []).append(row)
            self._add_kernels()
            self.write()

    def _add_kernels(self) -> None:
        """Note the entry points of cumla that have run so far."""
        for spec, _ in module._loaded:
            if spec.package.startswith("cumla.cuda") and spec.entry not in self.content["kernels"]:
                nvrtc = self.content["machine"]["nvrtc"]
                self.content["kernels"][spec.entry] = kernels.known_of(spec, nvrtc)


def record(
    path: Path,
    say: Say,
    *,
    sections: tuple[Section, ...] = SECTIONS,
    rows: Callable[[str], bool] = lambda name: True,
    seconds: float = float("inf"),
    row_seconds: float = 120.0,
    rounds: int = ROUNDS,
) -> Row:
    """Measure what the file does not have yet of these sections; return its content.

    No row begins after `seconds`; a row that takes more than `row_seconds` ends the process.
    """
    end = monotonic() + seconds
    refuse_slow_kernels()
    lab, made = Lab(), Record(path, say)
    with Gpu() as gpu, gpu.torch_stream(lab.torch), lab.torch.no_grad():
        made.begin(gpu)
        watch = Stopwatch(gpu, lab.torch)
        limits = Ceilings.from_json(made.content["ceilings"])
        left = []
        for section in sections:
            for shape in section.shapes:
                name = f"{section.name} {section.label(shape)}"
                if made.has(section, shape) or not rows(name):
                    continue
                if monotonic() > end:
                    left.append(name)
                    continue
                with _at_most(row_seconds), made.row(section, shape) as row:
                    case = section.build(lab, **shape)
                    row |= floor(case, limits)
                    row |= measure(watch, case, partial(_note_of, made, name), rounds)
                    say(f"{name}: {said(row)}")
                case = None  # type: ignore[assignment]
                lab.torch.cuda.empty_cache()
        for line in lab.libraries.notes:
            made.note(line)
        made.content["libraries"] |= lab.libraries.versions()
        made.write()
    if left:
        say(f"left out for time: {', '.join(left)}")
    return made.content


def _note_of(made: Record, name: str, line: str) -> None:
    made.note(f"{name}: {line}")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End the process if this takes longer, wherever it is: kernels may wait for ever."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def floor(case: Case, limits: Ceilings) -> Row:
    """The least time by the ceilings of the run, and which of them it is."""
    tflops = limits.fp8_tflops if case.product == "float8_e4m3fn" else limits.matmul_tflops
    times = {
        "bytes": case.nbytes / (limits.read_gbps * 1e3),
        "products": case.flops / ((tflops or limits.matmul_tflops) * 1e6),
    }
    bound = max(times, key=lambda name: times[name])
    work = {"nbytes": case.nbytes, "flops": case.flops, "product": case.product}
    return work | {"floor_us": times[bound], "bound": bound}


def said(row: Row) -> str:
    """Sum up a row in a line."""
    beside = (
        f"{name} {of['us']:.1f} ({of['us'] / row['us']:.2f})" for name, of in row["peers"].items()
    )
    return ", ".join((f"{row['us']:.1f} us", *beside))
