# SPDX-License-Identifier: Apache-2.0
"""Ten thousand repeats that must agree bit for bit, compared on the device.

Each replay of a graph computes the schedule, attends, compares the results with those of the first
call and makes them NaN again. Meanwhile other work occupies multiprocessors at random, so that
thread blocks start in other orders; a second test puts random delays before every arrival on a
barrier in the kernel itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.tools import pages, variants
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.cases import Case, by_every_kernel
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.repeats import count_differences, decode_by

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

CASES = {
    "one request cut into all parts": (Case(batch=1, heads=16), [17_003]),
    "cuts in every request": (Case(batch=3, heads=64, q_len=2), [4000, 0, 9000]),
    "two row tiles": (Case(batch=2, heads=128), [3000, 2500]),
    "kv heads": (Case(batch=2, heads=8, kv_heads=8, dtype="float16"), [2000, 129]),
    "whole requests, several to a part": (Case(batch=300, heads=16), [70] * 300),
    "blocks by the dozen": (Case(batch=1, heads=16), [100_003]),
    "few rows, cut and whole": (Case(batch=5, heads=3, q_len=4), [9000, 65, 0, 3, 2500]),
    "pages of 1": (Case(batch=3, heads=16), [9000, 65, 700]),
    "pages of 1, blocks by the dozen": (Case(batch=1, heads=128), [100_003]),
    "pages of 1, several requests to a part": (Case(batch=300, heads=128), [70, 0, 200] * 100),
    "pages of 48": (Case(batch=3, heads=16), [9000, 65, 700]),
}
PAGES = {name: int(name.split()[2].rstrip(",")) for name in CASES if name.startswith("pages of")}
RUNS = by_every_kernel({name: case for name, (case, _) in CASES.items()})


def problem_of(name: str) -> Problem:
    case, lengths = CASES[name]
    problem = make_problem(cp, case, np.array(lengths))
    return pages.moved(problem, PAGES[name]) if name in PAGES else problem


@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_10000_repeats_agree_bit_for_bit(name: str, variant: str) -> None:
    assert count_differences(problem_of(name), 10_000, noise=True, variant=variant) == 0


@pytest.mark.parametrize(("name", "variant"), [run for run in RUNS if run[0] != "kv heads"])
def test_repeats_with_random_delays_at_every_barrier(name: str, variant: str) -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernel without them."""
    problem = problem_of(name)
    expected = decode_by(variant, problem)
    cp.cuda.Device().synchronize()
    with variants.installed(*variants.DELAYS, page_size=PAGES.get(name, 64)):
        delayed = decode_by(variant, problem)
        for one, other in zip(expected, delayed, strict=True):
            assert bool((bits_of(one) == bits_of(other)).all())
        assert count_differences(problem, 500, noise=False, variant=variant) == 0


@pytest.mark.parametrize(
    ("name", "variant", "bug"),
    [
        ("cuts in every request", "shared_blocks", "missing wait"),
        ("one request cut into all parts", "one_tile", "unwritten partial"),
        ("one request cut into all parts", "swapped", "swapped: unwritten partial"),
    ],
)
def test_the_comparison_finds(name: str, variant: str, bug: str) -> None:
    """The same loop on a kernel that reads too early, or something that was never written.

    Other missing waits would let loads overtake each other, and the kernel could hang.
    """
    with variants.installed(*variants.ALL[bug]), pytest.raises(AssertionError):
        assert count_differences(problem_of(name), 1000, noise=True, variant=variant) == 0
