# SPDX-License-Identifier: Apache-2.0
"""Divisors: the quotient that cuda/split/division.cuh makes of them, against division."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.launch.split.division import divisor_of
from tests.launch.kernel_text import modelled

LIMIT = 1 << 31  # of what is divided


def quotients(x: np.ndarray, number: int) -> np.ndarray:
    """Return what a kernel computes, in its 32 bits."""
    magic, shift = divisor_of(number).values()
    assert magic < 1 << 32
    assert shift < 32
    twice = x.astype(np.uint32) * np.uint32(2)
    high = (twice.astype(np.uint64) * np.uint64(magic)) >> np.uint64(32)
    return (high.astype(np.uint32) >> np.uint32(shift)).astype(np.int64)


def assert_exact(x: np.ndarray, number: int) -> None:
    wrong = x[quotients(x, number) != x // number]
    assert wrong.size == 0, f"{wrong[:3]} / {number}"


def test_the_quotient_is_that_of_the_kernels() -> None:
    assert modelled("split/division.cuh", "division") == "6e008aa9"


def test_every_small_number_at_the_ends_of_its_quotients() -> None:
    """Multiples are where a quotient that is too low or too high shows first."""
    rng = np.random.default_rng(0)
    for number in range(1, 4097):
        last = (LIMIT - 1) // number
        steps = np.unique(np.r_[:4, rng.integers(0, last + 1, 200), last - 3 : last + 1])
        near = (steps[:, None] * number + np.array([-1, 0, 1])).ravel()
        x = np.r_[near, rng.integers(0, LIMIT, 100), 0, LIMIT - 1]
        assert_exact(x[(x >= 0) & (x < LIMIT)], number)


@given(st.integers(1, LIMIT), st.lists(st.integers(0, LIMIT - 1), min_size=1))
def test_any_number(number: int, numbers: list[int]) -> None:
    x = np.array(numbers)
    ends = x // number * number
    assert_exact(np.r_[x, ends, np.maximum(ends - 1, 0)], number)


@pytest.mark.parametrize("number", [2**k + d for k in range(31) for d in (-1, 0, 1) if 2**k + d])
def test_numbers_next_to_powers_of_two(number: int) -> None:
    """Where the shift changes, and where the factor is largest."""
    last = (LIMIT - 1) // number * number
    assert_exact(np.array([0, max(last - 1, 0), last, LIMIT - 2, LIMIT - 1]), number)


def test_the_largest_number() -> None:
    assert_exact(np.array([0, 1, LIMIT - 1]), LIMIT)
