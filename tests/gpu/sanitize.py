# SPDX-License-Identifier: Apache-2.0
"""A small grid for compute-sanitizer, and what its four tools say about the kernels.

    python tests/gpu/sanitize.py --run FOLDER [--evidence-dir FOLDER]

runs the grid under memcheck, synccheck, racecheck and initcheck, calibrates the last two with
planted bugs, writes the logs to FOLDER and adds the verdicts to the evidence files. Single steps:

    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py [--plant BUG]
    python tests/gpu/sanitize.py --summarise FOLDER [--evidence-dir FOLDER]

The grid's inputs are made, and its results compared, on the host: only cumla's kernels run on the
GPU. Memory comes straight from cudaMalloc, so that initcheck knows what was never written.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import cumla  # noqa: E402
from tests.gpu import record, variants  # noqa: E402
from tests.gpu.cases import Case  # noqa: E402
from tests.gpu.problem import NUMPY_DTYPES, Problem, make_problem, typed  # noqa: E402

PLANTS = {
    "missing-wait": variants.MISSING_WAIT,
    "missing-tile-wait": variants.MISSING_TILE_WAIT,
    "missing-gather-sync": variants.MISSING_GATHER_SYNC,
    "unwritten-partial": variants.UNWRITTEN_PARTIAL,
}
RUNS = (  # tool, planted bug
    ("memcheck", None),
    ("synccheck", None),
    ("racecheck", None),
    ("initcheck", None),
    ("racecheck", "missing-wait"),
    ("racecheck", "missing-tile-wait"),
    ("racecheck", "missing-gather-sync"),
    ("initcheck", "unwritten-partial"),
)
SPLIT = "one request cut into many parts"
DONE = "sanitize: the grid is done"
TIMEOUT = 80.0  # seconds a run


def grid(multiprocessors: int) -> dict[str, tuple[Case, list[int]]]:
    """A handful of calls: cut, whole and empty requests, tails, kv heads, both dtypes."""
    return {
        SPLIT: (Case(batch=1, heads=16), [4300]),  # in which warps help each other to join
        "cut, ragged, causal, two row tiles": (
            Case(batch=3, heads=24, q_len=4),
            [700, 65, 0],
        ),
        "whole requests": (Case(batch=multiprocessors, heads=3), [65] * multiprocessors),
        "kv heads, fp16": (
            Case(batch=2, heads=8, kv_heads=2, q_len=2, dtype="float16"),
            [129, 63],
        ),
        "empty": (Case(batch=2, heads=5, q_len=2), [0, 0]),
        "lengths below q_len, float32 out": (
            Case(batch=2, heads=16, q_len=3, outputs="float32"),
            [1, 2],
        ),
    }


# --- on the GPU ----------------------------------------------------------------------------------


def run_grid(plant: str | None) -> None:
    """Run the grid; with a planted bug only the call in which it must show, unchecked."""
    import cupy

    cupy.cuda.set_allocator(None)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    cases = grid(properties["multiProcessorCount"])
    if plant is not None:
        case, lengths = cases[SPLIT]
        with variants.installed(PLANTS[plant]):
            decode(cupy, make_problem(np, case, np.array(lengths)))
        print(DONE)
        return
    for name, (case, lengths) in cases.items():
        problem = make_problem(np, case, np.array(lengths))
        for out, lse in decode(cupy, problem):
            problem.check(out, lse)
        print(f"sanitize: {name}: agrees", flush=True)
    for form in ("slots", "requests, rotated"):
        append_rows(cupy, form)
        print(f"sanitize: rows by {form}: agree", flush=True)
    print(DONE)


def append_rows(cupy: Any, form: str) -> None:
    """Write rows into a cache, and compare all of it; some of their places do not exist."""
    rng = np.random.default_rng(0)
    tokens, bf16 = 37, NUMPY_DTYPES["bfloat16"]
    rows = rng.standard_normal((tokens, 2, 576)).astype(bf16)
    cache = np.zeros((5, 16, 2, 576), bf16)
    arguments: dict[str, Any] = {"slot_mapping": rng.permutation(100)[:tokens] - 10}
    if form != "slots":
        quarter_turns = np.zeros((20, 64), np.float32)
        quarter_turns[:, 32:] = 1
        arguments = {
            "batch_indices": np.arange(tokens) % 3 - 1,
            "positions": np.arange(tokens) - 3,
            "block_table": np.array([[4, 2147480000, 1], [0, -1, 3]], np.int32),
            "cos_sin": quarter_turns,
        }
    there = cupy.asarray(cache.view(np.uint16))
    bits = cupy.asarray(rows.view(np.uint16))
    given = {name: cupy.asarray(array) for name, array in arguments.items()}
    cumla.append_mla_cache(typed(bits, "bfloat16"), typed(there, "bfloat16"), **given)
    cumla.reference.append_mla_cache(rows, cache, **arguments)
    np.testing.assert_array_equal(typed(there.get(), "bfloat16"), cache)


def decode(cupy: Any, problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results, on the host, of a call of its own and of a plan's run with allocated outputs."""
    case = problem.case
    q, kv = (typed(cupy.asarray(x), case.dtype) for x in (problem.q_bits, problem.kv_bits))
    table, lengths = cupy.asarray(problem.table), cupy.asarray(problem.lengths)
    options: dict[str, Any] = {}
    if case.outputs == "float32":
        options["out"] = cupy.empty(problem.out_shape, dtype=cupy.float32)
    plan = cumla.MLADecodePlan.from_arrays(q, kv, causal=case.causal)
    plan.update(lengths)
    results = [
        cumla.mla_decode(q, kv, table, lengths, causal=case.causal, **options),
        plan.run(q, kv, table, lengths),
    ]
    host = []
    for out, lse in results:
        dtype = str(out.dtype)
        bits = out.view(np.uint32 if dtype == "float32" else np.uint16).get()
        host.append(
            (bits.view(np.float32) if dtype == "float32" else typed(bits, dtype), lse.get())
        )
    return host


