# SPDX-License-Identifier: Apache-2.0
"""Run the modules of GPU tests that kernels without whole evidence need, some beside each other.

    python -m tests.gpu.tools.prove                      # says what is missing; needs no GPU
    python -m tests.gpu.tools.prove FOLDER [--at-once 8] [--timeout 400] [--kernels STEM...]

Each module has a process of its own, which takes turns over the visible GPUs, and writes its log
and evidence to FOLDER. What passed is then merged into the evidence. compute-sanitizer runs apart:
sanitize.py. Compile all kernels first (tests/gpu/README.md): processes would each compile them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.tools import record


def missing(sources: record.Sources, folder: Path = record.FOLDER) -> dict[str, list[str]]:
    """The problems of each kernel, and of the code around a launch, that is not proven."""
    found = {
        stem: record.problems(stem, folder, sources) for stem in (*sources.kernels, record.RUNTIME)
    }
    return {stem: problems for stem, problems in found.items() if problems}


def modules_for(stems: Iterable[str], sources: record.Sources, folder: Path) -> list[Path]:
    """The modules that these kernels need; first those that took longest."""
    names: set[str] = set()
    for stem in stems:
        of_runtime = stem == record.RUNTIME
        names |= set(sources.of_runtime) if of_runtime else sources.modules_of(stem)
    took = {
        name: part.get("seconds", 0.0)
        for run in record.read(folder, record.RUNS).values()
        for name, part in run["parts"].items()
    }
    paths = {path.name: path for path in record.GPU.rglob("test_*.py")}
    return [paths[name] for name in sorted(names, key=lambda name: (-took.get(name, 1e9), name))]


def run(modules: list[Path], out: Path, at_once: int, timeout: float) -> bool:
    """Run modules, `at_once` at a time, and say how each ended; whether all passed."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",")[:count] if given else [str(gpu) for gpu in range(count)]
    turns = itertools.cycle(range(len(gpus)))
    # Or the references of each process take all cores, and spin on them.
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)

    def one(module: Path) -> bool:
        first = next(turns)
        visible = ",".join(gpus[first:] + gpus[:first])  # tests of two GPUs see both
        log, start = out / f"{module.stem}.log", time.monotonic()
        command = [sys.executable, "-m", "pytest", str(module), "-q", "-n", "0"]
        command += ["--write-evidence", "--evidence-dir", str(out / module.stem)]
        with log.open("w", encoding="utf-8") as file:
            try:
                code = subprocess.run(
                    command,
                    cwd=record.ROOT,
                    env=few | os.environ | {"CUDA_VISIBLE_DEVICES": visible},
                    stdout=file,
                    stderr=file,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        last = (log.read_text("utf-8", errors="replace").strip().splitlines() or [""])[-1]
        said = last if code >= 0 else f"cut off after {timeout:.0f} s"
        print(f"{module.name}: {said} [{time.monotonic() - start:.0f} s]", flush=True)
        return code == 0

    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        passed = list(pool.map(one, modules))
    return all(passed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER")
    parser.add_argument("--at-once", type=int, default=8, metavar="N")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds a module may take")
    parser.add_argument("--kernels", nargs="+", metavar="STEM", help="instead of all that need it")
    parser.add_argument("--evidence-dir", type=Path, default=record.FOLDER, metavar="FOLDER")
    args = parser.parse_args()
    sources = record.Sources.now()
    found = missing(sources, args.evidence_dir)
    stems = args.kernels or list(found)
    if unknown := set(stems) - {*sources.kernels, record.RUNTIME}:
        parser.error(f"no kernel {', '.join(sorted(unknown))}; {', '.join(sources.kernels)} are")
    modules = modules_for(stems, sources, args.evidence_dir)
    if args.folder is None:
        for stem, problems in found.items():
            print(
                f"{stem}: {problems[0]}" + f" (and {len(problems) - 1} more)" * bool(problems[1:])
            )
        print(f"{len(modules)} modules:", *(path.name for path in modules))
        return
    passed = run(modules, args.folder, args.at_once, args.timeout)
    record.merge(args.evidence_dir, [args.folder / path.stem for path in modules], sources)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
