# SPDX-License-Identifier: Apache-2.0
"""Every kernel that could serve a shape, timed beside the one that the library chooses.

    python -m bench.variants records/NAME.json

Writes one row a shape: ``chosen``, and ``us`` by kernel: the median of the medians of nine rounds
in turns, L2 cold; ``failed`` instead of times where a result was wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.files import say, write
from bench.turns import in_turns
from cumla import MLADecodePlan
from cumla.bench import ceilings
from cumla.bench.cases import Case, grid
from cumla.bench.explain import key_of
from cumla.bench.gpu import Gpu
from cumla.bench.problem import Problem, check, lay_out
from cumla.bench.run import environment, measure, refuse_slow_kernels
from cumla.bench.section import Bench, Call, Row, Section
from cumla.launch.mla.shape import SWAPPED_ROWS, VARIANTS, MLADecodeKey

__all__ = ["SECTION", "admissible", "worst"]

_SHAPES: tuple[Case, ...] = (
    *grid((1, 4, 16, 128), (1, 2), (8, 16, 32, 64, 128), (1024, 8192)),
    *grid((1, 4), (1,), (16, 64, 128), (131072,)),
)
_ROUNDS = 9
_REPEATS = 8


def admissible(key: MLADecodeKey) -> tuple[str, ...]:
    """List the kernels that can serve a shape."""
    return tuple(name for name in VARIANTS if name != "swapped" or key.group_rows <= SWAPPED_ROWS)


def _measure(bench: Bench, case: Case) -> Row:
    key = key_of(case, bench.gpu.properties.sm_count)
    problem = lay_out(bench.gpu, case)
    calls = {name: _checked(bench, problem, name) for name in admissible(key)}
    time = partial(bench.time, repeats=_REPEATS, warmup=2)
    times = in_turns(time, tuple(calls.values()), rounds=_ROUNDS)
    us = {name: time.us for name, time in zip(calls, times, strict=True)}
    return {"chosen": key.variant, "us": us}


def _checked(bench: Bench, problem: Problem, variant: str) -> Call:
    """Make a call of one kernel, with its schedule ready, and check its result."""
    call = pinned(problem, variant)
    problem.poison(bench.gpu)
    call()
    check(bench.gpu, problem)
    return call


def pinned(problem: Problem, variant: str) -> Call:
    """Make a call of one kernel; the library has no public way to choose it."""
    q, kv_cache, block_table, kv_lens, out, lse = problem.arguments()
    kind: type[MLADecodePlan] = type("Pinned", (MLADecodePlan,), {"_variant": variant})
    plan = kind.from_arrays(q, kv_cache)
    plan.update(kv_lens)
    return partial(plan.run, q, kv_cache, block_table=block_table, out=out, lse=lse)


SECTION = Section("variants", _SHAPES, _measure, (), ())


def worst(rows: list[Row]) -> float:
    """Tell how much slower than the best kernel the chosen one is at worst: 1 is never."""
    timed = [row for row in rows if "us" in row]
    return max((row["us"][row["chosen"]] / min(row["us"].values()) for row in timed), default=1.0)


def run() -> Iterator[Row]:
    """Measure all shapes on the current GPU; yield the results so far."""
    refuse_slow_kernels()
    with Gpu() as gpu:
        bench = Bench(gpu, ceilings.measure(gpu), results=environment(gpu))
        for results in measure(bench, (SECTION,), say):
            yield results | {"worst": worst(results["variants"])}


def main() -> None:
    """Record the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    for results in run():
        write(file, results)
    say(f"worst choice: {results['worst']:.3f} x the best")


if __name__ == "__main__":
    main()