# --- compute-sanitizer ---------------------------------------------------------------------------


def log_name(tool: str, plant: str | None) -> str:
    return f"{tool}-{plant}.log" if plant else f"{tool}.log"


def run_all(folder: Path, timeout: float) -> None:
    """Run every tool, one after the other; a log each, with its time at the end."""
    command = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    warm = [sys.executable, str(Path(__file__).resolve())]
    subprocess.run(warm, cwd=ROOT, check=True, timeout=timeout)  # and fills the kernel cache
    for tool, plant in RUNS:
        arguments = [command, "--tool", tool, "--print-limit", "1000"]
        if tool == "memcheck":  # libraries probe for driver functions that are not there
            arguments += ["--report-api-errors", "no"]
        arguments += warm
        arguments += ["--plant", plant] if plant else []
        start = time.monotonic()
        path = folder / log_name(tool, plant)
        with path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                arguments, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
                process.wait()
        with path.open("a", encoding="utf-8") as log:
            log.write(f"\n[{time.monotonic() - start:.1f} s]\n")
        print(f"{path.name}: {time.monotonic() - start:.1f} s", flush=True)


_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_KERNEL = re.compile(r"\b((?:mla|append)_\w+?)(?:\+0x[0-9a-f]+|\()")
_HEAD = re.compile(r"^========= (?!COMPUTE|ERROR SUMM|RACECHECK SUMM|\s)(.+)$", re.MULTILINE)


def read_log(text: str) -> dict[str, Any]:
    """What one run of a tool found: complete or not, errors, warnings, kinds of report."""
    errors, hazards = _ERRORS.search(text), _HAZARDS.search(text)
    kinds = collections.Counter(_kind(head) for head in _HEAD.findall(text))
    found: dict[str, Any] = {
        "complete": DONE in text and bool(errors or hazards),
        "errors": int(hazards[2]) if hazards else int(errors[1]) if errors else 0,
        "warnings": int(hazards[3]) if hazards else 0,
        "kernels": dict(sorted(collections.Counter(_KERNEL.findall(text)).items())),
        "kinds": dict(kinds.most_common(8)),
    }
    seconds = re.search(r"^\[([\d.]+) s\]$", text, re.MULTILINE)
    if seconds:
        found["seconds"] = float(seconds[1])
    return found


def _kind(head: str) -> str:
    """The first line of a report without its addresses and numbers."""
    return re.sub(r"0x[0-9a-f]+|\b\d+\b", "#", head).strip()


def verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """One entry a tool: clean, findings or incomplete, and what it made of the planted bugs."""
    result: dict[str, dict[str, Any]] = {}
    for tool, plant in RUNS:
        path = folder / log_name(tool, plant)
        found = read_log(path.read_text("utf-8", errors="replace") if path.exists() else "")
        if plant is None:
            clean = not found["errors"] and not found["warnings"]
            verdict = "clean" if clean else "findings"
            result[tool] = {"verdict": verdict if found["complete"] else "incomplete"} | found
        else:
            seen = (
                found["errors"]
                + found["warnings"]
                - (result[tool]["errors"] + result[tool]["warnings"])
            )
            planted = result[tool].setdefault("planted", {})
            planted[plant] = {"found": seen > 0} | found
    return result


def summarise(folder: Path, evidence: Path) -> None:
    """Print the verdicts and add them to the evidence files."""
    found = verdicts(folder)
    for tool, entry in found.items():
        numbers = f"{entry['errors']} errors, {entry['warnings']} warnings"
        print(f"{tool:<10} {entry['verdict']:<11} {numbers}")
        for kind, count in entry["kinds"].items():
            print(f"{'':<10} {count} x {kind}")
        for bug, planted in entry.get("planted", {}).items():
            word = "found" if planted["found"] else "NOT FOUND"
            print(f"{'':<10} planted {bug}: {word} ({planted['errors']} errors)")
    record.write(evidence, sanitizer=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--plant", choices=PLANTS, help="run one call with this bug in the kernel")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run all tools, then summarise")
    parser.add_argument("--summarise", type=Path, metavar="FOLDER", help="read the logs there")
    parser.add_argument("--evidence-dir", type=Path, default=record.FOLDER, metavar="FOLDER")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds a tool may take")
    arguments = parser.parse_args()
    if arguments.run:
        run_all(arguments.run, arguments.timeout)
    folder = arguments.run or arguments.summarise
    if folder:
        summarise(folder, arguments.evidence_dir)
    else:
        run_grid(arguments.plant)


if __name__ == "__main__":
    main()
